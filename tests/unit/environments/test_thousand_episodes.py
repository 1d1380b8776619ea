"""1,000 episodes with tools that fail, hang, answer late, answer megabytes or invalid UTF-8, or end their process."""

from collections import Counter
from types import SimpleNamespace

import psutil
import pytest

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.rewards.registry import load_plugins
from megatron_grpo.rollout.engine import Completion, Request, generate
from megatron_grpo.rollout.episodes import Episodes

PLUGIN = r"""
import asyncio, os, time
from pathlib import Path
from megatron_grpo.environments.registry import Environment, Reply, register_environment

@register_environment("wild")
class Wild(Environment):
    def reset(self, row):
        self.kind, self.mark = row["kind"], Path(row["mark"])

    async def step(self, turn):
        if turn.number == 3:
            return Reply(reward=1.0, done=True)
        first, text = not self.mark.exists(), "fine"
        if turn.number == 2:
            self.mark.touch()
            match self.kind:
                case "fails" | "fails once" if self.kind == "fails" or first:
                    raise OSError("no connection")
                case "hangs" | "hangs once" if self.kind == "hangs" or first:
                    await asyncio.sleep(10_000)
                case "hangs in a thread":
                    await asyncio.to_thread(time.sleep, 10_000)
                case "dies once" if first:
                    os._exit(1)
                case "late":
                    await asyncio.sleep(1)
                case "megabytes":
                    text = "x" * 3_000_000
                case "invalid":
                    text = b"\xff\xfe fine".decode("utf-8", "surrogateescape")
        return Reply([{"role": "user", "content": text}], reward=0.5)
"""
KINDS = {"fine": 500, "fails": 80, "fails once": 100, "hangs": 40, "hangs once": 40, "hangs in a thread": 10}
KINDS |= {"dies once": 10, "late": 100, "megabytes": 20, "invalid": 100}
FAIL = {"fails", "hangs", "hangs in a thread"}


class Talker:
    """An engine that says one token a turn, for 64 requests a step."""

    def __init__(self):
        self.running = []

    def submit(self, requests):
        self.running += requests

    def poll(self):
        batch, self.running = self.running[:64], self.running[64:]
        return [Completion(r.id, [5, 9], [-1.0] * 2, "stop", [3] * 2).after(r.begun) for r in batch]


@pytest.mark.slow
def test_none_is_lost_and_none_is_scored_by_mistake(tmp_path):
    (tmp_path / "wild.py").write_text(PLUGIN)
    load_plugins([tmp_path / "wild.py"])
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    assert len(kinds) == 1000
    order = sorted(range(1000), key=lambda i: i * 617 % 1000)  # mixed
    before = set(psutil.Process().children(recursive=True))  # what other tests of this process have started
    pool = EnvironmentPool(["wild"], [tmp_path / "wild.py"], workers=4, timeout=10.0, retries=1)
    args = SimpleNamespace(
        environment="wild", prompt_key="prompt", system_prompt=None, end_token_ids=(9,), max_turns=5,
        max_prompt_length=None, max_environment_tokens=100, on_rewritten_history="keep",
        chat_template_kwargs=None, tool_role="tool",
    )  # fmt: skip
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens=True: " ".join(map(str, ids)))
    said = lambda before, turn, new, *_: list(new[0]["content"][:200].encode())  # noqa: E731
    episodes = Episodes(Talker(), pool, SimpleNamespace(after_turn=said), None, tokenizer, args)
    requests = [
        Request(
            i,
            [1, 2],
            Sampling(20, log_probs=True),
            row={"prompt": "p", "kind": kinds[i], "mark": str(tmp_path / str(i))},
        )
        for i in order
    ]
    done = list(generate(episodes, requests))
    workers = set(psutil.Process().children(recursive=True)) - before
    pool.close()
    assert sorted(completion.id for completion in done) == list(range(1000))
    ends = Counter((kinds[c.id], c.finish_reason, c.environment_reward) for c in done)
    expected = {(kind, "stop", 2.0): count for kind, count in KINDS.items()}
    expected |= {("megabytes", "length", 1.0): KINDS["megabytes"]}  # too long for --max-environment-tokens
    del expected["megabytes", "stop", 2.0]
    for kind in FAIL:
        del expected[kind, "stop", 2.0]
        expected[kind, "failed", 0.5] = KINDS[kind]
    assert ends == expected
    assert workers and not psutil.wait_procs(workers, timeout=30)[1]
    reasons = "\n".join(episodes.failures())
    assert "failed in 80 episodes: raised OSError: no connection" in reasons
    assert "took longer than 10 s (--environment-timeout)" in reasons
