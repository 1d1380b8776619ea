"""Environments of verifiers (PyPI, 0.4) as agent programs: verifiers runs an episode, whose model is the base URL.

This file runs under the interpreter that has verifiers, and imports nothing of ours. As a program it writes the tasks
of an environment as data rows: the column "task" is what verifiers needs again.

    PYTHON megatron_grpo/environments/libraries/of_verifiers.py NAME --count 1000 --save train.jsonl

NAME is the id of a taskset, or a .json file with the environment's configuration, as verifiers' [env] block has it.
"""

import argparse
import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

KEY = "MEGATRON_GRPO_AGENT_KEY"  # environment variable: verifiers reads keys from there


def configuration(name: str) -> vf.EnvConfig:
    """Return the configuration of a taskset id or a .json file."""
    return vf.resolve_env_config(
        json.loads(Path(name).read_text()) if name.endswith(".json") else {"taskset": {"id": name}}
    )


@contextlib.asynccontextmanager
async def served(name: str) -> AsyncIterator[Callable[..., Any]]:
    """Context with the agent program of an environment, whose tool servers run meanwhile."""
    config = configuration(name)
    env = vf.load_environment(config)
    task_type = type(env.taskset).task_type()

    async def run(base_url: str, row: dict[str, Any], api_key: str, model: str) -> dict[str, float]:
        os.environ[KEY] = api_key
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
        task = task_type(task_type.data_type().model_validate(row["task"]), config.taskset.task)
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig()))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "not ok")
        return {
            f"{place}_{trace.agent.name}": trace.reward
            for place, trace in enumerate(episode.traces)
            if trace.agent.trainable
        }

    async with env.serving():
        yield run


def rows(name: str, count: int) -> list[dict[str, Any]]:
    """Return ``count`` tasks of an environment as data rows."""
    found = []
    for task in itertools.islice(iter(vf.load_environment(configuration(name)).taskset), count):
        data = task.data.model_dump(mode="json")
        messages = [{"role": "system", "content": data["system_prompt"]}] if data["system_prompt"] else []
        prompt = data["prompt"] or ""
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        found.append({"messages": messages, "task": data})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="taskset id, or .json file of an environment's configuration")
    parser.add_argument("--count", type=int, default=1000, help="number of tasks [1000]")
    parser.add_argument("--save", type=Path, required=True, help="file of the rows")
    given = parser.parse_args()
    given.save.write_text("".join(json.dumps(row) + "\n" for row in rows(given.name, given.count)))
