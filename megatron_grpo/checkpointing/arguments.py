"""Flags and rules of what a run starts from and what it leaves: checkpoints and Hugging Face directories."""

from argparse import Namespace

from megatron_grpo.utils.arguments import FlagRow
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import excludes, needs, positive

CHECKPOINTS: tuple[FlagRow, ...] = (
    ("--save", str, None, "directory for checkpoints, metrics and completions"),
    ("--load", str, None, "directory to resume from, when it holds a checkpoint"),
    ("--save-interval", int, None, "save when the number of updates is a multiple of this; always at the end"),
    ("--max-checkpoints-to-keep", int, None, "delete the oldest beyond this many [keep all]"),
    ("--pretrained-checkpoint", str, None, "Megatron checkpoint to take the first weights from"),
    ("--load-hf", str, None, "Hugging Face model directory to take the first weights, shape and tokenizer from"),
    ("--save-hf", str, None, "directory of the Hugging Face export at the end [{save}/hf_model]"),
    ("--no-save-hf", bool, False, "no Hugging Face export at the end"),
    ("--finetune", bool, False, "take only the weights of --load, and start from update 0"),
    ("--use-checkpoint-args", bool, False, "take the model's shape from the checkpoint"),
    ("--no-load-optim", bool, False, "do not restore the optimizer from --load"),
    ("--no-load-rng", bool, False, "do not restore the random state from --load"),
)


def check_checkpoints(args: Namespace) -> None:
    """Refuse two origins or destinations where there is one, and fill in the export's."""
    positive(args, "max_checkpoints_to_keep")
    for dest in ("save_interval", "max_checkpoints_to_keep"):
        needs(args, dest, "save", "there is no directory to write to")
    for dest in ("finetune", "no_load_optim", "no_load_rng"):
        needs(args, dest, "load", "it says what to take from there")
    one_place = "the first weights come from one place"
    excludes(args, "load_hf", "pretrained_checkpoint", one_place)
    excludes(args, "load_hf", "finetune", one_place)
    excludes(args, "pretrained_checkpoint", "finetune", one_place)
    if args.use_checkpoint_args and not (args.load or args.pretrained_checkpoint):
        raise GrpoError("--use-checkpoint-args needs --load or --pretrained-checkpoint: a checkpoint that has them")
    excludes(args, "save_hf", "no_save_hf", "one asks for the export, the other for none")
    if args.save and not args.save_hf and not args.no_save_hf:
        args.save_hf = f"{args.save}/hf_model"
