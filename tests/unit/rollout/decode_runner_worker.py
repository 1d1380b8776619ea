"""What test_decode_runner.py runs: the short path of a made-up runner, in Triton's interpreter; prints the answers.

The runner's tensors are on the CPU, and what vLLM's graph and ours compute is made up: a cell of the cache depends on
the token, its position and the cell before it, the sampled token on the last cell of its request.
"""

import json
import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import CachedRequestData

from megatron_grpo.rollout.vllm import decode_runner
from megatron_grpo.rollout.vllm.decode_runner import NO_LOGPROBS, PAD_SLOT_ID, DecodeRunner, _Graph, _Sampling
from megatron_grpo.rollout.vllm.decode_steps import DecodeStep

PROMPTS = {"a": [3, 4, 5, 6, 7], "b": [8], "c": [9, 10, 11, 12]}
SLOTS = {"a": 4, "b": 0, "c": 2}
SIZE, BLOCK, ROWS, LONGEST, VOCABULARY = 8, 4, 4, 32, 1000
TOKENS = 12


class Event:
    def __init__(self, blocking: bool):
        self.record = self.synchronize = lambda: None


decode_runner.InputBatch = SimpleNamespace  # of vLLM 0.26; a later one has more fields
torch.cuda.Stream = lambda device: None
torch.cuda.Event = Event
decode_runner._pinned = lambda numbers: torch.full((numbers,), -7, dtype=torch.int32)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def both(tensor: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(np=tensor.numpy(), gpu=tensor)


class Runner:
    """What `DecodeRunner` reads of vLLM's runner, after the prompts and the first token of each request."""

    max_num_reqs, device, lora_config, attn_groups, kv_cache_config = SIZE, torch.device("cpu"), None, None, None

    def __init__(self):
        self.cache: dict[int, int] = {}
        self.launches: list[str] = []
        self.bounds: list[list[int]] = []  # of the lengths, at each forward pass
        self.lengths: list[list[int]] = []
        self.req_states = SimpleNamespace(
            req_id_to_index=SLOTS, last_sampled_tokens=torch.zeros(SIZE, 1, dtype=torch.int64),
            num_computed_tokens=both(ints(SIZE)), num_computed_tokens_np=np.zeros(SIZE, np.int32),
            prefill_len=both(ints(SIZE)),
        )  # fmt: skip
        self.block_tables = SimpleNamespace(
            block_tables=[both(ints(SIZE, LONGEST // BLOCK))], input_block_tables=[ints(SIZE, LONGEST // BLOCK)],
            slot_mappings=torch.zeros(1, SIZE, dtype=torch.int64), kernel_block_sizes=[BLOCK],
            append_block_ids=self.append, apply_staged_writes=lambda: None,
        )  # fmt: skip
        self.input_buffers = SimpleNamespace(
            query_start_loc=ints(SIZE + 1), seq_lens=ints(SIZE), input_ids=ints(SIZE),
            positions=torch.zeros(SIZE, dtype=torch.int64), is_padding=torch.zeros(SIZE, dtype=torch.bool),
        )  # fmt: skip
        states = SimpleNamespace(
            temperature=both(torch.ones(SIZE)), seeds=both(torch.zeros(SIZE, dtype=torch.int64)),
            num_logprobs=np.zeros(SIZE, np.int64), top_k=both(torch.full((SIZE,), VOCABULARY)),
            top_p=both(torch.ones(SIZE)), min_p=both(torch.zeros(SIZE)), vocab_size=VOCABULARY,
        )  # fmt: skip
        none = np.zeros(SIZE, bool)
        self.sampler = SimpleNamespace(
            sampling_states=states, penalties_state=SimpleNamespace(use_penalty=none),
            logit_bias_state=SimpleNamespace(use_logit_bias=none),
            bad_words_state=SimpleNamespace(num_bad_words=both(ints(SIZE))),
            logprob_token_ids_state=SimpleNamespace(num_token_ids=both(ints(SIZE))), logprobs_mode="raw_logprobs",
        )  # fmt: skip
        descriptor = SimpleNamespace(cg_mode=CUDAGraphMode.FULL, num_reqs=ROWS, num_tokens=ROWS)
        self.cudagraph_manager = SimpleNamespace(dispatch=lambda *sizes: descriptor, run_fullgraph=self.forward)
        self.model_state = SimpleNamespace(prepare_attn=self.prepare_attn)
        self.finish_requests = lambda step: None
        self.held: dict[str, int] = {}  # blocks of a request
        for name, prompt in PROMPTS.items():
            slot, before = SLOTS[name], 0
            self.held[name] = -(-len(prompt) // BLOCK)
            self.block_tables.block_tables[0].gpu[slot, : self.held[name]] = torch.tensor(self.blocks_of(name))
            for position, token in enumerate(prompt):
                before = self.cache[self.place(slot, position)] = cell(before, token, position)
            self.req_states.last_sampled_tokens[slot] = before % VOCABULARY
            self.req_states.num_computed_tokens.gpu[slot] = self.req_states.prefill_len.np[slot] = len(prompt)

    def blocks_of(self, name: str) -> list[int]:
        return [1 + 10 * SLOTS[name] + i for i in range(self.held[name])]

    def place(self, slot: int, position: int) -> int:
        block = int(self.block_tables.block_tables[0].gpu[slot, position // BLOCK])
        assert block
        return block * BLOCK + position % BLOCK

    def append(self, slot: int, blocks: tuple[list[int], ...], overwrite: bool) -> None:
        (name,) = (name for name, of_name in SLOTS.items() if of_name == slot)
        first = self.held[name] - len(blocks[0])
        self.block_tables.block_tables[0].gpu[slot, first : self.held[name]] = torch.tensor(blocks[0])

    def prepare_attn(self, inputs, mode, tables, places, groups, config) -> None:
        self.launches.append("attention")
        self.bounds.append(inputs.seq_lens_cpu_upper_bound.tolist())
        self.lengths.append(inputs.seq_lens.tolist())

    def forward(self, descriptor) -> None:
        self.launches.append("forward")
        buffers, tables = self.input_buffers, self.block_tables.input_block_tables[0]
        places = self.block_tables.slot_mappings[0].tolist()
        self.hidden = [0] * ROWS
        for row in range(ROWS):
            length = int(buffers.seq_lens[row])
            if length == 0:
                assert places[row] == PAD_SLOT_ID and not tables[row].any()
                continue
            position, before = int(buffers.positions[row]), 0
            assert position == length - 1
            if position:
                before = self.cache[int(tables[row, (position - 1) // BLOCK]) * BLOCK + (position - 1) % BLOCK]
            self.hidden[row] = self.cache[places[row]] = cell(before, int(buffers.input_ids[row]), position)

    def graph(self, made: DecodeRunner) -> _Graph:
        """The double of our graph: tokens, log-probabilities, and the states of the requests."""
        found = ints(2 * ROWS)

        def replay():
            self.launches.append("sample")
            for row, slot in enumerate(made._slots[:ROWS].tolist()):
                found[row] = self.hidden[row] % VOCABULARY
                found[ROWS:].view(torch.float32)[row] = -self.hidden[row] / 2**20
                if slot >= 0:
                    self.req_states.last_sampled_tokens[slot] = found[row]
                    self.req_states.num_computed_tokens.gpu[slot] += 1

        return _Graph(replay, found)


def cell(before: int, token: int, position: int) -> int:
    return (before * 31 + token * 17 + position * 7 + 5) % 2**19


def lived(several: list[int], log_probs: bool) -> tuple[Runner, dict[str, list]]:
    """The tokens and log-probabilities of the requests in steps with ``several`` tokens; "b" ends after the second."""
    runner = Runner()
    made = DecodeRunner(runner)
    runner.sampler.sampling_states.num_logprobs[:] = 0 if log_probs else NO_LOGPROBS
    made._graphs[ROWS, _Sampling(log_probs, False)] = runner.graph(made)
    computed = {name: len(prompt) for name, prompt in PROMPTS.items()}
    found: dict[str, list] = {name: [] for name in PROMPTS}
    outputs = []
    for number, each in enumerate(several):
        ids = ["c", "a", "b"] if number < 2 else ["c", "a"]
        assert made.takes_several(ids) == (number > 0)
        step = DecodeStep.make_empty()
        blocks: list = []
        for name in ids:
            before, runner.held[name] = runner.held[name], -(-(computed[name] + each) // BLOCK)
            blocks.append((runner.blocks_of(name)[before:],) if runner.held[name] > before else None)
        step.requests, step.tokens, step.grown = ids, each, list(range(len(ids)))
        step.computed = np.array([computed[name] for name in ids])
        step.num_scheduled_tokens = dict.fromkeys(ids, each)
        step.scheduled_cached_reqs = CachedRequestData(ids, set(), [], {}, blocks, step.computed.tolist(), [])
        assert made.execute_model(step) is None
        outputs.append((ids, each, made.sample_tokens(None)))
        computed |= {name: computed[name] + each for name in ids}
        if len(outputs) == 2:  # the host looks at a step when the next one is launched
            note(found, *outputs.pop(0))
    note(found, *outputs.pop())
    return runner, found


def note(found: dict[str, list], ids: list[str], each: int, output) -> None:
    made = output.get_output()
    assert made.req_ids == ids and all(len(of_row) == each for of_row in made.sampled_token_ids)
    starts = made.logprobs and made.logprobs.cu_num_generated_tokens
    for name in ids:
        row = made.req_id_to_index[name]
        start = row if starts is None else starts[row]
        for i, token in enumerate(made.sampled_token_ids[row]):
            if made.logprobs is None:
                found[name].append([token, None])
            else:
                assert made.logprobs.logprob_token_ids[start + i].tolist() == [token]
                found[name].append([token, float(made.logprobs.logprobs[start + i, 0])])


def main() -> None:
    answers = {}
    for log_probs in (True, False):
        (_, single), (runner, several) = lived([1] * TOKENS, log_probs), lived([1, 4, 2, 4, 1], log_probs)
        several["b"] = several["b"][:2]  # the rest is dropped
        answers[f"log-probabilities {log_probs}"] = {
            "single": single, "several": several, "launches": runner.launches, "bounds": runner.bounds,
            "lengths": runner.lengths,
        }  # fmt: skip
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
