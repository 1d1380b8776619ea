"""Random lives of vLLM's scheduler, once with its own code and once with the project's decode steps.

`compare` drives two worlds in lockstep, each of a real scheduler, a real output processor and a made-up runner, called
as vLLM's engine core calls them. After every action everything must be equal that vLLM's code reads later: the step for
the runner, the completions, and the state of requests, queues and blocks.

`compare_several` lives a life in each world by itself: the project's steps have several tokens of each request there.
Tokens come from a made-up cache (`Device`), and the completions must be equal.

    PYTHONPATH=DIR_WITH_A_VLLM python tests/helpers/scheduler_lives.py SEED [SEED ...]    # of a vLLM without C++ parts
"""

import copy
import dataclasses
import sys
import types
import zlib
from collections import Counter, deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import vllm
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from megatron_grpo.rollout.vllm import decode_steps, running_table
from megatron_grpo.rollout.vllm.decode_steps import DecodeStep, scheduler
from megatron_grpo.rollout.vllm.scheduler import collect_log_probs

decode_steps.BETWEEN_ADMISSIONS = 0  # vLLM admits a request as soon as it can
running_table.KEPT = 9  # so that the ring of a request is full often
VOCABULARY = 40
LONGEST = 120  # tokens of a sequence
WORD = 7  # the token that completes the "stop word" of some requests
# What of a request need not be equal: objects of its own, and the step at which a pipeline may schedule it again.
NOT_STATE = {"sampling_params", "_block_hasher", "lora_request", "next_decode_eligible_step", "prefill_stats"}


class Settings(types.SimpleNamespace):
    """Settings of which all others are None."""

    def __getattr__(self, name: str):
        return None


class StopWord(IncrementalDetokenizer):
    """A detokenizer that finds a stop word in the text of token `WORD`."""

    def update(self, new_token_ids, stop_terminated):
        super().update(new_token_ids, stop_terminated)
        return "word" if WORD in new_token_ids else None


