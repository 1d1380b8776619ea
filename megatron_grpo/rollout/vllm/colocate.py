"""vLLM inside the training processes: one engine core per rank, tensor-parallel over consecutive ranks."""

import os
from typing import Any

# Read by vLLM at import: the engine core runs in this process, so that it shares the GPU and the process groups.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")  # vLLM switches it on for the trainer's kernels, too
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# numba, with which vLLM drafts n-grams, sets the OpenMP threads of the whole process, by default to all processors.
if threads := os.environ.get("OMP_NUM_THREADS"):
    os.environ.setdefault("NUMBA_NUM_THREADS", threads)

import contextlib
import copy
import functools
import gc
import hashlib
import importlib
import json
import logging
import random
import re
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.lora.targets import targets
from megatron_grpo.models.config import has_recurrence, params_dtype, recurrent_state_bytes
from megatron_grpo.models.gemma4 import layer_kinds
from megatron_grpo.parallel.agreement import device_answers, raised_on_every_rank
from megatron_grpo.parallel.initialize import await_ranks, host_group
from megatron_grpo.patches import vllm as patches
from megatron_grpo.rollout.arguments import keeps_prefixes, replays_top_k
from megatron_grpo.rollout.draft_counts import DraftCounts, no_drafts
from megatron_grpo.rollout.engine import Completion, Request, generate, lost_on_failure, request_seed
from megatron_grpo.rollout.routed_experts import of_moe_layers
from megatron_grpo.rollout.speculation import draft_directory, longest_of_engine, method_of, mtp_prefixes
from megatron_grpo.rollout.vllm import adapter as slots
from megatron_grpo.rollout.vllm import draft, scheduler
from megatron_grpo.rollout.vllm.compare import can_compare, compare_weights
from megatron_grpo.rollout.vllm.kept_tokens import kept_token_ids
from megatron_grpo.rollout.vllm.load_weights import load_weights
from megatron_grpo.rollout.vllm.loader_trace import reads
from megatron_grpo.rollout.weight_sync import planned
from megatron_grpo.rollout.weight_sync.weight_check import refuse
from megatron_grpo.utils import progress
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import EngineLost, GrpoError, is_out_of_memory
from megatron_grpo.utils.log import log
from megatron_grpo.vision.images import load_processor
from megatron_grpo.weights.stream import WeightStream
from megatron_grpo.weights.transfer_plan import HfTensor, Reads, whole

UNDIVIDED = 1024  # tokens of the longest sequence whose keys one program of attention reads
LARGEST_GRAPH = 512  # sequences of vLLM's largest CUDA graph, if it is not told


