"""Producer: the loop of one engine replica on ranks of its own.

Between two engine steps it obeys the trainer's commands and looks for rewards; it never waits for either. All ranks of
a replica run the same loop, with equal commands before the same step. The lead rank alone scores and reports.
"""

import json
import signal
import time
from argparse import Namespace
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from megatron_grpo.data.prompts import Prompt, PromptDataset
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.parallel.roles import Joint
from megatron_grpo.rewards.pool import GroupMember, RewardPool, print_first_failures
from megatron_grpo.rollout.arguments import urls_of_replica
from megatron_grpo.rollout.collect import Needs, exchange, nothing, sample_to_score, to_batch
from megatron_grpo.rollout.draft_counts import no_drafts
from megatron_grpo.rollout.dynamic_sampling import filter_reward, filter_weights, has_signal
from megatron_grpo.rollout.engine import AdapterEngine, Completion, InterruptibleEngine, Request, request_seed
from megatron_grpo.rollout.episodes import print_failures
from megatron_grpo.rollout.ledger.ledger import Ledger
from megatron_grpo.rollout.plan import rollout_seed, training_sampling
from megatron_grpo.rollout.servers.stream import ServerStream
from megatron_grpo.rollout.stream import messages
from megatron_grpo.rollout.stream.messages import Message
from megatron_grpo.rollout.unfinished import Group, prompts_of, read_groups, with_completion, write_groups
from megatron_grpo.rollout.weight_sync import planned
from megatron_grpo.rollout.weight_sync.weight_check import described
from megatron_grpo.utils import progress
from megatron_grpo.weights.transfer_plan import Reads, whole

FIRST_OF_JOB = 2**40  # id of a request of an evaluation; those of training are far below
IDLE = 0.002  # seconds between two looks for commands, if nothing is generated
BETWEEN_SIGNS = 0.5  # seconds between two signs of progress
# Requests that the engine gets before a step. The device computes while the host prepares the next ones, each of which
# takes some 0.1 ms, and a probe of new weights does not wait for all of them.
AT_ONCE = 64


@dataclass
class Job:
    """Prompts that the trainer waits for: of an evaluation, or of a probe of new weights."""

    prompts: Mapping[int, Prompt]  # by their place in the plan; those of this replica
    num_generations: int
    sampling: Sampling
    seed: int
    scored: bool
    members: dict[int, GroupMember]  # by the id of the request
    completions: list[Completion] = field(default_factory=list)
    failures: int = 0
    rewards: np.ndarray | None = None  # when all are known
    ready: bool = False


