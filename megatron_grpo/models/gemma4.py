"""The decoder of Gemma 4: layers of several kinds, keys and values that later layers share, an embedding of each layer.

Computes what transformers' modeling_gemma4.py computes. Layers with a window and layers without one have heads of
another size and number. The last layers (``num_kv_shared_layers``) project queries only, and attend to the keys and
values of the last layer of their kind before them. Each layer adds an embedding of its own of the token, gated by the
hidden state (``hidden_size_per_layer_input``).

What a layer needs besides the hidden states passes through megatron-core's ``context``, which its blocks and its
recomputation hand from layer to layer: the embeddings of the layers to come, then the shared keys and values. Between
pipeline stages it follows the hidden states in one tensor.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_grpo.models.norm import RMSNorm, rms_norm
from megatron_grpo.models.rope import cosines_and_sines, rotate
from megatron_grpo.models.self_attention import rotation_of_pack
from megatron_grpo.parallel.arguments import query_groups
from megatron_grpo.parallel.param_gather import wait_for_weights
from megatron_grpo.utils.arguments import replaced

PER_LAYER_INPUTS = "per_layer_inputs"  # name of the module in the model


@dataclass(frozen=True)
class Kind:
    """What distinguishes one decoder layer from others."""

    windowed: bool
    channels: int  # of a head
    groups: int  # key/value heads
    source: int  # number, from 0, of the layer that computes its keys and values
    has_keys: bool  # whether that is this layer
    has_values: bool  # whether values have a projection; those of layers without one are the keys before norm and rope
    is_source: bool  # whether later layers read its keys and values
    ffn: int

    @property
    def projections(self) -> int:
        """Return the number of heads that a key/value group has in the projection besides its query heads."""
        return self.has_keys + self.has_values


def layer_kinds(args: Namespace) -> list[Kind]:
    """Return the kind of every decoder layer (``--gemma4-config``, ``--window-size``, ``--window-attn-skip-freq``).

    Raises ValueError for a layer that shares keys and has no layer of its kind before those that do.
    """
    keys, layers = args.gemma4_config, range(args.num_layers)
    windowed = [is_layer_window_attention(args.window_size, args.window_attn_skip_freq, n + 1) for n in layers]
    own = args.num_layers - keys["num_kv_shared_layers"]
    sources = [n if n < own else max(k for k in range(own) if windowed[k] == windowed[n]) for n in layers]
    return [
        Kind(
            windowed=windowed[n],
            channels=args.kv_channels if windowed[n] else keys["global_head_dim"],
            groups=query_groups(args) if windowed[n] else keys["num_global_key_value_heads"],
            source=sources[n],
            has_keys=n < own,
            has_values=n < own and (windowed[n] or not keys["attention_k_eq_v"]),
            is_source=n in sources[own:],
            ffn=args.ffn_hidden_size * (2 if n >= own and keys["use_double_wide_mlp"] else 1),
        )
        for n in layers
    ]


def with_layer(args: Namespace, layer: int) -> Namespace:
    """Return ``args`` with the sizes of one decoder layer of Gemma 4; as they are for other models."""
    if not args.gemma4_config:
        return args
    kind = layer_kinds(args)[layer]
    return replaced(args, kv_channels=kind.channels, num_query_groups=kind.groups, ffn_hidden_size=kind.ffn)


def key_source(args: Namespace, layer: int) -> int:
    """Return the layer that computes the keys and values of a decoder layer: itself, but in Gemma 4's last layers."""
    return layer_kinds(args)[layer].source if args.gemma4_config else layer


def dimensions(args: Namespace) -> dict[str, int]:
    """Return the sizes, by name, that the family's table has besides those of other families."""
    keys = args.gemma4_config
    head, groups = keys["global_head_dim"], keys["num_global_key_value_heads"]
    return {
        "global_head": head,
        "global_q": args.num_attention_heads * head,
        "global_kv": groups * head,
        "global_groups": groups,
        "double_ffn": 2 * args.ffn_hidden_size,
        "per_layer": keys["hidden_size_per_layer_input"],
        "all_layers": args.num_layers * keys["hidden_size_per_layer_input"],
    }


