"""Arguments of reference model and teacher: the policy's, with another parallel configuration or architecture."""

import copy
from argparse import Namespace

from megatron_grpo.data.arguments import check_budgets
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_grpo.models.arguments import check_model, padded_vocab_size
from megatron_grpo.models.fp8_training import check_fp8_sizes
from megatron_grpo.models.rope import check_rope
from megatron_grpo.parallel.arguments import check_parallel_flags, check_parallelism
from megatron_grpo.reference.arguments import SIZES, has_own_parallel_configuration
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import divides, flag
from megatron_grpo.weights import families, hf
from megatron_grpo.weights.arguments import ARCHITECTURE, check_family, default_architecture, merge_architecture

# Arguments that divide, overlap or recompute the policy's layers, and their values for a model with its own parallel
# configuration.
_WITHOUT_POLICY_PIPELINE = {
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


def reference_args(args: Namespace) -> Namespace:
    """Return the reference model's arguments, for validated ``args``; raise GrpoError when its sizes do not fit."""
    own = _without_training(args)
    if args.ref_micro_batch_size:
        own.micro_batch_size, own.max_tokens_per_microbatch = args.ref_micro_batch_size, None
    if has_own_parallel_configuration(args):
        _set_parallel_configuration(own, args, "ref")
    _check_micro_batches(own, "ref", "--ref-micro-batch-size")
    if args.ref_load_hf:
        config = hf.read_config(args.ref_load_hf)
        theirs = families.for_hf_config(config).args_from_hf(config)
        for dest in (dest for dest in ARCHITECTURE if dest != "max_position_embeddings"):
            if theirs.get(dest) is not None and theirs[dest] != getattr(args, dest):
                raise GrpoError(
                    f"--ref-load-hf {args.ref_load_hf}: its config.json says {flag(dest)} {theirs[dest]}, the policy "
                    f"has {getattr(args, dest)}: give a reference model with the policy's architecture"
                )
    return own


def teacher_args(args: Namespace) -> Namespace:
    """Return the arguments of the teacher of --teacher-load-hf: its architecture, its parallel configuration.

    ``args``: validated arguments. Raises GrpoError when its sizes do not fit, or its vocabulary has another size than
    the policy's.
    """
    own, directory = _without_training(args), args.teacher_load_hf
    # Its log-probabilities are targets: quantization would only add noise. A reference quantizes as the policy does,
    # so that the KL of equal weights is 0.
    own.load_hf, own.fp8_format, own.share_prompts = directory, None, False
    own.sync_ref_model = False  # it does not follow the policy
    vars(own).update(default_architecture())
    config = hf.read_config(directory)
    merge_architecture(own, families.for_hf_config(config).args_from_hf(config), f"{directory}/config.json")
    if own.vocab_size != args.vocab_size:
        raise GrpoError(
            f"--teacher-load-hf {directory} has vocab_size {own.vocab_size}, the policy has {args.vocab_size}: "
            "give a teacher with the policy's tokenizer"
        )
    _set_parallel_configuration(own, args, "teacher")
    _check_micro_batches(own, "teacher", "--micro-batch-size")
    return own


def check_teacher_tokenizer(args: Namespace, tokenizer: Tokenizer) -> None:
    """Raise GrpoError when the teacher's directory holds a tokenizer with other token ids than the policy's."""
    directory = args.teacher_load_hf
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not HuggingFaceTokenizer.is_in(directory):
        return
    if HuggingFaceTokenizer(directory).vocabulary() != tokenizer.vocabulary():
        raise GrpoError(
            f"--teacher-load-hf {directory} has another tokenizer than {tokenizer.directory}: give a teacher with "
            "the same token ids"
        )


def _without_training(args: Namespace) -> Namespace:
    """Return a copy of the arguments for a model without training and without router replay."""
    own = copy.copy(args)
    own.explicit, own.router_replay_mode, own.overlap_param_gather = frozenset(), "disabled", False
    own.mtp_loss_scaling_factor, own.perform_initialization, own.lora_rank = 0.0, False, None
    return own


def _set_parallel_configuration(own: Namespace, args: Namespace, prefix: str) -> None:
    """Set a model's parallel configuration from --ref-* or --teacher-*; check it with the rules for the policy."""
    for dest in SIZES:
        size = getattr(args, f"{prefix}_{dest}")
        setattr(own, dest, getattr(args, dest) if size is None else size)
    own.expert_tensor_parallel_size = getattr(args, f"{prefix}_expert_tensor_parallel_size")  # None: TP
    vars(own).update(_WITHOUT_POLICY_PIPELINE)
    own.hybrid_context_parallel &= own.context_parallel_size > 1
    if not own.num_experts:
        own.expert_model_parallel_size, own.expert_tensor_parallel_size = 1, None
    own.sequence_parallel = own.tensor_model_parallel_size > 1
    tp, pp, cp = (getattr(own, dest) for dest in SIZES[:3])
    if args.world_size % (tp * pp * cp):
        raise GrpoError(
            f"world_size ({args.world_size}) must be divisible by the product of --{prefix}-*-parallel-size "
            f"({tp * pp * cp}): TP {tp} x PP {pp} x CP {cp}"
        )
    own.data_parallel_size = args.world_size // (tp * pp * cp)
    try:
        check_parallel_flags(own)
        check_model(own)
        check_family(own)
        divides(own, "num_layers", pp, f"--{prefix}-pipeline-model-parallel-size")  # its stages have equal sizes
        check_parallelism(own)
        check_fp8_sizes(own)
        check_rope(own)
        check_budgets(own)
    except GrpoError as error:
        what = {"ref": "reference model", "teacher": "teacher"}[prefix]
        raise GrpoError(f"{what} with --{prefix}-*-parallel-size: {error}") from error
    own.padded_vocab_size = padded_vocab_size(own)


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
