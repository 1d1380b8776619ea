"""vLLM's model runner with a short path for decode steps: the same kernels in a few launches.

For a decode step vLLM's second runner prepares the inputs and samples by some thirty kernels and copies, each launched
from Python: with a small model the host takes longer than the GPU. In a step of `decode_steps` every request decodes
one token or several, and nothing of its inputs comes from the host but new blocks. For each token of the requests,
`DecodeRunner` then prepares the inputs by one kernel, replays vLLM's CUDA graph of the model, and replays a graph of
its own: the head, sampling, log-probabilities, and the states of the requests. vLLM's own code runs all other steps.

This repeats what vLLM's code does in that case: it is installed only where vLLM's sources are those of a version that
the tests compared (`megatron_grpo.patches.vllm.DECODE_RUNNER`).
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch, post_update
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from megatron_grpo.models.exact import kernels
from megatron_grpo.patches import vllm as patches
from megatron_grpo.rollout.vllm import sampling_kernels
from megatron_grpo.rollout.vllm.cuda_graph import record
from megatron_grpo.rollout.vllm.decode_steps import AT_ONCE, DecodeStep

UNDER_WAY = 4  # host buffers in turn; vLLM has at most two steps under way
EMPTY = -1  # the request of a row that only fills a graph's batch


def install(runner: Any) -> "DecodeRunner | None":
    """Give a model runner of vLLM the short path; None if it is not one of those that can have it."""
    if not can_have(runner):
        return None
    made = DecodeRunner(runner)
    made.execute = patches.EXECUTE_MODEL.install_on(runner, made.execute_model)
    made.sample = patches.SAMPLE_TOKENS.install_on(runner, made.sample_tokens)
    patches.TOKEN_LOG_PROBS.install(kernels.token_log_probs)  # vLLM's own steps have the same bits
    patches.GUMBEL_SAMPLE.install(sample_tokens)
    return made


def can_have(runner: Any) -> bool:
    """Return whether this runner has nothing that works in each step or on other ranks."""
    return (
        type(runner) is GPUModelRunner
        and type(runner.model_state) is DefaultModelState
        and runner.model_state.rope_state is None
        and not runner.supports_mm_inputs
        and not runner.is_encoder_decoder
        and not runner.is_pooling_model
        and runner.speculator is None
        and not runner.num_speculative_steps
        and runner.kv_connector is NO_OP_KV_CONNECTOR
        and runner.eplb.state is None
        and runner.pcp_manager is None
        and not runner.use_dcp
        and runner.parallel_config.world_size == 1
        and runner.dp_size == 1
        and runner.model_config.rswa_window is None
        and runner.block_tables.num_kv_cache_groups == 1
        and not runner.sampler.compute_nans
        and not runner.sampler.use_fp64_gumbel
        and runner.sampler.logprobs_mode in ("raw_logprobs", "processed_logprobs")
        and runner.cudagraph_manager is not None
        and runner.cudagraph_manager.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        and not runner.cudagraph_manager.use_aux_hidden_state_outputs
    )


def sample_tokens(
    logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature,
    output_processed_logits=None, output_processed_logits_col=None, use_fp64=False,
):  # fmt: skip
    """Return a token of each row of ``logits`` by `sampling_kernels.sample`, by vLLM's kernel where drafts need it."""
    if apply_temperature or use_fp64 or output_processed_logits is not None:
        return gumbel_sample(
            logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, output_processed_logits,
            output_processed_logits_col, use_fp64,
        )  # fmt: skip
    return sampling_kernels.sample(logits, expanded_idx_mapping, temperature, seed, pos)


@dataclass(frozen=True)
class _Sampling:
    """What the requests of a step have in common."""

    log_probs: bool
    temperature: bool  # whether one is neither 0 nor 1


@dataclass
class _Graph:
    """Head, sampling and states for a number of rows; ``found`` ``[2 * rows]`` gets tokens and log-probabilities."""

    replay: Any
    found: torch.Tensor


@dataclass
class _Batch:
    """The requests of a step, and what is the same in the next one with the same requests."""

    ids: list[str]
    slots: np.ndarray  # of the requests in vLLM's states [n]
    rows: int  # with those that fill the graph's batch
    descriptor: Any  # of vLLM's graph of the model
    graph: _Graph
    sampling: _Sampling
    places: dict[str, int]  # of the requests in the batch
    inputs: InputBatch


