"""Processes of environments that end while hundreds of calls run in them; what a poll of the pool looks at."""

import random
import time
from pathlib import Path

import psutil
import pytest
from slow import slow_except

from megatron_grpo.environments import pool as module
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.environments.registry import ToolCall, Turn
from megatron_grpo.environments.threads import Sizes

PLUGIN = '''
import asyncio, os, time
from pathlib import Path
from megatron_grpo.environments.registry import Environment, Reply, register_environment, register_tools

running = 0

def fetch(page: str) -> str:
    """Fetch a page; return it, and how many calls run at the time.

    Args:
        page: its name
    """
    global running
    running += 1
    time.sleep(0.1)
    found = f"{page} {running}"
    running -= 1
    return found

register_tools("fetch", [fetch])

class Base(Environment):
    def snapshot(self):
        return 0

    def restore(self, state):
        pass

@register_environment("held")
class Held(Base):
    """Its steps end when a file is there; the one with the text "end" ends its process."""

    async def step(self, turn):
        kind, folder = turn.text.split()
        if kind == "held":
            (Path(folder) / f"{time.monotonic_ns()}.held").touch()
            while not (Path(folder) / "go").exists():
                await asyncio.sleep(0.01)
        if kind == "end":
            while len(list(Path(folder).glob("*.held"))) < 40:
                await asyncio.sleep(0.01)
            os._exit(3)
        if kind == "block":
            time.sleep(10_000)
        return [{"role": "user", "content": kind}]

@register_environment("traced")
class Traced(Environment):
    """Without snapshots. It writes each step into a file, with the process; "end" waits for so many that are held."""

    def reset(self, row):
        self.file, self.says_process = Path(row["file"]), row["says_process"]

    async def step(self, turn):
        kind, go, held = turn.text.split()
        with self.file.open("a") as file:
            file.write(f"{os.getpid()} {turn.number}\\n")
        if kind == "held":
            Path(f"{go}.{self.file.name}").touch()
            while not Path(go).exists():
                await asyncio.sleep(0.01)
        if kind == "end":
            while len(list(self.file.parent.glob(f"{Path(go).name}.*"))) < int(held):
                await asyncio.sleep(0.01)
            (self.file.parent / f"{os.getpid()}.ended").touch()
            os._exit(3)
        return [{"role": "user", "content": f"{kind} {os.getpid()}" if self.says_process else kind}]

@register_environment("threads")
class Threads(Base):
    """The same in threads."""

    def step(self, turn):
        kind, folder = turn.text.split()
        while kind == "held" and not (Path(folder) / "go").exists():
            time.sleep(0.01)
        if kind == "hang":
            time.sleep(10_000)
        return [{"role": "user", "content": kind}]
'''


@pytest.fixture
def make(tmp_path):
    made = []

    def of(names, **given):
        (tmp_path / "plugin.py").write_text(PLUGIN)
        made.append(EnvironmentPool(names, [tmp_path / "plugin.py"], **{"timeout": 600.0, "retries": 0} | given))
        return made[-1]

    yield of
    for pool in made:
        pool.close()


def answers(pool, count):
    """Return so many answers, by key."""
    found, deadline = {}, time.monotonic() + 100
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} answers"
        found |= {answer.key: answer for answer in pool.poll(0.1)}
    return found


def begin(pool, name, keys):
    for key in keys:
        pool.begin(key, name, {})
    assert not any(answer.error for answer in answers(pool, len(keys)).values())


def fetch(number):
    return Turn("", [ToolCall("fetch", {"page": str(number)}, "0")])


@pytest.mark.slow
def test_a_process_that_is_killed_costs_no_episode(make):
    """1,000 episodes of three turns, 300 tools at once, which they are again after the process has ended."""
    pool = make(["fetch"], workers=1)
    waiting, turns, ended, asked, running = list(range(1000)), {}, set(), 0, []
    while len(ended) < 1000:
        while waiting and len(turns) < 300:
            pool.begin(key := waiting.pop(), "fetch", {})
            turns[key] = 0
        for answer in pool.poll(1.0):
            key = answer.key
            assert answer.error is None
            if turns[key]:
                page, at_once = answer.messages[0]["content"].split()
                assert page == str(turns[key])
                running.append(int(at_once))
            turns[key] += 1
            if turns[key] == 4:
                pool.end(key)
                del turns[key]
                ended.add(key)
                continue
            pool.step(key, fetch(turns[key]))
            asked += 1
            if asked == 1500:
                (child,) = psutil.Process(pool._workers[0].process.pid).children()
                child.kill()
    assert ended == set(range(1000)) and asked == 3000
    assert max(running[-1000:]) > 100  # of 256 threads


