"""Updates with made-up weights and completions, without data, rewards and engine, for tools and tests."""

import gc
import itertools
import math
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import pretrain_grpo  # first: it prepares for machines without a GPU
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.rollout_advantages import estimate_advantages
from megatron_grpo.algorithm.updates import divide_rollout
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.prefix_tree import with_prefixes
from megatron_grpo.data.share import with_tokens_of
from megatron_grpo.lora.attach import adapters, attach
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel.initialize import destroy_rank_groups, set_random_seed
from megatron_grpo.rollout.arguments import replays_top_k
from megatron_grpo.training import train_step
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.offload import gradient_tensors, optimizer_tensors, weight_tensors
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.training.trainer import computed_completions
from megatron_grpo.training.update_flops import UpdateFlops
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.device import device
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights import hf, model_weights
from megatron_grpo.weights.arguments import architecture_of

# Two updates, with ratios other than 1 and a reference model; Adam's eps is large enough not to magnify rounding.
COMMON = """--lr 1e-3 --num-generations 4 --global-batch-size 16 --steps-per-generation 2 --train-iters 2 --beta 0.1
 --max-completion-length 24 --max-prompt-length 8 --reward-funcs exact_match --train-data-path unused --no-save-hf
 --adam-eps 1e-4 --temperature 0.8 --tokenizer-model unused --transformer-impl local""".split()


def parse(flags: list[str], world_size: int):
    """Return the validated arguments of a run with these flags."""
    # A step of 1e-3 can make a trained model diverge, and its ratios of 1e5 magnify rounding.
    of_files = any(word.replace("_", "-").partition("=")[0] == "--load-hf" for word in flags)
    args = parse_args([*COMMON, *(["--lr", "1e-4"] if of_files else []), *flags])
    if args.load_hf:
        args = replaced(args, **architecture_of(args, args.load_hf))
    return resolve_args(args, world_size)


def lognormal_lengths(count: int, median: float, mean: float, longest: int) -> list[int]:
    """Return ``count`` lengths with the quantiles of a lognormal distribution, cut at ``longest``, in random order.

    ``mean`` is that before the cut. One of the lengths is ``longest``.
    """
    normal = NormalDist(math.log(median), math.sqrt(2 * math.log(mean / median)))
    quantiles = [math.exp(normal.inv_cdf((number + 0.5) / count)) for number in range(count)]
    lengths = [min(max(round(quantile), 2), longest) for quantile in quantiles[:-1]] + [longest]
    return np.random.default_rng(0).permutation(lengths).tolist()