class DecodeRunner:
    """The short path of a runner: `execute_model` and `sample_tokens` take the place of the runner's own."""

    def __init__(self, runner: Any):
        size, device = runner.max_num_reqs, runner.device
        self.runner = runner
        self.execute: Any = None  # vLLM's own methods
        self.sample: Any = None
        self.enabled = True
        self.steps = 0  # that took this path
        self._batch: _Batch | None = None
        self._launched: tuple[_Batch, torch.Tensor] | None = None  # between `execute_model` and `sample_tokens`
        self._graphs: dict[tuple[int, _Sampling], _Graph] = {}
        self._slots = torch.full((size,), EMPTY, dtype=torch.int32, device=device)
        self._starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._ones = torch.ones(size, dtype=torch.int32, device=device)
        self._zeros = torch.zeros_like(self._ones)
        # vLLM's buffers of these take turns, and a graph has fixed addresses. Its kernels read those of `EMPTY`, too.
        self._temperatures = torch.ones(1 + size, dtype=torch.float32, device=device)[1:]
        self._seeds = torch.zeros(1 + size, dtype=torch.int64, device=device)[1:]
        self._capture_stream = torch.cuda.Stream(device)
        self._host_slots = itertools.cycle(_pinned(size) for _ in range(UNDER_WAY))
        self._host_found = itertools.cycle(_pinned(AT_ONCE * 2 * size) for _ in range(UNDER_WAY))

    @torch.inference_mode()
    def execute_model(self, scheduler_output, intermediate_tensors=None, **options):
        """Launch a step's forward pass."""
        self._launched = None
        if self.enabled and not options and self._is_decode_step(scheduler_output):
            batch = self._batch
            if batch is None or batch.ids != scheduler_output.scheduled_cached_reqs.req_ids:
                batch = self._make_batch(scheduler_output)
            if batch is not None:
                self._batch = batch
                self._launch(scheduler_output, batch)
                return None
        assert getattr(scheduler_output, "tokens", 1) == 1, "vLLM's runner computes one token"  # see `takes_several`
        self._batch = None
        return self.execute(scheduler_output, intermediate_tensors, **options)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output):
        """Launch sampling after `execute_model`; return the step's output."""
        launched, self._launched = self._launched, None
        if launched is None:
            return self.sample(grammar_output)
        batch, found = launched
        self._sample(batch, found[-1])
        event = torch.cuda.Event(blocking=True)
        event.record()
        self.steps += 1
        return _Output(batch, found, event)

    @torch.inference_mode()
    def takes_several(self, ids: list[str]) -> bool:
        """Return whether the next step takes this path if it decodes several tokens of each of these requests.

        So it is if the step before took it with these and perhaps others.
        """
        batch = self._batch
        if batch is None or not self.enabled:
            return False
        if batch.ids == ids:
            return True
        return all(name in batch.places for name in ids) and self._prepared(ids, batch.sampling) is not None

    def _prepared(self, ids: list[str], sampling: _Sampling | None) -> tuple[Any, _Graph] | None:
        """Return vLLM's graph for these requests, by its descriptor, and ours; None if one of them is missing."""
        runner, number = self.runner, len(ids)
        adapters = len(runner.lora_state.get_activate_loras(ids)) if runner.lora_config else 0
        descriptor = runner.cudagraph_manager.dispatch(number, number, 1, adapters)
        if sampling is None or not _of_decodes(descriptor):
            return None
        graph = self._graph(descriptor.num_tokens, sampling)
        return None if graph is None else (descriptor, graph)

    @staticmethod
    def _is_decode_step(step) -> bool:
        """Return whether each request of a step decodes, and no other work comes with the step."""
        return (
            isinstance(step, DecodeStep)
            and len(step.num_scheduled_tokens) == len(step.requests)
            and not step.scheduled_new_reqs
            and not step.scheduled_cached_reqs.resumed_req_ids
            and not step.preempted_req_ids
            and not step.new_block_ids_to_zero
            and not step.kv_cache_block_copies
            and not step.has_structured_output_requests
        )

    def _make_batch(self, step: DecodeStep) -> _Batch | None:
        """Return the batch of a step's requests; None if the short path does not sample as they ask."""
        runner, ids = self.runner, step.scheduled_cached_reqs.req_ids
        states, sampler, number = runner.req_states, runner.sampler, len(ids)
        sampling: _Sampling | None
        last = self._batch
        if last is not None and last.places.keys() >= set(ids):  # some requests have ended
            slots, sampling = last.slots[[last.places[name] for name in ids]], last.sampling
        else:
            slots = np.fromiter(map(states.req_id_to_index.__getitem__, ids), np.int64, number)
            if (states.prefill_len.np[slots] > step.computed).any():
                return None
            sampling = self._sampling_of(slots)
        prepared = self._prepared(ids, sampling)
        if sampling is None or prepared is None:
            return None
        descriptor, graph = prepared
        rows = descriptor.num_tokens
        if runner.lora_config:
            runner._set_active_loras(*runner.lora_state.make_lora_inputs(ids, slots, np.ones(number, np.int32)))
        if self._batch is None:  # vLLM's code may have admitted requests
            self._temperatures.copy_(sampler.sampling_states.temperature.gpu)
            self._seeds.copy_(sampler.sampling_states.seeds.gpu)
        host = next(self._host_slots)[:rows]
        host.fill_(EMPTY)
        host[:number] = torch.from_numpy(slots)
        self._slots[:rows].copy_(host, non_blocking=True)
        return _Batch(
            list(ids), slots, rows, descriptor, graph, sampling, dict(zip(ids, range(number), strict=True)),
            self._inputs(list(ids), slots, rows),
        )  # fmt: skip

    def _sampling_of(self, slots: np.ndarray) -> _Sampling | None:
        """Return what the requests in ``slots`` have in common; None if the graph does not sample as they ask."""
        sampler = self.runner.sampler
        states = sampler.sampling_states
        temperatures, log_probs = states.temperature.np[slots], states.num_logprobs[slots]
        found = _Sampling(
            log_probs=bool(log_probs[0] == 0), temperature=bool(((temperatures != 0) & (temperatures != 1)).any())
        )
        if (
            (log_probs != (0 if found.log_probs else NO_LOGPROBS)).any()
            or (states.top_k.np[slots] != states.vocab_size).any()
            or (states.top_p.np[slots] != 1).any()
            or states.min_p.np[slots].any()
            or sampler.penalties_state.use_penalty[slots].any()
            or sampler.logit_bias_state.use_logit_bias[slots].any()
            or sampler.bad_words_state.num_bad_words.np[slots].any()
            or sampler.logprob_token_ids_state.num_token_ids.np[slots].any()
            # Log-probabilities before temperature, which changes the logits in their place.
            or (found.temperature and found.log_probs and sampler.logprobs_mode == "raw_logprobs")
        ):
            return None
        return found

    def _inputs(self, ids: list[str], slots: np.ndarray, rows: int) -> InputBatch:
        """Return vLLM's description of the batch, from which the attention's backend plans its work."""
        runner, number = self.runner, len(ids)
        buffers, prefilled = runner.input_buffers, runner.req_states.prefill_len.np[slots]
        starts = np.minimum(np.arange(rows + 1, dtype=np.int32), number)
        return InputBatch(
            req_ids=ids,
            num_reqs=number,
            num_reqs_after_padding=rows,
            idx_mapping=self._slots[:number],
            idx_mapping_np=slots,
            expanded_idx_mapping=self._slots[:number],
            expanded_local_pos=self._zeros[:number],
            num_scheduled_tokens=np.ones(number, np.int32),
            num_tokens=number,
            num_tokens_after_padding=rows,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=buffers.query_start_loc[: rows + 1],
            query_start_loc_np=starts,
            seq_lens=buffers.seq_lens[:rows],
            seq_lens_cpu_upper_bound=torch.zeros(rows, dtype=torch.int32),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=np.zeros(number, np.int32),
            prefill_len_np=prefilled,
            num_computed_prefill_tokens_np=prefilled,
            is_prefilling_np=np.zeros(number, bool),
            max_seq_len_np=None,
            input_ids=buffers.input_ids[:rows],
            positions=buffers.positions[:rows],
            is_padding=buffers.is_padding[:rows],
            logits_indices=self._starts[:number],
            cu_num_logits=self._starts[: number + 1],
            cu_num_logits_np=np.arange(number + 1, dtype=np.int32),
            has_structured_output_reqs=False,
            prompt_lens=None,
        )

    def _launch(self, step: DecodeStep, batch: _Batch) -> None:
        """Launch a decode step up to the forward pass of its last token."""
        runner, cached = self.runner, step.scheduled_cached_reqs
        states, tables = runner.req_states, runner.block_tables
        runner.finish_requests(step)
        computed = step.computed.astype(np.int32)
        states.num_computed_tokens_np[batch.slots] = computed
        grown = [place for place in step.grown if cached.new_block_ids[place] is not None]
        for place in grown:
            tables.append_block_ids(int(batch.slots[place]), cached.new_block_ids[place], overwrite=False)
        if grown:
            tables.apply_staged_writes()
        found = next(self._host_found)[: step.tokens * 2 * batch.rows].view(step.tokens, 2 * batch.rows)
        for of_token in found[:-1]:
            self._forward(batch, computed)
            self._sample(batch, of_token)
            computed = computed + 1
        self._forward(batch, computed)
        self._launched = batch, found

    def _forward(self, batch: _Batch, computed: np.ndarray) -> None:
        """Launch the forward pass of a token of each request, after ``computed`` tokens at most."""
        runner, number, rows = self.runner, len(batch.ids), batch.rows
        states, tables, buffers = runner.req_states, runner.block_tables, runner.input_buffers
        table, of_rows, places = tables.block_tables[0].gpu, tables.input_block_tables[0], tables.slot_mappings
        _decode_inputs[(rows,)](
            self._slots, states.last_sampled_tokens, states.num_computed_tokens.gpu, table, table.stride(0),
            of_rows, of_rows.stride(0), places, buffers.input_ids, buffers.positions, buffers.seq_lens,
            buffers.query_start_loc, number,
            EMPTY_PLACE=PAD_SLOT_ID, BLOCK=tables.kernel_block_sizes[0], WIDTH=128,
        )  # fmt: skip
        batch.inputs.num_computed_tokens_np = computed
        lengths = batch.inputs.seq_lens_cpu_upper_bound.numpy()
        lengths[:number] = computed
        lengths[:number] += 1
        runner.model_state.prepare_attn(
            batch.inputs, batch.descriptor.cg_mode, (of_rows[:rows],), places[:, :rows], runner.attn_groups,
            runner.kv_cache_config,
        )  # fmt: skip
        runner.cudagraph_manager.run_fullgraph(batch.descriptor)

    @staticmethod
    def _sample(batch: _Batch, found: torch.Tensor) -> None:
        """Launch what follows the forward pass, and the copy of a token of each row to ``found`` of the host."""
        batch.graph.replay()
        found.copy_(batch.graph.found, non_blocking=True)

    def _graph(self, rows: int, sampling: _Sampling) -> _Graph | None:
        """Return the graph of what follows the forward pass of ``rows`` rows; None without memory for it.

        The largest one is captured first: the others' logits fit into its memory, which stays with the graphs.
        """
        if not self._graphs:
            manager = self.runner.cudagraph_manager
            largest = max(descriptor.num_tokens for descriptor in manager.graphs if _of_decodes(descriptor))
            torch.cuda.empty_cache()  # an allocation within a capture cannot
            sizes = [largest, rows]
        else:
            sizes = [rows]
        for size in sizes:
            if (size, sampling) not in self._graphs:
                try:
                    self._graphs[size, sampling] = self._capture(size, sampling)
                except torch.OutOfMemoryError:
                    self.enabled = False  # vLLM's own code needs less
                    return None
        return self._graphs[rows, sampling]

    def _capture(self, rows: int, sampling: _Sampling) -> _Graph:
        found = torch.empty(2 * rows, dtype=torch.int32, device=self.runner.device)
        self._slots[:rows].fill_(EMPTY)  # so that the first run changes no state
        self._after_forward(rows, sampling, found)  # compiles kernels
        pool = self.runner.cudagraph_manager.pool
        graph = record(lambda: self._after_forward(rows, sampling, found), self._capture_stream, pool)
        return _Graph(graph.replay, found)

    def _after_forward(self, rows: int, sampling: _Sampling, found: torch.Tensor) -> None:
        """Sample a token of each row, and advance the states of the requests."""
        runner, slots = self.runner, self._slots[:rows]
        states, positions = runner.req_states, runner.input_buffers.positions[:rows]
        logits = runner.model.compute_logits(runner.cudagraph_manager.hidden_states[:rows])
        if sampling.temperature:
            apply_temperature(logits, slots, self._temperatures)
        logits = kernels.whole_rows(logits)
        sums = kernels.log_sums(logits)
        tokens = sampling_kernels.sample(logits, slots, self._temperatures, self._seeds, positions, sums)
        found[:rows] = tokens
        if sampling.log_probs:
            found[rows:].view(torch.float32).copy_(kernels.token_log_probs(logits, tokens[:, None], sums)[:, 0])
        # No request of the batch has penalties, which alone read the counts of tokens.
        post_update(
            slots, states.num_computed_tokens.gpu, states.last_sampled_tokens, None, tokens.view(-1, 1),
            self._ones[:rows], self._zeros[:rows], self._starts[: rows + 1], states.all_token_ids.gpu,
            states.total_len.gpu,
        )  # fmt: skip


