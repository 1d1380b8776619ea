"""Flags of reference and teacher, and the rules about them that flags alone decide."""

from argparse import Namespace
from urllib.parse import urlsplit

from megatron_grpo.utils.arguments import FlagRow
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import excludes, flag, needs, positive

_SIZES = (
    ("tensor-model-parallel-size", "tensor-parallel ranks of the {}"),
    ("pipeline-model-parallel-size", "pipeline stages of the {}"),
    ("context-parallel-size", "context-parallel ranks of the {}"),
    ("expert-model-parallel-size", "ranks that share out the {}'s experts"),
)


def _parallel_size_flags(prefix: str, model: str) -> tuple[FlagRow, ...]:
    sizes = tuple((f"--{prefix}-{size}", int, None, f"{text.format(model)} [the policy's]") for size, text in _SIZES)
    experts = (
        f"--{prefix}-expert-tensor-parallel-size",
        int,
        None,
        f"ranks that cut each expert of the {model} [TP]",
    )
    return (*sizes, experts)


REFERENCE_AND_TEACHER: tuple[FlagRow, ...] = (
    ("--ref-load", str, None, "Megatron checkpoint of the reference policy [the first weights]"),
    ("--ref-load-hf", str, None, "Hugging Face model directory of the reference policy [the first weights]"),
    *_parallel_size_flags("ref", "reference"),
    ("--ref-micro-batch-size", int, None, "completions in a micro-batch of the reference [the policy's]"),
    (
        "--logprobs-max-tokens-per-microbatch",
        int,
        None,
        "token budget of passes without gradients: old policy, reference, teacher [--max-tokens-per-microbatch]",
    ),
    ("--sync-ref-model", bool, False, "let the reference follow the policy"),
    ("--ref-model-sync-steps", int, 512, "updates between two moves of the reference"),
    ("--ref-model-mixup-alpha", float, 0.6, "reference = it x policy + (1 - it) x reference"),
    ("--teacher-load-hf", str, None, "Hugging Face model directory of a teacher with the policy's tokenizer"),
    *_parallel_size_flags("teacher", "teacher"),
    ("--teacher-server", str, None, "vLLM server that computes the teacher's log-probabilities"),
    ("--teacher-server-timeout", float, 240.0, "seconds that the server may take for one completion"),
    ("--teacher-kl-coef", float, None, "weight of log p(teacher) - log p(old) in the advantage of each token"),
)

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def has_own_parallel_configuration(args: Namespace, prefix: str) -> bool:
    """Whether a frozen model, ``ref`` or ``teacher``, has another layout than the policy."""
    return any(getattr(args, f"{prefix}_{size}") not in (None, getattr(args, size) or 1) for size in SIZES)


def check_reference_models(args: Namespace) -> None:
    """Refuse flags of reference and teacher that do not go together, or would do nothing; GrpoError."""
    sizes = {prefix: [f"{prefix}_{size}" for size in SIZES] for prefix in ("ref", "teacher")}
    positive(args, " ".join(sizes["ref"] + sizes["teacher"]))
    positive(args, "ref_micro_batch_size logprobs_max_tokens_per_microbatch ref_model_sync_steps")
    positive(args, "teacher_kl_coef teacher_server_timeout")
    for dest in ("ref_load", "ref_load_hf", "ref_micro_batch_size", "sync_ref_model", *sizes["ref"]):
        needs(args, dest, "beta", "without the KL term there is no reference policy")
    excludes(args, "ref_load", "ref_load_hf", "the reference has one origin")
    excludes(args, "ref_micro_batch_size", "logprobs_max_tokens_per_microbatch", "each says how micro-batches are made")
    for prefix in sizes:
        experts = [f"{prefix}_{size}" for size in SIZES if size.startswith("expert")]
        for dest in experts if prefix == "ref" and not args.num_experts else []:
            if (getattr(args, dest) or 1) > 1:
                raise GrpoError(f"{flag(dest)} needs --num-experts: the model has no experts")
    _check_ema_update(args)
    _check_teacher(args, sizes["teacher"])


def _check_ema_update(args: Namespace) -> None:
    for dest in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
        needs(args, dest, "sync_ref_model", "without it the reference stays where it is")
    if not 0 < args.ref_model_mixup_alpha <= 1:
        raise GrpoError(
            f"--ref-model-mixup-alpha ({args.ref_model_mixup_alpha}) must be greater than 0 and at most 1: the "
            "policy's share in the moved reference"
        )
    if args.sync_ref_model and args.ref_model_sync_steps % args.updates_per_rollout:
        raise GrpoError(
            f"--ref-model-sync-steps ({args.ref_model_sync_steps}) must be divisible by the updates per rollout "
            f"({args.updates_per_rollout}): the reference moves between rollouts"
        )


def _check_teacher(args: Namespace, sizes: list[str]) -> None:
    excludes(args, "teacher_load_hf", "teacher_server", "there is one teacher")
    for dest in sizes:
        needs(args, dest, "teacher_load_hf", "it says how that model is spread over the ranks")
    needs(args, "teacher_server_timeout", "teacher_server", "nothing else is waited for")
    for dest in ("teacher_load_hf", "teacher_server"):
        needs(args, dest, "teacher_kl_coef", "the teacher would have no effect; give its weight, such as 1")
    if args.teacher_kl_coef and not (args.teacher_load_hf or args.teacher_server):
        raise GrpoError("--teacher-kl-coef needs --teacher-load-hf or --teacher-server: there is no teacher")
    if args.teacher_server:
        url = urlsplit(args.teacher_server)
        if url.scheme not in ("http", "https") or not url.hostname or url.path.rstrip("/") not in ("", "/v1"):
            raise GrpoError(f"--teacher-server: {url.hostname or 'it'} is no server's address: give http://HOST:PORT")
        if url.username or url.password:
            raise GrpoError("--teacher-server must not hold a password, which would be printed and saved")
        if args.temperature != 1:
            raise GrpoError(
                f"--teacher-server with --temperature {args.temperature}: a server gives a prompt's log-probabilities "
                "at temperature 1 only; give --temperature 1, or --teacher-load-hf"
            )
