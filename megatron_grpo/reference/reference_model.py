"""Models that only compute log-probabilities: the reference of the KL term, and the teacher.

A reference with the policy's parallel configuration is a second set of weights for the policy's modules
(``SwappedReference``). A reference with another one, and a teacher, are second models with process groups of their own
on the same ranks (``ReferenceModel``). The reference of a policy with adapters is the policy without them
(``BaseReference``). The first two store their weights in host memory between passes, and can follow the
policy by an EMA update (TR-DPO, arXiv:2404.09656). The average is then stored in float32, because in 16 bits most
updates would round to nothing; a pass rounds it to the model's dtype.
"""

import contextlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.lora.attach import adapters, switched_off, trained
from megatron_grpo.models import forward
from megatron_grpo.models.fp8_training import free_fp8_weights
from megatron_grpo.parallel.rank_groups import RankGroups
from megatron_grpo.utils.device import device
from megatron_grpo.utils.page_locked import host_copies
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.stream import stream_hf


class ReferenceModel:
    """A reference or teacher model with its own parallel configuration; a teacher may have its own architecture."""

    def __init__(self, args: Namespace, model_provider: Callable, load: Callable[[forward.Model], None] | None = None):
        """Build the model that ``args`` describe; ``load``, or a later call of `update_from`, sets its weights."""
        self.args, self.groups, self.updated = args, RankGroups(args), False
        with self.groups.entered():
            self.model = forward.build_model(args, model_provider)
            for chunk in self.model:
                chunk.requires_grad_(False)
            if load is not None:
                load(self.model)
        tensors = self._tensors()
        self.dtypes = [tensor.dtype for tensor in tensors]  # on the device
        for tensor, copy in zip(tensors, _stored(tensors, args.sync_ref_model), strict=True):
            tensor.data = copy

    def _tensors(self) -> list[Tensor]:
        return [tensor for chunk in self.model for tensor in forward.weight_tensors(chunk)]

    @contextlib.contextmanager
    def ready(self, policy: forward.Model) -> Iterator["ReferenceModel"]:
        """Context in which forward passes use this model (``.args``, ``.model``) and its process groups; collective."""
        tensors = self._tensors()
        hosts = [tensor.data for tensor in tensors]
        for tensor, dtype in zip(tensors, self.dtypes, strict=True):
            tensor.data = tensor.data.to(device(), dtype, non_blocking=True)
        try:
            with self.groups.entered():
                yield self
        finally:
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.data = host
            free_fp8_weights(self.model)

    def log_probs(self, batch: RolloutBatch, policy: forward.Model, forward_step: Callable) -> np.ndarray:
        """Return the log-probabilities of a rollout's tokens under this model, ``[total]``; collective."""
        return _log_probs(self, batch, policy, forward_step)

    def own_completions(self, batch: RolloutBatch, completions: np.ndarray | None = None) -> np.ndarray:
        """Return those of ``completions`` [all of the rollout] whose log-probabilities this rank computes."""
        with self.groups.entered():
            return _own_completions(self.args, batch, completions)

    def rows(
        self,
        batch: RolloutBatch,
        completions: np.ndarray,
        policy: forward.Model,
        forward_step: Callable,
        nothing: np.ndarray,
    ) -> np.ndarray:
        """Return this model's output for the tokens of ``completions``, ``nothing`` elsewhere; collective."""
        with self.ready(policy):
            packs = forward.micro_batches(self.args, batch, completions, forward.budget_of_scores(self.args))
            step = partial(forward_step, args=self.args, num_microbatches=len(packs))
            return forward.forward_rows(step, packs, self.model, batch, nothing)

    @torch.no_grad()
    def update_from(self, policy_args: Namespace, policy: forward.Model, share: float = 1.0) -> None:
        """Set the weights to ``share`` x policy + (1 - ``share``) x self, computed in float32; collective."""
        with self.groups.entered():
            weights = model_weights.local_weights(self.model, model_weights.table(self.args))
            shards = [(weight, tensor, model_weights.tensor_parallel(weight)) for weight, tensor in weights]
        waiting = defaultdict(list)
        for shard in shards:
            for name in shard[0].hf:
                waiting[name].append(shard)
        received: dict[str, Tensor] = {}
        for name, whole in stream_hf(policy, policy_args):
            if name not in waiting:
                continue
            received[name] = whole.to("cpu", copy=True)
            for weight, tensor, place in waiting[name]:
                if received.keys() >= weight.hf.keys():
                    theirs = torch.empty_like(tensor)
                    weight.fill(theirs, *place, lambda part, index: received[part][index])
                    mix(tensor, theirs, share)
            for part in [
                part for part in received if all(received.keys() >= shard[0].hf.keys() for shard in waiting[part])
            ]:
                del received[part], waiting[part]

    def ema_update(self, policy_args: Namespace, policy: forward.Model, share: float) -> None:
        """Update the reference (TR-DPO) between two rollouts: ``share`` x policy + (1 - ``share``) x reference."""
        with forward.parameters_complete(policy):
            self.update_from(policy_args, policy, share)
        self.updated = True

    def save(self, directory: Path, policy: forward.Model) -> None:
        """Write the weights as they are stored; collective."""
        with self.groups.entered():
            checkpoint.save_weights(directory, self.model)

    def load(self, directory: Path, policy: forward.Model) -> None:
        """Load the weights that `save` wrote, with any parallel configuration; collective."""
        with self.groups.entered():
            checkpoint.read_weights(directory, self.model)
        self.updated = True


