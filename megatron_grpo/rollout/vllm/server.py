"""Stock vLLM servers (0.26 and later): requests to them, and checks of their answers.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model DIR --logprobs-mode processed_logprobs

The development mode enables the requests that a trainer needs (loading weights, reading the server's configuration).

Images (0.32, --enable-scale-out): /v1/completions takes token ids without images, and /v1/chat/completions takes images
without token ids. /inference/v1/generate takes both: the prompt with one token for each image, and the images. Its
streams have the experts of --router-replay-mode R3 and, in 0.32, the weight version of each token, which those of
/v1/completions have not; 0.26 always has the path.
"""

import io
import json
import os
import re
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import cachetools
import numpy as np
import numpy.typing as npt
from PIL import Image

from megatron_grpo.data.sampling_params import uses_engine_log_probs
from megatron_grpo.models.config import has_recurrence, params_dtype
from megatron_grpo.parallel.initialize import joint
from megatron_grpo.parallel.roles import Role
from megatron_grpo.rollout.arguments import probability_changes, replays_top_k, urls_of_replica
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.rollout.servers.engine import ServerEngine, receiving_ranks
from megatron_grpo.rollout.servers.server import (
    Server,
    Status,
    Streamed,
    check_experts,
    refuse_quantized,
    routed_experts,
    sampling_parameters,
    tagged_version,
    weight_tag,
)
from megatron_grpo.rollout.servers.stream import ServerStream
from megatron_grpo.rollout.vllm.adapter import slot_rank
from megatron_grpo.rollout.vllm.adapter_servers import AdapterServers
from megatron_grpo.rollout.vllm.kept_tokens import kept_token_ids
from megatron_grpo.rollout.weight_sync.transfer import build_transfer
from megatron_grpo.utils.batch_sizes import longest_sequence
from megatron_grpo.utils.http_client import NEWEST, PROBE_TIMEOUT, Fault, reads_answers
from megatron_grpo.vision.encoded import as_data_uri
from megatron_grpo.vision.images import CACHED_BYTES, Source
from megatron_grpo.vision.videos import Video

_GENERATE = "/inference/v1/generate"
_DRAFTS = ("drafts", "draft_tokens", "accepted_tokens")


def build_vllm_servers(args) -> ServerEngine:
    """Return the engine of ``--vllm-mode server``."""
    servers = [VllmServer(url, args) for url in args.vllm_server_base_url]
    receivers = receiving_ranks(args)
    if args.lora_weight_sync == "adapter":
        return AdapterServers(servers, args, receivers)
    transfer = build_transfer(args)
    return ServerEngine(servers, transfer, args.vllm_server_timeout, args.vllm_max_num_seqs, receivers=receivers)


def build_vllm_stream(args, role: Role) -> ServerStream:
    """Return the engine of a rank of --rollout-ranks with ``--vllm-mode server``: its share of the servers."""
    assert role.replica is not None
    servers = [VllmServer(url, args) for url in urls_of_replica(args, role.replica)]
    transfer = build_transfer(args, joint())
    keeps = args.weight_update == "keep"
    return ServerStream(servers, transfer, args.vllm_server_timeout, args.vllm_max_num_seqs, role.replica, keeps)


