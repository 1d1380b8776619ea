"""Set-up of a run before its first rollout: check the arguments, then build all parts."""

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron_grpo.algorithm.arguments import has_reference
from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.checkpointing.checkpoint_directory import stored_args
from megatron_grpo.checkpointing.run_lock import RunLock
from megatron_grpo.data.demonstrations import Demonstrations
from megatron_grpo.data.end_of_turn import describe, end_token_ids, turn_end_token_ids
from megatron_grpo.data.held_out_files import valid_paths
from megatron_grpo.data.prompts import PromptDataset, Reading
from megatron_grpo.data.routing import reward_routes, teacher_routes
from megatron_grpo.data.tokenizer import (
    ChatTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
    check_vocabulary,
)
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.environments.registry import check_environment, tools_of, videos_are_shown
from megatron_grpo.environments.rendering import TurnRenderer
from megatron_grpo.environments.threads import Sizes, default_sandboxes
from megatron_grpo.environments.tool_calls import ToolCallParser
from megatron_grpo.environments.tool_probe import probe
from megatron_grpo.estimate.dry_run import dry_run_report, fit_line, gpu_memory
from megatron_grpo.estimate.host_memory import check_host_memory
from megatron_grpo.estimate.sides import TurnSeconds
from megatron_grpo.lora import base
from megatron_grpo.lora.attach import attach, trained
from megatron_grpo.lora.files import check_same_shape, load_adapter
from megatron_grpo.models import forward
from megatron_grpo.models.arguments import share_note
from megatron_grpo.models.config import params_dtype
from megatron_grpo.models.delta_net import kernels
from megatron_grpo.observability.log_level import set_log_level
from megatron_grpo.observability.metrics import MetricsLogger, Timers, terminal_width
from megatron_grpo.observability.profiling import Profiler
from megatron_grpo.observability.provenance import banner, write_run_record
from megatron_grpo.observability.watchdog import Watchdog, phase_limits
from megatron_grpo.parallel.agreement import on_rank_0
from megatron_grpo.parallel.arguments import recompute_note
from megatron_grpo.parallel.initialize import (
    agreed_rollout_ranks,
    initialize_distributed,
    join,
    joint,
    launch_group,
    set_random_seed,
    wait_with_time_out,
    wait_without_time_out,
)
from megatron_grpo.parallel.rank_groups import replica_group
from megatron_grpo.parallel.roles import Joint
from megatron_grpo.reference import reference_model
from megatron_grpo.reference.arguments import has_own_parallel_configuration
from megatron_grpo.reference.model_args import check_teacher_tokenizer, reference_args, teacher_args
from megatron_grpo.reference.reference_model import BaseReference, ReferenceModel, SwappedReference
from megatron_grpo.reference.teacher import build_teachers
from megatron_grpo.rewards.adapters import register_adapters
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.registry import get_rewards, gold_check
from megatron_grpo.rewards.reward_models.arguments import RewardModelSpec, reward_models
from megatron_grpo.rewards.reward_models.models import check_models
from megatron_grpo.rewards.sandbox.sandbox import isolation_here
from megatron_grpo.rollout.agents.agents import Agents
from megatron_grpo.rollout.arguments import (
    has_colocated_vllm,
    has_servers,
    lora_note,
    not_measured,
    recorded_in,
    streams_of_a_rank,
)
from megatron_grpo.rollout.engine import Completion, GeneratingEngine, InterruptibleEngine, LocalEngine, OutOfMemory
from megatron_grpo.rollout.episodes import Conversing, Episodes
from megatron_grpo.rollout.evaluation import held_out_prompts
from megatron_grpo.rollout.partial import PartialSource
from megatron_grpo.rollout.sglang.server import build_sglang_servers
from megatron_grpo.rollout.source import AfterStep, RolloutSource, WholeRollouts
from megatron_grpo.rollout.speculation import check_draft_tokenizer
from megatron_grpo.rollout.stream.messages import wait_for_trainers
from megatron_grpo.rollout.stream.placed import PlacedEngines
from megatron_grpo.rollout.stream.producer import Producer
from megatron_grpo.rollout.stream.source import PlacedSource
from megatron_grpo.rollout.unfinished import DIRECTORY, PartialRollouts
from megatron_grpo.rollout.vllm.server import build_vllm_servers, build_vllm_stream
from megatron_grpo.training import train_step
from megatron_grpo.training.arguments import print_args
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.best_checkpoint import choose_again
from megatron_grpo.training.device_memory import DeviceMemory
from megatron_grpo.training.early_checks import absent_data, check_packages, check_reward_names
from megatron_grpo.training.early_exit import EarlyExit, unmark
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.entry_point import before_exit
from megatron_grpo.training.eval_only import WITHOUT_TRAINING, check_file, resolve_checkpoint
from megatron_grpo.training.mixture import Mixture
from megatron_grpo.training.offload import Offloader, needed_by_engine
from megatron_grpo.training.recorded_run import ledger_of_replica, open_ledger
from megatron_grpo.training.resolve import resolve_args, resolve_flags, resolve_origin
from megatron_grpo.training.run_rules import check_warmup
from megatron_grpo.training.saves import Saves
from megatron_grpo.training.split import resolve_split
from megatron_grpo.training.trainer import Trainer
from megatron_grpo.training.warm_up import WarmUp
from megatron_grpo.utils import launch, progress
from megatron_grpo.utils.arguments import Arguments, args_to_json, replaced, resolved
from megatron_grpo.utils.batch_sizes import batch_arithmetic, trainer_ranks
from megatron_grpo.utils.descriptors import raise_limit
from megatron_grpo.utils.device import unseen_gpus
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.utils.rules import flag
from megatron_grpo.vision.images import ImageReader, RowImages
from megatron_grpo.vision.images import attach as attach_images
from megatron_grpo.weights import families, hf


