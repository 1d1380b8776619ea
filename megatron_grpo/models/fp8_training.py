"""Training with matrix products in FP8 (--fp8-format): rules, sizes, and the 8-bit copies of the weights.

Transformer Engine quantizes the inputs, weights and gradients of the decoder's linear layers before each product, and
accumulates in float32. Parameters stay in bf16, the optimizer's main parameters in float32. Embedding, norms, the core
of attention, the router and our log-probability head compute as without the flag.

Recipes: ``blockwise`` has a scale for every 128 values of a token and for every 128 x 128 values of a weight, so
the forward pass of a token does not depend on the other tokens of its pack; ``tensorwise`` has one scale a tensor.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator

import torch
from megatron.core.fp8_utils import is_first_last_bf16_layer

from megatron_grpo.models.config import moe_layers
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import flag

# Kernels: rows of 16 bytes of either operand, and the tokens are the rows of the weight gradient's operands.
ROW = 16
# Values with one scale. Transformer Engine gathers quantized activations (sequence parallelism) in whole blocks only.
BLOCK = 128


def check_fp8(args: Namespace) -> None:
    """Refuse --fp8-format with flags that cannot work with it."""
    if args.fp8_format is None:
        return
    given = f"--fp8-format {args.fp8_format}"
    if args.transformer_impl != "transformer_engine":
        raise GrpoError(
            f"{given} needs --transformer-impl transformer_engine, whose linear layers have kernels for FP8: give that "
            "on a GPU of compute capability 9.0 (Hopper), or leave the flag out"
        )
    if not args.bf16:
        raise GrpoError(f"{given} needs --bf16, the dtype of parameters and of everything that is not quantized")
    if args.rollout_engine == "megatron":
        raise GrpoError(
            f"{given} cannot be used with --rollout-engine megatron: a step of generation has too few tokens for the "
            "kernels of FP8; give --rollout-engine vllm, or leave the flag out"
        )
    for dest in ("cpu_offloading", "fine_grained_activation_offloading"):
        if getattr(args, dest):
            raise GrpoError(f"{given} with {flag(dest)} has not been checked: leave one of them out")


def check_fp8_sizes(args: Namespace) -> None:
    """Refuse --fp8-format with layers of a size that its kernels do not take."""
    if args.fp8_format is None:
        return
    given = f"--fp8-format {args.fp8_format}"
    unit = token_multiple(args)
    tp, etp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size or 1
    for name, size, parts, multiple in _sizes(args, tp, etp):
        multiple = unit if multiple is None else multiple
        if size % (parts * multiple):
            raise GrpoError(
                f"{given} with --fp8-recipe {args.fp8_recipe} needs {name} ({size}) to be a multiple of {multiple}"
                + (f" on each of {parts} tensor-parallel ranks" if parts > 1 else "")
                + ": the kernels take no other size; leave --fp8-format out"
            )


def _sizes(args: Namespace, tp: int, etp: int) -> Iterator[tuple[str, int, int, int | None]]:
    """Yield (name, size, ranks that share it, multiple) of the linear layers' inputs and outputs.

    The multiple is None for inputs that sequence parallelism gathers: theirs is `token_multiple`.
    """
    yield "--hidden-size", args.hidden_size, 1, None
    if args.multi_latent_attention:
        heads, rope = args.num_attention_heads, args.qk_pos_emb_head_dim
        if args.q_lora_rank:
            yield "--q-lora-rank", args.q_lora_rank, 1, None
        yield "--kv-lora-rank", args.kv_lora_rank, 1, None
        yield "--kv-lora-rank plus --qk-pos-emb-head-dim", args.kv_lora_rank + rope, 1, ROW
        yield "the channels of all queries", heads * (args.qk_head_dim + rope), tp, ROW
        yield "the channels of all keys and values", heads * (args.qk_head_dim + args.v_head_dim), tp, ROW
        yield "the output channels of attention", heads * args.v_head_dim, tp, ROW
    else:
        queries, groups = args.num_attention_heads, args.num_query_groups or args.num_attention_heads
        yield "--num-attention-heads x --kv-channels", queries * args.kv_channels, tp, ROW
        # Ranks without a key/value head of their own hold a copy.
        yield "--num-query-groups x --kv-channels", max(groups, tp) * args.kv_channels, tp, ROW
    if not args.num_experts or not all(moe_layers(args)):
        yield "--ffn-hidden-size", args.ffn_hidden_size, tp, ROW
    if args.num_experts:
        yield "--moe-ffn-hidden-size", args.moe_ffn_hidden_size or args.ffn_hidden_size, etp, ROW
        if args.moe_shared_expert_intermediate_size:
            yield "--moe-shared-expert-intermediate-size", args.moe_shared_expert_intermediate_size, tp, ROW


def fp8_layers(args: Namespace) -> list[bool]:
    """Return for each decoder layer whether its linear layers compute in FP8."""
    return [bool(args.fp8_format) and not is_first_last_bf16_layer(args, layer) for layer in range(args.num_layers)]


def token_multiple(args: Namespace) -> int:
    """Return the number that must divide the tokens of a pack on a rank; 1 without FP8."""
    if args.fp8_format is None:
        return 1
    return BLOCK if args.fp8_recipe == "blockwise" and args.sequence_parallel else ROW


def check_fp8_device(args: Namespace) -> None:
    """Refuse --fp8-format on a GPU that is not Hopper, or with a CUDA release that lacks the recipe's kernels."""
    if args.fp8_format is None:
        return
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        raise GrpoError(
            f"--fp8-format {args.fp8_format} needs a GPU of compute capability 9.0 (Hopper), and this one has "
            f"{capability[0]}.{capability[1]}: leave the flag out"
        )
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if args.fp8_recipe == "blockwise" and cuda < (12, 9):
        raise GrpoError(
            f"--fp8-recipe blockwise needs CUDA 12.9 or later, and torch was built for {torch.version.cuda}: "
            "give --fp8-recipe tensorwise, or another build (requirements-gpu.txt)"
        )


def free_fp8_weights(model: Iterable[torch.nn.Module]) -> None:
    """Free the 8-bit copies of the weights, which Transformer Engine keeps between micro-batches and updates.

    The next pass makes them again: megatron-core's schedule marks its first micro-batch.
    """
    for chunk in model:
        for module in chunk.modules():
            getattr(module, "_fp8_workspaces", {}).clear()
