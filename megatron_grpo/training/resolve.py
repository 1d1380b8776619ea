"""The arguments of a run: what follows from the flags and their inputs, in two stages; no step changes them.

Stage 1 (`FLAGS`) has the rules that hold for every model: they can refuse a run before a checkpoint is read. Stage 2
has the inputs: `resolve_origin` reads the architecture from a checkpoint or ``config.json``, `MODEL` has the rules
about it, and ``setup.resolve_data`` takes what tokenizer and data say.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.algorithm.arguments import STEPS as ALGORITHM
from megatron_grpo.algorithm.trial import check_functions
from megatron_grpo.checkpointing.arguments import resolve_export
from megatron_grpo.checkpointing.checkpoint_directory import read_checkpoint_args, run_directory
from megatron_grpo.data.arguments import (
    check_data,
    check_pass_rates,
    check_sft,
    check_tokenizer,
    resolve_chat_template,
    resolve_system_prompt,
    resolve_tokenizer,
)
from megatron_grpo.estimate.throughput import stage_costs
from megatron_grpo.lora import base
from megatron_grpo.lora.arguments import check_lora, resolve_adapter_export
from megatron_grpo.lora.files import resolve_adapter
from megatron_grpo.models.arguments import (
    check_cuda_graphs,
    check_excluded_models,
    check_float32_parameters,
    check_model,
    check_settings,
    check_share_prompts,
    resolve_model_sizes,
    resolve_share_prompts,
)
from megatron_grpo.models.attention_kernels import FLASH_ATTENTION_4, flash_attention_4
from megatron_grpo.models.config import transformer_config_from_args
from megatron_grpo.models.fp8_training import check_fp8, check_fp8_sizes
from megatron_grpo.models.rope import check_rope
from megatron_grpo.observability.arguments import check_logging
from megatron_grpo.parallel.arguments import (
    check_parallel_flags,
    parallel_steps,
    resolve_recomputation,
    uses_flash_attention_4,
)
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
    resolve_decoding,
    resolve_ledger,
    resolve_lengths,
    resolve_lora_weight_sync,
    resolve_max_num_seqs,
    resolve_mismatch_sample_rate,
    resolve_placed,
    resolve_prefix_caching,
    resolve_weight_sync,
)
from megatron_grpo.rollout.exact_log_probs import check_exact_log_probs
from megatron_grpo.training.arguments import check_values, ddp_config_from_args, optimizer_config_from_args
from megatron_grpo.training.best_checkpoint import check_keep_best
from megatron_grpo.training.run_rules import RUN
from megatron_grpo.utils.arguments import Step, replaced, resolved
from megatron_grpo.utils.device import needs_gpu
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
        raise needs_gpu(what, instead)
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
        raise needs_gpu("--cuda-graphs", "leave it out")
    if args.optimizer_cpu_offload and not args.dry_run and not torch.cuda.is_available():
        raise needs_gpu("--optimizer-cpu-offload", "the optimizer is on the CPU anyway, leave it out")
    ddp_config_from_args(args)
    if args.use_precision_aware_optimizer and not have_te:
        return  # a dry run, on a machine where megatron-core cannot ask for Transformer Engine's version
    optimizer_config_from_args(args)


# Stage 1: the rules of all folders that hold for every model.
FLAGS: tuple[Step, ...] = (
    *RUN,
    check_settings,
    resolve_recomputation,
    check_parallel_flags,
    resolve_share_prompts,
    check_cuda_graphs,
    check_share_prompts,
    check_fp8,
    resolve_lengths,
    check_lengths,
    check_data,
    check_sft,
    resolve_system_prompt,
    resolve_chat_template,
    resolve_weight_sync,
    resolve_mismatch_sample_rate,
    check_rollout,
    *ALGORITHM,
    check_reference_models,
    check_dynamic_sampling,
    check_partial_rollouts,
    resolve_placed,
    check_placed,
    resolve_max_num_seqs,
    check_pass_rates,
    resolve_decoding,
    check_structured_outputs,
    resolve_ledger,
    check_ledger,
    check_logging,
    check_keep_best,
    _check_libraries,
)

# Stage 2: those that need the architecture and the adapter.
MODEL: tuple[Step, ...] = (
    check_values,  # again: config.json or a checkpoint may have set the architecture
    check_model,
    resolve_model_sizes,
    check_family,
    *parallel_steps(stage_costs),
    check_excluded_models,
    check_float32_parameters,
    check_fp8_sizes,
    check_architecture,
    check_positions,
    check_vision,
    check_rope,
    resolve_tokenizer,
    check_tokenizer,
    resolve_prefix_caching,
    check_model_of_engine,
    check_reference_of_model,
    check_lora,
    resolve_adapter_export,
    resolve_lora_weight_sync,
    check_lora_weight_sync,
    resolve_export,
    check_exact_log_probs,
    _check_libraries_of_model,
    check_functions,
)


def resolve_args[A: Namespace](args: A, world_size: int) -> A:
    """Return parsed arguments after both stages; `resolve_origin` comes before, if the architecture is in files.

    Raises GrpoError for an invalid configuration. ``--dry-run`` needs no data, rewards, learning rate or optional
    libraries.
    """
    return resolved(resolve_flags(args, world_size), *MODEL)


def resolve_flags[A: Namespace](args: A, world_size: int) -> A:
    """Return parsed arguments with what follows from the flags alone; GrpoError for flags that no model can have."""
    return resolved(replaced(args, world_size=world_size), *FLAGS)


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
        assets = [Path(run_directory(d), hf.ASSETS_DIR) for d in (load, args.pretrained_checkpoint) if d]
        args = replaced(args, tokenizer_model=next((str(d) for d in assets if d.is_dir()), args.load_hf))
    return args