@pytest.mark.slow
def test_the_call_that_ends_its_process_is_found_and_all_others_go_on(make, tmp_path):
    """Without a retry: 40 calls ran beside it. New steps are answered while the 40 still run."""
    pool = make(["held"], workers=1)
    begin(pool, "held", range(60))
    for key in range(40):
        pool.step(key, Turn(f"held {tmp_path}"))
    pool.step(40, Turn(f"end {tmp_path}"))
    while not pool._trials:
        assert not pool.poll(0.1)
    for turn in range(3):
        for key in range(41, 60):
            pool.step(key, Turn(f"new{turn} {tmp_path}"))
        assert all(answer.messages[0]["content"] == f"new{turn}" for answer in answers(pool, 19).values())
    found = answers(pool, 1)
    assert list(found) == [40] and "ended its process" in found[40].error  # found while the 40 run
    (tmp_path / "go").touch()
    found = answers(pool, 40)
    assert sorted(found) == list(range(40)) and not any(answer.error for answer in found.values())
    for key in range(40):  # they go on beside the others
        pool.step(key, Turn(f"again {tmp_path}"))
    assert len(answers(pool, 40)) == 40 and not pool._groups
    assert not any(worker.episodes for worker in pool._trials)


class Traced:
    """Episodes of the environment "traced"; those with odd numbers say their process."""

    def __init__(self, pool, folder, count):
        self.pool, self.folder, self.alive, self.turn, self.changed = pool, folder, list(range(count)), 0, []
        for key in self.alive:
            pool.begin(key, "traced", {"file": str(folder / f"{key}"), "says_process": bool(key % 2)})
        answers(pool, count)

    def round(self, held, quick, killer=None):
        """Make a step of these episodes; the killer's ends its process when all that are held have begun."""
        self.turn += 1
        go = self.folder / f"go{self.turn}"
        for kind, keys in (("held", held), ("quick", quick), ("end", [killer] if killer is not None else [])):
            for key in keys:
                number = 1 + sum(turn for _, turn in self.steps(key)[-1:])
                self.pool.step(key, Turn(f"{kind} {go} {len(held)}", number=number))
        found = answers(self.pool, 1) if killer is not None else {}
        while killer is not None and killer not in found:
            found |= answers(self.pool, 1)
        go.touch()
        found |= answers(self.pool, len(held) + len(quick) + (killer is not None) - len(found))
        assert [key for key, answer in found.items() if answer.error] == ([killer] if killer is not None else [])
        self.changed += [key for key, answer in found.items() if answer.changed]
        if killer is not None:
            self.pool.end(killer)
            self.alive.remove(killer)

    def steps(self, key):
        """Return [(process, number of the turn)] of all steps that an episode has made."""
        file = self.folder / f"{key}"
        return [tuple(map(int, line.split())) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_an_episode_without_snapshots_stays_where_its_call_was_repeated(make, tmp_path):
    """Its effects happen twice: in the process that ended, and in the one that cleared it. Episode 2 shares a half with
    the one at fault.
    """
    traced = Traced(make(["traced"], workers=1), tmp_path, 4)
    traced.round([], [0, 1, 2, 3])
    traced.round([0, 1, 2], [], killer=3)
    traced.round([], [0, 1, 2])
    for key in (0, 1):
        assert sorted(number for _, number in traced.steps(key)) == [1, 1, 2, 2, 3]
    assert traced.changed == [1]  # its answers name the process
    assert traced.pool._episodes[1].answers[1]["messages"][0]["content"].split()[1] == str(traced.steps(1)[0][0])
    for key in (0, 1, 2):
        traced.pool.end(key)
    assert not any(worker.episodes or worker.suspects for worker in traced.pool._trials)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_episode_without_snapshots_leaves_a_process_only_when_it_has_ended(make, tmp_path, monkeypatch, seed):
    """Three calls end their processes, beside random ones. Every process has seen an episode's turns in order."""
    monkeypatch.setattr(module, "_MAX_TRIALS", 5)  # 10 calls are halved 4 times
    chance, pool = random.Random(seed), make(["traced"], workers=2)
    traced = Traced(pool, tmp_path, 10)
    traced.round([], traced.alive)
    for _ in range(3):
        killer, *others = chance.sample(traced.alive, len(traced.alive) - 1)
        middle = chance.randrange(len(others))
        traced.round(others[:middle], others[middle:], killer)
        traced.round([], traced.alive)
    ended = {int(path.stem) for path in tmp_path.glob("*.ended")}
    for key in range(10):
        by_process = {}
        for process, number in traced.steps(key):
            by_process.setdefault(process, []).append(number)
        assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in by_process.values())
        assert set([*by_process][:-1]) <= ended
        if key in traced.alive:
            assert (key in traced.changed) == (key % 2 == 1 and len(by_process) > 1)
    for key in traced.alive:
        pool.end(key)
    while len(pool._trials) > 5:
        pool.poll()
    assert not pool._groups and len(pool._processes) == 2 + len(pool._trials)


