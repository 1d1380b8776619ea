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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_grpo.lora.table import Pair, rows
from megatron_grpo.models.experts import grouped_matmul
from megatron_grpo.utils.cpu_backend import device
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Weight


def scaling(args: Namespace) -> float:
    """Return the factor s of an adapter's output: alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)."""
    return args.lora_alpha / (args.lora_rank**0.5 if args.lora_use_rslora else args.lora_rank)


class Matrices(nn.Module):
    """A ``[rank, in]`` and B ``[out, rank]`` of one Hugging Face layer, or of all experts of this rank, stacked."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter):
        super().__init__()
        self.lora_A, self.lora_B = a, b

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return both; only the call of a module waits for its parameters with --overlap-param-gather."""
        return self.lora_A, self.lora_B


class Adapter(nn.Module):
    """The adapters of one Megatron linear layer on this rank.

    ``experts``: the adapters of each Hugging Face layer, for every expert that the layer holds; one list for a layer
    of a single expert, or outside experts. ``grouped``: the layer computes all experts of this rank in one call.
    """

    def __init__(self, args: Namespace, config, experts: Sequence[Sequence[Pair]], groups, grouped: bool):
        super().__init__()
        self.experts, self.scale, self.dropout = experts, scaling(args), args.lora_dropout
        self.grouped, self.enabled, self.num_experts = grouped, True, config.num_moe_experts
        base = experts[0][0].base
        self.axis, self.of_experts = base.axis, base.expert is not None
        self.group = groups.expt_tp if self.of_experts else groups.tp
        self.sequence_parallel = config.sequence_parallel and self.group.size() > 1 and not self.of_experts
        rank, size = model_weights.tensor_parallel(base)
        self.parts = nn.ModuleDict()
        self.rows: dict[str, Tensor | None] = {}
        for number, pair in enumerate(experts[0]):
            alike = [pairs[number] for pairs in experts]
            a = self._parameter(config, [pair.a.shard_shape(size) for pair in alike], 1 if self.axis == 1 else None)
            b = self._parameter(config, [pair.b.shard_shape(size) for pair in alike], 0 if self.axis == 0 else None)
            self.parts[pair.part] = Matrices(a, b)
            runs = list(rows(pair, rank, size))
            order = torch.cat([torch.arange(run.start, run.stop) for run in runs])
            self.outputs = base.shard_shape(size)[0]
            whole = len(order) == self.outputs and bool((order == torch.arange(len(order))).all())
            self.rows[pair.part] = None if whole else order.to(device())

    def _parameter(self, config, shapes: Sequence[tuple[int, ...]], axis: int | None) -> nn.Parameter:
        """Create a matrix that tensor parallelism shards along ``axis``, with megatron-core's attributes."""
        shape = (len(shapes), *shapes[0]) if self.grouped else shapes[0]
        parameter = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=device()))
        sharded = axis is not None and self.group.size() > 1
        if sharded:
            set_tensor_model_parallel_attributes(parameter, True, axis + self.grouped, 1)
        if not self.of_experts:
            parameter.sequence_parallel = config.sequence_parallel and axis is None
        else:
            tp, ep = config.tensor_model_parallel_size, config.expert_model_parallel_size
            parameter.allreduce = ep == 1 and self.group.size() == tp  # as in models/forward.py
            if self.group.size() == 1:  # the tensor-parallel ranks have other experts or tokens: count all
                parameter.tensor_model_parallel = True
        return parameter

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return A ``[R, in]`` and B ``[out, R]`` of this rank's shard, R = rank x number of Hugging Face layers.

        A grouped layer's have a leading axis of experts, and R is padded for the kernels.
        """
        a, b = [], []
        for part, matrices in self.parts.items():
            for column, matrix in zip((a, b), matrices(), strict=True):
                column.append(matrix)
            if (order := self.rows[part]) is not None:
                shape = (*b[-1].shape[:-2], self.outputs, b[-1].shape[-1])
                b[-1] = b[-1].new_zeros(shape).index_copy(-2, order, b[-1])
        down, up = (a[0] if len(a) == 1 else torch.cat(a, -2)), (b[0] if len(b) == 1 else torch.cat(b, -1))
        if self.of_experts and self.group.size() > 1:
            # Backward: a sum over the ranks that share the experts' tokens, each with its rows or columns.
            if self.axis == 0:
                down = tensor_parallel.copy_to_tensor_model_parallel_region(down, group=self.group)
            else:
                up = tensor_parallel.copy_to_tensor_model_parallel_region(up, group=self.group)
        if self.grouped and (missing := -down.shape[-2] % (16 // down.element_size())):
            down, up = F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))  # kernels need rows of 16 bytes
        return down, up

    def forward(self, x: Tensor, output: Tensor, experts: tuple = ()) -> Tensor:
        """Return ``output`` + s B A x for the layer's input x ``[..., in]`` and output ``[..., out]`` on this rank.

        ``experts``: (ends, idle) of `grouped_matmul` for a layer that computes all experts of this rank.
        """
        if self.training and self.dropout:
            x = self._dropped(x)
        down, up = self.matrices()
        if self.grouped:
            h = grouped_matmul(x, down, *experts)
            return output + grouped_matmul(self.scale * h, up, *experts).to(output.dtype)
        h = self._communicate(self.scale * F.linear(x, down.to(x.dtype)))
        flat = torch.addmm(output.reshape(-1, output.shape[-1]), h.reshape(-1, h.shape[-1]), up.to(x.dtype).t())
        return flat.view(output.shape)

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
            (weight, parameter.detach()[place] if self.grouped else parameter.detach())
            for _, parameter, weights in self._parameters_and_weights()
            for place, weight in enumerate(weights)
        ]

    def _parameters_and_weights(self) -> Iterator[tuple[str, nn.Parameter, list[Weight]]]:
        """Yield (name in this module, parameter, its weight of each expert)."""
        for number, (part, matrices) in enumerate(self.parts.items()):
            pairs = [experts[number] for experts in self.experts]
            yield f"parts.{part}.lora_A", matrices.lora_A, [pair.a for pair in pairs]
            yield f"parts.{part}.lora_B", matrices.lora_B, [pair.b for pair in pairs]

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
                shard = data.detach()[place] if self.grouped else data.detach()
                for offset, first, lines in _runs(weight, rank, size):
                    run = shard.narrow(weight.lines_axis, offset, lines)
                    found.append(self._entry(key, run, weight, first, replica_id))
            return found

        parts = entries(key, parameter, replica)
        if len(parts) == 1 and not self.grouped:
            return replace(parts[0], data=parameter)

        def merge(pieces: list[Tensor]) -> Tensor:
            whole = torch.empty_like(parameter)
            for piece, part in zip(pieces, entries(key, whole, replica), strict=True):
                part.data.copy_(piece.view(part.data.shape))
            return whole

        return ShardedTensorFactory(key, parameter, entries, merge, replica)

    def _entry(self, key: str, data: Tensor, weight: Weight, first: int, replica: tuple) -> ShardedTensor:
        shape, axis = tuple(next(iter(weight.hf.values()))), weight.lines_axis
        offset = tuple(first if one == axis else 0 for one in range(len(shape)))
        experts = (self.num_experts,) if self.of_experts else ()
        return ShardedTensor(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=(*experts, *shape),
            global_offset=(*((weight.expert,) if experts else ()), *offset),
            axis_fragmentations=None,
            replica_id=replica,
            prepend_axis_num=len(experts),
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