def setup(args, model_provider: Callable, forward_step: Callable) -> Trainer | None:
    """Run all start-up checks, then return the trainer; print a report and return None with --dry-run.

    On a rank of an engine (--rollout-ranks) generate until the trainer has ended, then return None.
    """
    with progress.phase("start"):
        return _setup(args, model_provider, forward_step)


def _setup(args, model_provider: Callable, forward_step: Callable) -> Trainer | None:
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if args.rollout_ranks == "auto":
        args = replaced(args, rollout_ranks=_split(args, launched))
    world_size = trainer_ranks(args, launched)
    watchdog = None if args.dry_run else _join(args, world_size)
    progress.step("origin")
    args, found = _read_origin(args)
    resume = found is not None
    flags, args = args, resolve_args(args, world_size)
    if args.eval_only:
        args = replaced(args, **WITHOUT_TRAINING, explicit=args.explicit - WITHOUT_TRAINING.keys())
    ref_args = reference_args(args) if args.with_reference else None
    teach_args = teacher_args(args)
    if found is not None and not args.eval_only:
        _check_position(args, found)
    if args.dry_run:
        check_reward_names(args)
        if args.environment:
            check_environment(args.environment)
        if absent := _not_here(args):
            print_rank_0(f"not on this machine, and not read: {', '.join(absent)}\n")
        print_rank_0(dry_run_report(args, world_size))
        if gpu := gpu_memory(args):
            print_rank_0(fit_line(partial(_changed, flags, world_size), gpu))
        return None
    set_log_level(args.log_level)
    roles = joint()
    progress.step("data")
    inputs = _read_inputs(args, teach_args, resume)
    if not args.watchdog_timeout:
        wait_with_time_out()
    args = resolved(args, partial(resolve_data, inputs=inputs), check_warmup)
    _check_destinations(replaced(args, save=flags.save))
    if torch.cuda.is_available() and (trainers := _trainers_here(world_size)):
        check_host_memory(args, trainers)

    lock = _lock_save_directory(args, resume)

    progress.step("process groups")
    initialize_distributed(args)
    if roles is not None and roles.role.replica is not None:
        _produce(args, roles, inputs)
        return None
    if args.save:
        checkpoint.check_shared(args.save)
    set_random_seed(args.seed)
    background = checkpoint.start_background_saves() if args.async_save else None
    if background is not None:
        before_exit(background.settle)  # after an error, too: the checkpoint in hand is whole in a moment
    _print_start(args, world_size, inputs, lock)

    progress.step("model")
    memory = DeviceMemory(args)
    OutOfMemory.explain = memory.explanation
    image_store = None
    with memory.phase("the construction of model and optimizer"):
        if args.eval_only:
            model, lora_base = _build_policy(args, model_provider, resume, origin=False)
            _start_from_adapter(args, model, resume)
            optimizer = scheduler = reference = None
        else:
            parts = build_model_and_optimizer(args, model_provider, resume, ref_args)
            model, optimizer, scheduler, reference, lora_base = parts
        memory.model, memory.optimizer = model, optimizer
        if inputs.images is not None:  # an agent shows the images of a row itself, in its messages
            image_store = attach_images(model, inputs.images, inputs.images_of, with_rows=not args.agent)
        teacher = build_teachers(args, teach_args, model_provider, inputs.train)
    if lora_base is not None:
        args = replaced(args, lora_base=lora_base)  # for checkpoints and the record of the run
    iteration, position = 0, dict[str, Any]()
    if resume and args.eval_only:
        checkpoint.load_weights(args.load, model)
        iteration = found or 0
    elif resume:
        progress.step("checkpoint")
        with memory.phase("the load of the checkpoint"):
            iteration, position = checkpoint.load_checkpoint(args, model, optimizer, scheduler)
        _check_unfinished(args, position)
        print_rank_0(f"resumed from {args.load} at iteration {iteration}")
    elif args.load and not args.finetune:  # not with --eval-only, which needs it
        print_rank_0(f"{args.load} holds no checkpoint yet: starting from update 0")
    warm_up, mixture, first_row = None, None, len(inputs.train)
    if inputs.demonstrations is not None and args.sft_iters:
        warm_up = WarmUp(args, inputs.demonstrations, optimizer, position.get("sft", {}), iteration > 0, first_row)
    if inputs.demonstrations is not None and args.sft_loss_type:
        state = position.get("mixture", {})
        mixture = Mixture(args, inputs.demonstrations, inputs.train, state, first_row)
    sampler = inputs.train.sampler()
    rollouts = position.get("rollouts", 0)

    bad_updates = BadUpdates(args.on_bad_update, args.bad_update_factor, args.save)
    bad_updates.load_state_dict(position.get("bad_updates", {}))
    state_offloader = Offloader(model, optimizer, False, args.offload_gradients, args.offload_optimizer)
    weight_offloader = Offloader(model, optimizer, args.offload_model, False, False)
    progress.step("engine")
    early_exit = EarlyExit(args.exit_duration_in_mins, args.exit_signal_handler, args.exit_grace_seconds, args.save)
    before_exit(early_exit.close)
    name = f"{args.rollout_engine} {args.vllm_mode}" if args.rollout_engine == "vllm" else args.rollout_engine
    kind = "none, the rollouts are recorded" if recorded_in(args) else name
    print_rank_0("the engines start on ranks of their own" if roles else f"starting the engine: {kind}")
    began = time.monotonic()
    engine: LocalEngine | PlacedEngines | None = None
    if roles is not None:
        engine = memory.engine = placed = PlacedEngines(args, roles, inputs.train, sampler, early_exit.check_wait)
        before_exit(placed.close)
        ledger, replay = open_ledger(args, rollouts, placed)
        placed.start()
    else:
        if not recorded_in(args):
            with (
                memory.phase("the start of the engine"),
                _free_for_colocated_engine(args, state_offloader, weight_offloader),
            ):
                local = build_engine(args, model, inputs.tokenizer)
                memory.engine = local
                if args.environment:
                    local = cast(LocalEngine, build_episodes(args, local, inputs))
                engine = memory.engine = local
        ledger, replay = open_ledger(args, rollouts, engine)
    print_rank_0(f"the engine has started in {time.monotonic() - began:.0f} s")
    progress.step("rewards")
    scorer = build_scorer(args, inputs.reward_models) if engine is not None and engine.is_lead else None
    held_out = held_out_prompts(args, inputs.valid)
    progress.step("logs")
    newest = iteration or (0 if warm_up is None else -1 - warm_up.left)  # row of metrics
    logger = _open_logs(args, newest)
    before_exit(logger.end)
    timers = Timers(memory.phase, logger.show_phase)
    common = {"args": args, "dataset": inputs.train, "sampler": sampler, "timers": timers}
    common |= {"ledger": ledger, "replay": replay}
    source = _build_source(args, engine, common, scorer, inputs.tokenizer, partial(_watch, logger, early_exit))
    if position:
        source.resume(position, partial(checkpoint.subfolder, args.load, DIRECTORY))
    lifecycle = EngineLifecycle(args, model, forward_step, engine, state_offloader, weight_offloader, timers, memory)
    saves = Saves(
        args=args,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        reference=reference,
        source=source,
        lifecycle=lifecycle,
        timers=timers,
        logger=logger,
        early_exit=early_exit,
        lock=lock,
        background=background,
    )
    return Trainer(
        args=args,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        reference=reference,
        teacher=teacher,
        source=source,
        lifecycle=lifecycle,
        tokenizer=inputs.tokenizer,
        images=image_store,
        held_out=held_out,
        logger=logger,
        timers=timers,
        device_memory=memory,
        profiler=Profiler(args, dist.get_rank(), newest if warm_up is not None and warm_up.left else iteration),
        watchdog=watchdog,
        warm_up=warm_up,
        mixture=mixture,
        bad_updates=bad_updates,
        early_exit=early_exit,
        saves=saves,
        iteration=iteration,
        tokens=position.get("tokens", 0),
    )


