"""Reader of Python scripts that train by TRL's GRPOTrainer: their literal settings, without running them."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_grpo.utils.errors import GrpoError

# Parameters of PEFT's LoraConfig, by their names in `trl grpo`, and its defaults.
LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
LORA |= {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
# Parameters that scripts give by their places.
PLACES = {"GRPOConfig": ("output_dir",), "GRPOTrainer": ("model", "reward_funcs", "args"), "LoraConfig": ()}


def read_trl_script(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a script, by their names in `trl grpo`, and notes about those that are no literals.

    Reads the arguments of GRPOConfig and LoraConfig, and model and reward functions of GRPOTrainer. Names that are
    bound once, to a literal, count as it. GrpoError unless there is one GRPOConfig, and at most one of the others.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, SyntaxError) as error:
        raise GrpoError(f"{path}: cannot be read as Python: {error}") from error
    names = _literals(tree)
    calls: dict[str, ast.Call] = {}
    for name, call in _calls(tree):
        if name in PLACES and name in calls:
            raise GrpoError(f"{path}: {name}(...) is there more than once: leave the one of the run to translate")
        if name in PLACES:
            calls[name] = call
    if "GRPOConfig" not in calls:
        raise GrpoError(
            f"{path}: no GRPOConfig(...): of Python scripts, those of TRL with one are read; give the bash script "
            "or the YAML file with the settings"
        )
    notes: list[str] = []
    trainer = dict(_words(calls["GRPOTrainer"], "GRPOTrainer")) if "GRPOTrainer" in calls else {}
    values = _arguments(calls["GRPOConfig"], "GRPOConfig", names, notes)
    for name, text in _set_later(tree, trainer.get("args")):
        values.pop(name, None)
        notes.append(f"{text}: the script sets it after GRPOConfig(...), so it is not translated")
    if "LoraConfig" in calls:
        given = _arguments(calls["LoraConfig"], "LoraConfig", names, notes)
        there = {LORA.get(name or "") for name, _ in _words(calls["LoraConfig"], "LoraConfig")}
        values |= {"use_peft": True} | {name: value for name, value in LORA_DEFAULTS.items() if name not in there}
        values |= {LORA[name]: value for name, value in given.items() if name in LORA}
        others = {name: value for name, value in given.items() if name not in {*LORA, "task_type", "inference_mode"}}
        notes += [f"LoraConfig: {n}={v!r} is not translated" for n, v in others.items() if (n, v) != ("bias", "none")]
    else:
        adapters: list[ast.expr] = [call for name, call in _calls(tree) if name == "get_peft_model"]
        if "peft_config" in trainer and _value(trainer["peft_config"], names) is not None:
            adapters.append(trainer["peft_config"])
        notes += [f"{ast.unparse(one)}: give --lora-rank, without which all weights are trained" for one in adapters]
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
    """Return the names that the script binds once, by an assignment of a literal."""
    found: dict[str, Any] = {}
    bound: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[node.id] += 1
        elif isinstance(node, ast.arg):
            bound[node.arg] += 1
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if len(targets) == 1 and isinstance(targets[0], ast.Name):
                found[targets[0].id] = _value(node.value, {})
    return {name: value for name, value in found.items() if bound[name] == 1 and value is not ...}


def _set_later(tree: ast.Module, args: ast.expr | None) -> Iterator[tuple[str, str]]:
    """Yield (attribute, source) of each assignment to an attribute of the configuration, the trainer's ``args``."""
    holders = {args.id} if isinstance(args, ast.Name) else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made = any(name == "GRPOConfig" for name, _ in _calls(node.value))
            holders |= {target.id for target in targets if made and isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                holder = target.value if isinstance(target, ast.Attribute) else None
                if isinstance(target, ast.Attribute) and isinstance(holder, ast.Name) and holder.id in holders:
                    yield target.attr, ast.unparse(node)


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
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


def _words(call: ast.Call, name: str) -> Iterator[tuple[str | None, ast.expr]]:
    """Yield (parameter, expression) of each argument; the parameter is None for ** and for an unknown place."""
    for place, value in enumerate(call.args):
        yield PLACES[name][place] if place < len(PLACES[name]) else None, value
    for word in call.keywords:
        yield word.arg, word.value


def _arguments(call: ast.Call, name: str, names: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    values = {}
    for parameter, expression in _words(call, name):
        value = _value(expression, names)
        if parameter is not None and value is not ...:
            values[parameter] = value
        else:
            prefix = f"{name}(...), an argument without a name: " if parameter is None else f"{parameter}="
            notes.append(f"{prefix}{ast.unparse(expression)}: the script computes it, so it is not translated")
    return values