def layer_specs(args: Namespace, layers: Sequence[ModuleSpec]) -> list[ModuleSpec]:
    """Return the specifications of all decoder layers, given those of the local spec with norms after each branch."""
    kinds = layer_kinds(args)
    return [_layer_spec(args, layer, kinds, number) for number, layer in enumerate(layers)]


def _layer_spec(args: Namespace, layer: ModuleSpec, kinds: Sequence[Kind], number: int) -> ModuleSpec:
    parts, kind = layer.submodules, kinds[number]
    attention = replace(
        parts.self_attention, module=Gemma4Attention, params={**parts.self_attention.params, "kind": kind}
    )
    parts = replace(parts, self_attention=attention)
    if args.num_experts:
        dense = partial(_mlp, get_mlp_module_spec(use_te=False), kind.ffn)
        mixture = partial(Gemma4Mixture, dense=dense, **parts.mlp.keywords)
        parts = replace(parts, mlp=mixture, pre_mlp_layernorm=IdentityOp)
    else:
        parts = replace(parts, mlp=partial(_mlp, parts.mlp, kind.ffn))
    return replace(
        layer,
        module=Gemma4Layer,
        params={**layer.params, "kinds": kinds, "per_layer": args.gemma4_config["hidden_size_per_layer_input"]},
        submodules=parts,
    )


def _mlp(build: Callable[..., torch.nn.Module], size: int, *, config: TransformerConfig, **more: Any):
    """Build the MLP of a layer with this inner size, which megatron-core reads in the configuration."""
    config = copy(config)
    config.ffn_hidden_size = size
    return build(config=config, ffn_hidden_size=size, **more)


def end_stage(layers: list[ModuleSpec]) -> list[ModuleSpec]:
    """Return the layers of a pipeline stage; the last one passes on all that the next stage needs."""
    return [*layers[:-1], *(replace(last, params={**last.params, "ends_stage": True}) for last in layers[-1:])]


