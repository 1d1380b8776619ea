"""The check of flags before the imports: its table is the parser's, and it imports nothing large."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import REPO

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import megatron.core

from megatron_grpo.training.arguments import FLAGS, build_parser, flag_kinds
from megatron_grpo.training.command_line import COMMON, TABLE, check_flags, parser_from_table, table_of


@pytest.mark.skipif(
    f"megatron-core=={megatron.core.__version__}\n" not in (REPO / "requirements.txt").read_text(),
    reason="flags.json has the flags of the pinned megatron-core",
)
def test_table_is_up_to_date():
    path = REPO / "tools" / "generate_arguments_doc.py"
    spec = importlib.util.spec_from_file_location("generate_arguments_doc", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert TABLE.read_text() == tool.flag_table(), f"run python {path.relative_to(REPO)}"


def test_parser_from_the_table_is_the_parser():
    parser = build_parser()
    table = json.loads(json.dumps(table_of(parser, flag_kinds(), "0")))
    again = parser_from_table(table)
    assert again.format_help() == parser.format_help()
    assert json.loads(json.dumps(table_of(again, flag_kinds(), "0"))) == table
    words = (
        "--lr 1e-6 --reward-funcs a b --moe-layer-freq [1]*4 --window-size 8,0 --use-flash-attn --no-bias-swiglu-fusion"
    )
    found, expected = (vars(p.parse_args(words.split())) for p in (again, parser))
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    "words, code, message",
    [
        ("--xyzzy", 2, "unknown flag --xyzzy; --help-all lists all flags"),
        ("--is_hybrid_model", 2, "--is-hybrid-model is not a flag of this program: this program's Mamba-2 layer has"),
        ("--lr fast", 2, "argument --lr: invalid float value: 'fast'"),
        ("--loss-type ppo", 2, "argument --loss-type: invalid choice: 'ppo'"),
        ("--adam-beta1 2", 1, "--adam-beta1 (2.0) must lie between 0 and 1"),
        ("--num-generations 0", 1, "--num-generations (0) must be greater than 0"),
        ("--reward-weights 1 nan", 1, "--reward-weights is nan: give a finite number"),
        ("--save " + "x" * 300, 1, "a path of 300 characters"),
    ],
)
def test_mistakes(words, code, message, capsys):
    with pytest.raises(SystemExit) as end:
        check_flags(words.split())
    error = capsys.readouterr().err
    assert end.value.code == code and message in error and error.count("\n") == 1


@pytest.mark.parametrize("words", ["--xyzzy --external-plugins my.py", "--external_plugins=my.py --loss-type mine"])
def test_plug_ins_may_add_flags(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        check_flags(words.split())
    assert capsys.readouterr().err == "pretrain_grpo.py: error: --external-plugins my.py: no such file\n"
    (tmp_path / "my.py").write_text("import sys\ndef mine(sample:\n")
    with pytest.raises(SystemExit):
        check_flags(words.split())
    error = capsys.readouterr().err
    assert re.search(r"--external-plugins my\.py: line 2: SyntaxError: .*: def mine\(sample:\n$", error)
    (tmp_path / "my.py").write_text("raise ValueError('the file is not run yet')")
    check_flags(words.split())
    assert capsys.readouterr().out == "importing torch and megatron-core\n"


RUN = "--lr 1e-6 --train-iters 8 --reward-funcs exact_match --train-data-path prompts.jsonl --micro-batch-size 8"


@pytest.mark.parametrize(
    "changes, message",
    [
        ("--lr 1e-6", "--train-data-path is missing: name the files of training prompts"),
        (f"{RUN} --global-batch-size 20", "global_batch_size (20) must be divisible by micro_batch_size (8)"),
        (f"{RUN} --num-iterations 3", "--train-iters (8) must be divisible by the updates per rollout (3 = "),
        (f"{RUN} --load run --reward-funcs exact_macth", '"exact_macth" (did you mean "exact_match"?)'),
        (RUN, "--num-layers is missing: give it, --load-hf, or a checkpoint with --use-checkpoint-args"),
        (f"{RUN} --load-hf gone", "there is no gone. A run downloads nothing: hf download OWNER/NAME --local-dir gone"),
        (f"{RUN} --load run --train-data-path gone.jsonl", "--train-data-path gone.jsonl: no such file"),
        (f"{RUN} --load run --train-data-path 0.5 prompts.jsonl 0.5 gone", "--train-data-path gone: no such file"),
        (f"{RUN} --save-interval 2", "--save-interval needs --save"),
        (f"{RUN} --min-lr 1", "--min-lr (1.0) must lie between 0 and --lr (1e-06)"),
    ],
)
def test_flags_together_are_checked_as_early(changes, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").touch()
    with pytest.raises(SystemExit) as end:
        check_flags(changes.split())
    error = capsys.readouterr().err
    assert end.value.code == 1 and message in error and error.count("\n") == 1


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch, capsys):
    """The tests may run as root, to whom every folder is open."""

    def refuse(path, exists=Path.exists, **_):
        if path.parent.name == "shut":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(SystemExit) as end:
        check_flags(f"{RUN} --load run --train-data-path {tmp_path}/shut/a.jsonl".split())
    error = capsys.readouterr().err
    assert end.value.code == 1 and f"{tmp_path}/shut/a.jsonl: permission denied" in error and error.count("\n") == 1


def shown(words, capsys):
    """The flags that this help shows, and its text."""
    with pytest.raises(SystemExit) as end:
        check_flags(words.split())
    output = capsys.readouterr()
    assert end.value.code == 0 and output.err == ""
    return re.findall(r"^  (--[\w-]+)", output.out, re.MULTILINE), output.out


def test_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    common, text = shown("--help", capsys)
    assert sorted(common) == sorted(COMMON) and len(common) == 40
    assert "--help-all" in text and "advantages and KL; reference and teacher;" in " ".join(text.split())
    everything, _ = shown("--help-all", capsys)
    assert len(everything) > 350 and len(set(everything)) == len(everything)
    rates, text = shown("--help learning_rate", capsys)
    assert rates == [name for name, *_ in FLAGS["learning rate"]] and "\nlearning rate:\n" in text
    assert (
        shown("-h cov-", capsys)[0]
        == "--clip-cov-ratio --clip-cov-lb --clip-cov-ub --kl-cov-ratio --kl-cov-coef".split()
    )
    monkeypatch.setenv("RANK", "1")
    assert shown("--help-all --lr 1", capsys)[1] == ""


def test_help_on_nothing(capsys):
    with pytest.raises(SystemExit) as end:
        check_flags(["--help", "xyzzy"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "pretrain_grpo.py: error: --help xyzzy: no group and no flag has this text; --help shows the groups\n"
    )


def test_another_megatron_core_has_other_flags(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0")
    check_flags(["--xyzzy"])


def test_an_environment_without_megatron_core(monkeypatch, capsys):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(SystemExit):
        check_flags([])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"megatron-core is not installed for {sys.executable}: activate the environment" in line


def test_another_python_than_that_of_the_environment_is_named():
    """-S: an interpreter without the installed packages, as one whose environment is not activated."""
    words = [sys.executable, "-S", str(REPO / "pretrain_grpo.py"), "--lr", "1e-6"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LOCAL_RANK", "RANK")
    }
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    (line,) = done.stderr.splitlines()
    assert (
        done.returncode == 1
        and done.stdout == ""
        and line.startswith("pretrain_grpo.py: error: jinja2, megatron-core, ")
    )
    assert f"are not installed for {sys.executable}: activate the environment" in line and ".venv/bin/activate" in line


def test_a_run_may_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").touch()
    check_flags([*RUN.split(), "--pretrained-checkpoint", "checkpoint", "--use-checkpoint-args"])
    shape = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --max-position-embeddings 99"
    check_flags(f"--dry-run --micro-batch-size 8 --model-family qwen3 {shape}".split())  # sizes alone
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words, code", [("--xyzzy", 2), (f"{RUN} --load-hf gone", 1), ("--help", 0)])
def test_nothing_large_is_imported(words, code):
    command = [sys.executable, "-X", "importtime", "pretrain_grpo.py", *words.split()]
    result = subprocess.run(
        command, cwd=REPO, env=os.environ | {"RANK": "0"}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == code
    imported = set(re.findall(r"^import time:.*\| +(\w+)", result.stderr, re.MULTILINE))
    assert "megatron_grpo" in imported and not imported & {"torch", "numpy", "megatron", "transformers", "vllm"}
