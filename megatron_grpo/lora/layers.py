"""An adapter of one Megatron linear layer: y = W x + s B A x (arXiv:2106.09685), in every parallel configuration.

The Megatron layer may contain several Hugging Face layers with an adapter each. Their matrices A are concatenated,
their matrices B form one block matrix in Megatron's order of rows, so that two matrix products compute all of them. The
communication is that of h = A x, which has ``rank`` columns for each adapter:

    column-parallel   A replicated, B sharded; sequence parallelism gathers h, otherwise the gradient of h is reduced
    row-parallel      A sharded, B replicated; h is reduced, under sequence parallelism reduced and scattered
    replicated        both replicated (routers, the down projections of latent attention)
    experts           no communication of h, as in the layer itself, where the token dispatcher reduces; the gradient of
                      the replicated matrix is reduced over the expert tensor-parallel group

Under sequence parallelism a replicated matrix of a dense layer is marked ``sequence_parallel``: each rank has the
gradient of its tokens, and megatron-core adds them up.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_grpo.lora.table import Pair, rows
from megatron_grpo.models.experts import grouped_matmul, has_own_ranks
from megatron_grpo.models.fp8_weight import Fp8Weight
from megatron_grpo.utils.device import device
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Weight


def scaling(args: Namespace) -> float:
    """Return the factor s of an adapter's output: alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)."""
    return args.lora_alpha / (args.lora_rank**0.5 if args.lora_use_rslora else args.lora_rank)


