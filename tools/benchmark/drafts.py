"""Measure completion tokens per second with and without drafts, and how many of the proposed tokens are accepted.

    python tools/benchmark/drafts.py --save runs/drafts    # one GPU with 141 GB, the shapes of Qwen3 4B and 0.6B
    python tools/benchmark/drafts.py --save runs/drafts --shape tiny --concurrency 4 --completion-length 256    # a CPU

It needs no published weights and no training. The text is a cycle of tokens, and the models know it by construction:
after a token the next one of the cycle has the probability 1 - NOISE, and the other tokens of the cycle share NOISE. A
prompt is the whole cycle from some token on, so completions repeat it but for the noise, which bounds what any draft
can foresee. The policy and the draft model have the sizes of published models and compute all their layers; the layers'
output projections are 0, so that they do not change the prediction. A token of the draft model is thus accepted with
the probability 1 - NOISE, which gives the expected acceptance length: the sum of (1 - NOISE)^i over 0 <= i <= K.

One process for each method starts its engine beside the others on the same GPU; when all are ready, they measure one
after the other, and the others wait. A rollout is N requests of one length, all at a time, with log-probabilities.
Prints a Markdown table.
"""

import argparse
import fcntl
import json
import math
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import torch
from safetensors.torch import save_file

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.models.config import params_dtype
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.draft_counts import draft_metrics, no_drafts
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.device import device
from megatron_grpo.weights import families, model_weights
from tools import made_up

METHODS = ("none", "ngram", "draft_model")
QWEN3 = (
    "--model-family qwen3 --group-query-attention --qk-layernorm --swiglu --normalization RMSNorm --disable-bias-linear"
)
QWEN3 += " --untie-embeddings-and-output-weights --rotary-base 1000000 --temperature 1 --max-position-embeddings 4096"
BIG = " --num-query-groups 8 --kv-channels 128 --vocab-size 151936 --bf16"
SMALL = " --num-query-groups 2 --kv-channels 32 --vocab-size 512"
SHAPES = {  # the policy's and the draft model's
    "4b": (
        f"--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 {BIG}",
        f"--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 {BIG}",
    ),
    "tiny": (
        f"--num-layers 8 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 8 {SMALL}",
        f"--num-layers 1 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 {SMALL}",
    ),
}


