"""``pretrain_grpo.train`` against the algorithm written out by hand: transformers' model, autograd, AdamW, float64.

One rollout used sixteen times, --num-iterations 4 x --steps-per-generation 4: the ratios move away from 1, are clipped,
the KL term pulls towards a reference that is another model, gradients are clipped, and the learning rate changes. Then
with advantages of tokens, which have the KL in them, and completions that are divided into updates in order; and with a
KL term that is weighed by the ratio.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from slow import slow_except
from transformers import AutoModelForCausalLM

import pretrain_grpo  # first: it prepares for machines without a GPU
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampler import PromptSampler
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.observability.profiling import Profiler
from megatron_grpo.parallel import initialize
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.reference import reference_model
from megatron_grpo.reference.reference_model import SwappedReference
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.evaluation import HeldOut
from megatron_grpo.rollout.plan import rollout_seed
from megatron_grpo.rollout.source import WholeRollouts
from megatron_grpo.training import train_step
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.device_memory import DeviceMemory
from megatron_grpo.training.early_exit import EarlyExit
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.offload import Offloader
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.training.saves import Saves
from megatron_grpo.training.trainer import Trainer
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import hf
from megatron_grpo.weights.arguments import architecture_of
from megatron_grpo.weights.stream import stream_hf

GROUP, PROMPTS, STEPS, EPOCHS = 4, 8, 4, 4
UPDATES, PER_UPDATE = STEPS * EPOCHS, PROMPTS * GROUP // STEPS
LR, WARMUP, DECAY, BETA, EPSILON, TEMPERATURE, SEED = 4e-3, 2, 0.1, 0.3, 0.1, 0.8, 11
FLAGS = f"""--lr {LR} --lr-warmup-iters {WARMUP} --lr-decay-style linear --weight-decay {DECAY} --clip-grad 1.0
 --adam-eps 1e-4 --num-generations {GROUP} --global-batch-size {PER_UPDATE} --steps-per-generation {STEPS}
 --num-iterations {EPOCHS} --train-iters {UPDATES} --beta {BETA} --epsilon {EPSILON} --temperature {TEMPERATURE}
 --max-completion-length 12 --max-prompt-length 8 --max-tokens-per-microbatch 48 --reward-funcs exact_match
 --train-data-path unused --no-save-hf --transformer-impl local --mismatch-sample-rate 0 --no-shuffle
 --log-params-norm --seed {SEED}"""
CASES = {
    "grpo": "",
    "reinforce++": "--advantage-estimator reinforce_plus_plus --kl-in-reward --gamma 0.9 --no-shuffle-completions",
    "rloo": "--advantage-estimator rloo --kl-estimator unbiased",
}
RNG = np.random.default_rng(5)
PROMPT_IDS = [RNG.integers(3, 250, RNG.integers(2, 9)).tolist() for _ in range(PROMPTS)]
COMPLETIONS = [RNG.integers(3, 250, RNG.integers(1, 13)).tolist() for _ in range(PROMPTS * GROUP)]
REWARDS = RNG.normal(size=PROMPTS * GROUP).round(2)
REWARDS[:GROUP] = 1.0  # a group without a signal


class Script:
    """An engine that says COMPLETIONS, last first, and a scorer that knows REWARDS."""

    replica, num_replicas, is_lead, has_weights, drafts = 0, 1, True, False, None
    failures = ()

    def __init__(self):
        self.queue, self.version = [], None

    def submit(self, requests, sample=None, member=None):
        if sample is None:  # as an engine; a scorer is given a key and a sample
            self.queue += requests

    def poll(self):
        request = self.queue.pop()
        ids = COMPLETIONS[request.id]
        return [Completion(request.id, ids, None, "stop", [self.version] * len(ids))]

    def finish(self, keys):
        return REWARDS[keys, None].astype(np.float32)

    def rollout(self, seed):
        return contextlib.nullcontext()

    def update_weights(self, weights, version):
        self.version = version
        for _ in weights:
            pass

    def nothing(self, *_):
        pass

    wake_weights = wake_cache = sleep = close = nothing


class Rows:
    """A logger that keeps what it is given."""

    active = False

    def __init__(self):
        self.rows = []

    def log(self, iteration, metrics):
        self.rows.append({"iteration": iteration} | metrics)

    def nothing(self, *_):
        pass

    log_completions = flush = close = print = nothing


@pytest.fixture(scope="module", params=slow_except(["grpo"], CASES))
def case(request):
    return request.param


@pytest.fixture(scope="module")
def one_process(case):
    """A process group of one for each case, which is left whatever happens: other tests make their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "0"}.items():
            patch.setenv(name, value)
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        yield
        if dist.is_initialized():
            initialize.destroy_rank_groups()
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tiny_models, case, one_process):
    """(rows of metrics, weights by Hugging Face name) of ``pretrain_grpo.train``."""
    directory = tiny_models["qwen3"]
    args = parse_args([*FLAGS.split(), *CASES[case].split(), "--load-hf", directory])
    args = replaced(args, **architecture_of(args, directory))
    args = resolve_args(args, 1)
    initialize_distributed(args)
    set_random_seed(args.seed)
    model = forward.build_model(args, model_provider)
    hf.load_hf(model, args, directory)
    policy = reference_model.HostWeights(model)
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(1.1)
    reference = SwappedReference(args, model)
    policy.copy_to(model)
    model, optimizer, scheduler = train_step.setup_optimizer(args, model)
    rows, script, timers, memory = Rows(), Script(), Timers(), DeviceMemory(args)
    tokenizer, nothing_moves = SimpleNamespace(decode=str), Offloader(model, optimizer, False, False, False)
    parts = {
        "args": args,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "reference": reference,
        "source": WholeRollouts(
            args=args,
            dataset=[Prompt(p, ids, {}, "made up") for p, ids in enumerate(PROMPT_IDS)],
            sampler=PromptSampler(PROMPTS, args.seed, shuffle=False),
            timers=timers,
            engine=script,
            scorer=script,
            tokenizer=tokenizer,
            watch=lambda: rows.nothing,
        ),
        "lifecycle": EngineLifecycle(
            args, model, pretrain_grpo.forward_step, script, nothing_moves, nothing_moves, timers, memory
        ),
        "logger": rows,
        "timers": timers,
        "early_exit": EarlyExit(None, on_signal=False),
    }
    trainer = Trainer(
        **parts,
        saves=Saves(**parts),
        tokenizer=tokenizer,
        held_out=HeldOut(),
        device_memory=memory,
        profiler=Profiler(args, 0, 0),
    )
    pretrain_grpo.train(args, trainer)
    return rows.rows, {name: tensor.clone() for name, tensor in stream_hf(model, args)}


