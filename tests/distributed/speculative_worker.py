"""What test_speculative.py runs: completions of vLLM with --vllm-speculative-config.

    torchrun --nproc-per-node N tests/distributed/speculative_worker.py MODEL OUT FLAGS [OPTION]

OPTION is --wrong-acceptance, --greedy (only greedy completions) or --many (only greedy ones, of more prompts).

The engine starts with other weights than those of the Hugging Face directory MODEL, which a weight sync then brings;
with --lora-rank also the adapter of MODEL/adapter. OUT gets the completions, the number of engine steps, and the
differences between the engine's weights and MODEL's.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import torch
from safetensors.torch import load_file

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.estimate.memory import Plan
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.rollout.speculation import WITHOUT_MODEL, draft_directory, method_of
from megatron_grpo.rollout.vllm import draft
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.rollout.vllm.compare import compare_model
from megatron_grpo.rollout.vllm.loading_shapes import loading_shapes
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.device import device
from megatron_grpo.weights import hf
from tools import made_up

PROMPTS = [[1, 2, 3, 1, 2], [4, 4, 4], [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]]  # the last one as long as may be
MANY = [[(first + step * i) % 6 for i in range(5)] for step in (1, 2, 3, 4) for first in range(6)]
GREEDY = Sampling(max_tokens=20, temperature=0.0, log_probs=True)
SAMPLES, SAMPLED_TOKENS = 4000, 3  # of the first prompt
DISTURBED = 1024  # of them in `disturbed`, each way
TOP_K = 4
AT_ONCE = 256  # a step of few sequences costs hardly less


def ask(engine, requests: list[Request]) -> dict:
    """Return the completions' tokens and log-probabilities, in the order of the requests, and the number of steps."""
    steps, done = 0, []
    with engine.rollout(1):
        engine.submit(requests)
        while len(done) < len(requests):
            done += engine.poll()
            steps += 1
    return as_lists(done) | {"steps": steps, "drafts": engine.drafts.tolist()}


def disturbed(engine, sampling: Sampling, load) -> dict:
    """Return samples of completions that are interrupted and continued, and of others that get new weights meanwhile.

    Each is disturbed after its first step, with a draft under way. ``load(version)`` loads the same weights again.
    """
    results: dict[str, list] = {"interrupted": [], "kept": []}
    seams: list[list[int]] = []  # of the kept ones: their tokens at the new weights, and with the old version
    for number in range(0, DISTURBED, AT_ONCE):
        requests = [Request(i, PROMPTS[0], sampling) for i in range(number, number + AT_ONCE)]
        with engine.rollout(number):
            engine.submit(requests)
            done = engine.poll()
            begun = {completion.id: completion for completion in engine.interrupt()}
            engine.submit([replace(r, begun=begun[r.id]) for r in requests if r.id in begun])
            done += rest(engine, len(begun))
        results["interrupted"] += done
        with engine.rollout(DISTURBED + number):
            engine.submit(requests)
            done = engine.poll()
            tokens = {completion.id: len(completion.token_ids) for completion in engine.unfinished()}
            old = 2 + number // AT_ONCE
            load(old + 1)
            done += rest(engine, len(tokens))
        seams += [[tokens[c.id], list(c.weight_versions).count(old)] for c in done if c.id in tokens]
        results["kept"] += done
    return {name: as_lists(done) for name, done in results.items()} | {"seams": seams}


def rest(engine, count: int) -> list[Completion]:
    done: list[Completion] = []
    while len(done) < count:
        done += engine.poll()
    return done


def as_lists(done: list[Completion]) -> dict:
    done = sorted(done, key=lambda completion: completion.id)
    kept = [None if c.kept_token_ids is None else c.kept_token_ids.tolist() for c in done]
    return {"ids": [c.token_ids for c in done], "log_probs": [c.log_probs for c in done], "kept_token_ids": kept}


def accept_too_many() -> None:
    """Make vLLM accept a draft with twice the right probability."""
    from vllm.v1.sample import rejection_sampler

    uniform = rejection_sampler.generate_uniform_probs
    rejection_sampler.generate_uniform_probs = lambda *arguments: uniform(*arguments) / 2


