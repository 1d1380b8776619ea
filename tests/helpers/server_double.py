"""Test doubles of the servers of vLLM and SGLang.

A double checks requests as the real server does, generates with a tiny transformers model, loads weights from files,
and injects faults. It uses Python's HTTP server with one thread per connection: unlike a web framework, this server can
drop a connection at any point.
"""

import base64
import contextlib
import copy
import datetime
import io
import itertools
import json
import pickle
import re
import struct
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY, LAYERS, HIDDEN, EOS = 16, 2, 32, 1
EXPERTS, TOPK = 4, 2  # of `tiny_mixture`
TOKENS_IN = "/inference/v1/generate"
LOCK = threading.Lock()  # one forward pass at a time


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "eos_token_id": EOS,
    "initializer_range": 0.5,
}


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).float().eval()


def tiny_mixture(seed: int = 0) -> Qwen3MoeForCausalLM:
    """Return a mixture of experts whose first layer is dense."""
    torch.manual_seed(seed)
    experts = {"mlp_only_layers": [0], "num_experts": EXPERTS, "num_experts_per_tok": TOPK, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts, head_dim=16)).float().eval()


def fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint with each layer's experts in one tensor, as transformers' models have them."""
    found, experts = {}, defaultdict(list)  # by (layer, part)
    for name, tensor in weights.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            experts[match[1], match[3]].append((int(match[2]), tensor))
        else:
            found[name] = tensor
    stacked = {
        key: torch.stack([tensor for _, tensor in sorted(of, key=lambda one: one[0])]) for key, of in experts.items()
    }
    for layer in {layer for layer, _ in stacked}:
        found[f"{layer}.gate_up_proj"] = torch.cat([stacked[layer, "gate"], stacked[layer, "up"]], 1)
        found[f"{layer}.down_proj"] = stacked[layer, "down"]
    return found


@torch.no_grad()
def routed_experts(model, ids: list[int]) -> np.ndarray:
    """Return the experts of all tokens but the last, [tokens - 1, layers, topk], 0 in dense layers, as servers do."""
    layers = model.model.layers
    found = np.zeros((len(ids) - 1, len(layers), model.config.num_experts_per_tok), np.int64)
    hooks = []
    for number, layer in enumerate(layers):
        if hasattr(layer.mlp, "gate"):

            def note(module, inputs, output, number=number):
                found[:, number] = output[2]

            hooks.append(layer.mlp.gate.register_forward_hook(note))
    model(torch.tensor([ids[:-1]]))
    for hook in hooks:
        hook.remove()
    return found


class Double(ThreadingHTTPServer):
    """A server on a free port; ``fault`` is the current kind of fault, ``calls`` lists (path, body) of all requests."""

    daemon_threads = True

    def __init__(self, kind: str = "vllm", key: str | None = None, make_model=lambda: tiny_model(99), **config):
        super().__init__(("127.0.0.1", 0), HANDLERS[kind])
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.key, self.fault, self.calls = key, "", []
        self.config = config
        self.started = 1000.0
        self.tokens = self.running = self.most_running = 0
        self.drafts: list[int] | None = None  # counts of speculative decoding, if it is on
        self.caches: list[tuple[bool, int]] = []  # of a vLLM server's engines: whether one keeps prefixes, and tokens
        self.make_model = make_model
        self.model, self.weight_version = make_model(), "default"
        self.reloads: list[str] = []
        self.adapters: dict[str, LlamaForCausalLM] = {}  # name -> model with the adapter merged
        self.generated, self.fail_after = 0, None  # number of requests; the server dies after ``fail_after``
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.asleep: set[str] = set()
        self.instead = lambda path: None  # an answer of 200 that is not the server's own; it may wait, too
        self.stall, self.stalled = None, threading.Event()  # of streams
        self.paused, self.on_the_way = False, 0  # tokens that a pause finds sampled and not sent
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def restart(self) -> None:
        """Simulate a restart of the server process, with its initial weights."""
        self.started += 1.0
        self.groups.clear()
        self.asleep.clear()
        self.paused = False
        self.adapters.clear()
        self.model, self.weight_version = self.make_model(), "default"
        self.drafts = self.drafts and [0, 0, 0]

    def stop(self) -> None:
        """Refuse new connections and drop the existing ones."""
        self.fault = "die"
        self.shutdown()
        self.server_close()

    def load(self, directory: str) -> None:
        files = sorted(Path(directory).glob("*.safetensors"))
        assert files, f"no weights in {directory}"
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        missing, unexpected = self.model.load_state_dict(fused(weights), strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, f"{missing} {unexpected}"
        self.model.tie_weights()
        self.reloads.append(directory)

    def load_adapter(self, name: str, directory: str) -> None:
        """Merge PEFT's files into a copy of the model."""
        assert name not in self.adapters, f"The lora adapter '{name}' has already been loaded."
        config = json.loads(Path(directory, "adapter_config.json").read_text())
        matrices = load_file(Path(directory, "adapter_model.safetensors"))
        model = copy.deepcopy(self.model)
        for key in matrices if self.fault != "ignored adapter" else ():
            layer, kind, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
            if kind == "lora_A" and not layer.endswith(self.config.get("without_slot", "nothing")):
                up = matrices[key.replace("lora_A", "lora_B")]
                model.get_submodule(layer).weight.data += config["lora_alpha"] / config["r"] * up @ matrices[key]
        self.adapters[name] = model

    def handle_error(self, request, client_address) -> None:  # a client that disconnects is not an error
        pass


