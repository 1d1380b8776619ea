"""Flags and rules of checkpoints and Hugging Face directories: the origin of the weights, saves and exports."""

from argparse import Namespace
from typing import Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, PATH, FlagRow
from megatron_grpo.utils.rules import excludes, needs

CHECKPOINTS: tuple[FlagRow, ...] = (
    ("--save", PATH, None, "directory to write checkpoints, metrics and completions to"),
    ("--load", PATH, None, "directory to resume from; a new run starts if it holds no checkpoint"),
    (
        "--save-interval",
        COUNT,
        None,
        "save when the number of updates is a multiple of this, and at the end of the run",
    ),
    ("--max-checkpoints-to-keep", COUNT, None, "number of checkpoints to keep; older ones are deleted [all]"),
    (
        "--keep-best",
        str,
        None,
        "metric of evaluations, such as eval/greedy_accuracy: the checkpoint with its largest value is never deleted, "
        "and {save}/best.json names it",
    ),
    (
        "--async-save",
        bool,
        False,
        "write checkpoints in the background: a save only copies the tensors into host memory",
    ),
    (
        "--on-save-error",
        ("continue", "stop"),
        "continue",
        "what a failed save does, on a full disk for example: the run goes on, or it ends",
    ),
    ("--pretrained-checkpoint", PATH, None, "directory of a Megatron checkpoint to load the initial weights from"),
    ("--load-hf", PATH, None, "Hugging Face model directory to load initial weights, architecture and tokenizer from"),
    (
        "--save-hf",
        PATH,
        None,
        "directory of the Hugging Face export at the end of the run [{save}/hf_model; none with --lora-rank]",
    ),
    ("--finetune", bool, False, "load only the weights of --load, and start at update 0"),
    ("--use-checkpoint-args", bool, False, "read the model's architecture from the checkpoint"),
    ("--no-load-optim", bool, False, "do not restore the optimizer state from --load"),
    ("--no-load-rng", bool, False, "do not restore the random states from --load"),
)


def check_checkpoints(args: Namespace) -> None:
    """Raise GrpoError for conflicting origins or destinations of weights."""
    for dest in ("save_interval", "max_checkpoints_to_keep", "keep_best", "async_save", "on_save_error"):
        needs(args, dest, "save", "there is no directory to write to")
    for dest in ("finetune", "no_load_optim", "no_load_rng"):
        needs(args, dest, "load", "it restricts what is loaded from there")
    one_place = "the initial weights have one origin"
    excludes(args, "load_hf", "pretrained_checkpoint", one_place)
    excludes(args, "load_hf", "finetune", one_place)
    excludes(args, "pretrained_checkpoint", "finetune", one_place)
    if args.use_checkpoint_args and not (args.load or args.pretrained_checkpoint):
        raise GrpoError(
            "--use-checkpoint-args needs --load or --pretrained-checkpoint: a checkpoint with stored arguments"
        )


def resolve_export(args: Namespace) -> dict[str, Any]:
    """Return --save-hf, by default in --save. Call it when --lora-rank is known: the export is then the adapter.

    --no-save-hf is False.
    """
    by_default = args.save and args.save_hf is None and not args.lora_rank
    return {"save_hf": f"{args.save}/hf_model" if by_default else args.save_hf or None}
