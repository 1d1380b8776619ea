"""Trainer and engine replicas as with --rollout-ranks, each in a thread of this process, with made-up engines."""

import ast
import contextlib
import datetime
import gc
import json
import re
import threading
import time
import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace

import good_args
import numpy as np
import pytest
import torch
import torch.distributed as dist
from slow import slow_except

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampler import PromptSampler
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.parallel.roles import Joint, Role, role_of
from megatron_grpo.rewards.pool import Failure, GroupMember
from megatron_grpo.rollout.collect import everything
from megatron_grpo.rollout.engine import Completion, request_seed
from megatron_grpo.rollout.ledger import content, ledger
from megatron_grpo.rollout.ledger.content import BatchRecord
from megatron_grpo.rollout.plan import RolloutPlan, rollout_seed
from megatron_grpo.rollout.stream import messages, producer
from megatron_grpo.rollout.stream.placed import PlacedEngines
from megatron_grpo.rollout.stream.producer import Producer
from megatron_grpo.rollout.unfinished import Group, read_groups
from megatron_grpo.rollout.weight_sync import planned
from megatron_grpo.training import recorded_run
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.batch_sizes import check_hosts
from megatron_grpo.utils.errors import GrpoError, Preempted
from megatron_grpo.weights.stream import WeightStream
from megatron_grpo.weights.transfer_plan import HfTensor, Holder, Reads, whole

pytestmark = pytest.mark.usefixtures("one_process")
LONGEST, SIZE, ROWS = 40, 4, 50
FLAGS = f"""--num-generations {SIZE} --generation-batch-size 16 --global-batch-size 16 --max-completion-length {LONGEST}
    --vllm-max-num-seqs 8 --rollout-ranks 2 --rollout-importance-sampling-mode token_truncate"""
TENSORS = [HfTensor("a", torch.float32, torch.Size([3])), HfTensor("b", torch.bfloat16, torch.Size([2, 2]))]
ADAPTER = [("q.lora_A", torch.float32, torch.Size([2, 3])), ("q.lora_B", torch.float32, torch.Size([3, 2]))]
TABLES = {"weights": TENSORS, "adapter": [HfTensor(*matrix) for matrix in ADAPTER]}


class Rows(list):
    """The training data: prompts of one token, their row number."""

    def __init__(self):
        super().__init__(Prompt(row, [row + 100], {}, f"row {row}") for row in range(ROWS))


class MadeUpEngine:
    """One token a step, which is the version of the weights; a completion's length follows from its seed."""

    is_lead = True

    @property
    def has_weights(self):
        return self.version is not None

    def __init__(self):
        self.version, self.running, self.held, self.most = None, {}, None, 0
        self.parts = [0]  # requests before each step
        self.drafts = np.zeros(3, np.int64)
        self.seeds = []  # (number, tokens that it has, seed) of each request

    def rollout(self, seed):
        return contextlib.nullcontext()

    def submit(self, requests):
        for request in requests:
            assert request.id not in self.running and self.has_weights
            assert request.begun is None or request.begun.finish_reason == "abort"
            assert request.urgent == (request.id >= producer.FIRST_OF_JOB)
            self.running[request.id] = [request, [], [], self._length(request)]
            self.parts[-1] += 1
            self.seeds.append((request.id, len(request.begun_ids), request.seed))
        self.most = max(self.most, len(self.running))

    def _length(self, request):
        whole = min(int(np.random.default_rng([request.prompt_ids[0], request.id]).lognormal(1.5, 1)) + 1, LONGEST)
        return max(whole - len(request.begun_ids), 1)

    def poll(self):
        if self.held is not None:
            self.held.wait()
        done = []
        self.parts.append(0)
        for number, (_, ids, versions, length) in list(self.running.items()):
            ids.append(self.version)
            versions.append(self.version)
            self.drafts += 1, 3, 2
            if len(ids) == length:
                done.append(self._completion(number, "stop"))
        return done

    def unfinished(self):
        kept = dict(self.running)
        found = [self._completion(number, "abort") for number in sorted(self.running)]
        self.running = kept
        return found

    def interrupt(self):
        return [self._completion(number, "abort") for number in sorted(self.running)]

    def _completion(self, number, reason):
        request, ids, versions, _ = self.running.pop(number)
        return Completion(number, list(ids), [-1.0] * len(ids), reason, list(versions)).after(request.begun)

    def reads(self, tensors):
        assert tensors == TENSORS
        return Reads.of_loaders(whole(tensors))

    def update_weights(self, weights, version):
        received = dict(weights)
        assert {name: tensor.flatten().tolist() for name, tensor in received.items()} == {
            "a": [version] * 3,
            "b": [version] * 4,
        }
        self.version = version

    def close(self):
        pass