@torch.no_grad()
def sample(
    model, prompt: list[int], sampling: dict, seed: int, stop_ids: list[int]
) -> tuple[list[int], list[float], str]:
    """Return (token ids, their log-probabilities after the temperature, finish reason)."""
    generator = torch.Generator().manual_seed(seed)
    ids, log_probs = [], []
    while len(ids) < sampling["max_tokens"]:
        logits = model(torch.tensor([prompt + ids])).logits[0, -1]
        if sampling["temperature"] == 0:
            token = int(logits.argmax())
            log_p = torch.log_softmax(logits, -1)
        else:
            if sampling.get("logprobs"):  # truncated here only; processed log-probabilities include it
                logits = logits.where(logits >= logits.topk(sampling["top_k"]).values[-1], float("-inf"))
            log_p = torch.log_softmax(logits / sampling["temperature"], -1)
            token = int(torch.multinomial(log_p.exp(), 1, generator=generator))
        ids.append(token)
        log_probs.append(float(log_p[token]))
        if token in stop_ids:
            return ids, log_probs, "stop"
    return ids, log_probs, "length"


def spans_of(labels: list[str]) -> list[dict]:
    """Return runs of equal labels as vLLM 0.32 does."""
    ends = [i for i in range(1, len(labels) + 1) if i == len(labels) or labels[i] != labels[i - 1]]
    return [{"version": labels[end - 1], "start": start, "end": end} for start, end in itertools.pairwise([0, *ends])]