class VllmColocate:
    """Engine that runs vLLM in the training processes (``--rollout-engine vllm --vllm-mode colocate``).

    ``hf_config`` is the model's ``config.json``. `update_weights` loads the weights; no file of weights is read.
    """

    drafts: DraftCounts | None = None
    engines = 1

    def __init__(self, args, hf_config: dict):
        world, rank, width = dist.get_world_size(), dist.get_rank(), args.vllm_tensor_parallel_size
        self.replica, self.num_replicas, self.is_lead = rank // width, world // width, rank % width == 0
        self.has_weights = False
        self._awake = True
        self._version = 0
        self._args = args
        self._transfers: dict[str, planned.Transfer] = {}  # from the trainer's shards, by `planned.kind_of`
        self._loads = 0  # of weights or an adapter; a version comes again after --on-bad-update restore
        self._sleep_level = args.sleep_level
        self._vocab_size, self._max_model_len = args.vocab_size, args.vllm_max_model_len
        self._sees_images = bool(args.vision_config)
        # The default padding token of a family in transformers may lie outside a smaller vocabulary.
        hf_config = {**hf_config, "pad_token_id": 0}
        if self._sees_images:  # transformers warns of default ids beyond the vocabulary
            hf_config |= {"bos_token_id": None, "eos_token_id": None}
        if torch.cuda.is_available():
            hf_config["head_dtype"] = "float32"  # as models/head.py; also for soft cap and temperature in vLLM
        _import_vllm()
        directory = str(_config_directory(args, hf_config))
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        with _preserve_random_state(), _rank_of_role(), _private_shared_memory():
            self._llm = _build(args, directory)
        self._allocated = torch.cuda.memory_allocated() - before if torch.cuda.is_available() else 0
        self._engine = self._llm.llm_engine
        cache = self._engine.vllm_config.cache_config
        self._keeps_prefixes = cache.enable_prefix_caching
        self.cache_tokens: int | None = cache.kv_cache_size_tokens if self._keeps_prefixes else None
        self.places: int = args.vllm_max_num_seqs
        if args.exact_log_probs:
            from megatron_grpo.rollout.vllm import exact

            exact.check(self._engine)
        if self.is_lead and args.vllm_speculative_config is None:  # steps with drafts are FlashAttention's
            for choice in scheduler.attention_choices(self._engine):  # replicas measure by themselves
                log(str(choice))
        scheduler.collect_log_probs(self._engine)
        self.decode_runner = scheduler.shorten_decode_steps(self._engine)
        self._speculates = args.vllm_speculative_config is not None
        if self._speculates:
            self.drafts = no_drafts()
            scheduler.count_drafts(self._engine, self.drafts)
        self._drafts_from_completions = method_of(args) == "suffix"
        self._mtp_prefixes = mtp_prefixes(args)
        self._draft_directory = draft_directory(args)
        if self._draft_directory:
            with raised_on_every_rank(), lost_on_failure("vLLM's loading of the draft model"):
                self._llm.collective_rpc(draft.load_draft, args=(self._draft_directory,))
        self._seeds_requests = _seeds_requests(self._engine.vllm_config)
        self._adapter_request: Any = None  # vLLM's LoRARequest for the adapter in the slot
        self._adapter_like: slots.Adapter = {}  # meta tensors with its shapes and dtypes
        self._rollout_seed = 0
        self._submitted = 0  # requests so far
        self._dropped = -1  # of them, when the prefix cache was dropped last
        self._under_way: dict[int, _UnderWay] = {}  # by id of the request
        self._finished: list[Completion] = []  # that `poll` has not returned
        self.sleep()

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if self._speculates and request.sampling.stop:  # refused before: as a flag, of a row, in a call
                raise GrpoError(
                    f"stop words {list(request.sampling.stop)} and --vllm-speculative-config cannot both be given: "
                    "vLLM keeps tokens of a draft behind a stop word; leave one of them out"
                )
            whole = request.with_begun_in_prompt()
            # The salt is part of the key of a prefix: a request never hits keys and values of earlier weights.
            prompt: dict = {"prompt_token_ids": list(whole.prompt_ids), "cache_salt": f"load {self._loads}"}
            if request.images is not None and request.images.sources:
                prompt["prompt_token_ids"] = request.images.collapse(whole.prompt_ids)  # vLLM expands them again
                prompt["multi_modal_data"] = request.images.for_vllm()
                # The key of an image's embeddings: beside requests that go on, those of an earlier tower are kept.
                names = [f"{name} load {self._loads}" for name in request.images.names]
                prompt["multi_modal_uuids"] = request.images.by_modality(names)
            sampling = copy.copy(_sampling_params(request.sampling))
            sampling.max_tokens = whole.sampling.max_tokens
            if self._seeds_requests:
                own = request_seed(self._rollout_seed, request.id, request.sampled_before + len(request.begun_ids))
                sampling.seed = own if request.seed is None else request.seed
            engine_id = f"{self._submitted}-{request.id}"
            self._under_way[request.id] = _UnderWay(engine_id, request)
            self._submitted += 1
            with lost_on_failure("vLLM's add_request"):
                try:
                    self._engine.add_request(engine_id, prompt, sampling, lora_request=self._adapter_request)
                except ValueError as error:  # a constraint that start-up checks cannot detect
                    constraint = request.sampling.structured_outputs
                    if not constraint:
                        raise
                    raise GrpoError(
                        f"vLLM refuses the constraint {constraint}: {error}; correct --structured-outputs-regex, or "
                        "the row's structured_outputs"
                    ) from error
            if request.begun_turn_ids and request.sampling.stop:
                self._search_stop_words_from(request)

    def _search_stop_words_from(self, request: Request) -> None:
        """Give vLLM the end of a continued completion's text, so that it finds a stop word that began in it."""
        state = scheduler.request_states(self._engine)[-1]  # the newest request's
        tail = list(request.begun_turn_ids)[-request.stop_word_window() :]
        text = state.detokenizer.tokenizer.decode(tail, skip_special_tokens=True)
        state.detokenizer.output_text = text.rstrip("\ufffd")  # the rest of a character comes with the next token

    def poll(self) -> list[Completion]:
        before, self._finished = self._finished, []
        return before + self._step()

    def _step(self) -> list[Completion]:
        """Run one step of vLLM; return the completions that finished in it."""
        finished = []
        with lost_on_failure("vLLM's step"):
            outputs = self._engine.step()
        progress.advance()
        for output in outputs:
            if output.finished:
                sample = output.outputs[0]
                ids = list(sample.token_ids)
                log_probs, kept = _log_probs(sample.logprobs, len(ids))
                reason = sample.finish_reason or "length"
                request_id = _number(output.request_id)
                under_way = self._under_way.pop(request_id)
                experts = None
                if under_way.request.sampling.routed_experts:
                    reported, routed = sample.routed_experts, len(output.prompt_token_ids) + len(ids) - 1
                    experts = of_moe_layers(self._args, None if reported is None else reported[:routed], routed)
                self._check_prompt(under_way.request, output.prompt_token_ids)
                versions = under_way.versions(len(ids), self._version)
                completion = Completion(request_id, ids, log_probs, reason, versions, experts, kept)
                finished.append(completion.after(under_way.request.begun))
        return finished

    def _finish_step(self) -> None:
        """Let vLLM record the step that it has launched ahead of the newest tokens, which is of the present weights.

        Completions that finish in it come with the next `poll`.
        """
        while self._under_way and scheduler.step_under_way(self._engine):
            with scheduler.launching_nothing(self._engine):
                self._finished += self._step()

    @staticmethod
    def _check_prompt(request: Request, ids: list[int]) -> None:
        """Raise GrpoError if vLLM has put other tokens in place of the images than the trainer does."""
        images = request.images
        if images is None or not images.sources:
            return
        expected = list(request.with_begun_in_prompt().prompt_ids)
        if ids != expected:
            raise GrpoError(
                f"{images.where}: vLLM's processor makes {len(ids)} tokens of the prompt and its images, and the "
                f"trainer's {len(expected)}: leave the row out, and report it with the size of its images"
            )

    def abort(self, ids: Iterable[int]) -> None:
        ids = set(ids)
        self._finished = [completion for completion in self._finished if completion.id not in ids]
        self._engine.abort_request([self._under_way.pop(i).engine_id for i in sorted(ids & self._under_way.keys())])

    def unfinished(self) -> list[Completion]:
        unfinished = []
        for state in scheduler.request_states(self._engine):
            ids = list(state.detokenizer.output_token_ids)
            log_probs, kept = _log_probs(state.logprobs_processor.logprobs, len(ids))
            number = _number(state.external_req_id)
            under_way = self._under_way[number]
            versions = under_way.versions(len(ids), self._version)
            log_probs = None if log_probs is None else list(log_probs)
            completion = Completion(number, ids, log_probs, "abort", versions, kept_token_ids=kept)
            unfinished.append(completion.after(under_way.request.begun))
        return sorted(unfinished, key=lambda completion: completion.id)

    def interrupt(self) -> list[Completion]:
        """Abort all requests; return their tokens so far, which vLLM's own abort does not return."""
        unfinished = self.unfinished()
        self.abort(completion.id for completion in unfinished)
        return unfinished

    @contextlib.contextmanager
    def rollout(self, seed: int) -> Iterator[None]:
        """Context of a rollout: samples depend only on ``seed`` and requests; restores the trainer's random state."""
        self._rollout_seed = seed
        await_ranks()  # the ranks of a replica step together
        with raised_on_every_rank(), _preserve_random_state():
            # vLLM draws from these generators for requests without a seed; all ranks of a replica must draw alike.
            torch.manual_seed(seed + self.replica)
            np.random.seed(seed + self.replica)
            if torch.cuda.is_available():
                torch.cuda.manual_seed(seed + self.replica)
            if not self._under_way:  # blocks of earlier weights have another salt
                self._drop_prefix_cache()
            if self.drafts is not None:
                self.drafts[:] = 0
            if self._drafts_from_completions:  # earlier ones would change the samples of a seed
                self._llm.collective_rpc(draft.forget_completions)
            yield

    def reads(self, tensors: Sequence[HfTensor]) -> Reads:
        with lost_on_failure("vLLM's loaders of weights, traced"):
            found = self._llm.collective_rpc(reads, args=(tensors, self._mtp_prefixes))[0]
        return found or Reads.of_loaders(whole(tensors))

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Load new weights; requests under way go on with their keys and values, and have tokens of both versions.

        Of a `WeightStream` the engine receives what it reads of the trainer's shards: full tensors are not gathered.
        """
        if not isinstance(weights, WeightStream):
            self._load(weights, version)
            return
        kind = planned.kind_of(weights)
        if kind not in self._transfers:
            table = planned.table(self._args, kind)
            holder = planned.holder(table, weights.local)
            self._transfers[kind] = planned.Transfer(self._args, planned.Links.of_trainers(), table, holder, self.reads)
        transfer = self._transfers[kind]
        await_ranks()  # the ranks exchange parts, and merge adapters, within a time-out
        self._load(transfer.run(weights.local), version)
        refuse(transfer.differences, planned.other_bytes(kind, version))

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        with raised_on_every_rank():
            try:
                self._finish_step()
                with lost_on_failure("vLLM's update of the weights"):
                    if self._mtp_prefixes:
                        self._llm.collective_rpc(draft.load_with_mtp, args=(weights, self._mtp_prefixes))
                    else:
                        self._llm.collective_rpc(load_weights, args=(weights,))
            except EngineLost:
                if device_answers():  # iterating is collective, so this rank must reach the end
                    for _ in weights:
                        pass
                raise
        self.has_weights = True
        self._begin_version(version)

    def _begin_version(self, version: int) -> None:
        """Count new weights or a new adapter: tokens have this version from now on."""
        if not self._under_way:
            self._drop_prefix_cache()
        not_begun = []
        for state in scheduler.request_states(self._engine):
            under_way, tokens = self._under_way[_number(state.external_req_id)], len(state.detokenizer.output_token_ids)
            under_way.seams.append((tokens, self._version))
            if not tokens:
                not_begun.append(under_way.request)
        self._version = version
        self._loads += 1
        self.abort(request.id for request in not_begun)
        self.submit(not_begun)  # with the salt of the new version

    @property
    def has_base(self) -> bool:
        return self.has_weights

    def update_adapter(self, adapter: slots.Adapter, version: int) -> None:
        """Load an adapter; requests under way go on with their keys and values, as in `update_weights`."""
        with raised_on_every_rank():
            self._finish_step()
        self._load_adapter(adapter, f"load {self._loads + 1}")
        if self._adapter_like.keys() != adapter.keys():
            self._adapter_like = {name: tensor.to("meta") for name, tensor in adapter.items()}
        self._begin_version(version)

    def _load_adapter(self, adapter: slots.Adapter, name: str) -> None:
        """Load an adapter under a name that no earlier one had: vLLM's cache has entries for each name."""
        from vllm.lora.request import LoRARequest

        with raised_on_every_rank(), lost_on_failure("vLLM's update of the adapter"):
            self._llm.collective_rpc(slots.load_adapter, args=(adapter,))
        self._adapter_request = LoRARequest(name, slots.SLOT, "no file")

    def compare_adapter(self, adapter: slots.Adapter) -> list[str]:
        with raised_on_every_rank(), lost_on_failure("vLLM's comparison of the adapter"):
            return [
                line for lines in self._llm.collective_rpc(slots.compare_adapter, args=(adapter,)) for line in lines
            ]

    def probe_adapter(self) -> list[str]:
        copies, request = self._llm.collective_rpc(slots.read_slots), self._adapter_request
        without = self._probe(None)
        silent = [kind for kind in slots.kinds(self._adapter_like) if not slots.differ(self._probe(kind), without)]
        with raised_on_every_rank(), lost_on_failure("vLLM's update of the adapter"):
            restored = all(self._llm.collective_rpc(slots.restore_slots, args=(copies[0],)))
        self._adapter_request = request
        self._drop_prefix_cache()
        return silent if restored else ["the adapter, which could not be restored after the probe,"]

    def _probe(self, kind: str | None) -> Completion:
        """Return a greedy completion with an adapter that is random on the layers of one kind and 0 on the others."""
        self._load_adapter(slots.random_adapter(self._adapter_like, kind, device()), f"probe {kind}")
        with self.rollout(seed=0):
            (completion,) = generate(self, [slots.probe_request(self._vocab_size, self._max_model_len)])
        return completion

    def _drop_prefix_cache(self) -> None:
        """Drop the keys, values and images' embeddings of earlier weights; GrpoError if requests still use some."""
        if self._dropped == self._submitted:  # vLLM would look at each block, 8 ms with 200,000 of them
            return
        if self._sees_images:
            self._engine.reset_encoder_cache()
        if self._keeps_prefixes and not self._engine.reset_prefix_cache():
            raise GrpoError(
                "vLLM did not drop its prefix cache, because requests still use it: the next completions would be "
                "computed from keys and values of earlier weights. Report this with the flags of the run and the "
                "versions in the banner"
            )
        self._dropped = self._submitted

    def compare_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[str] | None:
        with raised_on_every_rank(), lost_on_failure("vLLM's comparison of the weights"):
            if not all(self._llm.collective_rpc(can_compare)):
                return None
            if self._mtp_prefixes:
                found = self._llm.collective_rpc(draft.compare_with_mtp, args=(weights, self._mtp_prefixes))
            else:
                found = self._llm.collective_rpc(compare_weights, args=(weights,))
            return [line for lines in found for line in lines]

    def wake_weights(self) -> None:
        if self._sleep_level:
            with raised_on_every_rank(), lost_on_failure("vLLM's wake_up for the weights"):
                self._awake = True
                self._llm.wake_up(tags=["weights"])
                if self._draft_directory and self._sleep_level == 2:
                    self._llm.collective_rpc(draft.reload_draft, args=(self._draft_directory,))

    def wake_cache(self) -> None:
        if self._sleep_level:
            with raised_on_every_rank(), lost_on_failure("vLLM's wake_up for the KV cache"):
                self._llm.wake_up(tags=["kv_cache"])

    def sleep(self) -> None:
        if self._sleep_level:
            with raised_on_every_rank(), lost_on_failure("vLLM's sleep"):
                self._sleep()
            self.has_weights &= self._sleep_level < 2

    def _sleep(self) -> None:
        self._awake = False
        try:
            self._llm.sleep(self._sleep_level)
        except AssertionError as error:
            if "Memory usage increased" not in str(error):
                raise
            # vLLM raises after freeing its memory, because it compares the GPU's free memory before and after.
            raise EngineLost(
                f"vLLM's sleep failed on rank {dist.get_rank()}: while it freed its memory, another program allocated "
                "more on the same GPU; give this GPU to the run alone, or add --sleep-level 0"
            ) from error

    def device_bytes(self) -> tuple[int, int]:
        if not self._sleep_level or not torch.cuda.is_available():
            return self._allocated, 0  # from torch, like the trainer
        from vllm.device_allocator.cumem import CuMemAllocator

        blocks = CuMemAllocator.get_instance().pointer_to_data.values()
        asleep = sum(block.handle[1] for block in blocks if block.is_asleep)
        return sum(block.handle[1] for block in blocks) - asleep, asleep

    def close(self) -> None:
        """Free vLLM's device memory if it sleeps between rollouts; destroy its process groups and shared memory."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        if self._sleep_level and self._awake:
            # After a failure of the engine, vLLM, torch and CUDA raise errors of any type here, and the run has already
            # reported the first one. The process groups must be destroyed in any case.
            with contextlib.suppress(Exception):
                self._sleep()
        destroy_model_parallel()


@dataclass
class _UnderWay:
    """A request that vLLM has.

    Its id in vLLM is unique over the run: with asynchronous scheduling, vLLM processes the step that it queued before
    an abort, or before the end of a rollout, after this. If an id were given again, the token of that step would be
    appended to the new request.
    """

    engine_id: str
    request: Request
    seams: list[tuple[int, int]] = field(default_factory=list)  # (tokens so far, version until then) at new weights

    def versions(self, tokens: int, version: int) -> list[int]:
        """Return the version of each of the first ``tokens`` tokens; ``version``: of the newest."""
        found: list[int] = []
        for end, before in self.seams:
            found += [before] * (end - len(found))
        return found + [version] * (tokens - len(found))


def _number(engine_id: str) -> int:
    """Return the id of our request from its id in vLLM."""
    return int(engine_id.rpartition("-")[2])


def _import_vllm() -> None:
    """Import vLLM without garbage collections, and leave the imported objects out of later ones.

    vLLM calls the garbage collector before and after each part of its start.
    """
    gc.collect()  # frozen garbage would stay
    gc.disable()
    importlib.import_module("vllm.entrypoints.llm")
    gc.freeze()
    gc.enable()


def _build(args, directory: str):
    from vllm import LLM

    # So that CUDA does not start in its own process, vLLM starts another one, which imports torch and vLLM, to ask the
    # model's class for its abilities: on every rank, unless the home directory remembers it. Here CUDA has started.
    patches.INSPECTION.install(lambda function: function())
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # hide its warning that a CPU has no Triton
    if args.exact_log_probs:
        from megatron_grpo.rollout.vllm import exact  # it imports Triton

        exact.register(args)
    else:
        scheduler.use_decode_attention(args.max_prompt_length)
    on_a_cpu = _cpu_options(args) if not torch.cuda.is_available() else {}
    if args.model_family == "llava_onevision" and args.engine_sees_videos:
        _flatten_videos()
    if args.model_family in ("qwen3_5_text", "qwen3_5_moe_text"):
        from megatron_grpo.rollout.vllm import qwen3_5

        qwen3_5.register(args)
    try:
        options = dict(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=not (args.engine_decodes or args.vision_config),
            tokenizer=args.tokenizer_model if args.engine_decodes else None,
            trust_remote_code=args.trust_remote_code and args.engine_decodes,  # of the tokenizer
            dtype=args.vllm_dtype or str(params_dtype(args)).removeprefix("torch."),
            quantization=args.vllm_quantization,
            enable_expert_parallel=args.vllm_enable_expert_parallel,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            distributed_executor_backend="external_launcher",
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_len=longest_of_engine(args),
            max_num_seqs=args.vllm_max_num_seqs,
            # A CPU has no CUDA graphs, and compilation takes 20 s of CPU time per rank at the first start.
            enforce_eager=args.vllm_enforce_eager or not torch.cuda.is_available(),
            enable_prefix_caching=args.vllm_enable_prefix_caching,
            enable_sleep_mode=args.sleep_level > 0,
            enable_return_routed_experts=args.router_replay_mode == "R3",
            logprobs_mode=_logprobs_mode(args),
            seed=args.seed,
            disable_log_stats=True,
            **scheduler.scheduler_options(),
            **(slots.lora_options(args.lora_rank, targets(args)) if args.lora_weight_sync == "adapter" else {}),
            # Without videos, vLLM's profile runs the tower on no video.
            **({"limit_mm_per_prompt": {"video": 0}} if args.vision_config and not args.engine_sees_videos else {}),
            # Of the recurrent state, as trained; some versions read it in config.json for some architectures only.
            **({"mamba_ssm_cache_dtype": "float32"} if has_recurrence(args) else {}),
            speculative_config=args.vllm_speculative_config,
            **(on_a_cpu or _gpu_options(args)),
        )
        return LLM(**{**_with_given(options, args.vllm_engine_kwargs or {}), **_sizes_of_full_layers(args)})
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown[1] in (args.vllm_engine_kwargs or {}):
            raise GrpoError(
                f"--vllm-engine-kwargs: {unknown[1]!r} is no argument of vLLM's EngineArgs: correct it, or leave it out"
            ) from error
        raise GrpoError(
            f"vLLM could not be started: {error} (in {_innermost(error)}). Check the --vllm-* flags and the model's "
            "config.json"
        ) from error


def _sizes_of_full_layers(args) -> dict:
    """Return the option with which vLLM 0.26 finds Gemma 4's sizes of full layers, with those of --vllm-engine-kwargs.

    {} for a vLLM that needs none.

    That version reads them by their names in config.json. transformers 5.17 keeps them for each layer instead, and
    raises an error where the size of a head is read for the whole model.
    """
    from vllm.config.model_arch import ModelArchitectureConfig

    if not args.gemma4_config or hasattr(ModelArchitectureConfig, "per_layer_overrides"):
        return {}
    names = "global_head_dim", "num_global_key_value_heads"
    sizes = {"per_layer_config": None, **{name: args.gemma4_config[name] for name in names}}
    return {"hf_overrides": sizes | ((args.vllm_engine_kwargs or {}).get("hf_overrides") or {})}


def _flatten_videos() -> None:
    """Let vLLM's LLaVA-OneVision return a matrix for each video.

    vLLM 0.32's has one dimension more when it encodes videos of different lengths together, and its runner refuses it.
    """
    process = patches.VIDEOS.original()
    patches.VIDEOS.install(lambda self, inputs: [rows.flatten(0, -2) for rows in process(self, inputs)])


def _innermost(error: Exception) -> str:
    """Return the function, file and line in which an error of vLLM was raised: its message alone may say nothing."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name}, {frame.filename}:{frame.lineno}"