def _split(args, launched: int) -> int:
    """Return --rollout-ranks auto as a number."""

    def calculate() -> int:
        return resolve_split(replaced(args, **_resume_own_launch(args)), launched)

    if args.dry_run or launched == 1:
        return calculate()
    progress.step("other ranks")
    return agreed_rollout_ranks(calculate, args.distributed_timeout_minutes)


def _changed(args: Arguments, world_size: int, changes: dict[str, Any]) -> Arguments:
    """Return the arguments of a run whose flags also make these ``changes``; GrpoError if the run would be refused."""
    return resolve_args(replaced(args, **changes, explicit=args.explicit | changes.keys()), world_size)


def _join(args, world_size: int) -> Watchdog | None:
    """Join the other ranks, once all flags are right that do not depend on a checkpoint, which rank 0 reads later.

    Return the watchdog of this rank, which has started; None without one. From here on, ranks wait for rank 0 without a
    time-out: it reads checkpoints and data.
    """
    if args.load or args.pretrained_checkpoint:
        flags = resolve_flags(args, world_size)
    else:
        flags = resolve_args(resolve_origin(args, resume=False), world_size)
    check_packages(flags)
    workers = flags.reward_workers + (flags.environment_workers if flags.environment else 0)
    raise_limit(world_size + flags.rollout_ranks, streams_of_a_rank(flags, world_size), workers)
    progress.step("other ranks")
    join(args)
    wait_without_time_out()
    roles = joint()
    if not args.watchdog_timeout or (roles is not None and roles.role.replica is not None):
        return None
    watchdog = Watchdog(phase_limits(flags), args.save).start()
    before_exit(watchdog.close)
    return watchdog


