"""What a run keeps: model, engine, data, rewards, logs, and where in the run it is."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.algorithm.advantages import group_statistics
from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.prompts import Prompt, PromptDataset, draw
from megatron_grpo.data.row_sampling import structured_json
from megatron_grpo.data.sampler import BlendedSampler, PromptSampler
from megatron_grpo.data.sampling_params import Sampling, uses_engine_log_probs
from megatron_grpo.estimate.throughput import ModelFlops
from megatron_grpo.models import forward
from megatron_grpo.observability.completion_log import chosen, completion_row
from megatron_grpo.observability.metrics import MetricsLogger, Timers
from megatron_grpo.observability.profiling import Profiler
from megatron_grpo.parallel.initialize import print_rank_0
from megatron_grpo.reference.reference_model import ReferenceModel, SwappedReference
from megatron_grpo.reference.teacher_server import TeacherServer
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rollout.collect import collect_rollout
from megatron_grpo.rollout.dynamic_sampling import Selection, prompts_to_draw
from megatron_grpo.rollout.engine import Engine
from megatron_grpo.rollout.weight_sync import weight_check
from megatron_grpo.training import train_step
from megatron_grpo.training.early_exit import EarlyExit
from megatron_grpo.training.offload import Offloader
from megatron_grpo.utils.errors import EngineLost, GrpoError
from megatron_grpo.weights import hf


@dataclass
class Trainer:
    """The parts of a run and its position in it; the algorithm that uses them is ``pretrain_grpo.train``."""

    args: object
    model: forward.Model
    optimizer: object
    scheduler: object
    reference: ReferenceModel | SwappedReference | None
    state_offloader: Offloader  # of gradients and optimizer state
    weight_offloader: Offloader
    engine: Engine
    tokenizer: object
    dataset: PromptDataset
    sampler: PromptSampler | BlendedSampler
    valid_prompts: list[Prompt]
    scorer: RewardPool | None
    logger: MetricsLogger
    timers: Timers
    profiler: Profiler
    early_exit: EarlyExit
    left_early: str | None = None  # why, when the run ends before its last update
    teacher: ReferenceModel | TeacherServer | None = None
    iteration: int = 0
    synced_iteration: int = 0  # whose weights the engine holds
    first_iteration: int = 0  # where this process began: above 0 after a resume
    rollouts: int = 0
    tokens: int = 0
    reward_failures: int = 0  # in the newest rollout
    memory: dict[str, float] = field(default_factory=dict)  # of the stages of the newest rollout
    sampling_metrics: dict[str, float] = field(default_factory=dict)  # of the newest rollout
    failed_rewards: set[str] = field(default_factory=set)
    started: float = field(default_factory=time.monotonic)

    # ---- rollouts

    def next_prompts(self) -> list[Prompt]:
        """The prompts of the next rollout, in an order that every rank knows; with --dynamic-sample and
        --over-sampling-ratio all that it may begin.
        """
        self.rollouts += 1
        count = prompts_to_draw(self._num_groups, self.args.over_sampling_ratio, self._resample_times)
        return draw(self.dataset, self.sampler, count)

    def selection(self) -> Selection | None:
        """How the groups of this rollout are chosen among those of `next_prompts`; None when it takes them all."""
        args = self.args
        if not args.dynamic_sample and args.over_sampling_ratio == 1:
            return None
        return Selection(
            self.engine,
            self._num_groups,
            args.num_generations,
            args.over_sampling_ratio,
            self._resample_times,
            self.scorer,
            args.reward_weights,
        )

    @property
    def _num_groups(self) -> int:
        return self.args.generation_batch_size // self.args.num_generations

    @property
    def _resample_times(self) -> int:
        return self.args.max_resample_times if self.args.dynamic_sample else 0

    def rollout_seed(self) -> int:
        """The sampling seed of the present rollout: a function of ``--seed`` and the rollout's number alone."""
        return int(np.random.SeedSequence([self.args.seed, self.rollouts]).generate_state(1)[0] // 2)

    @property
    def sampling(self) -> Sampling:
        """How training completions are sampled, with engine log-probabilities where something uses them: a correction
        or a mask in every rollout, the mismatch in the share asked for.
        """
        rate = self.args.mismatch_sample_rate
        compared = int(self.rollouts * rate) > int((self.rollouts - 1) * rate)
        sampling = _sampling(self.args)
        wanted = (compared or uses_engine_log_probs(self.args) is not None) and not sampling.structured_outputs
        return replace(sampling, log_probs=wanted)

    @property
    def eval_samplings(self) -> list[tuple[str, Sampling, int]]:
        """(name, sampling, completions per prompt) of each kind of evaluation."""
        sampled = _sampling(self.args)
        # The likeliest tokens of the model itself: no truncation, no penalties.
        greedy = Sampling(
            sampled.max_tokens,
            temperature=0.0,
            stop=sampled.stop,
            structured_outputs=sampled.structured_outputs,
            ignore_eos=sampled.ignore_eos,
        )
        kinds = [("greedy", greedy, 1)]
        if self.args.eval_num_generations:
            kinds.append(("sampled", sampled, self.args.eval_num_generations))
        return kinds

    def collect(
        self,
        prompts: list[Prompt],
        num_generations: int,
        sampling: Sampling,
        seed: int,
        selection: Selection | None = None,
    ) -> RolloutBatch:
        """Completions of ``prompts`` with their rewards, on every rank; what could not be scored is told once a
        function. Prompts of which a ``selection`` makes nothing go back to the sampler.
        """
        capacity = self.args.vllm_max_num_seqs if self.args.rollout_balancing == "dynamic" else None
        batch, self.reward_failures = collect_rollout(
            self.engine,
            prompts,
            num_generations,
            sampling,
            self.scorer,
            self.tokenizer,
            seed,
            self.timers,
            capacity,
            selection,
        )
        if selection is not None:
            unused, self.sampling_metrics = selection.close()
            self.sampler.give_back([prompts[number].id for number in unused])
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
    def engine_awake(self, sync: Callable[[], None], log_probs: Callable) -> Iterator[None]:
        """Within, the engine holds the present weights and its cache; before and after, the device is the trainer's.

        The order keeps the optimizer's state and the cache from ever being on the device together, and the trainer's
        weights only as long as the engine takes them over. When the engine is lost the run is saved as it was before.
        ``log_probs(args, trainer, batch)`` is the trainer's own forward pass, for --check-weight-sync.
        """
        memory = {"train": self._memory()}
        position, probe = self._position(), None
        try:
            try:
                self._offload(self.state_offloader)
                self.engine.wake_weights()
                new_weights = self.synced_iteration != self.iteration or not self.engine.has_weights
                if new_weights:
                    sync()
                memory["sync"] = self._memory()
                self._offload(self.weight_offloader)
                self.engine.wake_cache()
                memory["rollout"] = self._memory()
                if new_weights and self.args.check_weight_sync:
                    probe = self._probe_engine()
                yield
                self.engine.sleep()  # not after an error, which another rank may not have
            finally:
                memory["asleep"] = self._memory()
                with self.timers("offload"):
                    self.weight_offloader.to_device()
                    self.state_offloader.to_device()
        except EngineLost as error:
            self.engine.close()
            raise EngineLost(f"{error}. {self._save_as_of(position)}") from error
        if probe is not None:  # now that the device has room for a forward pass
            with self.timers("sync"):
                replicas = self.engine.num_replicas
                weight_check.compare_log_probs(self.args, probe, replicas, lambda args, b: log_probs(args, self, b))
        self.memory = {f"memory/{stage}": size for stage, size in memory.items()} if torch.cuda.is_available() else {}

    def _save_as_of(self, position: dict[str, Any]) -> str:
        """Save the run as it was at ``position``, unless it is saved already; returns what the user can do then."""
        if not self.args.save:
            return "Nothing is saved: there is no --save"
        if checkpoint.latest_iteration(self.args.save) != self.iteration:
            self.save(position)
        return f"The run is saved at iteration {self.iteration}: --load {self.args.save} goes on from there"

    def _probe_engine(self) -> RolloutBatch:
        """Answers of every replica to the first prompts of the data, for --check-weight-sync."""
        with self.timers("sync"):
            prompts = self.dataset.first(weight_check.PROMPTS_PER_REPLICA)
            return weight_check.probe(self.args, self.engine, prompts, self.tokenizer, self.timers)

    def _offload(self, offloader: Offloader) -> None:
        # A gather of parameters that is still under way would write into memory that is no longer there.
        with self.timers("offload"), forward.parameters_complete(self.args, self.model):
            offloader.to_host()

    @staticmethod
    def _memory() -> float:
        """GiB in use on this rank's device, by all processes; 0 on a CPU."""
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return (total - free) / 2**30

    def check_engine(self, batch: RolloutBatch, row: dict[str, float]) -> None:
        """Raise GrpoError when the engine did not sample with the weights that the trainer held.

        It stamps every token with the version that it was given last, and on equal weights its log-probabilities are
        the trainer's but for rounding.
        """
        stale = (batch.weight_version != self.synced_iteration).any()
        limit = weight_check.largest_mismatch(self.args)
        gap = row.get("mismatch/mean_abs", 0.0)
        if stale or gap > limit:
            versions = np.unique(batch.weight_version).tolist()
            raise GrpoError(
                f"the engine does not hold the trainer's weights: it sampled with version {versions}, last sent was "
                f"{self.synced_iteration}; mean difference of log-probabilities {gap:.2g} nats, allowed {limit:g}. "
                "The last checkpoint is good; report this with the model's config.json and the versions in the banner"
            )

    # ---- what is seen

    @cached_property
    def flops(self) -> ModelFlops:
        """What the model's passes take."""
        return ModelFlops(self.args)

    def rollout_metrics(self, batch: RolloutBatch, rewards: np.ndarray) -> dict[str, float]:
        """What a rollout says of rewards (weighted sums [n]) and lengths, under the names of METRICS."""
        groups = group_statistics(rewards, batch.group_ids)
        row = {
            "reward/mean": mean_of_scored(rewards),
            "reward/std": groups.mean_std,
            "reward/failures": self.reward_failures,
            "reward/zero_std_groups": groups.zero_std_groups / groups.num_groups,
            "tokens/rollout": int(batch.completion_lengths.sum()),
            "completion/length_mean": float(batch.completion_lengths.mean()),
            "completion/length_min": int(batch.completion_lengths.min()),
            "completion/length_max": int(batch.completion_lengths.max()),
            "completion/truncated": float((batch.finish_reasons == FinishReason.LENGTH).mean()),
        }
        for name, column in zip(self.args.reward_funcs, batch.rewards.T, strict=True):
            row[f"reward/{name}/mean"] = mean_of_scored(column)
            if len(scored := column[~np.isnan(column)].astype(np.float64)):
                row |= {f"reward/{name}/min": float(scored.min()), f"reward/{name}/max": float(scored.max())}
                row[f"reward/{name}/std"] = float(scored.std(ddof=1)) if len(scored) > 1 else 0.0
        return row | self.sampling_metrics | self.memory

    def advance(self, metrics: dict[str, float]) -> None:
        """Count an update that is done, and the tokens that it learnt from."""
        self.iteration += 1
        self.tokens += metrics["tokens/update"]

    def log(self, metrics: dict[str, float]) -> None:
        """Hand one update's metrics (or an evaluation's, before the first) to the logger, with the seconds spent."""
        if "tokens/update" in metrics:
            metrics = metrics | {
                "tokens/total": self.tokens,
                "consumed/prompts": self.sampler.consumed,
                "consumed/left_out": self.sampler.left_out,
            }
        if self.args.log_params_norm:
            with forward.parameters_complete(self.args, self.model):
                metrics = metrics | {"params_norm": train_step.params_norm(self.model)}
        if torch.cuda.is_available():
            metrics = metrics | {"memory/peak": torch.cuda.max_memory_allocated() / 2**30}
            torch.cuda.reset_peak_memory_stats()
        seconds = self.timers.collect()
        if "time/rollout" not in seconds:  # of a rollout's updates the first tells of its tokens and seconds
            metrics = {name: value for name, value in metrics.items() if name != "tokens/rollout"}
        self.logger.log(self.iteration, metrics | seconds)
        self.profiler.after(self.iteration)

    def log_completions(self, batch: RolloutBatch) -> None:
        """Write some completions of a rollout, with what became of them, to ``completions.jsonl``."""
        if self.logger.active:
            picks = chosen(batch.advantages, self.args.num_completions_to_log)
            rows = [completion_row(batch, i, why, self.args.reward_funcs, self.tokenizer) for i, why in picks]
            self.logger.log_completions(self.iteration + 1, rows)

    # ---- where the run is

    def due(self, interval: int | None) -> bool:
        """Whether the present iteration is a multiple of ``interval``."""
        return bool(interval) and self.iteration % interval == 0

    def finished(self) -> bool:
        """Whether no further rollout is to be started; every rank must ask."""
        if self.iteration >= self.args.train_iters:
            return True
        self.left_early = self.early_exit.reason()
        if self.left_early:
            print_rank_0(f"leaving at iteration {self.iteration}: {self.left_early}")
            return True
        # Not where it began: the same command, given again after such an exit, goes on to the next.
        return self.due(self.args.exit_interval) and self.iteration > self.first_iteration

    def _position(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict(), "rollouts": self.rollouts, "tokens": self.tokens}

    def save(self, position: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of everything that the run needs to go on as if it had not stopped (at ``position``)."""
        self.logger.flush()
        position = position or self._position()
        with self.timers("save"), forward.parameters_complete(self.args, self.model):
            # With them a checkpoint can be gone on from, and exported, without its origin: none may lack them.
            if dist.get_rank() == 0:
                hf.copy_assets(self.args.tokenizer_model, Path(self.args.save, hf.ASSETS_DIR))
            # One that has not moved can be loaded again from where it came.
            updated = self.reference is not None and self.reference.updated
            checkpoint.save_checkpoint(
                self.args,
                self.iteration,
                self.model,
                self.optimizer,
                self.scheduler,
                extra_state=position,
                save_reference=(lambda directory: self.reference.save(directory, self.model)) if updated else None,
            )

    def finish(self) -> None:
        """Save what is not saved yet, export to Hugging Face's format, and close the logs.

        A run that leaves early has no time to lose: it is saved and nothing else.
        """
        if self.args.save and checkpoint.latest_iteration(self.args.save) != self.iteration:
            self.save()
        if self.args.save_hf and not self.left_early:
            with forward.parameters_complete(self.args, self.model):
                hf.save_hf(self.model, self.args, self.args.save_hf, tokenizer_dir=self.args.tokenizer_model)
            print_rank_0(f"Hugging Face export: {self.args.save_hf}")
        self.profiler.close()
        self.logger.close()
        self.engine.close()
        if self.scorer is not None:
            self.scorer.close()
        print_rank_0(f"done: {self.iteration} updates, {time.monotonic() - self.started:.0f} s")


def mean_of_scored(values: np.ndarray) -> float:
    """Mean of what is not nan; nan when nothing is scored."""
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if len(scored) else float("nan")


def _sampling(args) -> Sampling:
    return Sampling(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        stop=tuple(args.stop_words or ()),
        structured_outputs=structured_json({"regex": args.structured_outputs_regex}),
        ignore_eos=args.ignore_eos,
    )
