"""The ledger at the start of a run: is it of the same run, what does it hold, and where does the run go on?"""

from argparse import Namespace
from collections.abc import Collection
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_grpo.parallel.agreement import on_rank_0
from megatron_grpo.rollout.arguments import recorded_in
from megatron_grpo.rollout.engine import Engine
from megatron_grpo.rollout.ledger import content
from megatron_grpo.rollout.ledger.content import FOLDER, BatchRecord, Content
from megatron_grpo.rollout.ledger.ledger import Ledger, set_aside
from megatron_grpo.rollout.ledger.replay import Replay
from megatron_grpo.training.arguments import DERIVED, FLAGS
from megatron_grpo.utils.arguments import args_to_json
from megatron_grpo.utils.batch_sizes import longest_in_words, longest_sequence
from megatron_grpo.utils.core_flags import core_flags
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import PATH
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.utils.rules import flag

# Flags of these groups change neither what is sampled nor what is learnt from it, except by rounding.
UNRELATED = (
    "parallelism",
    "memory while the engine generates",
    "ledger",
    "checkpoints",
    "evaluation",
    "logging",
    "profiling",
    "running",
)
# The same of single flags.
UNRELATED_FLAGS = """
    micro_batch_size max_tokens_per_microbatch share_prompts logprobs_max_tokens_per_microbatch ref_micro_batch_size
    train_iters num_epochs exit_interval exit_duration_in_mins exit_signal_handler exit_grace_seconds
    rollout_engine vllm_mode vllm_server_base_url vllm_server_api_key vllm_server_timeout
    sglang_server_base_url sglang_server_api_key sglang_server_timeout weight_sync_method weight_sync_dir
    vllm_tensor_parallel_size vllm_gpu_memory_utilization vllm_max_model_len vllm_max_num_seqs inference_max_requests
    sleep_level vllm_enable_expert_parallel vllm_engine_kwargs vllm_enforce_eager vllm_enable_prefix_caching
    vllm_speculative_config
    rollout_balancing lora_weight_sync no_check_lora_sync check_weight_sync mismatch_limit
    rollout_ranks weight_update use_distributed_optimizer overlap_param_gather
    valid_data_path reward_workers reward_timeout reward_retries reward_model_timeout reward_model_concurrency
    environment_workers environment_threads environment_sandboxes environment_timeout environment_retries
    teacher_server teacher_server_timeout code_sandbox save_adapter
""".split()
# Sections of megatron-core's flags that change what is learnt.
LEARNING_SECTIONS = {
    f"megatron-core: {name}" for name in ("optimizer", "moe", "model architecture", "multi-latent attention")
}
ORIGIN = ("load_hf", "pretrained_checkpoint", "load_adapter")  # of the weights of update 0
DATA = ("train_data_path",)
# What groups have in common, whatever is learnt from them: the temperature is part of their log-probabilities.
OF_DATA = ("num_generations", "reward_funcs", "temperature", "vocab_size")


def run_flags(args: Namespace) -> dict[str, Any]:
    """Return the flags that decide what is sampled and learnt, and those of the initial weights.

    Other files than these are left out, because a resumed run or another machine may have them elsewhere.
    """
    rows = {row[0][2:].replace("-", "_"): row for group in FLAGS.values() for row in group}
    left_out = {
        *DERIVED,
        "accepted",
        *UNRELATED_FLAGS,
        *(dest for dest, row in rows.items() if row[1] in (PATH, [PATH])),
    }
    left_out |= {row[0][2:].replace("-", "_") for group in UNRELATED for row in FLAGS[group]}
    left_out |= {dest for dest, core in core_flags().items() if core.section not in LEARNING_SECTIONS}
    left_out -= {*ORIGIN, *DATA}
    flags = {dest: value for dest, value in args_to_json(args).items() if dest not in left_out}
    decays = args.lr_decay_style != "constant" or args.weight_decay_incr_style != "constant" or args.lr_warmup_fraction
    if decays and args.lr_decay_iters is None:
        flags["train_iters"] = args.train_iters
    if args.rollout_ranks:  # their number is free; which groups have started is recorded in another way
        flags["rollout_ranks"] = True
    if args.exact_log_probs and args.tensor_model_parallel_size > 1:  # shards of other sizes have other sums
        flags["tensor_model_parallel_size"] = args.tensor_model_parallel_size
    return flags


def changed_flags(was: dict[str, Any], now: dict[str, Any], leave_out: Collection[str] = ()) -> list[str]:
    """Return one text for each flag that differs.

    A flag that only one of them has, because it is newer than a ledger or gone since, had or has its default.
    """
    defaults = {row[0][2:].replace("-", "_"): row[2] for group in FLAGS.values() for row in group}
    defaults |= {dest: core.default for dest, core in core_flags().items()}
    # Ledgers of earlier versions have some of the unrelated ones.
    changed = []
    for name in sorted((was.keys() | now.keys()) - {*leave_out, *UNRELATED_FLAGS}):
        if name in was and name in now:
            same = was[name] == now[name]
        else:
            same = was.get(name, now.get(name)) in (None, defaults.get(name, False))
        if not same:
            absent = "not recorded" if name in defaults or name not in was else "no flag any more"
            changed.append(f"{flag(name)} was {was.get(name, absent)} and is {now.get(name, absent)}")
    return changed


