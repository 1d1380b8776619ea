"""What test_rollout.py runs under torchrun: one engine, one trainer, and many rollouts.

    torchrun --nproc-per-node W tests/distributed/rollout_worker.py OUT_DIR FLAGS [--few]

Every rank writes its rollouts as OUT_DIR/CASE.RANK.npz, the trainer's log-probabilities of them beside, and
OUT_DIR/facts.RANK.json. The test judges them.
"""

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from refusals import says

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron.core import tensor_parallel

import pretrain_grpo
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.end_of_turn import end_token_ids
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.row_sampling import row_sampling, structured_json
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.data.tokenizer import build_tokenizer
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.rewards.pool import GroupMember, RewardPool
from megatron_grpo.rollout.collect import collect_rollout, everything, exchange, to_batch
from megatron_grpo.rollout.dynamic_sampling import Selection
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.megatron.engine import MegatronEngine
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.rollout.weight_sync import weight_check
from megatron_grpo.training import train_step
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.training.setup import build_engine
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import hf
from megatron_grpo.weights.arguments import architecture_of
from megatron_grpo.weights.stream import stream_hf

GENERATIONS, MAX_TOKENS = 4, 24
TRUNCATED = {"top_k": 8, "top_p": 0.9, "min_p": 0.05}
PATTERN = "[0-9]{2,4}x"
PENALIZED = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
# Bytes: the first two prompts are equal and go to different replicas. The long one is longer than a block of the
# engine's cache.
LENGTHS = (5, 5, 1, 33, 300)
MORE = (7, 290)  # with small batches (max_num_batched_tokens): the long ones go to one replica, and exceed a batch
# What the rewards of a completion must be, if they belong to it: its length, the number in its row, and how many
# completions of its group are shorter.
PLUGIN = """
from megatron_grpo.rewards.registry import register_group_reward, register_reward

@register_reward("length")
def length(sample):
    return len(sample.token_ids)

@register_reward("row")
def row(sample):
    return sample.row["number"] if sample.prompt == sample.row["text"] else None

@register_group_reward("shorter")
def shorter(samples):
    assert len({sample.row["number"] for sample in samples}) == 1
    return [sum(len(b.token_ids) < len(a.token_ids) for b in samples) for a in samples]
"""
COMMON = f"""--lr 1e-3 --train-iters 1 --transformer-impl local --train-data-path unused
    --reward-funcs length row shorter
    --vllm-max-num-seqs 16 --micro-batch-size 2 --global-batch-size 20
    --num-generations {GENERATIONS} --max-prompt-length {max(LENGTHS)} --max-completion-length {MAX_TOKENS}"""


def lengths(small_batches: bool) -> tuple[int, ...]:
    return LENGTHS + MORE if small_batches else LENGTHS


def make_prompts(args, tokenizer) -> list[Prompt]:
    """Prompts of printable characters; rows are numbered from 100, so that a row is not taken for its place."""
    rng = np.random.default_rng(0)
    prompts = []
    for place, length in enumerate(lengths(bool(args.vllm_engine_kwargs))):
        text = prompts[0].row["text"] if place == 1 else "".join(map(chr, rng.integers(33, 127, length)))
        row = {"number": 100 + place, "text": text}
        prompts.append(Prompt(id=100 + place, ids=tokenizer.encode(text), row=row, source="made up"))
    return prompts


def random_state() -> list:
    """The state of every generator that the trainer draws from."""
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states().values()
    states = [torch.get_rng_state(), *tracked]
    return [repr(random.getstate()), repr(np.random.get_state()), *(state.tolist() for state in states)]