class SwappedReference:
    """Reference with the policy's parallel configuration: its weights are swapped into the policy's modules."""

    def __init__(self, args: Namespace, model: forward.Model):
        """Copy the model's present weights."""
        self.args, self.weights, self.updated = args, HostWeights(model, args.sync_ref_model), False

    @contextlib.contextmanager
    def ready(self, policy: forward.Model) -> Iterator[Namespace]:
        """Context in which the policy's modules hold the reference's weights."""
        with forward.parameters_complete(policy), self.weights.in_place_of(policy):
            yield Namespace(args=self.args, model=policy)

    def log_probs(self, batch: RolloutBatch, policy: forward.Model, forward_step: Callable) -> np.ndarray:
        """Return the log-probabilities of a rollout's tokens under the reference, ``[total]``; collective."""
        return _log_probs(self, batch, policy, forward_step)

    def own_completions(self, batch: RolloutBatch) -> np.ndarray:
        """Return the completions of the rollout whose log-probabilities this rank computes."""
        return _own_completions(self.args, batch)

    @torch.no_grad()
    def ema_update(self, policy_args: Namespace, policy: forward.Model, share: float) -> None:
        """Update the reference (TR-DPO) between two rollouts: ``share`` x policy + (1 - ``share``) x reference."""
        with forward.parameters_complete(policy):
            for chunk, weights in zip(policy, self.weights.weights, strict=True):
                for theirs, own in zip(forward.weight_tensors(chunk), weights, strict=True):
                    mix(own, theirs.to("cpu"), share)
        self.updated = True

    def save(self, directory: Path, policy: forward.Model) -> None:
        """Write the weights as they are stored; collective."""
        with forward.parameters_complete(policy), self.weights.held_by(policy):
            checkpoint.save_weights(directory, policy)

    def load(self, directory: Path, policy: forward.Model) -> None:
        """Load the weights that `save` wrote, with any parallel configuration; collective."""
        with self.weights.held_by(policy):
            checkpoint.read_weights(directory, policy)
        self.updated = True


class BaseReference:
    """Reference of a policy with adapters: the same model with its adapters switched off, or with another adapter.

    Only the other adapter, and the original weights of modules that are trained whole, are copies, in host memory.
    """

    updated = False

    def __init__(self, args: Namespace, model: forward.Model):
        """Copy what the policy will train, except adapters that will be switched off."""
        self.args = args
        self.copies = _stored([tensor for _, tensor in self._swapped(model)], averaged=False)

    def _swapped(self, model: forward.Model) -> Iterator[tuple[int, torch.nn.Parameter]]:
        """Yield (number, parameter) of the trained parameters that the reference has in another version."""
        off = set() if self.args.reference_adapter else {p for adapter in adapters(model) for p in adapter.parameters()}
        yield from ((place, tensor) for place, tensor in enumerate(trained(model)) if tensor not in off)

    @contextlib.contextmanager
    def ready(self, policy: forward.Model) -> Iterator[Namespace]:
        """Context in which the policy's modules are the reference; all of it is restored bit for bit."""
        with forward.parameters_complete(policy), contextlib.ExitStack() as stack:
            if not self.args.reference_adapter:
                stack.enter_context(switched_off(policy))
            present = [(tensor, tensor.detach().clone()) for _, tensor in self._swapped(policy)]
            for (tensor, _), copy in zip(present, self.copies, strict=True):
                tensor.data.copy_(copy)
            try:
                yield Namespace(args=self.args, model=policy)
            finally:
                for tensor, own in present:
                    tensor.data.copy_(own)

    def log_probs(self, batch: RolloutBatch, policy: forward.Model, forward_step: Callable) -> np.ndarray:
        """Return the log-probabilities of a rollout's tokens under the reference, ``[total]``; collective."""
        return _log_probs(self, batch, policy, forward_step)

    def own_completions(self, batch: RolloutBatch) -> np.ndarray:
        """Return the completions of the rollout whose log-probabilities this rank computes."""
        return _own_completions(self.args, batch)


