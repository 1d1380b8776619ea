"""Validation of the arguments: calls the rules of all folders in order, and checks the libraries of this machine.

The rules are of two kinds. Those of `validate_flags` hold for every model, so that they can be called before a
checkpoint is read. Those of `validate_model` need the architecture, and the adapter: if a checkpoint or ``config.json``
gives them, call ``merge_architecture`` first.
"""

from argparse import Namespace

import torch

from megatron_grpo.algorithm.arguments import check_advantages, check_importance_sampling, check_loss
from megatron_grpo.data.arguments import check_data, check_pass_rates, check_tokenizer_model
from megatron_grpo.estimate.throughput import stage_costs
from megatron_grpo.lora.arguments import check_lora
from megatron_grpo.models.arguments import (
    check_cuda_graphs,
    check_excluded_models,
    check_model,
    check_settings,
    check_share_prompts,
)
from megatron_grpo.models.attention_kernels import FLASH_ATTENTION_4, flash_attention_4
from megatron_grpo.models.config import transformer_config_from_args
from megatron_grpo.models.fp8_training import check_fp8, check_fp8_sizes
from megatron_grpo.models.rope import check_rope
from megatron_grpo.observability.arguments import check_logging
from megatron_grpo.parallel.arguments import check_parallel_flags, check_parallelism, uses_flash_attention_4
from megatron_grpo.reference.arguments import check_reference_models, check_reference_of_model
from megatron_grpo.rollout.arguments import (
    check_dynamic_sampling,
    check_ledger,
    check_lengths,
    check_lora_weight_sync,
    check_model_of_engine,
    check_partial_rollouts,
    check_placed,
    check_positions,
    check_rollout,
    check_structured_outputs,
)
from megatron_grpo.training.arguments import check_values, ddp_config_from_args, optimizer_config_from_args
from megatron_grpo.training.run_rules import check_run
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.packages import missing, require
from megatron_grpo.vision.arguments import check_vision
from megatron_grpo.weights import families
from megatron_grpo.weights.arguments import check_family


def validate_args(args: Namespace, world_size: int) -> None:
    """Raise GrpoError for an invalid configuration, and set the arguments that follow from others.

    ``--dry-run`` needs no data, rewards, learning rate or optional libraries.
    """
    validate_flags(args, world_size)
    validate_model(args)


def validate_flags(args: Namespace, world_size: int) -> None:
    """Raise GrpoError for flags that no model can have together; set the arguments that follow from flags alone."""
    check_run(args, world_size)
    check_settings(args)
    check_parallel_flags(args)
    check_cuda_graphs(args)
    check_share_prompts(args)
    check_fp8(args)
    check_lengths(args)
    check_data(args)
    check_rollout(args, world_size)
    check_loss(args)
    check_importance_sampling(args)
    check_advantages(args)
    check_reference_models(args)
    check_dynamic_sampling(args)
    check_partial_rollouts(args)
    check_placed(args)
    check_pass_rates(args)
    check_structured_outputs(args)
    args.engine_decodes = bool(args.stop_words or args.structured_outputs_regex)
    check_ledger(args)
    check_logging(args)
    _check_libraries(args)


def validate_model(args: Namespace) -> None:
    """Raise GrpoError for a model that the flags do not fit; set the arguments that follow from both.

    Call after `validate_flags`.
    """
    check_values(args)  # again: config.json or a checkpoint may have set the architecture
    check_model(args)
    check_family(args)
    check_parallelism(args, stage_costs)
    check_excluded_models(args)
    check_fp8_sizes(args)
    families.for_args(args).hf_from_args(args)  # raises for an architecture that the family does not support
    check_positions(args)
    check_vision(args)
    check_rope(args)
    check_tokenizer_model(args)
    check_model_of_engine(args)
    check_reference_of_model(args)
    check_lora(args)
    check_lora_weight_sync(args)
    _check_libraries_of_model(args)


def _check_flash_attention_4() -> None:
    """Raise GrpoError if this machine cannot run the kernels of --attention-backend flash."""
    given, instead = "--attention-backend flash", "give --attention-backend local"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        raise GrpoError(f"{given} needs a GPU of compute capability 9.0 (Hopper) or newer: {instead}")
    require(given, *FLASH_ATTENTION_4, instead=instead)
    try:
        flash_attention_4()
    except ImportError as error:
        raise GrpoError(
            f"{given} needs FlashAttention 4 of vLLM's wheel, which cannot be imported ({error}): "
            f"pip install -r requirements-gpu.txt, or {instead}"
        ) from error


def _refuse_transformer_engine(what: str, instead: str) -> None:
    """Raise GrpoError with the reason why this machine cannot run Transformer Engine."""
    if not torch.cuda.is_available():
        raise GrpoError(f"{what} needs a GPU, and this machine has none: {instead}")
    require(what, "transformer_engine", instead=instead)


def _have_transformer_engine() -> bool:
    return torch.cuda.is_available() and not missing("transformer_engine")


def _check_libraries_of_model(args: Namespace) -> None:
    """Raise GrpoError for a model that this machine, its libraries or megatron-core do not support."""
    if args.transformer_impl == "transformer_engine" and not _have_transformer_engine():
        return  # a dry run, on a machine where megatron-core cannot ask for Transformer Engine's version
    if uses_flash_attention_4(args) and not args.dry_run:
        _check_flash_attention_4()
    transformer_config_from_args(args)


def _check_libraries(args: Namespace) -> None:
    """Raise GrpoError for flags that this machine, its libraries or megatron-core do not support."""
    have_te = _have_transformer_engine()
    if args.transformer_impl == "transformer_engine" and not have_te:
        if args.dry_run:
            return
        _refuse_transformer_engine("--transformer-impl transformer_engine", "give --transformer-impl local")
    if args.use_precision_aware_optimizer and not have_te and not args.dry_run:
        given = "--use-precision-aware-optimizer (Transformer Engine's Adam, with --transformer-impl local, too)"
        _refuse_transformer_engine(given, "leave the flag out")
    if args.transformer_impl == "local" and torch.cuda.is_available() and not (args.bf16 or args.fp16):
        raise GrpoError("on a GPU --transformer-impl local needs --bf16 or --fp16: its attention kernel has no float32")
    if args.cuda_graphs and not args.dry_run and not torch.cuda.is_available():
        raise GrpoError("--cuda-graphs needs a GPU: leave it out")
    if args.optimizer_cpu_offload and not args.dry_run and not torch.cuda.is_available():
        raise GrpoError("--optimizer-cpu-offload needs a GPU: here the optimizer is on the CPU anyway")
    ddp_config_from_args(args)
    if args.use_precision_aware_optimizer and not have_te:
        return  # a dry run, on a machine where megatron-core cannot ask for Transformer Engine's version
    optimizer_config_from_args(args)
