"""Evaluation of one checkpoint or Hugging Face directory without training (--eval-only)."""

import datetime
import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.checkpointing.checkpoint_directory import iterations, latest_iteration, pinned
from megatron_grpo.observability.metrics import without_nan
from megatron_grpo.parallel.agreement import on_rank_0
from megatron_grpo.rollout.evaluation import HeldOut
from megatron_grpo.training.trainer import Trainer
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_json_object
from megatron_grpo.utils.log import print_rank_0

FILE = "evaluation.json"
# Values of the flags that an evaluation does not follow: it trains nothing, and writes nothing into a run's directory
# but FILE. Set them after all rules, because the flags of a run belong together.
WITHOUT_TRAINING: dict[str, Any] = {
    **dict.fromkeys(
        "save save_hf save_adapter ledger replay_rollouts train_only teacher_load_hf teacher_server".split()
    ),
    **dict.fromkeys("tensorboard_dir wandb_project swanlab_project mlflow_project trackio_project".split()),
    **dict.fromkeys("exit_duration_in_mins num_epochs".split()),
    **dict.fromkeys(
        "async_save rollout_only partial_rollouts log_completions profile exit_signal_handler".split(), False
    ),
    **dict.fromkeys("overlap_param_gather offload_gradients offload_optimizer sync_ref_model".split(), False),
    "max_staleness": 0,
    "beta": 0.0,
    "with_reference": False,
    "train_iters": 0,
}
# Flags that an entry of FILE repeats.
OF_AN_ENTRY = """seed reward_funcs reward_weights eval_correct_reward eval_max_prompts eval_num_generations temperature
    top_p top_k max_prompt_length max_completion_length environment""".split()
COLUMNS = {  # heading: (field of a row, format)
    "file": ("file", ""),
    "completions": ("kind", ""),
    "prompts": ("prompts", "d"),
    "accuracy": ("accuracy", ".4f"),
    "reward": ("reward", ".4f"),
    "length": ("length", ".1f"),
    "cut off": ("truncated", ".4f"),
    "not scored": ("unscored", ".4f"),
}


def resolve_checkpoint(args: Namespace) -> dict[str, str]:
    """Return --load as the directory of the one checkpoint to evaluate (`pinned`).

    Raises GrpoError if --load holds no checkpoint.
    """
    if not args.load:
        return {}
    if latest_iteration(args.load) is None:
        folder = Path(args.load).parent
        others = ", ".join(path.name for path in iterations(folder))
        cure = f"{folder} has {others}" if others else "to evaluate --load-hf, leave --load out"
        raise GrpoError(f"--eval-only: {args.load} (--load) holds no checkpoint; {cure}")
    return {"load": pinned(args.load)}


def evaluated(args: Namespace) -> str:
    """Return the name of what is evaluated. Call it on one rank."""
    if args.load:
        return f"checkpoint {args.load}"  # of `resolve_checkpoint`; its run may have deleted it meanwhile
    origin = f"Hugging Face directory {args.load_hf}"
    if args.pretrained_checkpoint:
        origin = f"checkpoint {args.pretrained_checkpoint}"
    return f"adapter {args.load_adapter} of the {origin}" if args.load_adapter else origin


def rows_of(metrics: Mapping[str, float], held_out: HeldOut) -> list[dict[str, Any]]:
    """Return a row for each file (and ``all`` of several) and each kind of completions, from metrics."""
    parts = {name: (f"{name}/", len(places)) for name, places in held_out.files.items()}
    if len(parts) > 1:
        parts["all"] = ("", len(held_out.prompts))
    else:
        parts = {name: ("", size) for name, (_, size) in parts.items()}
    rows = []
    for file, (prefix, size) in parts.items():
        for kind in ("greedy", "sampled"):
            start = f"eval/{prefix}{kind}_"
            fields = {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}
            if not fields:
                continue
            passed = f"eval/{prefix}pass_at_"
            if kind == "sampled":
                fields |= {
                    f"pass@{name.removeprefix(passed)}": value
                    for name, value in metrics.items()
                    if name.startswith(passed)
                }
            rows.append({"file": file, "kind": kind, "prompts": size} | fields)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a text of aligned columns."""
    columns = dict(COLUMNS)
    columns |= {name: (name, ".4f") for row in rows for name in row if name.startswith("pass@")}
    cells = [list(columns)]
    for row in rows:
        cells.append([format(row[name], form) if name in row else "" for name, form in columns.values()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        left = [text.ljust(width) for text, width in zip(line[:2], widths[:2], strict=True)]
        right = [text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)


def report_evaluation(save: str | None, trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Print the table of an evaluation, and append it to ``{save}/evaluation.json`` with --save. Collective."""
    args, rows = trainer.args, rows_of(metrics, trainer.held_out)
    what = on_rank_0(evaluated, args)
    print_rank_0(f"evaluation of the {what}\n{table(rows)}")
    entry = {
        "evaluated": what,
        "iteration": trainer.iteration,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "flags": {name: getattr(args, name) for name in OF_AN_ENTRY},
        "rows": rows,
        "completions": trainer.held_out_rows,
    }
    if save:
        on_rank_0(append_entry, Path(save), entry)
        print_rank_0(f"written to {Path(save, FILE)}")
    trainer.close()


def check_file(directory: Path) -> None:
    """Raise GrpoError if evaluation.json is damaged; `append_entry` would find it after the evaluation."""
    if (file := directory / FILE).exists():
        read_json_object(file)


def append_entry(directory: Path, entry: Mapping[str, Any]) -> None:
    """Append an evaluation to the list in evaluation.json; GrpoError if the file is damaged or cannot be written."""
    file = directory / FILE
    earlier = read_json_object(file).get("evaluations", []) if file.exists() else []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{FILE}.tmp")
        temporary.write_text(json.dumps(without_nan({"evaluations": [*earlier, dict(entry)]}), indent=1))
        os.replace(temporary, file)
    except OSError as error:
        raise GrpoError(f"{file} cannot be written: {error.strerror}; the table is above") from error
