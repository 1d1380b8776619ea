"""Shared code of `against_others.py`: made-up tensors, this project's results, and the import of other libraries."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import transformers.trainer  # noqa: F401  before the stand-ins are installed: it tests which packages exist
from torch import Tensor

from megatron_grpo.algorithm.arguments import check_loss, check_ratio, resolve_loss
from megatron_grpo.algorithm.importance_sampling import importance_weights, mismatch, mismatch_metrics
from megatron_grpo.algorithm.kl import kl_term
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.policy_term import drop_overlong, policy_term, update_statistics
from megatron_grpo.algorithm.rollout_advantages import estimate_advantages
from megatron_grpo.algorithm.weighting import token_weights
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced, resolved

GROUP = 4  # completions of a prompt, consecutive as in TRL
END = 1  # the token that ends a completion
# Packages that the other libraries import but that the called functions do not use.
STAND_INS = {"pandas", "datasets", "omegaconf", "tensordict", "ray", "orjson", "codetiming", "torchdata", "hydra"}


class Data(NamedTuple):
    """24 completions of 6 prompts: tensors [n, s], padded on the right, or [n]; float64 with values of float32."""

    tokens: Tensor  # 1 up to the length of each completion, including tokens outside the response mask
    mask: Tensor  # response mask: 1 on tokens in the loss
    log_probs: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    entropies: Tensor
    advantages: Tensor  # [n]
    rewards: Tensor  # [n, 2]
    cut: Tensor  # [n], completions that reached the length limit

    def rows(self, chosen: slice) -> "Data":
        return Data(*(field[chosen] for field in self))


def made_up(seed: int = 7, n: int = 24, width: int = 16) -> Data:
    """Make up completions of different lengths with tool tokens, and ratios on both sides of all bounds."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    lengths = torch.randint(3, width + 1, (n,), generator=generator)
    lengths[0] = width
    tokens = (torch.arange(width) < lengths[:, None]).double()
    mask = tokens * (torch.rand(n, width, generator=generator) > 0.2)
    mask[:, 0] = 1
    log_probs = -normal(n, width).abs() - 0.05
    old = log_probs - 0.3 * normal(n, width) - 0.1 * normal(n, 1)
    old[1::6, 1] = log_probs[1::6, 1] - 1.6  # a ratio of 5
    rewards = torch.stack([(normal(n) > 0).double(), normal(n)], 1)
    rewards[4:8, 0] = 1.0  # a group of equal rewards
    rollout = old - 0.4 * normal(n, width) - 0.5 * normal(n, 1)
    fields = tokens, mask, log_probs, old, log_probs + 0.5 * normal(n, width), rollout
    cut = torch.zeros(n).bool()
    cut[[2, 9]] = True
    data = Data(*fields, normal(n, width).abs(), normal(n), rewards, cut)
    return Data(*(field.float().double() if field.is_floating_point() else field for field in data))


class Case(NamedTuple):
    """One line of the table."""

    thing: str
    flags: str
    function: str
    data: Data
    ours: Callable[[Data, str], Any]
    theirs: Callable[[Data], Any]
    difference: str = ""  # the known difference and its judgement; empty if there is none


# ---- this project