def draft_size(worker) -> tuple[int, float]:
    """Return the parameters of the model that drafts, without those of the policy, and its share of the cache."""
    model, policy = draft.draft_model(worker), worker.model_runner.get_model()
    with loading_shapes(policy), loading_shapes(model):
        shared = {id(parameter) for parameter in policy.parameters()}
        size = sum(p.numel() for p in model.parameters() if id(p) not in shared)
    caches = [[m.kv_cache for m in one.modules() if hasattr(m, "kv_cache")] for one in (model, policy)]
    # A delta net has a pair of states, which do not grow with the tokens.
    elements = [sum(cache.numel() for cache in own if isinstance(cache, torch.Tensor)) for own in caches]
    return size, elements[0] / sum(elements)


@torch.no_grad()
def lose_and_reload(worker, directory: str) -> list[int]:
    """Return how many of a draft model's tensors differ from the files after sleep level 2, and after a wake-up."""
    model, source = draft.draft_model(worker), tensors(directory)
    buffers, counts = {name: buffer.clone() for name, buffer in model.named_buffers()}, []
    assert buffers
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.fill_(7)
    for wakes in (False, True):
        if wakes:
            draft.reload_draft(worker, directory)
        lost = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])]
        counts.append(len(lost) + len(compare_model(model, iter(source.items()))))
    return counts


def tensors(directory: str) -> dict:
    return {name: tensor for file in Path(directory).glob("*.safetensors") for name, tensor in load_file(file).items()}


def main() -> None:
    model, out, *flags = sys.argv[1:]
    wrong, many = "--wrong-acceptance" in flags, "--many" in flags
    only_greedy = many or "--greedy" in flags
    flags = [flag for flag in flags if flag not in ("--wrong-acceptance", "--greedy", "--many")]
    sizes = "--max-prompt-length 12 --max-completion-length 20".split()
    sizes += ["--vllm-max-num-seqs", str(AT_ONCE)]
    args = made_up.parse(["--load-hf", model, *sizes, "--make-vocab-size-divisible-by", "1", *flags], 1)
    initialize_distributed(args)
    engine = VllmColocate(args, hf.read_config(model))
    if wrong:
        accept_too_many()

    def load(version: int) -> None:
        engine.update_weights(iter(tensors(model).items()), version)
        if args.lora_rank:
            adapter = {name: tensor.to(device()) for name, tensor in tensors(f"{model}/adapter").items()}
            engine.update_adapter(adapter, version)
            found["differences"] += engine.compare_adapter(adapter)

    found: dict = {"differences": []}
    if method_of(args) not in WITHOUT_MODEL:
        plan = Plan(args)
        found["estimated size"] = [plan.drafts(), plan.drafts_share_of_cache()]
        found["size"] = engine._llm.collective_rpc(draft_size)[0]
    load(1)
    if args.lora_rank:
        found["differences"] += engine.probe_adapter()
    sampled = replace(GREEDY, max_tokens=SAMPLED_TOKENS, temperature=args.temperature)
    truncated = replace(sampled, top_k=TOP_K, kept_token_ids=True)
    found["greedy"] = [ask(engine, [Request(0, ids, GREEDY)]) for ids in (MANY if many else PROMPTS)]
    if not only_greedy:
        found["sampled"] = ask(engine, [Request(i, PROMPTS[0], sampled) for i in range(SAMPLES)])
        found["again"] = ask(engine, [Request(i, PROMPTS[0], sampled) for i in range(AT_ONCE)])
        found["top_k"] = ask(engine, [Request(i, PROMPTS[0], truncated) for i in range(SAMPLES)])
    found["differences"] += engine.compare_weights(iter(tensors(model).items()))
    if not (wrong or only_greedy):
        load(2)
        found |= disturbed(engine, sampled, load)
        if directory := draft_directory(args):
            found["after sleep"] = engine._llm.collective_rpc(lose_and_reload, args=(directory,))[0]
    engine.close()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    run(main)
