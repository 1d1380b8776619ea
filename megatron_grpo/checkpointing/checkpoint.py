"""Save and load checkpoints with megatron.core.dist_checkpointing: model, optimizer, scheduler, random states.

A checkpoint can be loaded with any other parallel configuration: tensor, pipeline (also with virtual stages), context,
expert and data parallelism. Its state dict has Megatron-LM's keys (``model``, ``optimizer``, ``opt_param_scheduler``,
``iteration``, ``rng_state``) and some of this project. optimizer_state.py handles the optimizer's part; data_files.py
the files of tensors; checkpoint_directory.py the other files, and makes a save atomic. All ranks must see the
directory.

**Checkpoints are trusted input.** Tensors and the common state are read with ``weights_only=True``, but the index
(.metadata) and the random states are pickles, which can run code when loaded: load only checkpoints whose writer you
trust.
"""

import contextlib
import os
import random
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_grpo.checkpointing import checkpoint_directory, data_files, optimizer_state
from megatron_grpo.checkpointing.background import BackgroundSaves, StagingWriter
from megatron_grpo.checkpointing.checkpoint_directory import find, latest_iteration, pinned, read_checkpoint_args
from megatron_grpo.checkpointing.checksums import CHECKSUMS
from megatron_grpo.parallel.agreement import gathered, on_all_ranks, on_rank_0, raise_on_all_ranks
from megatron_grpo.parallel.initialize import host_group, set_random_seed
from megatron_grpo.patches import megatron_core as core
from megatron_grpo.utils.arguments import args_to_json
from megatron_grpo.utils.core_flags import core_flags
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0

__all__ = ["find", "latest_iteration", "load_checkpoint", "load_weights", "pinned", "read_checkpoint_args"]
__all__ += ["updated_reference"]
__all__ += ["read_weights", "save_checkpoint", "save_weights", "subfolder"]
__all__ += ["start_background_saves", "wait_for_background", "write_state"]

# How megatron-core stores the tensors. Its defaults cannot be loaded with another parallel configuration; these can.
CONTENT_METADATA = {
    "distrib_optim_sharding_type": optimizer_state.FULLY_RESHARDABLE,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}

TOKEN_SECONDS = 70.0  # until a file of another host has appeared
REFERENCE = "reference"  # subfolder of a checkpoint with the weights of an updated reference model (--sync-ref-model)

# Arguments that determine the set of weights and their shapes; the built model's configuration has them, too.
ARCHITECTURE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
    "qk_layernorm add_bias_linear add_qkv_bias num_experts moe_ffn_hidden_size moe_router_topk "
    "moe_router_score_function moe_shared_expert_intermediate_size multi_latent_attention q_lora_rank kv_lora_rank "
    "v_head_dim mtp_num_layers attention_output_gate experimental_attention_variant linear_attention_freq "
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
    "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads"
).split()


