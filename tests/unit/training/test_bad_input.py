"""Bad input through the real entries: one clear message, a non-zero exit, no traceback, and nothing lost or written.

pretrain_grpo.py and the tools run in this process as ``__main__``, since a process of its own would cost each case ten
seconds; a stub stands in for vLLM. test_bad_input_ranks.py has torchrun, two ranks, vLLM. Cases: bad_input_cases.py.
"""

import errno
import json
import os
import re

import bad_input_cases as cases
import pytest
from bad_input_runs import OUR_FRAME, TRAIN, bench, files, finished, launch, model  # noqa: F401 (fixtures)
from full_disk import files_up_to

from megatron_grpo.patches import cpu_backend

cpu_backend.install()


TOOL_CASES = [make for _, make, _ in cases.TOOLS]


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
    # The traceback of the user's function stands above.
    assert len([line for line in lines if line.startswith('pretrain_grpo.py: error: reward "')]) == 1


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


def test_a_last_save_and_an_export_that_fail_are_both_said(bench, capfd):
    words = bench.good + bench.resume()
    before = files(bench.root / "run" / "iter_0000002")
    with files_up_to(60_000):
        code = launch(TRAIN, words)
    run, error = bench.root / "run", capfd.readouterr().err.strip()
    assert code == 1 and not OUR_FRAME.search(error), error
    assert re.fullmatch(
        rf"pretrain_grpo\.py: error: checkpoint {run}/iter_0000004.tmp cannot be written: .*; "
        rf"{run}/hf_model cannot be written: .*\. Make room, or correct the path\. "
        rf"The newest checkpoint is iteration 2: --load {run} resumes from it",
        error,
    ), error
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped" and status["error"].startswith(f"checkpoint {run}/iter_0000004.tmp cannot be")
    assert files(run / "iter_0000002") == before
    assert not [path.name for path in run.iterdir() if path.name.endswith((".partial", ".tmp"))]


def test_a_save_that_fails_ends_a_run_that_is_to_stop(bench, capfd):
    words = [*bench.good, *bench.resume("--train-iters", "8", "--save-interval", "2", "--on-save-error", "stop")]
    with files_up_to(60_000):
        code = launch(TRAIN, words)
    run, error = bench.root / "run", capfd.readouterr().err.strip()
    assert code == 1 and re.fullmatch(
        rf"pretrain_grpo\.py: error: checkpoint {run}/iter_0000004.tmp cannot be written: .*\. Make room, or correct "
        rf"the path\. The newest checkpoint is iteration 2: --load {run} resumes from it",
        error,
    ), error


def test_a_checkpoint_of_another_user(bench, monkeypatch, capfd):
    """The file system's answer is made up: root, who may run the tests, reads every file."""
    words, stat = bench.resume(), os.stat

    def denied(path, *args, **kwargs):
        if str(path).endswith("/latest_checkpointed_iteration.txt"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", denied)
    capfd.readouterr()
    assert launch(TRAIN, bench.good + words) == 1
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "latest_checkpointed_iteration.txt: permission denied: correct the mode" in lines[0]
