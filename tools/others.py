"""Made-up tensors, and our side, TRL's and verl's of what `against_others.py` compares."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import transformers.trainer  # noqa: F401  before the stand-ins are: it looks for packages itself
from torch import Tensor

from megatron_grpo.advantage_term import estimate_advantages
from megatron_grpo.algorithm.corrections import importance_weights
from megatron_grpo.algorithm.kl import kl_term
from megatron_grpo.algorithm.weighting import token_weights
from megatron_grpo.arguments import parse_args
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.loss_rules import check_loss
from megatron_grpo.policy_term import drop_overlong, policy_term, update_statistics

GROUP = 4  # completions of a prompt, side by side: TRL takes them so
END = 1  # the token that ends a completion
# What theirs import and the functions called do not use.
STAND_INS = {"pandas", "datasets", "omegaconf", "tensordict", "ray", "orjson", "codetiming", "torchdata", "hydra"}


class Data(NamedTuple):
    """24 completions of 6 prompts: [n, s] padded on the right, in float64, or [n]. Tokens come as float32 would."""

    tokens: Tensor  # how long each completion is: 1 up to its length, also on tokens that are not in the loss
    mask: Tensor  # 1 on tokens in the loss
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
    """Ragged completions with tokens of a tool in between; ratios to either side of all bounds."""
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
    fields = tokens, mask, log_probs, old, log_probs + 0.5 * normal(n, width), old - 0.4 * normal(n, width)
    cut = torch.zeros(n).bool()
    cut[[2, 9]] = True
    data = Data(*fields, normal(n, width).abs(), normal(n), rewards, cut)
    return Data(*(field.float().double() if field.is_floating_point() else field for field in data))


# ---- ours


def our_batch(data: Data) -> RolloutBatch:
    """The rollout as the trainer holds it: one token of prompt, then the completion."""
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
    there = batch.loss_mask == 1
    for name, values in (("old", data.old), ("ref", data.ref), ("rollout", data.rollout)):
        flat = np.full(len(there), np.nan, np.float32)
        flat[there] = values[data.tokens == 1].numpy()
        setattr(batch, f"{name}_log_probs", flat)
    batch.loss_mask[there] = data.mask[data.tokens == 1].numpy()
    batch.rewards = data.rewards.float().numpy()
    batch.advantages = data.advantages.float().numpy()
    return batch


def our_args(flags: str):
    args = parse_args([*flags.split(), "--num-generations", str(GROUP)])
    args.updates_per_rollout = 2
    args.rollout_importance_sampling_threshold = args.rollout_importance_sampling_threshold or 2.0
    check_loss(args)
    return args


def our_loss(data: Data, flags: str) -> tuple[Tensor, Tensor]:
    """The loss of an update on all of the data, as `pretrain_grpo` makes it, and its gradient, [n, s]."""
    args = our_args(flags)
    batch = our_batch(data)
    if args.overlong_filter:
        drop_overlong(batch)
    mode = args.rollout_importance_sampling_mode
    if mode:
        batch = replace(batch, corrections=_corrections(args, batch))
    everyone = np.arange(batch.num_completions)
    weights = token_weights(args.loss_type, batch.loss_lengths, args.micro_batch_size, args.max_completion_length)
    flat = np.zeros((2, len(batch.tokens)))
    flat[:, np.concatenate([np.arange(a + 1, b) for a, b in _bounds(batch)])] = torch.stack(
        [data.log_probs[data.tokens == 1], data.entropies[data.tokens == 1]]
    )
    batch = update_statistics(args, batch, everyone, 0, lambda *_: flat)
    tokens = batch.loss_positions(everyone)
    owner = np.repeat(np.arange(batch.num_completions), batch.lengths)[tokens]
    tensors = {"advantages": batch.advantages_of(tokens, owner), "completion": owner}
    for name in ("corrections", "policy_mask", "kl_cov", "rollout_log_probs", "ref_log_probs", "old_log_probs"):
        if getattr(batch, name) is not None:
            tensors[name] = getattr(batch, name)[tokens]
    tensors = {k: torch.from_numpy(v if v.dtype == np.int64 else v.astype(np.float64)) for k, v in tensors.items()}
    log_probs = torch.from_numpy(flat[0][tokens]).requires_grad_()
    old = tensors["old_log_probs"]
    loss = policy_term(args, log_probs, old, tensors).loss
    if args.beta > 0:
        loss = loss + args.beta * kl_term(args.kl_estimator, log_probs, tensors["ref_log_probs"], old)
    if args.entropy_coef:
        loss = loss - args.entropy_coef * torch.from_numpy(flat[1][tokens])
    loss = (torch.from_numpy(weights)[owner] * loss).sum()
    loss.backward()
    gradient = torch.zeros_like(data.mask)
    places = batch.loss_mask[batch.loss_mask >= 0] == 1
    inside = np.concatenate([places[a + 1 : b] for a, b in _bounds(batch)])
    gradient[tuple(index[inside] for index in (data.tokens == 1).nonzero(as_tuple=True))] = log_probs.grad
    return loss.detach(), gradient


def our_corrections(data: Data, flags: str) -> Tensor:
    """The factors of --rollout-importance-sampling-mode on tokens in the loss, [n, s]; 0 elsewhere."""
    batch = our_batch(data)
    flat = _corrections(our_args(flags), batch)
    factors = torch.zeros_like(data.mask)
    factors[data.tokens == 1] = torch.from_numpy(np.concatenate([flat[a + 1 : b] for a, b in _bounds(batch)])).double()
    return factors * data.mask


def our_advantages(data: Data, flags: str) -> Tensor:
    """Advantages of tokens in the loss, [n, s]; 0 elsewhere."""
    args = our_args(flags)
    args.reward_weights = [1.0] * data.rewards.shape[1]
    if args.scale_rewards is None:
        args.scale_rewards = "group" if args.advantage_estimator == "grpo" else "none"
    batch = our_batch(data)
    estimate_advantages(args, batch, summed(data).float().numpy())
    if batch.token_advantages is None:
        return torch.from_numpy(batch.advantages).double()[:, None] * data.mask
    flat = np.concatenate([batch.token_advantages[a + 1 : b] for a, b in _bounds(batch)])
    result = torch.zeros_like(data.mask)
    result[data.tokens == 1] = torch.from_numpy(flat).double()
    return result


def summed(data: Data) -> Tensor:
    """R, [n]: NaN where nothing scored."""
    return data.rewards.nansum(1).float().double().masked_fill(data.rewards.isnan().all(1), torch.nan)


def _corrections(args, batch: RolloutBatch):
    bounds = args.rollout_importance_sampling_threshold, args.rollout_importance_sampling_lower_bound
    return importance_weights(
        args.rollout_importance_sampling_mode,
        batch.old_log_probs,
        batch.rollout_log_probs,
        batch.loss_mask,
        batch.cu_seqlens,
        *bounds,
    ).weights


def _bounds(batch: RolloutBatch):
    return zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)


# ---- theirs


class _Absent(type):
    """A class of a package that is not there: it has any attribute, and does nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else type.__call__(cls)  # a decorator leaves as is


