"""``--gradient-accumulation-fusion``: matrix products that add a weight's gradient to megatron-core's gradient buffer.

Without it a product makes the gradient in the weight's dtype, and DDP's hook adds this tensor to the buffer. That is
one more kernel for each weight and micro-batch, and in 16 bits the gradient of each micro-batch is rounded.
megatron-core calls a CUDA extension of apex for this; here torch's product takes its place. The embedding adds the rows
of its tokens.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers

from megatron_grpo.patches import megatron_core as core


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left^T right to ``total`` ``[m, n]`` in place: ``left`` is ``[t, m]``, ``right`` ``[t, n]``.

    With a float32 ``total`` and 16-bit factors on a GPU the sums stay in float32.
    """
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    elif total.is_cuda:
        torch.addmm(total, left.T, right, total.dtype, out=total)
    else:
        total.add_(left.T @ right)


def add_rows(total: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Add ``values`` ``[t, h]`` to the rows ``rows`` ``[t]`` of ``total`` ``[n, h]`` in place; rows may repeat.

    First the values of equal rows are added, as for an embedding of the rows that occur: the order of the sums never
    changes, and a row that occurs thousands of times costs no more than others.
    """
    in_order, order = rows.sort()
    first = torch.ones_like(in_order, dtype=torch.bool)
    first[1:] = in_order[1:] != in_order[:-1]
    rank = first.cumsum(0) - 1
    number = torch.empty_like(rows).scatter_(0, order, rank)  # of a value's row among those that occur
    sums = torch.ops.aten.embedding_dense_backward(values.to(total.dtype), number, len(rows), -1, False)
    # Sums beyond the last row that occurs are 0; where they are added makes no difference.
    occurring = (torch.arange(len(rows), device=rows.device) % len(total)).scatter_(0, rank, in_order)
    total.index_add_(0, occurring, sums)


def placeholder(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor in place of the gradient of a weight; the gradient is in the weight's buffer already.

    DDP's hook runs when a gradient arrives, and ignores this one.
    """
    vars(weight)["grad_added_to_main_grad"] = True
    return torch.empty_like(weight)


class AddingEmbedding(layers.VocabParallelEmbedding):
    """megatron-core's embedding, which adds the gradients of a pack's tokens to the rows of the weight's buffer.

    megatron-core's makes a gradient of the whole vocabulary in every micro-batch, and DDP's hook adds it.
    """

    of_head = False  # whether the head has the same weight, and gives its `placeholder`

    @classmethod
    def replace(cls, model: Any) -> None:
        """Let the embedding of ``model`` be of this class."""
        embedding = model.embedding.word_embeddings
        core.EMBEDDING.install_class(embedding, cls)
        embedding.of_head = model.share_embeddings_and_output_weights and model.post_process
        # With this mark of megatron-core DDP's hook would add the placeholder.
        vars(embedding.weight).pop("zero_out_wgrad", None)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[b, s, h]`` of tokens ``[b, s]``; under sequence parallelism this rank's slice."""
        # The gradient of another rank's token is 0, so any row will do.
        rows = (input_ - self.vocab_start_index) % self.num_embeddings_per_partition
        output = _Lookup.apply(rows, self.weight, self.of_head)
        if self.tp_group.size() > 1:
            others = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            output = output.masked_fill(others[..., None], 0.0)
        if self.reduce_scatter_embeddings:
            return layers.reduce_scatter_to_sequence_parallel_region(
                output.transpose(0, 1).contiguous(), group=self.tp_group
            )
        return layers.reduce_from_tensor_model_parallel_region(output, group=self.tp_group)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, weight: torch.Tensor, of_head: bool) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.of_head = of_head
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        add_rows(weight.main_grad, rows.flatten(), grad.flatten(0, -2))
        return None, None if ctx.of_head else placeholder(weight), None


def _add(inputs: torch.Tensor, output_gradient: torch.Tensor, total: torch.Tensor) -> None:
    add_product(total, output_gradient, inputs)


def install() -> None:
    """Have megatron-core's linear layers call torch's product for --gradient-accumulation-fusion."""
    core.WEIGHT_GRADIENT.install(SimpleNamespace(wgrad_gemm_accum_fp32=_add, wgrad_gemm_accum_fp16=_add))
    core.HAS_WEIGHT_GRADIENT.install(True)
