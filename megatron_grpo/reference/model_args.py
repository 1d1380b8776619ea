"""Arguments of reference model and teacher: the policy's, with another parallel configuration or architecture."""

from argparse import Namespace
from typing import Any

from megatron_grpo.data.arguments import check_budgets
from megatron_grpo.data.routing import teacher_routes
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_grpo.models.arguments import check_model, resolve_model_sizes
from megatron_grpo.models.fp8_training import check_fp8_sizes
from megatron_grpo.models.rope import check_rope
from megatron_grpo.parallel.arguments import check_parallel_flags, parallel_steps
from megatron_grpo.reference.arguments import SIZES, has_own_parallel_configuration
from megatron_grpo.utils.arguments import replaced, resolved
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import divides, flag
from megatron_grpo.weights import families, hf
from megatron_grpo.weights.arguments import ARCHITECTURE, architecture_of, check_family, default_architecture

# Arguments that divide, overlap or recompute the policy's layers, and their values for a model with its own parallel
# configuration.
_WITHOUT_POLICY_PIPELINE: dict[str, Any] = {
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "overlap_p2p_comm": False,
    "overlap_p2p_communication_warmup_flush": False,
    "align_param_gather": False,
    "use_tp_pp_dp_mapping": False,
    "cp_comm_type": None,
    "moe_layer_recompute": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
}

# Arguments of a model without training and without router replay.
_WITHOUT_TRAINING: dict[str, Any] = {
    "explicit": frozenset(),
    "router_replay_mode": "disabled",
    "overlap_param_gather": False,
    "mtp_loss_scaling_factor": 0.0,
    "perform_initialization": False,
    "lora_rank": None,
}


def reference_args(args: Namespace) -> Namespace:
    """Return the reference model's arguments, for validated ``args``; raise GrpoError when its sizes do not fit."""
    own = replaced(args, **_WITHOUT_TRAINING)
    if args.ref_micro_batch_size:
        own = replaced(own, micro_batch_size=args.ref_micro_batch_size, max_tokens_per_microbatch=None)
    if has_own_parallel_configuration(args):
        # The layers of --exact-log-probs are not for every parallel configuration.
        own = replaced(_with_parallel_configuration(own, args, "ref"), exact_log_probs=False)
    _check_micro_batches(own, "ref", "--ref-micro-batch-size")
    if args.ref_load_hf:
        config = hf.read_config(args.ref_load_hf)
        theirs = families.for_hf_config(config, args.model_family).args_from_hf(config)
        for dest in (dest for dest in ARCHITECTURE if dest != "max_position_embeddings"):
            if theirs.get(dest) is not None and theirs[dest] != getattr(args, dest):
                raise GrpoError(
                    f"--ref-load-hf {args.ref_load_hf}: its config.json says {flag(dest)} {theirs[dest]}, the policy "
                    f"has {getattr(args, dest)}: give a reference model with the policy's architecture"
                )
    return own


def teacher_args(args: Namespace) -> list[Namespace]:
    """Return the arguments of each teacher of --teacher-load-hf: its architecture, its parallel configuration.

    ``args``: validated arguments. Raises GrpoError when its sizes do not fit, or its vocabulary has another size than
    the policy's.
    """
    places = teacher_routes("--teacher-load-hf", args.teacher_load_hf).values()
    return [_teacher_args(args, directory) for directory in places]


def _teacher_args(args: Namespace, directory: str) -> Namespace:
    # Its log-probabilities are targets: quantization would only add noise. A reference quantizes as the policy does,
    # so that the KL of equal weights is 0.
    plain = {"load_hf": directory, "fp8_format": None, "sync_ref_model": False, "exact_log_probs": False}
    own = replaced(args, **_WITHOUT_TRAINING | plain | default_architecture())
    own = replaced(own, **architecture_of(own, directory, args.model_family))  # of a text policy, read as text
    if own.vocab_size != args.vocab_size:
        raise GrpoError(
            f"--teacher-load-hf {directory} has vocab_size {own.vocab_size}, the policy has {args.vocab_size}: "
            "give a teacher with the policy's tokenizer"
        )
    own = _with_parallel_configuration(own, args, "teacher")
    _check_micro_batches(own, "teacher", "--micro-batch-size")
    return own


def check_teacher_tokenizer(directory: str, tokenizer: Tokenizer) -> None:
    """Raise GrpoError when a teacher's directory holds a tokenizer with other token ids than the policy's."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not HuggingFaceTokenizer.is_in(directory):
        return
    if HuggingFaceTokenizer(directory).vocabulary() != tokenizer.vocabulary():
        raise GrpoError(
            f"--teacher-load-hf {directory} has another tokenizer than {tokenizer.directory}: give a teacher with "
            "the same token ids"
        )


def _with_parallel_configuration(own: Namespace, args: Namespace, prefix: str) -> Namespace:
    """Return a model's arguments with the parallel configuration of --ref-* or --teacher-*, which fits the model."""
    given = {dest: getattr(args, f"{prefix}_{dest}") for dest in SIZES}
    sizes = {dest: getattr(args, dest) if size is None else size for dest, size in given.items()}
    sizes["expert_tensor_parallel_size"] = given["expert_tensor_parallel_size"]  # None: TP
    if not own.num_experts:
        sizes |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    tp, pp, cp = (sizes[dest] for dest in SIZES[:3])
    if args.world_size % (tp * pp * cp):
        raise GrpoError(
            f"world_size ({args.world_size}) must be divisible by the product of --{prefix}-*-parallel-size "
            f"({tp * pp * cp}): TP {tp} x PP {pp} x CP {cp}"
        )
    sizes |= _WITHOUT_POLICY_PIPELINE | {
        "data_parallel_size": args.world_size // (tp * pp * cp),
        "hybrid_context_parallel": own.hybrid_context_parallel and cp > 1,
        "sequence_parallel": tp > 1,
    }

    def check_equal_stages(own: Namespace) -> None:
        divides(own, "num_layers", pp, f"--{prefix}-pipeline-model-parallel-size")

    try:
        return resolved(
            replaced(own, **sizes),
            check_parallel_flags,
            check_model,
            resolve_model_sizes,
            check_family,
            check_equal_stages,
            *parallel_steps(),
            check_fp8_sizes,
            check_rope,
            check_budgets,
        )
    except GrpoError as error:
        what = {"ref": "reference model", "teacher": "teacher"}[prefix]
        raise GrpoError(f"{what} with --{prefix}-*-parallel-size: {error}") from error


def _check_micro_batches(own: Namespace, prefix: str, micro_batch_flag: str) -> None:
    """Raise GrpoError unless a rollout fills whole micro-batches on every data-parallel rank of the model."""
    dp, rollout = own.data_parallel_size, own.generation_batch_size
    if own.max_tokens_per_microbatch or own.logprobs_max_tokens_per_microbatch:
        if rollout < dp:
            raise GrpoError(f"generation_batch_size ({rollout}) must be at least the {prefix} model's DP ({dp})")
        return
    stages = own.pipeline_model_parallel_size if own.num_virtual_stages_per_pipeline_rank else 1
    if rollout % (own.micro_batch_size * dp * stages):
        interleaved = f" x PP ({stages}), because virtual stages need a multiple of PP" if stages > 1 else ""
        raise GrpoError(
            f"generation_batch_size ({rollout}) must be divisible by {micro_batch_flag} ({own.micro_batch_size}) x DP "
            f"({dp}) of the {prefix} model{interleaved}: change one, or give --logprobs-max-tokens-per-microbatch"
        )