class Cases:
    """The engine under test beside a trainer, and what was written of them."""

    def __init__(self, args, out: Path):
        self.args, self.out, self.rank = args, out, dist.get_rank()
        self.tokenizer = build_tokenizer(args)
        ends = end_token_ids(args, self.tokenizer)
        self.prompts = make_prompts(args, self.tokenizer)
        model = forward.build_model(args, model_provider)
        hf.load_hf(model, args, args.load_hf)
        model, _, _ = train_step.setup_optimizer(args, model)
        state = random_state()
        engine = build_engine(args, model, self.tokenizer)
        self.facts = {"build kept the random state": random_state() == state}
        self.trainer = SimpleNamespace(args=args, model=model, engine=engine, timers=Timers(), iteration=0)
        self.sampled = Sampling(MAX_TOKENS, args.temperature, log_probs=True, stop_token_ids=ends)
        self.greedy = replace(self.sampled, temperature=0.0)
        self.scorer = self.make_scorer()

    def make_scorer(self) -> RewardPool | None:
        is_lead = self.trainer.engine.is_lead
        return RewardPool(self.args.reward_funcs, self.args.external_plugins) if is_lead else None

    def rollout(
        self, name: str, sampling: Sampling, seed: int, prompts=None, generations: int = GENERATIONS, selection=None
    ):
        """Make a rollout and write it."""
        state = random_state()
        plan = RolloutPlan(self.prompts if prompts is None else prompts, generations, sampling, seed, selection)
        batch, failures = collect_rollout(self.trainer.engine, plan, self.scorer, self.tokenizer, self.trainer.timers)
        if selection is not None:
            self.facts[name] = selection.close()
        self.facts[f"{name} kept the random state"] = random_state() == state
        self.facts[f"{name} failures"] = failures
        batch.save(self.out / f"{name}.{self.rank}.npz")
        return batch

    def log_probs(self, name: str, batch) -> None:
        """Write the trainer's log-probabilities of a rollout."""
        values = forward.log_probs(self.args, self.trainer.model, pretrain_grpo.forward_step, batch)
        np.save(self.out / f"{name}.{self.rank}.npy", values)

    def run(self, few: bool) -> None:
        """Make all rollouts, or only those of the default tests."""
        EngineLifecycle.sync(self.trainer, self.trainer.iteration)
        self.log_probs("first", self.rollout("first", self.sampled, seed=7))
        self.log_probs("truncated", self.rollout("truncated", replace(self.sampled, **TRUNCATED), seed=7))
        self.rollout("other seed", self.sampled, seed=8)
        self.rollout("same seed", replace(self.sampled, log_probs=False), seed=7)
        self.other_replicas()
        self.rollout("twins", self.sampled, seed=7, prompts=self.prompts[:2])
        self.rollout("greedy", self.greedy, seed=7, generations=1)
        if self.args.stop_words:
            self.rollout("stop words", replace(self.greedy, stop=tuple(self.args.stop_words)), seed=7, generations=1)
        if not few:
            self.more()
        self.new_weights(few)
        (self.out / f"facts.{self.rank}.json").write_text(json.dumps(self.facts))

    def more(self) -> None:
        """What the slow tests need."""
        self.log_probs("penalized", self.rollout("penalized", replace(self.sampled, **PENALIZED), seed=7))
        self.rollout("one prompt", self.sampled, seed=7, prompts=self.prompts[3:4])
        self.rollout("greedy, penalized", replace(self.greedy, **PENALIZED), seed=7, generations=1)
        self.log_probs("no end", self.rollout("no end", replace(self.sampled, stop_token_ids=()), seed=7))
        if self.args.stop_words:
            self.constrained()
        self.in_pieces("")
        self.selected()
        self.abort()
        if isinstance(self.trainer.engine, VllmColocate):
            self.weights_under_requests()
        self.by_the_trainer()

    def other_replicas(self) -> None:
        """The first rollout once more, in which each replica makes what another one made."""
        engine, replica = self.trainer.engine, self.trainer.engine.replica
        if replica is not None:
            engine.replica = engine.num_replicas - 1 - replica
        self.rollout("other replicas", self.sampled, seed=7)
        engine.replica = replica

    def in_pieces(self, whose: str) -> None:
        """Completions that are interrupted every three tokens, also in the middle of a stop word."""
        engine = self.trainer.engine
        if not isinstance(engine, VllmColocate | MegatronEngine):
            return
        self.interrupted(f"{whose}greedy in pieces", self.greedy, 1)
        self.log_probs(f"{whose}in pieces", self.interrupted(f"{whose}in pieces", self.sampled, GENERATIONS))
        if self.args.stop_words:
            greedy = RolloutBatch.load(self.out / f"greedy.{self.rank}.npz")
            begins = greedy.cu_seqlens[:-1] + greedy.prompt_lengths
            pairs = {self.tokenizer.decode(greedy.tokens[begin + 2 : begin + 4].tolist()) for begin in begins}
            words = tuple(sorted(pair for pair in pairs if len(pair) == 2 and pair.isascii() and pair.isprintable()))
            stopped = replace(self.greedy, stop=words)
            self.facts[f"{whose}pairs"] = words
            self.rollout(f"{whose}pairs", stopped, seed=7, generations=1)
            self.interrupted(f"{whose}pairs in pieces", stopped, 1)

    def interrupted(self, name: str, sampling: Sampling, generations: int) -> RolloutBatch:
        """Make a rollout of many, three steps each; a replica has its prompts as without --rollout-balancing."""
        engine, state = self.trainer.engine, random_state()
        numbers = range(engine.replica, len(self.prompts), engine.num_replicas)
        members = [GroupMember(p, g, generations) for p in numbers for g in range(generations)]
        requests = [Request(i, self.prompts[member.group].ids, sampling) for i, member in enumerate(members)]
        done, seams = [], 0
        for seed in range(100):
            with engine.rollout(seed):
                engine.submit(requests)
                done += [completion for _ in range(3) for completion in engine.poll()]
                left = engine.interrupt()
            assert sorted(c.id for c in (*done, *left)) == list(range(len(members)))
            requests = [Request(c.id, self.prompts[members[c.id].group].ids, sampling, c) for c in left]
            seams += len(left)
        assert not requests and seams
        places = range(len(self.prompts))
        mine = to_batch(self.prompts, done if engine.is_lead else [], dict(enumerate(members)), places, 0)
        batch = exchange(mine, everything)
        self.facts[f"{name} kept the random state"] = random_state() == state
        batch.save(self.out / f"{name}.{self.rank}.npz")
        return batch

    def constrained(self) -> None:
        """Completions that match a pattern: of all prompts, with log-probabilities all the same, and by some rows."""
        constraint = structured_json({"regex": PATTERN})
        constrained = replace(self.sampled, structured_outputs=constraint)
        self.log_probs("constrained", self.rollout("constrained", constrained, seed=7))
        own = [replace(p, sampling_fields=fields) for p, fields in zip(self.prompts, self.row_fields(), strict=False)]
        self.log_probs("rows", self.rollout("rows", self.sampled, seed=7, prompts=own))

    @staticmethod
    def row_fields() -> list[dict]:
        """What rows set, as they are read."""
        args = parse_args([])
        rows = [{"max_tokens": 3}, {"structured_outputs": {"choice": ["yes", "no"]}}, {}, {"stop": ["5"]}, {}, {}, {}]
        return [row_sampling({"sampling_params": fields}, args, {}) for fields in rows]

    def selected(self) -> None:
        """The first three groups that are complete; and groups of which none has a signal."""
        engine, weights = self.trainer.engine, [0.0, 1.0, 0.0]  # the row's number is the same for a whole group
        for name in ("over-sampled", "over-sampled again"):
            selection = Selection(engine, 3, GENERATIONS, len(self.prompts) / 3)
            self.log_probs(name, self.rollout(name, self.sampled, seed=7, selection=selection))
        selection = Selection(engine, 2, GENERATIONS, 1.0, 1, self.scorer, weights)
        self.rollout("resampled", self.sampled, seed=7, prompts=self.prompts[:4], selection=selection)

    def abort(self) -> None:
        """Of two requests one is given up after the first step."""
        engine = self.trainer.engine
        with engine.rollout(1):
            sampling = replace(
                self.sampled, stop_token_ids=(), max_tokens=10 * MAX_TOKENS
            )  # not over before it is given up
            if engine.replica is not None:
                engine.submit([Request(i, self.prompts[i].ids, sampling) for i in (0, 1)])
            assert not engine.poll()
            engine.abort([0])
            self.facts["not aborted"] = [completion.id for completion in generate(engine, [])] + [
                completion.id for _ in range(20 * MAX_TOKENS) for completion in engine.poll()
            ]

    def weights_under_requests(self) -> None:
        """Other weights come while a request runs, and when a prompt is in the prefix cache."""
        engine = self.trainer.engine
        greedy = replace(self.greedy, stop=(), stop_token_ids=())
        short, longer = replace(greedy, max_tokens=4), replace(greedy, max_tokens=3 * MAX_TOKENS)
        long = self.prompts[LENGTHS.index(max(LENGTHS))].ids  # longer than a block of the cache
        found = {}

        def generate_until(number: int) -> None:
            while number not in found:
                found.update((completion.id, completion) for completion in engine.poll())

        with engine.rollout(1):
            engine.submit([Request(0, self.prompts[0].ids, longer), Request(1, long, short)])
            generate_until(1)
            engine.update_weights(
                ((name, 1.5 * tensor) for name, tensor in stream_hf(self.trainer.model, self.args)), 77
            )
            engine.submit([Request(2, long, short)])
            generate_until(2)
            generate_until(0)
        with engine.rollout(1):  # without what was cached
            engine.submit([Request(3, long, short)])
            generate_until(3)
        self.facts["cached prompt"] = [found[number].log_probs for number in (1, 2, 3)]
        self.facts["versions"] = list(found[0].weight_versions)
        EngineLifecycle.sync(self.trainer, self.trainer.iteration)

    def by_the_trainer(self) -> None:
        """What --rollout-engine megatron makes of the same prompts."""
        vllm, scorer = self.trainer.engine, self.scorer
        self.trainer.engine = MegatronEngine(self.args, self.trainer.model, self.tokenizer)
        self.scorer = self.make_scorer()  # other ranks lead
        self.trainer.engine.wake_cache()
        self.rollout("trainer greedy", self.greedy, seed=7, generations=1)
        self.in_pieces("trainer ")
        self.log_probs("trainer", self.rollout("trainer", self.sampled, seed=7))
        self.trainer.engine, self.scorer = vllm, scorer

    def new_weights(self, few: bool) -> None:
        """The trainer's weights change; the engine is asked before and after it is given them.

        Unless ``few``, it is also given spoilt ones, one tensor at a time.
        """
        with torch.no_grad():
            for chunk in self.trainer.model:
                for parameter in chunk.parameters():
                    # The same on ranks that hold the same, and as large as before: larger weights round more.
                    parameter.copy_(parameter.flip(0))
        self.trainer.iteration = 3
        self.log_probs("stale", self.rollout("stale", self.sampled, seed=7))
        self.check_weights("stale")
        state = random_state()
        EngineLifecycle.sync(self.trainer, self.trainer.iteration)
        self.facts["sync kept the random state"] = random_state() == state
        self.log_probs("fresh", self.rollout("fresh", self.sampled, seed=7))
        self.check_weights("fresh")
        names = [] if few else [name for name, _ in stream_hf(self.trainer.model, self.args)][::6]
        for name in names:
            for case in ("corrupted", "left out"):  # the second time the engine still has the corrupted one
                stream = spoilt(stream_hf(self.trainer.model, self.args), name, case)
                self.trainer.engine.update_weights(stream, 3)
                self.facts.setdefault(case, []).append([name, says(self.compare_tensors)])
        self.flipped()
        EngineLifecycle.sync(self.trainer, self.trainer.iteration)
        self.check_weights("mended")

    def flipped(self) -> None:
        """Note what a sync says of a bit that changes on its way to the last rank, if ranks send to each other."""
        (transfer,) = getattr(self.trainer.engine, "_transfers", {}).values() or (None,)
        if transfer is None or not any(traffic.busy for traffic in transfer._traffic):
            return
        take = transfer._take

        def flip(exchange):
            if exchange.work is not None:
                exchange.work.wait()
            if self.rank == dist.get_world_size() - 1:
                for part in exchange.received.parts[:1]:
                    part.view(-1)[0].neg_()
            return take(exchange._replace(work=None))

        transfer._take = flip
        self.facts["flipped"] = says(lambda: EngineLifecycle.sync(self.trainer, 4))
        transfer._take = take

    def check_weights(self, case: str) -> None:
        """Note what the two means of --check-weight-sync say of the engine as it is."""
        self.facts[f"checked {case}"] = [says(self.compare_tensors), says(self.compare_log_probs)]

    def compare_tensors(self) -> None:
        weight_check.compare_tensors(self.trainer.engine, stream_hf(self.trainer.model, self.args), 3)

    def compare_log_probs(self) -> None:
        engine = self.trainer.engine
        prompts = [prompt for prompt in self.prompts if len(prompt.ids) > 2]
        plan = weight_check.probe_plan(self.args, prompts, engine.num_replicas)
        batch, _ = collect_rollout(engine, plan, None, self.tokenizer, self.trainer.timers)
        weight_check.compare_log_probs(
            self.args, self.trainer.model, pretrain_grpo.forward_step, batch, engine.num_replicas
        )


def spoilt(weights, target: str, case: str):
    """The stream with one tensor changed in two elements, or left out."""
    for name, tensor in weights:
        if name == target and case == "corrupted":
            tensor = tensor.clone()
            tensor.view(-1)[5:7] += 1e-3
        if name != target or case == "corrupted":
            yield name, tensor


def main() -> None:
    out = Path(sys.argv[1])
    (out / "plugin.py").write_text(PLUGIN)
    flags = [flag for flag in sys.argv[2:] if flag != "--few"]
    args = parse_args([*COMMON.split(), "--external-plugins", str(out / "plugin.py"), *flags])
    args = replaced(args, **architecture_of(args, args.load_hf))
    args = resolve_args(args, int(os.environ["WORLD_SIZE"]))
    initialize_distributed(args)
    set_random_seed(args.seed)
    cases = Cases(args, out)
    cases.run("--few" in sys.argv)
    cases.trainer.engine.close()


if __name__ == "__main__":
    run(main)
