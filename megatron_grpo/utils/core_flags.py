"""Command-line flags generated from megatron-core's configuration dataclasses, and the dataclasses built from them.

Every field of ``TransformerConfig``, ``OptimizerConfig`` and ``DistributedDataParallelConfig`` is either a flag, with
megatron-core's type, default and documentation, or an entry of ``EXCLUDED`` with the reason. The parsed arguments hold
a flag's value under its name with underscores. A field that two dataclasses share has one flag.
"""

import ast
import dataclasses
import enum
import functools
import inspect
import re
import textwrap
import types
import typing
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any, Literal, Union

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_grpo.utils.core_names import EXCLUDED, RENAMED, SWITCHED_OFF_BY
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flag_values import METAVARS, integer_or_pattern, integers
from megatron_grpo.utils.flags import COUNT, COUNT_OR_0, MOST, NOT_NEGATIVE, POSITIVE, REAL, SHARE, Number, count_to

CONFIGS = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)  # the first is a TransformerConfig

# Defaults that differ from megatron-core's: (default, reason).
DEFAULTS: dict[str, tuple[Any, str]] = {
    "num_layers": (None, "config.json, the checkpoint or a flag must give it"),
    "hidden_size": (None, "config.json, the checkpoint or a flag must give it"),
    "num_attention_heads": (None, "config.json, the checkpoint or a flag must give it"),
    "hidden_dropout": (0.0, "the engine has no dropout, and the log-probabilities of trainer and engine must agree"),
    "attention_dropout": (0.0, "the engine has no dropout, and the log-probabilities of trainer and engine must agree"),
    "normalization": ("LayerNorm", "as in TransformerConfig, also for models without multi-latent attention"),
    "multi_latent_attention": (False, "most model families use grouped-query attention"),
    "q_lora_rank": (None, "as in Megatron-LM: without it queries are projected in one step"),
    "moe_token_dispatcher_type": (
        "alltoall",
        "packs differ in length, and allgather pads all to the longest",
    ),
    "moe_router_bias_update_rate": (
        0.0,
        "pretraining balanced the bias, and completions are not a representative sample",
    ),
    "mtp_loss_scaling_factor": (
        0.0,
        "multi-token-prediction layers are trained only on request",
    ),
    "fp8_recipe": ("blockwise", "its forward pass does not depend on the packing, as megatron-core's delayed does"),
    "optimizer_offload_fraction": (1.0, "as in Megatron-LM: the whole optimizer state"),
    "min_lr": (0.0, "as in Megatron-LM"),
    "grad_reduce_in_fp32": (True, "as in Megatron-LM with --bf16: the sum of many small gradients needs float32"),
}

# Fields that accept fewer values than their type.
CHOICES = {
    "transformer_impl": ("local", "transformer_engine"),
    "optimizer": ("adam", "sgd"),
    "rope_type": ("rope", "yarn"),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "experimental_attention_variant": ("gated_delta_net",),
}

