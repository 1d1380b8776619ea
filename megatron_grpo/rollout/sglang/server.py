"""Stock SGLang servers: requests to them, and checks of their answers.

    python -m sglang.launch_server --model-path DIR --port 30000

Written from SGLang's sources (srt/entrypoints/http_server.py, srt/managers/io_struct.py) and tested with SGLang 0.5.15;
the unit tests use a fake server.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.rollout.servers.engine import ServerEngine, WeightTransfer, receiving_ranks
from megatron_grpo.rollout.servers.server import (
    Server,
    Status,
    check_experts,
    refuse_quantized,
    routed_experts,
    sampling_parameters,
    weight_tag,
)
from megatron_grpo.rollout.sglang.ipc import SglangIpcTransfer
from megatron_grpo.rollout.sglang.nccl import SglangNcclTransfer
from megatron_grpo.rollout.weight_sync.transfer import CheckpointTransfer
from megatron_grpo.utils.batch_sizes import longest_sequence
from megatron_grpo.utils.http_client import PROBE_TIMEOUT, Fault, reads_answers

_RELEASED_SEPARATOR = "/asleep "  # separates version and released parts of memory in the name of the weights


def build_sglang_servers(args) -> ServerEngine:
    """Return the engine of ``--rollout-engine sglang``."""
    servers = [SglangServer(url, args) for url in args.sglang_server_base_url]
    transfer: WeightTransfer
    match args.weight_sync_method:
        case "checkpoint":
            transfer = CheckpointTransfer(args.weight_sync_dir)
        case "ipc":
            transfer = SglangIpcTransfer()
        case _:
            transfer = SglangNcclTransfer()
    receivers = receiving_ranks(args)
    return ServerEngine(
        servers, transfer, args.sglang_server_timeout, args.vllm_max_num_seqs, args.sleep_level, receivers
    )


class SglangServer(Server):
    """One SGLang server.

    The server returns log-probabilities after penalties and temperature and before truncation, unless it was started
    with SGLANG_RETURN_ORIGINAL_LOGPROB. It uses seeds only if started with --enable-deterministic-inference.
    """

    key_flag = "--api-key: --sglang-server-api-key here, or SGLANG_API_KEY in the environment"

    def __init__(self, url: str, args):
        super().__init__(url, args.sglang_server_api_key or os.environ.get("SGLANG_API_KEY"))
        self._args = args
        self._released: list[str] = []

    @reads_answers
    async def check(self) -> None:
        info = await self.call("GET", "/get_server_info", timeout=PROBE_TIMEOUT)
        if self._args.sleep_level and not info["enable_memory_saver"]:
            raise Fault("it cannot release its memory: start it with --enable-memory-saver, or remove --sleep-level")
        if self._args.sleep_level == 1 and not info["enable_weights_cpu_backup"]:
            raise Fault(
                "it cannot keep its weights: start it with --enable-weights-cpu-backup, or give --sleep-level 2"
            )
        refuse_quantized(info["quantization"])
        check_experts(self._args, info.get("enable_return_routed_experts"), info.get("speculative_algorithm"))
        self.tensor_parallel_size = info["tp_size"]
        self.cache_tokens = None if info.get("disable_radix_cache") else info.get("max_total_num_tokens")
        longest = longest_sequence(self._args)
        for name in ("context_length", "max_total_num_tokens"):
            if info.get(name) and info[name] < longest:
                raise Fault(
                    f"its {name} is {info[name]}, but --max-prompt-length + --max-completion-length are {longest}: "
                    "start it with at least this length"
                )
        if info.get("skip_tokenizer_init") and self._args.stop_words:
            raise Fault("it cannot detect --stop-words without a tokenizer: start it without --skip-tokenizer-init")
        if "weight_version" not in await self.call("GET", "/get_model_info", timeout=PROBE_TIMEOUT):
            raise Fault(
                "/get_model_info has no weight_version, so that restarts cannot be detected: use a newer SGLang"
            )

    @reads_answers
    async def status(self, timeout: float) -> Status:
        model = await self.call("GET", "/get_model_info", timeout=timeout)
        if self.in_flight:  # an idle server generates one token
            await self.call("GET", "/health_generate", timeout=timeout)
        name, _, released = model["weight_version"].partition(_RELEASED_SEPARATOR)
        self._released = released.split()
        return Status(name, None)

    @reads_answers
    async def generate(self, requests: Sequence[Request], seed: int) -> list[Completion]:
        sampling, prompt = requests[0].sampling, list(requests[0].prompt_ids)
        version, weights = self.version, self.process  # every sender knows the name of rank 0's weights
        assert version is not None
        one = {
            "max_new_tokens": sampling.max_tokens,
            **sampling_parameters(sampling),
            "ignore_eos": not sampling.stop_token_ids,  # if true, SGLang also ignores stop_token_ids
        }

        async def ask(places: range) -> list[dict[str, Any]]:
            body = {
                "input_ids": [prompt] * len(places),
                # With "n", all samples would have the same seed and be equal.
                "sampling_params": [one | {"sampling_seed": seed + place} for place in places],
                "return_logprob": sampling.log_probs,
            } | ({"return_routed_experts": True} if sampling.routed_experts else {})
            found = await self.call("POST", "/generate", body)
            if len(found) != len(places):
                raise Fault(f"it returned {len(found)} completions for {len(places)} requests")
            return found

        # One answer with the experts of a group could have a gigabyte: 64 MiB for 32,768 tokens, 48 layers, 8 experts.
        places = range(len(requests))
        parts = [places[n : n + 1] for n in places] if sampling.routed_experts else [places]
        answers = [answer for found in await asyncio.gather(*map(ask, parts)) for answer in found]
        return [
            self._completion(request, answer, len(prompt), version, weights)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _completion(
        self, request: Request, answer: dict[str, Any], prompt_length: int, version: int, weights: str
    ) -> Completion:
        sampling, ids, meta = request.sampling, answer.get("output_ids"), answer["meta_info"]
        reason = (meta["finish_reason"] or {}).get("type", "")
        if ids is None:
            raise Fault("its answer has no output_ids: use a newer SGLang, or start it with --skip-tokenizer-init")
        if meta["prompt_tokens"] != prompt_length:
            raise Fault(f"it read {meta['prompt_tokens']} prompt tokens instead of {prompt_length}")
        if meta.get("weight_version", weights) != weights:
            raise Fault(f"it sampled with the weights {meta['weight_version']!r}, not with {weights!r}")
        self.check_end(request, ids, reason, self._args.vocab_size)
        log_probs = None
        if sampling.log_probs:
            pairs = meta["output_token_logprobs"]
            if [pair[1] for pair in pairs] != ids:
                raise Fault("its log-probabilities do not belong to the sampled tokens")
            log_probs = [pair[0] for pair in pairs]
        experts = None
        if sampling.routed_experts:
            routed, encoded = prompt_length + len(ids) - 1, meta.get("routed_experts")
            experts = routed_experts(self._args, encoded, routed, _int32)
        return Completion(request.id, ids, log_probs, reason, [version] * len(ids), experts)

    async def load_weights(self, directory: str, timeout: float) -> None:
        body = {
            "model_path": directory,
            "load_format": "auto",  # the server's start-up flag may be "dummy"
            "flush_cache": False,
        }
        await self.call("POST", "/update_weights_from_disk", body, timeout=timeout)

    @reads_answers
    async def checksums(self) -> dict[str, str] | None:
        timeout = self._args.sglang_server_timeout
        answer = await self.call_if_able("POST", "/weights_checker", {"action": "checksum"}, timeout)
        if answer is None:  # a server on a CPU
            return None
        ranks = enumerate(answer["ranks"])
        return {f"{name} of rank {i}": value for i, rank in ranks for name, value in rank["checksums"].items()}

    async def finish_update(self, version: int) -> None:
        await self._set_weight_version(weight_tag(version), self._released)
        await self._flush_cache()

    async def wake(self, part: str) -> None:
        if part in self._released:
            await self._set_weight_version(self.process, [other for other in self._released if other != part])
            await self._occupy("resume", [part])

    async def sleep(self) -> None:
        parts = [part for part in ("kv_cache", "weights") if part not in self._released]
        if parts:
            await self._flush_cache()
            await self._set_weight_version(self.process, [*self._released, *parts])
            await self._occupy("release", parts)

    async def _occupy(self, what: str, parts: list[str]) -> None:
        """Release or resume memory; the server copies the weights with --sleep-level 1, and ends what it has begun."""
        timeout = self._args.sglang_server_timeout
        await self.call("POST", f"/{what}_memory_occupation", {"tags": parts}, timeout=timeout)

    async def _set_weight_version(self, name: str, released: list[str]) -> None:
        """Store version and released parts of memory in the name of the weights, where a later run reads them.

        SGLang crashes on a second release of the same memory.
        """
        name += _RELEASED_SEPARATOR + " ".join(released) if released else ""
        await self.call("POST", "/update_weight_version", {"new_version": name}, timeout=PROBE_TIMEOUT)
        self._released = released

    async def _flush_cache(self) -> None:
        """Drop the KV cache of the old weights as soon as the aborted requests have ended."""
        await self.call("POST", f"/flush_cache?timeout={PROBE_TIMEOUT:g}", timeout=2 * PROBE_TIMEOUT)


def _int32(encoded: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(encoded, np.dtype("<i4"))