def _absent(name: str) -> Any:
    return _Absent(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for STAND_INS, last in line: what is installed is used."""

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
    """Their modules, from this directory and no other."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns())
    sys.path.insert(0, str(directory))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [importlib.import_module(name) for name in names]
    for module in modules:
        if not Path(module.__file__).is_relative_to(directory.resolve()):
            raise SystemExit(f"{module.__name__} is {module.__file__}, not in {directory}")
    return modules


class Trl:
    """TRL's GRPOTrainer and RLOOTrainer, without a model: log-probabilities and rewards are what the data says."""

    def __init__(self, directory: Path) -> None:
        grpo, rloo, package = load(directory, "trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "trl")
        self.trainers = {"grpo": grpo.GRPOTrainer, "rloo": rloo.RLOOTrainer}
        self.version = f"TRL {package.__version__}"

    def stub(self, kind: str, data: Data, answer: Any, **settings: Any) -> Any:
        """A trainer that was never set up; ``answer`` is what its model would say: log-probabilities and entropies."""
        lengths = [int(row.sum()) for row in data.tokens]
        ids = [[2] * (n - 1) + [2 if cut else END] for n, cut in zip(lengths, data.cut, strict=True)]
        engine = [row[:n].tolist() for row, n in zip(data.rollout, lengths, strict=True)]
        tools = [row[:n].long().tolist() for row, n in zip(data.mask, lengths, strict=True)]
        generated = {
            "grpo": ([[0]] * len(ids), ids, tools, ids, engine, {}, None, None),
            "rloo": ([[0]] * len(ids), ids, ids),
        }
        methods = {
            "_get_per_token_logps_and_entropies": lambda self, *_, **__: (*answer, None),
            "_generate": lambda self, prompts: generated[kind],
            "_calculate_rewards": lambda self, *_: data.rewards,
        }
        stub = object.__new__(type("Stub", (self.trainers[kind],), methods))
        same = lambda x, *_, **__: x  # noqa: E731
        vars(stub).update(
            accelerator=SimpleNamespace(
                device=torch.device("cpu"), num_processes=1, process_index=0, sync_gradients=True, gather=same,
                gather_for_metrics=same, reduce=same, pad_across_processes=same,
            ),
            args=SimpleNamespace(
                delta=settings.pop("delta", None), use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
                sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, gradient_checkpointing_kwargs=None,
                steps_per_generation=settings.pop("steps_per_generation", 1), gradient_accumulation_steps=3,
                per_device_train_batch_size=1,
            ),
            model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
            _metrics={"train": defaultdict(list)}, _pending_extra_logs={}, _pending_metrics={},
            _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
            _tokenizer=SimpleNamespace(pad_token_id=0), eos_token_ids=[END], pad_to_multiple_of=None,
            reward_funcs=["a", "b"], reward_func_names=["a", "b"], reward_weights=torch.ones(2).double(),
            num_generations=GROUP, num_iterations=1, aux_loss_enabled=False, tools=None, environments=None,
            environment_factories=None, _is_vlm=False, log_multimodal=False, ref_model=None, reward_clip_range=None,
            normalize_advantages=False, multi_objective_aggregation="sum_then_normalize", scale_rewards="group",
            mask_truncated_completions=False, use_vllm=False, vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_min=None,
            vllm_importance_sampling_clip_max=2.0, loss_type="grpo", importance_sampling_level="token", beta=0.0,
            epsilon_low=0.2, epsilon_high=0.2, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
            max_completion_length=512, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
            use_adaptive_entropy=False, entropy_coef=0.0,
        )  # fmt: skip
        vars(stub).update(settings)
        return stub

    def rollout(self, data: Data, kind: str = "grpo", **settings: Any) -> dict[str, Any]:
        """What its `_generate_and_score_completions` hands to the loss."""
        stub = self.stub(kind, data, (data.old, data.entropies), **settings)
        return stub._generate_and_score_completions([{"prompt": "?"}] * len(data.mask))

    def loss(self, data: Data, micro_batches: int = 1, **settings: Any) -> tuple[Tensor, Tensor]:
        """Its `_compute_loss`, summed over the micro-batches of an update as accelerate adds up their gradients."""
        log_probs = data.log_probs.clone().requires_grad_()
        of_rollout = {k: v for k, v in settings.items() if k.startswith(("vllm", "use_vllm", "mask_truncated"))}
        inputs = self.rollout(data, **of_rollout)
        inputs |= {"old_per_token_logps": data.old, "ref_per_token_logps": data.ref, "advantages": data.advantages}
        inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * settings.pop("rollout_over_update", 1)
        size, total = len(data.mask) // micro_batches, torch.zeros(()).double()
        for start in range(0, len(data.mask), size):
            rows = slice(start, start + size)
            part = {k: v[rows] if v.dim() else v for k, v in inputs.items()}
            answer = log_probs[rows], data.entropies[rows]
            stub = self.stub(
                "grpo", data, answer, **{"steps_per_generation": micro_batches} | settings,
                current_gradient_accumulation_steps=micro_batches,
            )  # fmt: skip
            total = total + stub._compute_loss(stub.model, part)
        total.backward()
        return total.detach(), log_probs.grad


class Verl:
    """verl's core_algos and rollout_corr_helper."""

    def __init__(self, directory: Path) -> None:
        names = "verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper", "verl.workers.config", "verl"
        self.core, self.corrections, self.config, package = load(directory, *names)
        self.version = f"verl {package.__version__}"

    def loss(self, data: Data, name: str, mode: str, weights: Tensor | None = None, **settings: Any) -> Any:
        """A policy loss of its registry and the gradient; ``settings`` are fields of its configuration."""
        log_probs = data.log_probs.clone().requires_grad_()
        of_loss = {k: settings.pop(k) for k in list(settings) if k.startswith(("clip_cov", "kl_cov", "ppo_kl"))}
        config = self.config.ActorConfig(
            strategy="fsdp", rollout_n=GROUP, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True,
            policy_loss=self.config.PolicyLossConfig(**of_loss), **settings,
        )  # fmt: skip
        advantages = data.advantages[:, None].expand_as(data.mask) * data.mask
        loss, _ = self.core.get_policy_loss_fn(name)(
            old_log_prob=data.old, log_prob=log_probs, advantages=advantages, response_mask=data.mask,
            loss_agg_mode=mode, config=config, rollout_is_weights=weights,
        )  # fmt: skip
        loss.backward()
        return loss.detach(), log_probs.grad

    def kl(self, data: Data, kind: str) -> tuple[Tensor, Tensor]:
        """Its KL term, averaged over all tokens."""
        log_probs = data.log_probs.clone().requires_grad_()
        loss = self.core.agg_loss(self.core.kl_penalty(log_probs, data.ref, kind), data.mask, "token-mean")
        loss.backward()
        return loss.detach(), log_probs.grad

    def advantages(self, data: Data, estimator: str, beta: float = 0.0, **settings: Any) -> Tensor:
        """Advantages of an estimator of its registry, [n, s]; R at the last token, the KL penalty at all."""
        last = (data.mask * torch.arange(1, data.mask.shape[1] + 1)).argmax(1)
        rewards = -beta * (data.old - data.ref) * data.mask
        rewards[torch.arange(len(last)), last] += summed(data)
        groups = np.arange(len(last)) // GROUP
        config = SimpleNamespace(gamma=settings.pop("gamma", 1.0), get=lambda key, default=None: default)
        if "norm_adv_by_std_in_grpo" in settings and estimator == "grpo_passk":
            config.get = lambda key, default=None: settings["norm_adv_by_std_in_grpo"]
        function = self.core.get_adv_estimator_fn(estimator)
        return function(rewards, response_mask=data.mask, index=groups, config=config, **settings)[0]
