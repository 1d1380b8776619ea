"""Commands of a page fit together: each file that one reads is in the repository, or an earlier one wrote it."""

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator

import pytest
import yaml
from test_commands import REPO, blocks

# Pages whose commands are typed one after the other. The others have names that stand for any file.
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in "quickstart one_gpu qwen3_8b gpus clusters asynchronous fp8".split()),
]
WRITES = {"--output", "--local-dir", "--save", "-o", "SAVE", "WORK", "-a", "venv"}
READS = {
    "--input",
    "--load",
    "--load-hf",
    "--tokenizer-model",
    "--train-data-path",
    "--hf",
    "--data",
    "--logdir",
    "serve",
}
READS |= {"HF_MODEL", "TRAIN_DATA", "VALID_DATA", "GSM8K", "source", "-r"}


def words(line: str) -> list[str]:
    """The words of a command, with a variable's name and its value apart, as a flag and its value are."""
    try:
        found = shlex.split(line, comments=True)
    except ValueError:  # a sentence with an apostrophe, or one line of a quoted text
        return []
    found = [part for word in found for part in (word.split("=", 1) if re.match(r"[A-Z_0-9]+=", word) else [word])]
    if any(word.endswith("tools/report.py") for word in found):  # its folders have no flag
        start = next(i for i, word in enumerate(found) if word.endswith("tools/report.py")) + 1
        end = next(i for i, word in enumerate(found) if word in ("-o", "--serve"))
        found = [*(part for folder in found[start:end] for part in ("--load", folder)), *found[end:]]
    return found


def files_of(line: str) -> tuple[list[str], list[str]]:
    """(read, written) relative paths of a command. Without SAVE a launch script writes to runs/ and its name."""
    found = words(line)
    pairs = list(itertools.pairwise(found))
    read = [value for name, value in pairs if name in READS]
    written = [value for name, value in pairs if name in WRITES]
    scripts = re.findall(r"\bexamples/grpo/([\w.]+)\.sh", line)
    if scripts and "DRY_RUN" not in found and not {"SAVE", "WORK"} & set(found):
        written += [f"runs/{name}{'_lora' if 'LORA' in found else ''}" for name in scripts]
    if "quickstart" in scripts:  # makes its environment
        written.append(".venv")
    read += re.findall(r"(?<=\s)runs/\S+\.jsonl", line)
    return [path for path in read if re.match(r"[a-z.]", path)], written


def commands(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """What each command of a page reads and writes."""
    for block in blocks(page):
        for line in re.sub(r"\\\n *", "", block).splitlines():
            yield from map(files_of, re.split(r" && |(?<=[^\\])\|", line))


def unwritten(page: str, earlier: Iterable[str] = ()) -> list[str]:
    """The relative paths that commands of a page read before one has written them."""
    written, missing = list(earlier), []
    for read, wrote in commands(page):
        for path in read:
            if not (REPO / path).exists() and not any(f"{path}/".startswith(f"{one}/") for one in written):
                missing.append(path)
        written += wrote
    return missing


@pytest.mark.parametrize("name", PAGES)
def test_what_a_command_reads_an_earlier_one_wrote(name):
    """A page may read what the tutorials wrote to which it links."""
    text = (REPO / name).read_text()
    linked = [REPO / f"docs/{page}.md" for page in ("one_gpu", "qwen3_8b", "quickstart") if f"]({page}.md" in text]
    earlier = [path for page in linked for _, written in commands(page.read_text()) for path in written]
    assert unwritten(text, earlier) == []


@pytest.mark.parametrize(
    ("page", "missing"),
    [
        ("    hf download a/b --local-dir models/b\n    HF_MODEL=models/b bash examples/grpo/qwen3_8b.sh\n", []),
        (
            "    hf download a/b --local-dir models/b\n    HF_MODEL=models/c bash examples/grpo/qwen3_8b.sh\n",
            ["models/c"],
        ),
        ("    HF_MODEL=models/b bash x.sh\n    hf download a/b --local-dir models/b\n", ["models/b"]),
        ("    python tools/data/gsm8k.py --input g/a --output data/train.parquet\n", ["g/a"]),
        ("    bash examples/grpo/qwen3_8b.sh\n    python tools/report.py runs/qwen3_8b -o r.html\n", []),
        (
            "    DRY_RUN=1 bash examples/grpo/qwen3_8b.sh\n    vllm serve runs/qwen3_8b/hf_model\n",
            ["runs/qwen3_8b/hf_model"],
        ),
        (
            "    SAVE=runs/a bash x.sh 2>&1 | tee -a a.log\n    grep eval runs/a/m.jsonl | grep x runs/b/m.jsonl\n",
            ["runs/b/m.jsonl"],
        ),
    ],
)
def test_a_file_that_nothing_wrote_is_found(page, missing):
    assert unwritten(page) == missing


def test_the_volume_of_kubernetes_is_filled_with_what_the_run_reads():
    (job,) = yaml.safe_load_all((REPO / "examples/kubernetes/data.yaml").read_text())
    (jobset,) = yaml.safe_load_all((REPO / "examples/kubernetes/train.yaml").read_text())
    (filling,) = job["spec"]["template"]["spec"]["containers"]
    (training,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    script = filling["command"][-1].replace("$split", "train") + filling["command"][-1].replace("$split", "test")
    written = [path for line in script.splitlines() for path in files_of(line.strip())[1]]
    read = {one["name"]: one["value"] for one in training["env"] if one["name"] in READS}
    assert set(read) == {"HF_MODEL", "TRAIN_DATA", "VALID_DATA"} and set(read.values()) <= set(written)
    servers = next(yaml.safe_load_all((REPO / "examples/kubernetes/servers.yaml").read_text()))
    arguments = servers["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--model={read['HF_MODEL']}" in arguments
    for manifest in (job["spec"]["template"], jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]):
        (mount,) = [one for one in manifest["spec"]["containers"][0]["volumeMounts"] if one["name"] == "data"]
        assert mount["mountPath"] == "/data"