class VllmServer(Server):
    """One vLLM server."""

    key_flag = "--api-key: --vllm-server-api-key here, or VLLM_API_KEY in the environment"
    shared = (*Server.shared, "model", "adapter", "load", "method")

    def __init__(self, url: str, args):
        super().__init__(url, args.vllm_server_api_key or os.environ.get("VLLM_API_KEY"))
        self._args = args
        self.model = ""  # the model's name at the server
        self.adapter: str | None = None  # name of the adapter that completes requests
        self.load = ""  # name of the newest load of weights
        self.method: str | None = None  # of speculative decoding
        self._records_versions = False  # of the tokens of streams, while weights change under them
        self._video_flags: dict[str, Any] = {}  # of its --media-io-kwargs

    @reads_answers
    async def check(self) -> None:
        args = self._args
        card = (await self.call("GET", "/v1/models", timeout=PROBE_TIMEOUT))["data"][0]
        self.model = card["id"]
        longest = longest_sequence(args)
        if card["max_model_len"] < longest:
            raise Fault(
                f"its --max-model-len is {card['max_model_len']}, but --max-prompt-length + --max-completion-length "
                f"are {longest}: start it with at least this length"
            )
        try:
            info = await self.call("GET", "/server_info?config_format=json", timeout=self._start_timeout)
        except Fault as fault:
            if fault.retryable:
                raise
            raise Fault(f"{fault}: start it with VLLM_SERVER_DEV_MODE=1, which enables loading weights") from fault
        self._check_config(info["vllm_config"], info.get("vllm_env", {}))
        await self._check_model()
        if args.vision_config:
            multimodal = info["vllm_config"]["model_config"].get("multimodal_config") or {}
            self._video_flags = (multimodal.get("media_io_kwargs") or {}).get("video") or {}
        needed = args.vision_config or (args.router_replay_mode == "R3" and args.rollout_ranks)
        if needed or args.weight_update == "keep":
            paths = (await self.call("GET", "/openapi.json", timeout=PROBE_TIMEOUT))["paths"]
            if needed and _GENERATE not in paths:
                lacks = "it takes no images beside token ids" if args.vision_config else "its streams have no experts"
                raise Fault(f"{lacks}: start it (vLLM 0.32) with --enable-scale-out")
            self._records_versions = args.weight_update == "keep" and {_GENERATE, "/weight_info"} <= paths.keys()
        paused = await self.call_if_able("GET", "/is_paused", None, PROBE_TIMEOUT)
        if paused and paused["is_paused"]:  # by a run that was killed, or by an update that failed
            await self.resume()
        if not (await self.status(PROBE_TIMEOUT)).process:
            raise Fault(
                "/metrics lacks the start time (process_start_time_seconds) and there is no /weight_info, so that "
                "restarts cannot be detected: start it with one API server process"
            )

    @property
    def _start_timeout(self) -> float:
        return self._args.vllm_server_timeout  # the first /server_info inspects the whole system

    def _check_config(self, config: dict[str, Any], environment: dict[str, Any]) -> None:
        args, model = self._args, config["model_config"]
        dtype = str(params_dtype(args))
        if model["dtype"] != dtype:
            dtype = dtype.removeprefix("torch.")
            raise Fault(f"its dtype is {model['dtype']}, the trainer's {dtype}: start it with --dtype {dtype}")
        refuse_quantized(model["quantization"])
        if has_recurrence(args) and config["cache_config"]["mamba_ssm_cache_dtype"] != "float32":
            raise Fault(
                "it does not keep recurrent states in float32, as the trainer does: start it "
                "with --mamba-ssm-cache-dtype float32"
            )
        returned = model.get("enable_return_routed_experts")  # vLLM 0.26; later versions have the other
        returned = returned or (config.get("aux_output_config") or {}).get("enable_return_routed_experts")
        self.method = (config.get("speculative_config") or {}).get("method")
        check_experts(args, bool(returned), self.method)
        if args.stop_words:
            self._refuse_stop_words("", ", or leave --stop-words out")
        if args.agent:
            self._refuse_stop_words(", which programs of --agent can give")
        mode, right, replayed = model["logprobs_mode"], [], replays_top_k(args)
        right += ["raw_logprobs"] if args.temperature == 1 and not replayed else []
        right += ["processed_logprobs"] if replayed or not probability_changes(args) else []
        if mode not in right and (args.mismatch_sample_rate > 0 or replayed or uses_engine_log_probs(args)):
            flags = f"--temperature {args.temperature:g}" + (f" --top-k {args.top_k}" if replayed else "")
            raise Fault(
                f"it returns {mode}, which differ from the trainer's log-probabilities with {flags}: start it with "
                f"--logprobs-mode {right[0]}"
            )
        if replayed and 0 <= model["max_logprobs"] < args.top_k:
            raise Fault(
                f"its --max-logprobs is {model['max_logprobs']}, but --top-k is {args.top_k} and the trainer needs all "
                f"kept tokens: start it with --max-logprobs {args.top_k}, or add --no-top-k-replay"
            )
        wanted = {"nccl": "nccl", "sparse": "sparse_nccl"}.get(args.weight_sync_method)
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        if wanted not in (None, backend):
            raise Fault(
                f"it cannot receive weights by --weight-sync-method {args.weight_sync_method}: start it with "
                f"""--weight-transfer-config '{{"backend": "{wanted}"}}'"""
            )
        sends_adapter = args.lora_weight_sync == "adapter"
        if sends_adapter:
            self._check_adapters(config.get("lora_config"), environment)
        if config["device_config"]["device"] != "cpu":
            return
        if config["scheduler_config"]["enable_chunked_prefill"]:
            raise Fault(
                "vLLM's CPU build crashes when it splits a prompt that has a seed: start it with "
                "--no-enable-chunked-prefill"
            )
        if sends_adapter:
            return
        # rollout/vllm/load_weights.py handles these models in a training process; a stock server does not.
        if args.num_experts:
            raise Fault("vLLM's CPU build cannot reload experts as a server: use --vllm-mode colocate, or a GPU")
        if not args.untie_embeddings_and_output_weights and not args.model_family.startswith("gemma"):
            raise Fault(
                "vLLM's CPU build keeps the old output layer when it reloads tied embeddings as a server: use "
                "--vllm-mode colocate, or a GPU"
            )
        if args.hybrid_layer_pattern and has_recurrence(args) and model["dtype"] != "torch.float32":
            raise Fault(
                "vLLM's CPU build keeps the old convolutions of Mamba-2 when it reloads them in 16 bits as a server: "
                "leave out --bf16 and start it with --dtype float32, use --vllm-mode colocate, or a GPU"
            )
        custom_ops = (config.get("compilation_config") or {}).get("custom_ops") or []
        if args.multi_latent_attention and not (
            environment.get("VLLM_MLA_DISABLE") and "-rotary_embedding" in custom_ops
        ):
            raise Fault(
                "latent attention on vLLM's CPU build: start it with VLLM_MLA_DISABLE=1 and --compilation-config "
                """'{"custom_ops": ["-rotary_embedding"]}'"""
            )

    def _refuse_stop_words(self, whose: str, cure: str = "") -> None:
        """Raise Fault if the server drafts."""
        if self.method:
            raise Fault(
                f"it drafts ({self.method}), and vLLM keeps tokens of a draft behind a stop word{whose}: start it "
                f"without --speculative-config{cure}"
            )

    def _check_adapters(self, config: dict[str, Any] | None, environment: dict[str, Any]) -> None:
        rank = slot_rank(self._args.lora_rank)
        if config is None:
            raise Fault(f"it takes no adapters: start it with --enable-lora --max-lora-rank {rank}")
        if config["max_lora_rank"] < self._args.lora_rank:
            raise Fault(
                f"its --max-lora-rank is {config['max_lora_rank']}, but --lora-rank is {self._args.lora_rank}: start "
                f"it with --max-lora-rank {rank}"
            )
        if not environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            raise Fault("it loads no adapters while it runs: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")

    async def _check_model(self) -> None:
        """Compare layers, width and vocabulary with the model that the server prints; Fault if they differ."""
        body = {"method": "get_model_inspection"}
        shown = await self.call("POST", "/collective_rpc", body, timeout=self._start_timeout)
        theirs = model_sizes(shown["results"][0])
        args = self._args
        ours = {
            "layers": args.num_layers,
            "vocabulary tokens": args.vocab_size,
            "channels": args.hidden_size,
        }
        for what, mine in ours.items():
            if theirs.get(what, mine) != mine:
                raise Fault(
                    f"its model has {theirs[what]} {what}, the trainer's has {mine}: start it with the same model"
                )

    @reads_answers
    async def status(self, timeout: float) -> Status:
        text = await self.call("GET", "/metrics", timeout=timeout)
        tokens = re.findall(r"^vllm:(?:prompt|generation)_tokens_total\{.*\} (\S+)$", text, re.M)
        started = re.search(r"^process_start_time_seconds (\S+)$", text, re.M)
        self.cache_tokens = _cache_tokens(text)
        weights = await self.call_if_able("GET", "/weight_info", None, timeout)  # absent in vLLM 0.26
        process = f"{started[1] if started else ''} {weights['weight_version'] if weights else ''}".strip()
        found = [re.findall(rf"^vllm:spec_decode_num_{what}_total\{{.*\}} (\S+)$", text, re.M) for what in _DRAFTS]
        drafts = np.array([sum(map(float, of_engines)) for of_engines in found], np.int64) if all(found) else None
        return Status(process, sum(map(float, tokens)) if tokens else None, drafts)

    @reads_answers
    async def generate(self, requests: Sequence[Request], seed: int) -> list[Completion]:
        prompt, version = list(requests[0].prompt_ids), self.version
        assert version is not None
        if requests[0].sampling.stop:
            self._refuse_stop_words(" of sampling_params", ", or leave stop out of the rows")
        if _has_images(requests[0]):
            answer = await self.call("POST", _GENERATE, self._body_of_token_ids(requests, seed))
            choices = [_as_of_completions(choice, answer) for choice in answer["choices"]]
        else:
            choices = (await self.call("POST", "/v1/completions", self._body(requests, seed)))["choices"]
        if sorted(choice["index"] for choice in choices) != list(range(len(requests))):
            raise Fault(f"it returned the completions {[c['index'] for c in choices]} for {len(requests)} requests")
        return [self._completion(requests[choice["index"]], choice, prompt, version) for choice in choices]

    @reads_answers
    async def stream(self, streamed: Streamed, seed: int) -> Completion:
        assert self.version is not None
        streamed.version, request = self.version, streamed.request.with_begun_in_prompt()
        # Keys and values of older weights are never reused: the prefix cache is keyed by the version.
        with_experts = request.sampling.routed_experts
        takes_ids = with_experts or _has_images(request) or self._records_versions
        path = _GENERATE if takes_ids else "/v1/completions"
        body = self._body_of_token_ids([request], seed) if takes_ids else self._body([request], seed)
        async for event in self.events(path, body | {"stream": True, "cache_salt": weight_tag(self.version)}):
            NEWEST.set((path, event))
            if "choices" not in event:
                raise Fault(f"{path}: {str(event)[:300]}", retryable=True)
            for choice in event["choices"]:
                if takes_ids:
                    choice = _as_of_completions(choice, event)
                if choice.get("prompt_token_ids") not in (None, list(request.prompt_ids)):
                    raise _changed_prompt(request)
                ids = choice["token_ids"] or []
                if with_experts and choice.get("finish_reason") in ("stop", "length"):  # an abort has none
                    routed = len(request.prompt_ids) + len(streamed.ids) + len(ids) - 1
                    streamed.routed_experts = self._routed_experts(choice, routed)
                if request.sampling.log_probs and ids:
                    if choice["logprobs"]["tokens"] != [f"token_id:{token}" for token in ids]:
                        raise Fault("its log-probabilities do not belong to the sampled tokens")
                    streamed.log_probs += choice["logprobs"]["token_logprobs"]
                streamed.ids += ids
                streamed.versions += [streamed.version] * len(ids)
                if reason := choice.get("finish_reason"):
                    if spans := choice.get("weight_versions"):
                        self._take_versions(streamed, spans)
                    self.check_end(request, streamed.ids, reason, self._args.vocab_size)
                    return streamed.completion(reason)
        raise Fault(f"{path}: the stream has ended before the completion", retryable=True)

    @staticmethod
    def _take_versions(streamed: Streamed, spans: Sequence[dict[str, Any]]) -> None:
        """Set the versions of all tokens by the server's record; Fault, without the tokens, if other weights sampled.

        A token that was on its way while the server loaded weights has arrived under the next version.
        """
        found = [tagged_version(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        versions = [version for version in found if version is not None]
        if not len(versions) == len(found) == len(streamed.ids):
            streamed.drop()
            raise Fault(f"it sampled with the weights {spans}, which are not this run's", retryable=True)
        streamed.versions = versions

    def _body(self, requests: Sequence[Request], seed: int) -> dict[str, Any]:
        """Return the body of a request for completions of one prompt."""
        sampling = requests[0].sampling
        return {
            "model": self.adapter or self.model,
            "prompt": list(requests[0].prompt_ids),
            "n": len(requests),
            "seed": seed,  # of the first sample; the server adds 1 for each further one
            "max_tokens": sampling.max_tokens,
            **sampling_parameters(sampling),
            "ignore_eos": True,  # stop_token_ids has all end tokens; the server must add none
            "logprobs": sampling.num_kept if sampling.log_probs else None,
            "structured_outputs": json.loads(sampling.structured_outputs) if sampling.structured_outputs else None,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def _body_of_token_ids(self, requests: Sequence[Request], seed: int) -> dict[str, Any]:
        """Return the body of `_GENERATE` for completions of one prompt, and its images, which the server expands."""
        sampling, images = requests[0].sampling, requests[0].images
        given = {"n": len(requests), "seed": seed, "max_tokens": sampling.max_tokens, "ignore_eos": True}
        given |= {"logprobs": sampling.num_kept} if sampling.log_probs else {}
        if sampling.structured_outputs:
            given["structured_outputs"] = json.loads(sampling.structured_outputs)
        body = {
            "model": self.adapter or self.model,
            "token_ids": list(requests[0].prompt_ids),
            "sampling_params": sampling_parameters(sampling) | given,
            "return_token_ids": True,
        }
        if images is None or not images.sources:
            return body
        # The server keeps embeddings of images by these names. A load of weights clears them in the worker and not in
        # the scheduler, so the engine would fail at a name of an earlier load ("Encoder cache miss").
        names = [f"{name} {self.load}" for name in images.names]
        parts = [
            self._part(source, decoded) | {"uuid": name}
            for source, decoded, name in zip(images.sources, images.open(), names, strict=True)
        ]
        return {**body, "token_ids": images.collapse(requests[0].prompt_ids), "content_parts": parts}

    def _part(self, source: Source, decoded: Any) -> dict[str, str]:
        """Return an image or video, decoded by the trainer.

        The server would put transparent parts on white, where the trainer drops the transparency. It takes the frames
        of a video as images of any format, and the rate from its own flags.
        """
        if not isinstance(source, Video):
            return {"type": "image_url", "url": _as_png(source, decoded)}
        if (rate := self._video_flags.get("fps", 1)) != source.fps or self._video_flags.get("num_frames", 32) != -1:
            raise Fault(
                f"it takes up to {self._video_flags.get('num_frames', 32)} frames of a video (-1: all) at {rate:g} "
                f"frames a second, and a video has {len(source.frames)} at {source.fps:g}: start it with "
                f"""--media-io-kwargs '{{"video": {{"num_frames": -1, "fps": {source.fps:g}}}}}'; all videos need """
                "one fps"
            )
        frames = [as_data_uri(Image.fromarray(frame)).partition(",")[2] for frame in decoded]
        return {"type": "video_url", "url": f"data:video/jpeg;base64,{','.join(frames)}"}

    def _completion(self, request: Request, choice: dict[str, Any], prompt: list[int], version: int) -> Completion:
        sampling, ids, reason = request.sampling, choice["token_ids"], choice["finish_reason"]
        if choice["prompt_token_ids"] != prompt:
            raise _changed_prompt(request)
        self.check_end(request, ids, reason, self._args.vocab_size)
        log_probs = kept = None
        if sampling.log_probs:
            if choice["logprobs"]["tokens"] != [f"token_id:{token}" for token in ids]:
                raise Fault("its log-probabilities do not belong to the sampled tokens")
            log_probs = choice["logprobs"]["token_logprobs"]
            if sampling.kept_token_ids:
                kept = _kept(ids, log_probs, choice["logprobs"]["top_logprobs"], sampling.top_k)
        experts = None
        if sampling.routed_experts:
            experts = self._routed_experts(choice, len(prompt) + len(ids) - 1)
        return Completion(request.id, ids, log_probs, reason, [version] * len(ids), experts, kept)

    def _routed_experts(self, choice: dict[str, Any], tokens: int) -> npt.NDArray[np.int16]:
        """Return ``Completion.routed_experts`` from the base64 of an .npy file, [tokens, layers, topk]."""
        return routed_experts(self._args, choice["routed_experts"], tokens, lambda file: np.load(io.BytesIO(file)))

    @reads_answers
    async def checksums(self) -> dict[str, str] | None:
        timeout = self._args.vllm_server_timeout
        answer = await self.call_if_able("POST", "/weight_checker", {"action": "checksum"}, timeout)
        return answer and answer["checksums"]  # absent in vLLM 0.26

    async def load_weights(self, directory: str, timeout: float) -> None:
        body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        await self.call("POST", "/collective_rpc", body, timeout=timeout)

    async def load_adapter(self, name: str, directory: str, timeout: float) -> None:
        """Load the adapter of PEFT's files under ``name``, and complete requests with it; call `finish_update` next."""
        body = {"lora_name": name, "lora_path": directory}
        await self.call("POST", "/v1/load_lora_adapter", body, timeout=timeout)
        last, self.adapter = self.adapter, name
        if last:  # unknown to a server that has restarted
            await self.call_if_able("POST", "/v1/unload_lora_adapter", {"lora_name": last}, PROBE_TIMEOUT)

    @reads_answers
    async def finish_update(self, version: int) -> None:
        if self._args.weight_update != "keep":  # else running requests hold it, and `stream` names the version
            # reset_external also clears caches that the server's own flags offload or transfer.
            path = "/reset_prefix_cache?reset_external=true"
            if not (await self.call("POST", path, timeout=PROBE_TIMEOUT))["success"]:
                raise Fault("it could not drop its prefix cache: stop all other clients of this server")
        self.load = uuid.uuid4().hex
        body = {"new_version": weight_tag(version)}
        await self.call_if_able("POST", "/update_weight_version", body, PROBE_TIMEOUT)  # absent in vLLM 0.26

    async def pause(self) -> None:
        # vLLM would drop the cache at the pause, although its documentation says that it ignores clear_cache then.
        await self.call("POST", "/pause?mode=keep&clear_cache=false", timeout=self._args.vllm_server_timeout)

    async def resume(self) -> None:
        await self.call("POST", "/resume", timeout=PROBE_TIMEOUT)


@cachetools.cached(cachetools.LRUCache(CACHED_BYTES, len), key=lambda source, decoded: source, lock=threading.Lock())
def _as_png(source: Source, decoded: Any) -> str:
    """Return the data URI of an image; the newest are kept, because each turn sends the images of all earlier ones."""
    return as_data_uri(decoded)


def _cache_tokens(metrics: str) -> int | None:
    """Return the tokens that a server keeps by its /metrics, in all its engines; None if one keeps no prefixes."""
    found = re.findall(r"^vllm:cache_config_info\{(.*)\} ", metrics, re.M)
    engines = [dict(re.findall(r'(\w+)="([^"]*)"', labels)) for labels in found]
    if not engines or any(of["enable_prefix_caching"] != "True" for of in engines):
        return None
    tokens = [of.get("kv_cache_size_tokens", "") for of in engines]
    return sum(map(int, tokens)) if all(map(str.isdigit, tokens)) else None


def _has_images(request: Request) -> bool:
    return request.images is not None and bool(request.images.sources)


def _changed_prompt(request: Request) -> Fault:
    cure = ": give it the processor's files of --tokenizer-model, with its sizes of images" * _has_images(request)
    return Fault(f"it changed the token ids of a prompt{cure}")


def _as_of_completions(choice: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return a choice of an answer of /inference/v1/generate as /v1/completions writes it."""
    logged = (choice["logprobs"] or {}).get("content") or []
    logprobs = {
        "tokens": [_named(one) for one in logged],
        "token_logprobs": [one["logprob"] for one in logged],
        "top_logprobs": [{_named(other): other["logprob"] for other in one["top_logprobs"]} for one in logged],
    }
    return {**choice, "logprobs": logprobs, "prompt_token_ids": answer.get("prompt_token_ids")}


def _named(logged: dict[str, Any]) -> str:
    """Return the name of a token: vLLM 0.26 writes it, later versions write the id alone."""
    return logged["token"] if "token" in logged else f"token_id:{logged['token_id']}"


def _kept(
    ids: list[int], log_probs: list[float], likeliest: list[dict[str, float]], top_k: int
) -> npt.NDArray[np.int32]:
    """Return ``Completion.kept_token_ids`` from the server's ``top_logprobs``; -9999 is its log of 0."""
    table = np.full((len(ids), 1 + top_k), -np.inf)
    tokens = np.zeros(table.shape, np.int64)
    table[:, 0], tokens[:, 0] = log_probs, ids
    for row, given in enumerate(likeliest):
        others = [(int(name.removeprefix("token_id:")), value) for name, value in given.items() if value > -9999]
        others = [(token, value) for token, value in others if token != ids[row]][:top_k]
        for column, (token, value) in enumerate(others, start=1):
            tokens[row, column], table[row, column] = token, value
    return kept_token_ids(tokens, table)


def model_sizes(text: str) -> dict[str, int]:
    """Return the numbers of layers, tokens and channels in vLLM's printed model; unreadable ones are left out."""
    sizes = {}
    text = text[max(0, text.find("(language_model)")) :]  # a vision tower has layers of its own
    layers = re.search(r"^( *)\(layers\): ModuleList\(.*\n((?:\1 +.*\n)*)", text, re.M)
    if layers:
        ranges = re.findall(rf"^{layers[1]}  \((?:\d+-)?(\d+)\): ", layers[2], re.M)
        sizes["layers"] = max(map(int, ranges), default=-1) + 1
    embedding = re.search(r"\(embed_tokens\): VocabParallelEmbedding\((.*)\)", text)
    if embedding:
        numbers = dict(re.findall(r"(\w+)=(\d+)", embedding[1]))
        for what, name in (("vocabulary tokens", "org_vocab_size"), ("channels", "embedding_dim")):
            if name in numbers:
                sizes[what] = int(numbers[name])
    return sizes