@dataclasses.dataclass(frozen=True)
class Life:
    """Settings of an engine, and what happens before which step."""

    is_async: bool
    v2_runner: bool
    caching: bool
    block: int
    blocks: int
    sequences: int
    budget: int  # tokens of a step
    log_probs: int  # most kept tokens of a request
    adapters: bool
    events: dict[int, list[tuple]]
    look: int = 1  # steps after which all numbers of both worlds are compared: a look brings the project's up to date
    several: bool = False  # tokens of each request in a decode step

    @classmethod
    def of_seed(cls, seed: int, is_async: bool, look: int = 1) -> "Life":
        rng = np.random.default_rng(seed)
        block, sequences = int(rng.choice([4, 8, 16])), int(rng.integers(3, 14))
        # Where prompts are in parts, the budget can also be below the number of running requests.
        budget = int(rng.choice([4096, 4096, 4096, 40, max(2, sequences - 2)]))
        events: dict[int, list[tuple]] = {}

        def add(step: int, *event) -> None:
            events.setdefault(int(step), []).append(event)

        count = int(rng.integers(5, 40))
        for number, step in enumerate(sorted(rng.integers(0, rng.choice([5, 40, 150]), count))):
            kind = rng.choice(["plain"] * 12 + ["least", "word", "adapter", "constraint", "wrong constraint", "parts"])
            add(step, "arrive", number, str(kind), int(rng.integers(1, 34)), int(rng.choice([1, 2, 70, 70, 200])))
        for name, most in (
            ("abort", 5),
            ("new weights", 2),
            ("interrupt", 2),
            ("preempt all", 2),
            ("pause", 3),
            ("rewind", 2),
            ("free an image", 1),
            ("lose an image", 1),
            ("meet a nan", 1),
        ):
            for step in rng.integers(3, 170, rng.integers(0, most + 1)):
                add(step, name, int(rng.integers(0, count)))
        if rng.random() < 0.5:  # nothing waits
            sequences = max(sequences, count)
        least = -(-LONGEST // block) + 2  # one sequence must fit
        blocks = least + int(sequences * LONGEST * rng.choice([0.15, 0.4, 1.0])) // block
        v2 = bool(rng.random() < 0.5)
        kept = int(rng.choice([0, 0, 0, 3]))
        caching, adapters = rng.random(2) < (0.7, 0.2)
        return cls(
            is_async, v2, bool(caching), block, blocks, sequences, budget, kept, bool(adapters), events, look
        )  # fmt: skip

    @classmethod
    def with_several(cls, seed: int, is_async: bool) -> "Life":
        """Return a life whose completions depend on its requests alone; these are plain with every second seed."""
        life = cls.of_seed(seed, is_async)
        kinds = {"constraint": "plain", "wrong constraint": "plain"}
        if seed % 2:
            kinds |= dict.fromkeys(("least", "word", "parts"), "plain")
        events = {}
        for step, happening in life.events.items():
            kept = [event for event in happening if event[0] != "lose an image"]  # a request of its step fails
            events[step] = [(*e[:2], kinds.get(e[2], e[2]), *e[3:]) if e[0] == "arrive" else e for e in kept]
        return dataclasses.replace(life, v2_runner=True, log_probs=0, events=events, several=True)


def looks_of(seed: int) -> tuple[int, int]:
    """Return how seldom to look at two lives of a seed: after each step, and after several."""
    return 1, (2, 5, 40)[seed % 3]


def random_of(*key) -> np.random.Generator:
    """A generator that depends on its key alone, in every process."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


class Device:
    """A made-up GPU with a cache of blocks. Of a request it knows what the steps have said.

    The cache has a number for each token, which depends on the token and on the number before it, and a sampled token
    depends on the last number. So a request has the same tokens in whatever steps they are computed, as long as its
    steps read and write its own blocks.
    """

    def __init__(self, block: int):
        self.block = block
        self.cache: dict[tuple[int, int], int] = {}
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}

    def launch(self, step, held: dict) -> dict[str, list[tuple[int, float]]]:
        """Return the tokens and log-probabilities of a step; ``held``: the blocks of the requests in the scheduler."""
        computed = {}
        for new in step.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.tokens[new.req_id] = list(new.prefill_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for name, blocks, number in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            self.tables[name] += blocks[0] if blocks else []
            computed[name] = number
        if isinstance(step, DecodeStep):  # the short path of the runner reads these
            count = len(step.requests)
            assert step.computed.tolist() == cached.num_computed_tokens[:count]
            assert {i for i, blocks in enumerate(cached.new_block_ids[:count]) if blocks} <= set(step.grown)
        return {
            name: self._compute(name, computed[name], number, held[name])
            for name, number in step.num_scheduled_tokens.items()
        }

    def _compute(self, name: str, computed: int, number: int, held: list) -> list[tuple[int, float]]:
        table, tokens, found = self.tables[name], self.tokens[name], []
        assert table == [block.block_id for block in held], name
        for position in range(computed, computed + number):
            assert position < LONGEST
            value = zlib.crc32(repr((self._at(table, position - 1), tokens[position])).encode())
            place = table[position // self.block], position % self.block
            block = held[position // self.block]
            assert block.ref_cnt == 1 or block.block_hash is not None, name  # a prefix of others has this token, too
            self.cache[place] = value
            if position + 1 == len(tokens):
                rng = random_of("token", first_name(name), value)
                tokens.append(int(rng.integers(0, VOCABULARY)))
                found.append((tokens[-1], float(np.float32(rng.normal()))))
        return found

    def _at(self, table: list[int], position: int) -> int:
        return 0 if position < 0 else self.cache[table[position // self.block], position % self.block]


def first_name(name: str) -> str:
    """Return the name with which a request came, before interrupts and new weights."""
    return name.partition(".")[0]


class World:
    """One engine: with ``decode_steps`` the project's, else vLLM's own."""

    def __init__(self, life: Life, decode_steps: bool):
        self.life, self.step_number, self.loads, self.nans_until = life, 0, 0, 0
        self.outputs = OutputProcessor(tokenizer=None, log_stats=False)
        config = self._config()
        options: dict[str, Any] = {
            "kv_cache_config": self._cache(),
            "block_size": life.block,
            "structured_output_manager": Settings(
                should_advance=lambda request: False,
                accept_tokens=lambda request, ids: True,
                grammar_init=lambda request: None,
            ),
            "mm_registry": Settings(supports_multimodal_inputs=lambda config: False),
        }
        if decode_steps:
            self.scheduler = scheduler(config, **options)
            core = Settings(engine_core=Settings(engine_core=Settings(scheduler=self.scheduler)))
            core.output_processor, core.engine_core = self.outputs, core.engine_core
            collect_log_probs(core)
        else:
            self.scheduler = (AsyncScheduler if life.is_async else Scheduler)(vllm_config=config, **options)
        self.hash_of = get_hash_fn_by_name("sha256")
        init_none_hash(self.hash_of)
        self.queue: deque = deque()  # launched and not processed
        self.prompts: dict[str, list[int]] = {}
        self.asked: dict[str, tuple[str, int]] = {}  # of each request its kind and most tokens
        self.begun: dict[str, tuple[list[int], list[float]]] = {}  # before an interrupt
        self.aborted: set[str] = set()
        self.device = Device(life.block) if life.several else None
        if decode_steps and life.several:
            self.scheduler.takes_several = lambda ids: random_of("takes", self.step_number).random() < 0.9

    def _config(self) -> Settings:
        life = self.life
        own = AsyncScheduler if life.is_async else Scheduler
        return Settings(
            scheduler_config=Settings(
                max_num_seqs=life.sequences, max_num_batched_tokens=max(life.budget, life.sequences), policy="fcfs",
                max_num_scheduled_tokens=life.budget, watermark=0.0, long_prefill_token_threshold=0,
                scheduler_reserve_full_isl=True, async_scheduling=life.is_async, enable_chunked_prefill=True,
                get_scheduler_cls=lambda: own, prefill_schedule_interval=1,
            ),
            cache_config=Settings(
                num_gpu_blocks=life.blocks, enable_prefix_caching=life.caching, block_size=life.block
            ),
            model_config=Settings(max_model_len=LONGEST),
            parallel_config=Settings(
                pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1,
                data_parallel_size=1,
            ),
            lora_config=Settings(max_loras=1) if life.adapters else None,
            observability_config=Settings(), num_speculative_tokens=0, max_concurrent_batches=1 + life.is_async,
            max_in_flight_tokens=32768, use_v2_model_runner=life.v2_runner, num_hash_lookahead_tokens=0,
            num_lookahead_tokens=0, num_prefill_lookahead_tokens=0, aux_output_config=Settings(),
            ec_manager_config=Settings(get_encoder_cache_manager_obj=lambda: None),
        )  # fmt: skip

    def _cache(self) -> KVCacheConfig:
        spec = FullAttentionSpec(block_size=self.life.block, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        return KVCacheConfig(num_blocks=self.life.blocks, kv_cache_tensors=[], kv_cache_groups=groups)

    # ---- events

    def happen(self, event: tuple) -> None:
        """Let an event of the life happen; its name is that of a method."""
        name, *values = event
        getattr(self, name.replace(" ", "_"))(*values)

    def arrive(self, number: int, kind: str, prompt: int, tokens: int) -> None:
        # Few prompts, so that many have a prefix in common.
        self._add(f"r{number}", kind, [3 + number % 3] * prompt, tokens)

    def _add(self, name: str, kind: str, prompt: list[int], tokens: int, begun: int = 0) -> None:
        """Add a request for ``tokens`` tokens; the prompt ends with ``begun`` of them."""
        life, rng = self.life, random_of("request", first_name(name))
        self.asked[name] = kind, tokens
        least = 3 if kind == "least" and tokens > 3 else 0
        ends = [[], [5], [0], [5, 11]][rng.integers(0, 4)]
        params = SamplingParams(
            max_tokens=tokens - begun, temperature=1.0, ignore_eos=True, stop_token_ids=ends,
            logprobs=None if kind == "parts" else [0, None, life.log_probs][rng.integers(0, 3)], flat_logprobs=True,
            detokenize=False, min_tokens=max(0, least - begun), skip_clone=True,
            output_kind=RequestOutputKind.DELTA if kind == "parts" else RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        adapter = LoRARequest("adapter", 1, "no file") if kind == "adapter" and life.adapters else None
        request = EngineCoreRequest(
            name, list(prompt), None, params, None, 0.0, adapter, f"load {self.loads}", None, external_req_id=name
        )
        self.outputs.add_request(request, None)
        if kind == "word":
            self.outputs.request_states[name].detokenizer = StopWord()
        hasher = get_request_block_hasher(self.life.block, self.hash_of) if self.life.caching else None
        made = Request.from_engine_core_request(request, hasher)
        if "constraint" in kind:  # its grammar is not compiled yet
            made.structured_output_request = Settings()
            made.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self._later("compile", name, kind)
        self.prompts[name] = list(prompt)
        self.scheduler.add_request(made)

    def abort(self, number: int) -> None:
        self.aborted.add(f"r{number}")
        self._abort([name for name in self.outputs.request_states if first_name(name) == f"r{number}"])

    def _abort(self, names: list[str]) -> None:
        self.outputs.abort_requests(names, internal=True)
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def interrupt(self, number: int) -> None:
        """Abort all requests, and continue them with the tokens that they have."""
        unfinished = {}
        for name, state in self.states().items():
            flat = getattr(state.logprobs_processor.logprobs, "logprobs", [])
            unfinished[name] = list(state.detokenizer.token_ids), list(flat)
        self._abort(list(unfinished))
        for name, (ids, log_probs) in unfinished.items():
            (kind, tokens), again = self.asked[name], f"{name}.{self.step_number}"
            before = self.begun.get(name, ([], []))
            self.begun[again] = before[0] + ids, before[1] + log_probs
            prompt = [*self.prompts[name], *ids]
            if self.life.several:
                self._add(again, kind, prompt, tokens, len(self.begun[again][0]))
            elif len(prompt) < LONGEST - 1:
                self._add(again, "plain", prompt, 50)

    def states(self) -> dict:
        """vLLM's records of the requests, brought up to date as the project's engine does before it reads them."""
        if isinstance(self.scheduler, decode_steps.DecodeSteps):
            self.scheduler.settle()
        return self.outputs.request_states

    def new_weights(self, number: int) -> None:
        """Restart the requests without a token, so that they use no keys and values of the old weights."""
        self.loads += 1
        if not self.outputs.request_states:
            self.scheduler.reset_prefix_cache()
        begun = [name for name, state in self.states().items() if not state.detokenizer.token_ids]
        self._abort(begun)
        for name in begun:
            again = f"{name}.{self.step_number}"
            if name in self.begun:
                self.begun[again] = self.begun[name]
            if self.life.several:
                kind, tokens = self.asked[name]
                self._add(again, kind, self.prompts[name], tokens, len(self.begun.get(name, [()])[0]))
            else:
                self._add(again, "plain", self.prompts[name], 40)

    def preempt_all(self, number: int) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def pause(self, number: int) -> None:
        """Let steps pass in which nothing is scheduled, or nothing is admitted."""
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW if number % 2 else PauseState.PAUSED_ALL)
        self._later("unpause")

    def unpause(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _later(self, *event) -> None:
        """Let an event happen, in both worlds, some steps later."""
        later = self.life.events.setdefault(self.step_number + 1 + self.step_number % 6, [])
        if event not in later:
            later.append(event)

    def compile(self, name: str, kind: str) -> None:
        """Finish the compilation of a grammar."""
        if name in self.scheduler.requests:
            grammar = Settings() if kind == "constraint" else ValueError()
            self.scheduler.requests[name].structured_output_request.grammar = grammar

    def rewind(self, number: int) -> None:
        """Let the next step compute a token of a request again."""
        if isinstance(self.scheduler, decode_steps.DecodeSteps):
            self.scheduler._table.hand_over()
        for request in self.scheduler.running[:1]:
            if not (self.queue or request.is_prefill_chunk or request.num_output_placeholders):
                request.num_computed_tokens -= 1

    def free_an_image(self, number: int) -> None:
        self.scheduler.encoder_cache_manager.freed.append(f"image {number}")

    def lose_an_image(self, number: int) -> None:
        """Let a request fail: the image in the cache is not its own."""
        for request in self.scheduler.running[:1]:
            if hasattr(self.scheduler, "encoder_cache_mismatch_reqs"):
                self.scheduler.encoder_cache_mismatch_reqs.add(request.request_id)

    def meet_a_nan(self, number: int) -> None:
        self.nans_until = self.step_number + 3

    # ---- steps

    def schedule(self):
        """Schedule and launch a step, as vLLM's engine core does; None without requests."""
        if not self.scheduler.has_requests():
            return None
        step = self.scheduler.schedule()
        names = list(step.num_scheduled_tokens)
        random_of("order", self.step_number).shuffle(names)  # a runner has an order of its own
        ready = {name: not self.scheduler.requests[name].is_prefill_chunk for name in names}
        if getattr(step, "tokens", 1) > 1:  # nothing else comes with it: vLLM's runner would compute one token
            assert len(names) == len(step.requests) and not step.preempted_req_ids
        if self.device is not None:
            (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
            ready = self.device.launch(step, manager.req_to_blocks)
        self.queue.append((step, names, ready, self.step_number))
        return step

    def waits(self) -> bool:
        """Whether the core launches another step before it waits for this one."""
        return self.life.is_async and len(self.queue) < 2 and self.scheduler.has_requests()

    def update(self) -> list:
        """Process the oldest step that was launched; return the finished outputs."""
        step, names, ready, number = self.queue.popleft()
        columns = 1 + self.life.log_probs
        sampled, ids, values = [], [], []
        each = getattr(step, "tokens", 1)
        for name in names:
            if self.device is not None:
                sampled.append([token for token, _ in ready[name]])
                ids += [[token] for token in sampled[-1]] or [[0]]
                values += [[value] for _, value in ready[name]] or [[0.0]]
                continue
            rng = random_of("token", name, number)
            sampled.append([int(rng.integers(0, VOCABULARY))] if ready[name] else [])
            ids.append([*(sampled[-1] or [0]), *range(columns - 1)])
            values.append(rng.normal(size=columns))
        lists = LogprobsLists(
            np.array(ids).reshape(-1, columns), np.float32(values).reshape(-1, columns), np.zeros(len(ids), np.int32),
            list(range(0, len(ids) + 1, each)) if each > 1 else None,
        )  # fmt: skip
        places = {name: place for place, name in enumerate(names)}
        nans = {name: 2 for name in names if number < self.nans_until} or None
        made = ModelRunnerOutput(names, places, sampled, lists, num_nans_in_logits=nans)
        of_core = self.scheduler.update_from_output(step, made).get(0) or EngineCoreOutputs()
        processed = self.outputs.process_outputs(of_core.outputs)
        if processed.reqs_to_abort:  # vLLM's engine core is not asked to abort nothing
            self.scheduler.finish_requests(processed.reqs_to_abort, RequestStatus.FINISHED_ABORTED)
        return [
            (o.request_id, o.finished, o.num_cached_tokens, vars_of(o.outputs[0])) for o in processed.request_outputs
        ]

    # ---- state

    def state(self) -> dict:
        """Everything that later steps depend on, comparable with ==."""
        made, states = self.scheduler, self.states()
        pool, (manager,) = made.kv_cache_manager.block_pool, made.kv_cache_manager.coordinator.single_type_managers
        queues = ("running", "waiting", "skipped_waiting", "kv_holding_waiting")
        return {
            "queues": [[r.request_id for r in getattr(made, queue, ())] for queue in queues],
            "requests": {name: request_state(request) for name, request in made.requests.items()},
            "sets": [made.finished_req_ids, made.reset_preempted_req_ids, made.prev_step_scheduled_req_ids],
            "prefills": {request.request_id for request in made._inflight_prefills},
            "step": made.current_step,
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "blocks": [(block.ref_cnt, block.block_hash) for block in pool.blocks],
            "tables": {name: [block.block_id for block in of] for name, of in manager.req_to_blocks.items()},
            "cached": dict(manager.num_cached_block),
            "new blocks": list(manager.new_block_ids),
            "records": {name: self._record(state) for name, state in states.items()},
        }

    @staticmethod
    def _record(state) -> tuple:
        log_probs = state.logprobs_processor.logprobs
        values = getattr(log_probs, "logprobs", log_probs)
        return list(state.detokenizer.token_ids), values and list(values), state.is_prefilling, state.num_cached_tokens


def request_state(request) -> dict:
    """All numbers, lists and flags of a request."""
    return {name: value for name, value in vars(request).items() if name not in NOT_STATE | {"_records"}} | {
        "output_token_ids": list(request.output_token_ids),
        "all_token_ids": list(request.all_token_ids),
        "structured_output_request": None,
        "prefill_stats": request.prefill_stats is None,
    }


def vars_of(output) -> dict:
    """The fields of an output; of the log-probabilities the values, of which the project records no sum."""
    fields = {name: value for name, value in vars(output).items() if name != "cumulative_logprob"}
    fields["logprobs"] = getattr(output.logprobs, "logprobs", output.logprobs)
    return fields


def step_state(step) -> dict | None:
    """The fields of a scheduled step, comparable with ==; dictionaries in their order."""
    if step is None:
        return None

    def plain(value):
        if dataclasses.is_dataclass(value):
            return {
                f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name != "sampling_params"
            }
        if isinstance(value, dict):
            return [(key, plain(item)) for key, item in value.items()]
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return plain(step)


def check_numbers(step: DecodeStep, requests: dict, number: int) -> None:
    """Raise AssertionError if the numbers for `DecodeRunner` are not those of the step and of vLLM's ``requests``."""
    cached, count = step.scheduled_cached_reqs, len(step.requests)
    names = cached.req_ids[:count]
    assert names == [request.request_id for request in step.requests], f"step {number}: other requests"
    before = [requests[name].num_computed_tokens - 1 for name in names]  # vLLM counts the tokens of the step
    same([before, step.computed.tolist()], number, "the computed tokens")
    same([cached.num_computed_tokens[:count], step.computed.tolist()], number, "the computed tokens of the step")
    grown = [place for place, blocks in enumerate(cached.new_block_ids[:count]) if blocks is not None]
    assert set(grown) <= set(step.grown), f"step {number}: new blocks at {grown}, announced at {step.grown}"


def compare(life: Life) -> Counter:
    """Live a life in both worlds; AssertionError at the first difference. Counts of what happened."""
    worlds, counts, number = [World(life, False), World(life, True)], Counter(), 0
    events = life.events
    while number <= max(events, default=0) or any(w.scheduler.has_requests() or w.queue for w in worlds):
        assert number < 5000, "the life does not end"
        for event in list(events.pop(number, ())):
            for world in worlds:
                world.happen(event)
        number += 1
        for world in worlds:
            world.step_number = number
        steps = [world.schedule() for world in worlds]
        same([step_state(step) for step in steps], number, "the step")
        looks = number % life.look == 0
        if looks:
            same([world.state() for world in worlds], number, "the state after scheduling")
        if steps[1] is not None:
            counts["steps"] += 1
            names = steps[1].num_scheduled_tokens
            counts["decode steps"] += isinstance(steps[1], DecodeStep)
            counts["with others"] += isinstance(steps[1], DecodeStep) and len(names) > len(steps[1].requests)
            if isinstance(steps[1], DecodeStep):
                check_numbers(steps[1], worlds[0].scheduler.requests, number)
            counts["preemptions"] += len(steps[1].preempted_req_ids or ())
        waits = {world.waits() for world in worlds}
        assert len(waits) == 1
        if waits == {True} or not worlds[0].queue:
            continue
        found = [world.update() for world in worlds]
        same(found, number, "the outputs")
        if looks:
            same([world.state() for world in worlds], number, "the state after the outputs")
        counts["finished"] += len(found[0])
    same([world.state() for world in worlds], number, "the state at the end")
    return counts


def compare_several(life: Life) -> Counter:
    """Live a life in both worlds, one after the other; AssertionError if a completion differs. Counts of ours."""
    (theirs, _), (ours, counts) = (completions_of(copy.deepcopy(life), ours) for ours in (False, True))
    assert theirs.keys() == ours.keys(), f"vLLM's {theirs.keys()}, ours {ours.keys()}"
    for name, completion in theirs.items():
        assert completion == ours[name], f"{name}: vLLM's {completion}, ours {ours[name]}"
    return counts


def completions_of(life: Life, decode_steps: bool) -> tuple[dict[str, tuple], Counter]:
    """Return tokens, log-probabilities and reason of each request of a life that no event aborts; and counts."""
    world, counts, number, done = World(life, decode_steps), Counter(), 0, {}
    parts: dict[str, list[int]] = {}
    while number <= max(life.events, default=0) or world.scheduler.has_requests() or world.queue:
        assert number < 5000, "the life does not end"
        for event in life.events.pop(number, ()):
            world.happen(event)
        number += 1
        world.step_number = number
        step = world.schedule()
        if step is not None:
            counts["steps"] += 1
            counts["with several"] += getattr(step, "tokens", 1) > 1
            counts["preemptions"] += len(step.preempted_req_ids or ())
        if world.waits() or not world.queue:
            continue
        for name, finished, _, output in world.update():
            tokens, log_probs = parts.get(name, []) + list(output["token_ids"]), output["logprobs"]
            if not finished:
                parts[name] = tokens
                continue
            begun = world.begun.get(name, ([], []))
            done[first_name(name)] = (
                begun[0] + tokens, log_probs and begun[1] + list(log_probs), output["finish_reason"],
                output["stop_reason"],
            )  # fmt: skip
            counts["finished"] += 1
    pool = world.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == life.blocks - 1, "blocks are not freed"  # vLLM keeps one as an empty one
    return {name: completion for name, completion in done.items() if name not in world.aborted}, counts


def same(pair: list, step: int, what: str) -> None:
    """Raise AssertionError with the part that differs."""
    theirs, ours = pair
    if theirs == ours:
        return
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        for name in theirs:
            same([theirs[name], ours[name]], step, f"{what}: {name}")
    raise AssertionError(f"step {step}, {what}: vLLM's {theirs}, ours {ours}")


def main() -> None:
    print("vLLM", vllm.__version__)
    counts: Counter = Counter()
    for seed in map(int, sys.argv[1:]):
        for is_async in (False, True):
            try:
                for look in looks_of(seed):
                    counts += compare(Life.of_seed(seed, is_async, look))
                counts += compare_several(Life.with_several(seed, is_async))
            except AssertionError as error:
                raise SystemExit(f"life {seed}, {'asynchronous' if is_async else 'synchronous'}: {error}") from None
    print(dict(counts))


if __name__ == "__main__":
    main()