class AdapterEngine(MadeUpEngine):
    """An engine that holds an adapter beside its weights."""

    adapter, frozen = None, True  # frozen: the requests stay as they are

    def poll(self):
        return [] if self.frozen else super().poll()

    def submit(self, requests):
        assert self.adapter is not None or not requests, "the engine has no adapter"
        super().submit(requests)

    def update_weights(self, weights, version):
        super().update_weights(weights, version)
        self.adapter = None

    def update_adapter(self, adapter, version):
        self.adapter, self.version = {name: tensor.clone() for name, tensor in adapter.items()}, version

    def compare_adapter(self, adapter):
        assert adapter.keys() == self.adapter.keys()
        return [name for name in adapter if not torch.equal(adapter[name], self.adapter[name])]

    def probe_adapter(self):
        assert not self.running
        return [] if self.adapter["q.lora_B"].any() else ["q"]


class WatchedEngine(MadeUpEngine):
    """An engine over servers."""

    def __init__(self):
        super().__init__()
        self.watched = threading.Event()

    def watch(self):
        self.watched.set()


class Scorer:
    """The reward of a completion: its place; equal for all completions of rows below ``without_signal``."""

    def __init__(self, without_signal=0):
        self.samples, self.without_signal = {}, without_signal
        self.groups = {}  # incomplete, as the pool's

    def submit(self, key, sample, member):
        self.samples[key] = sample, member
        sources = self.groups.setdefault(member.group, [])
        sources.append(sample.source)
        assert len(set(sources)) == 1, f"a group-wise reward would score {sources} as one group"
        if len(sources) == member.size:
            del self.groups[member.group]

    def poll(self):
        pass

    def take(self, keys, batch_size):
        taken = [self.samples.pop(key) for key in keys]
        row = int(taken[0][0].source.split()[1])
        rewards = [[0.0 if row < self.without_signal else float(member.place)] for _, member in taken]
        failures = [Failure("r", key, sample.source, "no", "") for key, (sample, _) in zip(keys, taken, strict=True)]
        return np.array(rewards, np.float32), failures[: row == 1]


class Launch:
    """A trainer in this thread, and engine replicas in threads of their own."""

    def __init__(self, monkeypatch, flags, without_signal=0, batch=0, engine=MadeUpEngine, replicas=2):
        self.args = replaced(
            good_args.validated(f"{FLAGS} {flags}", world_size=1),
            lora_weight_sync="adapter" if engine is AdapterEngine else None,
            end_token_ids=(),
        )
        monkeypatch.setattr(planned, "table", lambda args, what: planned.undivided(TABLES[what]))
        alone = partial(Holder, stage=0, tp=(0, 1), expert_tp=(0, 1))  # this process has no parallel groups
        monkeypatch.setattr(planned, "holder", lambda table, local: alone(np.array([w.name in local for w in table])))
        self.engines = [engine() for _ in range(replicas)]
        self.threads, self.errors, self.signal = [], [], False
        self.store = dist.HashStore()
        self.joints = [None] * (1 + replicas)
        connecting = [threading.Thread(target=self._connect, args=(rank,)) for rank in range(1 + replicas)]
        for thread in connecting:
            thread.start()
        for thread in connecting:
            thread.join()
        tokenizer = SimpleNamespace(decode=str)
        for number, engine in enumerate(self.engines):
            parts = self.args, engine, Scorer(without_signal), tokenizer, Rows(), Rows(), self.joints[number + 1]
            thread = threading.Thread(target=self._run, args=(number, parts), daemon=True)
            thread.start()
            self.threads.append(thread)
        self.sampler = PromptSampler(ROWS, 1, shuffle=False)
        self.trainer = PlacedEngines(self.args, self.joints[0], Rows(), self.sampler, self._check)
        self.ledger, self.replay = recorded_run.open_ledger(self.args, batch, self.trainer)
        self.trainer.start()

    def _connect(self, rank):
        seconds = datetime.timedelta(seconds=60)
        ranks, replicas = len(self.joints), len(self.engines)
        group = dist.ProcessGroupGloo(dist.PrefixStore("joint", self.store), rank, ranks, seconds)
        weights = dist.ProcessGroupGloo(dist.PrefixStore("weights", self.store), rank, ranks, seconds)
        role = Role(None, 0, 1) if rank == 0 else Role(rank - 1, 0, 1)
        self.joints[rank] = Joint(role, rank, replicas, self.store, group, weights)

    def _run(self, replica, parts):
        try:
            messages.wait_for_trainers(parts[-1].store)
            ledger = recorded_run.ledger_of_replica(self.args, replica, is_lead=True)
            Producer(*parts, ledger).run()
            if ledger is not None:
                ledger.close()
        except BaseException as error:
            self.errors.append(error)
            raise

    def _check(self, told):
        assert not self.errors
        if told or self.signal:
            raise Preempted("a signal")

    def publish(self, version):
        local = {name: torch.full(shape, float(version), dtype=dtype) for name, dtype, shape in TENSORS}
        self.trainer.update_weights(WeightStream(planned.undivided(TENSORS), local, torch.float32), version)

    def end(self):
        for engine in self.engines:
            if engine.held is not None:
                engine.held.set()
        self.trainer.close()
        for thread in self.threads:
            thread.join(60)
        assert not self.errors and not any(thread.is_alive() for thread in self.threads)