def our_batch(data: Data) -> RolloutBatch:
    """Return the rollout batch of the trainer: one prompt token, then the completion."""
    lengths = [int(row.sum()) for row in data.tokens]
    batch = RolloutBatch.from_completions(
        prompts=[[0]] * len(lengths),
        completions=[[2] * (length - 1) + [END] for length in lengths],
        log_probs=[None] * len(lengths),
        weight_version=0,
        group_ids=[i // GROUP for i in range(len(lengths))],
        row_ids=[0] * len(lengths),
        sample_ids=list(range(len(lengths))),
        finish_reasons=[FinishReason.LENGTH if cut else FinishReason.STOP for cut in data.cut],
    )
    there = batch.response_mask == 1
    for name, values in (("old", data.old), ("ref", data.ref), ("rollout", data.rollout)):
        flat = np.full(len(there), np.nan, np.float32)
        flat[there] = values[data.tokens == 1].numpy()
        setattr(batch, f"{name}_log_probs", flat)
    batch.response_mask[there] = data.mask[data.tokens == 1].numpy()
    batch.rewards = data.rewards.float().numpy()
    batch.advantages = data.advantages.float().numpy()
    return batch


def our_args(flags: str):
    args = parse_args([*flags.split(), "--num-generations", str(GROUP)])
    threshold = args.rollout_importance_sampling_threshold or 2.0
    args = replaced(args, updates_per_rollout=2, rollout_importance_sampling_threshold=threshold)
    return resolved(args, check_loss, resolve_loss, check_ratio)


def our_loss(data: Data, flags: str) -> tuple[Tensor, Tensor]:
    """Return the loss of one update on all data, as in `pretrain_grpo`, and its gradient, [n, s]."""
    args = our_args(flags)
    batch = our_batch(data)
    if args.overlong_filter:
        batch = drop_overlong(batch)
    everyone = np.arange(batch.num_completions)
    aggregation = LOSSES.get(args.loss_type).aggregation
    weights = token_weights(aggregation, batch.response_lengths, args.micro_batch_size, args.max_completion_length)
    flat = np.zeros((2, len(batch.tokens)))
    flat[:, np.concatenate([np.arange(a + 1, b) for a, b in _bounds(batch)])] = torch.stack(
        [data.log_probs[data.tokens == 1], data.entropies[data.tokens == 1]]
    )
    batch, _ = update_statistics(args, batch, everyone, 0, lambda *_: flat)
    tokens = batch.response_positions(everyone)
    owner = np.repeat(np.arange(batch.num_completions), batch.lengths)[tokens]
    arrays = {"advantages": batch.advantages_of(tokens, owner), "completion": owner}
    for name in ("policy_mask", "kl_cov", "rollout_log_probs", "ref_log_probs", "old_log_probs"):
        if getattr(batch, name) is not None:
            arrays[name] = getattr(batch, name)[tokens]
    tensors = {k: torch.from_numpy(v if v.dtype == np.int64 else v.astype(np.float64)) for k, v in arrays.items()}
    log_probs = torch.from_numpy(flat[0][tokens]).requires_grad_()
    old = tensors["old_log_probs"]
    loss = policy_term(args, log_probs, old, tensors).loss
    if args.beta > 0:
        loss = loss + args.beta * kl_term(args.kl_estimator, log_probs, tensors["ref_log_probs"], old)
    if args.entropy_coef:
        loss = loss - args.entropy_coef * torch.from_numpy(flat[1][tokens])
    loss = (torch.from_numpy(weights)[owner] * loss).sum()
    of_tokens = torch.autograd.grad(loss, log_probs)[0]
    gradient = torch.zeros_like(data.mask)
    places = batch.response_mask[batch.response_mask >= 0] == 1
    inside = np.concatenate([places[a + 1 : b] for a, b in _bounds(batch)])
    gradient[tuple(index[inside] for index in (data.tokens == 1).nonzero(as_tuple=True))] = of_tokens
    return loss.detach(), gradient


def our_importance_weights(data: Data, flags: str) -> Tensor:
    """Return the rollout importance weights of tokens in the loss, [n, s]; 0 elsewhere."""
    args = our_args(flags)
    there = data.mask == 1
    found = importance_weights(
        args.rollout_importance_sampling_mode,
        data.old[there],
        data.rollout[there],
        there.nonzero()[:, 0],
        args.rollout_importance_sampling_threshold,
        args.rollout_importance_sampling_lower_bound,
    )
    return torch.zeros_like(data.mask).masked_scatter(there, found.weights)


def our_mismatch(data: Data, *names: str) -> Tensor:
    """Return the metrics ``names`` of the mismatch between trainer and engine."""
    there = data.mask == 1
    totals = mismatch(data.old[there], data.rollout[there])
    metrics = mismatch_metrics({name: float(value) for name, value in totals.items()})
    return torch.tensor([metrics[name] for name in names]).double()


def our_advantages(data: Data, flags: str) -> Tensor:
    """Return the advantages of tokens in the loss, [n, s]; 0 elsewhere."""
    args = replaced(our_args(flags), reward_weights=[1.0] * data.rewards.shape[1])
    if args.scale_rewards is None:
        args = replaced(args, scale_rewards="group" if args.advantage_estimator == "grpo" else "none")
    batch = our_batch(data)
    batch, _ = estimate_advantages(args, batch, summed(data).float().numpy())
    if batch.token_advantages is None:
        return torch.from_numpy(batch.advantages).double()[:, None] * data.mask
    flat = np.concatenate([batch.token_advantages[a + 1 : b] for a, b in _bounds(batch)])
    result = torch.zeros_like(data.mask)
    result[data.tokens == 1] = torch.from_numpy(flat).double()
    return result


def summed(data: Data) -> Tensor:
    """Return the sums of rewards, [n]; NaN for completions without any score."""
    return data.rewards.nansum(1).float().double().masked_fill(data.rewards.isnan().all(1), torch.nan)


def _bounds(batch: RolloutBatch):
    return zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)


# ---- import of the other libraries


class _Absent(type):
    """Metaclass of classes of a missing package, with arbitrary attributes and no behaviour."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return (
            args[0] if len(args) == 1 and callable(args[0]) else type.__call__(cls)
        )  # as a decorator it returns its function


def _absent(name: str) -> Any:
    return _Absent(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that creates empty modules for STAND_INS; it is the last one, so installed packages have priority."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = fullname.partition(".")[0] in STAND_INS
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__.update(__path__=[], __version__="99", __getattr__=lambda name: _stand_in(name))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(name)


def load(directory: Path, *names: str) -> list[Any]:
    """Import modules of another library, from ``directory`` only."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns())
    sys.path.insert(0, str(directory))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [importlib.import_module(name) for name in names]
    for module in modules:
        if not Path(module.__file__ or "").resolve().is_relative_to(directory.resolve()):
            raise SystemExit(f"{module.__name__} is {module.__file__}, not in {directory}")
    return modules