def _read_origin(args) -> tuple[Any, int | None]:
    """Return the arguments with what follows from the run's origin, and the iteration that it resumes from, or None.

    Collective: rank 0 verifies the checkpoints and reads config.json, and other ranks take the arguments from it. They
    agree, even if a file server shows them different files for some seconds. Raises GrpoError on a host that does not
    have what rank 0 has read.
    """

    def read() -> tuple[int | None, dict[str, Any], dict[str, Any]]:
        started = {} if args.eval_only else _resume_own_launch(args)
        if started:
            print_rank_0(f"this launch has saved in --save {args.save} before: the run goes on from there")
        own = replaced(args, **(resolve_checkpoint(args) if args.eval_only else started))
        found = checkpoint.latest_iteration(own.load) if own.load and not own.finetune else None
        own = replaced(own, **_start_checkpoints(own, found is not None))
        own = resolve_origin(own, found is not None)
        if own.eval_only and own.save:
            check_file(Path(own.save))
        if not own.eval_only:
            _check_save_directory(own, found is not None)
        changed = {dest: value for dest, value in vars(own).items() if value is not getattr(args, dest)}
        return found, changed, _directories(own, found is not None)

    found, changed, directories = on_rank_0(read, group=None if args.dry_run else launch_group())
    roles = joint()
    for name, directory in directories.items():
        if roles is None or roles.role.replica is None or name == "--tokenizer-model":  # engines need no weights
            checkpoint.check_seen(name, directory)
    return replaced(args, **changed), found


def _start_checkpoints(args, resume: bool) -> dict[str, str]:
    """Return the checkpoints from which a run starts as paths, because the run that saves them may go on (`pinned`).

    A resume takes those of the first start, for a reference model and for the base of an adapter.
    """
    found: dict[str, str] = {}
    if args.dry_run:  # it reads no weights, and needs no checkpoint
        return found
    if args.finetune and args.load:
        found["load"] = checkpoint.pinned(args.load)
    dests = [dest for dest in ("pretrained_checkpoint", "ref_load") if getattr(args, dest)]
    if not dests or (resume and not (has_reference(args) or args.lora_rank)):
        return found
    stored = checkpoint.read_checkpoint_args(args.load) if resume else {}
    for dest in dests:
        root = Path(getattr(args, dest))
        before = [stored[key] for key in (dest, "load") if stored.get(key)]
        same = [path for path in map(Path, before) if path.parent.resolve() == root.resolve()]
        first = [str(path) for path in same if path.name.startswith("iter_")]
        found[dest] = first[0] if first else checkpoint.pinned(root)
    return found


def _directories(args, resume: bool) -> dict[str, Any]:
    """Return the directories on this host from which trainers read weights and the tokenizer, by flag."""
    dests = "pretrained_checkpoint load_hf ref_load ref_load_hf tokenizer_model".split()
    found: dict[str, Any] = {flag(dest): getattr(args, dest) for dest in dests}
    for source, directory in teacher_routes("--teacher-load-hf", args.teacher_load_hf).items():
        found["--teacher-load-hf" + (f" {source}" if source else "")] = directory
    if resume or args.finetune:
        found = {"--load": checkpoint.find(args.load)[1]} | found
    if resume and not (has_reference(args) or args.lora_rank):
        del found["--pretrained-checkpoint"]  # the reference model's, or an adapter's base
    return {name: str(path) for name, path in found.items() if path and Path(path).exists()}


def _not_here(args) -> list[str]:
    """Return the flags, with their values, that name data files or a tokenizer which this machine does not have."""
    found = absent_data(args)
    if args.tokenizer_model and not Path(args.tokenizer_model).exists():
        found.append(f"--tokenizer-model {args.tokenizer_model}")
    return found


@dataclass(frozen=True)
class Inputs:
    """Tokenizer, data and rewards of a run, which are read and checked before the model is built."""

    tokenizer: Tokenizer
    images: ImageReader | None  # of a vision-language model
    train: PromptDataset
    valid: PromptDataset | None
    demonstrations: Demonstrations | None  # with --sft-iters or --sft-loss-type
    reward_models: Mapping[str, RewardModelSpec]
    isolation: str | None  # of generated code, with the reward "code"
    end_token_ids: tuple[int, ...]  # of completions
    started: str  # time of the run's first launch, which templates with a date print; ISO 8601

    def images_of(self, row: int) -> RowImages:
        """Return the images of a row: those of the demonstrations follow the training prompts."""
        if row < len(self.train) or self.demonstrations is None:
            return self.train.images_of(row)
        return self.demonstrations.images_of(row - len(self.train))


