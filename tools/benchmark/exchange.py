"""Measure the exchange of a rollout between ranks: memory of each rank, and seconds.

    python tools/benchmark/exchange.py --ranks 2 4 8 --megabytes 64

Every rank starts as an engine replica that has made an equal part of the rollout, and wants another part, as the
data-parallel rank that trains it. Compared are an equal part for each rank, an equal part with one rank that has made
the whole rollout, and the whole rollout for each rank, as without a division. In the fourth case each rank receives an
equal part from inference servers, as it does in a run: requests, the JSON of the answers, the completions, and the
exchange. The answers are made up in the same process, and go through no socket.

Memory is the peak of a rank's process above its memory before, the smallest and the largest of all ranks. In the first
three cases it is that of the exchange, without the completions that the rank has made.
"""

import argparse
import gc
import json
import os
import time
from argparse import Namespace
from pathlib import Path
from sys import path
from types import SimpleNamespace
from typing import Any

path.insert(0, str(Path(__file__).resolve().parents[2]))
import numpy as np
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.data.share import of_all_ranks, with_tokens_of
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel import initialize
from megatron_grpo.rollout.collect import Needs, collect_rollout
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.servers.engine import ServerEngine
from megatron_grpo.rollout.servers.server import Status
from megatron_grpo.rollout.vllm.server import VllmServer

BYTES = 4 + 1 + 4 + 4  # of a token: id, mask, log-probability, version of the weights
LENGTH = 1024  # tokens of a completion on average
GENERATIONS = 8  # of a prompt
VOCABULARY = 100_000
FROM_SERVERS = "a part, from servers"
CASES = ("a part", "a part, made by one rank", "everything", FROM_SERVERS)


def lengths_of(numbers: np.ndarray) -> np.ndarray:
    """Return the lengths of completions, with the token of their prompt; they are functions of the numbers."""
    return 2 + (numbers * 7919) % (2 * LENGTH - 3)


def part(numbers: np.ndarray) -> RolloutBatch:
    """Return made-up completions with these numbers."""
    rng, n = np.random.default_rng(0), len(numbers)
    lengths = lengths_of(numbers)
    total = int(lengths.sum())
    return RolloutBatch(
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        tokens=rng.integers(0, VOCABULARY, total).astype(np.int32),
        response_mask=np.ones(total, np.uint8),
        rollout_log_probs=np.zeros(total, np.float32),
        weight_version=np.zeros(total, np.int32),
        prompt_lengths=np.ones(n, np.int32),
        group_ids=numbers // GENERATIONS,
        row_ids=numbers // GENERATIONS,
        sample_ids=numbers,
        rewards=np.zeros((n, 1), np.float32),
        finish_reasons=np.full(n, FinishReason.STOP, np.uint8),
        turns=np.ones(n, np.int32),
    )


class MadeUpServer(VllmServer):
    """A client of a vLLM server, with made-up answers in place of a server's."""

    version, model = 1, "made up"

    async def check(self) -> None:
        """Accept the server."""

    async def status(self, timeout: float) -> Status:
        """Return that the server still runs."""
        return Status("", None)

    async def call(self, method: str, path: str, body: dict | None = None, timeout: float | None = None) -> Any:
        """Return the completions that a request asks for; the first token of the prompt is the number of the group."""
        assert path == "/v1/completions" and body is not None
        (group,) = body["prompt"]
        rng, choices = np.random.default_rng(group), []
        for place in range(body["n"]):
            length = int(lengths_of(np.array(group * GENERATIONS + place))) - 1
            ids = [*rng.integers(1, VOCABULARY, length - 1).tolist(), 0]
            log_probs = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": (-rng.random(length)).tolist()}
            choice = {"index": place, "token_ids": ids, "finish_reason": "stop", "logprobs": log_probs}
            choices.append(choice | {"prompt_token_ids": body["prompt"]})
        return json.loads(json.dumps({"choices": choices}))


def from_servers(numbers: np.ndarray, wants: np.ndarray, ranks: int) -> RolloutBatch:
    """Return a rollout over servers, with the tokens that this rank ``wants``."""
    args = Namespace(vllm_server_api_key=None, vocab_size=VOCABULARY)
    transfer = SimpleNamespace(close=lambda: None)
    engine = ServerEngine([MadeUpServer("http://made-up", args)], transfer, 600.0, 64, receivers=ranks)
    prompts = [Prompt(group, [group], {}, "made up") for group in range(len(numbers) // GENERATIONS)]
    plan = RolloutPlan(prompts, GENERATIONS, Sampling(2 * LENGTH, stop_token_ids=(0,), log_probs=True), seed=1)
    batch, _ = collect_rollout(engine, plan, None, None, Timers(), needs=Needs(lambda _: wants))
    engine.close()
    return batch


def peak_mib(reset: bool = False) -> float:
    """Return the peak memory of this process, in MiB; start again with ``reset``."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def work(rank: int, ranks: int, port: int, megabytes: int, results) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    initialize._host_group = dist.group.WORLD
    numbers = np.arange(megabytes * 2**20 // (BYTES * LENGTH) // GENERATIONS * GENERATIONS)
    for case in CASES:
        maker = np.zeros_like(numbers) if "one rank" in case else numbers // GENERATIONS % ranks
        wants = np.random.default_rng(1).permutation(numbers) % ranks == rank  # whatever the maker
        if case == "everything":
            wants[:] = True
        own = part(np.flatnonzero((maker == rank) & (case != FROM_SERVERS)))
        dist.barrier()
        gc.collect()
        before, began = peak_mib(reset=True), time.perf_counter()
        if case == FROM_SERVERS:
            batch = from_servers(numbers, wants, ranks)
        else:
            batch = with_tokens_of(of_all_ranks(own), wants)
        seconds = time.perf_counter() - began
        share = sum(array.nbytes for array in batch.arrays().values()) / 2**20
        results.put((case, rank, peak_mib() - before, share, seconds))
        del own, batch
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="numbers of ranks [2 4 8]")
    parser.add_argument("--megabytes", type=int, default=64, metavar="N", help="per-token arrays of the rollout [64]")
    options = parser.parse_args()
    print("| ranks | each rank gets | its part, MiB | memory above before, MiB | seconds |\n|--:|---|--:|--:|--:|")
    for ranks in options.ranks:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(work, (ranks, initialize.free_port(), options.megabytes, results), ranks)
        rows = [results.get() for _ in range(len(CASES) * ranks)]
        for case in dict.fromkeys(row[0] for row in rows):
            _, _, memory, share, seconds = zip(*(row for row in rows if row[0] == case), strict=True)
            memory_range = f"{min(memory):.0f} to {max(memory):.0f}"
            print(f"| {ranks} | {case} | {max(share):.1f} | {memory_range} | {max(seconds):.2f} |")


if __name__ == "__main__":
    main()