class Handler(BaseHTTPRequestHandler):
    """Common base of the request handlers: JSON, API keys, and faults."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # sends headers and body together
    server: Double

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.respond(json.loads(body) if body else {})

    def respond(self, body: dict) -> None:
        path, _, query = self.path.partition("?")
        double = self.server
        double.calls.append((path, body))
        generating = path in ("/v1/completions", TOKENS_IN, "/generate")
        if generating:
            double.generated += 1
            if double.fail_after is not None and double.generated > double.fail_after:
                double.fault = "die"
        if double.fault == "hang":
            while double.fault == "hang":
                time.sleep(0.05)
            return
        if double.fault == "die" or (double.fault == "die generating" and generating):
            self.close_connection = True
            self.connection.close()
            return
        if (answer := double.instead(path)) is not None:
            return self.reply(200, answer)
        if double.fault == "500 generating" and generating:
            return self.reply(500, {"error": {"message": "out of memory", "code": 500}})
        if double.key and self.guarded(path) and self.headers.get("Authorization") != f"Bearer {double.key}":
            return self.reply(401, {"error": "Unauthorized"})
        if generating:
            double.running += 1
            double.most_running = max(double.most_running, double.running)
        try:
            with LOCK if generating else contextlib.nullcontext():
                code, answer = self.answer(path, query, body)
        except (AssertionError, RuntimeError, KeyError) as error:
            code, answer = 400, {"error": {"message": str(error), "code": 400}}
        finally:
            double.running -= generating
        if body and body.get("stream") and code == 200:
            self.stream(answer["choices"][0], body | body.get("sampling_params", {}))
        else:
            self.reply(code, answer)

    def stream(self, choice: dict, body: dict) -> None:
        """Send a completion token by token; after ``stall`` tokens a stream waits for a fault.

        A paused server sends nothing. If it has other weights then, it samples again what follows ``on_the_way``.
        """
        double, ids, log_probs, loads = self.server, choice["token_ids"], choice["logprobs"], len(self.server.reloads)
        prompt = body["token_ids"] if self.path == TOKENS_IN else body["prompt"]
        labels = [double.weight_version] * len(ids)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        place = -1
        while (place := place + 1) < len(ids):
            while (double.paused or (double.stall is not None and place >= double.stall)) and not double.fault:
                double.stalled.set()
                time.sleep(0.01)
            if len(double.reloads) > loads:
                loads, begun = len(double.reloads), ids[: place + double.on_the_way]
                rest = body | {"max_tokens": body["max_tokens"] - len(begun)}
                if len(begun) < len(ids):
                    with LOCK:
                        new = sample(double.model, prompt + begun, rest, body["seed"], body["stop_token_ids"])
                    ids, choice["finish_reason"] = begun + new[0], new[2]
                    labels = labels[: len(begun)] + [double.weight_version] * len(new[0])
                    again = self.logged(*new[:2])
                    log_probs = {name: log_probs[name][: len(begun)] + again[name] for name in again}
            token = ids[place]
            if double.fault == "die":
                self.close_connection = True
                self.connection.close()
                return
            reason = choice["finish_reason"] if place == len(ids) - 1 else None
            part = {"index": 0, "token_ids": [token], "finish_reason": reason, "logprobs": None}
            if log_probs is not None:
                one = slice(place, place + 1)
                part["logprobs"] = {name: log_probs[name][one] for name in log_probs if name != "top_logprobs"}
            event = {"choices": [part]}
            if self.path == TOKENS_IN:
                part["routed_experts"] = choice["routed_experts"] if reason else None
                part["weight_versions"] = spans_of(labels) if reason and not double.config.get("old") else None
            elif place == 0:
                part["prompt_token_ids"] = choice["prompt_token_ids"]
            self.chunk(f"data: {json.dumps(event)}\n\n")
        self.chunk("data: [DONE]\n\n")
        self.chunk("")

    def logged(self, ids: list[int], log_probs: list[float]) -> dict:
        """Return log-probabilities as this path writes them."""
        if self.path != TOKENS_IN:
            return {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": log_probs}
        old = self.server.config.get("old")
        named = [{"token": f"token_id:{token}"} if old else {"token_id": token} for token in ids]
        return {
            "content": [name | {"logprob": p, "top_logprobs": []} for name, p in zip(named, log_probs, strict=True)]
        }

    def chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def experts(self, model, ids: list[int]) -> np.ndarray:
        """Return what the server reports of these tokens' experts; a fault changes it."""
        found = routed_experts(model, ids)
        match self.server.fault:
            case "a layer less":
                return found[:, 1:]
            case "a token less":
                return found[1:]
            case "redundant experts":
                found[-1, -1, -1] = EXPERTS
            case "kernels do not tell":
                found[:] = 0
        return found

    def reply(self, code: int, answer) -> None:
        text = answer if isinstance(answer, str) else json.dumps(answer)
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())
        self.wfile.flush()

    @staticmethod
    def guarded(path: str) -> bool:
        return True

    def answer(self, path: str, query: str, body: dict):
        raise NotImplementedError


