"""Qwen3.5's language model as a model of its own, for a vLLM that has it with its vision tower only (0.26)."""

from argparse import Namespace
from typing import Any

import vllm
from vllm.model_executor.models import ModelRegistry, qwen3_5
from vllm.model_executor.models.interfaces import IsHybrid

from megatron_grpo.rollout.speculation import method_of
from megatron_grpo.utils.errors import GrpoError

_whole: Any = qwen3_5.Qwen3_5ForConditionalGeneration
_dense: Any = qwen3_5.Qwen3_5ForCausalLM
_mixture: Any = qwen3_5.Qwen3_5MoeForCausalLM


class _States(IsHybrid):
    """Shapes and dtypes of the states of a sequence: those of the model with its tower, which are its text's."""

    get_mamba_state_dtype_from_config: Any = classmethod(_whole.get_mamba_state_dtype_from_config.__func__)
    get_mamba_state_shape_from_config: Any = classmethod(_whole.get_mamba_state_shape_from_config.__func__)
    get_mamba_state_copy_func: Any = classmethod(_whole.get_mamba_state_copy_func.__func__)


class Qwen3_5ForCausalLM(_dense, _States):
    """The dense model."""


class Qwen3_5MoeForCausalLM(_mixture, _States):
    """The mixture of experts."""


def register(args: Namespace) -> None:
    """Tell vLLM of these models, unless it has them; raise GrpoError for drafts, which such a vLLM does not make."""
    known = {*ModelRegistry.get_supported_archs()}
    if method_of(args) == "mtp" and Qwen3_5ForCausalLM.__name__ not in known:
        raise GrpoError(
            f"--vllm-speculative-config with method mtp and model family {args.model_family}: vLLM {vllm.__version__} "
            "drafts for Qwen3.5 with its vision tower only: install 0.32, or leave the flag out"
        )
    for model in (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM):
        if model.__name__ not in known:
            ModelRegistry.register_model(model.__name__, model)
