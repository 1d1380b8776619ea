"""Names of megatron-core that this project replaces; each file in ``by`` has what takes the place."""

import contextlib
import importlib
import re
from collections.abc import Iterator
from typing import Any

from megatron_grpo.patches.replacement import Replacement, entries_of

# Update
DISTRIBUTED_OPTIMIZER = Replacement(
    "megatron.core.optimizer:DistributedOptimizer",
    None,
    "Save and load the optimizer's state without gathering it on each rank, and copy main parameters to the model in "
    "one launch. A subclass; get_megatron_optimizer takes no class.",
    by="megatron_grpo/training/multi_tensor.py",
    proof="tests/distributed/test_checkpoint_layouts.py::test_ranks_save_their_own_optimizer_state_without_a_copy",
    until="get_megatron_optimizer takes a class (0.20 does not)",
)
COPY_PARAMETERS = Replacement(
    "megatron.core.optimizer.optimizer:_multi_tensor_copy_this_to_that",
    "this, that, overflow_buf",
    "Copy main parameters to the model in one launch in place of one for each parameter.",
    by="megatron_grpo/training/multi_tensor.py",
    proof="update of 0.6B on an H200: 3.15 s, with the four entries of this file 2.92 s",
)
NORM = Replacement(
    "megatron.core.optimizer.clip_grads:l2_norm_impl",
    None,
    "Compute the norm of the gradients without waiting for the device at each parameter.",
    by="megatron_grpo/training/multi_tensor.py",
    proof="227 waits for the GPU in an update of 4B, with the entry one",
    until="Transformer Engine or apex is installed",
)
SCALE = Replacement(
    "megatron.core.optimizer.clip_grads:multi_tensor_scale_impl",
    None,
    "Clip the gradients in one launch in place of one for each parameter.",
    by="megatron_grpo/training/multi_tensor.py",
    proof="update of 0.6B on an H200: 3.15 s, with the four entries of this file 2.92 s",
    until="Transformer Engine or apex is installed",
)
ADAM = Replacement(
    "megatron.core.optimizer:Adam",
    None,
    "Use an Adam that can be saved before its first step and loaded in another layout; with Transformer Engine, one "
    "whose step copies the moments in parts.",
    by="megatron_grpo/training/fused_adam.py",
    proof="tests/unit/training/test_fused_adam.py::test_install_replaces_torchs_adam_in_megatron_core",
)
ADAM_IS_TORCHS = Replacement(
    "megatron.core.optimizer:USING_PYTORCH_OPTIMIZER",
    None,
    "Have megatron-core build the class of the entry above.",
    by="megatron_grpo/training/fused_adam.py",
    proof="tests/unit/training/test_fused_adam.py::test_install_replaces_torchs_adam_in_megatron_core",
    until="Transformer Engine or apex is installed",
)
STEP_IN_GROUP = Replacement(
    "megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE",
    None,
    "Have megatron-core expect the step count in the parameter group, where our Adam stores it.",
    by="megatron_grpo/training/fused_adam.py",
    proof="tests/unit/training/test_fused_adam.py::test_install_replaces_torchs_adam_in_megatron_core",
    until="Transformer Engine or apex is installed",
)
STEP_AS_APEX = Replacement(
    "megatron.core.optimizer.distrib_optimizer:USING_APEX_OPTIMIZER",
    None,
    "Have megatron-core read the step count from the parameter group, as apex stores it.",
    by="megatron_grpo/training/fused_adam.py",
    proof="tests/unit/training/test_fused_adam.py::test_install_replaces_torchs_adam_in_megatron_core",
    until="Transformer Engine or apex is installed",
)
STEP = Replacement(
    "megatron.core.optimizer.optimizer:MegatronOptimizer.step_with_ready_grads",
    "self",
    "Judge loss and gradient norm before an update changes the weights (--on-bad-update).",
    by="megatron_grpo/training/bad_updates.py",
    proof="tests/unit/training/test_bad_updates.py::test_a_value_that_is_not_finite_leaves_the_parameters_as_they_are",
    scope="object",
)

