"""The trainer's commands on the pages pass a dry run, with a small model and the flags that a page leaves out."""

import re
import shlex
from pathlib import Path

import pytest
from bad_input_runs import launch
from test_commands import OMITTED, PAGES, PLACEHOLDER, REPO, blocks

TRAINER = re.compile(r"\s*(?:[A-Z_]+=\S+ )*torchrun (.*?)pretrain_grpo\.py (.*)")
# Given to a command that lacks them.
REST = {
    "--transformer-impl": "local",
    "--reward-funcs": "exact_match",
    "--global-batch-size": "64",
    "--num-generations": "8",
    "--max-prompt-length": "16",
    "--max-completion-length": "16",
    "--train-iters": "8",
    "--lr": "1e-5",
    "--micro-batch-size": "8",
}
# Not run here: a model with images, a name that stands for any, a reward model whose files another block has.
ELSEWHERE = {"--max-image-pixels", "NAME", "--reward-model"}


def commands(page: str) -> list[tuple[int, list[str]]]:
    """(world size, flags) of each command of a page that starts the trainer with torchrun."""
    found = []
    for block in blocks((REPO / page).read_text()):
        for line in re.sub(r"\\\n *|\b2>&1", "", block).splitlines():
            match = TRAINER.match(line)
            if match and not re.search(r"[<>|]", match[2]):
                size = re.search(r"--nproc-per-node (\d+)", match[1])
                words = [word for word in shlex.split(match[2], comments=True) if not OMITTED.fullmatch(word)]
                found.append((int(size[1]) if size else 1, words))
    return [(size, words) for size, words in found if words and not ELSEWHERE & set(words)]


COMMANDS = [(page, size, words) for page in PAGES if "performance" not in page for size, words in commands(page)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --kv-channels 32 --max-position-embeddings 512"
    words = f"--save {folder} --tokenizer bytes --steps 0 --threads 1 --quiet {sizes}".split()
    assert launch("tools/make_tiny_model.py", words) == 0
    return folder


@pytest.mark.parametrize(
    ("page", "size", "words"), COMMANDS, ids=[f"{page}-{i}" for i, (page, *_) in enumerate(COMMANDS)]
)
def test_a_command_passes_a_dry_run(page, size, words, model, capsys):
    """Words in capitals stand for a value: a folder is the model's."""
    given = [str(model) if PLACEHOLDER.fullmatch(word) else word for word in words]
    given += [word for flag, value in REST.items() if flag not in words for word in (flag, value)]
    given += ["--load-hf", str(model)] if "--load-hf" not in words else []
    given += ["--train-data-path", "train.jsonl"] if "--train-data-path" not in words else []
    assert launch("pretrain_grpo.py", [*given, "--dry-run"], size) == 0, capsys.readouterr().err


def test_the_commands_are_found():
    assert len(COMMANDS) >= 10 and {"docs/asynchronous.md", "docs/lora.md"} <= {page for page, *_ in COMMANDS}


def test_a_command_that_no_run_takes_is_found(model, capsys):
    """Servers on other hosts read weights from a directory, which such a command must name."""
    words = "--vllm-mode server --vllm-server-base-url http://a:8000 --weight-sync-method checkpoint".split()
    with pytest.raises(AssertionError, match="--weight-sync-dir is missing"):
        test_a_command_passes_a_dry_run("a page", 1, words, model, capsys)
