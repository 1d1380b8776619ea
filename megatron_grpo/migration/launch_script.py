"""Launch script of a translation: torchrun, pretrain_grpo.py and our flags, in the style of examples/grpo/."""

import re
import shlex
import textwrap
from collections.abc import Mapping

from megatron_grpo.migration.rows import Settings
from megatron_grpo.migration.translate import HARMLESS, Given, Translation, runs_a_command

# The arrays of the script, in order, with the groups of --help that they hold; others are in TRAINING_ARGS.
ARRAYS = {
    "MODEL_ARGS": ("model", "model architecture", "multi-latent attention"),
    "PARALLEL_ARGS": ("parallelism", "model parallelism", "pipeline parallel", "data parallelism", "context parallel"),
    "TRAINING_ARGS": (),
    "DATA_ARGS": ("data",),
    "ROLLOUT_ARGS": ("rollout", "memory while the engine generates", "reuse and sampling"),
    "GRPO_ARGS": ("rewards", "algorithm", "advantages and KL", "reference and teacher"),
    "LOGGING_ARGS": ("checkpoints", "evaluation", "logging", "profiling"),
}
# Flags that readers look for in another array than that of their group.
PLACES = {
    "--use-distributed-optimizer": "PARALLEL_ARGS",
    "--num-generations": "ROLLOUT_ARGS",
    "--load-hf": "MODEL_ARGS",
    "--logprobs-max-tokens-per-microbatch": "TRAINING_ARGS",
}
# Values that the script takes from variables, which its caller can set: (variable, value where the source has none).
VARIABLES = {
    "--load-hf": ("HF_MODEL", None),
    "--train-data-path": ("TRAIN_DATA", None),
    "--valid-data-path": ("VALID_DATA", ""),
    "--save": ("SAVE", "runs/translated"),
}


# Values with one of these cannot be several words in ${VARIABLE:-...}; a } there would end it.
_UNFIT = re.compile(r"[\s'\"\\`}]|\$\(")
_NAMED = re.compile(r"\$\{\w+\}")


class Words(str):
    """A variable that bash divides at spaces."""


EVALUATION = ("--eval-interval", "--val-before-train", "--eval-num-generations", "--eval-max-prompts")
REQUIRED = ("--load-hf", "--train-data-path", "--save")


def launch_script(
    source: str, system: str, translation: Translation, settings: Settings, groups: Mapping[str, str]
) -> str:
    """Return the text of the script; ``groups`` has the group of --help of each of our flags."""
    lines = ["#!/usr/bin/env bash", f"# Translated from {source} ({system}) by tools/translate_flags.py.", "#"]
    if translation.changes:
        lines.append(f"# Changes behaviour, compared with {system}:")
        lines += [line for point in translation.changes for line in _bullet(point)]
    if translation.decide:
        lines.append("# To do:")
        lines += [line for point in translation.decide for line in _bullet(point)]
    if translation.unknown:
        lines.append(f"# Not translated, because docs/migration/ does not list it (is it spelt as {system} does?):")
        lines += _bullet(", ".join(translation.unknown))
    lines += [
        "set -euo pipefail",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        "",
        f"NNODES=${{NNODES:-{settings.nnodes}}} GPUS_PER_NODE=${{GPUS_PER_NODE:-{settings.gpus_per_node}}}",
    ]
    given = dict(translation.given)
    required = (*REQUIRED, "--valid-data-path") if given.keys() & set(EVALUATION) else REQUIRED
    for flag, (variable, default) in VARIABLES.items():
        if flag in given and len(given[flag].values) == 1:
            value, comment = given[flag].values[0], given[flag].comment
            default_of = f"?give {variable}" if runs_a_command(value) else f"-{value}"
            lines.append(f"{variable}=${{{variable}:{default_of}}}" + (f"  # {comment}" if comment else ""))
            given[flag] = Given(flag, [f"${variable}"], "")
        elif flag in given and not any(_UNFIT.search(_NAMED.sub("", value)) for value in given[flag].values):
            comment = given[flag].comment or "several, with spaces between them"
            lines.append(f"{variable}=${{{variable}:-{' '.join(given[flag].values)}}}  # {comment}")
            given[flag] = Given(flag, [Words(f"${variable}")], "")
        elif flag in required and flag not in given:
            what = f"${{{variable}:-{default}}}" if default else f"${{{variable}:?give {variable}}}"
            lines.append(f"{variable}={what}")
            given[flag] = Given(flag, [f"${variable}"], "")
    if translation.resumes:
        given["--load"] = Given("--load", ["$SAVE"], "")
    lines += ["", *_distributed()]
    names = []
    for name in ARRAYS:
        flags = [flag for flag in given.values() if _array_of(flag.flag, groups) == name]
        if flags:
            names.append(name)
            lines += [f"{name}=(", *map(_line, flags), ")"]
    lines += [
        *_joined(names),
        "",
        "if [[ ${DRY_RUN:-0} == 1 ]]; then",
        '    WORLD_SIZE=$((NNODES * GPUS_PER_NODE)) python pretrain_grpo.py "${ARGS[@]}" --dry-run "$@"',
        "else",
        '    exec torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_grpo.py "${ARGS[@]}" "$@"',
        "fi",
    ]
    if translation.without:
        page = f"docs/migration/{system.lower().replace('-', '_')}.md"
        lines += ["", f"# Nothing to do ({page} has the reasons):"]
        lines += _bullet(", ".join(name for name, _ in translation.without))
    return "\n".join(lines) + "\n"


def _joined(names: list[str]) -> list[str]:
    """Return the array of all arrays, in lines of the usual width."""
    items = " ".join(f'"${{{name}[@]}}"' for name in names)
    return textwrap.wrap(f"ARGS=({items})", 118, subsequent_indent="    ", break_long_words=False)


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        116,
        initial_indent="#   - ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _distributed() -> list[str]:
    return [
        "DISTRIBUTED_ARGS=(",
        '    --nproc-per-node "$GPUS_PER_NODE"',
        '    --nnodes "$NNODES"',
        '    --node-rank "${NODE_RANK:-0}"',
        '    --master-addr "${MASTER_ADDR:-localhost}"',
        '    --master-port "${MASTER_PORT:-29500}"',
        ")",
    ]


def _array_of(flag: str, groups: Mapping[str, str]) -> str:
    if flag in PLACES:
        return PLACES[flag]
    group = groups.get(flag, "").removeprefix("megatron-core: ")
    return next((name for name, titles in ARRAYS.items() if group in titles), "TRAINING_ARGS")


def _line(given: Given) -> str:
    words = [value if isinstance(value, Words) else quoted(value) for value in given.values]
    text = " ".join(["    " + given.flag, *words])
    return f"{text:<44}  # {given.comment}" if given.comment else text


def quoted(value: str) -> str:
    """Return a word for bash: variables and harmless commands are expanded, anything else is quoted literally."""
    if runs_a_command(value) or not (HARMLESS.search(value) or re.search(r"\$\{?\w", value)):
        return shlex.quote(value)
    parts, end = [], 0
    for command in [*HARMLESS.finditer(value), None]:
        text = value[end : command.start() if command else None]
        parts.append(text.replace("\\", "\\\\").replace('"', '\\"'))
        if command:
            parts.append(command[0])
            end = command.end()
    return f'"{"".join(parts)}"'
