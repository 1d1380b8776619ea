"""Inference engine that generates with the training model itself (``--rollout-engine megatron``).

The engine runs batches with a KV cache, in the parallel configuration of the trainer. It uses the trainer's weights, so
no sync is needed and completions are exactly on-policy. A step runs the new prompts and the newest tokens of all
running completions in one forward pass, through the pipeline stages in order. One all-reduce then distributes the
sampled tokens to every rank of the replica.

Each tensor-parallel group, with its pipeline, is a replica with its own requests. Context-parallel ranks also have
their own requests, because a KV cache needs no split sequences. Groups that share experts run their forward passes
together: they are members of one replica.
"""

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron_grpo.models import forward
from megatron_grpo.models.kv_cache import KVCache, Step, generating
from megatron_grpo.parallel.agreement import raised_on_every_rank
from megatron_grpo.parallel.arguments import generating_width
from megatron_grpo.parallel.initialize import await_ranks
from megatron_grpo.parallel.rank_groups import replica_group
from megatron_grpo.rollout.engine import Completion, Request, lost_on_failure
from megatron_grpo.rollout.megatron.sampling import sample
from megatron_grpo.rollout.megatron.scheduler import Scheduler, Work
from megatron_grpo.utils import progress
from megatron_grpo.utils.batch_sizes import longest_sequence
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError


