"""What test_weight_transfer_nccl.py asks in a process of its own: whether vLLM's parameters are a family's tensors.

The last line of the output is JSON: {name in --model-family: whether its tensors are all parts of all parameters}.
"""

import json
import tempfile
from pathlib import Path

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
from toy_checkpoints import FAMILIES, make, toy_args

# isort: split
import torch
import vision_models
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from megatron_grpo.parallel import initialize
from megatron_grpo.rollout.weight_sync.nccl import runtime_places
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.weights.stream import describe

VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "llava_onevision")
ONLY_TIED = ("gemma2",)


def parameters(directory: Path) -> dict[str, int]:
    """Return the number of elements of vLLM's parameters, by name."""
    config = EngineArgs(model=str(directory), dtype="float32", max_model_len=64).create_engine_config()
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, backend="gloo")
            parallel_state.initialize_model_parallel(1, 1)
        with torch.device("meta"):
            return {name: tensor.numel() for name, tensor in initialize_model(config).named_parameters()}


def filled(args, theirs: dict[str, int]) -> bool:
    """Return whether the patches of all tensors fill vLLM's parameters; a vocabulary may be padded."""
    described = describe(args)
    try:
        places = runtime_places(described)
    except KeyError:  # half of a pair of projections
        return False
    ours = dict.fromkeys(theirs, 0)
    for tensor in described:
        name, offset = places[tensor.name]
        if name not in theirs or offset != ours[name]:
            return False
        ours[name] += tensor.shape.numel()
    return all(
        ours[name] == size or name.endswith(("embed_tokens.weight", "lm_head.weight")) for name, size in theirs.items()
    )


def main() -> None:
    initialize.initialize_distributed(parse_args([]))
    models = []
    for family in (*FAMILIES, *VISION):
        directory = Path(tempfile.mkdtemp())
        if family in VISION:
            vision_models.make(directory, shape=family)
        else:
            make(directory, family, tied=family in ONLY_TIED)
        args = toy_args(directory)
        if not (args.num_experts or args.multi_latent_attention):
            models.append((directory, args))
    print(json.dumps({args.model_family: filled(args, parameters(directory)) for directory, args in models}))


main()
