"""Translation of another system's settings into our flags, with what a person must decide."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.migration.rows import SAME, Different, Row, Settings, System, Undecided, is_off, key_of
from megatron_grpo.migration.table import SYSTEMS, row_key_of, rows_of
from megatron_grpo.utils.json_files import is_hub_name

# Commands in $( ) that our script may run: they only return a text.
HARMLESS = re.compile(r"\$\((?:date|hostname|whoami|pwd)(?: +[^()$`;&|<>\n]*)?\)")


def runs_a_command(word: str) -> bool:
    """Return whether bash would run another command of a word than those of ``HARMLESS``."""
    rest = HARMLESS.sub("", word)
    return "$(" in rest.replace("$((", "") or "`" in rest


@dataclass
class Given:
    """One of our flags with its values (none for a switch), and the comment of its line."""

    flag: str
    values: list[str]
    comment: str


@dataclass
class Translation:
    """Our flags; what a run here does otherwise; what a person must decide; settings that need nothing, each with the
    reason; unknown settings; and whether a start resumes from --save."""

    given: dict[str, Given] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    decide: list[str] = field(default_factory=list)
    without: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    resumes: bool = True


# Groups of --help with the architecture, which --load-hf reads from config.json, and their flags without that.
ARCHITECTURE = ("model", "megatron-core: model architecture", "megatron-core: multi-latent attention")
ALSO_IN_CONFIG = (
    "--moe-ffn-hidden-size --moe-router-topk --moe-shared-expert-intermediate-size --moe-router-score-function "
    "--moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-num-groups --moe-router-group-topk "
    "--moe-router-topk-scaling-factor --moe-shared-expert-gate --mtp-num-layers "
    "--mamba-num-heads --mamba-head-dim --mamba-state-dim --mamba-num-groups "
    "--squared-relu --position-embedding-type"
).split()
OF_REFERENCE = ("--kl-estimator", "--kl-in-reward", "--sync-ref-model")
OF_RATIO = (
    "--epsilon --epsilon-high --dual-clip --importance-sampling-level --advantage-estimator --scale-rewards "
    "--clip-cov-ratio --kl-cov-ratio --kl-cov-coef --off-policy-sequence-mask-delta"
).split()
# Of an engine in the training processes: a server is started with flags of its own.
OF_ENGINE = (
    "--vllm-tensor-parallel-size --vllm-gpu-memory-utilization --vllm-max-model-len --vllm-enforce-eager "
    "--no-vllm-enable-prefix-caching --vllm-dtype --vllm-quantization --vllm-enable-expert-parallel "
    "--vllm-engine-kwargs --vllm-speculative-config --sleep-level"
).split()
_UNKNOWN = Row("", "--unknown")
KNOWN_VARIABLES = {"HOME", "USER", "PWD", "SAVE"}
NOT_IN_CONFIG = ("--attention-backend", "--attention-dropout", "--hidden-dropout", "--seq-length")


def translate(
    system: System, settings: Settings, groups: Mapping[str, str], extra_libraries: Collection[str] = ()
) -> Translation:
    """Return the settings in our flags.

    ``groups`` has the group of --help of each of our flags. A name that the table lacks is kept if it is one of our
    flags (Megatron-LM's names are the same in several systems), and is left to a person otherwise. So are flags of
    ``extra_libraries``, which need Transformer Engine or apex.
    """
    owners = (system, *(SYSTEMS[name] for name in system.hands_on))
    result, rows = Translation(resumes=all(owner.resumes(settings) for owner in owners)), rows_of(system)
    ranks = {key: place for place, key in enumerate(rows)}
    found = {key: row_key for key in settings.values if (row_key := row_key_of(key, rows))}
    for key in sorted(found, key=lambda key: ranks[found[key]]):
        _apply(result, rows[found[key]], key, settings)
    for key, value in settings.values.items():
        if key not in found:
            _unlisted(result, key, value, groups, system.fields)
    for flag, implied, reason in system.implied:
        try:
            value = implied(settings)
        except Undecided as question:
            result.decide.append(f"{flag}: {question}")
            continue
        if flag not in result.given and value is not None:
            _add(result, flag, value, reason)
    beta = result.given.get("--beta")
    if beta and is_off(beta.values[0], "0"):
        for flag in [flag for flag in result.given if flag in OF_REFERENCE or flag.startswith("--ref-")]:
            del result.given[flag]
            result.without.append((flag, "there is no KL term with --beta 0"))
    loss = result.given.get("--loss-type")
    if loss and loss.values == ["gkd"]:
        for flag in [flag for flag in OF_RATIO if flag in result.given]:
            del result.given[flag]
            result.without.append((flag, "there is neither ratio nor advantage with --loss-type gkd"))
    mode = result.given.get("--vllm-mode")
    if mode and mode.values == ["server"] and (words := _taken(result, OF_ENGINE)):
        result.decide.append(f"start the servers with their own flags for {words}")
    if words := _taken(result, extra_libraries):
        result.decide.append(
            f"add where Transformer Engine and apex are installed: --transformer-impl transformer_engine {words}"
        )
    model = result.given.get("--load-hf")
    if model and is_hub_name(model.values[0]):
        result.decide.append(
            f"--load-hf: {model.values[0]} is a name on the Hub, and a run downloads nothing: hf download "
            f"{model.values[0]} --local-dir DIR, then HF_MODEL=DIR"
        )
    for key, values in settings.in_conditions.items():
        if any(row.ours or row.convert for row in rows.get(row_key_of(key, rows) or "", [_UNKNOWN])):
            result.decide.append(f"{key}: its value is set in a condition of the script{_shown(values)}")
            result.without = [(name, reason) for name, reason in result.without if key_of(name) != key]
    for points, found_by in ((result.decide, system.decide), (result.changes, system.differences)):
        try:
            points.extend(found_by(settings))
        except Undecided as question:
            result.decide.append(str(question))
    for given in result.given.values():
        if any(runs_a_command(word) for word in given.values):
            result.decide.append(f"{given.flag}: {' '.join(given.values)} runs a command, and is not run here: set it")
    words = " ".join(word for given in result.given.values() for word in given.values)
    missing = sorted(set(re.findall(r"\$\{?([A-Za-z_]\w*)", words)) - KNOWN_VARIABLES)
    if missing:
        result.decide.append(f"{', '.join(missing)}: variables of the environment, or computed by the script: set them")
    return result


def _taken(result: Translation, flags: Collection[str]) -> str:
    """Take these flags out of the translation; return them with their values."""
    held = [result.given.pop(flag) for flag in flags if flag in result.given]
    return " ".join(" ".join([given.flag, *given.values]) for given in held)


def _shown(values: list[Any]) -> str:
    """Return the values after a colon, or nothing if they are long."""
    texts = [" ".join(value) if isinstance(value, list) else str(value) for value in values]
    return f": {' or '.join(texts)}" if all(len(text) < 40 for text in texts) else ""


def _apply(result: Translation, rows: list[Row], key: str, settings: Settings) -> None:
    """Add what the rows of one name say about its value."""
    named, reasons = False, []
    for row in rows:
        name = key if row.theirs.endswith("*") else row.theirs
        try:
            value = (row.convert or SAME).apply(settings.values[key], settings)
        except Undecided as question:
            result.decide.append(f"{name}: {question}")
            named = True
            continue
        except Different as difference:
            shown = str(settings.values[key])
            result.changes.append(f"{name}{f'={shown}' * (len(shown) < 40)}: {difference}")
            named = True
            continue
        if row.ours and value is not None and value is not False:
            _add(result, row.ours, value, _comment(name, row.ours, settings.values[key], value))
            named = True
        else:
            reasons.append(row.note or (row.convert.words if row.convert else "not set"))
    if reasons and not named and (rows[0].theirs, reasons[0]) not in result.without:
        result.without.append((rows[0].theirs, reasons[0]))


def _unlisted(
    result: Translation, key: str, value: Any, groups: Mapping[str, str], fields: Collection[str] = ()
) -> None:
    """Keep a name that is also ours, except of the architecture; leave any other to a person.

    ``fields``: beginnings of names that end in a flag.
    """
    prefix = next((prefix for prefix in fields if key.startswith(prefix)), "")
    flag = "--" + key.removeprefix(prefix).replace("_", "-")
    shown = (" ".join(value) if isinstance(value, list) else str(value)).lower()
    architecture = ("flags of the architecture", "--load-hf reads config.json")
    if flag in ALSO_IN_CONFIG or (groups.get(flag) in ARCHITECTURE and flag not in NOT_IN_CONFIG):
        if architecture not in result.without:
            result.without.append(architecture)
    elif flag not in groups:
        if shown not in ("null", "none", "false"):
            result.unknown.append(key)
    elif shown != "false":
        _add(result, flag, True if shown == "true" else value, key if prefix else "")


def _add(result: Translation, flag: str, value: str | list[str] | bool, comment: str) -> None:
    values = [] if value is True else [str(item) for item in value] if isinstance(value, list) else [str(value)]
    before = result.given.get(flag)
    if before is None:
        result.given[flag] = Given(flag, values, comment)
    elif before.values != values:
        one, other = " ".join(before.values), " ".join(values)
        result.decide.append(f"{flag} is {one} ({before.comment or flag}) or {other} ({comment or flag})")


def _comment(theirs: str, ours: str, before: Any, after: Any) -> str:
    """Return the name there, with the value where it differs; nothing where both are the same."""
    shown = " ".join(before) if isinstance(before, list) else str(before)
    same_value = after is True or shown == (" ".join(after) if isinstance(after, list) else str(after))
    if key_of(theirs) == key_of(ours) and same_value:
        return ""
    return theirs if same_value or len(shown) > 40 else f"{theirs}={shown}"
