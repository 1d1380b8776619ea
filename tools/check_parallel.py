"""Run the same two updates in several parallel configurations (layouts), and print a table of the differences.

    python tools/check_parallel.py MODEL_FLAGS --all --world-sizes 1 2 4
    python tools/check_parallel.py MODEL_FLAGS --layouts TP1 "TP2 SP" "PP2 VPP2" "CP2: --max-tokens-per-microbatch 70"
    torchrun --nnodes 4 --nproc-per-node 8 ... tools/check_parallel.py MODEL_FLAGS --layouts "TP8 PP4" "TP4 PP4 EP8"

MODEL_FLAGS are flags of pretrain_grpo.py: a Hugging Face directory (--load-hf), or an architecture (--model-family
qwen3 --num-layers 28 ...) with made-up weights that depend on the tensors' names. A layout is written as its sizes (TP,
PP, VPP, CP, EP, ETP; the remaining ranks are DP), SP for sequence parallelism, and after a colon any further flags. The
word LOSSES in a layout adds one update for each loss type, mask and KL estimator that the other flags allow; layouts
with the word are compared with each other, and the excluded ones are listed after the table. With --external-plugins
FILE among MODEL_FLAGS these include the losses and advantage estimators of that file.

Without torchrun the tool starts torchrun once for each world size and tries all layouts of that size in it, because
starting ranks takes longer than the updates. Every layout is compared with the first one, which is a single process if
the model fits into it. Loss, gradient norm and each updated weight (norm of the difference over norm) must agree to
--tolerance; in float32 also KL, entropy, clip fractions, the largest ratio, the routers' load-balancing loss and, with
--moe-router-enable-expert-bias, the tokens of each expert. The large logits of trained weights have
larger rounding errors, and a diverged model magnifies them: if the loss of update 2 is in the thousands, give a smaller
--lr (1e-4 by default with --load-hf, else 1e-3). The exit status is 1 if a layout differs
or fails, else 0.
"""

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

import pretrain_grpo  # first of ours: it prepares for machines without a GPU
from megatron_grpo.algorithm.advantages import ADVANTAGES
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.policy_term import drop_overlong
from megatron_grpo.algorithm.rollout_advantages import estimate_advantages
from megatron_grpo.lora.stream import stream_adapter, stream_saved
from megatron_grpo.models import balancing, forward
from megatron_grpo.observability.metric_guide import documented
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.training import train_step
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.stream import stream_hf
from tools import made_up
from tools.made_up import parse

PROGRESS = "  done with "
FLIPS = 1e-4  # share of the choices of experts that rounding may change
COMPARED: tuple[str, ...] = ("loss", "grad_norm", "kl", "entropy", "clip/low", "clip/high", "clip/masked")
COMPARED += ("ratio/mean", "ratio/max", "ratio/min")
COMPARED += ("mismatch/mean_abs", "mismatch/kl", "mismatch/perplexity_ratio", "mismatch/effective_sample_size")
SIZES = {
    "TP": "--tensor-model-parallel-size",
    "PP": "--pipeline-model-parallel-size",
    "VPP": "--num-virtual-stages-per-pipeline-rank",
    "CP": "--context-parallel-size",
    "EP": "--expert-model-parallel-size",
    "ETP": "--expert-tensor-parallel-size",
}


def sizes_of(layout: str) -> dict[str, int]:
    """Parse a layout's name to {"TP": 2, ...}, with 0 for a missing size; raise ValueError for an unknown word."""
    sizes = dict.fromkeys((*SIZES, "DP"), 0)
    for word in layout.partition(":")[0].replace("LOSSES", "").split():
        name = word.rstrip("0123456789")
        if word != "SP":
            if name not in sizes or name == word:
                raise ValueError(f"layout {layout!r}: {word!r} must be SP or one of {', '.join(sizes)} with a number")
            sizes[name] = int(word[len(name) :])
    return sizes