def _read_inputs(args, teach_args, resume: bool) -> Inputs:
    """Return the inputs of a run, all of them checked."""
    models = reward_models(args)
    names = [name for name in args.reward_funcs if name not in models]
    register_adapters(args.reward_adapter)
    get_rewards(names, vars(args))
    check_models(models, args.reward_model_max_tokens)
    isolation = isolation_here(args.code_sandbox == "strict") if "code" in args.reward_funcs else None
    # The ranks' clocks may be on two sides of midnight.
    started = on_rank_0(_started, args, resume, group=launch_group())
    tokenizer = build_tokenizer(args, datetime.datetime.fromisoformat(started))
    images = ImageReader(args, tokenizer.special_tokens) if args.vision_config else None
    check_vocabulary(tokenizer, args.vocab_size, images.tokens if images else ())
    ends = end_token_ids(args, tokenizer)
    for own in teach_args:
        check_teacher_tokenizer(own.load_hf, tokenizer)
    check_draft_tokenizer(args, tokenizer)
    tools = partial(tools_of, default=args.environment)
    parts: dict[str, Any] = {"tools": tools, "images": images}
    demonstrations = None
    if args.sft_iters or args.sft_loss_type:
        kind = partial(Demonstrations, end_token_ids=turn_end_token_ids(args, tokenizer))
        demonstrations = _read_data(kind, args.sft_data_path, tokenizer, args, **parts)
    parts |= {"check_gold": gold_check(names, vars(args))}
    valid = None
    if args.valid_data_path:
        valid = _read_data(PromptDataset, valid_paths(args.valid_data_path), tokenizer, args, training=False, **parts)
    # An evaluation alone needs prompts of training only to probe the engine.
    if args.eval_only and valid:
        train = valid
    else:
        train = _read_data(PromptDataset, args.train_data_path, tokenizer, args, **parts)
    return Inputs(tokenizer, images, train, valid, demonstrations, models, isolation, ends, started)


def _started(args, resume: bool) -> str:
    """Return the time of the run's first launch: the prompts of its unfinished episodes have this date."""
    stored = stored_args(checkpoint.find(args.load)[1]) if resume else {}
    return stored.get("started") or datetime.datetime.now().isoformat()


def resolve_data(args, inputs: Inputs) -> dict[str, Any]:
    """Return what tokenizer and data say: end tokens, date, what the engine must do, the updates of --num-epochs."""
    datasets = [data for data in (inputs.train, inputs.valid) if data]
    shown = inputs.images is not None and args.environment is not None and videos_are_shown()
    # The calls of an agent can have stop words.
    decodes = args.engine_decodes or args.agent is not None or any(data.engine_decodes for data in datasets)
    return {
        "end_token_ids": inputs.end_token_ids,
        "started": inputs.started,
        "engine_decodes": decodes,
        "engine_sees_videos": shown or any(data.has_videos for data in datasets),
        "train_iters": _train_iters(args, len(inputs.train)) if args.train_iters is None else args.train_iters,
    }


def _read_data[Data: PromptDataset](kind: Callable[..., Data], *arguments, **settings) -> Data:
    """Return a data set that rank 0 has read and checked; the arguments are those of its ``kind``. Collective."""
    mine: list[Data] = []

    def read() -> Reading | None:
        data = kind(*arguments, **settings)
        data.first(1)  # a file whose rows are checked when they are read fails here if its first row is bad
        mine.append(data)
        return data.reading() if launch_group().size() > 1 else None

    reading = on_rank_0(read, group=launch_group())
    return mine[0] if mine else kind(*arguments, **settings | {"read_by_rank_0": reading})


def _train_iters(args, num_prompts: int) -> int:
    """Return the number of updates in --num-epochs."""
    rollouts = int(args.num_epochs * num_prompts * args.num_generations / args.generation_batch_size)
    if rollouts == 0:
        raise GrpoError(
            f"--num-epochs {args.num_epochs} over {num_prompts} prompts is less than one rollout of "
            f"{args.generation_batch_size // args.num_generations} prompts: give more data or a smaller batch"
        )
    return rollouts * args.updates_per_rollout


def _print_start(args, world_size: int, inputs: Inputs, lock: RunLock | None) -> None:
    """Print what a run is, on rank 0: versions, arguments, batch sizes, and what follows from the flags."""
    print_rank_0(banner(args))
    if args.experimental_attention_variant:
        print_rank_0(f"gated delta nets: {kernels(params_dtype(args))}")
    if lock is not None and lock.taken_over:
        print_rank_0(lock.taken_over)
    print_args(args, everything=args.print_arguments)
    if not args.eval_only:
        for line in batch_arithmetic(args, world_size).lines(terminal_width()):
            print_rank_0(line)
    print_rank_0(f"completions end at {describe(args.end_token_ids, inputs.tokenizer)}")
    for note in filter(None, (not_measured(args), lora_note(args), recompute_note(args), share_note(args))):
        print_rank_0(note)
    if unseen := unseen_gpus():
        print_rank_0(f"note: this run uses no GPU: {unseen}")
    if inputs.isolation:
        print_rank_0(f"generated code is isolated by {inputs.isolation}")