class _Output(AsyncModelRunnerOutput):
    """The output of a step, which `get_output` waits for; ``found`` ``[k, 2 * rows]``: of each of its tokens."""

    def __init__(self, batch: _Batch, found: torch.Tensor, event):
        self._batch, self._found, self._event = batch, found, event

    def get_output(self) -> ModelRunnerOutput:
        self._event.synchronize()
        batch, found = self._batch, self._found.numpy()
        number, each = len(batch.ids), len(found)
        tokens = found[:, :number].T.copy()
        log_probs = None
        if batch.sampling.log_probs:
            values = found[:, batch.rows :].view(np.float32)[:, :number].T.reshape(-1, 1)
            starts = list(range(0, each * number + 1, each)) if each > 1 else None
            # Nothing reads the ranks.
            log_probs = LogprobsLists(tokens.reshape(-1, 1), values.copy(), np.zeros(len(values), np.int64), starts)
        return ModelRunnerOutput(batch.ids, batch.places, tokens.tolist(), log_probs)


def _of_decodes(descriptor) -> bool:
    """Return whether vLLM has a graph of this size that decodes a token of each row."""
    return descriptor.cg_mode == CUDAGraphMode.FULL and descriptor.num_reqs == descriptor.num_tokens


def _pinned(numbers: int) -> torch.Tensor:
    return torch.empty(numbers, dtype=torch.int32, pin_memory=True)