class MegatronEngine:
    """Engine that generates with ``model``, the trainer's chunks on this rank, without a copy of the weights."""

    has_weights = True
    drafts: None = None
    cache_tokens: None = None  # the cache of a request ends with it
    engines = 1

    def __init__(self, args, model: forward.Model, tokenizer):
        tp = parallel_state.get_tensor_model_parallel_world_size()
        ranks_of_stage = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
        place = parallel_state.get_data_parallel_rank(with_context_parallel=True) * tp
        place += parallel_state.get_tensor_model_parallel_rank()  # within this pipeline stage
        width = generating_width(args)
        self.replica, self.num_replicas = place // width, ranks_of_stage // width
        self._member, self._members = place % width // tp, width // tp
        self.is_lead = place % width == 0 and parallel_state.is_pipeline_first_stage()
        self._group = replica_group(self.replica, self.num_replicas)
        self._first, self._last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        self._samples = self._last and parallel_state.get_tensor_model_parallel_rank() == 0

        self._args, self._model, self._chunks = args, model, unwrap_model(model)
        self._version = 0
        length = longest_sequence(args)
        self._cache = KVCache(model, args.inference_max_requests, length)
        self._scheduler = Scheduler(self._members, args.inference_max_requests, length, tokenizer.decode)
        self.places = args.inference_max_requests
        self._generator = torch.Generator(device())

    # ---- requests

    def submit(self, requests: Iterable[Request]) -> None:
        self._scheduler.submit(request.with_begun_in_prompt() for request in requests)

    def abort(self, ids: Iterable[int]) -> None:
        self._scheduler.abort(ids)

    def unfinished(self) -> list[Completion]:
        return sorted(map(self._completion, self._scheduler.unfinished()), key=lambda completion: completion.id)

    def interrupt(self) -> list[Completion]:
        """Abort all requests; return their tokens so far."""
        unfinished = self.unfinished()
        self.abort(completion.id for completion in unfinished)
        return unfinished

    def poll(self) -> list[Completion]:
        with lost_on_failure("the Megatron engine's step"):
            return self._poll()

    def _poll(self) -> list[Completion]:
        works = self._scheduler.step()
        counts = [len(work.sampled) for work in works]
        if not sum(counts):
            return []
        step = self._step(works[self._member], self._padded_length(works))
        hidden = self._forward(step)
        values = torch.zeros(sum(counts), 2, dtype=torch.float64, device=device())  # exact for every token id
        if self._last and counts[self._member]:
            logits = self._chunks[-1].next_token_logits(hidden, step.sampled)
            if self._samples:
                begin = sum(counts[: self._member])
                values[begin : begin + len(logits)] = self._sample(logits, works[self._member])
        if self._group is not None:
            dist.all_reduce(values, group=self._group)  # each row has one writer
        tokens, log_probs = values.cpu().T.tolist()  # the only synchronisation of host and device
        progress.advance()
        finished = self._scheduler.take(works, list(map(int, tokens)), log_probs)
        return [self._completion(running) for running in finished]

    def _completion(self, running) -> Completion:
        log_probs = running.log_probs if running.request.sampling.log_probs else None
        versions, reason = [self._version] * len(running.token_ids), running.finish_reason or "abort"
        completion = Completion(running.request.id, running.token_ids, log_probs, reason, versions)
        return completion.after(running.request.begun)

    def _padded_length(self, works: list[Work]) -> int:
        """Return the number of tokens of this member's step, with padding to a multiple of the tensor-parallel size.

        The number is never 0, so that an idle member takes part in the exchange of experts.
        """
        parts = self._args.tensor_model_parallel_size if self._args.sequence_parallel else 1
        tokens = works[self._member].num_tokens
        if self._args.moe_token_dispatcher_type == "allgather":  # allgather needs the same number from each rank
            tokens = max(work.num_tokens for work in works)
        return max(-(-tokens // parts), 1) * parts

    def _step(self, work: Work, total: int) -> Step:
        """Return the tokens of ``work`` on the device, padded to ``total`` tokens."""
        length = self._cache.length
        tokens, positions, rows, source, sampled, ends = [], [], [], [], [], [0]
        new = [(running.slot, number) for number, prompt in enumerate(work.prompts) for running in prompt]
        for prompt in work.prompts:
            ids = np.asarray(prompt[0].request.prompt_ids, np.int64)
            places = np.arange(len(ids))
            tokens.append(ids)
            positions.append(places)
            for running in prompt:
                rows.append(running.slot * length + places)
                source.append(ends[-1] + places)
            ends.append(ends[-1] + len(ids))
            sampled += [ends[-1] - 1] * len(prompt)
        slots = np.array([running.slot for running in work.running], np.int64)
        lengths = np.array([running.length for running in work.running], np.int64)
        newest = ends[-1] + np.arange(len(slots))
        padding = np.zeros(total - ends[-1] - len(slots), np.int64)
        arrays = (
            [*tokens, [running.token_ids[-1] for running in work.running], padding],
            [*positions, lengths - 1, padding],
            [*rows, slots * length + lengths - 1],
            [*source, newest],
            [slots],
            [lengths],
            [sampled, newest],
            [[slot for slot, _ in new]],
            [[number for _, number in new]],
        )
        flat = [np.concatenate([np.asarray(part, np.int64) for part in parts]) for parts in arrays]
        # One copy to the device is faster than nine.
        both = torch.from_numpy(np.concatenate(flat)).to(device(), non_blocking=True)
        tokens, positions, rows, source, slots, on_device, *others = both.split([len(part) for part in flat])
        sampled, new_slots, new_prompts = others
        longest, begins = int(lengths.max(initial=0)), (tuple(ends), new_slots, new_prompts)
        return Step(tokens, positions, rows, source, *begins, slots, on_device, longest, sampled)

    def _forward(self, step: Step) -> torch.Tensor:
        """Run the step through all stages and virtual stages in order; the last one returns the hidden states."""
        self._cache.step = step
        parts = self._args.tensor_model_parallel_size if self._args.sequence_parallel else 1
        config, group = self._chunks[0].config, parallel_state.get_pipeline_model_parallel_group()
        hidden = None
        for number, chunk in enumerate(self._chunks):
            if number or not self._first:
                channels = [getattr(layer, "input_channels", config.hidden_size) for layer in chunk.decoder.layers]
                shape = len(step.tokens) // parts, 1, [*channels, config.hidden_size][0]
                received = torch.empty(shape, dtype=config.pipeline_dtype, device=device())
                dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank(), group=group)
                chunk.set_input_tensor([received])
            hidden = chunk.hidden_states(step.tokens, step.positions)
            if number < len(self._chunks) - 1 or not self._last:
                sent = hidden.to(config.pipeline_dtype).contiguous()
                dist.send(sent, parallel_state.get_pipeline_model_parallel_next_rank(), group=group)
        assert hidden is not None  # a rank has at least one chunk
        return hidden

    def _sample(self, logits: torch.Tensor, work: Work) -> torch.Tensor:
        """Return the sampled tokens and their log-probabilities, ``[n, 2]``, of the member's rows."""
        rows = work.sampled
        tokens, log_probs = sample(
            logits,
            [running.request.sampling for running in rows],
            [running.request.prompt_ids for running in rows],
            [running.token_ids for running in rows],
            self._generator,
        )
        return torch.stack([tokens.double(), log_probs.double()], 1)

    # ---- a rollout

    @contextlib.contextmanager
    def rollout(self, seed: int) -> Iterator[None]:
        """Context of a rollout: samples depend only on ``seed`` and requests; restores the trainer's random state.

        The model generates and cannot be trained in this context.
        """
        await_ranks()  # the ranks of a replica step together
        seeds = np.random.SeedSequence([seed + self.replica, self._member])
        self._generator.manual_seed(int(seeds.generate_state(1)[0]))
        with (
            raised_on_every_rank(),
            forward.parameters_complete(self._model),
            torch.no_grad(),
            generating(self._model, self._cache),
        ):
            try:
                yield
            finally:
                self._cache.step = None

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Set the version only: the engine uses the trainer's weights, so ``weights`` is not read."""
        self._version = version

    def compare_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[str] | None:
        return []  # engine and trainer share the tensors

    def wake_weights(self) -> None:
        pass

    def wake_cache(self) -> None:
        """Allocate the KV cache; GrpoError if the device has too little memory."""
        free = _free_bytes()
        if self._cache.num_bytes > free and not self._cache.layers:
            raise GrpoError(
                f"the KV cache of {self._cache.slots} sequences of {self._cache.length} tokens takes "
                f"{self._cache.num_bytes / 2**30:.2f} GiB on each rank, but {free / 2**30:.2f} GiB are free: lower "
                "--inference-max-requests, or offload more (--offload-optimizer, --offload-gradients)"
            )
        with raised_on_every_rank(), lost_on_failure("the allocation of the Megatron engine's KV cache"):
            self._cache.allocate()

    def sleep(self) -> None:
        """Free the KV cache."""
        self._cache.free()
        torch.cuda.empty_cache()

    def device_bytes(self) -> tuple[int, int]:
        return (self._cache.num_bytes if self._cache.layers else 0), 0

    def close(self) -> None:
        self._cache.free()


def _free_bytes() -> int:
    """Return the bytes that this process can allocate on its device: free memory plus torch's unused reserve."""
    if not torch.cuda.is_available():
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