def shapes(args) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name: shape} of all weights."""
    return {name: shape for weight in model_weights.table(args) for name, shape in weight.hf.items()}


def weights(args, cycle: int, noise: float):
    """Yield the Hugging Face weights of a model that knows the cycle of the tokens 0 ... ``cycle`` - 1.

    The embedding of token t has the direction u_t and, with the same length, a direction c that all tokens have; the
    vectors are orthonormal. In the output layer the row of the successor of t is g u_t + b c: its logit leads those of
    the other tokens of the cycle by G = g sqrt(width / 2), with exp(G) = (1 - noise) / noise (cycle - 1), and these
    lead all tokens outside of the cycle by 40.
    """
    width, half = args.hidden_size, math.sqrt(args.hidden_size / 2)
    generator = torch.Generator(device()).manual_seed(args.hidden_size)
    basis = torch.linalg.qr(torch.randn(width, cycle + 1, generator=generator, device=device()))[0].T
    tokens, common = basis[:cycle], basis[cycle]
    lead = math.log((1 - noise) / noise * (cycle - 1))
    for name, shape in shapes(args).items():
        if "norm" in name:
            tensor = torch.ones(shape, device=device())
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor = torch.zeros(shape, device=device())
        else:
            tensor = torch.randn(shape, generator=generator, device=device()) / shape[-1] ** 0.5
        if "embed_tokens" in name:
            tensor[:cycle] = half * (tokens + common)
        if name == "lm_head.weight":
            tensor.zero_()
            tensor[:cycle] = (lead * tokens.roll(1, 0) + 40 * common) / half
        yield name, tensor.to(params_dtype(args))


def parse(shape: str, options, *flags: str):
    """Return the arguments of a run with a model of this shape."""
    longest = ["--max-prompt-length", str(options.cycle), "--max-completion-length", str(options.completion_length)]
    return made_up.parse([*QWEN3.split(), *shape.split(), *longest, *flags], 1)


def write_draft_model(directory: Path, options) -> None:
    """Write the draft model as a Hugging Face directory."""
    args = parse(SHAPES[options.shape][1], options)
    directory.mkdir(parents=True, exist_ok=True)
    config = families.for_args(args).hf_from_args(args)
    (directory / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
    save_file(
        {name: tensor.cpu() for name, tensor in weights(args, options.cycle, options.noise)},
        directory / "model.safetensors",
    )


def speculative_flags(options) -> list[str]:
    config: dict = {"method": options.method, "num_speculative_tokens": options.num_speculative_tokens}
    if options.method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    if options.method == "draft_model":
        config["model"] = str(options.save / "draft")
    return [] if options.method == "none" else ["--vllm-speculative-config", json.dumps(config)]


def measure(options) -> None:
    """Build the engine of one method; wait for the others; write this method's figures to a file."""
    most = max(options.concurrency)
    own = ["--vllm-max-num-seqs", str(most), "--vllm-gpu-memory-utilization", "0.1"]
    if torch.cuda.is_available():
        own += ["--vllm-engine-kwargs", json.dumps({"kv_cache_memory_bytes": int(options.cache_gib * 2**30)})]
    args = parse(SHAPES[options.shape][0], options, *own, *speculative_flags(options))
    initialize_distributed(args)
    engine = VllmColocate(args, families.for_args(args).hf_from_args(args))
    engine.update_weights(weights(args, options.cycle, options.noise), 1)
    rollout(engine, options, most, 16)  # compiles what is compiled at the first use
    (options.save / f"ready.{options.method}").touch()
    while any(not (options.save / f"ready.{method}").exists() for method in options.methods):
        time.sleep(0.1)
    with open(options.save / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [row(engine, options, concurrency) for concurrency in options.concurrency]
    (options.save / f"{options.method}.json").write_text(json.dumps(rows))
    engine.close()


def row(engine: VllmColocate, options, concurrency: int) -> dict:
    """Return tokens per second (median over rounds), counts of drafts, and the share of noise in the completions."""
    speeds, counts, noise = [], no_drafts(), []
    for _ in range(options.rounds):
        start = time.perf_counter()
        completions = rollout(engine, options, concurrency, options.completion_length)
        speeds.append(concurrency * options.completion_length / (time.perf_counter() - start))
        counts += engine.drafts if engine.drafts is not None else 0
        pairs = [pair for ids in completions for pair in pairwise(ids)]
        noise.append(sum((before + 1) % options.cycle != after for before, after in pairs) / len(pairs))
    return {"concurrency": concurrency, "speed": median(speeds), "counts": counts.tolist(), "noise": median(noise)}


def rollout(engine: VllmColocate, options, count: int, length: int) -> list[list[int]]:
    """Return the completions of ``count`` prompts, each the cycle from another token on."""
    prompts = [[(number * 7 + i) % options.cycle for i in range(options.cycle)] for number in range(count)]
    sampling = Sampling(length, log_probs=True)
    with engine.rollout(seed=count):
        requests = [Request(number, prompt, sampling) for number, prompt in enumerate(prompts)]
        completions = [completion.token_ids for completion in generate(engine, requests)]
    assert all(len(ids) == length for ids in completions)
    return completions


def start(options) -> list[subprocess.Popen]:
    """Start a process for each method, and wait for all; end the others if one fails."""
    processes = []
    for method in options.methods:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        # Each has a cache of compiled code of its own: two would write the same files at once.
        environment = os.environ | {"VLLM_CACHE_ROOT": str(options.save / f"cache.{method}")}
        words = [__file__, *sys.argv[1:], "--method", method]
        processes.append(subprocess.Popen([*command, *words], env=environment))
    while running := [process for process in processes if process.poll() is None]:
        if any(process.poll() for process in processes):
            for process in running:
                process.terminate()
        time.sleep(0.1)
    return processes


def table(options) -> list[str]:
    """Return the lines of the Markdown table."""
    found = {method: json.loads((options.save / f"{method}.json").read_text()) for method in options.methods}
    expected = sum((1 - options.noise) ** i for i in range(options.num_speculative_tokens + 1))
    lines = ["| at a time | drafts | tokens/s | faster | acceptance length | expected | accepted | noise |"]
    lines.append("|--:|---|--:|--:|--:|--:|--:|--:|")
    for place, concurrency in enumerate(options.concurrency):
        for method, rows in found.items():
            one, plain = rows[place], found.get("none", rows)[place]
            cells = [str(concurrency), method, f"{one['speed']:,.0f}", f"{one['speed'] / plain['speed']:.2f}"]
            metrics = draft_metrics(torch.tensor(one["counts"]).numpy())
            drafted = metrics["drafts/proposed"]
            cells += [f"{metrics['drafts/acceptance_length']:.2f}"] if drafted else [""]
            cells += [f"{expected:.2f}" if method == "draft_model" else ""]
            cells += [f"{metrics['drafts/accepted'] / drafted:.0%}" if drafted else "", f"{one['noise']:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--save", type=Path, required=True, metavar="DIR", help="folder of the draft model and the figures")
    add("--shape", choices=SHAPES, default="4b", help="sizes of policy and draft model [4b]")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="each in a process of its own [all]")
    add("--noise", type=float, default=0.1, help="probability of a token that no draft foresees [0.1]")
    add("--cycle", type=int, metavar="N", help="tokens of the cycle and of a prompt [256; 64 for tiny]")
    add("--num-speculative-tokens", type=int, default=4, metavar="K", help="tokens of a draft [4]")
    add("--completion-length", type=int, default=512, metavar="N", help="tokens of a completion [512]")
    add("--concurrency", type=int, nargs="+", default=[4, 16, 64], metavar="N", help="requests at a time [4 16 64]")
    add("--rounds", type=int, default=1, metavar="N", help="rollouts of each concurrency, after a short one [1]")
    add("--cache-gib", type=float, default=14.0, help="KV cache of each engine on a GPU [14]")
    add("--method", choices=METHODS, help=argparse.SUPPRESS)  # of one process
    options = parser.parse_args()
    options.save = options.save.absolute()
    options.cycle = options.cycle or (256 if options.shape == "4b" else 64)
    if options.method:
        measure(options)
        return
    options.save.mkdir(parents=True, exist_ok=True)
    for method in options.methods:
        (options.save / f"ready.{method}").unlink(missing_ok=True)
    if "draft_model" in options.methods:
        write_draft_model(options.save / "draft", options)
    if any(process.returncode for process in start(options)):
        sys.exit("drafts.py: a process has failed, see above")
    print("\n".join(table(options)))


if __name__ == "__main__":
    run(main)
