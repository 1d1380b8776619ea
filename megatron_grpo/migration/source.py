"""Reader of the launch scripts and configurations of other systems: which system, and what it sets."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_grpo.migration.bash import Script, read_bash
from megatron_grpo.migration.rows import Settings
from megatron_grpo.migration.trl_script import read_trl_script
from megatron_grpo.utils.errors import GrpoError

# Words of a command that name the system.
COMMANDS = (
    (
        "ms-swift",
        re.compile(r"(^|/)(swift|megatron)$|swift/cli/(_megatron/)?rlhf\.py$|swift\.cli(\._megatron)?\.rlhf$"),
    ),
    ("verl", re.compile(r"^verl\.(?!.*sft)|^recipe\.|(^|[./])main_ppo|^siirl\.|main_dag")),
    ("NeMo-RL", re.compile(r"run_grpo[a-z_]*\.py$")),
    ("ROLL", re.compile(r"start_\w+_pipeline\.py$")),
    ("Oumi", re.compile(r"(^|/)oumi$|^oumi\.")),
    ("slime", re.compile(r"(^|/)train(_async)?\.py$")),
    ("TRL", re.compile(r"(^|/)trl$|^trl\.scripts\.|grpo\w*\.py$|gspo\w*\.py$")),
)
# Top-level keys that a configuration file of the system has, and no other system's.
KEYS = (
    ("verl", {"actor_rollout_ref"}),
    ("NeMo-RL", {"grpo", "policy"}),
    ("ROLL", {"actor_train", "actor_infer"}),
    ("Oumi", {"training", "model"}),
    ("ms-swift", {"rlhf_type"}),
    ("TRL", {"model_name_or_path"}),
    ("TRL", {"per_device_train_batch_size"}),
)


NOT_SET = "not set"
# Settings with the number of GPUs of a node, and of nodes.
GPUS = ("trainer.n_gpus_per_node", "actor_num_gpus_per_node", "cluster.gpus_per_node", "num_gpus_per_node")
NODES = ("trainer.nnodes", "actor_num_nodes", "cluster.num_nodes", "num_nodes")


class Source(NamedTuple):
    """What a script sets: the system, its settings, and the reader's notes."""

    system: str
    settings: Settings
    notes: list[str]


def read_source(path: Path, system: str | None = None) -> Source:
    """Read a bash script, a YAML file or a script of TRL; GrpoError if it cannot be read or its system is unknown."""
    if not path.is_file():
        raise GrpoError(f"{path}: there is no such file")
    if path.suffix in (".yaml", ".yml"):
        return _configuration(path, system)
    if path.suffix == ".py":
        values, notes = read_trl_script(path)
        return Source("TRL", _settings(flatten(values), {}, notes), notes)
    return _script(path, system)


def _configuration(path: Path, system: str | None) -> Source:
    values = load_yaml(path)
    found = system or next((name for name, keys in KEYS if keys <= values.keys()), None)
    if found is None:
        raise GrpoError(
            f"{path}: its top-level keys ({', '.join(list(values)[:6])}) belong to no known system; give --system"
        )
    notes: list[str] = []
    return Source(found, _settings(flatten(values), {}, notes), notes)


