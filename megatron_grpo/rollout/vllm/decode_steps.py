"""vLLM's scheduler with a short path for the decode steps of a rollout: the same steps and completions in less time.

In most steps of a rollout each running request decodes one token, and the blocks are enough. vLLM then calls a dozen
functions for each request, though a request needs a block only every 16 steps or so. `DecodeSteps` schedules and
records all these tokens at once, in the arrays of a `RunningTable`. vLLM's own code admits requests, schedules every
other step, and handles every request that finishes, or whose output is more than a token.

A step that admits a request is no decode step, and takes several times as long. vLLM admits one as soon as a place is
free: with 512 short completions at a time some end in every step, and none would be a decode step. Here requests that
wait are admitted together (`_waits_for_places`).

The host takes as long as the GPU of a small model. Where the runner can, a step therefore decodes `AT_ONCE` tokens of
each request (`_number_of_tokens`): the GPU computes them one after the other, and the host schedules and records them
together. Tokens after a request's last one are dropped.

This repeats what vLLM's code does in that case: it is installed only where vLLM's sources are those of a version that
the tests compared (`megatron_grpo.patches.vllm.DECODE_STEPS`). vLLM builds the scheduler by `scheduler`, its option
``scheduler_cls``.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from megatron_grpo.rollout.vllm.running_table import Records, Rows, RunningTable

# vLLM's queues of requests that are not running; a version has some of them.
QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")
LIMITS = ("max_num_running_reqs", "max_num_active_reqs")  # of the requests that run; a version has some of them
BETWEEN_ADMISSIONS = 16  # tokens of a request, while less than one of `PLACES` places is free
PLACES = 8
AT_ONCE = 4  # tokens of each request in a step, at most
NONE = -1  # no token, or several: vLLM's code handles them


def scheduler(vllm_config, **options):
    """Build the scheduler that vLLM would choose for this configuration, with `DecodeSteps`."""
    vllm_config.scheduler_config.scheduler_cls = None
    chosen = vllm_config.scheduler_config.get_scheduler_cls()
    return type(f"DecodeSteps{chosen.__name__}", (DecodeSteps, chosen), {})(vllm_config=vllm_config, **options)


class DecodeStep(SchedulerOutput):
    """A step that `DecodeSteps` scheduled: ``tokens`` tokens of each of its requests."""

    requests: list[Any]
    tokens: int
    rows: Rows  # of the requests in the table, and the serial numbers that they had
    serials: Rows
    computed: Rows  # tokens of the requests before this step
    grown: list[int]  # places of those that can have a new block
    preemptions: int  # of the scheduler's life, when it was scheduled


_Scheduler: Any = object  # one of vLLM's schedulers comes after the class


class DecodeSteps(_Scheduler):
    """A scheduler's methods for decode steps; the class after it is one of vLLM's schedulers."""

    def __init__(self: Any, **options):
        super().__init__(**options)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self.has_decode_steps = self._can_have_decode_steps(managers)
        self._block_size = managers[0].block_size if managers else 0
        self._num_managers = len(managers)
        self._cached_blocks = [getattr(manager, "num_cached_block", {}) for manager in managers]  # of each request
        # Whether what is admitted depends on the running requests by their number and their tokens alone.
        self._can_admit_apart = (
            self.lora_config is None
            and not self.kv_cache_manager.watermark_blocks
            and not self.scheduler_config.long_prefill_token_threshold
            and self.max_num_scheduled_tokens <= self.scheduler_config.max_num_batched_tokens
        )
        self._caches = self.kv_cache_manager.enable_caching
        self._is_async = isinstance(self, AsyncScheduler)
        # vLLM 0.32 limits the running requests by one number and admits requests by another one.
        self._admits_below = getattr(self, "max_num_active_reqs", self.max_num_running_reqs)
        self._has_common_prefixes = hasattr(self.kv_cache_manager.coordinator, "get_num_common_prefix_blocks")
        # Whether the runner computes several tokens of each of the requests with these ids in a step.
        self.takes_several: Callable[[list[str]], bool] = lambda ids: False
        self._tokens_waited = 0  # of a request, since another one could have been admitted
        self._preemptions = 0
        self._table = RunningTable(self.hash_block_size if self._caches else 0)

    def _can_have_decode_steps(self: Any, managers) -> bool:
        """Whether this engine has nothing that works in each step or for each token."""
        off = (
            "connector ec_connector aux_output_connector enable_return_routed_experts return_sampling_mask "
            "defer_block_free num_spec_tokens num_lookahead_tokens num_hash_lookahead_tokens use_pp is_encoder_decoder "
            "log_stats perf_metrics enable_kv_cache_events needs_kv_cache_zeroing has_mamba_layers is_mm_encoder_only"
        )  # a version has some of them
        return (
            not any(getattr(self, name, None) for name in off.split())
            and self.finished_req_ids_dict is None
            and self.num_sampled_tokens_per_step == 1
            and getattr(self, "local_prefill_interval", 1) == 1
            and bool(managers)
            and all(type(manager) is FullAttentionManager for manager in managers)
            and len({manager.block_size for manager in managers}) == 1
        )

    def schedule(self: Any, throttle_prefills: bool = False) -> SchedulerOutput:
        step, paused = None, self._pause_state is not PauseState.UNPAUSED
        if self.has_decode_steps and not (paused or throttle_prefills or self._inflight_prefills):
            if not any(getattr(self, queue, None) for queue in QUEUES) or self._waits_for_places():
                step = self._decode_step(self._none_admitted, AT_ONCE)
            elif self._can_admit_apart:
                step = self._decode_step(self._admitted, 1)
        if step is None:
            self._table.hand_over()
            step = super().schedule(throttle_prefills)
        return step

    def _waits_for_places(self: Any) -> bool:
        """Return whether no request is admitted in this step, because no place is free, or few are for a short time."""
        free = self._admits_below - len(self.running)
        if free <= 0:
            return True
        if free * PLACES >= self._admits_below or self._tokens_waited >= BETWEEN_ADMISSIONS:
            self._tokens_waited = 0
            return False
        self._tokens_waited += 1
        return True

    def _decode_step(self: Any, admit: Callable[[int], SchedulerOutput], most: int) -> DecodeStep | None:
        """Schedule up to ``most`` tokens of each running request, and what ``admit`` adds; None, with nothing changed,
        if one needs other work or there are too few blocks.

        The requests that run fit the budget of a step: vLLM admits a request only if the others leave a token of it.
        """
        table, size, requests = self._table, self._block_size, self.running.copy()
        rows = table.rows_of(requests)
        if table.is_special[rows].any():
            return None
        table.refresh(rows)
        computed, ahead = table.computed[rows], table.ahead[rows]
        ending = (ahead > 0) & (computed + 1 >= table.limit[rows])
        if ending.any():  # their last tokens are being computed
            requests = list(itertools.compress(requests, ~ending))
            rows, computed, ahead = rows[~ending], computed[~ending], ahead[~ending]
        tokens = table.tokens[rows]
        if not requests or (tokens + ahead - computed != 1).any() or int(computed.max()) >= self.max_model_len - 1:
            return None
        ids: list[str] = [request.request_id for request in requests]
        # vLLM's first runner gets all tokens of a request that missed a step.
        if not (self.use_v2_model_runner or self.prev_step_scheduled_req_ids.issuperset(ids)):
            return None
        number = self._number_of_tokens(most, ids, rows, computed)
        if not number:
            return None
        needs_block = self._new_blocks(computed, number) > 0
        block_ids: list[Any] = [None] * len(ids)
        grown = np.flatnonzero(needs_block).tolist()
        for place in grown:
            block_ids[place] = self._block_ids(ids[place], int(computed[place]) + number)
        if self._caches:
            at_block = needs_block | (tokens % size == 0)
            self._cache_blocks(rows[at_block], np.minimum(computed + number, tokens)[at_block])
        table.computed[rows] += number
        table.in_flight[rows] += number
        if self._is_async:
            table.ahead[rows] += number
        if self._tokens_waited:
            self._tokens_waited += number - 1
        step: Any = DecodeStep.make_empty()
        vars(step).update(vars(admit(len(ids))))
        step.requests, step.tokens, step.preemptions = requests, number, self._preemptions
        step.rows, step.serials, step.computed, step.grown = rows, table.serial[rows], computed, grown
        resumed = step.scheduled_cached_reqs
        step.scheduled_cached_reqs = CachedRequestData(
            req_ids=ids + resumed.req_ids,
            resumed_req_ids=resumed.resumed_req_ids,
            new_token_ids=[],
            all_token_ids=resumed.all_token_ids,
            new_block_ids=block_ids + resumed.new_block_ids,
            num_computed_tokens=computed.tolist() + resumed.num_computed_tokens,
            num_output_tokens=(tokens - table.prompt[rows] + ahead).tolist() + resumed.num_output_tokens,
        )
        admitted, step.num_scheduled_tokens = step.num_scheduled_tokens, dict.fromkeys(ids, number)
        step.num_scheduled_tokens.update(admitted)
        step.total_num_scheduled_tokens += number * len(ids)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(ids)
        if self._has_common_prefixes:
            first = self.running[0].request_id
            step.num_common_prefix_blocks = self.kv_cache_manager.get_num_common_prefix_blocks(first)
        return step

    def _number_of_tokens(self: Any, most: int, ids: list[str], rows: Rows, computed: Rows) -> int:
        """Return how many tokens each request decodes in a step, up to ``most``; 0 if the blocks are too few for one.

        Several only if vLLM's code handles none of the tokens: it keeps those after a stop word. A request's last token
        can be any of them: those after it are dropped, and at the end the request has few blocks of them, too. No
        position exceeds the model's length.
        """
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() // self._num_managers
        table, several = self._table, min(most, self.max_model_len - 1 - int(computed.max()))
        if (
            several > 1
            and table.is_known[rows].all()
            and not table.is_left[rows].any()
            and self._new_blocks(computed, several).sum() <= free
            and self.takes_several(ids)
        ):
            return several
        return int(self._new_blocks(computed, 1).sum() <= free)

    def _new_blocks(self: Any, computed: Rows, number: int) -> Rows:
        """Return how many blocks each request needs for ``number`` tokens after those that are ``computed``."""
        return (computed + (number - 1)) // self._block_size - (computed - 1) // self._block_size

    def _block_ids(self: Any, name: str, tokens: int) -> tuple[list[int], ...] | None:
        """Return the blocks that a request needs in addition for ``tokens`` tokens; None if it needs none."""
        blocks = self.kv_cache_manager.coordinator.allocate_new_blocks(name, tokens, tokens)
        return tuple([block.block_id for block in of_group] for of_group in blocks) if any(blocks) else None

    def _none_admitted(self: Any, decodes: int) -> SchedulerOutput:
        """Return the rest of a step in which no request can be admitted."""
        self.current_step += 1
        self.prev_step_scheduled_req_ids.clear()
        step = SchedulerOutput.make_empty()
        step.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set[str]()
        step.preempted_req_ids, self.reset_preempted_req_ids = self.reset_preempted_req_ids, set[str]()
        step.free_encoder_mm_hashes = self.encoder_cache_manager.get_freed_mm_hashes()
        return step

    def _admitted(self: Any, decodes: int) -> SchedulerOutput:
        """Return vLLM's step of the requests that wait, beside ``decodes`` tokens of those that run."""
        running, self.running = self.running, []
        limits = [name for name in LIMITS if hasattr(self, name)]
        for name in limits:
            setattr(self, name, getattr(self, name) - len(running))
        self.max_num_scheduled_tokens -= decodes
        try:
            return super().schedule()
        finally:
            self.max_num_scheduled_tokens += decodes
            for name in limits:
                setattr(self, name, getattr(self, name) + len(running))
            running += self.running
            self.running = running

    def record(self: Any, step, output, log_probs, states: dict) -> SchedulerOutput | None:
        """Append the sampled tokens of a step to vLLM's records of its requests, with their ``log_probs`` by row and
        token.

        ``states``: those of vLLM's output processor. Returns the step with the requests that are left to vLLM's
        ``update_from_output``: those that were admitted in it, that end or have ended, or whose outputs vLLM's code
        handles; None without any.
        """
        if (
            not isinstance(step, DecodeStep)
            or step.preemptions != self._preemptions  # a token that was under way may have to be dropped
            or output.num_nans_in_logits
            or self.grammar_compile_error_reqs
            or getattr(self, "encoder_cache_mismatch_reqs", None)  # not in vLLM 0.26
        ):
            return step
        table, rows, number, each = self._table, step.rows, len(step.requests), step.tokens
        ids, sampled = step.scheduled_cached_reqs.req_ids[:number], output.sampled_token_ids
        table.refresh(rows)
        held = table.serial[rows] == step.serials
        for place in np.flatnonzero(held & (table.is_known[rows] == 0)).tolist():
            table.know(int(rows[place]), self._records_of(step.requests[place], states[ids[place]]))
        log_probs = None if log_probs is None else log_probs.reshape(-1, each)
        if output.req_ids[:number] != ids:  # the runner has another order
            places = list(map(output.req_id_to_index.__getitem__, ids))
            sampled = [sampled[place] for place in places]
            log_probs = None if log_probs is None else log_probs[places]
        none = [NONE] * each
        tokens = np.array([of_row if len(of_row) == each else none for of_row in sampled[:number]], np.int64)
        ends, which_ends = table.tokens[rows] + each >= table.longest[rows], table.which_ends[rows]
        for which in np.unique(which_ends).tolist():
            ends |= (which_ends == which) & (tokens[:, :, None] == table.ends[which]).any((1, 2))
        plain = held & ~ends & (table.is_left[rows] == 0) & (tokens[:, 0] != NONE)
        left: dict[str, int] = {}
        if not plain.all():
            left = dict.fromkeys(itertools.compress(ids, ~plain), each)
            rows, tokens = rows[plain], tokens[plain]
            log_probs = None if log_probs is None else log_probs[:number][plain]
        table.append(rows, tokens, None if log_probs is None else log_probs[: len(rows)])
        table.in_flight[rows] -= each
        if self._is_async:
            table.ahead[rows] -= each
            if self._caches:  # vLLM's allocation adds those of the next step's requests
                known = table.computed[rows] - table.ahead[rows]
                full = known % self._block_size < each
                self._cache_blocks(rows[full], known[full])
        if len(step.num_scheduled_tokens) > len(step.requests):
            left.update(itertools.islice(step.num_scheduled_tokens.items(), len(step.requests), None))
        if not left:
            return None
        rest = copy.copy(step)
        rest.num_scheduled_tokens = left
        return rest

    def _cache_blocks(self: Any, rows: Rows, tokens: Rows) -> None:
        """Add the full blocks of the first ``tokens`` tokens of each request to the prefix cache.

        Requests with a block that is not in it yet are settled together.
        """
        requests, size, filled = self._table.requests, self._block_size, []
        for row, number in zip(rows.tolist(), tokens.tolist(), strict=True):
            name, blocks = requests[row].request_id, number // size
            if any(cached.get(name, 0) < blocks for cached in self._cached_blocks):
                filled.append((row, number))
        self._table.settle([row for row, _ in filled])
        for row, number in filled:
            self.kv_cache_manager.cache_blocks(requests[row], number)

    def _records_of(self: Any, request, state) -> Records | None:
        """Return where the tokens of a request go; None if vLLM does more with a token than appending it."""
        sampling = request.sampling_params
        if (
            sampling is None
            or sampling.min_tokens
            or sampling.prompt_logprobs is not None
            or getattr(sampling, "repetition_detection", None) is not None
            or request.resumable
            or type(state.detokenizer) is not IncrementalDetokenizer  # another one searches for stop words
            or state.output_kind is not RequestOutputKind.FINAL_ONLY
        ):
            return None
        log_probs = state.logprobs_processor.logprobs
        ends = [*(sampling.stop_token_ids or ()), sampling.eos_token_id]
        return Records(
            longest=min(request.num_prompt_tokens + request.max_tokens, self.max_model_len),
            ends=frozenset(token for token in ends if token is not None),
            extend=(
                request._all_token_ids.extend, request._output_token_ids.extend, state.detokenizer.token_ids.extend
            ),
            extend_log_probs=None if log_probs is None else log_probs.logprobs.extend,
        )  # fmt: skip

    def settle(self: Any) -> None:
        """Bring vLLM's records of all requests up to date."""
        self._table.settle_all()

    def update_from_output(self: Any, scheduler_output, model_runner_output):
        self._table.hand_over(scheduler_output.num_scheduled_tokens)
        return super().update_from_output(scheduler_output, model_runner_output)

    def finish_requests(self: Any, *args, **options):
        self._table.hand_over()
        return super().finish_requests(*args, **options)

    def reset_prefix_cache(self: Any, *args, **options):
        self._table.hand_over()
        done = super().reset_prefix_cache(*args, **options)
        for request in self.requests.values():
            # vLLM 0.26 drops the outputs of as many steps as tokens are under way. At most one step is.
            if getattr(request, "async_tokens_to_discard", 0) > 1:
                request.async_tokens_to_discard = 1
        return done

    def _preempt_request(self: Any, request, *args, **options) -> None:
        self._preemptions += 1
        super()._preempt_request(request, *args, **options)

    def _free_request(self: Any, request, *args, **options):
        self._table.release(request.request_id)
        return super()._free_request(request, *args, **options)