def _own_completions(args: Namespace, batch: RolloutBatch, completions: np.ndarray | None = None) -> np.ndarray:
    completions = np.arange(batch.num_completions) if completions is None else completions
    return forward.own_completions(args, batch, completions, forward.budget_of_scores(args))


def _log_probs(
    reference: ReferenceModel | SwappedReference | BaseReference,
    batch: RolloutBatch,
    policy: forward.Model,
    forward_step: Callable,
) -> np.ndarray:
    with reference.ready(policy) as ready:  # routes by itself, not by the policy's experts
        return forward.log_probs(ready.args, ready.model, forward_step, replace(batch, routed_experts=None))


def mix(own: Tensor, theirs: Tensor, share: float) -> None:
    """Set own to share x theirs + (1 - share) x own in place, in the dtype of own; share 1 copies theirs."""
    if share < 1 and own.is_floating_point():
        own.lerp_(theirs.to(own.dtype), share)
    else:
        own.copy_(theirs)


def _stored(tensors: Sequence[Tensor], averaged: bool) -> list[Tensor]:
    """Return copies in host memory; of weights that are averaged (--sync-ref-model) in float32."""
    dtypes = [torch.float32 if averaged and tensor.is_floating_point() else tensor.dtype for tensor in tensors]
    return host_copies(tensors, dtypes)


class HostWeights:
    """A copy of a model's weights, stored in host memory; swapped in for one forward pass."""

    def __init__(self, model: forward.Model, averaged: bool = False):
        """Copy the model's present weights; ``averaged``: in float32."""
        chunks = [[*forward.weight_tensors(chunk)] for chunk in model]
        copies = iter(_stored([tensor for chunk in chunks for tensor in chunk], averaged))
        self.weights = [[next(copies) for _ in chunk] for chunk in chunks]
        self._policy: HostWeights | None = None  # of `in_place_of`, whose memory stays page-locked

    @torch.no_grad()
    def copy_from(self, model: forward.Model) -> None:
        """Copy the model's present weights."""
        for chunk, weights in zip(model, self.weights, strict=True):
            for tensor, weight in zip(forward.weight_tensors(chunk), weights, strict=True):
                weight.copy_(tensor, non_blocking=True)

    @torch.no_grad()
    def copy_to(self, model: forward.Model) -> None:
        """Overwrite the model's weights, rounded to their dtype."""
        for chunk, weights in zip(model, self.weights, strict=True):
            for tensor, weight in zip(forward.weight_tensors(chunk), weights, strict=True):
                tensor.copy_(weight, non_blocking=True)

    @contextlib.contextmanager
    def in_place_of(self, model: forward.Model) -> Iterator[None]:
        """Context in which the model holds these weights; the policy's weights are restored bit for bit afterwards."""
        if self._policy is None:
            self._policy = HostWeights(model)
        else:
            self._policy.copy_from(model)
        self.copy_to(model)
        try:
            yield
        finally:
            self._policy.copy_to(model)

    @contextlib.contextmanager
    def held_by(self, model: forward.Model) -> Iterator[None]:
        """Context in which the model's parameters and buffers are these tensors, in their dtype and in host memory.

        The modules have other parameters meanwhile. If the data of a parameter changed its dtype or device, autograd
        would drop the hooks by which DDP collects the parameter's gradient: every later update would have none.
        """
        tensors = [tensor for chunk in model for tensor in forward.weight_tensors(chunk)]
        held = {}
        for tensor, weight in zip(tensors, [weight for chunk in self.weights for weight in chunk], strict=True):
            held[tensor] = weight
            if isinstance(tensor, torch.nn.Parameter):
                held[tensor] = torch.nn.Parameter(weight, requires_grad=False)
                vars(held[tensor]).update(vars(tensor))  # how megatron-core shards it
        own: list[tuple[dict[str, Any], str, Tensor]] = []
        for module in (module for chunk in model for module in chunk.modules()):
            registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for registry in registries:
                own += [(registry, name, tensor) for name, tensor in registry.items() if tensor is not None]
        for registry, name, tensor in own:
            registry[name] = held[tensor]
        try:
            yield
        finally:
            for registry, name, tensor in own:
                registry[name] = tensor