def world_size_of(layout: str) -> int:
    """Return the number of ranks of a layout, TP x PP x CP x DP; a missing DP is the minimum for the experts."""
    named = sizes_of(layout)
    tp, pp, cp, ep = (named[name] or 1 for name in ("TP", "PP", "CP", "EP"))
    dp = named["DP"] or -(-ep * (named["ETP"] or tp) // (tp * cp))
    return tp * pp * cp * dp


def flags_of(layout: str) -> list[str]:
    """Return the flags of pretrain_grpo.py for a layout."""
    name, _, more = layout.partition(":")
    sizes = {SIZES[size]: number for size, number in sizes_of(layout).items() if number and size != "DP"}
    flags = [word for flag, number in sizes.items() for word in (flag, str(number))]
    return flags + ["--sequence-parallel"] * ("SP" in name.split()) + more.split()


def all_layouts(flags: list[str], world_size: int) -> list[str]:
    """Return all layouts of ``world_size`` ranks that the model of ``flags`` allows."""
    experts = parse(flags, 1).num_experts
    found = []
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for tp, pp, cp in itertools.product(divisors, repeat=3):
        expert_sizes = itertools.product(divisors, {1, tp}) if experts else [(1, tp)]
        for (ep, etp), sp, vpp in itertools.product(expert_sizes, (False, True), (1, 2)):
            if world_size % (tp * pp * cp) or (sp and tp == 1) or (vpp > 1 and pp == 1):
                continue
            named = {"TP": tp, "PP": pp, "VPP": vpp, "CP": cp, "EP": ep, "DP": world_size // (tp * pp * cp)}
            words = [f"{name}{size}" for name, size in named.items() if size > 1] + ["SP"] * sp
            words += [f"ETP{etp}"] * (etp != tp)
            layout = " ".join(words) or "TP1"
            try:
                parse([*flags, *flags_of(layout)], world_size)
            except GrpoError:
                continue
            found.append(layout)
    return found


# --random varies these flags besides the sizes: one alternative of each line. The last line is for experts only.
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
RECOMPUTE = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
VARIATIONS = (
    (
        "--micro-batch-size 1",
        "--micro-batch-size 2",
        "--max-tokens-per-microbatch 64",
        "--max-tokens-per-microbatch 64 --no-share-prompts",
        "--max-tokens-per-microbatch 17 --hybrid-context-parallel",
        "--max-tokens-per-microbatch 17 --hybrid-context-parallel --no-share-prompts",
    ),
    ("", "--use-distributed-optimizer", OVERLAP),
    ("", "--recompute-granularity selective", RECOMPUTE),
    ("", "--use-tp-pp-dp-mapping"),
    ("", "--moe-grouped-gemm", "--moe-token-dispatcher-type allgather", "--moe-layer-recompute"),
)


def random_layouts(flags: list[str], world_sizes: list[int], count: int, seed: int) -> list[str]:
    """Draw ``count`` valid combinations of sizes, packing, optimizer, recomputation, rank order and dispatcher."""
    rng = random.Random(seed)
    experts = parse(flags, 1).num_experts
    sizes = [(layout, world) for world in world_sizes for layout in all_layouts(flags, world)]
    found: list[str] = []
    while len(found) < count:
        layout, world = rng.choice(sizes)
        words = " ".join(rng.choice(line) for line in (VARIATIONS if experts else VARIATIONS[:-1]))
        try:
            parse([*flags, *flags_of(layout), *words.split()], world)
        except GrpoError:
            continue
        found.append(f"{layout}: {' '.join(words.split())}")
    return found


# ---- the comparison

# LOSSES runs these objectives besides the registered losses and estimators. The thresholds are within the range of
# values of the made-up rollout.
OBJECTIVES = (
    "--importance-sampling-level sequence_token --epsilon 0.01",
    "--top-entropy-quantile 0.3",
    "--clip-cov-ratio 0.1 --clip-cov-lb 0.1",
    "--kl-cov-ratio 0.1",
    "--m2po-threshold 0.8",
    "--off-policy-sequence-mask-delta 1",
    "--overlong-filter",
    "--kl-estimator k2",
    "--kl-estimator unbiased",
    "--sft-loss-type sft --sft-batch-size 5 --chord-mu-peak 0.3 --sft-data-path unused",
    "--sft-loss-type chord --sft-batch-size 5 --chord-mu-peak 0.9 --sft-data-path unused",
    "--sft-loss-type luffy --luffy-gamma 0.3 --sft-data-path unused",
)
DEMONSTRATIONS = 5  # their number is divisible by no number of ranks


def objectives() -> list[str]:
    """Return the flags of each update of LOSSES: all registered losses and estimators by example, and OBJECTIVES."""
    entries = [(registry.option, entry) for registry in (LOSSES, ADVANTAGES) for entry in registry.entries.values()]
    examples = [f"{option} {e.name} {e.example}".strip() for option, e in entries if e.example is not None]
    return [*examples, *OBJECTIVES]


def parse_objectives(flags: list[str], world_size: int) -> tuple[dict[str, Namespace], dict[str, str]]:
    """Return the arguments of each of `objectives` that ``flags`` allow, and the reason for each one excluded."""
    allowed, excluded = {}, {}
    for objective in objectives():
        try:
            allowed[objective] = parse([*flags, *objective.split()], world_size)
        except GrpoError as error:
            excluded[objective] = str(error)
    return allowed, excluded


def objective_updates(runs: dict[str, Namespace], trainer, batch) -> dict[str, dict]:
    """Run one update for each objective, in sequence, so that a wrong gradient changes the next loss."""
    completions = np.arange(batch.num_completions // 2)
    rows = {}
    for objective, args in runs.items():
        changed = batch
        if "advantage_estimator" in args.explicit:  # advantages from the rewards
            changed, _ = estimate_advantages(args, batch, batch.rewards[:, 0])
        changed = made_up.share(args, changed, [completions])
        if args.overlong_filter:
            changed = drop_overlong(changed)
        demonstrations = made_up.rollout(args).select(np.arange(DEMONSTRATIONS)) if args.sft_loss_type else None
        rows[objective] = pretrain_grpo.update(args, trainer, changed, completions, demonstrations)
    return rows


def run_layout(layout: str, flags: list[str], reference: Path) -> dict:
    """Run the two updates in one layout; rank 0 compares the weights with the reference, or writes the reference."""
    result: dict[str, Any] = {"layout": layout, "world_size": int(os.environ["WORLD_SIZE"])}
    try:
        args = parse([*flags, *flags_of(layout)], result["world_size"])
        if sizes_of(layout)["DP"] not in (0, args.data_parallel_size):
            raise GrpoError(f"the layout has DP {args.data_parallel_size} on {args.world_size} ranks")
    except GrpoError as error:
        return result | {"error": str(error)}
    initialize_distributed(args)
    made_up.peak_memory(reset=True)
    model = (trainer := made_up.trainer(args)).model
    batch = made_up.rollout(args)
    rows, tokens_per_second, batch = made_up.two_updates(args, trainer, batch)
    peak = torch.tensor(made_up.peak_memory(), device=device())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    result |= {"updates": rows, "tokens_per_second": tokens_per_second, "peak_mib": peak.item()}
    result |= {"float32": not (args.bf16 or args.fp16), "loaded": bool(args.load_hf)}
    if args.moe_router_enable_expert_bias:
        result["counts"] = tokens_of_experts(model)
    weights, gaps = {}, {}
    writes = dist.get_rank() == 0 and not reference.exists()
    stored = safe_open(reference, "pt") if dist.get_rank() == 0 and reference.exists() else None
    with forward.parameters_complete(model):
        rows[-1]["params_norm"] = train_step.params_norm(model)
        streams = (stream_adapter, stream_saved) if args.lora_rank else (stream_hf,)
        for name, tensor in itertools.chain.from_iterable(stream(model, args) for stream in streams):
            if writes:
                weights[name] = (
                    tensor.cpu().clone().contiguous()
                )  # safetensors needs a copy of each name of a tied weight
            elif stored is not None:
                expected = stored.get_tensor(name).to(tensor).double()
                size = torch.linalg.norm(expected).clamp(min=torch.finfo(expected.dtype).tiny)  # a bias may be 0
                gaps[name] = (torch.linalg.norm(tensor.double() - expected) / size).item()
    if writes:
        save_file(weights, reference)
    elif stored is not None:
        missing = set(stored.keys()) - gaps.keys()
        worst = max(gaps, key=lambda name: np.nan_to_num(gaps[name], nan=np.inf))  # max passes over NaN
        lacking = {"error": f"the tensors {sorted(missing)} are missing"} if missing else {}
        result |= {"worst_tensor": worst, "gap": gaps[worst]} | lacking
    if "LOSSES" in layout.partition(":")[0].split():
        runs, result["excluded"] = parse_objectives([*flags, *flags_of(layout)], dist.get_world_size())
        result["objectives"] = objective_updates(runs, trainer, batch)
    del model
    made_up.release(trainer)
    return result


def tokens_of_experts(model) -> dict[str, list[int]]:
    """Return the tokens of each expert in the last update, over all ranks, by the layer's name. Collective."""
    own = {}
    group = balancing.ranks_of_stage()
    for router in balancing.routers(*model):
        counts = router.tokens_of_update.clone()
        dist.all_reduce(counts, group=group)
        own[f"{'mtp' if router.is_mtp_layer else 'layer'} {router.layer_number}"] = counts.tolist()
    of_ranks: list[dict[str, list[int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return {name: counts for layers in of_ranks for name, counts in layers.items()}


def worker(layouts: list[str], flags: list[str], out: Path) -> None:
    """Run every layout within torchrun, and write one JSON line for each."""
    for layout in layouts:
        result = run_layout(layout, flags, out / "reference.safetensors")
        if int(os.environ["RANK"]) == 0:
            with open(out / "results.jsonl", "a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{PROGRESS}{layout}: {result.get('error', 'ok')}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def relative_gap(key: str, row: dict[str, float], want: dict[str, float]) -> float:
    """Return the difference divided by the value, or by 0.01 (a loss: by 0.1) if the value is smaller."""
    # In a loss terms of order 1 cancel, but their rounding errors remain.
    return abs(row[key] - want[key]) / max(abs(want[key]), 0.1 if key == "loss" else 0.01)


def own_metrics(row: dict[str, float]) -> list[str]:
    """The metrics that a loss of --external-plugins has returned."""
    return [name for name in row if documented(name) is None]


def verdict(result: dict, first: dict, tolerance: float) -> str:
    """Return "same", or the value that differs and its difference."""
    if "error" in result:
        return f"FAILED: {result['error']}"
    if "error" in first:
        return f"not compared: {first['layout']} failed"
    # In 16 bits only the first update: Adam's first step amplifies rounding to a whole learning rate, and experts flip.
    updates = result["updates"][: None if result["float32"] else 1]
    for number, (row, want) in enumerate(zip(updates, first["updates"], strict=False), start=1):
        more = sorted({"params_norm", "moe/balance_loss"} & row.keys()) + own_metrics(want)
        for key in [*COMPARED[: None if result["float32"] else 2], *more]:
            if not (gap := relative_gap(key, row, want)) <= tolerance:
                return f"DIFFERS: {key} of update {number} by {gap:.1e}"
    for layer, want in first.get("counts", {}).items() if result["float32"] else ():
        moved = sum(abs(a - b) for a, b in zip(result["counts"].get(layer, [0] * len(want)), want, strict=True)) / 2
        if not moved <= FLIPS * sum(want):
            return f"DIFFERS: {moved:.0f} of {sum(want)} choices of experts in {layer}"
    wanted = first.get("objectives", {})
    run = result.get("objectives", {})
    if "objectives" in result and (only_one := sorted(run.keys() ^ wanted.keys())):
        return f"DIFFERS: only one of this layout and {first['layout']} runs {only_one[0]}"
    for objective, row in run.items():
        of_demonstrations = sorted({"sft/loss", "sft/tokens"} & wanted[objective].keys())
        for key in (*COMPARED, *of_demonstrations, *own_metrics(wanted[objective])):
            if not (gap := relative_gap(key, row, wanted[objective])) <= tolerance:
                return f"DIFFERS: {key} of {objective} by {gap:.1e}"
    if not result.get("gap", 0.0) <= tolerance:
        return f"DIFFERS: {result['worst_tensor']} by {result['gap']:.1e}"
    return "same"


def table(results: list[dict], tolerance: float) -> list[str]:
    """Return the lines of a Markdown table; the first result is the reference."""
    lines = ["| layout | ranks | loss 1, 2 | gradient norm 1, 2 | weights differ by | tokens/s | peak MiB | |"]
    lines.append("|---|--:|---|---|--:|--:|--:|---|")
    for result in results:
        cells = [result["layout"].replace(":", ""), str(result["world_size"])]
        if "updates" in result:
            cells += [", ".join(f"{row[key]:.6f}" for row in result["updates"]) for key in ("loss", "grad_norm")]
            cells += [f"{result['gap']:.1e}" if "gap" in result else "(reference)"]
            cells += [f"{result['tokens_per_second']:,.0f}", f"{result['peak_mib']:,.0f}"]
        else:
            cells += [""] * 5
        lines.append("| " + " | ".join([*cells, verdict(result, results[0], tolerance)]) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layouts", nargs="+", default=[], metavar="LAYOUT", help='layouts, such as "TP2 PP2 SP"')
    parser.add_argument("--all", action="store_true", help="all layouts of --world-sizes that the model allows")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N combinations drawn at random [0]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of --random [0]")
    parser.add_argument(
        "--world-sizes", nargs="+", type=int, default=[1, 2], metavar="N", help="ranks of --all and --random [1 2]"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest allowed difference [1e-5; 1e-4 with --load-hf, 2e-2 in 16 bits]",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # started by this tool: no table
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for results.jsonl and the reference weights [a temporary one]"
    )
    options, flags = parser.parse_known_args()
    try:
        layouts = list(options.layouts)
        inside = "RANK" in os.environ  # under torchrun
        worlds = [int(os.environ["WORLD_SIZE"])] if inside else options.world_sizes
        if min(worlds) < 1:
            parser.error(f"--world-sizes ({min(worlds)}) must be at least 1")
        if options.all:
            layouts += [layout for world in worlds for layout in all_layouts(flags, world)]
        layouts += random_layouts(flags, worlds, options.random, options.seed) if options.random else []
        if not layouts:
            parser.error("give --layouts, --all or --random N")
        layouts.sort(key=world_size_of)  # stable: the first of the smallest world is the reference
    except (GrpoError, ValueError) as error:
        parser.error(str(error))
    if options.out is None:
        if inside:
            parser.error("under torchrun, give --out, a folder that is shared by all ranks")
        options.out = Path(tempfile.mkdtemp(prefix="check_parallel_"))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be made: {error.strerror}")
    if not options.worker and (options.out / "results.jsonl").exists():
        parser.error(f"--out {options.out} holds an earlier comparison, perhaps of other weights: give another folder")
    if inside:
        worker(layouts, flags, options.out)
        if int(os.environ["RANK"]) > 0 or options.worker:
            return 0
    else:
        for world, group in itertools.groupby(layouts, world_size_of):
            launch(world, list(group), flags, options.out)
    results = [json.loads(line) for line in (options.out / "results.jsonl").read_text().splitlines()]
    if options.tolerance is None:
        loaded = results[0].get("loaded", False)
        options.tolerance = (1e-4 if loaded else 1e-5) if results[0].get("float32", True) else 2e-2
    lines = table(results, options.tolerance)
    print("\n".join(lines))
    excluded = {name: reason for result in results for name, reason in result.get("excluded", {}).items()}
    for objective, reason in excluded.items():
        print(f"\nwithout {objective}: {reason}")
    wrong = sum(not line.endswith("| same |") for line in lines[2:])
    lost = len(layouts) - len(results)
    print(f"\n{len(results) - wrong} of {len(layouts)} layouts agree to {options.tolerance:g}; {lost} did not run")
    return int(bool(wrong or lost))


def launch(world_size: int, layouts: list[str], flags: list[str], out: Path) -> None:
    """Run the layouts of one world size in one torchrun; after a crash the remaining layouts do not run."""
    print(f"{world_size} ranks, {len(layouts)} layouts", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command += [__file__, *flags, "--worker", "--out", str(out), "--layouts", *layouts]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = []
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        if line.startswith(PROGRESS):
            print(line, end="", file=sys.stderr, flush=True)
    if process.wait():
        failed = next((line.split("]:")[0] for line in log if re.match(r"\[rank\d+\]: ", line)), None)
        cause = [line for line in log if failed and line.startswith(failed)] or log
        print(f"the launch ended with status {process.returncode}:\n{''.join(cause[-12:])}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