def load_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file as a mapping, on top of the files that its ``defaults`` names (NeMo-RL's and hydra's way)."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise GrpoError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise GrpoError(f"{path} is not a configuration: its top level is no mapping")
    bases = values.pop("defaults", [])
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        file = path.parent / str(base)
        if isinstance(base, str) and file.is_file():
            merged = _merge(merged, load_yaml(file))
        elif str(base).endswith((".yaml", ".yml")):  # a name without an ending is a group of hydra's, inside the system
            raise GrpoError(f"{path}: its defaults are in {file}, and there is no such file: copy it there")
    return _merge(merged, values)


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for key, value in above.items():
        inner = both.get(key)
        both[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as dotted keys; values are text, or lists of text."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.") if value else {}
        elif isinstance(value, list):
            if any(isinstance(item, Mapping) for item in value):
                for place, item in enumerate(value):
                    flat |= (
                        flatten(item, f"{name}.{place}.")
                        if isinstance(item, Mapping)
                        else {f"{name}.{place}": _text(item)}
                    )
            else:
                flat[name] = [_text(item) for item in value]
        else:
            flat[name] = _text(value)
    return flat


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _script(path: Path, system: str | None) -> Source:
    script = read_bash(path)
    found = _training_command(script, system)
    if found is None:
        known = "swift rlhf, megatron rlhf, verl.trainer.main_ppo, train.py, trl grpo, oumi train, run_grpo.py"
        raise GrpoError(f"{path}: no command of a known system ({known}); give --system")
    name, environment, command, place = found
    functions = {*re.findall(r"^\s*(?:function\s+)?(\w+)\s*\(\s*\)", path.read_text(encoding="utf-8"), re.MULTILINE)}
    for _, call in script.commands:
        if call[0] in functions and call[1:2] not in ([], ["{"]):
            script.notes.append(f"{' '.join(map(script.text, call))}: the words behind a function are not read")
    trains = sum(_training_command(replace(script, commands=[one]), system) is not None for one in script.commands)
    if trains > 1 and system is None:
        script.notes.append(f"{trains} commands of the script train: the first one is translated")
    words = command[place + 1 :]
    values, files = _arguments(_of_branch(script, words))
    for file in files:
        values = _from_file(path, file, script) | values
    launcher, _ = _arguments(_of_branch(script, command[:place]))
    variables = {key: script.text(value) for key, value in script.variables.items() if isinstance(value, str)}
    variables |= {key: script.text(value) for key, value in environment.items()}
    settings = _settings(values, launcher | {"environment": variables}, script.notes)
    first = _arguments(_of_branch(script, words))[0]
    for branch in range(1, script.branches(words)):
        others = _arguments(_of_branch(script, words, branch))[0]
        for key in first | others:
            if others.get(key) != first.get(key):
                several = settings.in_conditions.setdefault(_handed_on(key), [first.get(key) or NOT_SET])
                other = others.get(key) or NOT_SET
                if other not in several:
                    several.append(other)
    for name_of_gpus in sorted({*GPUS, *NODES} & settings.in_conditions.keys()):
        shown = " or ".join(map(str, settings.in_conditions[name_of_gpus]))
        script.notes.append(f"{name_of_gpus} is {shown}: --gpus-per-node, --nnodes")
    return Source(name, settings, script.notes)


def _of_branch(script: Script, words: list[str], branch: int = 0) -> list[str]:
    """Return the words with the values of a branch, without those that are empty in it."""
    texts = [(word, script.text(word, branch)) for word in words]
    return [text for word, text in texts if text or not word]


def _training_command(script: Script, system: str | None) -> tuple[str, dict[str, str], list[str], int] | None:
    """Return (system, variables in front, words, place of the program) of the first command that trains."""
    for environment, words in script.commands:
        for name, pattern in COMMANDS:
            place = next((i for i, word in enumerate(words) if pattern.search(script.text(word))), None)
            if place is None or (system not in (None, name)):
                continue
            if name in ("ms-swift", "TRL", "Oumi") and words[place + 1 : place + 2] in (["rlhf"], ["grpo"], ["train"]):
                return name, environment, words, place + 1
            if name == "ms-swift" and not words[place].endswith("rlhf.py") and "rlhf" not in words[place]:
                continue
            if words[place] in ("trl", "oumi"):
                continue
            return system or name, environment, words, place
    if system is None:
        return None
    longest = max(script.commands, key=lambda command: len(command[1]), default=None)
    if longest is None:
        return None
    place = next((i for i, word in enumerate(longest[1]) if word.endswith(".py")), 0)
    return system, longest[0], longest[1], place


