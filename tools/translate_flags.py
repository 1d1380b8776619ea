#!/usr/bin/env python3
"""Translate a launch script of ms-swift, verl, TRL, slime, ROLL, NeMo-RL or Oumi into ours.

    python tools/translate_flags.py run.sh > run_ours.sh
    python tools/translate_flags.py config.yaml --gpus-per-node 8 --nnodes 2 -o run_ours.sh

Reads bash scripts, YAML files and, of TRL, Python scripts; runs nothing of them. Prints a script with torchrun,
pretrain_grpo.py and our flags. Each line names the setting that it comes from. Comments at the top list what a person
must decide, and the settings without a counterpart. docs/migration/ has the tables. DRY_RUN=1 bash run_ours.sh checks
the result on any machine.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_grpo.migration.launch_script import launch_script
from megatron_grpo.migration.source import read_source
from megatron_grpo.migration.table import SYSTEMS
from megatron_grpo.migration.translate import translate
from megatron_grpo.training.command_line import TABLE, parser_from_table
from megatron_grpo.utils.core_names import NEED_TRANSFORMER_ENGINE
from megatron_grpo.utils.errors import GrpoError

# Destinations of flags that work with Transformer Engine only.
IN_FP8 = "fp8_format fp8_recipe first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16".split()
EXTRA = (*NEED_TRANSFORMER_ENGINE, "use_precision_aware_optimizer", "attention_backend", *IN_FP8)


def groups() -> dict[str, str]:
    """Return the group of --help of each of our flags, from the parser as data: torch is not imported."""
    return {
        option: group.title or ""
        for group in parser_from_table(json.loads(TABLE.read_text()))._action_groups
        for action in group._group_actions
        for option in action.option_strings
    }


def translated(path: Path, system: str | None, gpus_per_node: int | None, nnodes: int | None) -> str:
    """Return our launch script of the script or configuration at ``path``."""
    source = read_source(path, system)
    settings = source.settings
    settings.gpus_per_node = gpus_per_node or settings.gpus_per_node
    settings.nnodes = nnodes or settings.nnodes
    ours = groups()
    libraries = ["--" + dest.replace("_", "-") for dest in EXTRA]
    translation = translate(SYSTEMS[source.system], settings, ours, libraries)
    translation.decide[:0] = source.notes
    return launch_script(path.name, source.system, translation, settings, ours)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "script", type=Path, metavar="SCRIPT", help="bash script, YAML file of a configuration, or Python script of TRL"
    )
    parser.add_argument("--system", choices=tuple(SYSTEMS), help="whose script it is [told from its command or keys]")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a node [those of the script, else 8]")
    parser.add_argument("--nnodes", type=int, metavar="N", help="number of nodes [those of the script, else 1]")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write [standard output]")
    args = parser.parse_args(argv)
    try:
        text = translated(args.script, args.system, args.gpus_per_node, args.nnodes)
    except GrpoError as error:
        print(f"translate_flags.py: error: {error}", file=sys.stderr)
        return 2
    if args.output:
        args.output.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
