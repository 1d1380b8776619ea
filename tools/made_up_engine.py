"""vLLM's model of one rank of a tensor-parallel engine, without an engine and without other ranks.

Its loaders of weights know rank and size only from vLLM's groups, which are made up here: nothing can be computed with
the model. Without memory for its weights it can have any size.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from megatron_grpo.rollout.vllm import colocate  # noqa: F401  its settings of vLLM's environment come before vLLM


class _WithoutMemory(TorchFunctionMode):
    """Context in which torch.empty, which makes the weights of vLLM's layers, returns meta tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call the function."""
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {}))


@contextlib.contextmanager
def model_of_rank(
    directory: Path | str, rank: int, size: int, memory: bool = True, **options: Any
) -> Iterator[torch.nn.Module]:
    """Context with the model of tensor-parallel rank ``rank`` of ``size`` for the config.json of a directory.

    ``options``: of vLLM's EngineArgs. Weights are loaded within the context; without ``memory`` they are meta tensors.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    common = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64}
    config = EngineArgs(model=str(directory), **common | options).create_engine_config()
    of_tp = _group(rank, size)
    groups = dict.fromkeys(("_WORLD", "_TP", "_EP"), of_tp)
    groups |= dict.fromkeys(("_PP", "_DP", "_DCP", "_PCP"), _group(0, 1))
    config.parallel_config.tensor_parallel_size = size
    with (
        mock.patch.dict(vars(parallel_state), groups),
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.no_grad(),
    ):
        with contextlib.nullcontext() if memory else _WithoutMemory():
            model = initialize_model(config)
        yield model


def _group(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(
        rank_in_group=rank, rank=rank, local_rank=rank, world_size=size, ranks=list(range(size)),
        is_first_rank=rank == 0, is_last_rank=rank == size - 1,
        device_group=SimpleNamespace(size=lambda: size, rank=lambda: rank), cpu_group=None,
    )  # fmt: skip
