"""The arguments of a run: what follows from the flags and their inputs, in two stages; no step changes them.

Stage 1 (`run_rules.FLAGS`) has the flags alone. Stage 2 has the inputs: `resolve_origin` reads the architecture from a
checkpoint or ``config.json``, `MODEL` has the rules about it, and `resolve_data` takes what tokenizer and data say.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.algorithm.arguments import STEPS as ALGORITHM
from megatron_grpo.checkpointing.arguments import resolve_export
from megatron_grpo.checkpointing.checkpoint_directory import read_checkpoint_args
from megatron_grpo.data.arguments import check_data, check_pass_rates, check_tokenizer, resolve_tokenizer
from megatron_grpo.estimate.throughput import stage_costs
from megatron_grpo.lora import base
from megatron_grpo.lora.arguments import check_lora, resolve_adapter_export
from megatron_grpo.lora.files import resolve_adapter
from megatron_grpo.models.arguments import check_cuda_graphs, check_model, check_share_prompts, resolve_model_sizes
from megatron_grpo.models.attention_kernels import FLASH_ATTENTION_4, flash_attention_4
from megatron_grpo.models.config import transformer_config_from_args
from megatron_grpo.models.fp8_training import check_fp8
from megatron_grpo.models.rope import check_rope
from megatron_grpo.observability.arguments import check_logging
from megatron_grpo.parallel.arguments import parallel_steps, uses_flash_attention_4
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
    resolve_decoding,
    resolve_ledger,
    resolve_lengths,
    resolve_lora_weight_sync,
    resolve_mismatch_sample_rate,
    resolve_placed,
    resolve_weight_sync,
)
from megatron_grpo.training.arguments import check_values, ddp_config_from_args, optimizer_config_from_args
from megatron_grpo.training.run_rules import resolve_flags
from megatron_grpo.utils.arguments import Step, replaced, resolved
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.packages import missing, require
from megatron_grpo.vision.arguments import check_vision
from megatron_grpo.weights import hf
from megatron_grpo.weights.arguments import architecture_of, check_architecture, check_family, resolve_architecture


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


# Stage 2, with the architecture: the rules of all folders, in order.
MODEL: tuple[Step, ...] = (
    check_values,  # again: config.json or a checkpoint may have set the architecture
    check_model,
    resolve_model_sizes,
    check_family,
    *parallel_steps(stage_costs),
    check_cuda_graphs,
    check_share_prompts,
    check_fp8,
    check_architecture,
    resolve_lengths,
    check_lengths,
    check_vision,
    check_rope,
    check_data,
    resolve_tokenizer,
    check_tokenizer,
    resolve_weight_sync,
    resolve_mismatch_sample_rate,
    check_rollout,
    *ALGORITHM,
    check_reference_models,
    check_lora,
    resolve_adapter_export,
    resolve_lora_weight_sync,
    check_lora_weight_sync,
    check_dynamic_sampling,
    check_partial_rollouts,
    resolve_placed,
    check_placed,
    check_pass_rates,
    resolve_decoding,
    check_structured_outputs,
    resolve_ledger,
    check_ledger,
    resolve_export,
    check_logging,
    _check_libraries,
)


def resolve_args[A: Namespace](args: A, world_size: int) -> A:
    """Return parsed arguments after both stages, as far as no checkpoint, tokenizer or data decide.

    Raises GrpoError for an invalid configuration. ``--dry-run`` needs no data, rewards, learning rate or optional
    libraries.
    """
    return resolve_model(resolve_flags(args, world_size))


def resolve_model[A: Namespace](args: A) -> A:
    """Return the arguments of `resolve_flags` with what follows from the architecture, which `resolve_origin` reads."""
    return resolved(args, *MODEL)


def resolve_origin[A: Namespace](args: A, resume: bool) -> A:
    """Return the arguments with what the origin of the weights says; GrpoError for flags that differ.

    A checkpoint or ``config.json`` has the architecture, a checkpoint the tokenizer; an adapter has its shape, and the
    checkpoint of an adapter its base.
    """
    stored: dict[str, Any] | None = None
    if resume:
        stored = read_checkpoint_args(args.load)
        args = replaced(args, **base.resolve_stored(args, stored))
    elif args.load_adapter:
        args = replaced(args, **resolve_adapter(args, args.load_adapter))
    source = args.load if resume or args.finetune else args.pretrained_checkpoint
    if source and args.use_checkpoint_args and stored is None:
        stored = read_checkpoint_args(source)
    if stored is not None:
        args = replaced(args, **resolve_architecture(args, stored, f"the checkpoint {source}"))
    elif args.load_hf:
        args = replaced(args, **architecture_of(args, args.load_hf))
    if args.tokenizer_model is None:
        load = args.load if resume or args.finetune else None  # --load is then a checkpoint
        assets = [Path(d, hf.ASSETS_DIR) for d in (load, args.pretrained_checkpoint) if d]
        args = replaced(args, tokenizer_model=next((str(d) for d in assets if d.is_dir()), args.load_hf))
    return args
