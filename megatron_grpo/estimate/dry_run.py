"""Report of ``--dry-run``: batch arithmetic, model parts on each rank, and an estimate of memory."""

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.data.prefix_tree import Prefixes, is_worth_sharing, shareable_tokens
from megatron_grpo.data.schedule import schedule
from megatron_grpo.estimate.memory import GIB, MARGIN, Chunk, Plan, engine_share, gpu_bytes
from megatron_grpo.estimate.savings import fitting, in_words
from megatron_grpo.estimate.sides import FLOPS, concurrent, decode_seconds, estimated, train_flops
from megatron_grpo.estimate.split import fastest, step_seconds
from megatron_grpo.estimate.throughput import ModelFlops
from megatron_grpo.models.config import params_dtype, trains_mtp
from megatron_grpo.parallel.arguments import generating_width, recompute_note
from megatron_grpo.parallel.roles import role_of
from megatron_grpo.parallel.zigzag import padded_lengths
from megatron_grpo.reference.arguments import has_own_parallel_configuration
from megatron_grpo.reference.model_args import reference_args, teacher_args
from megatron_grpo.rollout.arguments import has_colocated_vllm, has_servers
from megatron_grpo.rollout.speculation import draft_directory, method_of
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.batch_sizes import batch_arithmetic, longest_sequence, possible_rollout_ranks
from megatron_grpo.utils.rules import flag

GPUS_PER_HOST = 8  # if the launcher does not say: a dry run needs no torchrun
# GiB for what is not counted; a sleeping engine keeps graphs and buffers.
ROOM, ROOM_BESIDE_ENGINE = 5, 10
MOST_RANKS = 64  # a larger world is listed with its first and last ranks only
MOST_SPLITS = 8  # listed, around the fastest one


@dataclass(frozen=True)
class Rank:
    """Coordinates of a rank in each parallel dimension; its engine replica and its rank in that replica."""

    rank: int
    tp: int
    cp: int
    ep: int
    dp: int
    pp: int
    replica: int
    replica_tp: int


def gpu_memory(args: Namespace) -> float | None:
    """Return the GiB of the GPU that a dry run should fit: --gpu-memory or this machine's; None without a GPU."""
    if args.gpu_memory or not torch.cuda.is_available():
        return args.gpu_memory
    return torch.cuda.get_device_properties(0).total_memory / GIB