def save_checkpoint(
    args,
    iteration: int,
    model_chunks,
    optimizer,
    opt_param_scheduler,
    extra_state: dict,
    save_reference: Callable[[Path], None] | None = None,
    save_on_this_rank: Callable[[Path], None] | None = None,
    best: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint under ``--save`` and make it the newest. Collective.

    ``optimizer`` and ``opt_param_scheduler`` may be None (a converted model). ``extra_state``: JSON-serializable, equal
    on all ranks, returned by ``load_checkpoint``. ``save_reference`` writes an updated reference model into a subfolder
    of the checkpoint; ``save_on_this_rank`` writes files of this rank. ``best``: see `publish`. Raises GrpoError when
    writing fails; the earlier checkpoints stay.

    With --async-save the tensors are only copied, and the checkpoint is written in the background: the next save, or
    `wait_for_background`, raises its error.
    """
    wait_for_background()
    background = _background if args.async_save else None
    temporary = on_rank_0(checkpoint_directory.start, args.save, iteration)
    metadata = _with_group(CONTENT_METADATA)
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": iteration} | _model_state(model_chunks, metadata)
    if optimizer is not None:
        state["optimizer"] = optimizer_state.state_to_save(optimizer, state, metadata)
    if opt_param_scheduler is not None:
        state["opt_param_scheduler"] = opt_param_scheduler.state_dict()
    state["rng_state"] = _rng_object(_rng_state())
    state["extra_state"] = extra_state
    state["layout"] = _parallel_configuration()
    state["optimizer_type"] = optimizer_state.type_name(optimizer)
    keep = args.max_checkpoints_to_keep
    try:
        if background is not None:
            background.begin(temporary)
        write_state(state, temporary, metadata)
        if save_reference is not None:
            save_reference(temporary / REFERENCE)
        problem = f"checkpoint {temporary} cannot be written"
        on_all_ranks(lambda: save_on_this_rank and save_on_this_rank(temporary), problem)
        if background is not None:
            background.submit(args_to_json(args), keep, best)
        else:
            on_rank_0(checkpoint_directory.publish, temporary, args_to_json(args), keep, best)
    except GrpoError:  # on all ranks
        if background is not None:
            background.abandon()
        on_rank_0(checkpoint_directory.discard, temporary)
        raise


def load_checkpoint(args, model_chunks, optimizer, opt_param_scheduler) -> tuple[int, dict]:
    """Restore everything from the newest checkpoint under ``--load``; return its iteration and ``extra_state``.

    Collective. With ``--no-load-optim`` Adam's moments stay zero, but the learning-rate schedule is restored; with
    ``--no-load-rng`` the random states stay unchanged. Hyper-parameters are those of the current flags.
    """
    if args.save:
        on_rank_0(checkpoint_directory.clean_up, args.save)
    iteration, directory = on_rank_0(_find_verified, args.load)
    common = on_rank_0(_common_state, directory)
    _check_architecture(directory, model_chunks)
    metadata = _with_group(common.get("content_metadata") or CONTENT_METADATA)
    request: dict[str, Any] = _model_state_to_load(model_chunks, metadata)
    if not args.no_load_optim:
        optimizer_state.check(directory, common, metadata, optimizer)
        request["optimizer"] = optimizer_state.state_to_load(optimizer, request, metadata)
        common["optimizer"] = optimizer_state.plain_values(request["optimizer"], common.get("optimizer", {}))
    same_configuration = common.get("layout") == _parallel_configuration()
    if same_configuration and not args.no_load_rng:
        request["rng_state"] = _rng_object(None)

    state = _load(request, common, directory)
    _set_model_state(model_chunks, state)
    if args.no_load_optim:
        optimizer.reload_model_params()  # updates the float32 copies of 16-bit weights
    else:
        optimizer_state.set_loaded(optimizer, state["optimizer"])
    if "opt_param_scheduler" in state:
        if "layout" not in common:  # Megatron-LM's schedule counts samples, this one updates
            state["opt_param_scheduler"]["num_steps"] = iteration
        opt_param_scheduler.num_steps = 0  # the load adds to it, and --on-bad-update restore loads in a run
        opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
    if not args.no_load_rng:
        if same_configuration:
            _set_rng_state(state["rng_state"])
        else:
            set_random_seed(args.seed + iteration)
            print_rank_0(
                f"{directory} was written with the parallel configuration {common.get('layout')}, this run has "
                f"{_parallel_configuration()}: random states are seeded again, with {args.seed} + {iteration}"
            )
    return iteration, state.get("extra_state", {})


def load_weights(directory: str | Path, model_chunks) -> None:
    """Load only the weights of the newest checkpoint under ``directory``, before the optimizer is built. Collective."""
    read_weights(on_rank_0(_find_verified, directory)[1], model_chunks)


def read_weights(checkpoint: Path, model_chunks) -> None:
    """Load the weights from the directory of a single checkpoint (``iter_*``, or one of save_weights). Collective."""
    common = on_rank_0(_common_state, checkpoint)
    _check_architecture(checkpoint, model_chunks)
    if not hasattr(unwrap_model(model_chunks)[0], "lora"):
        on_rank_0(checkpoint_directory.refuse_adapter, checkpoint)
    metadata = _with_group(common.get("content_metadata") or CONTENT_METADATA)
    _set_model_state(model_chunks, _load(_model_state_to_load(model_chunks, metadata), common, checkpoint))


def check_shared(root: str | Path) -> None:
    """Raise GrpoError on all ranks unless every host sees the directory ``root`` of rank 0. Collective.

    Each rank writes its part of a checkpoint there; on disks of their own the hosts would never have a whole one.
    """
    token = on_rank_0(_write_token, Path(root))
    sees = os.environ.get("LOCAL_RANK", "0") != "0" or _appears(token)
    everywhere = gathered((socket.gethostname(), sees))
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            token.unlink(missing_ok=True)
    blind = sorted({host for host, sees in everywhere if not sees})
    if blind:
        raise GrpoError(
            f"--save {root} is another directory on host {', '.join(blind[:4])}{' ...' * (len(blind) > 4)} than on "
            f"{everywhere[0][0]}: give one that all hosts of trainers share, such as on NFS or Lustre"
        )


def check_seen(name: str, path: str | Path) -> None:
    """Raise GrpoError if this host has not the ``path`` of a flag ``name``, which rank 0 has; one rank a host looks."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and not _appears(Path(path)):
        raise GrpoError(
            f"{name}: {path} is on the host of rank 0, and not on host {socket.gethostname()}, where ranks read it, "
            "too: give a directory that all hosts see, such as on NFS or Lustre, or copy it to each host"
        )


def _write_token(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    token = root / f".shared-{uuid.uuid4().hex}"
    token.touch()
    return token


def _appears(file: Path) -> bool:
    """Return whether a file that another host has just written is there; a file server may need some seconds."""
    deadline = time.monotonic() + TOKEN_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # of a file server that is busy
            if file.exists():
                return True
        time.sleep(0.2)
    return False


def save_weights(directory: Path, model_chunks) -> None:
    """Write only the weights into a new directory, for `read_weights`. Collective."""
    on_rank_0(directory.mkdir)
    metadata = _with_group(CONTENT_METADATA)
    write_state({"checkpoint_version": 3.0} | _model_state(model_chunks, metadata), directory, metadata)


def subfolder(root: str | Path, name: str) -> Path | None:
    """Return the folder ``name`` of the newest checkpoint under ``root``, or None. Collective."""
    directory = on_rank_0(_find_verified, root)[1] / name
    return directory if on_rank_0(directory.is_dir) else None


def updated_reference(root: str | Path) -> Path | None:
    """Return the folder of an updated reference model in the newest checkpoint under ``root``, or None. Collective."""
    return subfolder(root, REFERENCE)


def write_state(state: dict, directory: Path, content_metadata: dict | None = None) -> None:
    """Write a state dict with sharded tensors into an empty directory, in megatron-core's torch_dist format.

    Collective. Writes in this process, or copies for the background save that is being staged. Raises GrpoError on all
    ranks if any rank fails.

    megatron-core's own save is designed for background saves. In the foreground, too, it starts a helper process that
    imports the program again, which takes longer than the first save of a small model, and survives a killed trainer;
    it copies all tensors of a rank to the host before it writes the first; and an error of one rank leaves the others
    waiting. In the background it forks the trainer, which is unsafe with CUDA, gloo and vLLM threads, or needs
    nvidia-resiliency-ext.
    """
    if content_metadata is not None:
        state = state | {"content_metadata": content_metadata}
    try:
        sharded, common = save_preprocess(state)
        of_rank_0 = ShardedObject(data_files.COMMON_STATE, common, (1,), (0,), replica_id=dist.get_rank())
        sharded[data_files.COMMON_STATE] = of_rank_0
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        with _no_pairs_of_shards():
            tensors = mcore_to_pyt_state_dict(by_key)
        torch_checkpoint.save(
            tensors,
            storage_writer=(
                StagingWriter(directory, _background)
                if _background is not None and _background.job is not None
                else data_files.Writer(directory)
            ),
            planner=optimizer_state.SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=host_group(),
        )
    except (OSError, CheckpointingException, CheckpointException) as error:
        raise GrpoError(f"checkpoint {directory} cannot be written: {_cause(error)}") from error


_background: BackgroundSaves | None = None  # this rank's, with --async-save


def start_background_saves() -> BackgroundSaves:
    """Start this rank's process for checkpoints that are written in the background, for --async-save."""
    global _background
    _background = BackgroundSaves()
    return _background


def wait_for_background() -> None:
    """Wait until the current save is published; raise GrpoError on all ranks if it failed. Collective."""
    if _background is None:
        return
    job, error = _background.job, _background.written()
    # Rank 0's process ends last: it publishes the checkpoint.
    errors = gathered(error and f"rank {dist.get_rank()}: {error}")
    if job is not None:
        _background.note_published()
    for text in filter(None, errors):
        raise GrpoError(f"checkpoint {job and job.temporary} was not written: {text}")


def _find_verified(root: str | Path) -> tuple[int, Path]:
    iteration, directory = checkpoint_directory.find(root)
    checkpoint_directory.verify(directory)
    if line := checkpoint_directory.note(root):
        print_rank_0(line)
    if not checkpoint_directory.has_checksums(directory):
        print_rank_0(f"{directory} has no {CHECKSUMS}: damage within its *.distcp files cannot be found")
    return iteration, directory


def _common_state(directory: Path) -> dict:
    """Return the values of a checkpoint that are equal on all ranks, without tensors."""
    try:
        common = data_files.Reader(directory).common_state()
    except GrpoError as error:
        raise GrpoError(f"{error}{checkpoint_directory.way_out(directory)}") from error
    except Exception as error:  # files of Megatron-LM's, which have no checksum, raise anything
        problem = f"its common state cannot be read: {error!r}"
        raise GrpoError(checkpoint_directory.damaged(directory, problem)) from error
    if "layout" in common and not (directory / checkpoint_directory.MANIFEST).exists():
        raise GrpoError(
            f"checkpoint {directory} is damaged: {checkpoint_directory.MANIFEST} is missing, without which nothing can "
            "be checked"
        )
    return common


def _load(request: dict, common: dict, directory: Path) -> dict:
    """Return ``common`` with the requested sharded state; raise GrpoError on all ranks if a tensor does not fit."""
    _check_presence(request, directory)
    for entry in nested_values(request):
        if isinstance(entry, ShardedTensorFactory):
            entry.merge_fn = partial(_merged, entry.data, entry.merge_fn)
    state, problem = {}, None
    try:
        with warnings.catch_warnings(), _own_readers(), _no_pairs_of_shards():
            # megatron-core uses torch's deprecated ShardedTensor, calls torch's function as a program of one process
            # does, and gives the arguments in another order than torch wants.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "torch.distributed is disabled|The argument order of load", UserWarning)
            state, *_ = dist_checkpointing.load(request, str(directory), strict=StrictHandling.RETURN_UNEXPECTED)
    except (GrpoError, OSError, CheckpointingException, CheckpointException) as error:
        hint = checkpoint_directory.way_out(directory)
        problem = f"checkpoint {directory} cannot be loaded: {_cause(error, dist.get_rank())}{hint}"
    raise_on_all_ranks(problem)
    return merge(common, state)


def _merged(whole: torch.Tensor, merge: Callable, parts):
    """Return ``whole`` if the loaded ``parts`` are views of it, else the merged parts.

    megatron-core would merge copies, of all such tensors of the model at once.
    """
    place = whole.untyped_storage().data_ptr()
    in_place = all(torch.is_tensor(p) and p.untyped_storage().data_ptr() == place for p in nested_values(parts))
    return whole if in_place else merge(parts)


@contextlib.contextmanager
def _own_readers() -> Iterator[None]:
    """Context in which megatron-core reads with `data_files.Reader`, and does not read the common state.

    megatron-core would read it as a pickle that can run code, and merge the request with it. The request is merged with
    another one, which holds the optimizer's values in this rank's arrangement.
    """
    reader = core.READER.replaced(lambda directory, *_, **__: data_files.Reader(directory))
    with reader, core.COMMON_STATE.replaced(lambda _: {}):
        yield


def _no_pairs_of_shards() -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch does not look for overlaps between the shards of a tensor.

    megatron-core stores the experts of all layers as one tensor, and torch compares each pair of its shards on every
    rank that saves or loads experts. megatron-core checks the same in time that is proportional to the shards.
    """
    return core.OVERLAPS.replaced(lambda shards, sharded_dims: None)


def _check_presence(request: dict, directory: Path) -> None:
    """Raise GrpoError when a key that any rank requests is missing; megatron-core's own error is less clear."""
    wanted = {item.key for item in nested_values(request) if isinstance(item, ShardedBase)}
    absent = wanted - on_rank_0(_stored_keys, directory)
    missing = sorted(set().union(*gathered(absent)))
    if missing and all(key.startswith("optimizer.") for key in missing):
        raise GrpoError(
            f"checkpoint {directory} does not hold {missing[0]} (and {len(missing) - 1} more of the optimizer's): the "
            "run that wrote it did not train these weights, or saved no optimizer; reset Adam with --no-load-optim"
        )
    if missing:
        raise GrpoError(
            f"checkpoint {directory} does not hold {missing[0]} (and {len(missing) - 1} more that this model has): "
            "it is of another architecture, or holds weights only (then give it as --pretrained-checkpoint)"
        )


def _stored_keys(directory: Path) -> set[str]:
    try:
        keys = {item.key for item in load_sharded_metadata(str(directory)).values()}
    except Exception as error:  # a damaged pickle of Megatron-LM's, which has no checksum, raises anything
        raise GrpoError(f"checkpoint {directory} is damaged: .metadata cannot be read: {error!r}") from error
    checkpoint_directory.check_recurrent_layers(directory, keys)
    return keys


def _check_architecture(directory: Path, model_chunks) -> None:
    """Compare the stored arguments with the built model; a checkpoint written by Megatron-LM has no args.json.

    Collective: a stage may have an attribute that the others have not.
    """
    stored = on_rank_0(checkpoint_directory.stored_args, directory)
    model = unwrap_model(model_chunks)[0]
    fields = {name: core_flags()[name].feeds[0][1] for name in ARCHITECTURE}
    built = {name: getattr(model.config, field, None) for name, field in fields.items()}
    built["swiglu"] = model.config.gated_linear_unit and model.config.activation_func is F.silu  # Gemma uses GeGLU
    built["vocab_size"] = getattr(model, "vocab_size_without_padding", None)
    built["untie_embeddings_and_output_weights"] = not model.share_embeddings_and_output_weights
    different = [
        f"{name} is {stored[name]} in the checkpoint and {value} in this run"
        for name, value in built.items()
        if stored.get(name) is not None and value is not None and stored[name] != value
    ]
    problem = (
        f"checkpoint {directory} is of another architecture: {'; '.join(different)}. Give flags that agree, or "
        "--use-checkpoint-args"
    )
    raise_on_all_ranks(problem if different else None)


def _parallel_configuration() -> dict[str, int]:
    """Return the sizes that decide whether random states can be restored; order of ranks: see ``_rng_object``."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _with_group(metadata: dict) -> dict:
    return metadata | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _model_state(model_chunks, metadata: dict) -> dict:
    """Return the model's sharded state under Megatron-LM's keys: ``model``, or ``model0``, ... for virtual stages.

    Of a model with adapters only what is trained.
    """
    names = ["model"] if len(model_chunks) == 1 else [f"model{i}" for i in range(len(model_chunks))]
    chunks = unwrap_model(model_chunks)
    return {name: _chunk_state(chunk, metadata) for name, chunk in zip(names, chunks, strict=True)}


def _model_state_to_load(model_chunks, metadata: dict) -> dict:
    """Return `_model_state` without the extra states of layers.

    Transformer Engine's layers store their recipe of FP8 there, which would replace that of the flags. They need
    nothing else of it: the recipes take their scales from the values.
    """
    state = _model_state(model_chunks, metadata)
    return {name: {key: item for key, item in of.items() if "_extra_state" not in key} for name, of in state.items()}


def _chunk_state(chunk, metadata: dict) -> dict:
    state = chunk.sharded_state_dict(metadata=metadata)
    if not hasattr(chunk, "lora"):
        return state
    trained = {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
    return {name: entry for name, entry in state.items() if name in trained}


def _set_model_state(model_chunks, state: dict) -> None:
    for i, chunk in enumerate(unwrap_model(model_chunks)):
        # Not strict: _load has checked the names, and the extra states are absent.
        chunk.load_state_dict(state["model" if len(model_chunks) == 1 else f"model{i}"], strict=False)


def _rng_object(data) -> ShardedObject:
    """Return the random states as one sharded object per rank, indexed by the rank's coordinates."""
    configuration = _parallel_configuration()
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return ShardedObject("rng_state", data, (configuration["pp"], configuration["tp"], configuration["dp"]), place)


def _rng_state() -> dict:
    """Return this rank's random states, under Megatron-LM's names."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _cause(error: BaseException, this_rank: int | None = None) -> str:
    """Return the message of an error; torch's exception holds one for each failed rank: return the first.

    ``this_rank``: torch's exception is of this rank alone, and calls it 0.
    """
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank if this_rank is None else this_rank}: {error}"
    return str(error)
