"""What drafts in speculative decoding: the weights of a model, which vLLM starts with random values; completions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatron_grpo.rollout.vllm.compare import compare_model, compare_weights
from megatron_grpo.rollout.vllm.load_weights import Weights, load_model, load_weights
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.hf import open_weights

# A multi-token-prediction layer's copies of the policy's tensors: vLLM shares the policy's own with it.
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def load_draft(worker, directory: str) -> None:
    """Load the safetensors of a Hugging Face directory into a worker's draft model; GrpoError if a tensor is missing.

    The policy's training does not change them.
    """
    model = draft_model(worker)
    try:
        _load(worker, _weights(directory))
        lines = compare_model(model, _weights(directory))
    except (KeyError, ValueError, AssertionError) as error:  # of vLLM's loaders
        lines = [f"its loader raises {error!r}"]
    if lines:
        raise GrpoError(
            f"vLLM did not load the draft model {directory} of --vllm-speculative-config: {lines[0]} ({len(lines)} "
            "such lines); give a directory with all tensors of the architecture in its config.json, and no others"
        )
    worker.draft_buffers = {name: buffer.to("cpu", copy=True) for name, buffer in model.named_buffers()}


def reload_draft(worker, directory: str) -> None:
    """Load a draft model again after sleep level 2, which drops its weights and (vLLM 0.26) its buffers, too."""
    for name, buffer in draft_model(worker).named_buffers():
        buffer.copy_(worker.draft_buffers[name])
    _load(worker, _weights(directory))


def _weights(directory: str) -> Weights:
    source = open_weights(directory)
    return ((name, source.read(name)) for name in source.names())


def load_with_mtp(worker, weights: Weights, prefixes: Sequence[str]) -> None:
    """Load all ``weights`` into a worker's model, and those with a name of ``prefixes`` into the layers that draft.

    The latter are copied, because the stream passes once, and vLLM loads one model after the other.
    """
    kept: list[tuple[str, torch.Tensor]] = []
    load_weights(worker, _keeping(weights, prefixes, kept))
    _load(worker, iter(kept))


def compare_with_mtp(worker, weights: Weights, prefixes: Sequence[str]) -> list[str]:
    """Return the lines of `compare_weights`, and those of the layers that draft."""
    kept: list[tuple[str, torch.Tensor]] = []
    lines = compare_weights(worker, _keeping(weights, prefixes, kept))
    policys = {parameter.untyped_storage().data_ptr() for parameter in worker.model_runner.get_model().parameters()}
    return lines + compare_model(draft_model(worker), iter(kept), without=policys)


def drafts_with(name: str, prefixes: Sequence[str]) -> bool:
    """Return whether the layers that draft have a tensor of their own of this name."""
    return name.startswith(tuple(prefixes)) and not name.endswith(_COPIES)


def _keeping(weights: Weights, prefixes: Sequence[str], kept: list[tuple[str, torch.Tensor]]) -> Weights:
    """Yield ``weights``; append copies of the tensors with a name of ``prefixes`` to ``kept``."""
    for name, tensor in weights:
        if drafts_with(name, prefixes):
            kept.append((name, tensor.clone()))
        yield name, tensor


def forget_completions(worker) -> None:
    """Drop the completions from which suffix decoding drafts."""
    drafter = worker.model_runner.drafter
    cache = drafter.suffix_cache
    drafter.suffix_cache = type(cache)(cache.max_tree_depth, cache.max_cached_requests)


def draft_model(worker) -> torch.nn.Module:
    """Return the model of a worker that drafts."""
    runner = worker.model_runner
    # vLLM's second GPU runner has a speculator. Graphs of a GPU wrap the model.
    model = (runner.drafter if hasattr(runner, "drafter") else runner.speculator).model
    return model.unwrap() if hasattr(model, "unwrap") else model


def _load(worker, weights: Weights) -> None:
    model = draft_model(worker)
    config = worker.model_runner.vllm_config.speculative_config.draft_model_config
    load_model(model, partial(_reload, model, config), weights)


def _reload(model: Any, config, weights: Weights) -> None:
    """Do what vLLM's reload_weights does for the policy, which knows no other model."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    model.load_weights(weights)
    finalize_layerwise_reload(model, config)
