"""The engine's turns on the device: offload, wake, weight sync, probe, rollouts, sleep, reload, in this order."""

import contextlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.lora.stream import stream_merged
from megatron_grpo.models import forward
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.rollout.arguments import has_servers
from megatron_grpo.rollout.engine import AdapterEngine, LocalEngine, TrainersEngine
from megatron_grpo.rollout.exact_log_probs import check_equal
from megatron_grpo.rollout.source import Synced
from megatron_grpo.rollout.weight_sync import weight_check
from megatron_grpo.rollout.weight_sync.adapter_sync import probe_adapter, sync_adapter
from megatron_grpo.training.device_memory import DeviceMemory
from megatron_grpo.training.offload import Offloader, needed_by_engine
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.stream import stream_hf


@dataclass
class EngineLifecycle:
    """An engine, and the trainer's tensors that make room for it."""

    args: Namespace
    model: forward.Model
    forward_step: Callable  # pretrain_grpo.forward_step, for forward passes
    engine: TrainersEngine | None  # None: all rollouts are recorded
    state_offloader: Offloader  # of gradients and optimizer state
    weight_offloader: Offloader
    timers: Timers
    device_memory: DeviceMemory
    synced: Synced = field(default_factory=Synced)
    memory: dict[str, float] = field(default_factory=dict)  # metrics of the stages of the newest turn
    adapter_probed: bool = False
    compared_beside_requests: bool = False

    @contextlib.contextmanager
    def awake(self, version: int, probe: Callable[[], Callable[[], RolloutBatch]]) -> Iterator[None]:
        """Context in which the engine uses the device, with the trainer's weights of ``version`` and a KV cache.

        1. `_offload`: gradients and optimizer state move to the host
        2. ``engine.wake_weights``: the engine allocates memory for its weights
        3. `sync`: the engine receives the trainer's weights, if it does not hold them
        4. `_offload`: the trainer's weights move to the host
        5. ``engine.wake_cache``: the engine allocates memory for its KV cache
        6. ``probe``: with --check-weight-sync, and for engines on ranks of their own with --max-staleness, every
           replica completes a few prompts, on ranks of its own beside the body
        7. the body: rollouts
        8. ``engine.sleep``: the engine frees its memory
        9. `reload`: the trainer's tensors return to the device
        10. `_check_probe`: the probe's log-probabilities are compared with the trainer's

        Optimizer state and KV cache are thus never on the device together; the trainer's weights and the KV cache are
        only without --offload-model. Steps 1 and 4 move only what a colocated vLLM needs the memory of
        (`needed_by_engine`), and the optimizer state returns beside the next passes: the optimizer's first step waits
        for it. Step 1 has nothing to run beside it, because steps 2 and 3 are short and need its memory. EngineLost
        from steps 2 to 8 leaves the tensors where they are: `reload`.
        """
        engine = self.engine
        assert engine is not None
        memory, probed = {"train": _memory()}, None
        offloaded = self._offload(self.state_offloader, margins=2)
        self.device_memory.mark(engine=False)
        with self.device_memory.phase("the engine's allocation of memory for its weights"):
            engine.wake_weights()
        new_weights = self.synced.version != version or not engine.has_weights
        if new_weights:
            self.sync(version)
        memory["sync"] = _memory()
        offloaded += self._offload(self.weight_offloader, margins=1)
        self.device_memory.mark(engine=True)
        with self.device_memory.phase("the engine's allocation of its KV cache"):
            engine.wake_cache()
        memory |= {"rollout": _memory(), "offloaded": offloaded / 2**30}
        probes_adapter = self.args.lora_weight_sync == "adapter" and not self.adapter_probed
        if probes_adapter:
            with self.timers("sync"):
                probe_adapter(cast(AdapterEngine, engine))
            self.adapter_probed = True
        # With --max-staleness, few tokens of a batch come from the newest weights (`check`).
        stale = self.args.rollout_ranks and self.args.max_staleness > 0
        # Servers that load an adapter have read the base themselves.
        unknown_base = probes_adapter and has_servers(self.args)
        if new_weights and (self.args.check_weight_sync or stale or unknown_base):
            with self.timers("sync"):
                probed = probe()
        yield
        if probed is not None:
            with self.timers("sync"):
                batch = probed()
        self.device_memory.mark(engine=True)
        engine.sleep()
        memory["asleep"] = _memory()
        self.reload()
        if probed is not None:
            self._check_probe(batch)
        self.memory = {f"memory/{stage}": size for stage, size in memory.items()} if torch.cuda.is_available() else {}

    def sync(self, version: int) -> None:
        """Send the trainer's weights to the engine; completions carry this version from now on.

        An engine that holds the adapter beside the weights receives the weights only when it has none, and so with the
        frozen parts of a vision tower. All weights are compared with --check-weight-sync, and once beside requests that
        go on (--partial-rollouts --weight-update keep): few completions are then of the newest weights alone (`check`).
        """
        stream = stream_merged if self.args.lora_weight_sync == "merged" else stream_hf
        metrics: dict[str, float] = {}
        engine = self.engine
        assert engine is not None
        beside_requests = self.args.partial_rollouts and self.args.weight_update == "keep" and engine.has_weights
        with self.timers("sync"), forward.parameters_complete(self.model):
            if self.args.lora_weight_sync == "adapter":
                metrics = sync_adapter(self.args, cast(AdapterEngine, engine), self.model, version)
            else:
                weights = stream(self.model, self.args, only_trained=engine.has_weights)
                engine.update_weights(weights, version)
            self.synced = Synced(version, metrics)
            if self.args.check_weight_sync or (beside_requests and not self.compared_beside_requests):
                weights = stream(self.model, self.args)
                weight_check.compare_tensors(cast(LocalEngine, engine), weights, version)
                self.compared_beside_requests |= beside_requests

    def check(self, batch: RolloutBatch, row: dict[str, float], update: int) -> None:
        """Raise GrpoError if the engine did not sample the batch of an update with the trainer's weights.

        The version of every token must be that of the last sync, or at most --max-staleness syncs older. With equal
        weights, the log-probabilities of engine and trainer, whose gap is in the metrics ``row``, differ only by
        rounding.
        """
        newest = oldest = self.synced.version
        if self.args.max_staleness:
            oldest -= self.args.max_staleness * self.args.updates_per_rollout
        versions = batch.weight_version[batch.response_mask == 1]
        stale = ((versions < oldest) | (versions > newest)).any()
        limit = weight_check.largest_mismatch(self.args)
        gap = row.get("mismatch/newest_mean_abs" if self.args.max_staleness else "mismatch/mean_abs", 0.0)
        if row.get("update/skipped") and not math.isfinite(gap):  # the forward pass was not finite: no engine's fault
            gap, row = 0.0, {}
        if stale or not gap <= limit:  # nan exceeds every limit
            raise GrpoError(
                "the engine does not hold the trainer's weights: it sampled with version "
                f"{np.unique(versions).tolist()}, the last sync "
                f"was {newest}; mean difference of log-probabilities {gap:.2g} nats, limit {limit:g} "
                f"(--mismatch-limit). {weight_check.ENDING}"
            )
        if self.args.exact_log_probs:
            check_equal(update, row)

    def reload(self) -> None:
        """Return the trainer's tensors to the device; the optimizer state is complete later: `complete`."""
        with self.timers("offload"):
            self.weight_offloader.to_device()
            self.state_offloader.to_device(background=True)

    def complete(self) -> None:
        """Wait until the optimizer state is on the device."""
        self.state_offloader.complete()

    def close(self) -> None:
        """End the engine."""
        if self.engine is not None:
            self.engine.close()

    def _offload(self, offloader: Offloader, margins: int) -> int:
        """Free the memory that the engine needs; return the bytes that were copied to the host."""
        # A pending gather of parameters would write into freed memory.
        with self.timers("offload"), forward.parameters_complete(self.model):
            return offloader.to_host(needed_by_engine(self.args, self.engine, margins)).copied

    def _check_probe(self, probe: RolloutBatch) -> None:
        """Compare the probe with the trainer's forward pass, which has enough device memory only after the rollout."""
        assert self.engine is not None
        with self.timers("sync"):
            replicas = self.engine.num_replicas
            weight_check.compare_log_probs(self.args, self.model, self.forward_step, probe, replicas)


def _memory() -> float:
    """Return the GiB in use on this rank's device, by all processes; 0 on a CPU."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return (total - free) / 2**30