def rollout(args, length: int | Sequence[int] | None = None, prompt: int = 1) -> RolloutBatch:
    """Make up completions for two updates, with rollout log-probabilities and with advantages equal to the rewards.

    The lengths vary widely, or each completion has ``length`` tokens together with its prompt, or the next of
    ``length``, which both updates have; the prompt then has ``prompt`` tokens. With --environment a
    completion has up to four turns, of which some are samples of their own with --on-rewritten-history split, and one
    of eight has failed. With a replayed --top-k every token has its own
    number of kept tokens, and every fourth completion has the whole vocabulary.
    """
    rng = np.random.default_rng(0)
    n, vocabulary = 2 * args.global_batch_size, args.vocab_size - 2

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(3, vocabulary, rng.integers(low, high) if length is None else high).tolist()

    longest = [(args.max_prompt_length, args.max_completion_length)] * n
    if length is not None:
        lengths = [length] * n if isinstance(length, int) else [*length, *length]
        longest = [(prompt, own - prompt) for own in lengths]
    same = 1 if args.environment else args.num_generations  # each episode may begin in its own way
    of_groups = [tokens(2, longest[first][0]) for first in range(0, n, same)]
    prompts = [of_groups[i // same] for i in range(n)]
    completions = [tokens(1, completion) for _, completion in longest]
    reasons = [FinishReason.STOP if i % 3 else FinishReason.LENGTH for i in range(n)]
    masks = [[1] * len(completion) for completion in completions]
    if length is None:
        _begin_alike(completions, same)
    if args.environment:
        masks = [_turns(i, len(completion)) for i, completion in enumerate(completions)]
        reasons = [FinishReason.FAILED if i % 8 == 5 else reason for i, reason in enumerate(reasons)]
    starts = _sample_starts(masks) if args.on_rewritten_history == "split" else None
    if starts is not None:
        _repeat_the_past(prompts, completions, starts)
    batch = RolloutBatch.from_completions(
        prompts,
        completions,
        log_probs=[np.where(mask, -4 - rng.random(len(mask)), np.nan).tolist() for mask in masks],
        weight_version=0,
        group_ids=np.arange(n) // args.num_generations,
        row_ids=np.arange(n) // args.num_generations,
        sample_ids=range(n),
        finish_reasons=reasons,
        response_masks=masks,
        sample_starts=starts,
        kept_token_ids=_kept_token_ids(args, completions) if replays_top_k(args) else None,
    )
    if args.environment:
        turns = np.array([np.count_nonzero(np.diff([0, *mask]) == 1) for mask in masks], np.int32)
        of_turns = rng.standard_normal((n, args.max_turns)).astype(np.float32)
        of_turns[np.arange(args.max_turns) >= turns[:, None]] = np.nan
        states = rng.integers(0, 3, of_turns.shape)  # few, so that they repeat in a group
        states[:, 0] = 0
        batch = replace(batch, turns=turns, turn_rewards=of_turns, turn_states=states)
    batch.advantages = rng.standard_normal(n).astype(np.float32)
    batch.rewards = batch.advantages[:, None]
    return batch


def _begin_alike(completions: list[list[int]], same: int) -> None:
    """Let half of the completions begin as the one before it in its group, of ``same`` completions, does."""
    rng = np.random.default_rng(4)
    for number, (before, own) in enumerate(itertools.pairwise(completions), start=1):
        if number % same % 2:
            count = rng.integers(0, min(len(before), len(own)) + 1)
            own[:count] = before[:count]


def _repeat_the_past(prompts: list[list[int]], completions: list[list[int]], starts: list[list[int]]) -> None:
    """Let each further sample of a completion begin as the completion does, but for up to two tokens at its end."""
    rng = np.random.default_rng(5)
    for prompt, own, places in zip(prompts, completions, starts, strict=True):
        for place, end in itertools.pairwise([*places, len(own)]):
            past = [*prompt, *own][: max(end - place - int(rng.integers(0, 3)), 0)]
            own[place : place + len(past)] = past


def _turns(number: int, length: int) -> list[int]:
    """Return the response mask of a completion of up to four turns, with tokens of an environment between them."""
    rng = np.random.default_rng([3, number])
    mask: list[int] = []
    for _ in range(rng.integers(1, 5)):
        mask += [1] * rng.integers(1, 9) + [0] * rng.integers(1, 6)
    return [*mask, *[1] * length][:length]


def _sample_starts(masks: list[list[int]]) -> list[list[int]]:
    """Return where samples of a completion begin: with the environment's tokens, in two completions of three."""
    edges = [np.flatnonzero(np.diff(mask) == -1) + 1 for mask in masks]
    return [places.tolist() if number % 3 else [] for number, places in enumerate(edges)]


def _kept_token_ids(args, completions: list[list[int]]) -> list[np.ndarray]:
    """Return kept tokens ``[tokens, top_k]`` for each completion; the sampled token is the first."""
    rng, kept = np.random.default_rng(2), []
    for number, completion in enumerate(completions):
        sets = np.stack([rng.choice(args.vocab_size, args.top_k, replace=False) for _ in completion]).astype(np.int32)
        sets[sets == np.array(completion)[:, None]] = -1
        sets[np.arange(args.top_k) >= rng.integers(1, args.top_k + 1, len(completion))[:, None]] = -1
        sets[:, 0] = completion
        kept.append(sets if number % 4 else np.full_like(sets, -1))
    return kept


def perturbations(total: int) -> np.ndarray:
    """Return the differences ``[2, total]`` of old and reference log-probabilities from the current ones."""
    return np.random.default_rng(1).normal(0, 0.2, (2, total)).astype(np.float32)


def off_policy(args, trainer, batch: RolloutBatch) -> RolloutBatch:
    """Return the rollout with log-probabilities of an old policy and a reference model near the present ones."""
    before = forward.log_probs(args, trainer.model, pretrain_grpo.forward_step, batch)
    old, ref = before + perturbations(len(batch.tokens))
    return replace(batch, old_log_probs=old, ref_log_probs=ref)


def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a random tensor that depends only on its Hugging Face name, so that it is equal on any number of ranks.

    Its scale gives logits of standard deviation 0.4 at any width. In a sharper model rounding would hide errors.
    """
    generator = torch.Generator(device()).manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, device=device())
    return 1 + 0.1 * values if "norm" in name else 0.4 * values / shape[-1] ** 0.5


def fill(model, args, value: Callable[[str, tuple[int, ...]], torch.Tensor] | None = None) -> None:
    """Set every weight of the model to ``value(name, shape)``, by default `weight`; each rank sets its own shard."""

    def made_up(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        centred = args.apply_layernorm_1p and "norm" in name and "linear_attn." not in name  # multiplies by 1 + weight
        return weight(name, shape) - int(centred)

    weights = model_weights.table(args)
    shapes = {name: shape for weight in weights for name, shape in weight.hf.items()}

    def read(name: str, index: tuple[int | slice, ...]) -> torch.Tensor:
        return (value or made_up)(name, shapes[name])[index]

    for own, tensor in model_weights.local_weights(model, weights):
        own.fill(tensor, *model_weights.tensor_parallel(own), read)


def trainer(args) -> Any:
    """Return the attributes of a Trainer that an update needs, with the weights of --load-hf or made-up weights."""
    set_random_seed(args.seed)
    model = forward.build_model(args, model_provider)
    if args.load_hf:
        hf.load_hf(model, args, args.load_hf)
    else:
        fill(model, args)
    if args.lora_rank:
        attach(args, model)
        for adapter in adapters(model):  # B is not zero, so that both matrices have a gradient
            adapter.initialize(weight)
    model, optimizer, scheduler = train_step.setup_optimizer(args, model)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "flops": UpdateFlops(args, None)}
    return SimpleNamespace(**parts, bad_updates=BadUpdates("stop", None, None), iteration=0)


def release(trainer) -> None:
    """Destroy the process groups and free the memory of a `trainer`, for another one in this process."""
    destroy_rank_groups()
    # Gradient hooks and the dispatcher's last graph reference the model from outside Python's garbage collector: free
    # the memory of the tensors explicitly.
    model = trainer.model
    tensors = itertools.chain(weight_tensors(model), gradient_tensors(model), optimizer_tensors(trainer.optimizer))
    for storage in {tensor.untyped_storage() for tensor in tensors}:
        storage.resize_(0)
    for module in (module for chunk in model for module in chunk.modules()):
        module.__dict__.pop("token_dispatcher", None)
    del trainer.model, trainer.optimizer, model
    gc.collect()


def share(args, batch: RolloutBatch, updates: list[np.ndarray], teacher=None) -> RolloutBatch:
    """Return the batch as a rank of a run has it: with the tokens that it computes in updates or for teachers."""
    batch = with_prefixes(batch) if args.share_prompts else batch
    return with_tokens_of(batch, computed_completions(args, batch, updates, (None, teacher)))


def size_flags(completions: int, tokens: int, prompt: int = 1) -> list[str]:
    """Return the flags of a run with one update of ``completions``, each of ``tokens`` with the ``prompt``'s."""
    size = ["--max-prompt-length", str(prompt), "--max-completion-length", str(tokens - prompt), "--beta", "0"]
    return [*size, "--global-batch-size", str(completions), "--num-generations", "2", "--steps-per-generation", "1"]


def one_update(args, lengths: int | Sequence[int], prompt: int = 1) -> tuple[RolloutBatch, np.ndarray]:
    """Return a rollout as this rank has it for the first update, and the completions of that update."""
    batch = rollout(args, lengths, prompt)
    chosen = divide_rollout(batch.num_completions, 2, False, LOSSES.get(args.loss_type), args.seed)[0]
    return share(args, batch, [chosen]), chosen


def two_updates(args, trainer, batch: RolloutBatch) -> tuple[list[dict], float, RolloutBatch]:
    """Divide the rollout into two updates, and run them.

    Returns:
        (metrics of each update, tokens per second of the second update, batch with this rank's share of the tokens)
    """
    batch = off_policy(args, trainer, batch)
    if "advantage_estimator" in args.explicit:  # else the made-up advantages are used
        batch, _ = estimate_advantages(args, batch, batch.rewards[:, 0])
    rows, shuffle, loss = [], not args.no_shuffle_completions, LOSSES.get(args.loss_type)
    updates = divide_rollout(batch.num_completions, 2, shuffle, loss, args.seed)
    batch = share(args, batch, updates)
    for completions in updates:
        started = time.monotonic()
        rows.append(pretrain_grpo.update(args, trainer, batch, completions))
    return rows, rows[-1]["tokens/update"] / (time.monotonic() - started), batch


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks begin together, with the work of this rank's device."""
    _synchronize()
    dist.barrier()
    start = time.perf_counter()
    call()
    _synchronize()
    return time.perf_counter() - start


# Kinds of kernels and operators by a part of their name, the first that is found.
KINDS = (
    ("transfers between ranks", "^nccl"),
    ("optimizer", "adam|multi_tensor|foreach|lpnorm|l2norm"),
    ("attention forward", "flash_fwd|flashattentionforward|flash_attention_forward|attention_for_cpu$"),
    ("attention backward", "flash_bwd|flashattentionbackward|flash_attention_backward|attention_for_cpu_backward"),
    ("matrix products", "gemm|nvjet|cublas|cutlass|xmma|aten::mm|aten::addmm|aten::bmm"),
    ("copies and sums of rows", "_sum_rows|index_?select|gather|index_add|index_copy|scatter"),
    ("norms, rotations and SwiGLU", "_heads|_norm_gradient|rms_?norm|swiglu|silu|_cos|_sin"),
    ("head: log-softmax", "_(?:peak|sums|gradient)\\b|logsumexp|softmax|amax|exp_|log_|reduce_kernel.*max"),
    ("memory: copies and zeros", "memcpy|memset|copy|fill|zero|cat"),
)


def kind_of(name: str) -> str:
    """Return the kind of a kernel or operator."""
    return next((kind for kind, part in KINDS if re.search(part, name.lower())), "others")


def print_profile(what: str, call: Callable[[], object], count: int) -> None:
    """Print the seconds of a call by kind of kernel, and the ``count`` kernels with the most; all ranks call it.

    ``idle`` are the seconds in which no kernel runs. Without a GPU kernels are torch's operators.
    """
    gpu = torch.cuda.is_available()  # there operators would take minutes to read
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as recorded:
        time_of_call = seconds(call)
    table: dict[str, tuple[int, float]] = {}  # calls, seconds
    spans, transfers = [], []
    if gpu:
        for event in recorded.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                calls, before = table.get(event.name, (0, 0.0))
                spent = event.time_range.elapsed_us() / 1e6
                table[event.name] = calls + 1, before + spent
                spans.append((event.time_range.start / 1e6, event.time_range.end / 1e6))
                if event.name.startswith("nccl"):
                    transfers.append((event.time_range.start, spent))
    else:
        table = {row.key: (row.count, row.self_cpu_time_total / 1e6) for row in recorded.key_averages()}
    busy = _covered(spans) if gpu else sum(total for _, total in table.values())
    kinds = {"idle": max(time_of_call - busy, 0.0)}
    for name, (_, total) in table.items():
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + total
    number = sum(calls for calls, _ in table.values())
    print_rank_0(f"\nprofiled {what}: {time_of_call:.3f} s, {number:,} kernels and copies")
    _print_waiting([time for _, time in sorted(transfers)])
    print_rank_0("\n| s | kind |\n|--:|---|")
    for kind, total in sorted(kinds.items(), key=lambda row: -row[1]):
        print_rank_0(f"| {total:.3f} | {kind} |")
    print_rank_0("\n| s | calls | us a call | kernel | kind |\n|--:|--:|--:|---|---|")
    for name, (calls, total) in sorted(table.items(), key=lambda row: -row[1][1])[:count]:
        print_rank_0(f"| {total:.3f} | {calls:,} | {1e6 * total / calls:.1f} | `{name[:110]}` | {kind_of(name)} |")


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans (start, end)."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return covered


def _print_waiting(transfers: list[float]) -> None:
    """Print for how long each rank's NCCL kernels wait for other ranks, from their seconds in the order of their begin.

    The last rank that launches a transfer does not wait in it; its time is that of the transfer.
    """
    of_ranks: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, transfers)
    if len(transfers) and len({len(times) for times in of_ranks}) == 1:  # pipeline stages have different ones
        own = sum(map(min, zip(*of_ranks, strict=True)))
        waits = ", ".join(f"{sum(times) - own:.3f}" for times in of_ranks)
        print_rank_0(f"transfers {own:.3f} s; the ranks wait in them for each other {waits} s")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(reset: bool = False) -> float:
    """Return the peak memory of this process since the last reset, in MiB, of its GPU or else of the host."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return peak / 2**20
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