@pytest.mark.slow
def test_cleared_episodes_take_no_more_processes_than_the_limit(make, tmp_path, monkeypatch):
    """Each death pins further episodes to processes of their own, until the emptiest gives its own back."""
    monkeypatch.setattr(module, "_MAX_TRIALS", 4)  # 4 calls are halved twice
    pool, peak, start = make(["traced"], workers=2), [0], EnvironmentPool._start

    def counted(self):
        worker = start(self)
        peak[0] = max(peak[0], len(self._processes))
        return worker

    monkeypatch.setattr(EnvironmentPool, "_start", counted)
    traced = Traced(pool, tmp_path, 32)
    traced.round([], traced.alive)
    while len(in_workers := [key for key in traced.alive if pool._episodes[key].worker in pool._workers]) >= 4:
        killer, *held = in_workers[:4]
        traced.round(held, [key for key in traced.alive if key not in (killer, *held)], killer)
    assert peak[0] == 2 + 2 * 4
    for key in traced.alive:
        assert traced.steps(key)[-1][1] == traced.turn
        pool.end(key)


@pytest.mark.slow
def test_a_call_that_blocks_its_process_is_found(make, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.5)
    monkeypatch.setattr(module, "_SILENCE", 0.1)
    pool = make(["held"], workers=1, timeout=0.5)
    (tmp_path / "go").touch()
    begin(pool, "held", range(4))
    pool.step(3, Turn(f"block {tmp_path}"))
    for key in range(3):
        pool.step(key, Turn(f"held {tmp_path}"))
    found = answers(pool, 4)
    assert [key for key, answer in found.items() if answer.error] == [3]
    assert "took longer than 0.5 s (--environment-timeout)" in found[3].error


@pytest.mark.parametrize("threads", slow_except([4], [4, 256]))
def test_threads_that_do_not_end_cost_their_own_calls(make, tmp_path, threads):
    """They are replaced with their process: its other calls are repeated at once."""
    pool = make(["threads"], workers=1, timeout=2.0, sizes=Sizes(threads=threads))
    begin(pool, "threads", range(20))
    hang = min(threads, 8)
    for key in range(hang):
        pool.step(key, Turn(f"hang {tmp_path}"))
    first = pool._workers[0]
    for key in range(hang, 12):
        pool.step(key, Turn(f"quick {tmp_path}"))
    found = answers(pool, 12)
    assert {key for key, answer in found.items() if answer.error} == set(range(hang))
    assert pool._workers[0] is not first and not pool._trials and not pool._groups
    for key in range(12, 20):
        pool.step(key, Turn(f"new {tmp_path}"))
    assert not any(answer.error for answer in answers(pool, 8).values())


class Counted(dict):
    """A dictionary that counts walks over it."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()

    def items(self):
        self.walks += 1
        return super().items()

    def values(self):
        self.walks += 1
        return super().values()


def test_a_poll_walks_over_no_episodes(make, tmp_path):
    pool = make(["held"], workers=2)
    begin(pool, "held", range(32))
    for key in range(16):
        pool.step(key, Turn(f"held {tmp_path}"))
    pool._episodes = Counted(pool._episodes)
    for worker in pool._workers:
        worker.calls, worker.running = Counted(worker.calls), Counted(worker.running)
    for _ in range(10):
        pool.poll()
    Path(tmp_path / "go").touch()
    answers(pool, 16)
    assert pool._episodes.walks == 0
    assert not any(worker.calls.walks or worker.running.walks for worker in pool._workers)