class AddProduct(torch.autograd.Function):
    """output + s h B^T, in the memory of ``output``; torch's own out-of-place sum copies it first.

    ``output`` ``[t, out]`` is the layer's, whose backward pass does not read it. ``h`` ``[t, R]``, B ``[out, R]``.
    """

    @staticmethod
    def forward(ctx, output: Tensor, h: Tensor, up: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(h, up)
        ctx.scale = scale
        return output.detach().addmm_(h, up.t(), alpha=scale)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        h, up = ctx.saved_tensors
        grad_h = torch.addmm(h, grad, up, beta=0, alpha=ctx.scale)  # beta 0: without the first argument
        grad_up = torch.addmm(up, grad.t(), h, beta=0, alpha=ctx.scale)
        return grad, grad_h, grad_up, None


class Matrices(nn.Module):
    """A ``[rank, in]``, B ``[out, rank]`` and DoRA's norms ``[out]`` or None of one Hugging Face layer.

    With a leading axis if they are those of all experts of this rank.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude_vector: nn.Parameter | None

    def __init__(self, a: nn.Parameter, b: nn.Parameter, m: nn.Parameter | None):
        super().__init__()
        self.lora_A, self.lora_B, self.lora_magnitude_vector = a, b, m

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return all; only the call of a module waits for its parameters with --overlap-param-gather."""
        return self.lora_A, self.lora_B, self.lora_magnitude_vector


class Adapter(nn.Module):
    """The adapters of one Megatron linear layer on this rank.

    ``experts``: the adapters of each Hugging Face layer, for every expert that the layer holds; one list for a layer
    of a single expert, or outside experts. ``grouped``: the layer computes all experts of this rank in one call.
    ``base``: the layer.
    """

    def __init__(
        self, args: Namespace, config, experts: Sequence[Sequence[Pair]], groups, grouped: bool, base: nn.Module
    ):
        super().__init__()
        self._base: tuple[Any] = (base,)  # not a submodule
        self.experts, self.scale, self.dropout = experts, scaling(args), args.lora_dropout
        self.grouped, self.enabled, self.num_experts = grouped, True, config.num_moe_experts
        weight = experts[0][0].base
        self.axis, self.of_experts = weight.axis, weight.expert is not None
        self.group = groups.expt_tp if self.of_experts else groups.tp
        self.sequence_parallel = config.sequence_parallel and self.group.size() > 1 and not self.of_experts
        rank, size = model_weights.tensor_parallel(weight)
        parts: dict[str, Matrices] = {}
        self.rows: dict[str, Tensor | None] = {}
        self.outputs = weight.shard_shape(size)[0]
        lines = 0 if self.axis == 0 else None
        orders: list[Tensor] = []
        for number, pair in enumerate(experts[0]):
            alike = [pairs[number] for pairs in experts]
            a = self._parameter(config, [pair.a.shard_shape(size) for pair in alike], 1 if self.axis == 1 else None)
            b = self._parameter(config, [pair.b.shard_shape(size) for pair in alike], lines)
            norms = [pair.m.shard_shape(size) for pair in alike if pair.m is not None]
            parts[pair.part] = Matrices(a, b, self._parameter(config, norms, lines) if norms else None)
            runs = list(rows(pair, rank, size))
            orders.append(torch.cat([torch.arange(run.start, run.stop) for run in runs]))
            whole = len(orders[-1]) == self.outputs and bool((orders[-1] == torch.arange(self.outputs)).all())
            self.rows[pair.part] = None if whole else orders[-1].to(device())
        self.parts = cast(Mapping[str, Matrices], nn.ModuleDict(parts))  # so that they are submodules
        self.places = self._places(orders)

    def _places(self, orders: Sequence[Tensor]) -> Tensor | None:
        """Return the position of every element of the Bs in the flattened block matrix; None if that is the only B."""
        if list(self.rows.values()) == [None]:
            return None
        total = sum(part.lora_A.shape[-2] for part in self.parts.values())
        columns = torch.arange(total).chunk(len(orders))
        places = [(order[:, None] * total + some).flatten() for order, some in zip(orders, columns, strict=True)]
        return torch.cat(places).to(device())

    def _parameter(self, config, shapes: Sequence[tuple[int, ...]], axis: int | None) -> nn.Parameter:
        """Create a matrix that tensor parallelism shards along ``axis``, with megatron-core's attributes."""
        shape = (len(shapes), *shapes[0]) if self.grouped else shapes[0]
        if len(shapes[0]) == 1:  # norms stay vectors, on which megatron-core takes no weight decay
            shape = (prod(shape),)
        parameter: Any = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=device()))
        if axis is not None and self.group.size() > 1:
            set_tensor_model_parallel_attributes(parameter, True, axis + self.grouped, 1)
        if not self.of_experts:
            parameter.sequence_parallel = config.sequence_parallel and axis is None
        else:
            parameter.allreduce = not has_own_ranks(config)
        return parameter

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return A ``[R, in]`` and B ``[out, R]`` of this rank's shard, R = rank x number of Hugging Face layers.

        A grouped layer's have a leading axis of experts, and R is padded for the kernels.
        """
        a, b = zip(*(part()[:2] for part in self.parts.values()), strict=True)
        if self.places is None:
            down, up = a[0], b[0]
        else:
            down, values = torch.cat(a, -2), torch.cat([matrix.flatten(-2) for matrix in b], -1)
            shape = self.outputs, down.shape[-2]
            up = values.new_zeros(*values.shape[:-1], prod(shape)).index_copy_(-1, self.places, values)
            up = up.unflatten(-1, shape)
        if self.axis == 0:
            down = self._of_all_experts_ranks(down)
        else:
            up = self._of_all_experts_ranks(up)
        if self.grouped and (missing := -down.shape[-2] % (16 // down.element_size())):
            down, up = F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))  # kernels need rows of 16 bytes
        return down, up

    def _of_all_experts_ranks(self, replicated: Tensor) -> Tensor:
        """Return a replicated matrix; its gradient is a sum over the ranks that share the experts' tokens.

        Each has its rows or columns of the layer.
        """
        if self.of_experts and self.group.size() > 1:
            return tensor_parallel.copy_to_tensor_model_parallel_region(replicated, group=self.group)
        return replicated

    def forward(self, x: Tensor, output: Tensor, bias: Tensor | None = None, experts: tuple = ()) -> Tensor:
        """Return ``output`` + s B A x for the layer's input x ``[..., in]`` and output ``[..., out]`` on this rank.

        DoRA scales all of it except the ``bias`` in ``output``. ``experts``: (ends, idle) of `grouped_matmul` for a
        layer that computes all experts of this rank.
        """
        if self.training and self.dropout:
            x = self._dropped(x)
        down, up = self.matrices()
        if self.grouped:
            h = grouped_matmul(x, down, *experts)
            output = output + grouped_matmul(self.scale * h, up, *experts).to(output.dtype)
        else:
            h = self._communicate(F.linear(x, down.to(x.dtype)))
            flat = AddProduct.apply(output.flatten(0, -2), h.flatten(0, -2), up.to(x.dtype), self.scale)
            output = flat.view(output.shape)
        if (factors := self.row_factors(down, up)) is None:
            return output
        if self.grouped:
            token = torch.arange(len(x), device=x.device, dtype=experts[0].dtype)
            factors = factors[torch.bucketize(token, experts[0], right=True)]
        factors = factors.to(output.dtype)
        return output * factors if bias is None else (output - bias) * factors + bias

    def row_factors(self, down: Tensor, up: Tensor) -> Tensor | None:
        """Return m / ||W + s B A|| of every output row (DoRA, arXiv:2402.09353), 1 for rows without; None if not DoRA.

        The norms have no gradient (section 4.3 of the paper). ``down``, ``up``: `matrices`.
        """
        columns = [self.parts[part]()[2] for part in self.parts]
        if columns[0] is None:
            return None
        norms = self.norms(down, up)
        factors = torch.ones_like(norms)
        for column, order in zip(columns, self.rows.values(), strict=True):
            m = (column if self.axis == 0 else self._of_all_experts_ranks(column)).float()
            m = m.view(len(self.experts), -1) if self.grouped else m
            if order is None:
                return m / norms
            factors = factors.index_copy(-1, order, m / norms.index_select(-1, order))
        return factors

    @torch.no_grad()
    def norms(self, down: Tensor, up: Tensor) -> Tensor:
        """Return ||W + s B A|| of every row of this rank's shard, over all columns, in float32 ``[out]``.

        ||w + s b A||^2 = ||w||^2 + 2 s (w A^T) b + s^2 b (A A^T) b, which needs no matrix of W's size.
        """
        down, up = down.float(), up.float()
        if self.grouped:
            # One by one, because float32 copies of all experts are large.
            weights = (self.base_weights(place, place + 1)[0] for place in range(len(down)))
            squares = torch.stack([self._squares(*three) for three in zip(weights, down, up, strict=True)])
        else:
            squares = self._squares(self.base_weights()[0], down, up)
        if self.axis == 1 and self.group.size() > 1:
            torch.distributed.all_reduce(squares, group=self.group)
        return squares.sqrt()

    def _squares(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        weight = weight.float()
        cross = (weight @ down.T * up).sum(-1)
        own = (up @ (down @ down.T) * up).sum(-1)
        return weight.square().sum(-1) + 2 * self.scale * cross + self.scale**2 * own

    def base_weights(self, first: int = 0, last: int = 1) -> Tensor:
        """Return this rank's shards ``[last - first, out, in]`` of the frozen weights of the layer's experts.

        A layer outside experts, or of one expert, has one.
        """
        (base,) = self._base
        if not self.grouped:
            return base.weight.detach()[None]
        if hasattr(base, "weight"):
            weight = base.weight.detach()
            return weight.of_experts(first, last) if isinstance(weight, Fp8Weight) else weight[first:last]
        return torch.stack([getattr(base, f"weight{place}").detach() for place in range(first, last)])

    def set_norms(self) -> None:
        """Set DoRA's norms to those of the layer's rows, so that the adapter changes nothing while B is zero."""
        if next(iter(self.parts.values())).lora_magnitude_vector is None:
            return
        norms = self.norms(*self.matrices())
        for matrices, order in zip(self.parts.values(), self.rows.values(), strict=True):
            chosen = norms if order is None else norms.index_select(-1, order)
            assert matrices.lora_magnitude_vector is not None
            matrices.lora_magnitude_vector.data.copy_(chosen.flatten())

    def _communicate(self, h: Tensor) -> Tensor:
        if self.of_experts or self.axis is None or self.group.size() == 1:
            return h
        if self.axis == 0:
            if self.sequence_parallel:
                return tensor_parallel.gather_from_sequence_parallel_region(h, group=self.group)
            return tensor_parallel.copy_to_tensor_model_parallel_region(h, group=self.group)
        if self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(h, group=self.group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(h, group=self.group)

    def _dropped(self, x: Tensor) -> Tensor:
        """Apply dropout; tensor-parallel ranks with the same x draw the same mask, the others masks of their own."""
        same = not self.of_experts and not self.sequence_parallel and self.axis != 1
        if same or self.group.size() == 1:
            return F.dropout(x, self.dropout)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)

    @torch.no_grad()
    def initialize(self, value: Callable[[str, tuple[int, ...]], Tensor]) -> None:
        """Set every matrix to its shard of ``value(Hugging Face name, shape)``."""
        shapes = {name: shape for weight, _ in self.weights() for name, shape in weight.hf.items()}
        for weight, tensor in self.weights():
            weight.fill(
                tensor, *model_weights.tensor_parallel(weight), lambda name, index: value(name, shapes[name])[index]
            )

    def weights(self) -> list[tuple[Weight, Tensor]]:
        """Return (weight of the adapter's table, this rank's tensor) for every matrix."""
        return [
            (weight, self.of_expert(parameter.detach(), place))
            for _, parameter, weights in self._parameters_and_weights()
            for place, weight in enumerate(weights)
        ]

    def of_expert(self, parameter: Tensor, place: int) -> Tensor:
        """Return the part of a parameter of expert number ``place``; the whole if the layer has one expert."""
        return parameter.view(len(self.experts), -1, *parameter.shape[2:])[place] if self.grouped else parameter

    def _parameters_and_weights(self) -> Iterator[tuple[str, nn.Parameter, list[Weight]]]:
        """Yield (name in this module, parameter, its weight of each expert)."""
        for number, (part, matrices) in enumerate(self.parts.items()):
            pairs = [experts[number] for experts in self.experts]
            yield f"parts.{part}.lora_A", matrices.lora_A, [pair.a for pair in pairs]
            yield f"parts.{part}.lora_B", matrices.lora_B, [pair.b for pair in pairs]
            if norms := [pair.m for pair in pairs if pair.m is not None]:
                assert matrices.lora_magnitude_vector is not None
                yield f"parts.{part}.lora_magnitude_vector", matrices.lora_magnitude_vector, norms

    def sharded_parameters(self) -> Iterator[tuple[str, ShardedTensor | ShardedTensorFactory]]:
        """Yield (name in this module, entry of a sharded state dict) of every parameter."""
        for name, parameter, weights in self._parameters_and_weights():
            key = f"lora.{next(iter(weights[0].hf))}"
            key = key.replace(f".experts.{weights[0].expert}.", ".experts.")  # one tensor of all experts
            yield name, self._sharded(key, parameter, weights)

    def _sharded(
        self, key: str, parameter: nn.Parameter, weights: list[Weight]
    ) -> ShardedTensor | ShardedTensorFactory:
        """Describe a parameter's place in the checkpoint: runs of lines of the whole matrix, of each expert."""
        rank, size = model_weights.tensor_parallel(weights[0])
        replica = self._replica(weights[0], rank)

        def entries(key: str, data: Tensor, replica_id: tuple, _=None) -> list[ShardedTensor]:
            found = []
            for place, weight in enumerate(weights):
                shard = self.of_expert(data.detach(), place)
                for offset, first, lines in _runs(weight, rank, size):
                    run = shard.narrow(weight.lines_axis, offset, lines)
                    found.append(self._entry(key, run, weight, first, replica_id))
            return found

        parts = entries(key, parameter, replica)
        if len(parts) == 1 and not self.of_experts:
            return replace(parts[0], data=parameter)

        def merge(pieces: list[Tensor]) -> Tensor:
            whole = torch.empty_like(parameter)
            for piece, part in zip(pieces, entries(key, whole, replica), strict=True):
                part.data.copy_(piece.view(part.data.shape))
            return whole

        return ShardedTensorFactory(key, parameter, entries, merge, replica)

    def _entry(self, key: str, data: Tensor, weight: Weight, first: int, replica: tuple) -> ShardedTensor:
        (shape,) = weight.hf.values()
        offset = tuple(first if axis == weight.lines_axis else 0 for axis in range(len(shape)))
        if self.of_experts and weight.expert is not None:
            data, shape, offset = data[None], (self.num_experts, *shape), (weight.expert, *offset)
        return ShardedTensor(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=shape,
            global_offset=offset,
            axis_fragmentations=None,
            replica_id=replica,
        )

    def _replica(self, weight: Weight, rank: int) -> tuple[int, int, int]:
        """Return 0 in each place on one of the ranks that hold the same data."""
        if self.of_experts:
            copies = parallel_state.get_expert_data_parallel_rank()
        else:
            copies = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return 0, 0 if weight.axis is not None else rank, copies


def _runs(weight: Weight, rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (offset in the shard, first line of the whole matrix, lines) of each run of adjacent lines."""
    offset = start = first = last = 0
    for span in weight.slices(rank, size):
        assert span.step == 1, weight.name
        if offset > start and span.start != last:
            yield start, first, offset - start
            start = offset
        if offset == start:
            first = span.start
        offset, last = offset + span.lines, span.stop
    yield start, first, offset - start