def _seeds_requests(vllm_config) -> bool:
    """Return whether each request gets a seed of its own.

    vLLM's first GPU runner (most mixtures of experts) would launch one kernel per seeded request and token. With that
    runner, rollout and replica determine one common seed instead.
    """
    return vllm_config.use_v2_model_runner or not torch.cuda.is_available()


def _expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """Return each request's value of ``x`` once for each of its draft tokens ``[num_tokens]``.

    Replaces vLLM 0.32's function of this name on a CPU, which writes into a copy if ``x`` is not int64: logits would be
    divided by uninitialized memory instead of temperatures.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


def _apply_top_k_top_p(logits, k, p):
    """Truncate the distributions ``logits`` of draft tokens.

    Replaces vLLM 0.32's function of this name on a CPU, which fails with top-k in a step without draft tokens.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    return apply_top_k_top_p(logits, k, p) if len(logits) else logits


def _gpu_options(args) -> dict:
    """Return vLLM's options for a GPU.

    In CUDA graphs, FlashAttention 3 divides the keys of a sequence among up to 32 programs, and adds a kernel that
    combines them. Short sequences gain nothing: a step of 512 takes 5 to 8% longer (docs/performance/rollouts.md).
    vLLM's largest CUDA graph is of 512 sequences, if it is not told.

    Inductor pads products whose rows are no multiple of 16 bytes, if that is faster. vLLM compiles a model in pieces,
    each for the rows of the piece before it as they were without the padding, and a piece then reads other numbers.
    """
    options: dict[str, dict] = {"compilation_config": {"inductor_compile_config": {"shape_padding": False}}}
    if args.vllm_max_num_seqs > LARGEST_GRAPH:
        options["compilation_config"]["max_cudagraph_capture_size"] = args.vllm_max_num_seqs
    if longest_of_engine(args) <= UNDIVIDED and not args.multi_latent_attention:
        options["attention_config"] = {"flash_attn_max_num_splits_for_cuda_graph": 1}
    if args.exact_log_probs:
        from megatron_grpo.rollout.vllm import exact

        return _both(exact.options(), options)
    return options