class Producer:
    """One engine replica, on one of its ranks. ``scorer``: None except on the lead rank."""

    def __init__(
        self,
        args: Namespace,
        engine: InterruptibleEngine,
        scorer: RewardPool | None,
        tokenizer: Any,
        train: PromptDataset,
        valid: PromptDataset | None,
        joint: Joint,
        ledger: Ledger | None = None,
    ):
        assert joint.role.replica is not None
        self._ledger = ledger
        self._written: deque[tuple[Future[None], int, int]] = deque()  # groups to report when they are on the disk
        self._args, self._engine, self._scorer, self._tokenizer = args, engine, scorer, tokenizer
        self._data, self._prompts = {"train": train, "valid": valid}, prompts_of(train)
        self._joint, self._replica = joint, joint.role.replica
        self._is_lead = joint.role.rank == 0
        self._inbox = messages.Receiver(joint.store, messages.commands(self._replica))
        self._outbox = messages.Sender(joint.store, messages.reports(self._replica))
        servers = self._servers = len(urls_of_replica(args, self._replica))
        self._capacity = args.vllm_max_num_seqs * max(1, servers)  # requests at a time
        self._at_once = AT_ONCE * max(1, servers)  # else many servers would wait for their requests
        self._size = args.num_generations
        self._num_groups = args.generation_batch_size // args.num_generations
        self._groups: dict[int, Group] = {}  # started and not taken, by number
        self._waiting: deque[int] = deque()  # ids of requests that the engine does not have, oldest group first
        self._running: set[int] = set()  # ids of requests that the engine has
        self._scoring: list[int] = []  # complete groups without rewards
        self._job: Job | None = None
        self._jobs = 0  # requests of all jobs so far
        self._drafts = no_drafts()  # of all steps without a job
        self._drafts_seen = no_drafts()  # the engine's, at the newest step
        self._version: int | None = None  # to be published, as soon as the engine is ready
        self._is_ready = False  # to publish it
        self._has_policy = False  # whether the engine has the weights, and the adapter of a run that sends it alone
        self._transfers: dict[str, planned.Transfer] = {}  # of the weights and of the adapter
        self._idle_seconds = 0.0
        self._last_sign = 0.0
        self._failed_rewards: set[str] = set()
        self._signal: str | None = None
        self._ended = False

    def run(self) -> None:
        """Generate until the trainer ends the run."""
        if self._args.exit_signal_handler:  # the trainer ends the run
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, self._note_signal)
        # The seeds of requests follow from their groups. An engine without seeds of requests has one for all of them.
        self._report({"do": "started"})
        with self._engine.rollout(rollout_seed(self._args.seed, 0) + self._replica):
            while not self._ended:
                self._obey()
                self._fill()
                if self._servers:
                    cast(ServerStream, self._engine).watch()
                if self._running:
                    self._step()
                else:
                    time.sleep(IDLE)
                    self._idle_seconds += IDLE
                self._score()
                self._get_ready()
                self._report_progress()

    def _note_signal(self, number: int, frame: Any) -> None:
        self._signal = signal.Signals(number).name

    # ---- commands

    def _obey(self) -> None:
        """Carry out all commands that have arrived; after new weights beside running requests, one step comes first."""
        while (message := messages.agreed(self._inbox.receive() if self._is_lead else None)) is not None:
            match message["do"]:
                case "start":
                    self._start(message["groups"])
                case "drop":
                    for number in message["groups"]:
                        del self._groups[number]
                case "fetch":
                    self._send_groups(message["groups"])
                case "generate":
                    self._begin_job(message)
                case "send job":
                    self._send_job(message["version"])
                case "prepare":
                    self._version, self._is_ready = message["version"], False
                case "publish":
                    self._publish(message["what"])
                    if self._args.weight_update == "keep":
                        return  # a completion that ended before these weights comes with a step: a save needs it
                case "compare adapter":
                    adapter = dict(self._transfer("adapter").run())
                    self._report_of_all("compared", self._adapter_engine.compare_adapter(adapter))
                case "probe adapter":
                    self._pause()
                    self._report_of_all("probed", self._adapter_engine.probe_adapter())
                case "save":
                    self._save(Path(message["directory"]))
                case "hold":
                    self._hold(message["groups"], message["directory"], message["files"])
                case "end":
                    self._ended = True

    @property
    def _adapter_engine(self) -> AdapterEngine:
        return cast(AdapterEngine, self._engine)

    def _report(self, message: Message) -> None:
        if self._is_lead:
            self._outbox.send(message)

    def _start(self, groups: Sequence[Mapping[str, int]]) -> None:
        self._add({group["number"]: self._new(group) for group in groups})

    def _new(self, group: Mapping[str, int]) -> Group:
        return Group(self._prompt(self._data["train"], group["row"]), group["birth"], (None,) * self._size)

    @staticmethod
    def _prompt(data: PromptDataset | None, row: int) -> Prompt:
        assert data is not None
        prompt = data[row]
        assert prompt is not None, f"row {row} was drawn, and is left out here"
        return prompt

    def _hold(self, groups: Sequence[Mapping[str, int]], directory: str | None, files: Sequence[int]) -> None:
        """Continue with these groups and no others; what they have so far is in the checkpoint ``directory``, or here.

        ``files``: the replicas that had them at the checkpoint, which may be others than now. A resume does this at the
        checkpoint, and then after each batch that the ledger has.
        """
        if self._running:
            self._pause()
        self._waiting.clear()
        begun = self._groups
        if directory is not None:
            begun = {}
            for file in files:
                begun |= read_groups(Path(directory), file, self._prompts)
        self._groups = {}
        self._add({group["number"]: begun.get(group["number"]) or self._new(group) for group in groups})

    def _add(self, groups: dict[int, Group]) -> None:
        """Add groups, and queue their completions that are not finished; the ledger can have whole groups of them."""
        known = {} if self._ledger is None else self._ledger.known(groups)
        for number, group in (groups | known).items():
            self._groups[number] = group
            if group.rewards is not None:
                self._finish_group(number, 0, written=number in known)
            elif not group.complete:
                unfinished = (c is None or c.finish_reason == "abort" for c in group.completions)
                ids = range(number * self._size, (number + 1) * self._size)
                self._waiting.extend(compress(ids, unfinished))
            elif number not in self._scoring:
                self._submit(number)

    # ---- generation

    def _fill(self) -> None:
        """Submit as many requests as the engine runs at a time; those of a job come first.

        With --max-staleness they come in parts of `AT_ONCE`. Without it the engine gets what a colocated one gets, so
        that both compute the same.
        """
        if not (self._engine.has_weights and self._has_policy):
            return  # a resumed run has groups before it has weights
        if self._version is not None and self._args.weight_update == "drain":
            return
        if self._generates_job and self._args.weight_update != "keep":
            return  # the others wait until it is done
        free = self._capacity - len(self._running)
        if self._args.max_staleness:
            free = min(free, self._at_once)
        ids = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        self._engine.submit([self._request(number) for number in ids])
        self._running.update(ids)

    def _request(self, number: int) -> Request:
        """Return the request of a completion; its seed follows from the group's place in the order of the starts."""
        group_number, place = divmod(number, self._size)
        group = self._groups[group_number]
        batch, place_in_batch = divmod(group_number, self._num_groups)
        begun = group.completions[place]
        sampling = group.prompt.sampling(training_sampling(self._args, batch + 1))
        tokens = len(begun.token_ids) if begun is not None else 0
        seed = request_seed(rollout_seed(self._args.seed, batch + 1), place_in_batch * self._size + place, tokens)
        prompt = group.prompt
        return Request(number, prompt.ids, sampling, begun, seed=seed, row=prompt.row, images=prompt.images)

    @property
    def _generates_job(self) -> bool:
        job = self._job
        return job is not None and len(job.completions) < len(job.members)

    def _step(self) -> None:
        generates_job = self._generates_job
        completions = self._engine.poll()
        if (drafts := self._engine.drafts) is not None:
            self._drafts += 0 if generates_job else drafts - self._drafts_seen
            self._drafts_seen = drafts.copy()
        for completion in completions:
            self._running.remove(completion.id)
            if completion.id >= FIRST_OF_JOB:
                self._add_to_job(completion)
            else:
                self._add_to_group(completion)

    def _add_to_group(self, completion: Completion) -> None:
        number, place = divmod(completion.id, self._size)
        group = self._groups[number] = with_completion(self._groups[number], place, completion)
        if group.complete:
            self._submit(number)

    def _pause(self) -> None:
        """Take all requests of groups from the engine; they go on with the tokens that they have."""
        interrupted = self._engine.interrupt()
        for completion in interrupted:
            number, place = divmod(completion.id, self._size)
            self._groups[number] = with_completion(self._groups[number], place, completion)
        self._waiting.extendleft(completion.id for completion in reversed(interrupted))
        # Others have finished before new weights, and come with the next step.
        self._running.difference_update(completion.id for completion in interrupted)

    # ---- rewards

    def _submit(self, number: int) -> None:
        """Submit a complete group to the scorer."""
        self._scoring.append(number)
        if self._scorer is not None:
            group = self._groups[number]
            text = self._tokenizer.decode(group.prompt.ids)
            for place, completion in enumerate(group.completions):
                assert completion is not None
                sample = sample_to_score(group.prompt, text, completion, self._tokenizer)
                self._scorer.submit(completion.id, sample, GroupMember(number, place, self._size))

    def _score(self) -> None:
        """Report the groups whose rewards are known."""
        if self._scorer is None:
            self._scoring.clear()
            return
        if self._scoring or (self._job is not None and self._job.scored):
            self._scorer.poll()
        for number in list(self._scoring):
            # As many samples as this replica has of a batch.
            share = -(-self._num_groups // self._joint.num_replicas) * self._size
            taken = self._scorer.take(range(number * self._size, (number + 1) * self._size), share)
            if taken is not None:
                self._scoring.remove(number)
                rewards, failures = taken
                self._groups[number] = replace(self._groups[number], rewards=rewards)
                print_first_failures(failures, self._failed_rewards)
                self._finish_group(number, len(failures))
        self._report_written()
        job = self._job
        if job is not None and job.scored and job.rewards is None and len(job.completions) == len(job.members):
            taken = self._scorer.take([completion.id for completion in job.completions], None)
            if taken is not None:
                job.rewards, failures = taken
                job.failures = len(failures)
                print_first_failures(failures, self._failed_rewards)

    def _finish_group(self, number: int, failures: int, written: bool = False) -> None:
        """Report a scored group; with a ledger, after the group is on the disk, where it can be ``written`` already."""
        if written or self._ledger is None or not self._ledger.appends:
            self._report_group(number, failures)
            return
        group = self._groups[number]
        newest = [
            c.weight_versions[-1] // self._args.updates_per_rollout for c in group.completions if c and c.token_ids
        ]
        write = self._ledger.append(max(newest, default=group.birth), {number: group})
        self._written.append((write, number, failures))

    def _report_written(self) -> None:
        while self._written and self._written[0][0].done():
            assert self._ledger is not None
            write, number, failures = self._written.popleft()
            if write.exception() is not None:
                self._ledger.flush()  # says so; the run goes on, and this batch cannot be replayed
            self._report_group(number, failures, written=write.exception() is None)

    def _report_group(self, number: int, failures: int, written: bool = True) -> None:
        rewards = self._groups[number].rewards
        assert rewards is not None
        signal_there = has_signal(filter_reward(rewards, filter_weights(self._args)))
        report = {"do": "complete", "group": number, "has_signal": signal_there, "failures": failures}
        drafts = None if self._engine.drafts is None else self._drafts.tolist()
        self._report(report | {"written": written, "drafts": drafts})

    # ---- a batch of the trainer

    def _send_groups(self, numbers: Sequence[int]) -> None:
        """Send the groups of a batch that are this replica's; the others send theirs. Collective over all ranks."""
        taken = {number: place for place, number in enumerate(numbers) if number in self._groups}
        groups = {number: self._groups.pop(number) for number in taken}
        completions = [c for group in groups.values() for c in group.completions if c is not None]
        members = {c.id: GroupMember(c.id // self._size, c.id % self._size, self._size) for c in completions}
        prompts = {number: group.prompt for number, group in groups.items()}
        rewards = [group.rewards for group in groups.values() if group.rewards is not None]
        needs = replace(nothing, prefixes=self._args.share_prompts)
        self._exchange(prompts, completions, members, taken, training_sampling(self._args, 1), rewards, needs)

    def _exchange(
        self,
        prompts: Mapping[int, Prompt],
        completions: list[Completion],
        members: Mapping[int, GroupMember],
        places: Mapping[int, int],
        sampling: Sampling,
        rewards: Sequence[np.ndarray],
        needs: Needs = nothing,
    ) -> None:
        batch = to_batch(prompts, completions if self._is_lead else [], members, places, sampling.num_kept)
        if self._is_lead and rewards:
            batch.rewards = np.concatenate(rewards)
        exchange(batch, needs, self._joint.group)

    # ---- evaluation and probes

    def _begin_job(self, message: Message) -> None:
        """Begin to generate what the trainer waits for; training goes on after it, or beside it with "keep"."""
        if self._args.weight_update != "keep":
            self._pause()
        mine = range(len(message["rows"]))[self._replica :: self._joint.num_replicas]
        data, size = self._data[message["data"]], message["num_generations"]
        prompts = {place: self._prompt(data, message["rows"][place]) for place in mine}
        if message["data"] == "train":  # of a probe: without the rows' own sampling, which may constrain completions
            prompts = {place: replace(prompt, sampling_fields={}) for place, prompt in prompts.items()}
        fields = message["sampling"] | {name: tuple(message["sampling"][name]) for name in ("stop", "stop_token_ids")}
        members = [GroupMember(place, g, size) for place in mine for g in range(size)]
        ids = range(FIRST_OF_JOB + self._jobs, FIRST_OF_JOB + self._jobs + len(members))
        self._jobs += len(members)
        job = self._job = Job(
            prompts, size, Sampling(**fields), message["seed"], message["scored"], dict(zip(ids, members, strict=True))
        )
        self._engine.submit(
            Request(
                number,
                prompts[group].ids,
                prompts[group].sampling(job.sampling),
                seed=request_seed(job.seed, group * size + place),
                row=prompts[group].row if job.scored else {},  # a probe has no environment
                images=prompts[group].images,
                urgent=True,
            )
            for number, (group, place, _) in job.members.items()
        )
        self._running.update(ids)

    def _add_to_job(self, completion: Completion) -> None:
        job = self._job
        assert job is not None
        job.completions.append(completion)
        if job.scored and self._scorer is not None:
            member = job.members[completion.id]
            prompt = job.prompts[member.group]
            # With --weight-update keep groups of the training data, which have other numbers, are scored meanwhile.
            member = member._replace(group=completion.id - member.place)
            sample = sample_to_score(prompt, self._tokenizer.decode(prompt.ids), completion, self._tokenizer)
            self._scorer.submit(completion.id, sample, member)

    def _send_job(self, version: int) -> None:
        """Send the completions of a job, which are of this version of the weights. Collective over all ranks."""
        job = self._job
        assert job is not None
        versions = {of_token for completion in job.completions for of_token in completion.weight_versions}
        assert versions <= {version}, "completions of other weights than the newest"
        self._job = None
        places = {place: place for place in job.prompts}
        rewards = [] if job.rewards is None else [job.rewards]
        self._exchange(job.prompts, job.completions, job.members, places, job.sampling, rewards)

    # ---- weights

    def _get_ready(self) -> None:
        """Report when the trainer can publish weights, and when it can have what it waits for."""
        if self._version is not None and not self._is_ready:
            self._is_ready = not self._running or self._args.weight_update != "drain"
            if self._is_ready:
                self._report({"do": "ready"})
        job = self._job
        if job is not None and not job.ready and len(job.completions) == len(job.members):
            job.ready = not job.scored or job.rewards is not None or not job.members
            if job.ready:
                self._report({"do": "job done", "failures": job.failures})

    def _publish(self, what: str) -> None:
        """Receive the new weights, or a new adapter. Collective over all ranks."""
        assert self._version is not None
        if self._args.weight_update != "keep":
            self._pause()
        transfer = self._transfer(what)
        if what == "adapter":
            self._adapter_engine.update_adapter(dict(transfer.run()), self._version)
        else:
            self._engine.update_weights(transfer.run(), self._version)
        if transfer.differences:
            raise described(transfer.differences, planned.other_bytes(what, self._version), self._joint.rank)
        self._has_policy = what == "adapter" or self._args.lora_weight_sync != "adapter"
        self._version = None

    def _transfer(self, what: str) -> planned.Transfer:
        """Return the transfer of a kind of weights. Collective over all ranks the first time."""
        if what not in self._transfers:
            reads = self._engine.reads if what != "adapter" else lambda tensors: Reads.of_loaders(whole(tensors))
            table, links = planned.table(self._args, what), planned.Links.of_launch(self._joint)
            self._transfers[what] = planned.Transfer(self._args, links, table, reads=reads)
        return self._transfers[what]

    def _report_of_all(self, done: str, lines: list[str]) -> None:
        """Report the lines of all ranks of this replica."""
        everywhere: list[list[str]] = [[]] * self._joint.role.size
        dist.all_gather_object(everywhere, lines, group=host_group())
        self._report({"do": done, "lines": [line for of_rank in everywhere for line in of_rank]})

    # ---- checkpoints

    def _save(self, directory: Path) -> None:
        """Write the groups that have started and are not taken into a checkpoint, on the lead rank."""
        groups = dict(self._groups)
        for completion in self._engine.unfinished():
            if completion.id < FIRST_OF_JOB:
                number, place = divmod(completion.id, self._size)
                groups[number] = with_completion(groups[number], place, completion)
        error = ""
        if self._ledger is not None:
            self._ledger.roll()
        if self._is_lead:
            try:
                write_groups(directory, self._replica, groups)
            except OSError as raised:
                error = f"the unfinished completions cannot be written: {raised}"
        self._report({"do": "saved", "error": error})

    # ---- signs of life

    def _report_progress(self) -> None:
        """Show the trainer that this replica works; tell it a signal of this rank."""
        if self._signal is not None:
            self._joint.store.set("signal", self._signal)
            self._signal = None
        now = time.monotonic()
        print_failures(self._engine)
        if self._is_lead and now - self._last_sign > BETWEEN_SIGNS:
            self._last_sign = now
            sign = {"moved": progress.signs, "running": len(self._running), "idle_seconds": self._idle_seconds}
            self._joint.store.set(f"sign/{self._replica}", json.dumps(sign))