def read_ledger(args: Namespace, iteration: int) -> Content:
    """Return what earlier attempts of this run wrote into --ledger. Collective.

    Set the files aside if they are of another run, or of this one with other flags.
    """
    if not args.ledger:
        return Content()
    found = on_rank_0(content.read, Path(args.ledger))
    if found.run is None:
        return found
    changed = changed_flags(found.run, run_flags(args), ORIGIN if iteration else ())
    if not changed:
        return found
    folder = on_rank_0(set_aside, Path(args.ledger))
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    print_rank_0(f"the ledger is of a run with other flags ({changed[0]}{more}): moved to {folder}, not used")
    return Content()


def open_ledger(args: Namespace, batch: int, engine: Engine | None) -> tuple[Ledger | None, Replay]:
    """Return the ledger to write to, None without one, and the recorded batches from ``batch`` on. Collective."""
    if recorded_in(args):
        return None, open_replay(args, batch)
    if not args.ledger:
        return None, Replay(Content())
    found = read_ledger(args, batch * args.updates_per_rollout)
    next_batch = found.next_missing(batch)
    producer = dist.get_rank() if engine is not None and engine.is_lead else None
    leads, stop = dist.get_rank() == 0, args.on_save_error == "stop"
    ledger = Ledger(Path(args.ledger), found, next_batch, run_flags(args), producer, leads, stop)
    on_rank_0(ledger.begin)
    if next_batch > batch:
        print_rank_0(f"{next_batch - batch} batches after this position are in the ledger {args.ledger}: used again")
    return ledger, Replay(ledger.content)


def ledger_of_replica(args: Namespace, replica: int, is_lead: bool) -> Ledger | None:
    """Return the ledger that the trainers have opened, on a rank of an engine replica, whose lead rank appends."""
    if not args.ledger:
        return None
    found = content.read(Path(args.ledger))
    *earlier, next_batch = found.nexts
    found = replace(found, nexts=tuple(earlier))
    producer, stop = replica if is_lead else None, args.on_save_error == "stop"
    return Ledger(Path(args.ledger), found, next_batch, {}, producer, leads=False, stop=stop)


def open_replay(args: Namespace, batch: int) -> Replay:
    """Return the batches of --replay-rollouts or --train-only; GrpoError if they do not fit this run. Collective."""
    name = flag("replay_rollouts" if args.replay_rollouts else "train_only")
    directory = Path(recorded_in(args) or "")
    directory = directory / FOLDER if (directory / FOLDER).is_dir() else directory
    found = on_rank_0(content.read, directory)
    if found.run is None or not found.batches:
        raise GrpoError(f"{name} {directory}: no batches of a ledger there; give the directory of --ledger")
    now = run_flags(args)
    if args.train_only:
        changed = changed_flags({dest: found.run.get(dest) for dest in OF_DATA}, {dest: now[dest] for dest in OF_DATA})
    else:
        changed = changed_flags(found.run, now, (*ORIGIN, *DATA, "rollout_ranks"))
    if changed:
        why = "the groups have these properties" if args.train_only else "a replay repeats the run with its own flags"
        raise GrpoError(f"{name} {directory}: {why}, but {'; '.join(changed)}: give them as before")
    if args.train_only:
        # A run records the lengths that it allows, tools/data/trajectories.py the longest sequence that there is.
        longest = found.run.get("longest_sequence") or longest_sequence(Namespace(**vars(args) | found.run))
        if longest > longest_sequence(args):
            raise GrpoError(
                f"{name} {directory} has sequences of up to {longest} tokens, more than {longest_in_words(args)} = "
                f"{longest_sequence(args)}: raise them, or write a ledger with shorter ones"
            )
        found = regrouped(found, args.generation_batch_size // args.num_generations, args.train_iters)
    end = found.next_missing(batch)
    if end == batch:
        raise GrpoError(f"{name} {directory} has no batch {batch}, with which this run begins")
    print_rank_0(f"{name}: batches {batch} to {end - 1} of {directory}, without an engine")
    return Replay(found)


def regrouped(found: Content, num_groups: int, count: int) -> Content:
    """Return ``count`` batches of ``num_groups`` groups each, in the recorded order, again and again."""
    recorded = [found.batches[number] for number in sorted(found.batches)]
    keys = [key for record in recorded for key in record.groups]
    if len(keys) < num_groups:
        raise GrpoError(f"--train-only has {len(keys)} groups, fewer than the {num_groups} of a batch")
    num_kept = max(record.num_kept for record in recorded)
    order = islice(cycle(keys), count * num_groups)
    print_rank_0(f"--train-only: {len(keys)} groups, {count * num_groups / len(keys):.3g} passes over them")
    batches = [BatchRecord(n, tuple(islice(order, num_groups)), None, {}, 0, num_kept, None) for n in range(count)]
    return replace(found, batches={record.number: record for record in batches})