@pytest.fixture(scope="module")
def by_hand(tiny_models, case):
    """(loss, gradient norm, learning rate, share of clipped tokens, mean KL, smallest and largest ratio, norm of the
    parameters) of each update, and the model then.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=torch.float64)
    reference = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=torch.float64)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)

    def log_probs(of, i):
        prompt = PROMPT_IDS[i // GROUP]
        logits = of(torch.tensor([prompt + COMPLETIONS[i]])).logits[0, len(prompt) - 1 : -1]
        labels = torch.tensor(COMPLETIONS[i])[:, None]
        return torch.log_softmax(logits / TEMPERATURE, -1).gather(1, labels)[:, 0]

    with torch.no_grad():
        old = [log_probs(model, i) for i in range(PROMPTS * GROUP)]
        ref = [log_probs(reference, i) for i in range(PROMPTS * GROUP)]
    groups = torch.tensor(REWARDS, dtype=torch.float32).double().view(PROMPTS, GROUP)
    if case == "grpo":
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    elif case == "rloo":
        others = (groups.sum(1, keepdim=True) - groups) / (GROUP - 1)
        advantages = (groups - others).flatten()
    else:
        returns = [-BETA * (o - r) for o, r in zip(old, ref, strict=True)]
        for of_completion, reward in zip(returns, groups.flatten(), strict=True):
            of_completion[-1] += reward
            for t in reversed(range(len(of_completion) - 1)):
                of_completion[t] += 0.9 * of_completion[t + 1]
        every = torch.cat(returns)
        advantages = [(of_completion - every.mean()) / (every.std() + 1e-4) for of_completion in returns]

    parameters = [parameter for _, parameter in model.named_parameters()]
    decayed = [p for p in parameters if p.ndim > 1]  # as Megatron does: no weight decay on vectors
    vectors = [{"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([{"params": decayed}, *vectors], betas=(0.9, 0.999), eps=1e-4, weight_decay=DECAY)
    order = np.random.default_rng(rollout_seed(SEED, 1)).permutation(PROMPTS * GROUP)
    if case == "reinforce++":
        order = np.arange(PROMPTS * GROUP)
    rows = []
    for update in range(UPDATES):
        lr = LR * update / WARMUP
        if update > WARMUP:
            lr = LR * (1 - (update - WARMUP) / (UPDATES - WARMUP))
        first = update % STEPS * PER_UPDATE
        loss, clipped, divergence, tokens, ratios = 0.0, 0, 0.0, 0, []
        for i in order[first : first + PER_UPDATE]:
            new, advantage = log_probs(model, i), advantages[i]
            ratio, x = torch.exp(new - old[i]), new - ref[i]
            policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
            kl = torch.exp(-x) - 1 + x
            ratios += ratio.tolist()
            penalty = {"grpo": kl, "rloo": ratio * kl, "reinforce++": 0.0}[case]
            loss = loss + (policy + BETA * penalty).mean() / PER_UPDATE
            outside = ((ratio > 1 + EPSILON) & (advantage > 0)) | ((ratio < 1 - EPSILON) & (advantage < 0))
            clipped, divergence, tokens = clipped + int(outside.sum()), divergence + kl.sum().item(), tokens + len(new)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        size = torch.nn.utils.get_total_norm(parameters).item()
        means = clipped / tokens, divergence / tokens
        rows.append((loss.item(), norm.item(), lr, *means, min(ratios), max(ratios), size))
    return rows, model


def test_the_case_is_not_trivial(by_hand, case):
    losses, norms, rates, clipped, divergences, *_ = map(np.array, zip(*by_hand[0], strict=True))
    assert case != "grpo" or (norms.max() > 1.05 and norms.min() < 1)  # some gradients are clipped, some not
    assert clipped[0] == 0 and clipped.max() > 0.05
    assert divergences.max() > 1e-2 and len(set(rates)) > 10 and np.ptp(losses) > 1e-2


def test_every_update_is_the_one_by_hand(trained, by_hand):
    rows, expected = trained[0], by_hand[0]
    assert [row["iteration"] for row in rows] == list(range(1, UPDATES + 1))
    for row, (loss, norm, lr, clipped, divergence, smallest, largest, size) in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=2e-5, abs=2e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert row["lr"] == pytest.approx(lr, rel=1e-9)
        assert row["clip/low"] + row["clip/high"] == pytest.approx(clipped, abs=1e-9)
        assert row["kl"] == pytest.approx(divergence, rel=1e-5, abs=1e-8)
        assert (row["ratio/min"], row["ratio/max"]) == pytest.approx((smallest, largest), rel=2e-5)
        assert row["params_norm"] == pytest.approx(size, rel=1e-6)
        of_its_rollout = sum(map(len, COMPLETIONS)) if row["iteration"] == 1 else None
        assert row.get("tokens/rollout") == of_its_rollout


def test_every_weight_is_the_one_by_hand(trained, by_hand, tiny_models):
    before = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=torch.float64).state_dict()
    compared = 0
    for name, parameter in by_hand[1].named_parameters():
        size = torch.linalg.norm(parameter)
        assert torch.linalg.norm(parameter - before[name]) / size > 1e-3, name  # it moved
        assert torch.linalg.norm(trained[1][name].double() - parameter) / size < 1e-5, name
        compared += 1
    assert compared > 40