class VllmHandler(Handler):
    """Request handler of vLLM 0.32; with ``old`` in the configuration of vLLM 0.26, without weight versions."""

    @staticmethod
    def guarded(path: str) -> bool:
        return path.startswith("/v1")

    def answer(self, path: str, query: str, body: dict):
        double, config = self.server, self.server.config
        missing = (404, {"detail": "Not Found"})
        if path in ("/server_info", "/collective_rpc", "/reset_prefix_cache") and config.get("dev_mode") is False:
            return missing
        if path in ("/weight_info", "/update_weight_version") and config.get("old"):
            return missing
        match path:
            case "/v1/models":
                return 200, {"data": [{"id": "toy", "root": "toy", "max_model_len": config.get("max_model_len", 128)}]}
            case "/server_info":
                model = {"dtype": config.get("dtype", "torch.float32")}
                model["logprobs_mode"] = config.get("logprobs_mode", "processed_logprobs")
                model |= {"max_logprobs": 20, "quantization": config.get("quantization")}
                experts = {"enable_return_routed_experts": config.get("routed_experts", False)}
                model |= experts if config.get("old") else {}
                return 200, {
                    "vllm_config": {
                        "model_config": model,
                        **({} if config.get("old") else {"aux_output_config": experts}),
                        "speculative_config": {"method": method} if (method := config.get("drafts")) else None,
                        "device_config": {"device": config.get("device", "cpu")},
                        "cache_config": {"mamba_ssm_cache_dtype": config.get("states", "auto")},
                        "scheduler_config": {"enable_chunked_prefill": config.get("chunked", False)},
                        "compilation_config": {"custom_ops": ["all"]},
                        "lora_config": {"max_lora_rank": rank} if (rank := config.get("max_lora_rank")) else None,
                    },
                    "vllm_env": {
                        "VLLM_MLA_DISABLE": False,
                        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": config.get("updating", True),
                    },
                }
            case "/v1/load_lora_adapter":
                double.load_adapter(body["lora_name"], body["lora_path"])
                return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."
            case "/v1/unload_lora_adapter":
                if double.adapters.pop(body["lora_name"], None) is None:
                    return 404, {"error": {"message": "The lora adapter cannot be found.", "code": 404}}
                return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."
            case "/metrics":
                lines = [f'vllm:generation_tokens_total{{engine="0",model_name="toy"}} {float(double.tokens)}']
                for engine, (keeps, tokens) in enumerate(double.caches):  # of vLLM's engines: prefixes, tokens
                    lines.append(
                        f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{keeps}",engine="{engine}",'
                        f'kv_cache_max_concurrency="2.5",kv_cache_size_tokens="{tokens}",num_gpu_blocks="64"}} 1.0'
                    )
                names = ("drafts", "draft_tokens", "accepted_tokens") if double.drafts is not None else ()
                for name, count in zip(names, double.drafts or ()):
                    lines += [
                        f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="toy"}} {float(count)}',
                        f'vllm:spec_decode_num_{name}_per_pos_total{{engine="0",position="0"}} 1e6',
                        f'vllm:spec_decode_num_{name}_created{{engine="0",model_name="toy"}} 1.7e+09',
                    ]
                return 200, "\n".join([f"process_start_time_seconds {double.started}", *lines, ""])
            case "/weight_info":
                return 200, {"weight_version": double.weight_version}
            case "/update_weight_version":
                double.weight_version = body["new_version"]
                return 200, {"success": True, "new_version": body["new_version"]}
            case "/start_weight_update" | "/update_weights" | "/finish_weight_update":
                assert double.fault != f"400 {path}", "no room"
                return 200, {"message": "done"}
            case "/reset_prefix_cache":
                return 200, {"success": True}
            case "/pause":
                assert query == "mode=keep&clear_cache=false"  # else it drops what the requests hold
                double.paused = True
                return 200, {"status": "paused"}
            case "/resume":
                double.paused = False
                return 200, {"status": "resumed"}
            case "/is_paused":
                return 200, {"is_paused": double.paused}
            case "/collective_rpc" if body["method"] == "get_model_inspection":
                return 200, {"results": [self.printed()]}
            case "/collective_rpc" if body["method"] == "reload_weights":
                double.load(body["kwargs"]["weights_path"])
                return 200, {"results": [None]}
            case "/openapi.json":
                there = config.get("old") or config.get("scale_out")  # 0.32: --enable-scale-out
                paths = {"/v1/completions": {}} | ({TOKENS_IN: {}} if there else {})
                return 200, {"paths": paths | ({} if config.get("old") else {"/weight_info": {}})}
            case "/v1/completions":
                return 200, self.completions(body)
            case "/inference/v1/generate" if config.get("old") or config.get("scale_out"):
                return 200, self.tokens_in(body)
        return missing

    def tokens_in(self, body: dict) -> dict:
        """Answer as /inference/v1/generate: its body has other names, and its log-probabilities another form."""
        flags = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": None}
        asked = flags | body["sampling_params"] | {"model": body["model"], "prompt": body["token_ids"]}
        answer = self.completions(asked)
        for choice in answer["choices"]:
            del choice["prompt_token_ids"], choice["text"]
            if choice["logprobs"] is not None:
                choice["logprobs"] = self.logged(choice["token_ids"], choice["logprobs"]["token_logprobs"])
        return answer if self.server.config.get("old") else answer | {"prompt_token_ids": body["token_ids"]}

    def printed(self) -> str:
        shape = self.server.model.config
        sizes = {"layers": shape.num_hidden_layers - 1, "tokens": shape.vocab_size, "channels": shape.hidden_size}
        return PRINTED.format(**sizes | self.server.config)

    def completions(self, body: dict) -> dict:
        double = self.server
        assert body["model"] in ("toy", *double.adapters), "The model does not exist"
        model = double.adapters.get(body["model"], double.model)
        assert all(0 <= token < double.model.config.vocab_size for token in body["prompt"]), "out of vocabulary"
        if body.get("prompt_logprobs") is not None:
            return {"choices": [{"index": 0, "text": "", "prompt_logprobs": self.prompt_log_probs(body)}]}
        assert body["ignore_eos"] and body["return_token_ids"] and body["return_tokens_as_token_ids"]
        assert body["n"] == 1 or body["temperature"] > 0, "n must be 1 when using greedy sampling"
        choices = []
        for index in range(body["n"]):
            ids, log_probs, reason = sample(model, body["prompt"], body, body["seed"] + index, body["stop_token_ids"])
            double.tokens += len(ids)
            if double.drafts is not None:  # drafts of two tokens, of which one is accepted
                double.drafts = [a + b * len(ids) for a, b in zip(double.drafts, (1, 2, 1), strict=True)]
            names = [f"token_id:{token}" for token in ids]
            choice = {"index": index, "token_ids": ids, "finish_reason": reason, "logprobs": None, "text": ""}
            choice["prompt_token_ids"] = body["prompt"]
            choice["routed_experts"] = None
            if double.config.get("routed_experts"):
                file = io.BytesIO()
                np.save(file, self.experts(model, body["prompt"] + ids).astype(np.uint8))
                choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
            if body["logprobs"] is not None:
                choice["logprobs"] = {"tokens": names, "token_logprobs": log_probs}
            if body["logprobs"]:
                choice["logprobs"]["top_logprobs"] = self.likeliest(body["prompt"], ids, body)
            choices.append(choice)
        match double.fault:
            case "duplicate":
                choices.append(choices[0])
            case "too few":
                choices.pop()
            case "other prompt":
                choices[0]["prompt_token_ids"] = body["prompt"][1:]
            case "cut":
                choices[0] |= {"token_ids": choices[0]["token_ids"][:1], "finish_reason": "length", "logprobs": None}
            case "other token":
                choices[0]["token_ids"] = [*choices[0]["token_ids"][:-1], VOCABULARY]
            case "other end":
                choices[0] |= {"token_ids": [5], "finish_reason": "stop"}
            case "abort":
                choices[0]["finish_reason"] = "abort"
        return {"choices": choices}

    @torch.no_grad()
    def likeliest(self, prompt: list[int], ids: list[int], body: dict) -> list[dict[str, float]]:
        """Return the sampled token and the likeliest ones after truncation by top_k; -9999 is log 0, as in vLLM."""
        logits = self.server.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / body["temperature"]
        bounds = logits.topk(body["top_k"]).values[:, -1:]
        log_p = torch.log_softmax(logits.where(logits >= bounds, float("-inf")), -1).clamp(min=-9999.0)
        likeliest = log_p.topk(body["logprobs"])
        return [
            {f"token_id:{token}": float(row[token]) for token in (sampled, *others)}
            for sampled, others, row in zip(ids, likeliest.indices.tolist(), log_p, strict=True)
        ]

    @torch.no_grad()
    def prompt_log_probs(self, body: dict) -> list[dict | None]:
        """Return {token id: log-probability and rank} of each token of the prompt, None for the first, as vLLM does.

        The likeliest tokens, as many as ``prompt_logprobs`` says, are there, too, after the prompt's own.
        """
        prompt, count = body["prompt"], body["prompt_logprobs"] - (self.server.fault == "fewer likely")
        log_p = torch.log_softmax(self.server.model(torch.tensor([prompt])).logits[0], -1)
        rows: list[dict | None] = [None]
        for token, row in zip(prompt[1:], log_p, strict=False):
            rows.append(
                {
                    str(one): {"logprob": float(row[one]), "rank": int((row >= row[one]).sum()), "decoded_token": "?"}
                    for one in (token, *row.topk(max(count, 0)).indices.tolist())
                }
            )
        match self.server.fault:
            case "no prompt logprobs":
                return None
            case "too few":
                rows.pop()
            case "other token":
                rows[-1] = {str(VOCABULARY): {"logprob": -1.0}}
            case "infinite":
                rows[-1][str(prompt[-1])]["logprob"] = float("-inf")
        return rows


