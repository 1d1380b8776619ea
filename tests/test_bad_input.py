"""Bad input through the real entries: one clear message, a non-zero exit, no traceback, and nothing lost or written.

pretrain_grpo.py and the tools run in this process as ``__main__``, since a process of its own would cost each case ten
seconds; a stub stands in for vLLM. The last tests are real: torchrun, two ranks, vLLM. Cases: bad_input_cases.py.
"""

import contextlib
import hashlib
import os
import re
import runpy
import sys
from pathlib import Path

import bad_input_cases as cases
import pytest
from bad_input_bench import Bench

from megatron_grpo.utils import cpu_backend

cpu_backend.install()

from megatron_grpo.parallel import initialize
from megatron_grpo.rewards import registry
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.vllm import colocate as vllm_colocate
from megatron_grpo.training.arguments import parse_args

REPO = Path(__file__).resolve().parents[1]
TRAIN = "pretrain_grpo.py"
# A frame of this program in what was printed; a reward function's own traceback is for its author to see.
OUR_FRAME = re.compile(r'File ".*(/megatron_grpo/|pretrain_grpo\.py|/tools/)')
TOOL_CASES = [make for _, make, _ in cases.TOOLS]


class StubEngine:
    """Completes every prompt with the token 1 and the end of the sequence."""

    replica, num_replicas, is_lead = 0, 1, True

    def __init__(self, args, hf_config, eos_id):
        self.eos_id, self.queue, self.version = eos_id, [], None

    @property
    def has_weights(self):
        return self.version is not None

    def submit(self, requests):
        self.queue += requests

    def poll(self):
        request = self.queue.pop()
        return [Completion(request.id, [1, self.eos_id], None, "stop", self.version)]

    def rollout(self, seed):
        return contextlib.nullcontext()

    def update_weights(self, weights, version):
        self.version = version
        for _ in weights:
            pass

    def wake_weights(self):
        pass

    wake_cache = sleep = close = wake_weights


def launch(script, words, world_size=1):
    """Run a script of the repository as rank 0 of ``world_size``; returns its exit code."""
    registry.get_rewards(list(registry._BUILTIN), vars(parse_args([])))  # what a plugin adds to these is taken back
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
    """Every file under a directory with a digest of its content; Python's own cache of a plugin aside, and what a start
    records of itself.
    """
    files = (path for path in Path(root).rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    records = ("args.json", "environment.json")
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.name not in records}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A Hugging Face directory of a tiny random model, of a shape that vLLM runs on a CPU."""
    directory = tmp_path_factory.mktemp("bad_input") / "model"
    sizes = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --kv-channels 32 --max-position-embeddings 512"
    words = f"--save {directory} --tokenizer bytes --steps 0 --threads 1 --quiet {sizes}".split()
    assert launch("tools/make_tiny_model.py", words) == 0
    return directory


@pytest.fixture(scope="session")
def finished(model):
    """The --save directory of a run of two updates."""
    (model.parent / "finished").mkdir()
    bench = Bench(model.parent / "finished", model)
    assert launch(TRAIN, bench.good) == 0
    return bench.save


@pytest.fixture
def bench(model, finished, tmp_path):
    return Bench(tmp_path, model, finished)


def check(bench, make, message, capfd):
    """Run a case and see that it ends as it should; returns what it printed on stderr, as lines."""
    words = make(bench)
    script, words = (TRAIN, bench.good + words) if make not in TOOL_CASES else (words[0], words[1:])
    before = files(bench.root)
    capfd.readouterr()
    code = launch(script, words, bench.world_size)
    error = capfd.readouterr().err.strip()
    assert code in (1, 2), error
    assert not OUR_FRAME.search(error), error
    lines = error.splitlines()
    assert len([line for line in lines if re.search(message, line)]) == 1, error
    assert files(bench.root) == before
    return lines


def table(*groups):
    rows = [(f"{group}: {name}", make, message) for group in groups for name, make, message in getattr(cases, group)]
    return pytest.mark.parametrize(("make", "message"), [pytest.param(*rest, id=name) for name, *rest in rows])


@table("FLAGS", "BATCHES", "DATA", "TOKENIZERS", "REWARDS", "HUGGING_FACE", "CHECKPOINTS")
def test_a_run_does_not_start(bench, make, message, capfd):
    lines = check(bench, make, message, capfd)
    assert len(lines) == 1 and lines[0].startswith("pretrain_grpo.py: error: ")


@table("FAILING_REWARDS")
def test_a_reward_ends_a_run(bench, make, message, capfd):
    """What was there of the run before stays as it was, to be gone on with."""
    lines = check(bench, make, message, capfd)
    assert lines[0].startswith('pretrain_grpo.py: error: reward "')


@table("TOOLS")
def test_tools(bench, make, message, capfd):
    check(bench, make, message, capfd)


def test_there_are_enough_cases():
    assert (
        sum(len(getattr(cases, name)) for name in dir(cases) if name.isupper() and name not in ("GOOD", "ROWS")) >= 35
    )


def test_a_long_prompt_is_cut_and_that_is_said(bench, capfd):
    rows = ['{"prompt": "1+1=", "answer": "2"}'] * 7 + ['{"prompt": "1111+1111=", "answer": "2222"}']
    assert launch(TRAIN, [*bench.good, *bench.data(*rows), "--truncation-strategy", "left"]) == 0
    assert "cut 1 of 8 prompts on the left to --max-prompt-length 8" in capfd.readouterr().out


def test_a_reward_that_fails_now_and_then_costs_those_completions_only(bench, capfd):
    body = "return 1 / (sample.row['answer'] != '2')"
    words = bench.plugin(f"@register_reward('mine')\ndef mine(sample):\n    {body}\n")
    assert launch(TRAIN, bench.good + words + ["--train-iters", "4"]) == 0
    assert "ZeroDivisionError" in capfd.readouterr().out


def output_of_two_ranks(torchrun, bench, *words):
    """What a run prints that fails; torchrun's own report at the end has a traceback, but no frame of ours."""
    before = files(bench.root)
    result = torchrun(2, TRAIN, *bench.good, *words, check=False)
    assert result.returncode != 0
    assert files(bench.root) == before
    assert not OUR_FRAME.search(result.stdout), result.stdout
    assert result.stdout.count("error: ") == 1, result.stdout
    return result.stdout


@pytest.mark.distributed
def test_two_ranks_say_it_once(torchrun, bench):
    output = output_of_two_ranks(torchrun, bench, *bench.data('{"prompt": 1}'))
    assert "pretrain_grpo.py: error: " in output and "bad.jsonl:1:" in output


@pytest.mark.vllm
def test_a_reward_that_fails_on_every_rank(torchrun, bench):
    output = output_of_two_ranks(torchrun, bench, *cases.failing("return '1'")(bench))
    assert 'pretrain_grpo.py: error: reward "mine" failed on all 8 samples' in output


@pytest.mark.vllm
def test_a_reward_that_fails_on_one_rank(torchrun, bench):
    """The other rank fails because that one has left; only the cause is printed."""
    body = "import os; return 1.0 if os.environ['RANK'] == '0' else '1'"
    output = output_of_two_ranks(torchrun, bench, *cases.failing(body)(bench))
    assert 'pretrain_grpo.py: [rank 1] error: reward "mine" failed on all 8 samples' in output