@pytest.fixture
def launch(monkeypatch):
    """Make launches, which end with the test."""
    made, one_at_a_time, parse = [], threading.Lock(), ast.parse

    def locked_parse(*words, **more):
        with one_at_a_time:
            return parse(*words, **more)

    # The replicas are threads here. numpy parses the header of an array, and Python 3.11's parser can raise a
    # SystemError where two threads parse (cpython#106905).
    monkeypatch.setattr(ast, "parse", locked_parse)

    def make(flags="", **more):
        made.append(Launch(monkeypatch, flags, **more))
        return made[-1]

    yield make
    for one in made:
        one.end()


def numbers_of(batch):
    """The rows that a batch trains on, in its order."""
    return (batch.row_ids[::SIZE]).tolist()


def check_seeds(run):
    """The seeds are those that a colocated engine has for the completions of each batch, counted from the batch's
    first, and for the tokens that they have: so a run samples the same, whoever generates.
    """
    requests = [request for engine in run.engines for request in engine.seeds]
    for number, tokens, seed in requests:
        batch, in_batch = divmod(number, 4 * SIZE)
        assert seed == request_seed(rollout_seed(run.args.seed, batch + 1), in_batch, tokens)
    assert {number for number, *_ in requests} >= set(range(48))
    assert len({seed for *_, seed in requests}) == len(set(requests))


def test_without_staleness_each_batch_is_what_was_drawn_for_it(launch):
    run = launch()
    for version in range(4):
        run.publish(version)
        batch, failures, metrics = run.trainer.take(everything)
        assert numbers_of(batch) == list(range(4 * version, 4 * version + 4))
        assert batch.rewards[:, 0].tolist() == [0, 1, 2, 3] * 4
        assert set(batch.weight_version) == {version}
        assert failures == (1 if version == 0 else 0)
        assert metrics["stream/trainer_wait"] >= 0
        tokens = int(batch.completion_lengths.sum())  # nothing else is generated before the batch is complete
        assert (metrics["drafts/proposed"], metrics["drafts/accepted"]) == (3 * tokens, 2 * tokens)
        assert metrics["drafts/acceptance_length"] == 3
    assert all(engine.most == 8 for engine in run.engines)  # --vllm-max-num-seqs
    check_seeds(run)