def _open_logs(args, iteration: int) -> MetricsLogger:
    """Return the logger of metrics; write the record of the run into --save."""
    try:
        if args.save and dist.get_rank() == 0:
            write_run_record(args, args.explicit, iteration)
            unmark(args.save)
        logger = MetricsLogger(args, dist.get_rank(), iteration if args.eval_only else args.train_iters, iteration)
        if args.save and dist.get_rank() == 0:
            choose_again(args, after=iteration)
        return logger
    except OSError as error:
        raise GrpoError(f"the files of the run cannot be written to {args.save}: {error}; make room there") from error


def _trainers_here(trainers: int) -> int:
    """Return how many of the ranks of this host train: trainers come first."""
    first = launch.rank() - int(os.environ.get("LOCAL_RANK", "0"))
    return max(0, min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), trainers - first))


def _produce(args, roles: Joint, inputs: Inputs) -> None:
    """Run an engine replica on this rank until the trainer ends it."""
    assert roles.role.replica is not None
    found = build_vllm_stream(args, roles.role) if has_servers(args) else build_engine(args, [], inputs.tokenizer)
    engine = cast(InterruptibleEngine, build_episodes(args, found, inputs) if args.environment else found)
    scorer = build_scorer(args, inputs.reward_models) if engine.is_lead else None
    wait_for_trainers(roles.store)
    ledger = ledger_of_replica(args, roles.role.replica, engine.is_lead)
    Producer(args, engine, scorer, inputs.tokenizer, inputs.train, inputs.valid, roles, ledger).run()
    engine.close()
    if ledger is not None:
        ledger.close()
    if scorer is not None:
        scorer.close()


def _check_unfinished(args, position: dict[str, Any]) -> None:
    """Raise GrpoError if the flags do not continue the unfinished completions of the checkpoint at ``position``."""
    if not position or recorded_in(args):
        return
    remedy = "load only the weights with --finetune"
    if args.rollout_ranks and "stream" not in position:
        raise GrpoError(f"{args.load} was saved without --rollout-ranks: leave it out, or {remedy}")
    if "stream" in position and not args.rollout_ranks:
        raise GrpoError(
            f"{args.load} holds completions of engines on ranks of their own: add --rollout-ranks as before, "
            f"or {remedy}"
        )
    if position.get("partial") and not args.partial_rollouts:
        staleness = position["partial"]["max_staleness"]
        raise GrpoError(
            f"{args.load} holds unfinished completions: add --partial-rollouts --max-staleness {staleness}, or {remedy}"
        )
    was = position.get("updates_per_rollout")  # earlier versions did not note it
    if was is not None and (args.rollout_ranks or args.partial_rollouts) and was != args.updates_per_rollout:
        raise GrpoError(
            f"{args.load} holds unfinished completions, whose age is counted in rollouts of {was} updates, and now "
            f"there are {args.updates_per_rollout} (--steps-per-generation x --num-iterations): give both as before, "
            f"or {remedy}"
        )


def _build_source(
    args,
    engine: LocalEngine | PlacedEngines | None,
    common: dict[str, Any],
    scorer: RewardPool | None,
    tokenizer: Tokenizer,
    watch: Callable[[LocalEngine], AfterStep],
) -> RolloutSource:
    """Return the source of the run's batches; ``common``: fields that all sources have."""
    if engine is None:
        return RolloutSource(**common)
    if isinstance(engine, PlacedEngines):
        return PlacedSource(engine=engine, **common)
    common |= {"engine": engine, "scorer": scorer, "tokenizer": tokenizer, "watch": partial(watch, engine)}
    if not args.partial_rollouts:
        return WholeRollouts(**common)
    num_groups = args.generation_batch_size // args.num_generations
    keeps = args.weight_update == "keep"
    groups = PartialRollouts(engine, num_groups, args.num_generations, args.max_staleness, keeps)
    return PartialSource(groups=groups, **common)


def _watch(logger: MetricsLogger, early_exit: EarlyExit, engine: LocalEngine) -> AfterStep:
    """Return the function that a rollout calls after each of its steps: show the progress, and look for signals."""
    show = logger.rollout_progress(engine.num_replicas)

    def after_step(completions: Sequence[Completion], under_way: int) -> None:
        show(completions, under_way)
        early_exit.check_rollout(engine)

    return after_step


def _resume_own_launch(args) -> dict[str, Any]:
    """Return --load for --save if an earlier attempt of this launch saved there: torchrun has started the run again."""
    if not args.save or not launch.wrote(args.save) or checkpoint.latest_iteration(args.save) is None:
        return {}
    if args.load and Path(args.load).resolve() == Path(args.save).resolve() and not args.finetune:
        return {}
    found = {"load": args.save, "finetune": False, "no_load_optim": False, "no_load_rng": False}
    # --load is of the first attempt; a reference model still needs its weights.
    return found | ({"pretrained_checkpoint": args.load} if args.finetune else {})