class Gemma4Attention(SelfAttention):
    """Self-attention of one `Kind`: queries and keys are normed and rotated, values are normed without a weight.

    ``given`` are the keys ``[t, groups, d]`` and values of a layer without its own, set before each call; ``computed``
    are those of a layer with its own, after it.
    """

    given: tuple[torch.Tensor, torch.Tensor] | None
    computed: tuple[torch.Tensor, torch.Tensor] | None

    def __init__(self, config: TransformerConfig, submodules: Any, *args: Any, kind: Kind, **more: Any):
        config = copy(config)
        config.kv_channels, config.num_query_groups = kind.channels, kind.groups
        outputs = (config.num_attention_heads + kind.projections * kind.groups) * kind.channels
        linear = submodules.linear_qkv
        submodules = replace(submodules, linear_qkv=lambda inputs, _, **how: linear(inputs, outputs, **how))
        if not kind.has_keys:
            submodules = replace(submodules, k_layernorm=IdentityOp)
        super().__init__(config, submodules, *args, **more)
        self.kind, self.keys_of = kind, f"layer {kind.source}"  # the layers with one `KVCache`
        self.given = self.computed = None
        self._rotation: tuple[torch.Tensor, PackedSeqParams | None] | None = None  # during `forward`

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None, packed_seq_params=None, **more):
        self._rotation = rotary_pos_emb, packed_seq_params
        try:
            return super().forward(hidden_states, attention_mask, packed_seq_params=packed_seq_params, **more)
        finally:
            self._rotation = None

    def get_query_key_value_tensors(self, hidden_states, key_value_states=None, **more):
        """Return queries ``[t, 1, heads, d]``, keys and values ``[t, 1, groups, d]``, normed and rotated."""
        assert self._rotation is not None
        angles, packed = self._rotation
        projected, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = projected.view(len(projected), groups, -1, size)
        queries = self.num_attention_heads_per_partition // groups
        angles = angles[..., -size:] if self.kind.windowed else angles[..., :size]
        if packed is None:  # a row for each token
            rows = torch.arange(len(projected), device=projected.device)
            cos, sin = cosines_and_sines(angles, rows, 1.0, False, projected.dtype)
        else:
            cos, sin = rotation_of_pack(projected, packed, angles, self.config, self.pg_collection.cp)

        def turned(part: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
            return rotate(rms_norm(part, norm.weight, norm.eps, norm.zero_centered), cos, sin, False).flatten(1, 2)

        wait_for_weights(self.q_layernorm)
        query = turned(heads[:, :, :queries], self.q_layernorm)
        if self.given is not None:
            key, value = self.given
        else:
            wait_for_weights(self.k_layernorm)
            key = turned(heads[:, :, queries : queries + 1], self.k_layernorm)
            value = F.rms_norm(heads[:, :, -1], (size,), eps=self.config.layernorm_epsilon)
            self.computed = key, value
        return query[:, None], key[:, None], value[:, None]


class Gemma4Layer(TransformerLayer):
    """A decoder layer with norms after attention and MLP, an embedding of its own, and a factor of its output.

    ``forward`` takes and returns hidden states ``[t, 1, h]`` and what later layers need ``[t, 1, n]``. The first layer
    of a stage gets both in one tensor, and the last one returns them so (``ends_stage``).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        *,
        kinds: Sequence[Kind],
        per_layer: int,
        ends_stage: bool = False,
        **more: Any,
    ):
        super().__init__(config, submodules, **more)
        number = self.layer_number - 1
        self.kind, self.per_layer = kinds[number], per_layer
        self.ends_stage = ends_stage and number + 1 < len(kinds)
        # Channels of the keys and values of each layer before this one that later layers read, in their order.
        heads = 2 * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        self._shared = {
            n: heads * kind.channels * kind.groups // config.tensor_model_parallel_size
            for n, kind in enumerate(kinds[:number])
            if kind.is_source
        }
        # Channels that a stage gets which begins with this layer.
        self.input_channels = config.hidden_size + (len(kinds) - number) * per_layer + sum(self._shared.values())
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))  # not trained
        if per_layer:
            self.per_layer_input_gate = replicated(config, config.hidden_size, per_layer)
            self.per_layer_projection = replicated(config, per_layer, config.hidden_size)
            self.post_per_layer_input_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states, attention_mask=None, context=None, **more):
        if context is None:
            hidden_states, context = (
                hidden_states[..., : self.config.hidden_size].contiguous(),
                hidden_states[..., self.config.hidden_size :],
            )
        own, context = context[..., : self.per_layer], context[..., self.per_layer :]
        attention = self.self_attention
        attention.given = None if self.kind.has_keys else self._keys_and_values(context)
        hidden_states, _ = super().forward(hidden_states, attention_mask, **more)
        computed, attention.given, attention.computed = attention.computed, None, None
        if self.per_layer:
            gate, _ = self.per_layer_input_gate(hidden_states)
            added, _ = self.per_layer_projection(F.gelu(gate, approximate="tanh") * own)
            hidden_states = hidden_states + self.post_per_layer_input_norm(added)
        hidden_states = hidden_states * self.layer_scalar
        if self.kind.is_source:
            # Under sequence parallelism the keys are those of all tokens: several tokens' in a row.
            rows = torch.cat([part.flatten(1) for part in computed], 1)
            context = torch.cat([context, rows.reshape(len(context), 1, -1)], -1)
        return (torch.cat([hidden_states, context], -1) if self.ends_stage else hidden_states), context

    def _keys_and_values(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values ``[t, groups, d]`` of this rank's heads that an earlier layer computed."""
        widths = list(self._shared.values())
        parts = context[..., context.shape[-1] - sum(widths) :].split(widths, -1)
        part = parts[list(self._shared).index(self.kind.source)]
        size = self.kind.channels
        per_token = 2 * self.self_attention.num_query_groups_per_partition * size
        keys, values = part.reshape(-1, per_token).unflatten(1, (2, -1, size)).unbind(1)
        return keys, values


class Gemma4Mixture(MoELayer):
    """An MLP and experts side by side, with norms before and after each, and one after their sum.

    The router reads the input normed without a weight, times ``router_scale`` / sqrt h. ``expert_scale`` multiplies
    the weights of the chosen experts.
    """

    def __init__(self, config: TransformerConfig, *, dense: Callable[..., torch.nn.Module], **more: Any):
        super().__init__(config, **more)
        self.dense = dense(config=config, pg_collection=more["pg_collection"], is_mtp_layer=False)
        for name in ("pre_dense", "post_dense", "pre_experts", "post_experts", "post"):
            self.add_module(f"{name}_layernorm", RMSNorm(config, config.hidden_size, config.layernorm_epsilon))
        self.router_scale = self._scale(config.hidden_size)
        self.expert_scale = self._scale(config.num_moe_experts)

    def _scale(self, size: int) -> torch.nn.Parameter:
        ones = torch.ones(size, dtype=self.config.params_dtype, device=torch.cuda.current_device())
        parameter = torch.nn.Parameter(ones)
        vars(parameter)["sequence_parallel"] = self.config.sequence_parallel
        return parameter

    def forward(self, hidden_states, *args, **more):
        """Return the output ``[t, 1, h]`` for hidden states ``[t, 1, h]`` without a norm, and None."""
        routed, _ = super().forward(hidden_states, *args, **more)
        dense, _ = self.dense(self.pre_dense_layernorm(hidden_states))
        return self.post_layernorm(self.post_dense_layernorm(dense) + self.post_experts_layernorm(routed)), None

    def route(self, hidden_states, padding_mask=None):
        """Extend megatron-core's method by the two scales."""
        size = self.config.hidden_size
        normed = F.rms_norm(hidden_states, (size,), eps=self.config.layernorm_epsilon)
        probs, routing_map = super().route(normed * self.router_scale * size**-0.5, padding_mask)
        return probs * self.expert_scale.to(probs.dtype), routing_map

    def preprocess(self, hidden_states, probs, routing_map):
        """Extend megatron-core's method by the norm before the experts."""
        return super().preprocess(self.pre_experts_layernorm(hidden_states), probs, routing_map)


def replicated(config: TransformerConfig, inputs: int, outputs: int) -> Linear:
    """Return a linear layer without bias that every tensor-parallel rank has."""
    group = parallel_state.get_tensor_model_parallel_group()
    linear = Linear(inputs, outputs, config=config, init_method=config.init_method, bias=False, tp_group=group)
    if config.perform_initialization:
        config.init_method(linear.weight)
    return linear


class PerLayerInputs(MegatronModule):
    """The embeddings of every layer: (norm(projection of the embedding) + the layer's embedding of the token) / sqrt 2.

    ``forward`` takes tokens ``[1, t]`` and their scaled embeddings ``[t, 1, h]``, and returns these and the inputs of
    all ``layers`` layers in one tensor ``[t, 1, h + layers * n]``.
    """

    def __init__(self, args: Namespace, config: TransformerConfig):
        super().__init__(config)
        self.size = args.gemma4_config["hidden_size_per_layer_input"]
        width = args.num_layers * self.size
        self.embedding = VocabParallelEmbedding(
            args.padded_vocab_size,
            width,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
        )
        self.projection = replicated(config, config.hidden_size, width)
        self.norm = RMSNorm(config, self.size, config.layernorm_epsilon)

    def forward(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """See the class."""
        of_tokens = self.embedding(tokens)
        if not self.config.sequence_parallel:
            of_tokens = of_tokens.transpose(0, 1)
        # A tensor in the weights' dtype, as for the scale of the embedding.
        of_tokens = of_tokens * of_tokens.new_full((), self.size**0.5)
        projected = self.projection(embedded)[0] * self.config.hidden_size**-0.5
        projected = self.norm(projected.unflatten(-1, (-1, self.size))).flatten(-2)
        return torch.cat([embedded, (projected + of_tokens) * 2**-0.5], -1)


class Ropes(torch.nn.Module):
    """Rotary embeddings of layers without a window and, behind them, of layers with one, along the last axis.

    Of the former, a part of the channels is rotated (``partial_rotary_factor``); the angles of the others are 0.
    """

    def __init__(self, args: Namespace):
        super().__init__()
        keys = args.gemma4_config
        size = keys["global_head_dim"]
        self.whole = RotaryEmbedding(size, 1.0, rotary_base=args.rotary_base)
        self.whole.inv_freq[int(keys["partial_rotary_factor"] * size // 2) :] = 0
        self.local = RotaryEmbedding(args.kv_channels, 1.0, rotary_base=args.rotary_base_local)
        self.get_rotary_seq_len = self.whole.get_rotary_seq_len

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return ``[s, 1, 1, d_full + d_window]``."""
        return torch.cat([self.whole(*args, **kwargs), self.local(*args, **kwargs)], -1)
