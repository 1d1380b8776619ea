"""What tests/gpu/test_engine.py runs under torchrun: a trainer in bf16, a colocated vLLM, and rollouts.

    torchrun --nproc-per-node W tests/gpu/engine_worker.py OUT CASES FLAGS

CASES are methods of `Worker`, joined by commas. Every rank writes its findings to OUT/RANK.json.
"""

import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import made_up  # first of ours: it prepares for machines without a GPU

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from refusals import says

import pretrain_grpo
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.lora.attach import attach, local_adapter
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.rewards.pool import GroupMember
from megatron_grpo.rollout.collect import collect_rollout, to_batch
from megatron_grpo.rollout.engine import Completion, Request, generate
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.vllm import adapter as slots
from megatron_grpo.rollout.vllm.decode_choice import Measurement
from megatron_grpo.rollout.vllm.scheduler import attention_choices, scheduler_of
from megatron_grpo.rollout.weight_sync import planned
from megatron_grpo.rollout.weight_sync.adapter_sync import probe_adapter
from megatron_grpo.training import train_step
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.offload import Offloader
from megatron_grpo.training.setup import build_engine
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import hf, model_weights
from megatron_grpo.weights.stream import stream_hf

PROMPTS, GENERATIONS, TOKENS = 8, 4, 32
COMPLETIONS = PROMPTS * GENERATIONS
FLAGS = f"""--bf16 --max-prompt-length 72 --max-completion-length {TOKENS} --num-generations {GENERATIONS}
    --global-batch-size {COMPLETIONS} --micro-batch-size {COMPLETIONS // 2}
    --vllm-max-num-seqs 64 --vllm-gpu-memory-utilization 0.1 --steps-per-generation 1""".split()