def _check_save_directory(args, resume: bool) -> None:
    """Raise GrpoError if --save holds logs and checkpoints of another run, which this run would replace."""
    there = checkpoint.latest_iteration(args.save) if args.save else None
    if there is not None and not (resume and Path(args.load).resolve() == Path(args.save).resolve()):
        raise GrpoError(
            f"--save {args.save} holds the checkpoint of iteration {there} of another run: add --load {args.save} "
            "to resume it, or choose another directory"
        )


def _lock_save_directory(args, resume: bool) -> RunLock | None:
    """Return rank 0's lock on --save until the end of this process; GrpoError if another run writes there.

    Collective.
    """
    mine: list[RunLock] = []

    def lock() -> None:
        mine.append(RunLock(args.save))
        before_exit(mine[0].release)
        _check_save_directory(args, resume)  # again: a run that has just ended may have written its first checkpoint

    if args.save:
        on_rank_0(lock, group=launch_group())
    return mine[0] if mine else None


def _check_position(args, iteration: int) -> None:
    """Raise GrpoError if the checkpoint of an iteration is not at the start of a rollout.

    From such a position, saves, evaluations and the end of the run would never be due.
    """
    per_rollout = args.updates_per_rollout
    if iteration % per_rollout:
        raise GrpoError(
            f"{args.load} holds a checkpoint of iteration {iteration}, which is not a multiple of the updates per "
            f"rollout ({per_rollout} = --steps-per-generation {args.steps_per_generation} x --num-iterations "
            f"{args.num_iterations}): give both as before, or load only the weights with --finetune"
        )


def _check_destinations(args) -> None:
    """Raise GrpoError for output directories without write access."""
    export = Path(args.save_hf) if args.save_hf else None
    if export:
        inputs = args.load_hf, args.pretrained_checkpoint, args.load, args.save, args.ref_load, args.ref_load_hf
        teachers = teacher_routes("--teacher-load-hf", args.teacher_load_hf).values()
        hf.check_replaceable("--save-hf", export, (*inputs, *teachers))
    places = {
        "--weight-sync-dir": args.weight_sync_dir,
        "--save": args.save,
        "--ledger": args.ledger,
        "--save-hf": export and export.parent,
        "--save-adapter": args.save_adapter,
        "--tensorboard-dir": args.tensorboard_dir,
        "--wandb-save-dir": args.wandb_save_dir,
        "--swanlab-save-dir": args.swanlab_save_dir,
    }
    for name, directory in places.items():
        if not directory:
            continue
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GrpoError(
                f"{name} {directory} cannot be created: {error.strerror}; choose another directory"
            ) from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise GrpoError(f"{name} {directory} cannot be written: correct its mode, or choose another directory")


def build_model_and_optimizer(args, model_provider: Callable, resume: bool, ref_args):
    """Return model, optimizer, scheduler and reference model with initial weights, which a resume overwrites.

    Also return the identity of the base weights of an adapter.
    """
    updated = checkpoint.updated_reference(args.load) if resume and ref_args is not None else None
    of_policy = ref_args is not None and not (args.ref_load or args.ref_load_hf or updated)
    model, lora_base = _build_policy(args, model_provider, resume, origin=of_policy)
    reference = None if ref_args is None else _build_reference(args, ref_args, model_provider, model, updated)
    _start_from_adapter(args, model, resume)  # after the reference, which has the base's modules in a resume, too
    model, optimizer, scheduler = train_step.setup_optimizer(args, model)
    return model, optimizer, scheduler, reference, lora_base


def _build_policy(args, model_provider: Callable, resume: bool, origin: bool) -> tuple[forward.Model, dict | None]:
    """Return the model with initial weights, which a resume overwrites, and the identity of an adapter's base weights.

    An adapter is the identity before `_start_from_adapter`. ``origin``: a reference model needs the initial weights.
    """
    model = forward.build_model(args, model_provider)
    start = args.pretrained_checkpoint or (args.load if args.finetune else None)
    # A resume loads the policy's weights; the initial weights are then needed only for the reference model, or as the
    # base of the adapter that it loads.
    if not resume or args.lora_rank or origin:
        _load_initial_weights(args, model, start, resume)
    lora_base = None
    if args.lora_rank:
        lora_base = base.describe(args, model, start or args.load_hf)
        if resume:
            base.check(args, lora_base, on_rank_0(checkpoint.read_checkpoint_args, args.load))
        attach(args, model)
    return model, lora_base


def _start_from_adapter(args, model: forward.Model, resume: bool) -> None:
    """Load --load-adapter into the policy of a new run."""
    if args.load_adapter and not resume:
        load_adapter(args, model, args.load_adapter)


def _load_initial_weights(args, model: forward.Model, start: str | None, resume: bool) -> None:
    """Load the checkpoint ``start`` or --load-hf; without both, a new run keeps its random weights."""
    if start:
        checkpoint.load_weights(start, model)
    elif args.load_hf:
        hf.load_hf(model, args, args.load_hf)
    elif resume:
        flag, other = ("--lora-rank", "") if args.lora_rank else ("--beta > 0", ", or --ref-load for the reference")
        raise GrpoError(
            f"resuming with {flag} needs the weights that the run started from: give the same --pretrained-checkpoint "
            f"or --load-hf as before{other}"
        )


