"""Measure completion tokens per second with and without drafts, and how many of the proposed tokens are accepted.

    python tools/benchmark/drafts.py --save runs/drafts    # one GPU with 141 GB, the shapes of Qwen3 4B and 0.6B
    python tools/benchmark/drafts.py --save runs/drafts --shape tiny --concurrency 4 --completion-length 256    # a CPU
    python tools/benchmark/drafts.py --save runs/drafts --load-hf DIR --train-data-path PROMPTS.jsonl --concurrency 512

Without --load-hf it needs no published weights and no training. The text is a cycle of tokens, and the models know it
by construction: after a token the next one of the cycle has the probability 1 - NOISE, and the other tokens of the
cycle share NOISE. A prompt is the whole cycle from some token on, so completions repeat it but for the noise, which
bounds what any draft can foresee. The policy and the draft model have the sizes of published models and compute all
their layers; the layers' output projections are 0, so that they do not change the prediction. A token of the draft
model is thus accepted with the probability 1 - NOISE, which gives the expected acceptance length: the sum of (1 -
NOISE)^i over 0 <= i <= K.

One process for each method starts its engine beside the others on the same GPU; when all are ready, they measure one
after the other, and the others wait. A rollout is N requests of one length, all at a time, with log-probabilities.

With --load-hf a published model completes prompts of a file, each --num-generations times and to its end token. The
table has the whole rollout and its tails, in which the last completions run, and suffix decoding drafts from their
finished siblings. Of each it has the time of a step, the tokens of a sequence in a step, and the time of a token, which
is the quotient. Flags that are not in --help are those of pretrain_grpo.py (--system-prompt, --bf16).

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
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_grpo.data.end_of_turn import end_token_ids
from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.data.tokenizer import build_tokenizer
from megatron_grpo.models.config import params_dtype
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.draft_counts import draft_metrics, no_drafts
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.device import device
from megatron_grpo.weights import families, model_weights
from megatron_grpo.weights.hf import open_weights
from tools import made_up

METHODS = ("none", "ngram", "suffix", "draft_model")
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
    if options.method == "suffix":
        config["suffix_decoding_max_spec_factor"] = options.spec_factor
    if options.method == "draft_model":
        config["model"] = str(options.save / "draft")
    return [] if options.method == "none" else ["--vllm-speculative-config", json.dumps(config)]


class Cycle:
    """Completions of made-up models, which repeat the cycle."""

    def __init__(self, options, *flags: str):
        self._options = options
        self.args = parse(SHAPES[options.shape][0], options, *flags)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the Hugging Face weights of the policy."""
        return weights(self.args, self._options.cycle, self._options.noise)

    def requests(self, count: int, length: int) -> list[Request]:
        """Return ``count`` prompts, each the cycle from another token on."""
        cycle, sampling = self._options.cycle, Sampling(length, log_probs=True)
        prompts = [[(number * 7 + i) % cycle for i in range(cycle)] for number in range(count)]
        return [Request(number, prompt, sampling) for number, prompt in enumerate(prompts)]

    def row(self, engine: VllmColocate, concurrency: int) -> dict:
        """Return tokens per second (median over rounds), counts of drafts, and the share of noise."""
        speeds, counts, noise = [], no_drafts(), []
        length = self._options.completion_length
        for _ in range(self._options.rounds):
            start = time.perf_counter()
            with engine.rollout(seed=concurrency):
                done = list(generate(engine, self.requests(concurrency, length)))
            speeds.append(concurrency * length / (time.perf_counter() - start))
            assert all(len(completion.token_ids) == length for completion in done)
            counts += engine.drafts if engine.drafts is not None else 0
            pairs = [pair for completion in done for pair in pairwise(completion.token_ids)]
            noise.append(sum((before + 1) % self._options.cycle != after for before, after in pairs) / len(pairs))
        return {"speed": median(speeds), "counts": counts.tolist(), "noise": median(noise)}