@triton.jit(do_not_specialize=["number"])
def _decode_inputs(
    slots, last_tokens, computed, table, table_stride, of_rows, of_rows_stride, places, tokens, positions, lengths,
    starts, number, EMPTY_PLACE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a row's token, position, length, start, place in the cache, blocks; rows from ``number`` on are empty."""
    row = tl.program_id(0)
    if row == 0:
        tl.store(starts, 0)
    tl.store(starts + row + 1, tl.minimum(row + 1, number))
    target = of_rows + row * of_rows_stride
    if row >= number:
        tl.store(lengths + row, 0)
        tl.store(places + row, EMPTY_PLACE)
        for i in tl.range(0, of_rows_stride, WIDTH):
            at = i + tl.arange(0, WIDTH)
            tl.store(target + at, 0, mask=at < of_rows_stride)
        return
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(computed + slot)
    blocks = table + slot * table_stride
    tl.store(tokens + row, tl.load(last_tokens + slot).to(tl.int32))
    tl.store(positions + row, position.to(tl.int64))
    tl.store(lengths + row, position + 1)
    tl.store(places + row, tl.load(blocks + position // BLOCK).to(tl.int64) * BLOCK + position % BLOCK)
    number_of_blocks = position // BLOCK + 1
    for i in tl.range(0, number_of_blocks, WIDTH):
        at = i + tl.arange(0, WIDTH)
        held = at < number_of_blocks
        tl.store(target + at, tl.load(blocks + at, mask=held), mask=held)
