"""Parsed arguments as text: on the command line, and stored with a checkpoint."""

import json
from argparse import Namespace
from typing import Any

# Never printed, saved or logged.
SECRET = ("vllm_server_api_key", "sglang_server_api_key")


def hyphens(word: str) -> str:
    """Return a word of the command line with hyphens for the underscores of a flag's name (not of its value)."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def args_to_json(args: Namespace) -> dict[str, Any]:
    """Return the arguments as JSON's types, for a checkpoint; ``explicit`` and the API keys are omitted."""
    omitted = ("explicit", *SECRET)
    return json.loads(json.dumps({dest: value for dest, value in vars(args).items() if dest not in omitted}))