PRINTED = """ToyForCausalLM()(
  (model): ToyModel()(
    (embed_tokens): VocabParallelEmbedding(num_embeddings=128, embedding_dim={channels}, org_vocab_size={tokens})
    (layers): ModuleList()(
      (0-{layers}): 2 x ToyDecoderLayer()(
        (self_attn): Attention(head_size=16, num_heads=2)
      )
    )
    (norm): RMSNorm(hidden_size=32, eps=1e-06)
  )
)
"""


class SglangHandler(Handler):
    """Request handler of SGLang."""

    def answer(self, path: str, query: str, body: dict):
        double, config = self.server, self.server.config
        match path:
            case "/get_model_info":
                return 200, {"model_path": "toy", "is_generation": True, "weight_version": double.weight_version}
            case "/get_server_info":
                info = {"tp_size": 1, "context_length": None, "max_total_num_tokens": 4096, "quantization": None}
                info |= {"enable_memory_saver": False, "enable_weights_cpu_backup": False}
                info |= {"enable_return_routed_experts": False, "speculative_algorithm": None}
                return 200, info | config
            case "/health_generate":
                return 200, "ok"
            case "/flush_cache":
                return (400, "Timeout waiting for idle") if double.running else (200, "ok")
            case "/weights_checker":
                if not config.get("checker"):
                    return 400, {"success": False, "message": "Found no NVIDIA driver on your system."}
                sums = {name: hash(tensor.numpy().tobytes()) for name, tensor in double.model.state_dict().items()}
                return 200, {"success": True, "message": "Success.", "ranks": [{"checksums": sums}]}
            case "/release_memory_occupation":
                self.or_die(not double.running and not double.asleep & set(body["tags"]))
                double.asleep |= set(body["tags"])
                return 200, None
            case "/resume_memory_occupation":
                self.or_die(double.asleep >= set(body["tags"]))
                double.asleep -= set(body["tags"])
                return 200, None
            case "/update_weights_from_tensor":
                self.or_die("weights" not in double.asleep)
                (handles,) = body["serialized_named_tensors"]  # of tensors of this process
                double.model.load_state_dict(dict(pickle.loads(base64.b64decode(handles))), strict=False)
                return 200, {"success": True, "message": "Success"}
            case "/update_weights_from_disk":
                # Without load_format, a server started with --load-format dummy would answer 400.
                assert body["load_format"] == "auto"
                try:
                    double.load(body["model_path"])
                except (AssertionError, RuntimeError) as error:
                    return 400, {"success": False, "message": f"Failed to update weights: {error}"}
                return 200, {"success": True, "message": "Succeeded to update model weights."}
            case "/init_weights_update_group":
                assert body["group_name"] not in double.groups, "The specified group name has already been created"
                double.groups[body["group_name"]] = self.join(body)
                return 200, {"success": True, "message": "Succeeded to initialize custom process group."}
            case "/destroy_weights_update_group":
                assert double.groups.pop(body["group_name"], None), "The group to be destroyed does not exist."
                return 200, {"success": True, "message": "Succeeded to destroy custom process group."}
            case "/update_weights_from_distributed":
                self.receive(double.groups[body["group_name"]], body)
                return 200, {"success": True, "message": "Succeeded to update parameter online."}
            case "/update_weight_version":
                double.weight_version = body["new_version"]
                return 200, {"success": True, "new_version": body["new_version"]}
            case "/generate":
                self.or_die(not double.asleep)
                return 200, self.generate(body)
        return 404, {"detail": "Not Found"}

    def or_die(self, fine: bool) -> None:
        """Simulate an assertion of the scheduler: the server dies unless ``fine``."""
        if not fine:
            self.server.fault = "die"
            raise RuntimeError("the scheduler has died")

    @staticmethod
    def join(body: dict) -> dist.ProcessGroup:
        """Return a process group with torch's store prefixes.

        It is not registered in torch, because the other members of the group are in the same process.
        """
        store = dist.TCPStore(body["master_address"], body["master_port"], is_master=False)
        for prefix in (body["group_name"], f"{body['group_name']}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        return dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], datetime.timedelta(seconds=60))

    def receive(self, group: dist.ProcessGroup, body: dict) -> None:
        own = self.server.model.state_dict()
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast([tensor], dist.BroadcastOptions()).wait()
            own[name].copy_(tensor)
        assert self.server.fault != "400 received", "no room"

    def generate(self, body: dict) -> list[dict]:
        double, answers = self.server, []
        assert len(body["input_ids"]) == len(body["sampling_params"])
        for prompt, sampling in zip(body["input_ids"], body["sampling_params"], strict=True):
            known = "max_new_tokens temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
            known += " stop ignore_eos stop_token_ids sampling_seed"
            assert not set(sampling) - set(known.split()), f"Unexpected keyword argument {set(sampling)}"
            ids, log_probs, reason = sample(
                double.model,
                prompt,
                sampling | {"max_tokens": sampling["max_new_tokens"]},
                sampling["sampling_seed"],
                [] if sampling["ignore_eos"] else sampling["stop_token_ids"],
            )
            matched = {"matched": ids[-1]} if reason == "stop" else {"length": len(ids)}
            meta = {"prompt_tokens": len(prompt), "weight_version": double.weight_version}
            meta["finish_reason"] = {"type": reason} | matched
            if body["return_logprob"]:
                meta["output_token_logprobs"] = [[p, token, None] for p, token in zip(log_probs, ids, strict=True)]
            if body.get("return_routed_experts") and double.config.get("enable_return_routed_experts"):
                numbers = self.experts(double.model, prompt + ids).ravel().tolist()
                meta["routed_experts"] = base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()
            answers.append({"text": "", "output_ids": ids, "meta_info": meta})
        if double.fault == "duplicate":
            answers.append(answers[0])
        return answers


HANDLERS = {"vllm": VllmHandler, "sglang": SglangHandler}


def called(double: Double, path: str) -> int:
    return sum(re.fullmatch(path, asked) is not None for asked, _ in double.calls)