class Published:
    """Completions of a published model: groups of real prompts, which end by themselves."""

    def __init__(self, options, *flags: str):
        self._options = options
        lengths = ["--max-prompt-length", "512", "--max-completion-length", str(options.completion_length)]
        data = ["--load-hf", options.load_hf, "--train-data-path", options.train_data_path]
        given = ["--temperature", "1", *options.flags]
        args = made_up.parse([*data, *lengths, *given, *flags], 1)
        self.args = replaced(args, tokenizer_model=options.load_hf)
        tokenizer = build_tokenizer(self.args)
        rows = PromptDataset([options.train_data_path], tokenizer, self.args)
        prompts = (rows[number] for number in range(len(rows)))
        self._prompts = [prompt.ids for prompt in prompts if prompt is not None]
        self._ends = end_token_ids(self.args, tokenizer)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's weights."""
        source = open_weights(self._options.load_hf)
        return ((name, source.read(name)) for name in source.names())

    def requests(self, count: int, length: int, first: int = 0) -> list[Request]:
        """Return ``count`` requests, in groups of --num-generations, from the prompt ``first`` on."""
        group = self._options.num_generations
        sampling = Sampling(length, self.args.temperature, log_probs=True, stop_token_ids=self._ends)
        prompts = [self._prompts[(first + number) % len(self._prompts)] for number in range(count // group)]
        return [Request(number, prompts[number // group], sampling) for number in range(count // group * group)]

    def row(self, engine: VllmColocate, concurrency: int) -> dict:
        """Return the parts of the rollouts, added up: the whole, and the tails of --tails.

        Each has seconds, steps, completions under way in them, their tokens, and counts of drafts.
        """
        parts = {str(tail): np.zeros(7) for tail in (concurrency, *self._options.tails) if tail <= concurrency}
        for number in range(self._options.rounds):
            requests = self.requests(
                concurrency, self._options.completion_length, number * concurrency // self._options.num_generations
            )
            for tail, found in tails(engine, requests, list(map(int, parts)), seed=number).items():
                parts[str(tail)] += found
        return {"parts": {tail: found.tolist() for tail, found in parts.items()}}


def tails(engine: VllmColocate, requests: list[Request], marks: list[int], seed: int) -> dict[int, np.ndarray]:
    """Complete the requests; return the figures of `Published.row` from each mark on: so many are then under way."""
    counts = engine.drafts if engine.drafts is not None else no_drafts()
    steps, running, marked, total = 0, 0, {}, 0
    left = {request.id for request in requests}
    with engine.rollout(seed):
        start = time.perf_counter()
        engine.submit(requests)
        marked[len(requests)] = np.array([start, 0, 0, 0, *counts], dtype=float)
        while left:
            running, steps = running + len(left), steps + 1
            for completion in engine.poll():
                left.remove(completion.id)
                total += len(completion.token_ids)
            reached = [mark for mark in marks if len(left) <= mark and mark not in marked]
            if reached:
                before = time.perf_counter()
                tokens = total + sum(len(completion.token_ids) for completion in engine.unfinished())
                now = np.array([before, steps, running, tokens, *counts], dtype=float)
                for mark in reached:
                    marked[mark] = now
        end = np.array([time.perf_counter(), steps, running, total, *counts], dtype=float)
    return {mark: end - marked[mark] for mark in marks}


def measure(options) -> None:
    """Build the engine of one method; wait for the others; write this method's figures to a file."""
    most = max(options.concurrency)
    own = ["--vllm-max-num-seqs", str(most), "--vllm-gpu-memory-utilization", "0.1", *speculative_flags(options)]
    if torch.cuda.is_available():
        own += ["--vllm-engine-kwargs", json.dumps({"kv_cache_memory_bytes": int(options.cache_gib * 2**30)})]
    text = (Published if options.load_hf else Cycle)(options, *own)
    initialize_distributed(text.args)
    engine = VllmColocate(text.args, families.for_args(text.args).hf_from_args(text.args))
    engine.update_weights(text.weights(), 1)
    with engine.rollout(seed=0):  # compiles what is compiled at the first use
        list(generate(engine, text.requests(most, 16)))
    (options.save / f"ready.{options.method}").touch()
    while any(not (options.save / f"ready.{method}").exists() for method in options.methods):
        time.sleep(0.1)
    with open(options.save / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [{"concurrency": number} | text.row(engine, number) for number in options.concurrency]
    (options.save / f"{options.method}.json").write_text(json.dumps(rows))
    engine.close()


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


def table_of_tails(options) -> list[str]:
    """Return the lines of the Markdown table of a published model."""
    found = {method: json.loads((options.save / f"{method}.json").read_text()) for method in options.methods}
    heads = ["at a time", "the last", "drafts", "s", "steps", "ms a step", "tokens of a sequence in a step"]
    heads += ["ms a token of a sequence", "accepted"]
    lines = [f"| {' | '.join(heads)} |", "|--:|--:|---" + "|--:" * (len(heads) - 3) + "|"]
    for place, concurrency in enumerate(options.concurrency):
        for tail in next(iter(found.values()))[place]["parts"]:
            for method, rows in found.items():
                seconds, steps, running, tokens, _, proposed, accepted = rows[place]["parts"][tail]
                if not tokens:  # all completions ended at once
                    continue
                own, of_step = tokens / running, 1000 * seconds / steps
                cells = [str(concurrency), tail, method, f"{seconds / options.rounds:.2f}"]
                cells += [f"{steps / options.rounds:,.0f}", f"{of_step:.2f}", f"{own:.2f}", f"{of_step / own:.2f}"]
                cells += [f"{accepted / proposed:.0%}" if proposed else ""]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--save", type=Path, required=True, metavar="DIR", help="folder of the draft model and the figures")
    add("--shape", choices=SHAPES, default="4b", help="sizes of policy and draft model [4b]")
    add("--methods", nargs="+", choices=METHODS, help="each in a process of its own [all]")
    add("--load-hf", metavar="DIR", help="published model that completes the prompts of --train-data-path")
    add("--train-data-path", metavar="FILE", help="prompts of --load-hf")
    add("--num-generations", type=int, default=8, metavar="N", help="completions of a prompt of --load-hf [8]")
    add("--tails", type=int, nargs="+", default=[64, 16, 4], metavar="N", help="last completions, --load-hf [64 16 4]")
    add("--noise", type=float, default=0.1, help="probability of a token that no draft foresees [0.1]")
    add("--cycle", type=int, metavar="N", help="tokens of the cycle and of a prompt [256; 64 for tiny]")
    add("--num-speculative-tokens", type=int, default=4, metavar="K", help="tokens of a draft [4]")
    add("--spec-factor", type=float, default=2.0, help="tokens of a suffix draft for each matching one, at most [2]")
    add("--completion-length", type=int, default=512, metavar="N", help="tokens of a completion [512]")
    add("--concurrency", type=int, nargs="+", default=[4, 16, 64], metavar="N", help="requests at a time [4 16 64]")
    add("--rounds", type=int, default=1, metavar="N", help="rollouts of each concurrency, after a short one [1]")
    add("--cache-gib", type=float, default=14.0, help="KV cache of each engine on a GPU [14]")
    add("--method", choices=METHODS, help=argparse.SUPPRESS)  # of one process
    options, flags = parser.parse_known_args()
    options.flags = flags  # of pretrain_grpo.py
    if bool(options.load_hf) != bool(options.train_data_path):
        parser.error("--load-hf and --train-data-path go together")
    if options.flags and not options.load_hf:
        parser.error(f"{options.flags[0]} is read with --load-hf alone")
    options.methods = options.methods or [name for name in METHODS if name != "draft_model" or not options.load_hf]
    if options.load_hf and "draft_model" in options.methods:
        parser.error("--load-hf has no draft model: leave draft_model out of --methods")
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
    print("\n".join((table_of_tails if options.load_hf else table)(options)))


if __name__ == "__main__":
    run(main)