def _with_given(options: dict, given: dict) -> dict:
    """Return vLLM's ``options`` with those of --vllm-engine-kwargs in their place; of a compilation_config each key.

    vLLM takes a number as its mode. It refuses two largest CUDA graphs: ours gives way to a user's sizes.
    """
    ours, compilation = dict(options.get("compilation_config", {})), given.get("compilation_config")
    if isinstance(compilation, int):
        compilation = {"mode": compilation}
    if isinstance(compilation, dict | None):
        compilation = compilation or {}
        if {"cudagraph_capture_sizes", "max_cudagraph_capture_size"} & (given.keys() | compilation.keys()):
            ours.pop("max_cudagraph_capture_size", None)
        compilation = _both(ours, compilation)
    return {**options, **given, "compilation_config": compilation}


def _both(options: dict, others: dict) -> dict:
    """Return ``options`` with the values of ``others`` in their place; dictionaries that both have are joined alike."""
    nested = {
        name: _both(options[name], value)
        for name, value in others.items()
        if isinstance(value, dict) and isinstance(options.get(name), dict)
    }
    return {**options, **others, **nested}


def _cpu_options(args) -> dict:
    """Return vLLM's options for a CPU; GrpoError for what its CPU build lacks and would report in the first rollout."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if args.router_replay_mode == "R3":
        raise GrpoError(
            "--router-replay-mode R3: vLLM on a CPU does not report its choice of experts (this needs its model "
            "runner V2 and so Triton): give R2, or use a GPU"
        )
    if has_recurrence(args) and keeps_prefixes(args):
        where = "--vllm-engine-kwargs: 'enable_prefix_caching'"
        given = "enable_prefix_caching" in (args.vllm_engine_kwargs or {})
        raise GrpoError(
            f"{where if given else '--vllm-enable-prefix-caching'}: vLLM on a CPU does not keep the states of delta "
            "nets and of Mamba-2 at the ends of prefixes: leave it out, or use a GPU"
        )
    nets = args.linear_key_head_dim, args.linear_value_head_dim
    dtype = args.vllm_dtype or str(params_dtype(args)).removeprefix("torch.")
    if args.experimental_attention_variant and (dtype != "bfloat16" or not {64, 128}.issuperset(nets)):
        raise GrpoError(
            f"vLLM on a CPU computes gated delta nets in bfloat16 and with heads of 64 or 128 channels only, and here "
            f"they are {dtype}, {nets[0]} and {nets[1]}: give --vllm-dtype bfloat16 and such a model, "
            "--rollout-engine megatron, or use a GPU"
        )
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    flags = "--qk-head-dim + --qk-pos-emb-head-dim" if args.multi_latent_attention else "--kv-channels"
    channels = {args.qk_head_dim + args.qk_pos_emb_head_dim if args.multi_latent_attention else args.kv_channels}
    if args.gemma4_config:
        flags, channels = f"{flags} or global_head_dim", channels | {args.gemma4_config["global_head_dim"]}
    if wrong := channels.difference(sizes):
        raise GrpoError(
            f"{flags} is {min(wrong)}, but vLLM on a CPU has attention for heads of {', '.join(map(str, sizes))} "
            "channels only: give a model with such heads, or use a GPU"
        )
    if args.num_experts and args.squared_relu:
        raise GrpoError(
            "vLLM on a CPU has no experts with the square of ReLU (--squared-relu): give --rollout-engine megatron, or "
            "use a GPU"
        )
    if args.num_experts and args.hidden_size % 32:
        raise GrpoError(
            f"--hidden-size is {args.hidden_size}, but vLLM on a CPU has experts for multiples of 32 only: give a "
            "model with such a size, or use a GPU"
        )
    if args.num_experts:
        router = patches.EXPERT_ROUTER.original()
        if not isinstance(router, functools.partial):  # an earlier engine of this process has done it
            patches.EXPERT_ROUTER.install(functools.partial(_router, router))
    if args.vllm_speculative_config:
        patches.DRAFT_TEMPERATURES.install(_expand_batch_to_tokens)
        patches.DRAFT_TRUNCATION.install(_apply_top_k_top_p)
    # vLLM rewinds the generator of a seeded request whose prompt it cuts, which torch's CPU generators cannot.
    options: dict = {"enable_chunked_prefill": False, "kv_cache_memory_bytes": _cache_bytes_on_a_cpu(args)}
    if args.vision_config:
        # The profile runs the tower on the largest possible images. Constants of the normalization on the device (0.32)
        # are among the tensors that load_format="dummy" overwrites.
        options |= {"skip_mm_profiling": True, "mm_device_do_normalize": False}
    if not args.multi_latent_attention:
        return options
    # vLLM 0.32's CPU kernel for latent attention has one size (512 latent channels, 64 rotary ones) and no prefix
    # caching: expand keys and values before attention, as transformers does.
    os.environ["VLLM_MLA_DISABLE"] = "1"
    # vLLM's rotary kernel for CPUs expects [tokens, heads * channels] and rotates the wrong rows of latent attention's
    # [tokens, heads, channels]. Without the kernel, vLLM uses torch's operators.
    return options | {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}


def _router(router: Callable, scoring_func: str = "softmax", **options: Any) -> Any:
    """Return vLLM's ``router`` of experts; one of sigmoids without groups has one group of all experts."""
    if scoring_func == "sigmoid" and not options["use_grouped_topk"]:
        options |= {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
    return router(scoring_func=scoring_func, **options)


def _logprobs_mode(args) -> str:
    """Return the vLLM mode that satisfies the log-probability contract of ``engine.py``.

    raw_logprobs are taken before temperature, penalties and truncation, processed_logprobs after all of them.
    """
    return "raw_logprobs" if args.temperature == 1 and not replays_top_k(args) else "processed_logprobs"


def _log_probs(flat, tokens: int) -> tuple[list[float] | None, np.ndarray | None]:
    """Return ``Completion.log_probs`` and ``Completion.kept_token_ids`` from vLLM's FlatLogprobs, or None."""
    if flat is None:
        return None, None
    if len(flat.logprobs) == tokens:  # of the sampled tokens only, or no token
        return flat.logprobs, None
    table = np.array(flat.logprobs).reshape(tokens, -1)
    return table[:, 0].tolist(), kept_token_ids(np.array(flat.token_ids).reshape(table.shape), table)


def _cache_bytes_on_a_cpu(args) -> int:
    """Return the size of the KV cache: what all concurrent sequences need at their maximum length, at most 1 GiB.

    vLLM fills the whole cache with zeros at its start. VLLM_CPU_KVCACHE_SPACE in the environment (GiB) overrides it.
    """
    block = 128  # vLLM's block size on a CPU, tokens
    tokens = (args.vllm_max_num_seqs + 1) * -(-longest_of_engine(args) // block) * block
    heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    channels = args.kv_channels
    if args.multi_latent_attention:  # keys and values are expanded
        heads, channels = args.num_attention_heads, args.qk_head_dim + args.qk_pos_emb_head_dim
    layers = args.num_layers + (args.mtp_num_layers if mtp_prefixes(args) else 0)
    if draft_directory(args):  # a model that is at most as large
        layers *= 2
    width = heads * channels
    if args.gemma4_config:  # all layers have blocks of the size of the largest
        width = max(kind.groups * kind.channels for kind in layer_kinds(args))
    size = tokens * layers * 2 * width * 4
    if has_recurrence(args):  # a sequence has a block in every layer, and all blocks have the size of a state
        size = max(size, (args.vllm_max_num_seqs + 1) * layers * recurrent_state_bytes(args))
    return min(size, 2**30)


@functools.lru_cache(1024)  # every row can have its own sampling
def _sampling_params(sampling: Sampling):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=True,  # stop_token_ids has all end tokens; vLLM would add the default one of the family
        logprobs=sampling.num_kept if sampling.log_probs else None,
        flat_logprobs=True,  # one list of numbers instead of an object and a dictionary per token
        detokenize=bool(sampling.stop),
        structured_outputs=(
            StructuredOutputsParams(**json.loads(sampling.structured_outputs)) if sampling.structured_outputs else None
        ),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # submit copies it; vLLM's deep copy takes 40 us
    )


@contextlib.contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Context that restores the trainer's random state on exit: vLLM seeds and uses the process's global generators."""
    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@contextlib.contextmanager
def _rank_of_role() -> Iterator[None]:
    """Context in which RANK of the environment, which vLLM reads, is the rank in the default process group."""
    launched = os.environ.get("RANK")
    os.environ["RANK"] = str(dist.get_rank())
    try:
        yield
    finally:
        del os.environ["RANK"]
        if launched is not None:
            os.environ["RANK"] = launched


@contextlib.contextmanager
def _private_shared_memory() -> Iterator[None]:
    """Context in which vLLM's CPU build creates shared memory that is private to this run and freed when the run ends.

    Under torchrun, vLLM's files in /dev/shm have the same name in all runs: two concurrent runs would share them, and
    the files of a killed run would block later runs. The files are unlinked once all ranks have mapped them.
    """
    if torch.cuda.is_available():
        yield
        return
    token = torch.tensor(int.from_bytes(os.urandom(6)))
    dist.broadcast(token, src=0, group=host_group())
    name_of = patches.SHARED_MEMORY.original()
    patches.SHARED_MEMORY.install(staticmethod(lambda communicator: f"{name_of(communicator)}-{int(token):x}"))
    try:
        yield
    finally:
        dist.barrier(group=host_group())
        for path in Path("/dev/shm").glob(f"*-{int(token):x}*"):
            path.unlink(missing_ok=True)


def _config_directory(args, hf_config: dict) -> Path:
    """Return a directory that holds ``config.json``, from which vLLM reads the architecture, and the processor of a
    model with images, with the sizes of the flags.

    It is in vLLM's cache, under a hash of its files: with another path vLLM would not find what it compiled in earlier
    runs of this model. Compiled code runs only on the GPU of the number that it was compiled on. vLLM keeps it by the
    rank in the engine's group, which has another GPU in another layout: hence a directory for each number.
    """
    from vllm import envs

    device = f"gpu_{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    cache = Path(envs.VLLM_CACHE_ROOT, "megatron_grpo", device)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            made = Path(temporary, "model")
            made.mkdir()
            if args.vision_config:
                load_processor(args).save_pretrained(made)
            Path(made, "config.json").write_text(json.dumps(hf_config))
            files = sorted(path for path in made.rglob("*") if path.is_file())
            content = [(str(path.relative_to(made)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
            directory = cache / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
            with contextlib.suppress(OSError):  # it exists: of another rank, or of an earlier run
                made.rename(directory)
    except OSError as error:
        raise GrpoError(
            f"vLLM's cache {cache} cannot be written: {error}; set VLLM_CACHE_ROOT to another directory"
        ) from error
    return directory
