"""Repeat a bad update without its step, and print the loss and the gradient norm of each completion.

    torchrun --nproc-per-node N tools/replay_update.py SAVE/bad_updates/iteration_0000042 FLAGS --load SAVE

The folder is what --on-bad-update wrote. FLAGS are the flags of the run, whose data-parallel size may differ. The
weights are those of the newest checkpoint of --load, without one the initial ones, so the numbers are the run's own if
that checkpoint is of the update before. Nothing is written.

Each completion is one pass alone, with the token weights that it has in the update: the losses add up to the loss of
the update, and the gradients to its gradient. Completions whose loss or gradient norm is not finite come first, then
those with the largest gradient norm.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

import pretrain_grpo  # first of ours: it prepares for machines without a GPU
from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.prefix_tree import with_prefixes
from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.data.tokenizer import build_tokenizer
from megatron_grpo.environments.registry import tools_of
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.parallel.zigzag import padded_lengths
from megatron_grpo.rollout.collect import shown_images
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.resolve import resolve_args, resolve_origin
from megatron_grpo.training.setup import build_model_and_optimizer
from megatron_grpo.training.train_step import train_step
from megatron_grpo.training.warm_up import SETTINGS
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_json_object
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.vision.images import ImageReader
from megatron_grpo.vision.images import attach as attach_images


class WithoutStep(BadUpdates):
    """Finds every update bad, so that the optimizer makes no step."""

    def _judge(self, loss: float, norm: float) -> str:
        return "it is repeated without a step"


def give_images(args: argparse.Namespace, model, batch: RolloutBatch) -> None:
    """Give the vision tower the images of the rows, and those that episodes of the batch showed."""
    tokenizer = build_tokenizer(args)
    reader = ImageReader(args, tokenizer.special_tokens)
    tools = partial(tools_of, default=args.environment)
    dataset = PromptDataset(args.train_data_path, tokenizer, args, tools=tools, images=reader)
    store = attach_images(model, reader, dataset.images_of, with_rows=not args.agent)
    if batch.image_bytes is not None:
        store.take_episodes(shown_images(batch))


def main() -> None:
    """Parse the command line, repeat the update, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder iteration_N of --on-bad-update")
    parser.add_argument("--rows", type=int, default=20, metavar="N", help="completions to print [20]")
    options, flags = parser.parse_known_args()
    batch = with_prefixes(RolloutBatch.load(options.folder))  # once for all micro-batches
    record = read_json_object(options.folder.with_suffix(".json"))
    args = parse_args(flags)
    resume = bool(args.load) and latest_iteration(args.load) is not None
    args = resolve_origin(args, resume=resume)
    args = resolve_args(args, int(os.environ.get("WORLD_SIZE", "1")))
    if record["iteration"] < 0:  # of the supervised warm-up
        args = replaced(args, **SETTINGS)
    # Every rank trains.
    args = replaced(args, rollout_ranks=0, train_iters=args.train_iters or record["iteration"])
    initialize_distributed(args)
    set_random_seed(args.seed)
    model, optimizer, scheduler, *_ = build_model_and_optimizer(args, model_provider, resume=resume, ref_args=None)
    if args.vision_config:
        if record["iteration"] < 0:
            raise GrpoError("an update of the supervised warm-up of a vision-language model cannot be repeated")
        give_images(args, model, batch)
    iteration = checkpoint.load_checkpoint(args, model, optimizer, scheduler)[0] if resume else 0
    weights = f"weights of iteration {iteration}" if resume else "the initial weights, because --load has no checkpoint"
    print_rank_0(f"update {record['iteration']}: {record['problem']}; {weights}")

    def repeat(packs) -> tuple[float, float]:
        step = partial(pretrain_grpo.forward_step, args=args, num_microbatches=len(packs))
        metrics = train_step(step, packs, model, optimizer, scheduler, WithoutStep("skip", None, None))
        return metrics["loss"], metrics["grad_norm"]

    completions = np.array(record["completions"])
    # Every data-parallel rank has the same completion; with virtual stages, as many times as there are stages.
    copies = parallel_state.get_data_parallel_world_size()
    copies *= args.pipeline_model_parallel_size if args.num_virtual_stages_per_pipeline_rank else 1
    rows = []
    for number in completions:
        length = padded_lengths(batch.lengths[[number]], args.context_parallel_size)
        packs = forward.micro_batches(args, batch, np.full(copies, number), max_tokens=int(length[0]))
        loss, norm = repeat(packs)
        rows.append((number, loss / copies, norm / copies))
    rows.sort(key=lambda row: (np.isfinite(row[1:]).all(), -row[2]))
    print_rank_0(f"{'completion':>10} {'data row':>8} {'tokens':>7} {'advantage':>10} {'loss':>12} {'grad norm':>12}")
    advantages = np.full(batch.num_completions, np.nan) if batch.advantages is None else batch.advantages
    for number, loss, norm in rows[: options.rows]:
        numbers = f"{number:10} {batch.row_ids[number]:8} {batch.response_lengths[number]:7}"
        print_rank_0(f"{numbers} {advantages[number]:10.4g} {loss:12.6g} {norm:12.6g}")
    bad = sum(not np.isfinite(row[1:]).all() for row in rows)
    loss, norm = repeat(forward.micro_batches(args, batch, completions))
    print_rank_0(f"the update: loss {loss:.6g}, gradient norm {norm:.6g}; {bad} of {len(rows)} completions not finite")
    dist.barrier()


if __name__ == "__main__":
    run(main)