class Worker:
    """A trainer and its engine, and what was found."""

    def __init__(self, args):
        self.args, self.found = args, {}
        model = forward.build_model(args, model_provider)
        hf.load_hf(model, args, args.load_hf)
        if args.lora_rank:
            attach(args, model)
        model, optimizer, _ = train_step.setup_optimizer(args, model)
        self.offloader = Offloader(model, optimizer, True, True, True)
        self.engine = build_engine(args, model, SimpleNamespace(decode=None))
        self.trainer = SimpleNamespace(args=args, model=model, engine=self.engine, timers=Timers(), iteration=1)
        ids = np.random.default_rng(0).integers(3, args.vocab_size - 2, args.max_prompt_length).tolist()
        # All alike: completions of one prompt can be equal by equal random numbers only.
        self.prompts = [Prompt(id=i, ids=ids, row={}, source="made up") for i in range(PROMPTS)]

    def wake(self) -> None:
        """As `EngineLifecycle.awake` does: weights, sync, cache."""
        self.engine.wake_weights()
        EngineLifecycle.sync(self.trainer, self.trainer.iteration)
        self.engine.wake_cache()

    def rollout(self, seed: int, temperature: float = 1.0):
        sampling = Sampling(TOKENS, temperature, log_probs=True)
        plan = RolloutPlan(self.prompts, GENERATIONS, sampling, seed)
        batch, _ = collect_rollout(self.engine, plan, None, None, self.trainer.timers)
        return batch

    @staticmethod
    def completions(batch) -> list[list[int]]:
        ends = batch.cu_seqlens[1:].tolist()
        return [batch.tokens[end - TOKENS : end].tolist() for end in ends]

    def mismatch(self, temperature: float) -> float:
        """Mean |log p(trainer) - log p(engine)| over sampled tokens, nats."""
        return self.distance(self.rollout(11, temperature), temperature)

    def distance(self, batch: RolloutBatch, temperature: float) -> float:
        args = replaced(self.args, temperature=temperature)
        ours = forward.log_probs(args, self.trainer.model, pretrain_grpo.forward_step, batch)
        return float(np.abs(ours - batch.rollout_log_probs)[batch.response_mask == 1].mean())

    # ---- cases

    def seeds(self) -> None:
        """Two rollouts with different seeds, and the first once more."""
        self.found["runner of its own"] = bool(self.engine._engine.vllm_config.use_v2_model_runner)
        self.found |= {name: self.completions(self.rollout(seed)) for name, seed in (("a", 7), ("b", 8), ("c", 7))}

    def ranks(self) -> None:
        """What this rank's engine itself answers, before any exchange."""
        sampling = Sampling(TOKENS)
        with self.engine.rollout(7):
            requests = [Request(i, self.prompts[0].ids, sampling) for i in range(GENERATIONS)]
            answers = {completion.id: completion.token_ids for completion in generate(self.engine, requests)}
        self.found["rank"] = [answers[i] for i in range(GENERATIONS)]

    def queued(self) -> None:
        """Requests that are given up or end leave nothing behind for those of the next rollout with the same ids.

        vLLM adds a random word to every request's id, which would hide that: the test switches it off.
        """
        sampling = Sampling(TOKENS)
        requests = [Request(i, self.prompts[0].ids, sampling) for i in range(GENERATIONS)]
        answers = []
        for _ in range(3):
            with self.engine.rollout(7):
                done = {completion.id: completion.token_ids for completion in generate(self.engine, requests)}
            answers.append([done[i] for i in range(GENERATIONS)])
            with self.engine.rollout(9):
                self.engine.submit(requests)
                for _ in range(5):
                    self.engine.poll()
                self.engine.abort([request.id for request in requests])
        self.found["queued"] = answers

    def cache(self) -> None:
        """New weights while a request runs, which keeps keys and values of the old ones: the next requests use none.

        Until then the request is that of an undisturbed rollout, and no token longer.
        """
        prompt = self.prompts[0]
        sampling = Sampling(TOKENS, self.args.temperature, log_probs=True)
        with self.engine.rollout(7):
            (undisturbed,) = generate(self.engine, [Request(0, prompt.ids, sampling)])
        with self.engine.rollout(7):
            self.engine.submit([Request(0, prompt.ids, sampling)])
            while len(self.engine.unfinished()[0].token_ids) < 2:
                self.engine.poll()
            with torch.no_grad():
                for chunk in self.trainer.model:
                    for parameter in chunk.parameters():
                        parameter.copy_(parameter.flip(0))  # other weights of the same size
            EngineLifecycle.sync(self.trainer, self.trainer.iteration + 1)
            self.engine.submit([Request(number, prompt.ids, sampling) for number in range(1, COMPLETIONS + 1)])
            done: dict[int, Completion] = {}
            while len(done) < COMPLETIONS + 1:
                done |= {completion.id: completion for completion in self.engine.poll()}
        self.found["cache"] = self.distance(self.group(done), self.args.temperature)
        versions, log_probs, expected = done[0].weight_versions, done[0].log_probs, undisturbed.log_probs
        assert log_probs and expected
        new = list(versions).index(versions[-1])
        self.found["seam"] = [new, log_probs[:new] == expected[:new], log_probs[new] != expected[new]]

    def prefix(self) -> None:
        """The mismatch of requests that begin with a prompt that vLLM has in its prefix cache.

        Also the size of a block, and how many tokens the first request and the others found there.
        """
        prompt, engine = self.prompts[0], self.engine._engine
        sampling = Sampling(TOKENS, self.args.temperature, log_probs=True)
        cached, step = [], engine.step

        def noting():
            outputs = step()
            cached.extend(output.num_cached_tokens for output in outputs if output.finished)
            return outputs

        engine.step = noting
        with self.engine.rollout(7):
            for numbers in range(1), range(1, COMPLETIONS + 1):
                requests = [Request(number, prompt.ids, sampling) for number in numbers]
                done = {completion.id: completion for completion in generate(self.engine, requests)}
        engine.step = step
        first, *others = cached
        self.found["prefix"] = {
            "mismatch": self.distance(self.group(done), self.args.temperature),
            "block": engine.vllm_config.cache_config.block_size,
            "cached": [first, min(others), max(others)],
        }

    def group(self, done: dict[int, Completion]) -> RolloutBatch:
        """Return the completions 1, 2, ... of the first prompt as a batch."""
        members = {number: GroupMember(0, number - 1, COMPLETIONS) for number in range(1, COMPLETIONS + 1)}
        return to_batch([self.prompts[0]], [done[number] for number in members], members, [0], 0)

    def short_steps(self) -> None:
        """Completions by short decode steps and by vLLM's: by sampling, those equal, their number, the short steps.

        Requests come, end, and are given up in both.
        """
        runner, facts = self.engine.decode_runner, {}
        assert runner is not None
        scheduler_of(self.engine._engine).takes_several = lambda ids: False
        for temperature, log_probs, top_p in (1.0, True, 1.0), (0.7, True, 1.0), (0.0, False, 1.0), (1.0, True, 0.9):
            lives = []
            for runner.enabled in (False, True):  # with tokens one by one: the batches are the same
                before = runner.steps
                lives.append(self.life(temperature, log_probs, top_p))
            vllm, ours = lives
            facts[f"{temperature} {log_probs} {top_p}"] = [
                sum(vllm[i] == ours[i] for i in vllm), len(vllm), runner.steps - before
            ]  # fmt: skip
        self.found["short steps"] = facts

    def several_tokens(self) -> None:
        """Completions by short decode steps of one token and of several: by sampling, those equal, their number, and
        the short steps of both.

        Some end early or are given up. vLLM's graph of 24 rows runs all tokens, so the kernels are the same.
        """
        made, runner, facts = scheduler_of(self.engine._engine), self.engine.decode_runner, {}
        assert runner is not None
        takes = made.takes_several
        for temperature, log_probs in (1.0, True), (0.7, True), (0.0, False):
            requests = [
                Request(
                    i,
                    self.prompts[i % PROMPTS].ids,
                    Sampling(9 + i if i < 6 else TOKENS, temperature, log_probs=log_probs),
                )
                for i in range(24)
            ]
            found, steps = [], []
            for made.takes_several in (lambda ids: False, takes):
                before, done = runner.steps, []
                with self.engine.rollout(7):
                    self.engine.submit(requests)
                    for _ in range(5):
                        done += self.engine.poll()
                    self.engine.abort([20])
                    while len(done) < 23:
                        done += self.engine.poll()
                found.append({one.id: (list(one.token_ids), one.log_probs and list(one.log_probs)) for one in done})
                steps.append(runner.steps - before)
            single, several = found
            equal = sum(single[i] == several[i] for i in single)
            facts[f"{temperature} {log_probs}"] = [equal, len(single), *steps]
        self.found["several tokens"] = facts

    def life(self, temperature: float, log_probs: bool, top_p: float) -> dict[int, tuple]:
        """Return the tokens and log-probabilities of requests by id."""
        requests = [
            Request(i, self.prompts[0].ids, Sampling(1 + i % TOKENS, temperature, top_p, log_probs=log_probs))
            for i in range(48)
        ]
        done: list[Completion] = []
        with self.engine.rollout(7):
            self.engine.submit(requests[:24])
            for _ in range(6):
                done += self.engine.poll()
            self.engine.submit(requests[24:])
            for _ in range(6):
                done += self.engine.poll()
            self.engine.abort([30, 31])
            while len(done) < 46:
                done += self.engine.poll()
        return {one.id: (list(one.token_ids), one.log_probs and list(one.log_probs)) for one in done}

    def attention(self) -> None:
        """The kernel of decode steps: the choice, the graphs that recorded ours, completions on both sides.

        Few sequences decode by FlashAttention if the choice leaves it any, many by our kernel likewise.
        """
        engine = self.engine._engine
        (choice,) = attention_choices(engine)
        config = engine.vllm_config
        graphs = config.compilation_config.cudagraph_capture_sizes
        self.found["attention"] = {
            "least": None if choice.least == math.inf else choice.least,
            "line": str(choice),
            "graphs": sorted(size for size in graphs if size <= config.scheduler_config.max_num_seqs),
            "recorded": sorted(recorded_with_ours),
            "mismatch": {number: self.distance(self.sequences(number), 1.0) for number in (16, 512)},
        }

    def each_attention(self) -> None:
        """The mismatch with each kernel, and the layers' calls of ours: without graphs the choice can change."""
        impls = [layer.impl for layer in layers_of(self.engine._engine)]
        (start,) = attention_choices(self.engine._engine)
        facts = self.found["each attention"] = {"line": str(start), "mismatch": [], "calls": []}
        for least in (1, math.inf):
            for impl in impls:
                impl.choice = replace(start, least=least)
            before = calls_of_ours[0]
            facts["mismatch"].append(self.mismatch(1.0))
            facts["calls"].append(calls_of_ours[0] - before)

    def sequences(self, number: int) -> RolloutBatch:
        """A rollout in which ``number`` sequences decode at a time."""
        prompts = self.prompts[: max(1, number // 64)]
        plan = RolloutPlan(prompts, number // len(prompts), Sampling(TOKENS, log_probs=True), 11)
        return collect_rollout(self.engine, plan, None, None, self.trainer.timers)[0]

    def temperatures(self) -> None:
        self.found["mismatch"] = {str(t): self.mismatch(t) for t in (1.0, 0.7)}

    def kept_tokens(self) -> None:
        """The mismatch over the tokens that the run's truncation keeps, and how many these are."""
        args = self.args
        sampling = Sampling(TOKENS, args.temperature, args.top_p, args.top_k, log_probs=True, kept_token_ids=True)
        plan = RolloutPlan(self.prompts, GENERATIONS, sampling, 11)
        batch, _ = collect_rollout(self.engine, plan, None, None, self.trainer.timers)
        gap = self.distance(batch, args.temperature)
        sizes = (batch.kept_token_ids[batch.response_mask == 1] >= 0).sum(1)
        self.found["kept tokens"] = [gap, int(sizes.min()), int(sizes.max())]

    def weights(self) -> None:
        """Weights that have changed reach the engine, and only with a sync."""
        before = self.mismatch(1.0)
        with torch.no_grad():
            for chunk in self.trainer.model:
                for parameter in chunk.parameters():
                    parameter.add_(0.5 * parameter.flip(0))
        stale = self.mismatch(1.0)
        EngineLifecycle.sync(self.trainer, self.trainer.iteration)
        self.found["weights"] = [before, stale, self.mismatch(1.0)]

    def compared(self) -> None:
        """What differs between the engine's weights, with what its kernels read, and the trainer's."""
        self.found["compared"] = self.differing()

    def planned(self) -> None:
        """What differs in the engine after planned syncs, what its loaders received, and the seconds of a sync."""
        (transfer,) = self.engine._transfers.values()
        facts = self.found["planned"] = {"first": self.differing(), "before": self.mismatch(1.0)}
        facts["loaders"] = [t.name for n, t in enumerate(transfer._plan.tensors) if n not in transfer._direct]
        with torch.no_grad():
            for chunk in self.trainer.model:
                for parameter in chunk.parameters():
                    parameter.add_(0.5 * parameter.flip(0) + 0.01)  # norms can be all zeros
        facts["stale"] = [len(self.differing()), self.mismatch(1.0)]
        seconds = []
        for version in range(2, 7):
            torch.cuda.synchronize()
            began = time.perf_counter()
            EngineLifecycle.sync(self.trainer, version)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        facts |= {"seconds": seconds, "second": self.differing(), "after": self.mismatch(1.0)}
        facts["tensors"] = len(transfer._plan.tensors)
        differing = planned.differing

        def flipped(targets, parts):
            first = (0,) * targets[0].ndim
            targets[0][first] = -targets[0][first]
            return differing(targets, parts)

        planned.differing = flipped
        facts["flipped"] = says(lambda: EngineLifecycle.sync(self.trainer, 7))

    def differing(self) -> list[str]:
        return self.engine.compare_weights(stream_hf(self.trainer.model, self.args))

    def adapter(self) -> None:
        """An adapter reaches the engine beside weights that stay, and after sleep; a lost one is found."""
        facts = self.found["adapter"] = {"probe": says(lambda: probe_adapter(self.engine))}
        gaps = [self.mismatch(1.0)]
        with torch.no_grad():
            for weight, tensor in local_adapter(self.trainer.model):
                shapes = dict(weight.hf)
                change = torch.empty_like(tensor)
                read = lambda name, index, shapes=shapes: made_up.weight(name, shapes[name])[index]  # noqa: E731
                weight.fill(change, *model_weights.tensor_parallel(weight), read)
                tensor.add_(change)
        gaps.append(self.mismatch(1.0))
        EngineLifecycle.sync(self.trainer, self.trainer.iteration)
        gaps.append(self.mismatch(1.0))
        self.engine.sleep()
        self.wake()
        facts["mismatch"] = [*gaps, self.mismatch(1.0)]
        facts["metrics"] = self.trainer.synced.metrics
        facts["weights"] = self.engine.compare_weights(stream_hf(self.trainer.model, self.args))
        load, slots.load_adapter = slots.load_adapter, lambda worker, adapter: None
        with torch.no_grad():
            for _, tensor in local_adapter(self.trainer.model):
                tensor.mul_(1.5)
        facts["withheld"] = says(lambda: EngineLifecycle.sync(self.trainer, self.trainer.iteration))
        slots.load_adapter = load

    def sleep(self) -> None:
        """The device's free memory, awake, asleep and awake again, and what is sampled before and after; meanwhile the
        trainer's tensors leave the device, and come back.
        """
        tensors = [p.detach().clone() for chunk in self.trainer.model for p in chunk.parameters()]
        first, free = self.completions(self.rollout(7)), [self.free()]
        self.engine.sleep()
        free.append(self.free())
        moved = self.offloader.to_host()
        free.append(self.free())
        self.offloader.to_device()
        same = [p.detach() for chunk in self.trainer.model for p in chunk.parameters()]
        self.wake()
        free.append(self.free())
        self.found["sleep"] = {
            "free": free,
            "moved": moved.size,
            "weights came back": all(map(torch.equal, tensors, same)),
            "answers are the same": self.completions(self.rollout(7)) == first,
        }

    def drafts(self) -> None:
        """The share of drafts that greedy completions accept, before sleep and after it."""
        shares = []
        for _ in range(2):
            self.rollout(7, temperature=0.0)
            _, proposed, accepted = self.engine.drafts.tolist()
            shares.append(accepted / proposed)
            self.engine.sleep()
            self.wake()
        self.found["drafts"] = shares

    @staticmethod
    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]


recorded_with_ours: set[int] = set()  # sequences of vLLM's CUDA graphs in which our kernel attends
calls_of_ours = [0]


def note_decode_attention() -> None:
    """Note the calls of our kernel of decode steps, but for those of the measurement, from now on."""
    from megatron_grpo.rollout.vllm import colocate  # noqa: F401  it sets what vLLM reads at its import
    from megatron_grpo.rollout.vllm.decode_attention import DecodeAttention

    decode, choose = DecodeAttention.decode, Measurement.choose
    measures = [False]

    def noting(self, layer, query, kv_cache, meta, output):
        if not measures[0]:
            calls_of_ours[0] += 1
            if torch.cuda.is_current_stream_capturing():
                recorded_with_ours.add(len(meta.seq_lens))
        return decode(self, layer, query, kv_cache, meta, output)

    def choosing(self):
        measures[0] = True
        began = time.perf_counter()
        try:
            return choose(self)
        finally:
            measures[0] = False
            print(f"choice of a kernel: {time.perf_counter() - began:.2f} s", flush=True)

    DecodeAttention.decode, Measurement.choose = noting, choosing


def layers_of(engine) -> list:
    """Return the engine's layers of attention."""
    return list(engine.vllm_config.compilation_config.static_forward_context.values())


def main() -> None:
    out, cases, flags = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    args = made_up.parse([*FLAGS, *flags], int(os.environ["WORLD_SIZE"]))
    initialize_distributed(args)
    set_random_seed(args.seed)
    if any("attention" in case for case in cases):
        note_decode_attention()
    worker = Worker(args)
    worker.wake()
    for case in cases:
        getattr(worker, case)()
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(worker.found))
    worker.engine.close()


if __name__ == "__main__":
    run(main)