# Model
ROPE_OF_PACK = Replacement(
    "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
    "t, cu_seqlens, freqs, rotary_interleaved, mla_rotary_interleaved, mscale, cp_group, multi_latent_attention",
    "Rotate all sequences of a pack by one kernel in place of a dozen in each layer.",
    by="megatron_grpo/models/layer_specs.py",
    proof="update of 4B on an H200: 7.80 s and 74,903 kernels, with the entry and its like 7.46 s and 49,515",
    until="megatron-core 0.20, which loops over no sequences",
    link="https://github.com/NVIDIA/Megatron-LM/pull/5944",
)
STORAGE_OF_RECOMPUTED = Replacement(
    "megatron.core.tensor_parallel.random:_share_storage_ext",
    None,
    "Recompute outputs without a C++ extension that is compiled at its first use: a killed rank would leave a lock "
    "for which all later runs wait.",
    by="megatron_grpo/models/layer_specs.py",
    proof="tests/unit/models/test_recomputed_latents.py::test_the_numbers_are_the_same_without_a_compiler",
)
LATENT_LINEAR = Replacement(
    "megatron.core.transformer.multi_latent_attention:Linear",
    None,
    "Accept replicated down projections of latent attention without Transformer Engine.",
    by="megatron_grpo/models/layer_specs.py",
    proof="tests/unit/models/test_recomputed_latents.py::test_the_numbers_are_the_same_without_a_compiler",
    until="Transformer Engine is installed",
)
WEIGHT_GRADIENT = Replacement(
    "megatron.core.tensor_parallel.layers:fused_weight_gradient_mlp_cuda",
    None,
    "Run --gradient-accumulation-fusion without apex's CUDA extension.",
    by="megatron_grpo/models/weight_gradients.py",
    proof="tests/unit/models/test_layer_graphs.py::test_updates_are_those_without_graphs",
    needed="--gradient-accumulation-fusion",
    until="apex is installed",
    optional=True,
)
HAS_WEIGHT_GRADIENT = Replacement(
    "megatron.core.tensor_parallel.layers:_grad_accum_fusion_available",
    None,
    "Have megatron-core accept --gradient-accumulation-fusion without apex.",
    by="megatron_grpo/models/weight_gradients.py",
    proof="tests/unit/models/test_layer_graphs.py::test_updates_are_those_without_graphs",
    needed="--gradient-accumulation-fusion",
    until="apex is installed",
)
EMBEDDING = Replacement(
    "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
    "self, input_",
    "Add the embedding's gradient to the rows of a pack's tokens, and not one of the whole vocabulary.",
    by="megatron_grpo/models/weight_gradients.py",
    proof="the gradient of an embedding of 151,936 rows took 2,650 us of an H200 in each micro-batch of 4B",
    scope="object",
    needed="--gradient-accumulation-fusion",
)
SWIGLU_GRADIENT = Replacement(
    "megatron.core.fusions.fused_bias_swiglu:SwiGLUFunction.backward",
    "ctx, grad_output",
    "Compute the gradient of SwiGLU (--bias-activation-fusion) in one pass over memory.",
    by="megatron_grpo/models/gpu_kernels.py",
    proof="gradients of SwiGLU in an update of 4B on an H200: 184 ms, with the entry 114 ms",
    needed="a GPU",
)
LAYERS = Replacement(
    "megatron.core.transformer.transformer_block:TransformerBlock.forward",
    "self, hidden_states, attention_mask, context, context_mask, rotary_pos_emb, rotary_pos_cos, rotary_pos_sin, "
    "rotary_pos_cos_sin, attention_bias, inference_context, packed_seq_params, sequence_len_offset, padding_mask, "
    "extract_layer_indices, inference_params, dynamic_inference_decode_only",
    "Run the layers as CUDA graphs of padded packs (--cuda-graphs); megatron-core's graphs take no packs.",
    by="megatron_grpo/models/gpt.py",
    proof="tests/unit/models/test_layer_graphs.py::test_updates_are_those_without_graphs",
    scope="object",
    needed="--cuda-graphs",
)
PARALLEL_STATE = Replacement(
    "megatron.core.parallel_state:_HYBRID_DP_CP_GROUPS",
    None,
    "Run a reference model in another parallel configuration than the policy's: this global, and all others of the "
    "module that begin with _ and a capital letter, hold the groups of one configuration.",
    by="megatron_grpo/parallel/rank_groups.py",
    proof="tests/distributed/test_reference_model.py::test_reference_models_beside_the_policy",
    scope="context",
    until="megatron-core's layers take all groups as arguments",
)

