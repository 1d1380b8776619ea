"""Print the flags of a published model's architecture, for runs with random weights.

    python tools/benchmark/published_shape.py DIRECTORY_WITH_CONFIG_JSON

One word a line, as bash's mapfile reads them. --load-hf reads the architecture itself, but needs weights.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.training.arguments import build_parser
from megatron_grpo.weights import families, hf


def flags(architecture: dict[str, Any]) -> Iterator[str]:
    """Yield the words that set these attributes of the parsed arguments, where they differ from the defaults."""
    parser = build_parser()
    for dest, value in architecture.items():
        if value is None or value == parser.get_default(dest):
            continue
        actions = [action for action in parser._actions if action.dest == dest]
        if isinstance(value, bool):
            yield next(action for action in actions if action.const == value).option_strings[0]
            continue
        yield actions[0].option_strings[0]
        if isinstance(value, list | tuple) and actions[0].nargs:
            yield from map(str, value)
        else:
            yield json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="holds config.json as published")
    config = hf.read_config(parser.parse_args().directory)
    print("\n".join(flags(families.for_hf_config(config).args_from_hf(config))))


if __name__ == "__main__":
    main()
