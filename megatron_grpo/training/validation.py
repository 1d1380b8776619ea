"""Validation of the arguments: calls the rules of all folders in order, and checks the libraries of this machine.

If a checkpoint or ``config.json`` gives the architecture, call ``merge_architecture`` before ``validate_args``.
"""

from argparse import Namespace

import torch

from megatron_grpo.algorithm.arguments import check_advantages, check_importance_sampling, check_loss
from megatron_grpo.data.arguments import check_data, check_pass_rates
from megatron_grpo.estimate.throughput import stage_costs
from megatron_grpo.lora.arguments import check_lora
from megatron_grpo.models.arguments import check_cuda_graphs, check_model, check_share_prompts
from megatron_grpo.models.attention_kernels import FLASH_ATTENTION_4, flash_attention_4
from megatron_grpo.models.config import transformer_config_from_args
from megatron_grpo.models.fp8_training import check_fp8
from megatron_grpo.models.rope import check_rope
from megatron_grpo.observability.arguments import check_logging
from megatron_grpo.parallel.arguments import check_parallelism, uses_flash_attention_4
from megatron_grpo.reference.arguments import check_reference_models
from megatron_grpo.rollout.arguments import (
    check_dynamic_sampling,
    check_ledger,
    check_lengths,
    check_lora_weight_sync,
    check_partial_rollouts,
    check_placed,
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
    check_run(args, world_size)
    check_values(args)  # again: config.json or a checkpoint may have set the architecture
    check_model(args)
    check_family(args)
    check_parallelism(args, stage_costs)
    check_cuda_graphs(args)
    check_share_prompts(args)
    check_fp8(args)
    families.for_args(args).hf_from_args(args)  # raises for an architecture that the family does not support
    check_lengths(args)
    check_vision(args)
    check_rope(args)
    check_data(args)
    check_rollout(args, world_size)
    check_loss(args)
    check_importance_sampling(args)
    check_advantages(args)
    check_reference_models(args)
    check_lora(args)
    check_lora_weight_sync(args)
    check_dynamic_sampling(args)
    check_partial_rollouts(args)
    check_placed(args)
    check_pass_rates(args)
    check_structured_outputs(args)
    args.engine_decodes = bool(args.stop_words or args.structured_outputs_regex)
    check_ledger(args)
    check_logging(args)
    _check_libraries(args)


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


def _check_libraries(args: Namespace) -> None:
    """Raise GrpoError for flags that this machine, its libraries or megatron-core do not support."""
    have_te = torch.cuda.is_available() and not missing("transformer_engine")
    if args.transformer_impl == "transformer_engine" and not have_te:
        if args.dry_run:
            return
        _refuse_transformer_engine("--transformer-impl transformer_engine", "give --transformer-impl local")
    if args.use_precision_aware_optimizer and not have_te and not args.dry_run:
        given = "--use-precision-aware-optimizer (Transformer Engine's Adam, with --transformer-impl local, too)"
        _refuse_transformer_engine(given, "leave the flag out")
    if args.transformer_impl == "local" and torch.cuda.is_available() and not (args.bf16 or args.fp16):
        raise GrpoError("on a GPU --transformer-impl local needs --bf16 or --fp16: its attention kernel has no float32")
    if uses_flash_attention_4(args) and not args.dry_run:
        _check_flash_attention_4()
    if args.cuda_graphs and not args.dry_run and not torch.cuda.is_available():
        raise GrpoError("--cuda-graphs needs a GPU: leave it out")
    if args.optimizer_cpu_offload and not args.dry_run and not torch.cuda.is_available():
        raise GrpoError("--optimizer-cpu-offload needs a GPU: here the optimizer is on the CPU anyway")
    transformer_config_from_args(args)
    ddp_config_from_args(args)
    if args.use_precision_aware_optimizer and not have_te:
        return  # a dry run, on a machine where megatron-core cannot ask for Transformer Engine's version
    optimizer_config_from_args(args)
