"""The trainer's side of engines on ranks of their own (``--rollout-ranks``)."""

import functools
import json
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.prompts import PromptDataset, draw
from megatron_grpo.data.sampler import BlendedSampler, PromptSampler
from megatron_grpo.parallel.initialize import await_ranks, host_group, led_by_rank_0
from megatron_grpo.parallel.roles import Joint
from megatron_grpo.rollout.collect import Needs, exchange, to_batch
from megatron_grpo.rollout.draft_counts import DraftCounts, draft_metrics, no_drafts
from megatron_grpo.rollout.ledger.content import GroupKey
from megatron_grpo.rollout.plan import RolloutPlan, training_sampling
from megatron_grpo.rollout.stream import messages
from megatron_grpo.rollout.stream.conductor import Conductor
from megatron_grpo.rollout.stream.messages import Message
from megatron_grpo.rollout.unfinished import check_same_run
from megatron_grpo.rollout.weight_sync import planned
from megatron_grpo.utils import progress
from megatron_grpo.weights.stream import WeightStream

BETWEEN_LOOKS = 0.005  # seconds between two looks for reports
BETWEEN_SIGNS = 1.0  # seconds between two looks for signs of progress


class PlacedEngines:
    """All engine replicas of a run, as the trainer sees them; rank 0 of the trainers leads.

    It has the methods of `Engine` around a rollout: the engines are never asleep, and `update_weights` publishes.
    """

    replica: int | None = None  # a trainer generates nothing
    is_lead = False
    has_weights = False

    def __init__(
        self,
        args: Namespace,
        joint: Joint,
        dataset: PromptDataset,
        sampler: PromptSampler | BlendedSampler,
        check_signals: Callable[[bool], None],
    ):
        self._args, self._joint, self._dataset, self._sampler = args, joint, dataset, sampler
        self._check_signals = check_signals
        self.num_replicas = joint.num_replicas
        num_groups = args.generation_batch_size // args.num_generations
        replaced = args.max_resample_times * num_groups if args.dynamic_sample else 0
        self.conductor = Conductor(num_groups, args.max_staleness, self.num_replicas, replaced)
        self._leads = dist.get_rank() == 0
        replicas = range(self.num_replicas) if self._leads else range(0)
        self._senders = [messages.Sender(joint.store, messages.commands(replica)) for replica in replicas]
        self._receivers = [messages.Receiver(joint.store, messages.reports(replica)) for replica in replicas]
        self._reports: list[list[Message]] = [[] for _ in replicas]  # that a command waits for
        self._signs: list[Any] = []
        self._last_look = 0.0
        self._transfers: dict[str, planned.Transfer] = {}  # of the weights and of the adapter
        self._version = -1  # of the newest weights
        self._plan: Callable[[], tuple[RolloutBatch, int]] | None = None  # that has begun: `begin`
        self._failures = 0  # missing rewards since the last batch
        self._idle_seconds = 0.0  # of all replicas
        self._drafts: dict[int, DraftCounts] = {}  # by replica, since its start
        self._drafts_before = no_drafts()  # of all replicas, at the last batch
        self.waited = 0.0  # seconds for the newest batch
        self._ended = False
        self._lost: set[int] = set()  # complete groups that could not be written into the ledger
        self.taken: tuple[GroupKey, ...] | None = ()  # groups of the newest batch, on rank 0; None: one of them is lost

    def start(self) -> None:
        """Let the engine ranks read the ledger, which is open now; wait until all replicas have started. Collective."""
        with led_by_rank_0(self._watch_signals):
            if self._leads:
                messages.trainers_are_ready(self._joint.store)
                self._reported("started")

    # ---- batches

    def take(self, needs: Needs) -> tuple[RolloutBatch, int, dict[str, float]]:
        """Return the next batch, its number of missing rewards, and metrics. Collective.

        A trainer gets the tokens of the completions that it ``needs``.
        """
        metrics: list[Any] = [0, {}]
        began = time.monotonic()
        with led_by_rank_0(self._watch_signals):
            if self._leads:
                self._start_groups()
                while (taken := self.conductor.take()) is None:
                    self._wait()
                    self._start_groups()
                self._tell({"do": "fetch", "groups": [group.number for group in taken]})
                self.taken = tuple(GroupKey(group.birth, group.number) for group in taken)
                if not self._lost.isdisjoint(key.number for key in self.taken):
                    self.taken = None
                idle, self._idle_seconds = self._idle_seconds, self._idle()
                metrics = [self._failures, {"stream/trainer_wait": time.monotonic() - began}]
                metrics[1]["stream/engine_idle"] = (self._idle_seconds - idle) / self.num_replicas
                metrics[1]["stream/replaced_groups"] = self.conductor.replaced
                if self._drafts:
                    drafts = np.sum(list(self._drafts.values()), axis=0)
                    metrics[1] |= draft_metrics(drafts - self._drafts_before)
                    self._drafts_before = drafts
                self._failures = 0
        dist.broadcast_object_list(metrics, src=0, group=host_group())
        return self._receive(training_sampling(self._args, 1), needs), *metrics

    def _start_groups(self) -> None:
        """Read what the replicas have reported, and start as many groups as may start."""
        self._read()
        count = self.conductor.to_start()
        rows = [prompt.id for prompt in draw(self._dataset, self._sampler, count)] if count else []
        for replica, groups in self.conductor.start(rows).items():
            self._senders[replica].send({"do": "start", "groups": [asdict(group) for group in groups]})

    def _receive(self, sampling: Any, needs: Needs) -> RolloutBatch:
        """Return what the replicas send. Collective over all ranks."""
        return exchange(to_batch({}, [], {}, {}, sampling.num_kept), needs, self._joint.group)

    def begin(self, plan: RolloutPlan, needs: Needs, data: str, scored: bool) -> Callable[[], tuple[RolloutBatch, int]]:
        """Let the engines begin a plan, which has prompts of ``data``. Collective.

        Returns the collective function that waits for them, and returns them and the number of missing rewards. All
        completions are of the newest weights: a plan is finished before new weights are published or another begins.

        A signal ends the wait for a plan that is scored. Others are short probes, beside which a batch can have been
        taken that the checkpoint would lack.
        """
        self._finish_plan()
        if self._leads:
            message: Message = {"do": "generate", "data": data, "rows": [prompt.id for prompt in plan.prompts]}
            message |= {"num_generations": plan.num_generations, "sampling": asdict(plan.sampling)}
            self._tell(message | {"seed": plan.seed, "scored": scored})
        self._plan = functools.cache(functools.partial(self._receive_plan, plan.sampling, needs, scored))
        return self._plan

    def _finish_plan(self) -> None:
        """Wait for the completions of the plan that has begun, if there is one. Collective."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan()

    def _receive_plan(self, sampling: Any, needs: Needs, until_signal: bool) -> tuple[RolloutBatch, int]:
        failures = torch.zeros((), dtype=torch.int64)
        with led_by_rank_0(self._watch_signals):
            if self._leads:
                failures += sum(report["failures"] for report in self._reported("job done", until_signal))
                self._tell({"do": "send job", "version": self._version})
        dist.broadcast(failures, src=0, group=host_group())
        return self._receive(sampling, needs), int(failures)

    # ---- weights

    def update_weights(self, stream: planned.Weights, version: int) -> None:
        """Publish new weights: all replicas have them when the next command reaches them. Collective.

        The full tensors of the stream are not gathered: every rank sends parts of its own shards.
        """
        assert isinstance(stream, WeightStream)
        self._publish(planned.kind_of(stream), stream.local, version)
        self.has_weights = True

    @property
    def has_base(self) -> bool:
        """See `AdapterEngine.has_base`."""
        return self.has_weights

    def update_adapter(self, adapter: dict[str, torch.Tensor], version: int) -> None:
        """Publish a new adapter; after new weights the engines generate nothing before it. Collective."""
        self._publish("adapter", adapter, version)

    def _publish(self, what: str, local: Mapping[str, torch.Tensor], version: int) -> None:
        self._finish_plan()
        await_ranks()  # the engines receive the weights within a time-out
        with led_by_rank_0(self._watch_signals):
            if self._leads:
                self._tell({"do": "prepare", "version": version})
                self._reported("ready")
                self._tell({"do": "publish", "what": what})
        self._send(what, local)
        self._version = version

    def _send(self, what: str, local: Mapping[str, torch.Tensor]) -> None:
        """Send parts of this rank's shards. Collective over all ranks."""
        if what not in self._transfers:
            table, links = planned.table(self._args, what), planned.Links.of_launch(self._joint)
            self._transfers[what] = planned.Transfer(self._args, links, table, planned.holder(table, local))
        self._transfers[what].send(local)

    def compare_adapter(self, adapter: dict[str, torch.Tensor]) -> list[str]:
        """Return on rank 0 a line for each tensor of an engine's adapter that differs from this one. Collective.

        The adapter is sent a second time, so that a fault of the first transfer is found too.
        """
        await_ranks()
        if self._leads:
            self._tell({"do": "compare adapter"})
        self._send("adapter", adapter)
        return self._lines_of_all("compared")

    def probe_adapter(self) -> list[str]:
        """Return on rank 0 the kinds of layers in which an engine does not use its adapter. Collective."""
        if self._leads:
            self._tell({"do": "probe adapter"})
        return self._lines_of_all("probed")

    def _lines_of_all(self, done: str) -> list[str]:
        """Return on rank 0 the lines that all replicas report."""
        lines: list[str] = []
        with led_by_rank_0(self._watch_signals):
            if self._leads:
                for replica, report in enumerate(self._reported(done)):
                    lines += [f"{line} (engine replica {replica})" for line in report["lines"]]
        return lines

    # ---- messages

    def _tell(self, message: Message) -> None:
        for sender in self._senders:
            sender.send(message)

    def _read(self) -> None:
        """Read all reports that have arrived."""
        for replica, receiver in enumerate(self._receivers):
            while (report := receiver.receive()) is not None:
                if report["do"] != "complete":
                    self._reports[replica].append(report)
                    continue
                if report["drafts"] is not None:
                    self._drafts[replica] = np.array(report["drafts"])
                if report["group"] not in self.conductor.open:
                    continue  # from before `restore`
                self._failures += report["failures"]
                if not report["written"]:
                    self._lost.add(report["group"])
                if self.conductor.finish(report["group"], report["has_signal"]):
                    self._senders[replica].send({"do": "drop", "groups": [report["group"]]})

    def _reported(self, what: str, until_signal: bool = True) -> list[Message]:
        """Wait until every replica has reported ``what``, or until a signal; return the reports."""
        found: dict[int, Message] = {}
        while len(found) < self.num_replicas:
            for replica, reports in enumerate(self._reports):
                for report in reports:
                    if report["do"] == what:  # others are answers to a command whose wait a signal has ended
                        found[replica] = report
                reports.clear()
            if len(found) < self.num_replicas:
                self._wait(until_signal)
                self._read()
        return [found[replica] for replica in range(self.num_replicas)]

    def _wait(self, until_signal: bool = True) -> None:
        """Wait a moment; what moves at any engine is progress. Raise Preempted for a signal, if it ends the wait."""
        time.sleep(BETWEEN_LOOKS)
        if time.monotonic() - self._last_look > BETWEEN_SIGNS:
            self._last_look = time.monotonic()
            signs = self._read_signs()
            if [sign.get("moved") for sign in signs] != self._signs:
                self._signs = [sign.get("moved") for sign in signs]
                progress.advance()
            if until_signal:
                self._check_signals(self._joint.store.check(["signal"]))

    def _watch_signals(self) -> None:
        """Tell rank 0 a signal of this rank, while it waits for rank 0."""
        self._check_signals(False)

    def _read_signs(self) -> list[dict[str, Any]]:
        keys = [f"sign/{replica}" for replica in range(self.num_replicas)]
        return [json.loads(self._joint.store.get(key)) if self._joint.store.check([key]) else {} for key in keys]

    def _idle(self) -> float:
        return sum(sign.get("idle_seconds", 0.0) for sign in self._read_signs())

    # ---- checkpoints

    def position(self) -> dict[str, Any]:
        """Return the state of sampler and conductor, equal on all trainers. Collective.

        A rollout that a signal has ended does not count.
        """
        stream = self.conductor.state_dict()
        state = [{"sampler": self._sampler.state_dict(), "stream": stream, "rollouts": stream["version"]}]
        dist.broadcast_object_list(state, src=0, group=host_group())
        return state[0]

    def save(self, directory: Path) -> None:
        """Have every replica write its groups into a checkpoint; call it on rank 0."""
        self._tell({"do": "save", "directory": str(directory.absolute())})
        for report in self._reported("saved", until_signal=False):
            if report["error"]:
                raise OSError(report["error"])

    def restore(self, state: dict[str, Any], directory: Path | None = None) -> None:
        """Continue with the groups of a checkpoint in ``directory``, or with those that a batch of the ledger left.

        ``state`` is that of the conductor. GrpoError if the groups are another run's.
        """
        names = ("num_groups", "max_staleness")
        check_same_run(state, {name: getattr(self.conductor, name) for name in names})
        self.conductor.load_state_dict(state)
        files = {group["number"]: group["replica"] for group in state["open"]}  # of the checkpoint
        for replica, sender in enumerate(self._senders):
            groups = [asdict(group) for group in self.conductor.open.values() if group.replica == replica]
            message: Message = {"do": "hold", "groups": groups, "directory": None, "files": []}
            if directory is not None:
                message["directory"] = str(directory.absolute())
                message["files"] = sorted({files[group["number"]] for group in groups})
            sender.send(message)

    # ---- the trainer's device

    def wake_weights(self) -> None:
        """Do nothing: the engines are awake."""

    wake_cache = sleep = wake_weights

    def device_bytes(self) -> tuple[int, int]:
        """Return 0: the engines have GPUs of their own."""
        return 0, 0

    def close(self) -> None:
        """End the engine ranks. A further call does nothing."""
        if self._leads and not self._ended:
            self._tell({"do": "end"})
        self._ended = True