@pytest.mark.parametrize("how", slow_except(["interrupt"], ["interrupt", "drain", "keep"]))
def test_completions_live_through_new_weights_within_the_bound(launch, how):
    run, trained, mixed = launch(f"--max-staleness 2 --weight-update {how}"), [], 0
    for version in range(12):
        run.publish(version)
        batch, _, _ = run.trainer.take(everything)
        trained += numbers_of(batch)
        sampled = batch.response_mask == 1
        assert batch.weight_version[sampled].min() >= version - 2 and batch.weight_version.max() <= version
        assert (batch.tokens[sampled] == batch.weight_version[sampled]).all()  # each token is of its version
        begins = batch.cu_seqlens[:-1] + batch.prompt_lengths
        mixed += (batch.weight_version[begins] != batch.weight_version[batch.cu_seqlens[1:] - 1]).sum()
        assert sorted(batch.sample_ids) == list(range(16))
    assert len(set(trained)) == len(trained) == 48 and set(trained) <= set(range(56))
    if how == "drain":
        assert mixed == 0
    check_seeds(run)


def test_servers_are_watched_while_nothing_runs(launch, monkeypatch):
    monkeypatch.setattr(producer, "urls_of_replica", lambda args, replica: ["http://a:8000"])
    run = launch(engine=WatchedEngine)
    assert all(engine.watched.wait(60) and not engine.seeds for engine in run.engines)


@pytest.mark.parametrize(("staleness", "most"), [(0, 8), (1, 3)])
def test_requests_come_in_parts_while_the_engine_works(launch, monkeypatch, staleness, most):
    """Without staleness at once, as to a colocated engine: eight of a replica, which --vllm-max-num-seqs allows."""
    monkeypatch.setattr(producer, "AT_ONCE", 3)
    run, trained = launch(f"--max-staleness {staleness}"), []
    for version in range(4):
        run.publish(version)
        trained += numbers_of(run.trainer.take(everything)[0])
    assert len(set(trained)) == 16
    for engine in run.engines:
        assert max(engine.parts) == most
        assert engine.most == 8 if not staleness else engine.most <= 8


@pytest.mark.parametrize(("how", "left"), [("keep", 1), ("interrupt", 0)])
def test_a_step_comes_between_new_weights_and_a_save(monkeypatch, how, left):
    """What vLLM finished before new weights is in no group until then: the checkpoint would lack it."""
    inbox, done = [{"do": "publish", "what": "weights"}, {"do": "save", "directory": "d"}], []
    monkeypatch.setattr(producer.messages, "agreed", lambda message: message)
    one = SimpleNamespace(
        _args=SimpleNamespace(weight_update=how), _is_lead=True, _publish=done.append, _save=done.append,
        _inbox=SimpleNamespace(receive=lambda: inbox.pop(0) if inbox else None),
    )  # fmt: skip
    producer.Producer._obey(one)
    assert done[0] == "weights" and len(inbox) == left == 2 - len(done)


def test_groups_without_signal_are_replaced(launch):
    run = launch("--dynamic-sample", without_signal=6)
    run.publish(0)
    batch, _, metrics = run.trainer.take(everything)
    assert numbers_of(batch) == [6, 7, 8, 9] and metrics["stream/replaced_groups"] == 6


@pytest.mark.parametrize("update", ["interrupt", "keep"])
def test_an_evaluation_is_of_one_version_and_training_goes_on_after_it(launch, update):
    """With "keep" training goes on beside it, and no group of the one is a group of the other."""
    run = launch(f"--max-staleness 1 --weight-update {update}")
    run.publish(0)
    first, _, _ = run.trainer.take(everything)
    run.publish(1)
    plan = RolloutPlan(Rows()[20:27], 2, Sampling(LONGEST), 5)
    batch, failures = run.trainer.begin(plan, everything, data="valid", scored=True)()
    assert batch.row_ids[::2].tolist() == list(range(20, 27)) and batch.rewards[:, 0].tolist() == [0, 1] * 7
    assert set(batch.weight_version) == {1} and failures == 0
    kept = weakref.ref(batch)
    del batch
    gc.collect()
    assert kept() is None
    second, _, _ = run.trainer.take(everything)
    assert not set(numbers_of(first)) & set(numbers_of(second))


def test_drafts_of_an_evaluation_are_not_those_of_a_batch(launch):
    run = launch()
    for version in range(2):
        run.publish(version)
        plan = RolloutPlan(Rows()[20:27], 2, Sampling(LONGEST), 5)
        run.trainer.begin(plan, everything, data="valid", scored=True)()
        batch, _, metrics = run.trainer.take(everything)
        tokens = int(batch.completion_lengths.sum())
        assert (metrics["drafts/proposed"], metrics["drafts/accepted"]) == (3 * tokens, 2 * tokens)