# Ranges of the numeric fields; of a list, the range of its members.
RANGES = {
    dest: number
    for number, dests in {
        COUNT: (
            "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
            "expert_tensor_parallel_size hierarchical_context_parallel_sizes "
            "num_virtual_stages_per_pipeline_rank microbatch_group_size_per_virtual_pipeline_stage "
            "num_query_groups num_attention_heads kv_channels q_lora_rank kv_lora_rank qk_head_dim "
            "qk_pos_emb_head_dim v_head_dim original_max_position_embeddings "
            "moe_router_num_groups moe_router_group_topk moe_latent_size mrope_section hysteresis ddp_bucket_size "
            "recompute_num_layers linear_conv_kernel_dim linear_key_head_dim "
            "linear_value_head_dim linear_num_key_heads linear_num_value_heads "
            "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads"
        ),
        COUNT_OR_0: (
            "window_attn_skip_freq no_rope_freq moe_layer_freq linear_attention_freq cpu_offloading_num_layers "
            "min_offloaded_tensor_size "
            "fine_grained_offloading_max_inflight_offloads"
        ),
        count_to(10**4): "num_layers decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
        count_to(2**24): "hidden_size ffn_hidden_size moe_ffn_hidden_size",
        count_to(2**16): "num_experts moe_router_topk",
        Number(int, 0, 2**24): "moe_shared_expert_intermediate_size",
        Number(int, 0, 10**4): "mtp_num_layers num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        Number(int, -1, MOST): "window_size",
        POSITIVE: (
            "softmax_scale norm_epsilon activation_func_clamp_value moe_router_topk_scaling_factor "
            "moe_expert_capacity_factor rotary_scaling_factor beta_fast beta_slow adam_eps lr loss_scale_window"
        ),
        NOT_NEGATIVE: (
            "mtp_loss_scaling_factor init_method_std embedding_init_method_std moe_router_bias_update_rate "
            "moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps mscale mscale_all_dim min_lr decoupled_lr "
            "decoupled_min_lr weight_decay clip_grad"
        ),
        REAL: "glu_linear_offset",
        SHARE: "hidden_dropout attention_dropout optimizer_offload_fraction adam_beta1 adam_beta2 sgd_momentum",
        Number(float, 0, 2.0**64, above=True): "loss_scale initial_loss_scale min_loss_scale",
    }.items()
    for dest in dests.split()
}

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


@dataclasses.dataclass
class CoreFlag:
    """A generated flag: its names, type, default and help, and the (dataclass, field) pairs that get its value."""

    option: str
    off_options: tuple[str, ...]
    annotation: Any
    default: Any
    help: str
    section: str
    feeds: list[tuple[type, str]]

    @property
    def dest(self) -> str:
        """Return the name of the attribute of the parsed arguments."""
        return self.option[2:].replace("-", "_")

    @property
    def kind(self) -> Number | None:
        """Return the range of a numeric flag; None for any other flag."""
        return RANGES.get(self.dest)


@functools.cache
def core_flags() -> dict[str, CoreFlag]:
    """Return all generated flags by attribute name, in the order of megatron-core's sources."""
    flags: dict[str, CoreFlag] = {}
    for config in CONFIGS:
        annotations, notes = typing.get_type_hints(config), dict(_notes(config))
        for field in dataclasses.fields(config):
            if field.name in EXCLUDED:
                continue
            option = RENAMED.get(field.name, "--" + field.name.replace("_", "-"))
            off = (*SWITCHED_OFF_BY.get(field.name, ()), "--no-" + option[2:])
            flag = CoreFlag(option, off, annotations[field.name], _default(field), *notes[field.name], [])
            flags.setdefault(flag.dest, flag).feeds.append((config, field.name))
    return flags


def add_core_flags(parser: ArgumentParser) -> None:
    """Add every generated flag to ``parser``, in one group for each section of megatron-core's sources.

    A boolean field has two flags: on and off. The help shows only the flag that changes the default.
    """
    groups: dict[str, Any] = {}
    for flag in core_flags().values():
        if flag.section not in groups:
            groups[flag.section] = parser.add_argument_group(flag.section)
        group = groups[flag.section]
        if bool not in _alternatives(flag.annotation):
            text = help_text(flag.help, flag.default)
            group.add_argument(flag.option, default=flag.default, help=text, **_argparse_type(flag))
            continue
        for names, value in (((flag.option,), True), (flag.off_options, False)):
            text = flag.help if value else f"Switch off: {flag.help}"
            text = SUPPRESS if value == flag.default else help_text(text)
            reading = {"action": "store_const", "const": value, "dest": flag.dest}
            group.add_argument(*names, default=flag.default, help=text, **reading)


def help_text(text: str, default: Any = None) -> str:
    """Return a help text for argparse, followed by the default in brackets if there is one."""
    shown = "" if default is None or default is False or default == [] else f" [{default}]"
    return (text + shown).replace("%", "%%")


