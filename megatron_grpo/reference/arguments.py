"""Flags of reference model and teacher, and the rules that need no other input than flags."""

from argparse import Namespace
from urllib.parse import urlsplit

from megatron_grpo.data.routing import teacher_routes
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, PATH, POSITIVE, POSITIVE_SHARE, SECONDS, FlagRow
from megatron_grpo.utils.rules import excludes, flag, needs

_SIZES = (
    ("tensor-model-parallel-size", "tensor-parallel size of the {}"),
    ("pipeline-model-parallel-size", "pipeline-parallel size of the {}"),
    ("context-parallel-size", "context-parallel size of the {}"),
    ("expert-model-parallel-size", "expert-parallel size of the {}"),
)


def _parallel_size_flags(prefix: str, model: str) -> tuple[FlagRow, ...]:
    sizes = tuple((f"--{prefix}-{size}", COUNT, None, f"{text.format(model)} [the policy's]") for size, text in _SIZES)
    experts = (
        f"--{prefix}-expert-tensor-parallel-size",
        COUNT,
        None,
        f"tensor-parallel size of the {model}'s experts [TP of the {model}]",
    )
    return (*sizes, experts)


REFERENCE_AND_TEACHER: tuple[FlagRow, ...] = (
    ("--ref-load", PATH, None, "Megatron checkpoint of the reference model [the policy's initial weights]"),
    ("--ref-load-hf", PATH, None, "Hugging Face model directory of the reference model [the policy's initial weights]"),
    *_parallel_size_flags("ref", "reference model"),
    ("--ref-micro-batch-size", COUNT, None, "completions in a micro-batch of the reference model [the policy's]"),
    (
        "--logprobs-max-tokens-per-microbatch",
        COUNT,
        None,
        "maximum tokens in a micro-batch of the forward-only passes: old, reference and teacher log-probabilities "
        "[--max-tokens-per-microbatch]",
    ),
    ("--sync-ref-model", bool, False, "update the reference model towards the policy (EMA update, TR-DPO)"),
    ("--ref-model-sync-steps", COUNT, 512, "policy updates between two EMA updates of the reference model"),
    ("--ref-model-mixup-alpha", POSITIVE_SHARE, 0.6, "alpha in: reference = alpha x policy + (1 - alpha) x reference"),
    (
        "--teacher-load-hf",
        [PATH],
        None,
        "Hugging Face model directory of a teacher with the policy's tokenizer; of several SOURCE=DIR, by data_source",
    ),
    *_parallel_size_flags("teacher", "teacher"),
    (
        "--teacher-server",
        [str],
        None,
        "URL of a vLLM server that computes the teacher's log-probabilities; of several SOURCE=URL, by data_source",
    ),
    ("--teacher-server-timeout", SECONDS, 240.0, "time-out of a request (one completion) to the server, seconds"),
    (
        "--teacher-kl-coef",
        POSITIVE,
        None,
        "coefficient of log p(teacher) - log p(old) in each token's advantage",
    ),
)

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def has_own_parallel_configuration(args: Namespace) -> bool:
    """Return whether the reference model has another parallel configuration than the policy."""
    return any(getattr(args, f"ref_{size}") not in (None, getattr(args, size) or 1) for size in SIZES)


def check_reference_models(args: Namespace) -> None:
    """Raise GrpoError for flags of reference model and teacher that conflict or have no effect."""
    sizes = {prefix: [f"{prefix}_{size}" for size in SIZES] for prefix in ("ref", "teacher")}
    for dest in ("ref_load", "ref_load_hf", "ref_micro_batch_size", "sync_ref_model", *sizes["ref"]):
        if not args.with_reference:
            needs(args, dest, "beta", "there is no reference model without the KL term")
    if args.sft_iters and args.lora_rank and args.with_reference and not args.reference_adapter:
        raise GrpoError(
            "--sft-iters with adapters and a reference (--beta above 0, or --loss-type dpo): the reference is the "
            "model without adapters, before the supervised updates: give --reference-adapter, or no reference"
        )
    excludes(args, "ref_load", "ref_load_hf", "the reference model has one origin")
    excludes(args, "ref_micro_batch_size", "logprobs_max_tokens_per_microbatch", "both set the size of micro-batches")
    _check_ema_update(args)
    _check_teacher(args, sizes["teacher"])


def check_reference_of_model(args: Namespace) -> None:
    """Raise GrpoError for what a reference or teacher of this policy cannot have."""
    if args.gkd_logits_topk is not None and args.gkd_logits_topk > args.vocab_size:
        raise GrpoError(
            f"--gkd-logits-topk ({args.gkd_logits_topk}) is larger than the vocabulary ({args.vocab_size}): leave it "
            "out for the whole vocabulary"
        )
    for dest in (f"ref_{size}" for size in SIZES if size.startswith("expert")):
        if not args.num_experts and (getattr(args, dest) or 1) > 1:
            raise GrpoError(f"{flag(dest)} needs --num-experts: the model has no experts")
    if args.vision_config and args.with_reference and has_own_parallel_configuration(args):
        raise GrpoError(
            f"a reference model of family {args.model_family} has the parallel configuration of the policy, because "
            "only the policy's ranks read images: leave --ref-tensor-model-parallel-size and its like out"
        )


def _check_ema_update(args: Namespace) -> None:
    for dest in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
        needs(args, dest, "sync_ref_model", "the reference model is not updated without it")
    if args.sync_ref_model and args.ref_model_sync_steps % args.updates_per_rollout:
        raise GrpoError(
            f"--ref-model-sync-steps ({args.ref_model_sync_steps}) must be divisible by the updates per rollout "
            f"({args.updates_per_rollout}): the reference model is updated between rollouts"
        )


def _check_teacher(args: Namespace, sizes: list[str]) -> None:
    excludes(args, "teacher_load_hf", "teacher_server", "all teachers are of one kind")
    for dest in sizes:
        needs(args, dest, "teacher_load_hf", "it sets the parallel configuration of that model")
    needs(args, "teacher_server_timeout", "teacher_server", "it is the time-out of that server's requests")
    for dest in ("teacher_load_hf", "teacher_server") if args.gkd_beta is None else ():
        needs(
            args, dest, "teacher_kl_coef", "it has no effect without a coefficient (1, for example), or --loss-type gkd"
        )
    if args.teacher_kl_coef and not (args.teacher_load_hf or args.teacher_server):
        raise GrpoError("--teacher-kl-coef needs --teacher-load-hf or --teacher-server: there is no teacher")
    teacher_routes("--teacher-load-hf", args.teacher_load_hf)
    servers = teacher_routes("--teacher-server", args.teacher_server)
    for server in servers.values():
        url = urlsplit(server)
        if url.scheme not in ("http", "https") or not url.hostname or url.path.rstrip("/") not in ("", "/v1"):
            raise GrpoError(
                f"--teacher-server: {url.hostname or 'it'} is not the address of a server: give http://HOST:PORT"
            )
        if url.username or url.password:
            raise GrpoError("--teacher-server must not contain a password, because it is printed and saved: remove it")
    if servers and args.temperature != 1:
        raise GrpoError(
            f"--teacher-server with --temperature {args.temperature}: a server returns the log-probabilities of "
            "a prompt at temperature 1 only; give --temperature 1, or --teacher-load-hf"
        )