def _build_reference(args, ref_args, model_provider: Callable, model: forward.Model, updated: Path | None):
    """Return the reference model.

    With adapters it is the policy without them. Otherwise its weights are the updated ones of the checkpoint, those of
    --ref-load or --ref-load-hf, or a copy of the policy.
    """
    if args.lora_rank:
        return _build_base_reference(args, model)

    def load(chunks: forward.Model) -> None:
        if args.ref_load:
            checkpoint.load_weights(args.ref_load, chunks)
        else:
            hf.load_hf(chunks, ref_args, args.ref_load_hf)

    reference: ReferenceModel | SwappedReference
    own_origin = not updated and (args.ref_load or args.ref_load_hf)
    if has_own_parallel_configuration(args):
        reference = ReferenceModel(ref_args, model_provider, load if own_origin else None)
        if not own_origin and not updated:
            reference.update_from(args, model)
    else:
        policy = reference_model.HostWeights(model) if own_origin else None
        if own_origin:
            load(model)
        reference = SwappedReference(ref_args, model)
        if policy is not None:
            policy.copy_to(model)
    if updated:
        reference.load(updated, model)
    return reference


def _build_base_reference(args, model: forward.Model) -> BaseReference:
    """Return the reference of a policy with adapters, with the adapter of --reference-adapter."""
    if not args.reference_adapter:
        return BaseReference(args, model)
    check_same_shape(args, args.reference_adapter)
    policy = [tensor.detach().clone() for tensor in trained(model)]
    load_adapter(args, model, args.reference_adapter)
    reference = BaseReference(args, model)
    for tensor, own in zip(trained(model), policy, strict=True):
        tensor.data.copy_(own)
    return reference


@contextlib.contextmanager
def _free_for_colocated_engine(args, *offloaders: Offloader) -> Iterator[None]:
    """Context in which vLLM's share of the memory is free, because tensors of --offload-* are on the host."""
    if not has_colocated_vllm(args):
        yield
        return
    for offloader in offloaders:
        offloader.to_host(needed_by_engine(args, None, margins=1))
    yield
    for offloader in offloaders:
        offloader.to_device()


def build_scorer(args, models: Mapping[str, RewardModelSpec]) -> RewardPool:
    """Return the pool of processes that compute the rewards."""
    return RewardPool(
        args.reward_funcs,
        args.external_plugins or [],
        args.reward_workers,
        args.reward_timeout,
        args.reward_retries,
        args_to_json(args),
        reward_routes(args.reward_routing, args.reward_funcs),
        args.reward_clip,
        models,
        args.reward_weights,
    )


def build_episodes(args, engine: GeneratingEngine, inputs: Inputs) -> Conversing:
    """Return ``engine`` with the environments or agents of a run; the lead rank of each replica runs them."""
    tokenizer, images = inputs.tokenizer, inputs.images
    # Turns of agents do not wait: their programs would take it for a server without an answer.
    kind = Agents if args.agent else partial(Episodes, costs=TurnSeconds(args), resumes=not args.rollout_ranks)
    # One rank sends the requests of a replica of servers; the others have none.
    group = None
    if not has_servers(args):
        assert engine.replica is not None
        group = replica_group(engine.replica, engine.num_replicas, backend="gloo")
    if not engine.is_lead:
        return kind(engine, None, None, None, tokenizer, args, group, images)
    pool = EnvironmentPool(
        [args.environment],
        args.external_plugins or [],
        args.environment_workers,
        args.environment_timeout,
        args.environment_retries,
        Sizes(args.environment_threads, args.environment_sandboxes or default_sandboxes(args.environment_workers)),
    )
    before_exit(pool.close)
    parser = None
    renderer = TurnRenderer(cast(ChatTokenizer, tokenizer), turn_end_token_ids(args, tokenizer))
    if args.tool_call_parser:
        backend = cast(HuggingFaceTokenizer, tokenizer).backend
        parser = ToolCallParser(args.tool_call_parser, backend, args.reasoning_parser)
        if args.tool_role == "tool":  # otherwise the template shows no calls
            probe(parser, renderer, backend, args.chat_template_kwargs)
    return kind(engine, pool, renderer, parser, tokenizer, args, group, images)


def build_engine(args, model: forward.Model, tokenizer) -> LocalEngine:
    """Return the engine of --rollout-engine and --vllm-mode."""
    match args.rollout_engine, args.vllm_mode:
        case "vllm", "colocate":
            from megatron_grpo.rollout.vllm.colocate import VllmColocate  # the import takes seconds: after all checks

            return VllmColocate(args, families.for_args(args).hf_from_args(args))
        case "megatron", _:
            from megatron_grpo.rollout.megatron.engine import MegatronEngine

            return MegatronEngine(args, model, tokenizer)
        case "vllm", "server":
            return build_vllm_servers(args)
        case "sglang", _:
            return build_sglang_servers(args)
    raise GrpoError(f"--rollout-engine {args.rollout_engine} has no --vllm-mode {args.vllm_mode}")
