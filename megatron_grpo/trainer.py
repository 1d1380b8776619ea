"""What a run builds once and keeps: model, engine, data, rewards, logs, and where in the run it is."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_grpo import checkpointing, training
from megatron_grpo.algorithm.advantages import GroupAdvantages
from megatron_grpo.arguments import print_args
from megatron_grpo.batch_arithmetic import batch_arithmetic
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.prompts import Prompt, PromptDataset, PromptSampler
from megatron_grpo.data.tokenizer import build_tokenizer, check_vocabulary
from megatron_grpo.dry_run import dry_run_report
from megatron_grpo.errors import GrpoError
from megatron_grpo.initialize import banner, initialize_distributed, print_rank_0, set_random_seed
from megatron_grpo.metrics import MetricsLogger, Timers
from megatron_grpo.offload import Offloader
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.registry import get_rewards, load_plugins
from megatron_grpo.rollout.collect import collect_rollout
from megatron_grpo.rollout.engine import Engine, Sampling
from megatron_grpo.validation import check_warmup, merge_architecture, validate_args
from megatron_grpo.weights import families, hf


@dataclass
class Trainer:
    """The parts of a run and its position in it; the algorithm that uses them is ``pretrain_grpo.train``."""

    args: object
    model: training.Model
    optimizer: object
    scheduler: object
    reference: training.ReferencePolicy | None
    offloader: Offloader | None
    engine: Engine
    tokenizer: object
    dataset: PromptDataset
    sampler: PromptSampler
    valid_prompts: list[Prompt]
    scorer: RewardPool | None
    logger: MetricsLogger
    timers: Timers
    iteration: int = 0
    synced_iteration: int = 0  # whose weights the engine holds
    first_iteration: int = 0  # where this process began: above 0 after a resume
    rollouts: int = 0
    tokens: int = 0
    reward_failures: int = 0  # in the newest rollout
    failed_rewards: set[str] = field(default_factory=set)
    started: float = field(default_factory=time.monotonic)

    # ---- rollouts

    def next_prompts(self) -> list[Prompt]:
        """The prompts of the next rollout, in an order that every rank knows."""
        count = self.args.generation_batch_size // self.args.num_generations
        self.rollouts += 1
        return [self.dataset[i] for i in self.sampler.next(count)]

    def rollout_seed(self) -> int:
        """The sampling seed of the present rollout: a function of ``--seed`` and the rollout's number alone."""
        return int(np.random.SeedSequence([self.args.seed, self.rollouts]).generate_state(1)[0] // 2)

    @property
    def sampling(self) -> Sampling:
        """How training completions are sampled, with engine log-probabilities in the share of rollouts asked for."""
        rate = self.args.mismatch_sample_rate
        asked = int(self.rollouts * rate) > int((self.rollouts - 1) * rate)
        return replace(_sampling(self.args), log_probs=asked)

    @property
    def eval_samplings(self) -> list[tuple[str, Sampling, int]]:
        """(name, sampling, completions per prompt) of each kind of evaluation."""
        sampled = _sampling(self.args)
        kinds = [("greedy", replace(sampled, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0), 1)]
        if self.args.eval_num_generations:
            kinds.append(("sampled", sampled, self.args.eval_num_generations))
        return kinds

    def collect(self, prompts: list[Prompt], num_generations: int, sampling: Sampling, seed: int) -> RolloutBatch:
        """Completions of ``prompts`` with their rewards, on every rank; what could not be scored is told once a
        function.
        """
        batch, self.reward_failures = collect_rollout(
            self.engine, prompts, num_generations, sampling, self.scorer, self.tokenizer, seed, self.timers
        )
        for failure in self.scorer.failures if self.scorer is not None else []:
            if failure.reward not in self.failed_rewards:
                self.failed_rewards.add(failure.reward)
                print(
                    f"[rank {dist.get_rank()}] reward {failure.reward} could not score {failure.source}: "
                    f"{failure.reason} (completion {failure.completion!r}); such completions count as not scored, "
                    "see reward/failures",
                    flush=True,
                )
        return batch

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Within, what --offload-* name lies in host memory, and its place on the device is the engine's."""
        if self.offloader is not None:
            # A gather of parameters that is still under way would write into memory that is no longer there.
            with self.timers("offload"), training.parameters_complete(self.args, self.model):
                self.offloader.to_host()
        yield
        if self.offloader is not None:
            with self.timers("offload"):
                self.offloader.to_device()

    def check_engine(self, batch: RolloutBatch, row: dict[str, float]) -> None:
        """Raise GrpoError when the engine did not sample with the weights that the trainer held.

        It stamps every token with the version that it was given last, and on equal weights its log-probabilities are
        the trainer's but for rounding (4e-7 nats on average in float32 on a CPU, 0.007 in bf16 on an H200).
        """
        stale = (batch.weight_version != self.synced_iteration).any()
        limit = 0.2 if self.args.bf16 or self.args.fp16 else 1e-3
        gap = row.get("mismatch/mean_abs", 0.0)
        if stale or gap > limit:
            versions = np.unique(batch.weight_version).tolist()
            raise GrpoError(
                f"the engine does not hold the trainer's weights: it sampled with version {versions}, last sent was "
                f"{self.synced_iteration}; mean difference of log-probabilities {gap:.2g} nats, allowed {limit:g}. "
                "The last checkpoint is good; report this with the model's config.json and the versions in the banner"
            )

    # ---- what is seen

    def rollout_metrics(self, batch: RolloutBatch, rewards: np.ndarray, groups: GroupAdvantages) -> dict[str, float]:
        """What a rollout says of rewards and lengths, under the names of ``metrics.METRICS``."""
        row = {
            "reward/mean": mean_of_scored(rewards),
            "reward/std": groups.mean_std,
            "reward/failures": self.reward_failures,
            "reward/zero_std_groups": groups.zero_std_groups / groups.num_groups,
            "completion/length_mean": float(batch.completion_lengths.mean()),
            "completion/length_max": int(batch.completion_lengths.max()),
            "completion/truncated": float((batch.finish_reasons == FinishReason.LENGTH).mean()),
        }
        for name, column in zip(self.args.reward_funcs, batch.rewards.T, strict=True):
            row[f"reward/{name}/mean"] = mean_of_scored(column)
        return row

    def log(self, metrics: dict[str, float]) -> None:
        """Hand one update's metrics (or an evaluation's, before the first) to the logger, with the seconds spent."""
        if "tokens/update" in metrics:
            self.tokens += metrics["tokens/update"]
            metrics = metrics | {
                "tokens/total": self.tokens,
                "consumed/prompts": self.sampler.epoch * self.sampler.num_prompts + self.sampler.position,
            }
        self.logger.log(self.iteration, metrics | self.timers.collect())

    def log_completions(self, batch: RolloutBatch) -> None:
        """Write the first completions of a rollout, with what became of them, to ``completions.jsonl``."""
        rows = []
        for i in range(min(self.args.num_completions_to_log, batch.num_completions)):
            start, middle, end = (
                batch.cu_seqlens[i],
                batch.cu_seqlens[i] + batch.prompt_lengths[i],
                batch.cu_seqlens[i + 1],
            )
            rows.append(
                {
                    "prompt": self.tokenizer.decode(batch.tokens[start:middle].tolist()),
                    "completion": self.tokenizer.decode(batch.tokens[middle:end].tolist()),
                    "rewards": dict(zip(self.args.reward_funcs, batch.rewards[i].tolist(), strict=True)),
                    "advantage": float(batch.advantages[i]),
                    "finish_reason": FinishReason(batch.finish_reasons[i]).name.lower(),
                    "length": int(end - middle),
                    "row": int(batch.row_ids[i]),
                }
            )
        self.logger.log_completions(self.iteration + 1, rows)

    # ---- where the run is

    def due(self, interval: int | None) -> bool:
        """Whether the present iteration is a multiple of ``interval``."""
        return bool(interval) and self.iteration % interval == 0

    def finished(self) -> bool:
        """Whether no further rollout is to be started."""
        if self.iteration >= self.args.train_iters:
            return True
        # Not where it began: the same command, given again after such an exit, goes on to the next.
        return self.due(self.args.exit_interval) and self.iteration > self.first_iteration

    def save(self) -> None:
        """Write a checkpoint of everything that the run needs to go on as if it had not stopped."""
        self.logger.flush()
        position = {"sampler": self.sampler.state_dict(), "rollouts": self.rollouts, "tokens": self.tokens}
        with self.timers("save"), training.parameters_complete(self.args, self.model):
            # With them a checkpoint can be gone on from, and exported, without its origin: none may lack them.
            if dist.get_rank() == 0:
                hf.copy_assets(self.args.tokenizer_model, Path(self.args.save, hf.ASSETS_DIR))
            checkpointing.save_checkpoint(
                self.args, self.iteration, self.model, self.optimizer, self.scheduler, extra_state=position
            )

    def finish(self) -> None:
        """Save what is not saved yet, export to Hugging Face's format, and close the logs."""
        if self.args.save and checkpointing.latest_iteration(self.args.save) != self.iteration:
            self.save()
        if self.args.save_hf:
            with training.parameters_complete(self.args, self.model):
                hf.save_hf(self.model, self.args, self.args.save_hf, tokenizer_dir=self.args.tokenizer_model)
            print_rank_0(f"Hugging Face export: {self.args.save_hf}")
        self.logger.close()
        self.engine.close()
        if self.scorer is not None:
            self.scorer.close()
        print_rank_0(f"done: {self.iteration} updates, {time.monotonic() - self.started:.0f} s")


def setup(args, model_provider: Callable) -> Trainer | None:
    """Check everything that can be checked, then build; returns None after ``--dry-run`` has printed its report."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    resume = bool(args.load) and not args.finetune and checkpointing.latest_iteration(args.load) is not None
    _merge_architecture(args, resume)
    validate_args(args, world_size)
    _keep_what_is_there(args, resume)
    if args.dry_run:
        print_rank_0(dry_run_report(args, world_size))
        return None
    load_plugins(args.external_plugins or [])
    get_rewards(args.reward_funcs)
    tokenizer = build_tokenizer(args)
    check_vocabulary(tokenizer, args.vocab_size)
    dataset = PromptDataset(args.train_data_path, tokenizer, args)
    valid = PromptDataset(args.valid_data_path, tokenizer, args) if args.valid_data_path else []
    if args.train_iters is None:
        rollouts = int(args.num_epochs * len(dataset) * args.num_generations / args.generation_batch_size)
        args.train_iters = rollouts * args.updates_per_rollout
        if rollouts == 0:
            raise GrpoError(
                f"--num-epochs {args.num_epochs} over {len(dataset)} prompts is less than one rollout of "
                f"{args.generation_batch_size // args.num_generations} prompts: give more data or a smaller batch"
            )
        check_warmup(args)
    _check_destinations(args)

    initialize_distributed(args)
    set_random_seed(args.seed)
    print_rank_0(banner(args))
    if dist.get_rank() == 0:
        print_args(args)
    for line in batch_arithmetic(args, world_size).lines():
        print_rank_0(line)

    model, optimizer, scheduler, reference = _build_model(args, model_provider, resume)
    iteration, position = 0, {}
    if resume:
        iteration, position = checkpointing.load_checkpoint(args, model, optimizer, scheduler)
        print_rank_0(f"resumed from {args.load} at iteration {iteration}")
    elif args.load and not args.finetune:
        print_rank_0(f"{args.load} holds no checkpoint yet: starting from update 0")
    sampler = PromptSampler(len(dataset), args.seed, shuffle=not args.no_shuffle)
    if position:
        sampler.load_state_dict(position["sampler"])

    engine = _build_engine(args, families.for_args(args).hf_from_args(args), tokenizer.eos_id)
    scorer = None
    if engine.is_lead:
        scorer = RewardPool(args.reward_funcs, args.external_plugins or [], args.reward_workers, args.reward_timeout)
    valid_prompts = [valid[i] for i in range(min(len(valid), args.eval_max_prompts or len(valid)))]
    logger = MetricsLogger(args, dist.get_rank(), args.train_iters, iteration)
    return Trainer(
        args=args,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        reference=reference,
        offloader=_build_offloader(args, model, optimizer),
        engine=engine,
        tokenizer=tokenizer,
        dataset=dataset,
        sampler=sampler,
        valid_prompts=valid_prompts,
        scorer=scorer,
        logger=logger,
        timers=Timers(),
        iteration=iteration,
        first_iteration=iteration,
        rollouts=position.get("rollouts", 0),
        tokens=position.get("tokens", 0),
    )


def mean_of_scored(values: np.ndarray) -> float:
    """Mean of what is not nan; nan when nothing is scored."""
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if len(scored) else float("nan")


def _keep_what_is_there(args, resume: bool) -> None:
    """Refuse to start another run in the folder of an earlier one, whose logs and checkpoints it would replace."""
    there = checkpointing.latest_iteration(args.save) if args.save else None
    if there is not None and not (resume and Path(args.load).resolve() == Path(args.save).resolve()):
        raise GrpoError(
            f"--save {args.save} holds the checkpoint of iteration {there} of another run: add --load {args.save} "
            "to go on from it, or choose another folder"
        )


def _check_destinations(args) -> None:
    """Refuse at the start what could not be written at the end."""
    export = Path(args.save_hf) if args.save_hf else None
    if export and export.exists() and not hf.is_replaceable(export):
        raise GrpoError(f"--save-hf {export} exists and is no Hugging Face model directory: choose another place")
    places = {"--save": args.save, "--save-hf": export and export.parent, "--tensorboard-dir": args.tensorboard_dir}
    for flag, directory in places.items():
        if not directory:
            continue
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GrpoError(f"{flag} {directory} cannot be made: {error.strerror}; choose another place") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise GrpoError(f"{flag} {directory} cannot be written: correct its mode, or choose another place")


def _merge_architecture(args, resume: bool) -> None:
    """Take the architecture from the checkpoint or the ``config.json`` that the weights come from; flags must agree."""
    checkpoint = args.load if resume or args.finetune else args.pretrained_checkpoint
    if checkpoint and (resume or args.use_checkpoint_args):
        merge_architecture(args, checkpointing.read_checkpoint_args(checkpoint), f"the checkpoint {checkpoint}")
    elif args.load_hf:
        config = hf.read_config(args.load_hf)
        merge_architecture(args, families.for_hf_config(config).args_from_hf(config), f"{args.load_hf}/config.json")
    if args.tokenizer_model is None:
        load = args.load if resume or args.finetune else None  # without a checkpoint, what lies there is nobody's
        assets = [Path(d, hf.ASSETS_DIR) for d in (load, args.pretrained_checkpoint) if d]
        args.tokenizer_model = next((str(d) for d in assets if d.is_dir()), args.load_hf)


def _build_model(args, model_provider: Callable, resume: bool):
    """Model, optimizer, scheduler and reference, with the starting weights in place (a resume overwrites them)."""
    model = training.build_model(args, model_provider)
    start = args.pretrained_checkpoint or (args.load if args.finetune else None)
    reference = None
    # A resume brings the policy's weights; the first ones are then wanted only where they are the reference.
    if not resume or (args.beta > 0 and not args.ref_load):
        if start:
            checkpointing.load_weights(start, model)
        elif args.load_hf:
            hf.load_hf(model, args, args.load_hf)
    if args.beta > 0:
        if args.ref_load:
            policy = training.ReferencePolicy(model)
            checkpointing.load_weights(args.ref_load, model)
            reference = training.ReferencePolicy(model)
            policy.copy_to(model)
        elif resume and not start and not args.load_hf:
            raise GrpoError(
                "resuming with --beta > 0 needs the weights that the run started from, as its reference: give the same "
                "--pretrained-checkpoint or --load-hf as before, or --ref-load"
            )
        else:
            reference = training.ReferencePolicy(model)
    model, optimizer, scheduler = training.setup_optimizer(args, model)
    return model, optimizer, scheduler, reference


def _build_offloader(args, model: training.Model, optimizer) -> Offloader | None:
    kinds = (args.offload_model, args.offload_gradients, args.offload_optimizer)
    return Offloader(model, optimizer, *kinds) if any(kinds) else None


def _build_engine(args, hf_config: dict, eos_id: int) -> Engine:
    """The engine of --rollout-engine and --vllm-mode."""
    match args.rollout_engine, args.vllm_mode:
        case "vllm", "colocate":
            from megatron_grpo.rollout.vllm_colocate import VllmColocate  # takes seconds: after all checks

            return VllmColocate(args, hf_config, eos_id)
    raise GrpoError(f"--rollout-engine {args.rollout_engine} has no --vllm-mode {args.vllm_mode}")


def _sampling(args) -> Sampling:
    return Sampling(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        stop=tuple(args.stop_words or ()),
        ignore_eos=args.ignore_eos,
    )
