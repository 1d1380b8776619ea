"""The completion of pretrain_grpo.py's flags in bash: words by the function, files by a terminal."""

import contextlib
import os
import pty
import subprocess

import pytest

from tools import shell_completion

CASES = [
    ("torchrun --nproc-per-node 2 pretrain_grpo.py --loss-t", "--loss-type"),
    ("torchrun --nproc-per-node 2 pretrain_grpo.py --loss_t", "--loss-type"),
    ("python /a/pretrain_grpo.py --loss-type g", "grpo gspo gmpo gkd"),
    ("python pretrain_grpo.py --train-data-path a.jsonl --max-prompt-l", "--max-prompt-length"),
    ("python pretrain_grpo.py --train-data-path a.jsonl tools/da", ""),  # a file, by the shell itself
    ("python pretrain_grpo.py --log-level warning --vllm-mode s", "server"),
    ("python pretrain_grpo.py --seed 4 --help-", "--help-all"),
    ("python tools/report.py --loss-t", ""),
    ("torchrun --nproc", ""),
]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    file = tmp_path_factory.mktemp("completion") / "completion.bash"
    file.write_text(shell_completion.script("bash"))
    return file


def test_words(script):
    calls = [
        f'COMP_WORDS=({line}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _pretrain_grpo; echo "${{COMPREPLY[*]}}"'
        for line, _ in CASES
    ]
    program = "\n".join([f"source {script}", *calls])
    run = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    assert run.stdout.splitlines() == [words for _, words in CASES]


def test_in_a_terminal(script):
    """Tabs complete a flag, a choice and a file; the function that stands for torchrun prints the words."""
    (script.parent / "prompts.jsonl").touch()
    lines = [
        f"source {script.name}",
        "torchrun() { printf '<%s>' \"$@\"; exit; }",
        "torchrun -x pretrain_grpo.py --loss-ty\tgs\t--train-data-path prom\t--no-shuffle-c\t--seed prom\t",
    ]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(script.parent)
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], os.environ | {"TERM": "dumb", "PS1": "$ "})
    output = b""
    os.write(terminal, "\n".join([*lines, ""]).encode())
    with contextlib.suppress(OSError):  # the terminal's end
        while part := os.read(terminal, 4096):
            output += part
    os.close(terminal)
    os.waitpid(process, 0)
    words = "<-x><pretrain_grpo.py><--loss-type><gspo><--train-data-path><prompts.jsonl><--no-shuffle-completions>"
    assert f"{words}<--seed><prom>" in output.decode()


def test_of_zsh_is_that_of_bash():
    assert shell_completion.script("zsh").endswith(shell_completion.script("bash"))
