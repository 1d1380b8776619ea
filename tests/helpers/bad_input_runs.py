"""Runs of the real entry points in this process as ``__main__``, with a stub for vLLM; see test_bad_input.py."""

import contextlib
import functools
import gc
import hashlib
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from bad_input_bench import Bench

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.checkpointing import run_lock
from megatron_grpo.parallel import initialize
from megatron_grpo.rewards import registry
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.vllm import colocate as vllm_colocate
from megatron_grpo.training import command_line
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils import progress

REPO = Path(__file__).resolve().parents[2]
TRAIN = "pretrain_grpo.py"
# A traceback frame of this program in the output. Tracebacks of a user's reward function are allowed.
OUR_FRAME = re.compile(r'File ".*(/megatron_grpo/|pretrain_grpo\.py|/tools/)')


class StubEngine:
    """An inference engine that completes every prompt with the token 1 and the end of the sequence."""

    replica, num_replicas, is_lead, drafts = 0, 1, True, None

    def __init__(self, args, hf_config):
        self.queue, self.version = [], None

    @property
    def has_weights(self):
        return self.version is not None

    def submit(self, requests):
        self.queue += requests

    def poll(self):
        request = self.queue.pop()
        ids = [1, request.sampling.stop_token_ids[0]]
        return [Completion(request.id, ids, None, "stop", [self.version] * 2)]

    def rollout(self, seed):
        return contextlib.nullcontext()

    def update_weights(self, weights, version):
        self.version = version
        for _ in weights:
            pass

    def wake_weights(self):
        pass

    wake_cache = sleep = close = wake_weights


@functools.cache
def known_parser():
    """Return the parser that each start makes of flags.json."""
    return command_line.parser_from_table(json.loads(command_line.TABLE.read_text()))


@functools.cache
def load_builtin_rewards():
    """Before the patches of `launch`, which undo only plug-ins."""
    registry.get_rewards(list(registry._BUILTIN), vars(parse_args([])))


def launch(script, words, world_size=1):
    """Run a script of the repository as rank 0 of ``world_size``; return its exit code."""
    load_builtin_rewards()
    parser = known_parser()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *words])
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(os, "_exit", sys.exit)
        patch.setattr(gc, "freeze", lambda: None)  # the garbage of earlier runs of this process would stay
        patch.setattr(registry, "_registry", dict(registry._registry))
        patch.setattr(registry, "_loaded", set())
        patch.setattr(progress, "error", "")
        patch.setattr(command_line, "parser_from_table", lambda table: parser)
        patch.setattr(vllm_colocate, "VllmColocate", StubEngine)
        for name, value in {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "MASTER_PORT": 0}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))  # convert.py changes it
        try:
            runpy.run_path(str(REPO / script), run_name="__main__")
        except SystemExit as left:
            return left.code or 0
        finally:
            initialize.parallel_state.destroy_model_parallel()
            if initialize.dist.is_initialized():
                initialize.dist.destroy_process_group()
    return 0


def files(root):
    """Return {path: digest} of all files under a directory.

    Python's cache of plug-ins, the records of the start (args.json, environment.json), the state of the run and the
    lock of a rank 0 that torchrun has ended are left out.
    """
    files = (path for path in Path(root).rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    records = ("args.json", "environment.json", "status.json", run_lock.NAME)
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.name not in records}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Return the Hugging Face directory of a tiny random model with a shape that vLLM supports on a CPU."""
    directory = tmp_path_factory.mktemp("bad_input") / "model"
    sizes = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --kv-channels 32 --max-position-embeddings 512"
    words = f"--save {directory} --tokenizer bytes --steps 0 --threads 1 --quiet {sizes}".split()
    assert launch("tools/make_tiny_model.py", words) == 0
    return directory


@pytest.fixture(scope="session")
def finished(model):
    """Return the --save directory of a run with 2 updates."""
    (model.parent / "finished").mkdir()
    bench = Bench(model.parent / "finished", model)
    assert launch(TRAIN, bench.good) == 0
    return bench.save


@pytest.fixture
def bench(model, finished, tmp_path):
    return Bench(tmp_path, model, finished)