# Checkpoints
READER = Replacement(
    "megatron.core.dist_checkpointing.strategies.torch:_get_filesystem_reader",
    "checkpoint_dir, cache_metadata, async_strategy",
    "Check each item of a checkpoint against its checksum before it is read, and read no pickle that runs code.",
    by="megatron_grpo/checkpointing/checkpoint.py",
    proof="tests/distributed/test_damage.py::test_no_damage_loads",
    scope="context",
)
COMMON_STATE = Replacement(
    "megatron.core.dist_checkpointing.serialization:load_common_state_dict",
    "checkpoint_dir",
    "Merge a request with the values of this run's arrangement only; megatron-core would read the stored ones again, "
    "as a pickle that can run code.",
    by="megatron_grpo/checkpointing/checkpoint.py",
    proof="tests/unit/checkpointing/test_convert.py::test_written_as_a_built_model_saves",
    scope="context",
)
COLLECTOR = Replacement(
    "megatron.core.optimizer.distrib_optimizer:gc",
    None,
    "Save without two garbage collections over all objects of the program.",
    by="megatron_grpo/checkpointing/optimizer_state.py",
    proof="CPU time of a staged save of 0.67 GB: 0.49 s, of which garbage collections took 0.26 s",
    scope="context",
)
# torch's, which megatron-core's checkpoints call
OVERLAPS = Replacement(
    "torch.distributed._shard.sharding_spec._internals:_find_nd_overlapping_shards",
    "shards, sharded_dims",
    "Compare no pairs of shards: megatron-core stores the experts of all layers as one tensor, and checks it itself.",
    by="megatron_grpo/checkpointing/checkpoint.py",
    proof="tests/unit/tools/test_scale.py::test_a_save_compares_no_pairs_of_shards",
    scope="context",
)

# CPU: installed by patches/cpu_backend.py, with torch's names
GET_RANDOM_STATE = Replacement(
    "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
    "device, clone, graph_safe",
    "Fork the CPU's random generator, which is that of the device.",
    by="megatron_grpo/patches/cpu_backend.py",
    proof="tests/unit/utils/test_cpu_backend.py::test_patch",
    needed="a CPU",
)
SET_RANDOM_STATE = Replacement(
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    "new_state, device, graph_safe",
    "Fork the CPU's random generator, which is that of the device.",
    by="megatron_grpo/patches/cpu_backend.py",
    proof="tests/unit/utils/test_cpu_backend.py::test_patch",
    needed="a CPU",
)
SPLIT_SIZES = Replacement(
    "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
    "tensor, as_numpy, record_stream",
    "Convert the split sizes of the all-to-all dispatcher to numbers; megatron-core does so only for GPU tensors.",
    by="megatron_grpo/patches/cpu_backend.py",
    proof="tests/unit/utils/test_cpu_backend.py::test_patch",
    needed="a CPU",
)

ENTRIES = entries_of(globals())


@contextlib.contextmanager
def replaced_parallel_state(state: dict[str, Any]) -> Iterator[None]:
    """Context in which the globals of ``megatron.core.parallel_state`` are ``state``; their last values end up there.

    A forward pass creates buffers and sets the virtual stage.
    """
    outer = parallel_state()
    _set_parallel_state(state)
    try:
        yield
    finally:
        state.update(parallel_state())
        _set_parallel_state(outer)


def parallel_state() -> dict[str, Any]:
    """Return the module-level variables that hold the state of ``megatron.core.parallel_state``."""
    PARALLEL_STATE.check()
    names = vars(importlib.import_module("megatron.core.parallel_state"))
    return {name: value for name, value in names.items() if re.fullmatch("_[A-Z_]+", name)}


def _set_parallel_state(state: dict[str, Any]) -> None:
    vars(importlib.import_module("megatron.core.parallel_state")).update(state)
