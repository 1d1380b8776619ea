"""Reader of Python scripts that train by TRL's GRPOTrainer: their literal settings, without running them."""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.utils.errors import GrpoError

# Parameters of PEFT's LoraConfig, by their names in `trl grpo`, and its defaults.
LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
LORA |= {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
LORA_WITHOUT_EFFECT = {"task_type", "inference_mode", "base_model_name_or_path"}
LORA_DEFAULTS = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
TRAINER = ("model", "reward_funcs", "args")  # the first parameters of GRPOTrainer


def read_trl_script(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a script, by their names in `trl grpo`, and notes about what it cannot read.

    Reads the arguments of GRPOConfig and LoraConfig, and model and reward functions of GRPOTrainer. A name that the
    script sets once, to a literal, counts as it.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, SyntaxError) as error:
        raise GrpoError(f"{path}: cannot be read as Python: {error}") from error
    names = _literals(tree)
    calls: dict[str, ast.Call] = {}
    notes: list[str] = []
    for name, call in _calls(tree):
        if name in ("GRPOConfig", "GRPOTrainer", "LoraConfig"):
            if name in calls:
                notes.append(f"the script has several {name}(...): that of line {call.lineno} is read")
            calls[name] = call
    if "GRPOConfig" not in calls:
        raise GrpoError(
            f"{path}: no GRPOConfig(...): of Python scripts, those of TRL with one are read; give the bash script "
            "or the YAML file with the settings"
        )
    values = _arguments(calls["GRPOConfig"], ("output_dir",), names, notes)
    trainer = calls.get("GRPOTrainer", ast.Call(ast.Name("GRPOTrainer"), [], []))
    given = {**dict(zip(TRAINER, trainer.args, strict=False)), **{word.arg: word.value for word in trainer.keywords}}
    if "LoraConfig" in calls and (not given or "peft_config" in given or None in given):
        of_lora = _arguments(calls["LoraConfig"], (), names, notes)
        values |= LORA_DEFAULTS | {LORA[name]: value for name, value in of_lora.items() if name in LORA}
        others = {name: value for name, value in of_lora.items() if name not in {*LORA, *LORA_WITHOUT_EFFECT}}
        notes += [f"LoraConfig: {n}={v!r} is not translated" for n, v in others.items() if (n, v) != ("bias", "none")]
    model = _value(given.get("model"), names)
    if isinstance(model, str):
        values["model_name_or_path"] = model
    data = next((call.args[0] for name, call in _calls(tree) if name == "load_dataset" and call.args), None)
    if isinstance(name := _value(data, names), str):
        values["dataset_name"] = name
    if "reward_funcs" in given:
        notes.append(f"the script's reward functions: {ast.unparse(given['reward_funcs'])}")
    return values, notes


def _literals(tree: ast.Module) -> dict[str, Any]:
    """Return the names that the script sets once, to a literal: no other assignment, loop or parameter has them."""
    found: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: _value(node.value, {}) for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts[node.id] += 1
        elif isinstance(node, ast.arg):
            counts[node.arg] += 1
    return {name: value for name, value in found.items() if counts[name] == 1 and value is not ...}


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of functions with a name, in the order of the lines."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(found, key=lambda call: (call.lineno, call.col_offset)):
        if isinstance(node.func, ast.Name | ast.Attribute):
            yield node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node


def _value(node: ast.expr | None, names: dict[str, Any]) -> Any:
    """Return the value of a literal or of a name that is one, of several values a list; ... for another expression."""
    if isinstance(node, ast.Name):
        return names.get(node.id, ...)
    try:
        value = ... if node is None else ast.literal_eval(node)
    except (TypeError, ValueError):
        return ...
    return sorted(value, key=str) if isinstance(value, set) else list(value) if isinstance(value, tuple) else value


def _arguments(call: ast.Call, places: Sequence[str], names: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the arguments of a call that are literals; ``places`` are the names of those without one."""
    values = {}
    for place, node in enumerate(call.args):
        if place < len(places) and (value := _value(node, names)) is not ...:
            values[places[place]] = value
        else:
            notes.append(f"{ast.unparse(node)}: an argument without a name, which is not translated")
    for word in call.keywords:
        value = _value(word.value, names)
        if word.arg is not None and value is not ...:
            values[word.arg] = value
        else:
            name = "**" if word.arg is None else f"{word.arg}="
            notes.append(f"{name}{ast.unparse(word.value)}: the script computes it, so it is not translated")
    return values
