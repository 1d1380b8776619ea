"""Reader of Python scripts that train by TRL's GRPOTrainer: their literal settings, without running them."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_grpo.utils.errors import GrpoError

# Parameters of PEFT's LoraConfig, by their names in `trl grpo`, and its defaults.
LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
LORA |= {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
LORA_DEFAULTS = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}


def read_trl_script(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a script, by their names in `trl grpo`, and notes about those that are no literals.

    Reads the arguments of GRPOConfig and LoraConfig, and model and reward functions of GRPOTrainer. Names that are
    assigned a literal once count as it.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise GrpoError(f"{path}: cannot be read as Python: {error}") from error
    names = _literals(tree)
    calls = {name: call for name, call in _calls(tree) if name in ("GRPOConfig", "GRPOTrainer", "LoraConfig")}
    if "GRPOConfig" not in calls:
        raise GrpoError(
            f"{path}: no GRPOConfig(...): of Python scripts, those of TRL with one are read; give the bash script "
            "or the YAML file with the settings"
        )
    notes: list[str] = []
    values = _arguments(calls["GRPOConfig"], names, notes)
    if "LoraConfig" in calls:
        given = _arguments(calls["LoraConfig"], names, notes)
        values |= LORA_DEFAULTS | {LORA[name]: value for name, value in given.items() if name in LORA}
    trainer = {word.arg: word.value for word in calls["GRPOTrainer"].keywords} if "GRPOTrainer" in calls else {}
    model = _value(trainer.get("model"), names)
    if isinstance(model, str):
        values["model_name_or_path"] = model
    data = next((call.args[0] for name, call in _calls(tree) if name == "load_dataset" and call.args), None)
    if isinstance(name := _value(data, names), str):
        values["dataset_name"] = name
    if "reward_funcs" in trainer:
        notes.append(f"the script's reward functions: {ast.unparse(trainer['reward_funcs'])}")
    return values, notes


def _literals(tree: ast.Module) -> dict[str, Any]:
    """Return the names that the module assigns once, to a literal."""
    found: dict[str, Any] = {}
    several = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(target := node.targets[0], ast.Name):
            several |= {target.id} & found.keys()
            found[target.id] = _value(node.value, {})
    return {name: value for name, value in found.items() if name not in several and value is not ...}


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node


def _value(node: ast.expr | None, names: dict[str, Any]) -> Any:
    """Return the value of a literal or of a name that is one; ... for another expression."""
    if isinstance(node, ast.Name):
        return names.get(node.id, ...)
    try:
        return ... if node is None else ast.literal_eval(node)
    except ValueError:
        return ...


def _arguments(call: ast.Call, names: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    values = {}
    for word in call.keywords:
        value = _value(word.value, names)
        if word.arg is not None and value is not ...:
            values[word.arg] = value
        else:
            name = "**" if word.arg is None else f"{word.arg}="
            notes.append(f"{name}{ast.unparse(word.value)}: the script computes it, so it is not translated")
    return values
