"""Bad input through the real entries: one clear message, a non-zero exit, no traceback, and nothing lost or written.

pretrain_grpo.py and the tools run in this process as ``__main__``, since a process of its own costs ten seconds a case.
A stub stands in for vLLM where a case gets as far as a rollout; the last tests are real torchruns with the real engine.
"""

import contextlib
import hashlib
import os
import runpy
import sys
from pathlib import Path

import bad_input_cases as cases
import pytest

from megatron_grpo import initialize
from megatron_grpo.rewards import registry
from megatron_grpo.rollout import vllm_colocate
from megatron_grpo.rollout.engine import Completion

REPO = Path(__file__).resolve().parents[1]


class StubEngine:
    """Completes every prompt with the token 1 and the end of the sequence."""

    replica, num_replicas, is_lead = 0, 1, True

    def __init__(self, args, hf_config, eos_id):
        self.eos_id, self.queue = eos_id, []

    def submit(self, requests):
        self.queue += requests

    def poll(self):
        request = self.queue.pop()
        return [Completion(request.id, [1, self.eos_id], None, "stop", 0)]

    def rollout(self, seed):
        return contextlib.nullcontext()

    def update_weights(self, weights, version):
        for _ in weights:
            pass


def launch(script, words, world_size=1):
    """Run a script of the repository as ``__main__`` in this process; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *words])
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(os, "_exit", sys.exit)
        patch.setattr(registry, "_registry", dict(registry._registry))
        patch.setattr(registry, "_loaded", set())
        patch.setattr(vllm_colocate, "VllmColocate", StubEngine)
        for name, value in {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "MASTER_PORT": 0}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        try:
            runpy.run_path(str(REPO / script), run_name="__main__")
        except SystemExit as left:
            return left.code
        finally:
            leave_process_groups()
    return 0


def leave_process_groups():
    initialize.parallel_state.destroy_model_parallel()
    if initialize.dist.is_initialized():
        initialize.dist.destroy_process_group()


def files(root):
    """Every file under a directory with a digest of its content."""
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(root).rglob("*") if path.is_file()}


def everything(table):
    return pytest.mark.parametrize(("make", "message"), [pytest.param(*rest, id=name) for name, *rest in table])


@pytest.fixture(scope="session")
def finished_run(tiny_models, tmp_path_factory):
    """The --save directory of a run of two updates."""
    bench = cases.Bench(tmp_path_factory.mktemp("finished"), Path(tiny_models["qwen3"]), Path())
    assert launch("pretrain_grpo.py", bench.good) == 0
    return bench.save


@everything(cases.FAILING_REWARDS + cases.CHECKPOINTS)
def test_explore(make, message, tiny_models, tmp_path, finished_run, capfd):
    bench = cases.Bench(tmp_path, Path(tiny_models["qwen3"]), finished_run)
    words = make(bench)
    before = files(tmp_path)
    capfd.readouterr()
    code = launch("pretrain_grpo.py", bench.good + words, bench.world_size)
    out, err = capfd.readouterr()
    import re
    with open("/tmp/G/log", "a") as log:
        ok = re.search(message, err) is not None and "Traceback" not in err and code
        after = files(tmp_path)
        log.write(f"{'ok ' if ok else 'BAD'} {code} {[str(p.relative_to(tmp_path)) for p in sorted(before.keys()|after.keys()) if before.get(p)!=after.get(p)]} {err.strip()} ------ {'' if code else out[-300:]}\n")


@everything(cases.TOOLS)
def test_explore_tools(make, message, tiny_models, tmp_path, finished_run, capfd):
    bench = cases.Bench(tmp_path, Path(tiny_models["qwen3"]), finished_run)
    script, *words = make(bench)
    before = files(tmp_path)
    capfd.readouterr()
    try:
        code = launch(script, words, 1)
    except Exception as error:
        import traceback; traceback.print_exc()
        code = 99
    out, err = capfd.readouterr()
    import re
    with open("/tmp/G/log", "a") as log:
        ok = re.search(message, err) is not None and "Traceback" not in err and code
        after = files(tmp_path)
        log.write(f"{'ok ' if ok else 'BAD'} {code} {[str(p.relative_to(tmp_path)) for p in sorted(before.keys()|after.keys()) if before.get(p)!=after.get(p)]} {err.strip()} ------ {out[-300:]}\n")
