"""Compute the bytes and seconds of a planned weight sync to engines of their own, for made-up worlds, in one process.

    python tools/benchmark/planned_sync.py --worlds 235B-A22B:512 671B:1024 --engine-ranks 32

As in scale.py the launch scripts of docs/model_sizes.md give the trainer's flags, this process takes the place of one
rank of each pipeline stage, and models are built on a device without memory. An engine is vLLM's model of the same
size on each of --engine-ranks ranks, tensor-parallel with its experts divided, whose loaders are traced. The program's
own plan says who sends what; seconds are the sum over its rounds of the bytes of the rank that sends or receives most,
by --gpu-gigabytes a second. The floor is what an engine rank receives on average, or what a rank of the fullest
pipeline stage sends on average if that is more. Two rounds are under way at a time: a rank holds at most the bytes of
four, two that it sends and two that it receives, and for its checksums those of one more.
Needs travel to all ranks at the start, those of one engine only.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ["VLLM_MLA_DISABLE"] = (
    "1"  # vLLM's CPU build has no latent attention of these sizes; its loaders are the same
)

from tools.benchmark import scale  # before megatron.core is imported

# isort: split
import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.models.config import params_dtype
from megatron_grpo.rollout.vllm.loader_trace import trace
from megatron_grpo.rollout.weight_sync.planned import table
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import families, stream, transfer_plan
from megatron_grpo.weights.transfer_plan import HfTensor, Holder, Needs, Plan
from tools.made_up_engine import model_of_rank


def holders_of(args: Namespace, ranks: int) -> list[Holder]:
    """Return what each trainer rank holds: of each stage the names in its model, experts by their ranks."""
    with scale.made_up_rank(args, 0, ranks) as groups:
        pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        weights = table(args, "weights")

    def places(name: str) -> dict[int, int]:
        return {rank: place for group in groups if group.name == name for place, rank in enumerate(group.ranks)}

    tp, stage = places("TENSOR_MODEL_PARALLEL_GROUP"), places("PIPELINE_MODEL_PARALLEL_GROUP")
    expert, expert_tp = places("EXPERT_MODEL_PARALLEL_GROUP"), places("EXPERT_TENSOR_PARALLEL_GROUP")
    keys = [stream._expert_group_key(weight) or weight.name for weight in weights]
    share = (args.num_experts or 1) // args.expert_model_parallel_size
    of_weight = np.array([-1 if weight.expert is None else weight.expert // share for weight in weights])
    held = []
    for rank in pipeline:
        with scale.made_up_rank(args, rank, ranks), scale.on_meta(replaced(args, **scale.WITHOUT_MEMORY)) as model:
            own = stream.local_shards(model, args)
        found = {key for key, weight in zip(keys, weights, strict=True) if weight.name in own}
        held.append(np.array([key in found for key in keys]))
    size, expert_size = args.tensor_model_parallel_size, args.expert_tensor_parallel_size or 1
    return [
        Holder(
            held[stage[rank]] & ((of_weight < 0) | (of_weight == expert.get(rank, 0))),
            stage[rank],
            (tp[rank], size),
            (expert_tp.get(rank, 0), expert_size),
        )
        for rank in range(ranks)
    ]


def needs_of(args: Namespace, tensors: list[HfTensor], size: int) -> list[Needs]:
    """Return the needs of the ranks of an engine."""
    found: list[Needs] = []
    options = {"enable_expert_parallel": True} if args.num_experts else {}
    with tempfile.TemporaryDirectory() as directory:
        config = families.for_args(args).hf_from_args(args)
        Path(directory, "config.json").write_text(json.dumps(config))
        for rank in range(size):
            with model_of_rank(directory, rank, size, memory=False, dtype="bfloat16", **options) as model:
                found.append(trace(model, tensors).needs)
    return found


def row(model: str, ranks: int, options: Namespace) -> list[str]:
    """Return the cells of a world."""
    args = scale.arguments(model, ranks)
    assert args is not None, f"{ranks} ranks are too few for {model}"
    weights = table(args, "weights")
    tensors = transfer_plan.hf_tensors(weights, params_dtype(args))
    needs = needs_of(args, tensors, options.engine_ranks) * options.engines
    axes = max(len(tensor.shape) for tensor in tensors)
    of_engine = sum(transfer_plan.to_rows(own, axes).nbytes for own in needs[: options.engine_ranks])
    holders = holders_of(args, ranks)
    began = time.perf_counter()
    homes = list(range(len(needs))) if options.colocated else None
    plan = Plan(weights, tensors, holders, needs, homes=homes, width=options.engine_ranks)
    sent = np.zeros((len(plan.rounds), ranks))
    received = np.zeros((len(plan.rounds), len(needs)))
    pieces = 0
    for engine in sorted(range(len(needs)), key=lambda engine: id(needs[engine])):  # replicas after one another
        steps = range(len(plan.rounds))
        step_of = {number: step for step in steps for number in plan.rounds[plan.round_of_step(engine, step)].weights}
        for sender, piece in plan.pieces(engine):
            if options.colocated and sender == engine:
                continue
            sent[step_of[piece.weight], sender] += piece.nbytes
            received[step_of[piece.weight], engine] += piece.nbytes
            pieces += 1
    planned = time.perf_counter() - began
    rate = options.gpu_gigabytes * 1e9
    largest = np.maximum(sent.max(1), received.max(1)).sum()
    per_rank, stages = sent.sum(0), np.array([holder.stage for holder in holders])
    floor = max(received.sum() / len(needs), *(per_rank[stages == stage].mean() for stage in set(stages.tolist())))
    cells = [model, ranks, f"{options.engines} x {options.engine_ranks}", f"{received.sum() / len(needs) / 2**30:.1f}"]
    cells += [f"{per_rank.mean() / 2**30:.2f}", f"{per_rank.max() / per_rank.mean():.2f}", len(plan.rounds), pieces]
    cells += [f"{floor / rate:.2f}", f"{largest / rate:.2f}", f"{planned:.0f}"]
    cells += [f"{of_engine / 2**20:.0f}", f"{max(sent.max(), received.max()) / 2**20:.0f}"]
    return list(map(str, cells))


HEADS = ["model", "trainer ranks", "engines", "GiB received by a rank", "GiB sent by a rank", "most / mean sent"]
HEADS += ["rounds", "pieces", "floor s", "seconds", "s to plan", "MiB of needs", "MiB of a round"]


def main() -> None:
    """Print a table of all worlds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--worlds",
        nargs="+",
        default=["235B-A22B:512", "671B:1024"],
        metavar="MODEL:RANKS",
        help="models of tools/benchmark/scale.py and trainer ranks [235B-A22B:512 671B:1024]",
    )
    parser.add_argument("--engine-ranks", type=int, default=32, metavar="N", help="of an engine [32]")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="replicas [1]")
    parser.add_argument(
        "--colocated", action="store_true", help="engine rank N is on the GPU of trainer rank N, whose shards it reads"
    )
    parser.add_argument("--gpu-gigabytes", type=float, default=50.0, metavar="X", help="a second, of a GPU [50]")
    options = parser.parse_args()
    print(f"| {' | '.join(HEADS)} |\n|---|{'--:|' * (len(HEADS) - 1)}")
    for world in options.worlds:
        model, _, ranks = world.partition(":")
        print(f"| {' | '.join(row(model, int(ranks), options))} |", flush=True)


if __name__ == "__main__":
    main()