def test_groups_of_an_evaluation_are_not_those_of_training():
    """Training group 3 is submitted while the evaluation's group 3 is incomplete, as with --weight-update keep."""
    train, valid, first = *Rows()[:2], producer.FIRST_OF_JOB
    members = {first + place: GroupMember(3, place, 2) for place in range(2)}
    made = Producer.__new__(Producer)
    made._scorer, made._tokenizer, made._size, made._scoring = Scorer(), SimpleNamespace(decode=str), 2, []
    made._job = producer.Job({3: valid}, 2, Sampling(4), 0, True, members)

    def completion(number):
        return Completion(number, [1], None, "stop", [0])

    made._groups = {3: Group(train, 0, (completion(6), completion(7)))}
    made._add_to_job(completion(first))
    made._submit(3)
    made._add_to_job(completion(first + 1))
    assert not made._scorer.groups and len(made._scorer.samples) == 4


def test_a_continued_completion_has_a_seed_for_the_tokens_that_it_has():
    """Completion 1 of the second group of batch 2 (from 0): request 5 of a colocated engine in rollout 3."""
    args = replaced(good_args.validated(FLAGS, world_size=1), end_token_ids=())
    begun = Completion(0, [1, 2, 3], None, "abort", [0] * 3)
    made = Producer.__new__(Producer)
    made._args, made._size, made._num_groups = args, SIZE, 4
    made._groups = {9: Group(Rows()[0], 0, (None, begun, None, None))}
    requests = [made._request(9 * SIZE + place) for place in (0, 1)]
    assert [request.begun for request in requests] == [None, begun]
    rollout = rollout_seed(args.seed, 3)
    assert [request.seed for request in requests] == [request_seed(rollout, SIZE), request_seed(rollout, SIZE + 1, 3)]


@pytest.mark.parametrize("update", ["interrupt", "drain", "keep"])
def test_a_probe_is_not_scored_and_batches_are_completed_beside_it(launch, update):
    run = launch(f"--max-staleness 1 --weight-update {update}")
    run.publish(0)
    plan = RolloutPlan(Rows()[:3], 1, Sampling(4), 0)
    finish = run.trainer.begin(plan, everything, data="train", scored=False)
    assert run.trainer.take(everything)[0].num_completions == 4 * SIZE
    batch, _ = finish()
    assert batch.rewards.shape == (3, 0) and batch.row_ids.tolist() == [0, 1, 2] and set(batch.weight_version) == {0}


