"""JSON files of models and checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

from megatron_grpo.utils.errors import GrpoError


def read_json_object(path: str | Path, cure: str = "") -> dict[str, Any]:
    """Return the JSON object in a file; raise GrpoError, with ``cure`` if the file cannot be read, or is no object."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise GrpoError(f"{path} cannot be read ({error.strerror}){cure and f': {cure}'}") from None
    except (ValueError, RecursionError) as error:
        raise GrpoError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise GrpoError(f"{path} is not a JSON object")
    return value


def is_hub_name(path: str | Path) -> bool:
    """Return whether a path that does not exist reads as OWNER/NAME of the Hub, and not as a folder of a user."""
    parts = re.fullmatch(r"([\w-][\w.-]*)/[\w.-]+", str(path))
    folders = ("models", "model", "checkpoints", "ckpts", "data", "runs")
    return parts is not None and not Path(path).exists() and parts[1] not in folders and not Path(parts[1]).is_dir()


def read_config(hf_dir: str | Path) -> dict[str, Any]:
    """Return the content of {hf_dir}/config.json; raise GrpoError when the file is missing or not a JSON object."""
    cure = f"{hf_dir} is not a Hugging Face model directory"
    if is_hub_name(hf_dir):
        cure += f". A run downloads nothing: hf download {hf_dir} --local-dir DIR, then give DIR"
    elif not Path(hf_dir).exists():
        cure = f"there is no {hf_dir}. A run downloads nothing: hf download OWNER/NAME --local-dir {hf_dir}"
    if (Path(hf_dir) / "latest_checkpointed_iteration.txt").exists():
        cure += ", but one of Megatron checkpoints: give it to --pretrained-checkpoint or --load"
    return read_json_object(Path(hf_dir) / "config.json", cure)
