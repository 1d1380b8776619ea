"""Files that a run writes at its end for other programs."""

from argparse import Namespace

from megatron_grpo.lora.files import save_adapter
from megatron_grpo.lora.stream import merged_shards
from megatron_grpo.models import forward
from megatron_grpo.utils import progress
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights import hf


def export_adapter(args: Namespace, model: forward.Model) -> None:
    """Write --save-adapter, if it is given. Collective."""
    if args.save_adapter:
        with progress.phase("export"), forward.parameters_complete(model):
            save_adapter(args, model, args.save_adapter)
        print_rank_0(f"adapter in PEFT's format: {args.save_adapter}")


def export_hf(args: Namespace, model: forward.Model) -> None:
    """Write --save-hf, if it is given, with an adapter merged into the weights. Collective."""
    if args.save_hf:
        with progress.phase("export"), forward.parameters_complete(model):
            shards = merged_shards(model, args) if args.lora_rank else None
            hf.save_hf(model, args, args.save_hf, tokenizer_dir=args.tokenizer_model, shards=shards)
        print_rank_0(f"Hugging Face export: {args.save_hf}")