def test_a_probe_ends_before_an_evaluation_begins_and_before_new_weights(launch):
    run = launch("--max-staleness 1")
    run.publish(0)
    plan = RolloutPlan(Rows()[:3], 1, Sampling(4), 0)
    probes = []
    for version in (1, 2):
        probes.append(run.trainer.begin(plan, everything, data="train", scored=False))
        other = RolloutPlan(Rows()[20:24], 2, Sampling(LONGEST), 5)
        batch, _ = run.trainer.begin(other, everything, data="valid", scored=True)()
        assert batch.row_ids[::2].tolist() == list(range(20, 24)) and set(batch.weight_version) == {version - 1}
        probes.append(run.trainer.begin(plan, everything, data="train", scored=False))
        run.publish(version)
    for number, probe in enumerate(probes):
        assert probe()[0].row_ids.tolist() == [0, 1, 2] and set(probe()[0].weight_version) == {number // 2}


def test_a_signal_after_a_batch_was_taken_leaves_the_probe_in_peace(launch):
    """The run would else be saved without the batch, whose groups the engines no longer have."""
    run = launch("--max-staleness 1")
    run.publish(0)
    run.trainer.take(everything)  # the next batch is being generated
    for engine in run.engines:
        engine.held = threading.Event()
    probe = RolloutPlan(Rows()[:3], 1, Sampling(4), 0)
    finish = run.trainer.begin(probe, everything, data="train", scored=False)
    run.signal, run.trainer._last_look = True, 0.0
    threading.Timer(2.5, lambda: [engine.held.set() for engine in run.engines]).start()  # after two looks for signals
    assert finish()[0].num_completions == 3
    evaluation = RolloutPlan(Rows()[:20], 1, Sampling(LONGEST), 0)
    with pytest.raises(Preempted):
        for _ in range(500):  # until one takes longer than the pause between two looks
            run.trainer._last_look = 0.0
            run.trainer.begin(evaluation, everything, data="valid", scored=True)()


class LastingEngine(MadeUpEngine):
    """An engine whose completions of some groups do not end before ``ends`` is set."""

    def __init__(self, lasting, ends):
        super().__init__()
        self.lasting, self.ends = lasting, ends

    def _length(self, request):
        lasts = request.id // SIZE in self.lasting and not self.ends.is_set()
        return 10**9 if lasts else super()._length(request)

    def poll(self):
        time.sleep(0.001)
        return super().poll()


def wait_for_tokens(run, count):
    """Wait until a running completion has ``count`` tokens."""
    deadline = time.monotonic() + 60
    while max((len(ids) for engine in run.engines for _, ids, *_ in [*engine.running.values()]), default=0) < count:
        assert time.monotonic() < deadline


def interrupted(directory):
    """Return how many tokens the completions have that a checkpoint interrupted, by their numbers."""
    found = {}
    for file in directory.iterdir():
        for number, group in read_groups(directory, int(file.stem), lambda row, ids: Rows()[row]).items():
            for place, completion in enumerate(group.completions, number * SIZE):
                if completion is not None and completion.finish_reason == "abort":
                    found[place] = len(completion.token_ids)
    return found


@pytest.mark.parametrize("replicas", slow_except([2, 3], [2, 3, 1]))
def test_a_checkpoint_has_what_has_started_and_a_resume_continues_it(launch, tmp_path, replicas):
    """Also with another number of replicas than before: no completion begins anew."""
    ends = threading.Event()
    run = launch("--max-staleness 3", engine=partial(LastingEngine, (13, 14), ends))
    run.publish(0)
    trained = numbers_of(run.trainer.take(everything)[0])
    wait_for_tokens(run, 1)
    run.trainer.save(tmp_path / "unfinished")
    ends.set()
    position = run.trainer.position()
    assert {path.name for path in (tmp_path / "unfinished").iterdir()} == {"00000.npz", "00001.npz"}

    again = launch("--max-staleness 3", replicas=replicas)
    again.sampler.load_state_dict(position["sampler"])
    again.trainer.restore(position["stream"], tmp_path / "unfinished")
    for version in range(1, 6):
        again.publish(version)
        batch, _, _ = again.trainer.take(everything)
        trained += numbers_of(batch)
        assert batch.weight_version[batch.response_mask == 1].min() >= version - 3
    assert len(set(trained)) == len(trained) == 24
    assert max(trained) < position["stream"]["started"] + 20
    begun = interrupted(tmp_path / "unfinished")
    requests = [request for engine in again.engines for request in reversed(engine.seeds)]
    assert len(begun) > 0 and begun.items() <= {number: tokens for number, tokens, _ in requests}.items()


class RecordedRun:
    """A run with a ledger and checkpoints in ``root``: each start goes on where kills have left it."""

    def __init__(self, launch, root, flags="", **more):
        self.root, self.saved = root, root / "position.json"
        position = json.loads(self.saved.read_text()) if self.saved.exists() else {"rollouts": 0}
        self.number = position["rollouts"]
        self.run = launch(f"--max-staleness 3 --ledger {root}/ledger {flags}", batch=self.number, **more)
        if self.number:
            self.run.sampler.load_state_dict(position["sampler"])
            self.run.trainer.restore(position["stream"], root / f"checkpoint-{self.number}")

    def step(self):
        """Train on one batch; return its tokens by row, and whether the ledger had it."""
        record = self.run.replay.get(self.number)
        if record is None:
            self.run.publish(self.number)
            batch, failures, metrics = self.run.trainer.take(everything)
            started = self.run.trainer.position()
            rest = started["sampler"], metrics, failures, 0, started["stream"]
            self.run.ledger.record(BatchRecord(self.number, self.run.trainer.taken, *rest))
        else:
            batch = self.run.replay.collect(record, everything)
            self.run.sampler.load_state_dict(record.sampler)
            self.run.trainer.restore(record.started)
        self.number += 1
        starts = batch.cu_seqlens
        tokens = [batch.tokens[starts[i] : starts[i + 1]].tolist() for i in range(batch.num_completions)]
        return {row: tokens[i * SIZE : (i + 1) * SIZE] for i, row in enumerate(numbers_of(batch))}, record is not None

    def save(self):
        self.run.trainer.save(self.root / f"checkpoint-{self.number}")
        self.saved.write_text(json.dumps(self.run.trainer.position()))
        self.run.ledger.roll()

    def kill(self):
        """End the run; what it had in memory is lost."""
        self.run.end()
        self.run.ledger.close()


CHANGING = "other numbers of replicas"


@pytest.mark.parametrize(
    "flags", slow_except(["", CHANGING], ["", CHANGING, "--dynamic-sample", "--weight-update keep"])
)
def test_a_killed_run_goes_on_with_the_batches_and_groups_of_the_ledger(launch, tmp_path, flags):
    """Kills after batches 3, 4, 4 and 7 with checkpoints at 2 and, while recorded batches are used, at 3."""
    trained, used, finished = {}, [], {}
    replicas, flags = ((2, 3, 1, 2, 3), "") if flags == CHANGING else ((2,) * 5, flags)
    starts = ((3, (2,)), (4, ()), (5, (3,)), (7, ()), (9, ()))
    for number_of_replicas, (until, saves) in zip(replicas, starts, strict=True):
        more = {"without_signal": 3} if "dynamic" in flags else {}
        more["replicas"] = number_of_replicas
        run = RecordedRun(launch, tmp_path, flags, **more)
        while run.number < until:
            number = run.number
            tokens, recorded = run.step()
            assert trained.setdefault(number, tokens) == tokens  # trained again: the same
            used.append(recorded)
            if run.number in saves:
                run.save()
        run.kill()
        found = content.read(tmp_path / "ledger")
        groups = ledger.load(found, found.groups, ledger.recorded_prompt)
        for key, group in groups.items():
            whole = [[*group.prompt.ids, *completion.token_ids] for completion in group.completions]
            assert finished.setdefault(key, whole) == whole  # generated once
    assert (
        used
        == [False] * 3 + [True, False] + [True, True, False] + [True, True, False, False] + [True] * 4 + [False] * 2
    )
    rows = Counter(row for tokens in trained.values() for row in tokens)
    assert set(rows.values()) == {1} and len(rows) == 36
    consumed = {key for record in found.batches.values() for key in record.groups}
    left = finished.keys() - consumed
    open_groups = {group["number"] for group in found.batches[8].started["open"]}
    dropped = range(3) if flags == "--dynamic-sample" else ()
    assert {key.number for key in left} <= open_groups | {*dropped} | {key.number for key in left if key.birth == 9}


@pytest.mark.parametrize("replicas", [(2, 3, 2), (3, 2, 3)])
def test_batches_of_other_replicas_cost_no_tokens(launch, tmp_path, replicas):
    """A checkpoint, a launch with another number of replicas that is killed, and a third one with its batches."""
    ends = threading.Event()
    engine, (first, second, third) = partial(LastingEngine, (17, 19), ends), replicas
    run = RecordedRun(launch, tmp_path, engine=engine, replicas=first)
    for _ in range(2):
        run.step()
    wait_for_tokens(run.run, 50)
    run.save()
    run.kill()
    begun = interrupted(tmp_path / "checkpoint-2")
    run = RecordedRun(launch, tmp_path, engine=engine, replicas=second)
    run.step()
    run.kill()
    ends.set()
    run = RecordedRun(launch, tmp_path, engine=engine, replicas=third)
    for _ in range(3):
        run.step()
    asked = {number: tokens for engine in run.run.engines for number, tokens, _ in reversed(engine.seeds)}
    assert max(begun.values()) >= 50 and begun.keys() & asked.keys()
    assert [number for number in begun.keys() & asked.keys() if asked[number] < begun[number]] == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_other_bytes_than_the_trainer_sent_end_the_run(launch, monkeypatch):
    """With one message: the tensor, the rank and the version."""
    check, once = planned.Transfer._check, threading.Lock()  # the replicas are threads

    class Engine(MadeUpEngine):
        def update_weights(self, weights, version):
            dict(weights)  # as they are

    def check_with_fault(transfer, packed, expected):
        piece, part = packed.pieces[-1], packed.parts[-1]
        if transfer._plan.tensors[piece.tensor].name == "b" and once.acquire(blocking=False):
            part.view(-1)[1].neg_()
        check(transfer, packed, expected)

    monkeypatch.setattr(planned.Transfer, "_check", check_with_fault)
    run = launch(engine=Engine)
    run.publish(4)
    deadline = time.monotonic() + 60
    while not run.errors and time.monotonic() < deadline:
        time.sleep(0.01)
    (error,) = run.errors
    assert isinstance(error, GrpoError) and re.match(
        "the weights of update 4 reached the engine with other bytes than the trainer sent: on rank [12] b. The last",
        str(error),
    )
    run.errors.clear()


def test_another_runs_groups_are_refused(launch):
    run = launch("--max-staleness 2")
    state = run.trainer.conductor.state_dict() | {"max_staleness": 1}
    with pytest.raises(GrpoError, match="--max-staleness was 1 and is now 2"):
        run.trainer.restore(state)


@pytest.mark.parametrize("where", slow_except(["engine"], ["trainer", "engine"]))
def test_a_signal_ends_the_wait_and_what_runs_can_be_saved(launch, tmp_path, where):
    run = launch()
    run.publish(0)
    for engine in run.engines:
        engine.held = threading.Event()  # a batch will not come
    if where == "trainer":
        run.signal = True
    else:
        run.store.set("signal", "SIGTERM")
    with pytest.raises(Preempted):
        run.trainer.take(everything)
    for engine in run.engines:
        engine.held.set()
    run.trainer.save(tmp_path / "unfinished")
    assert run.trainer.position()["stream"]["version"] == 0


def test_a_full_disk_is_reported(launch, tmp_path):
    run = launch()
    (tmp_path / "unfinished").write_text("a file in the way")
    with pytest.raises(OSError, match="the unfinished completions cannot be written"):
        run.trainer.save(tmp_path / "unfinished")


def test_roles_of_a_launch():
    assert [role_of(rank, 6, 4, 2) for rank in range(6)] == [
        *[Role(None, rank, 2) for rank in range(2)],
        *[Role(replica, rank, 2) for replica in range(2) for rank in range(2)],
    ]
    check_hosts(4, 4, 2, 4)
    with pytest.raises(GrpoError, match="ranks 3 to 4 would be on two hosts of 4 ranks"):
        check_hosts(1, 4, 2, 4)


@pytest.mark.parametrize("update", ["interrupt", "keep"])
def test_an_adapter_goes_alone_to_all_engines_and_is_compared_with_theirs(launch, update):
    """Completions continue under each new adapter; none is sampled by the weights alone."""
    run = launch(f"--max-staleness 1 --weight-update {update}", engine=AdapterEngine)

    def adapter(version):
        matrices = {"q.lora_A": torch.full([2, 3], float(version)), "q.lora_B": torch.full([3, 2], 0.5 * version)}
        return {name: tensor.to(torch.bfloat16) for name, tensor in matrices.items()}

    run.trainer._start_groups()  # as a resume does: there are requests before there are weights
    run.publish(0)
    run.trainer.update_adapter(adapter(0), 0)
    while not all(engine.running for engine in run.engines):
        run._check(False)
    assert run.trainer.probe_adapter() == ["q (engine replica 0)", "q (engine replica 1)"]
    for engine in run.engines:
        engine.frozen = False
    for version in range(5):
        if version == 3:  # as after an engine has lost its weights
            run.publish(version)
        if version:
            run.trainer.update_adapter(adapter(version), version)
            assert run.trainer.probe_adapter() == []
        assert run.trainer.compare_adapter(adapter(version)) == []
        batch, _, _ = run.trainer.take(everything)
        sampled = batch.weight_version[batch.response_mask == 1]
        assert max(version - 1, 0) <= min(sampled) and max(sampled) <= version
    run.engines[1].adapter["q.lora_A"][0, 0] += 1
    assert run.trainer.compare_adapter(adapter(4)) == ["q.lora_A (engine replica 1)"]