def ranks(args: Namespace, world_size: int) -> list[Rank]:
    """Return the coordinates of every rank.

    The order of the dimensions, innermost first, is TP, CP, DP, PP; with --use-tp-pp-dp-mapping it is TP, CP, PP, DP.
    Experts divide the ranks of a pipeline stage separately: expert tensor parallelism, EP, replicas. Engine replicas
    are consecutive blocks of --vllm-tensor-parallel-size ranks; with --rollout-engine megatron, blocks within each
    pipeline stage.
    """
    pp = args.pipeline_model_parallel_size
    sizes = {"tp": args.tensor_model_parallel_size, "cp": args.context_parallel_size}
    last = {"dp": args.data_parallel_size, "pp": pp}
    sizes |= dict(reversed(last.items())) if args.use_tp_pp_dp_mapping else last
    width = args.vllm_tensor_parallel_size if args.rollout_engine == "vllm" else generating_width(args)
    etp, ep = args.expert_tensor_parallel_size or 1, args.expert_model_parallel_size
    found = []
    for rank in range(world_size):
        place, rest = {}, rank
        for name, size in sizes.items():
            rest, place[name] = divmod(rest, size)
        engine_rank = rank
        if args.rollout_engine == "megatron":
            cp, tp = args.context_parallel_size, args.tensor_model_parallel_size
            engine_rank = (place["dp"] * cp + place["cp"]) * tp + place["tp"]
        replica, within = divmod(engine_rank, width)
        found.append(Rank(rank, ep=rank // etp % ep, replica=replica, replica_tp=within, **place))
    return found


def dry_run_report(args: Namespace, world_size: int) -> str:
    """Return the whole report as text, for validated arguments."""
    plan = Plan(args)
    sections = [
        "batch arithmetic",
        *batch_arithmetic(args, world_size).lines(),
        *_shared_lines(args),
        *_warm_up_lines(args),
        *_mixture_lines(args),
        "",
        f"pipeline stages of a model of {plan.whole_model():,} parameters",
        *_stage_lines(plan),
        "",
        "ranks",
        *_rank_lines(plan, ranks(args, world_size)),
        *_placed_lines(args, world_size),
        *_split_lines(args, world_size),
        "",
        "memory of a rank, GiB (estimated)",
        *_memory_lines(plan),
    ]
    return "\n".join(sections)


def fit_line(changed: Callable[[dict[str, Any]], Namespace], gpu: float) -> str:
    """Return whether the run fits a GPU of ``gpu`` GiB, and with which flags if it does not; ``changed``: `fitting`."""
    args = changed({})
    room = ROOM if args.rollout_ranks or not has_colocated_vllm(args) else ROOM_BESIDE_ENGINE
    needed = gpu_bytes(Plan(args)) / GIB
    if gpu <= room:
        return (
            f"a GPU of {gpu:.0f} has no room for a model: {room} should stay for what is not counted (libraries, and "
            "buffers of an engine on the same GPU). Give a larger GPU, or engines on other GPUs (--rollout-ranks)"
        )
    if needed + room <= gpu:
        return f"it fits a GPU of {gpu:.0f}, with {gpu - needed:.1f} for what is not counted"
    flags, less = fitting(changed, (gpu - room) * GIB)
    last = f"it does not fit a GPU of {gpu:.0f}, where {room} should stay for what is not counted"
    if less / GIB + room <= gpu:
        return f"{last}: add {in_words(flags)} ({less / GIB:.1f})"
    rest = f", and with {in_words(flags)} it still needs {less / GIB:.1f}" if flags else ""
    return f"{last}{rest}: divide the model over more GPUs, train adapters (--lora-rank), or shorten the completions"


def holds(chunk: Chunk, vision: bool) -> str:
    """Return a description of the model parts that a stage holds; ``vision``: the model has a vision tower."""
    parts = ["vision tower"] * (vision and chunk.embedding) + ["embedding"] * chunk.embedding
    if chunk.layers:
        parts.append(f"layers {chunk.layers[0]}-{chunk.layers[-1]}")
    if chunk.mtp:
        parts.append("multi-token prediction" + ("" if chunk.embedding else " with a copy of the embedding"))
    if chunk.head:
        parts.append("final norm, output layer")
    return ", ".join(parts) or "nothing"


def _shared_lines(args: Namespace) -> list[str]:
    """Return the line about what --share-prompts spares of a group with the longest prompt and completions."""
    if not args.share_prompts:
        return []
    size, prompt, completion = args.num_generations, args.max_prompt_length, args.max_completion_length
    cp_size = args.context_parallel_size
    common = np.full(size, prompt - (args.mtp_num_layers if trains_mtp(args) else 0))
    common[0] = 0
    shared = int(shareable_tokens(common, cp_size).max())
    budget = args.max_tokens_per_microbatch * (cp_size if args.hybrid_context_parallel else 1)
    lengths = padded_lengths(np.full(size, prompt + completion), cp_size)
    prefixes = Prefixes(np.arange(size), common)
    packs = size
    if is_worth_sharing((size - 1) * shared, size * (prompt + completion)):
        packs = len(schedule(lengths, 1, max_tokens=budget, prefixes=prefixes, cp_size=cp_size)[0])
    flops, none = ModelFlops(args), np.zeros(1, np.int64)
    whole = flops.update(np.full(size, prompt + completion), np.full(size, completion))
    less = (size - packs) * flops.update(none + shared, none)
    tokens = size * (prompt + completion)
    return [
        f"shared prompts: a group of {size} with a prompt of {prompt} and completions of {completion} tokens computes "
        f"{tokens - (size - packs) * shared:,} of {tokens:,} tokens and {1 - less / whole:.0%} of the FLOPs; memory is "
        "that of micro-batches with as many tokens that share nothing"
    ]


def _warm_up_lines(args: Namespace) -> list[str]:
    """Return the line about the supervised warm-up."""
    if not args.sft_iters:
        return []
    data = " ".join(args.sft_data_path or ["no --sft-data-path yet"])
    rate = "no --sft-lr yet" if args.sft_lr is None else f"learning rate {args.sft_lr:g}"
    return [
        f"supervised warm-up: {args.sft_iters:,} updates before the first rollout, each of {args.global_batch_size:,} "
        f"demonstrations ({data}), {rate}"
    ]


def _mixture_lines(args: Namespace) -> list[str]:
    """Return the line about the demonstrations beside the rollout."""
    if not args.sft_loss_type:
        return []
    data = " ".join(args.sft_data_path or ["no --sft-data-path yet"])
    if LOSSES.get(args.sft_loss_type).joins_groups:
        count, weight = "one of each prompt that has one", ""
    else:
        count = f"{args.sft_batch_size or 'no --sft-batch-size yet,'} in each update"
        valley = args.chord_mu_peak if args.chord_mu_valley is None else args.chord_mu_valley
        weight = f", mu {args.chord_mu_peak:g} to {valley:g}"
    return [f"demonstrations beside the rollout: {count} ({data}), loss {args.sft_loss_type}{weight}"]


def _stage_lines(plan: Plan) -> list[str]:
    lines = [f"{'PP':>6} {'VPP':>4} {'layers':>7}  holds"]
    for stage, chunks in enumerate(plan.stages):
        lines += [
            f"{stage:>6} {place:>4} {len(c.layers):>7}  {holds(c, bool(plan.args.vision_config))}"
            for place, c in enumerate(chunks)
        ]
    return lines


def _rank_lines(plan: Plan, everyone: list[Rank]) -> list[str]:
    names = ("TP", "CP", "EP", "DP", "PP")
    lines = [f"{'rank':>6} " + " ".join(f"{name:>4}" for name in names) + f"  {'engine replica':18} layers"]
    cut = len(everyone) > MOST_RANKS
    for rank in everyone[: MOST_RANKS // 2] + everyone[-MOST_RANKS // 2 :] if cut else everyone:
        if cut and rank.rank == len(everyone) - MOST_RANKS // 2:
            lines.append(f"{'...':>6} {len(everyone) - MOST_RANKS} more ranks, in the same order")
        layers = ", ".join(f"{c.layers[0]}-{c.layers[-1]}" for c in plan.stages[rank.pp] if c.layers)
        shared = any(other.replica_tp for other in everyone)
        engine = f"{rank.replica}" + (f", its rank {rank.replica_tp}" if shared else "")
        if has_servers(plan.args):
            engine = "servers" if rank.rank == 0 else "-"
        if plan.args.rollout_ranks:
            engine = "-"
        places = " ".join(f"{place:>4}" for place in (rank.tp, rank.cp, rank.ep, rank.dp, rank.pp))
        lines.append(f"{rank.rank:>6} {places}  {engine:18} {layers}")
    return lines


def _placed_lines(args: Namespace, world_size: int) -> list[str]:
    """Return a line for each rank of --rollout-ranks: its engine replica, and its GPU on its host."""
    if not args.rollout_ranks:
        return []
    launched = world_size + args.rollout_ranks
    local = int(os.environ.get("LOCAL_WORLD_SIZE", min(launched, GPUS_PER_HOST)))
    lines = ["", f"ranks of engines, {local} ranks on a host", f"{'rank':>6} {'host':>4} {'GPU':>4}  engine replica"]
    engines = range(world_size, launched)
    cut = len(engines) > MOST_RANKS
    for rank in [*engines[: MOST_RANKS // 2], *engines[-MOST_RANKS // 2 :]] if cut else engines:
        if cut and rank == engines[-MOST_RANKS // 2]:
            lines.append(f"{'...':>6} {len(engines) - MOST_RANKS} more ranks, in the same order")
        role = role_of(rank, launched, args.rollout_ranks, args.vllm_tensor_parallel_size)
        shared = f", its rank {role.rank}" if role.size > 1 else ""
        lines.append(f"{rank:>6} {rank // local:>4} {rank % local:>4}  {role.replica}{shared}")
    return lines


def _split_lines(args: Namespace, world_size: int) -> list[str]:
    """Return the estimated seconds of a batch for this and other --rollout-ranks (`estimate.sides`)."""
    if not args.rollout_ranks or has_servers(args):
        return []
    launched, sides, staleness = world_size + args.rollout_ranks, estimated(args), args.max_staleness
    possible = possible_rollout_ranks(args, launched)
    best = fastest(possible, launched, sides, staleness)
    middle = possible.index(best)
    shown = {args.rollout_ranks, *possible[max(0, middle - MOST_SPLITS // 2) : middle + MOST_SPLITS // 2]}
    lines = ["", f"split of {launched} ranks, estimated seconds of a batch of the longest completions on H200s"]
    lines += [
        f"update: {train_flops(args) / 1e12:,.0f} TFLOP at {FLOPS / 1e12:.0f} a second and rank; decode step of "
        f"{count} sequences: {1000 * decode_seconds(Plan(args), count):.2f} ms"
        for count in [concurrent(args, args.rollout_ranks)]
    ]
    lines.append(f"{'engines':>8} {'trainers':>8} {'generate':>9} {'train':>9} {'step':>9}")
    for engines in sorted(shown):
        trainers = launched - engines
        seconds = *sides(engines, trainers), step_seconds(sides, engines, trainers, staleness)
        note = "  fastest" * (engines == best) + "  this run" * (engines == args.rollout_ranks)
        lines.append(f"{engines:>8} {trainers:>8} " + " ".join(f"{one:>9.3g}" for one in seconds) + note)
    return lines


def _engine_lines(plan: Plan) -> list[str]:
    """Return the lines about the engine's memory, and about the memory that a GPU must have in total."""
    args, most = plan.args, gpu_bytes(plan) / GIB
    if args.rollout_engine == "megatron":
        cache = max(plan.cache(stage) for stage in range(len(plan.stages))) / GIB
        return [
            f"engine: the training model, with a cache of {cache:.2f} during generation",
            f"a GPU must have {most:.1f}",
        ]
    if has_servers(args):
        return ["engine: servers, not counted here", f"a GPU must have {most:.1f}"]
    engine = plan.engine() * params_dtype(args).itemsize / GIB
    utilization = args.vllm_gpu_memory_utilization
    keeps = (
        "also during training",
        "0 while asleep, with its weights in host memory",
        "0 while asleep, its weights are sent again on wake-up",
    )
    share = f"weights and cache use {utilization:g} of a GPU's memory, {keeps[args.sleep_level]}"
    width = args.vllm_tensor_parallel_size
    if args.rollout_ranks:
        return [
            f"engine: {engine:.2f} of weights on each of {args.rollout_ranks} GPUs of its own (--rollout-ranks, "
            f"--vllm-tensor-parallel-size {width}); weights and cache use {utilization:g} of the GPU's memory",
            *_draft_lines(plan),
            f"a GPU must have {plan.peak() / GIB:.1f} for a trainer, {engine / utilization:.1f} and its cache for an "
            "engine",
        ]
    lines = [
        f"engine: {engine:.2f} of weights on each rank (--vllm-tensor-parallel-size {width}); {share}",
        *_draft_lines(plan),
    ]
    if engine / utilization > plan.peak() / GIB and (wider := _wider_engines(plan)):
        lines.append(f"engine: its weights need more than the trainer; {wider}")
    if args.sleep_level:  # an awake engine shares the GPU with the trainer's remaining tensors
        lines.append(f"a GPU must have {most:.1f}: for the trainer alone, and for the engine beside the trainer's rest")
    elif utilization < 1:
        lines.append(f"a GPU must have {most:.1f}, for the engine's share and the trainer's")
    return lines


def _draft_lines(plan: Plan) -> list[str]:
    """Return the line about what speculative decoding takes of the engine's memory, if a model or layers draft."""
    method = method_of(plan.args)
    if method not in ("draft_model", "mtp"):
        return []
    if not (parameters := plan.drafts()):
        return [
            f"drafts: not counted: {draft_directory(plan.args)} is of a model family that the trainer does not know"
        ]
    size = parameters * params_dtype(plan.args).itemsize / GIB
    share = plan.drafts_share_of_cache()
    return [f"drafts ({method}): {size:.2f} of the engine's weights, and {share:.0%} of its cache"]


def _wider_engines(plan: Plan) -> str:
    """Return the weights of an engine rank under larger --vllm-tensor-parallel-size; "" if none fits."""
    args, sizes = plan.args, []
    width = 2 * args.vllm_tensor_parallel_size
    while args.world_size % width == 0 and args.num_attention_heads % width == 0:
        sizes.append(f"{width}: {plan.engine(width) * params_dtype(args).itemsize / GIB:.2f}")
        width *= 2
    return "a larger --vllm-tensor-parallel-size divides them: " + ", ".join(sizes) if sizes else ""


def _offload_lines(plan: Plan, peak: float) -> list[str]:
    """Return the lines about offloads that act only while the engine generates; ``peak``: of training, GiB."""
    args = plan.args
    given = [dest for dest in ("offload_model", "offload_gradients", "offload_optimizer") if getattr(args, dest)]
    if not given:
        return []
    names = ", ".join(map(flag, given))
    lines = [f"{names}: only while the engine generates; the peak of training stays {peak:.2f}"]
    share = engine_share(args)
    if has_colocated_vllm(args) and not args.sleep_level:
        lines.append("nothing is moved with --sleep-level 0: the engine keeps its memory; the columns show the most")
    elif share is not None and share + 2 * MARGIN < 1 and args.offload_model | args.offload_optimizer:
        nothing = Plan(replaced(args, offload_model=False, offload_optimizer=False))
        stays = max(memory.stays for memory in nothing.memories) / GIB
        lines.append(
            f"copied to the host: what does not fit beside the engine and {2 * MARGIN:g} of the GPU; the columns show "
            f"the most. Nothing is copied on a GPU of {stays / (1 - share - 2 * MARGIN):.1f} and its libraries' memory"
        )
    return lines


def _reference_lines(args: Namespace) -> list[str]:
    """Return the lines about the memory of reference model and teacher."""
    models = {}
    if args.with_reference:
        models["reference model"] = reference_args(args)
    for own in teacher_args(args):
        models[f"teacher {own.load_hf}"] = own
    lines = []
    for name, own in models.items():
        swapped = not name.startswith("teacher ") and not has_own_parallel_configuration(args)
        where = "the policy's are there instead" if swapped else "they are on the GPU, too"
        size = Plan(own).largest_stage() * (4 if own.sync_ref_model else params_dtype(own).itemsize) / GIB
        average = ", an average in float32," if own.sync_ref_model else ""
        lines.append(f"{name}: {size:.2f} of parameters{average} in host memory; during its forward pass {where}")
    if args.gkd_beta is not None:
        lines.append(_distribution_line(args))
    return lines


def _distribution_line(args: Namespace) -> str:
    """Return the line about what a rank keeps of the teachers' distributions of a rollout (`reference.teacher`)."""
    if args.gkd_logits_topk is None:
        token = max(own.hidden_size for own in teacher_args(args)) * params_dtype(args).itemsize
    else:
        token = 8 * args.gkd_logits_topk + 4
    tokens = args.generation_batch_size / args.data_parallel_size * longest_sequence(args)
    return (
        f"distributions of a rollout: {token:,} bytes a token in host memory; if all completions had the longest "
        f"length, {token * tokens / GIB:.2f} on a rank, and three times as much while the teacher computes them"
    )


def _memory_lines(plan: Plan) -> list[str]:
    args = plan.args
    columns = {
        "params": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "activat.": "activations",
        "head": "head",
        "training": "total",
        "generating": "stays",
        "host": "host",
    }
    lines = [f"{'PP':>6} {'10^6 params':>12} " + " ".join(f"{name:>10}" for name in columns)]
    for stage, memory in enumerate(plan.memories):
        cells = " ".join(f"{getattr(memory, name) / GIB:>10.2f}" for name in columns.values())
        lines.append(f"{stage:>6} {plan.parameters(stage).total / 1e6:>12.1f} {cells}")
    recomputing = {"full": ", every layer recomputed", "selective": ", some parts recomputed"}
    lines += [
        f"activations: micro-batches of {plan.tokens()} tokens{recomputing.get(args.recompute_granularity, '')}; "
        f"at most {', '.join(f'{plan.in_flight(stage):g}' for stage in range(len(plan.stages)))} at a time, by stage",
        "generating: the trainer's tensors on the GPU while the engine generates; host: those in host memory",
    ]
    if copies := max(plan.fp8_copies(stage) for stage in range(len(plan.stages))):
        lines.append(f"params: {copies / GIB:.2f} are 8-bit copies for --fp8-format, freed while the engine generates")
    lines += _offload_lines(plan, max(memory.total for memory in plan.memories) / GIB)
    if note := recompute_note(args):
        lines.append(note)
    lines += _engine_lines(plan)
    lines += _reference_lines(args)
    if args.num_experts:
        lines.append("experts: estimated for tokens spread evenly over all experts")
    lines.append("not counted: communication buffers, libraries, fragmentation, the gradient's norm")
    return lines