def _arguments(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return ``--flag value ...``, ``--flag=value`` and ``key=value`` as settings, and the files named."""
    values: dict[str, Any] = {}
    files: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word.startswith("-") and len(word) > 1 and not re.match(r"-\d", word):
            name, equals, value = word.partition("=")
            items = [value] if equals else []
            while not equals and position < len(words) and _is_value(words[position]):
                items.append(words[position])
                position += 1
            key = name.lstrip("-").replace("-", "_")
            values[key] = items[0] if len(items) == 1 else items or "true"
            if key in ("config", "c", "config_file"):
                files.append(values.pop(key))
        elif word.startswith("~"):  # hydra: delete the key, or the group
            deleted = word.partition("=")[0].lstrip("~").replace("-", "_")
            for key in [key for key in values if key == deleted or key.startswith(f"{deleted}.")]:
                del values[key]
        elif "=" in word:
            key, _, value = word.partition("=")
            values[key.lstrip("+").replace("-", "_")] = value
        elif word.endswith((".yaml", ".yml")):
            files.append(word)
    return values, files


def _is_value(word: str) -> bool:
    return bool(re.match(r"-\d", word)) or not (
        word.startswith("-") or re.match(r"\+*[A-Za-z_][\w.]*=|~[A-Za-z_]", word)
    )


def _from_file(script_path: Path, name: str, script: Script) -> dict[str, Any]:
    file = next((f for f in (Path(name), script_path.parent / name) if f.is_file()), None)
    if file is None:
        script.notes.append(f"{name}: there is no such file, so its settings are missing")
        return {}
    return flatten(load_yaml(file))


def _settings(values: dict[str, Any], launcher: dict[str, Any], notes: list[str]) -> Settings:
    """Return the settings with references resolved, and with the GPUs that the script starts on."""
    values = {key.replace("-", "_"): _resolved(value, values) for key, value in values.items()}
    values = _of_roles({_handed_on(key): value for key, value in values.items()})
    variables = launcher.get("environment", {})
    gpus = _first_number(
        launcher.get("nproc_per_node"),
        variables.get("NPROC_PER_NODE"),
        launcher.get("num_processes"),
        *(values.get(key) for key in GPUS),
        len(variables["CUDA_VISIBLE_DEVICES"].split(",")) if "CUDA_VISIBLE_DEVICES" in variables else None,
    )
    mapped = _mapped_gpus(values.get("actor_train.device_mapping")) or _gpus_of_roles(values)
    if mapped is not None:
        gpus = min(mapped, gpus or 8)
        if mapped % gpus:
            notes.append(f"the script uses {mapped} GPUs, no whole nodes of {gpus}: give --gpus-per-node, --nnodes")
    nodes = (
        mapped // gpus
        if mapped and gpus
        else _first_number(
            launcher.get("nnodes"),
            variables.get("NNODES"),
            *(values.get(key) for key in NODES),
        )
    )
    if gpus is None:
        notes.append("the script does not say on how many GPUs it runs: 8 are assumed (--gpus-per-node, --nnodes)")
    return Settings(values, gpus or 8, nodes or 1)


def _handed_on(key: str) -> str:
    """Return the name of a setting that Oumi hands on to verl or TRL, or that an older recipe of verl had elsewhere."""
    for prefix in ("training.verl_config_overrides.", "training.trainer_kwargs."):
        key = key.removeprefix(prefix)
    return key.replace("reward_model.overlong_buffer.", "reward_model.reward_kwargs.overlong_buffer_cfg.", 1)


def _of_roles(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of ms-swift's Ray files without the section (train, rollout) that they are in."""
    if "train.gpus" not in values:
        return values
    section = re.compile(r"(train|rollout)\.(?!gpus$)")
    return {section.sub("", key, count=1) if section.match(key) else key: value for key, value in values.items()}


def _gpus_of_roles(values: Mapping[str, Any]) -> int | None:
    """Return the GPUs of ms-swift's Ray files: of the trainer, and of engines that do not share them."""
    train, rollout = (_first_number(values.get(f"{role}.gpus")) for role in ("train", "rollout"))
    return train and train + (0 if values.get("colocate_groups") else rollout or 0)


def _mapped_gpus(mapping: Any) -> int | None:
    """Return the GPUs of ROLL's device_mapping, such as ``list(range(0,16))``."""
    found = re.fullmatch(r"list\(range\((\d+),\s*(\d+)\)\)", str(mapping))
    return int(found[2]) - int(found[1]) if found else None


def _first_number(*texts: Any) -> int | None:
    return next((int(text) for text in texts if text is not None and str(text).isdigit() and int(text) > 0), None)


def _resolved(value: Any, values: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value with OmegaConf's references, ``${policy.model_name}``, replaced."""
    if isinstance(value, list):
        return [_resolved(item, values, depth) for item in value]
    if depth > 8 or "${" not in str(value):
        return value

    def replaced(found: re.Match[str]) -> str:
        inner = values.get(found[1])
        return found[0] if inner is None or isinstance(inner, list) else str(_resolved(inner, values, depth + 1))

    def selected(found: re.Match[str]) -> str:
        inner = values.get(found[1])
        return found[2] if inner is None or isinstance(inner, list) else str(_resolved(inner, values, depth + 1))

    text = re.sub(r"\$\{oc\.select:\s*([\w.]+)\s*,\s*([^{},]*)\}", selected, str(value))
    text = re.sub(r"\$\{([\w.]+)\}", replaced, text)
    product = re.fullmatch(r"\$\{mul:\s*([\d.]+),\s*([\d.]+)\}", text)
    return str(int(float(product[1]) * float(product[2]))) if product else text
