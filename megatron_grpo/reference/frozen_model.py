"""Models that only answer with log-probabilities: the reference of the KL term, and a teacher.

A reference in the policy's layout takes the policy's place in the one model (``SwappedReference``). Any other frozen
model is built a second time, in process groups of its own on the same ranks (``FrozenModel``); its weights lie in host
memory while it is not asked. Both have ``ready``, and a reference can move after the policy (arXiv:2404.09656).
"""

import contextlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.models import forward
from megatron_grpo.parallel.second_layout import Layout
from megatron_grpo.utils.cpu_backend import device
from megatron_grpo.weights import mapping
from megatron_grpo.weights.stream import stream_hf


class FrozenModel:
    """A model in a layout, and maybe an architecture, of its own."""

    def __init__(self, args: Namespace, model_provider: Callable, load: Callable[[forward.Model], None] | None = None):
        """Build it as ``args`` describe and give it the weights that ``load`` copies into it, or later `take_over`."""
        self.args, self.layout, self.moved = args, Layout(args), False
        with self.layout.entered():
            self.model = forward.build_model(args, model_provider)
            for chunk in self.model:
                chunk.requires_grad_(False)
            if load is not None:
                load(self.model)
        self._to_host()

    def _to_host(self) -> None:
        for chunk in self.model:
            for tensor in forward.weight_tensors(chunk):
                tensor.data = forward.to_host(tensor)

    @contextlib.contextmanager
    def ready(self, policy: forward.Model) -> Iterator["FrozenModel"]:
        """Within, forwards with ``.args`` and ``.model`` are this model's; all ranks enter."""
        tensors = [tensor for chunk in self.model for tensor in forward.weight_tensors(chunk)]
        hosts = [tensor.data for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.to(device(), non_blocking=True)
        try:
            with self.layout.entered():
                yield self
        finally:
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.data = host

    @torch.no_grad()
    def take_over(self, policy_args: Namespace, policy: forward.Model, share: float = 1.0) -> None:
        """Become ``share`` x the policy + (1 - ``share``) x itself, in float32; all ranks call it."""
        with self.layout.entered():
            weights = mapping.local_weights(self.model, mapping.table(self.args))
            rows = [(weight, tensor, mapping.tensor_parallel(weight)) for weight, tensor in weights]
        waiting = defaultdict(list)
        for row in rows:
            for name in row[0].hf:
                waiting[name].append(row)
        held: dict[str, Tensor] = {}
        for name, whole in stream_hf(policy, policy_args):
            if name not in waiting:
                continue
            held[name] = whole.to("cpu", copy=True)
            for weight, tensor, place in waiting[name]:
                if held.keys() >= weight.hf.keys():
                    theirs = torch.empty_like(tensor)
                    weight.fill(theirs, *place, lambda part, index: held[part][index])
                    mix(tensor, theirs, share)
            for part in [part for part in held if all(held.keys() >= row[0].hf.keys() for row in waiting[part])]:
                del held[part], waiting[part]

    def move(self, policy_args: Namespace, policy: forward.Model, share: float) -> None:
        """TR-DPO's update of a reference, between two rollouts."""
        with forward.parameters_complete(policy_args, policy):
            self.take_over(policy_args, policy, share)
        self.moved = True

    def save(self, directory: Path, policy: forward.Model) -> None:
        """Write the weights; collective."""
        with self.ready(policy):
            checkpoint.save_weights(directory, self.model)

    def load(self, directory: Path, policy: forward.Model) -> None:
        """Take the weights of `save`, from whatever layout; collective."""
        with self.layout.entered():
            checkpoint.read_weights(directory, self.model)
        self.moved = True


class SwappedReference:
    """The reference in the policy's own layout: one model, whose weights are exchanged for a pass."""

    def __init__(self, args: Namespace, model: forward.Model):
        """Take the model's present weights."""
        self.args, self.weights, self.moved = args, ReferencePolicy(model), False

    @contextlib.contextmanager
    def ready(self, policy: forward.Model) -> Iterator[Namespace]:
        """Within, the policy's model is the reference."""
        with forward.parameters_complete(self.args, policy), self.weights.in_place_of(policy):
            yield Namespace(args=self.args, model=policy)

    @torch.no_grad()
    def move(self, policy_args: Namespace, policy: forward.Model, share: float) -> None:
        """TR-DPO's update of a reference, between two rollouts."""
        with forward.parameters_complete(policy_args, policy):
            for chunk, weights in zip(policy, self.weights.weights, strict=True):
                for theirs, own in zip(forward.weight_tensors(chunk), weights, strict=True):
                    mix(own, theirs.to("cpu"), share)
        self.moved = True

    def save(self, directory: Path, policy: forward.Model) -> None:
        """Write the weights; collective."""
        with self.ready(policy):
            checkpoint.save_weights(directory, policy)

    def load(self, directory: Path, policy: forward.Model) -> None:
        """Take the weights of `save`, from whatever layout; collective."""
        present = ReferencePolicy(policy)
        checkpoint.read_weights(directory, policy)
        self.weights, self.moved = ReferencePolicy(policy), True
        present.copy_to(policy)


def mix(own: Tensor, theirs: Tensor, share: float) -> None:
    """own <- share x theirs + (1 - share) x own, computed in float32 and rounded once; with share 1 a copy."""
    mixes = share < 1 and own.is_floating_point()
    own.copy_(own.float().lerp_(theirs.float(), share) if mixes else theirs)


class ReferencePolicy:
    """Frozen weights, the reference of the KL term: they lie in host memory and take the model's place for one pass."""

    def __init__(self, model: forward.Model):
        """Copy the model's present weights."""
        self.weights = [[forward.to_host(tensor) for tensor in forward.weight_tensors(chunk)] for chunk in model]

    @torch.no_grad()
    def copy_to(self, model: forward.Model) -> None:
        """Overwrite the model's weights."""
        for chunk, weights in zip(model, self.weights, strict=True):
            for tensor, weight in zip(forward.weight_tensors(chunk), weights, strict=True):
                tensor.copy_(weight, non_blocking=True)

    @contextlib.contextmanager
    def in_place_of(self, model: forward.Model) -> Iterator[None]:
        """Within, the model is the reference; afterwards it is the policy again, bit for bit."""
        policy = ReferencePolicy(model)
        self.copy_to(model)
        try:
            yield
        finally:
            policy.copy_to(model)