def core_config(config: Any, args: Namespace, **derived: Any) -> Any:
    """Build a dataclass of megatron-core from parsed arguments; ``derived`` holds values of fields without a flag.

    Raises GrpoError with megatron-core's message when the dataclass refuses the combination.
    """
    values = {
        field: _core_value(getattr(args, flag.dest), flag.annotation)
        for flag in core_flags().values()
        for owner, field in flag.feeds
        if issubclass(owner, config) and field in config.__dataclass_fields__
    }
    try:
        return config(**{**values, **derived})
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        raise GrpoError(f"megatron-core refuses these settings ({config.__name__}): {error}") from error


def _default(field: dataclasses.Field) -> Any:
    """Return the default of a field as one of JSON's types: enumerations and dtypes by name."""
    if field.name in DEFAULTS:
        return DEFAULTS[field.name][0]
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return next(name for name, dtype in DTYPES.items() if dtype is value)
    return value


def _core_value(value: Any, annotation: Any) -> Any:
    """Convert a parsed value to megatron-core's type: the inverse of ``_default``.

    ``[x]`` becomes x where the annotation accepts both.
    """
    kinds = _alternatives(annotation)
    if isinstance(value, str):
        if torch.dtype in kinds:
            return DTYPES[value]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, enum.Enum):
                return kind[value]
    if isinstance(value, list):
        if any(typing.get_origin(kind) is tuple for kind in kinds):
            return tuple(value)
        if len(value) == 1 and any(isinstance(kind, type) for kind in kinds):
            return value[0]
        return list(value)
    return value


def _alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union without None, or ``[annotation]`` for any other annotation."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    return [annotation]


def _argparse_type(flag: CoreFlag) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` that parse a value of this flag."""
    if flag.dest in CHOICES:
        return {"choices": CHOICES[flag.dest]}
    kinds = _alternatives(flag.annotation)
    lists = [kind for kind in kinds if typing.get_origin(kind) is list]
    first = kinds[0]
    if torch.dtype in kinds:
        return {"choices": tuple(DTYPES)}
    if typing.get_origin(first) is Literal:
        return {"choices": typing.get_args(first)}
    if isinstance(first, type) and issubclass(first, enum.Enum):
        return {"choices": tuple(first.__members__)}
    if typing.get_origin(first) is tuple:
        return {"type": integers, "metavar": "N,N"}
    if int in kinds and lists:
        return {"type": integer_or_pattern, "metavar": "N|LIST"}
    if lists:
        (member,) = typing.get_args(lists[0])
        return {"type": member, "nargs": "+", "metavar": METAVARS[member]}
    return {"type": first, "metavar": METAVARS[first]}


def _notes(config: type) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (field, (first sentence of its documentation, section)) from megatron-core's source.

    In that source a string after a field documents it, and a title between two lines of # begins a section.
    """
    for cls in reversed(config.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(cls))
        titles = {
            source[: match.start()].count("\n") + 1: match[1].strip()
            for match in re.finditer(r"^    ####+\n    # (.+)\n    ####+$", source, re.MULTILINE)
        }
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        body = definition.body
        for node, after in zip(body, [*body[1:], None]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = ""
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    text = _first_sentence(str(after.value.value))
                yield node.target.id, (text, _group(cls, [t for line, t in titles.items() if line < node.lineno]))


def _group(owner: type, titles: list[str]) -> str:
    if owner is OptimizerConfig:
        return "megatron-core: optimizer"
    if owner is DistributedDataParallelConfig:
        return "megatron-core: data parallelism"
    if owner is MLATransformerConfig:
        return "megatron-core: multi-latent attention"
    return f"megatron-core: {titles[-1].lower().removesuffix(' related')}" if titles else "megatron-core"


def _first_sentence(text: str) -> str:
    words = re.sub(r"^\w+ \(\w+\): ", "", " ".join(text.split()))
    sentence = re.match(r"(.+?)(?<!e\.g)(?<!i\.e)[.](?=\s|$)", words)
    return textwrap.shorten(sentence[1] if sentence else words, 150, placeholder=" ...").rstrip(":,")
