"""Number of parameters on each rank (exact), and memory of training there (estimated).

Parameters are counted from the family's table of parameter mappings and megatron-core's assignment of layers to
pipeline stages, so the counts are those of the built models. No process group is needed.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, prod
from typing import NamedTuple

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_grpo.algorithm.arguments import learns_log_probs
from megatron_grpo.lora.fp8_base import fp8_weights
from megatron_grpo.lora.table import adapter_table
from megatron_grpo.lora.targets import is_router, saved_weights
from megatron_grpo.models import divergence
from megatron_grpo.models.config import (
    attention_layers,
    mlp_layers,
    moe_layers,
    params_dtype,
    recurrent_layers,
    recurrent_sizes,
    recurrent_state_bytes,
    transformer_config_from_args,
)
from megatron_grpo.models.fp8_training import fp8_layers
from megatron_grpo.models.fp8_weight import BLOCK
from megatron_grpo.models.gemma4 import PER_LAYER_INPUTS, key_source, with_layer
from megatron_grpo.models.head import CHUNK, KEPT
from megatron_grpo.models.recurrence import CHUNK as RECURRENT_CHUNK
from megatron_grpo.parallel.arguments import has_packed_attention, query_groups
from megatron_grpo.reference.arguments import has_own_parallel_configuration
from megatron_grpo.reference.model_args import reference_args, teacher_args
from megatron_grpo.rollout.arguments import has_colocated_vllm
from megatron_grpo.rollout.speculation import draft_args, method_of
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.batch_sizes import longest_sequence
from megatron_grpo.utils.core_flags import DTYPES
from megatron_grpo.utils.core_names import NEED_TRANSFORMER_ENGINE
from megatron_grpo.vision.kinds import is_trained, patches_per_token
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Weight

GIB = 2**30
# Share of a GPU for what is allocated while a colocated vLLM wakes, such as buffers of the weight sync and of NCCL: so
# much stays free beside the engine, and twice as much before it wakes.
MARGIN = 0.03
# Keys of the multi-token-prediction layers and of the vision tower; other keys are layer numbers and parameter names.
MTP, TOWER = "mtp", "vision"
EMBEDDING, OUTPUT, FINAL_NORM = "embedding.word_embeddings", "output_layer", "decoder.final_layernorm"


class Chunk(NamedTuple):
    """Model parts of a pipeline stage, or of one of its virtual stages; ``layers`` are counted from 0."""

    layers: range
    embedding: bool
    mtp: bool
    head: bool


class Count(NamedTuple):
    """Numbers of parameters.

    ``dense``: trained in the data-parallel groups. ``experts``: trained in separate expert data-parallel groups (if
    EP > 1 or expert TP is not TP). ``frozen``: not trained.
    """

    dense: int
    experts: int
    frozen: int

    @property
    def total(self) -> int:
        """Return the sum of the three."""
        return sum(self)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    ``parameters``: with `Plan.fp8_copies`. ``host``: in host memory. ``stays``: on the device while the engine
    generates.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    host: float
    stays: float

    @property
    def total(self) -> float:
        """Return the peak on the device during training."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.head


def pipeline(args: Namespace) -> list[list[Chunk]]:
    """Return the model parts as ``[stage][virtual stage]``, with megatron-core's assignment of layers."""
    # Without Transformer Engine megatron-core refuses flags that need it; they do not affect the assignment of layers.
    config = transformer_config_from_args(replaced(args, **dict.fromkeys([*NEED_TRANSFORMER_ENGINE, "fp8_format"])))
    pp, virtual = args.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    layout = config.pipeline_model_parallel_layout

    def chunk(stage: int, place: int) -> Chunk:
        first, last = stage == place == 0, (stage, place) == (pp - 1, virtual - 1)
        if layout is not None:  # megatron-core's functions would need process groups
            earlier = [row[p] for p in range(virtual) for s, row in enumerate(layout.layout) if (p, s) < (place, stage)]
            start = sum(kinds.count(LayerType.decoder) for kinds in earlier)
            mine = layout.layout[stage][place]
            return Chunk(range(start, start + mine.count(LayerType.decoder)), first, LayerType.mtp in mine, last)
        vp_stage = place if virtual > 1 else None
        start = get_transformer_layer_offset(config, vp_stage, stage)
        count = get_num_layers_to_build(config, vp_stage, stage)
        return Chunk(range(start, start + count), first, last and bool(args.mtp_num_layers), last)

    return [[chunk(stage, place) for place in range(virtual)] for stage in range(pp)]


class Plan:
    """Parameters and memory of the ranks of each pipeline stage, for validated arguments; equal within a stage."""

    def __init__(self, args: Namespace):
        self.args = args
        self.weights = _by_place(model_weights.table(args))
        # With adapters nothing else is trained, except these.
        self.adapters = _by_place(adapter_table(args)) if args.lora_rank else {}
        self.saved = {weight.name for weight in saved_weights(args)} if args.lora_rank else set()
        self.in_8_bits = fp8_weights(args)
        self.in_fp8 = fp8_layers(args)

    @cached_property
    def stages(self) -> list[list[Chunk]]:
        """See `pipeline`."""
        return pipeline(self.args)

    def parameters(self, stage: int) -> Count:
        """Return the parameters on one rank of a pipeline stage."""
        places = [place for chunk in self.stages[stage] for place in self._weight_keys(chunk)]
        etp, ep = self.args.expert_tensor_parallel_size, self.args.expert_model_parallel_size
        return self._count(places, self.args.tensor_model_parallel_size, etp, ep)

    def whole_model(self) -> int:
        """Return the parameters of the model, each counted once, without multi-token prediction and padding."""
        weights = [weight for place, row in self.weights.items() if place != MTP for weight in row]
        return sum(self._copies(weight) * prod(shape) for weight in weights for shape in weight.part_shapes)

    def engine(self, width: int | None = None) -> int:
        """Return the parameters on one of ``width`` ranks of the engine [--vllm-tensor-parallel-size], with `drafts`.

        The engine shards experts by tensor parallelism, too.
        """
        width = width or self.args.vllm_tensor_parallel_size
        places = [place for place in self.weights if place != MTP]
        return self._count(places, width, width, 1, with_adapters=False).total + self.drafts(width)

    def drafts(self, width: int | None = None) -> int:
        """Return the parameters of the model or the layers that draft, on one of ``width`` ranks of the engine."""
        width = width or self.args.vllm_tensor_parallel_size
        if method_of(self.args) == "mtp":
            return self._count([MTP], width, width, 1).total
        own = draft_args(self.args)
        return 0 if own is None else Plan(own).engine(width)

    def drafts_share_of_cache(self) -> float:
        """Return the share of the engine's key-value cache that the drafts' layers take."""
        args, own = self.args, draft_args(self.args)
        of_last = [args.num_layers - 1] * (args.mtp_num_layers or 0)
        drafts = _cache_per_token(args, of_last) if method_of(args) == "mtp" else 0
        if own is not None:
            drafts = _cache_per_token(own, range(own.num_layers))
        return drafts / (self.cache_of_token() + drafts)

    def cache_of_token(self) -> int:
        """Return the elements of a token in the key-value cache of one rank of a vLLM engine, without `drafts`."""
        return _cache_per_token(self.args, [n for n, attention in enumerate(attention_layers(self.args)) if attention])

    def cache(self, stage: int) -> int:
        """Return the bytes of the key-value cache on a rank of a pipeline stage (--rollout-engine megatron)."""
        args, tp = self.args, self.args.tensor_model_parallel_size
        layers = {key_source(args, layer): layer for chunk in self.stages[stage] for layer in chunk.layers}.values()

        def per_token(args: Namespace) -> int:
            if args.multi_latent_attention:
                channels = max(args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim)
                return args.num_attention_heads // tp * channels
            return max(query_groups(args) // tp, 1) * args.kv_channels

        tokens = args.inference_max_requests * longest_sequence(args)
        attention = [layer for layer in layers if attention_layers(args)[layer]]
        recurrent = sum(recurrent_layers(args)[layer] for layer in layers)
        elements = sum(per_token(with_layer(args, layer)) for layer in attention)
        of_attention = 2 * elements * tokens * params_dtype(args).itemsize
        return of_attention + recurrent * args.inference_max_requests * recurrent_state_bytes(args) // tp

    def memory(self, stage: int) -> Memory:
        """Return the bytes on a rank of a pipeline stage, without the engine's."""
        args, size = self.args, params_dtype(self.args).itemsize
        count = self.parameters(stage)
        trained = count.dense + count.experts
        half = size == 2
        in_8_bits, dequantized = self._in_8_bits(stage)
        weights = count.total * size - in_8_bits * (size - 1 - 4 / BLOCK**2)
        gradients = trained * (2 if half and not args.accumulate_allreduce_grads_in_fp32 else 4)
        share = self._optimizer_share(count)
        on_device, on_host = _optimizer_bytes(args, half)
        leaves = weights * args.offload_model + gradients * args.offload_gradients
        leaves += share * on_device * args.offload_optimizer
        activations = (self._activations(stage) + dequantized) * size
        return Memory(
            weights + self.fp8_copies(stage),
            gradients,
            share * on_device,
            activations,
            self._head() if self.stages[stage][-1].head else 0,
            share * on_host + self.references + weights * self._swaps + leaves - gradients * args.offload_gradients,
            weights + gradients + share * on_device - leaves + activations * args.cuda_graphs,
        )

    @cached_property
    def memories(self) -> list[Memory]:
        """`memory` of every pipeline stage."""
        return [self.memory(stage) for stage in range(len(self.stages))]

    def peak(self) -> float:
        """Return the bytes on a rank of the stage that needs most, without the engine's."""
        return max(max(memory.total, memory.stays) for memory in self.memories)

    @cached_property
    def references(self) -> float:
        """Return the bytes of reference model and teacher in the host memory of a rank, at most."""
        args, found = self.args, 0.0
        if args.with_reference and not args.lora_rank:
            found += Plan(reference_args(args)).largest_stage() * (4 if args.sync_ref_model else self._itemsize)
        teachers = teacher_args(args)
        if args.gkd_beta is not None and args.gkd_logits_topk is None:  # their output layers
            rows = args.padded_vocab_size // args.tensor_model_parallel_size
            found += sum(rows * own.hidden_size * self._itemsize for own in teachers)
        return found + sum(Plan(own).largest_stage() * self._itemsize for own in teachers)

    @property
    def _swaps(self) -> bool:
        """Whether the policy's weights are copied to the host while a reference is in their place."""
        return self.args.with_reference and not self.args.lora_rank and not has_own_parallel_configuration(self.args)

    @property
    def _itemsize(self) -> int:
        return params_dtype(self.args).itemsize

    def largest_stage(self) -> int:
        """Return the parameters on one rank of the pipeline stage that has most."""
        return max(self.parameters(stage).total for stage in range(len(self.stages)))

    def fp8_copies(self, stage: int) -> int:
        """Return the bytes that Transformer Engine's 8-bit copies of weights take between micro-batches (--fp8-format).

        They are a copy of each weight and one of its transpose, freed while the engine generates.
        """
        if self.args.disable_parameter_transpose_cache:  # each micro-batch makes its own: `_activations`
            return 0
        return sum(2 * self._quantized(layer) for chunk in self.stages[stage] for layer in self._layers(chunk))

    def staged(self, stage: int, ranks: int) -> float:
        """Return the bytes of a checkpoint that ``ranks`` ranks of a stage write, at most.

        One of the ranks with the same weights writes them. A distributed optimizer's state is 12 bytes a parameter:
        float32 weights and moments, whatever the dtypes on the device.
        """
        args, count, size = self.args, self.parameters(stage), params_dtype(self.args).itemsize
        stages = args.pipeline_model_parallel_size
        dense_ranks = min(ranks, stages * args.tensor_model_parallel_size)
        experts_ranks = min(ranks, stages * args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1))
        trained = count.dense * dense_ranks + count.experts * experts_ranks
        stored = trained + (0 if args.lora_rank else count.frozen * max(dense_ranks, experts_ranks))
        if args.use_distributed_optimizer:
            state = 12 * self._optimizer_share(count) * ranks
        else:
            state = trained * ((4 if size == 2 else 0) + (4 if args.optimizer == "sgd" else 8))
        return stored * (size + 4 * args.sync_ref_model) + state

    def _optimizer_share(self, count: Count) -> float:
        """Return the parameters of which a rank holds the optimizer's state."""
        args = self.args
        if not args.use_distributed_optimizer:
            return count.dense + count.experts
        share = count.dense / (args.data_parallel_size * args.context_parallel_size)
        if count.experts:  # sharded over the ranks of the stage that hold the same experts
            stage_ranks = args.world_size // args.pipeline_model_parallel_size
            share += count.experts * args.expert_model_parallel_size * args.expert_tensor_parallel_size / stage_ranks
        return share

    def in_flight(self, stage: int) -> float:
        """Return the largest number of micro-batches with stored activations on a stage.

        1F1B schedule (no virtual stages): PP - s for stage s. Interleaved schedule with V virtual stages and groups of
        G micro-batches: 2 (PP - s - 1) + (V - 1) G + 1 chunks before the first backward pass ends (megatron-core's
        get_pp_rank_microbatches); a chunk is 1 / V of the stage.
        """
        args, pp, virtual = self.args, self.args.pipeline_model_parallel_size, len(self.stages[stage])
        at_most: float = pp - stage
        if virtual > 1:
            group = args.microbatch_group_size_per_virtual_pipeline_stage or pp
            at_most = (2 * (pp - stage - 1) + (virtual - 1) * group + 1) / virtual
        if args.max_tokens_per_microbatch:
            return at_most
        return min(at_most, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))

    def tokens(self) -> int:
        """Return the tokens of the longest micro-batch, summed over context-parallel ranks."""
        args = self.args
        if args.max_tokens_per_microbatch:
            return args.max_tokens_per_microbatch * (args.context_parallel_size if args.hybrid_context_parallel else 1)
        return args.micro_batch_size * longest_sequence(args)

    def _weight_keys(self, chunk: Chunk) -> Iterator[int | str]:
        """Yield the keys in ``weights`` of a chunk's parameters."""
        if chunk.embedding or chunk.mtp:
            yield EMBEDDING
        if chunk.embedding and self.args.vision_config:
            yield TOWER
        if chunk.embedding and PER_LAYER_INPUTS in self.weights:
            yield PER_LAYER_INPUTS
        yield from chunk.layers
        if chunk.mtp:
            yield MTP
        if chunk.head:
            yield FINAL_NORM
            if self.args.untie_embeddings_and_output_weights:
                yield OUTPUT
            elif not chunk.embedding:  # the tied copy for the output layer, besides the one for multi-token prediction
                yield EMBEDDING

    def _count(self, places: list[int | str], tp: int, etp: int | None, ep: int, with_adapters: bool = True) -> Count:
        dense = experts = frozen = 0
        for place in places:
            adapters = self.adapters.get(place, []) if with_adapters else []
            for weight, of_adapter in [(w, False) for w in self.weights[place]] + [(w, True) for w in adapters]:
                number = self._copies(weight) * prod(weight.shard_shape(tp if weight.expert is None else etp or tp))
                if not of_adapter and not self._is_trained(weight, place):
                    frozen += number // (1 if weight.expert is None else ep)
                elif weight.expert is None or (ep == 1 and etp == tp):
                    dense += number
                else:
                    experts += number // ep
        return Count(dense, experts, frozen)

    def _in_8_bits(self, stage: int) -> tuple[int, int]:
        """Return the parameters of a stage that are stored in 8 bits, and those of its largest matrix.

        The matrix is dequantized for its products; it is that of all experts of a rank with --moe-grouped-gemm.
        """
        args, total, largest = self.args, 0, 0
        for chunk in self.stages[stage]:
            for weight in (weight for layer in chunk.layers for weight in self.weights[layer]):
                if weight.name not in self.in_8_bits:
                    continue
                one, all_of_rank = self._on_rank(weight)
                total += all_of_rank
                largest = max(largest, all_of_rank if args.moe_grouped_gemm else one)
        return total, largest

    def _on_rank(self, weight: Weight) -> tuple[int, int]:
        """Return the elements of a weight on a rank; for an expert's, also those of all experts there."""
        args, experts = self.args, weight.expert is not None
        one = prod(weight.shard_shape(args.expert_tensor_parallel_size if experts else args.tensor_model_parallel_size))
        return one, one * self._copies(weight) // (args.expert_model_parallel_size if experts else 1)

    def _quantized(self, layer: int | str) -> int:
        """Return the parameters of a layer's linear layers on a rank, if they compute in FP8."""
        if not self._in_fp8(layer):
            return 0
        matrices = [w for w in self.weights[layer] if w.name.endswith(".weight") and len(w.part_shapes[0]) == 2]
        number = sum(self._on_rank(weight)[1] for weight in matrices if not is_router(weight))
        return number // (self.args.mtp_num_layers if layer == MTP else 1)

    def _in_fp8(self, layer: int | str) -> bool:
        return self.in_fp8[layer] if isinstance(layer, int) else bool(self.args.fp8_format)  # else: MTP

    def _layers(self, chunk: Chunk) -> list[int | str]:
        """Return the layers of a chunk that run in an update; ``MTP`` for each prediction layer."""
        args = self.args
        return [*chunk.layers, *[MTP] * (args.mtp_num_layers if chunk.mtp and args.mtp_loss_scaling_factor else 0)]

    def _is_trained(self, weight: Weight, place: int | str) -> bool:
        if self.args.lora_rank:
            return weight.name in self.saved
        if place == TOWER:
            return is_trained(self.args, weight.name.removeprefix("vision.tower."))
        return place != MTP or bool(self.args.mtp_loss_scaling_factor)

    def _copies(self, weight: Weight) -> int:
        return 1 if weight.expert is None else self.args.num_experts

    def _activations(self, stage: int) -> float:
        """Return the elements that the layers of a stage store for the backward pass, at the longest micro-batch.

        Includes the recomputed activations of the layers that are in the backward pass.
        """
        args, of_layers = self.args, _kinds(self.args)
        tokens = self.tokens() / args.context_parallel_size
        every = max(args.recompute_num_layers or 1, 1)
        kept: float = 0
        at_once: float = 0
        for chunk in self.stages[stage]:
            layers = self._layers(chunk)
            numbers = [layer if isinstance(layer, int) else -1 for layer in layers]
            kinds = [
                (with_layer(args, number), of_layers[number], self._saved_share(layer))
                for number, layer in zip(numbers, layers, strict=True)
            ]
            if any(of_layers[number].recurrent for number in numbers):
                at_once = max(at_once, tokens * _chunks(args))
            whole = [tokens * _layer(*kind) for kind in kinds]
            if args.disable_parameter_transpose_cache:  # the backward pass needs both 8-bit copies, 2 bytes
                whole = [size + self._quantized(layer) for size, layer in zip(whole, layers, strict=True)]
            if args.recompute_granularity == "full":
                inputs = tokens * args.hidden_size / _sequence_split(args)
                if args.recompute_method == "block":
                    kept += inputs * min(every, len(whole)) + sum(whole[every:])
                    at_once = max(at_once, *whole[:every], 0)
                else:
                    kept += inputs * ceil(len(whole) / every)
                    at_once = max(at_once, *(sum(whole[i : i + every]) for i in range(0, len(whole), every)), 0)
            else:
                dropped = [tokens * _recomputed(*kind) for kind in kinds]
                kept += sum(whole) - sum(dropped)
                at_once = max(at_once, *dropped, 0)
        first = self.stages[stage][0].embedding
        tower = self._tower_activations() if first and args.vision_config else 0
        if first and args.gemma4_config:  # projected and normed, then added to the tokens' embeddings
            size = args.num_layers * args.gemma4_config["hidden_size_per_layer_input"]
            kept += 2 * tokens * size / _sequence_split(args)
        return self.in_flight(stage) * kept + at_once + tower

    def _saved_share(self, layer: int | str) -> float:
        """Return the memory of a linear layer's saved input as a share of that in the model's dtype.

        In FP8 the layer saves a transposed copy of 1 byte a value, with a float32 scale for each 128 values
        (blockwise). An adapter saves the input in bf16, and the frozen layer beside it saves none.
        """
        if not self._in_fp8(layer) or self.args.lora_rank:
            return 1
        return (1 + (4 / BLOCK if self.args.fp8_recipe == "blockwise" else 0)) / 2

    def _tower_activations(self) -> float:
        """Return the elements that the vision tower stores, if all tokens of the longest micro-batch are of images.

        A block stores, of each patch, ten times its width (inputs of norms and products, queries, keys, values) and
        three times that of its MLP; recomputed blocks store their input.
        """
        args, vision = self.args, self.args.vision_config["vision_config"]
        if not any(self._is_trained(weight, TOWER) for weight in self.weights[TOWER]):
            return 0
        width, patches = vision["hidden_size"], self.tokens() * patches_per_token(args)
        block = 10 * width + 3 * vision["intermediate_size"]
        depth = vision["depth"] if "depth" in vision else vision["num_hidden_layers"]
        kept = width * depth + block if args.recompute_granularity == "full" else block * depth
        return patches * kept

    def _head(self) -> float:
        """Return the bytes of models/head.py at its peak, in the forward or the backward pass.

        Forward: the logits of a chunk in float32, their gradient, and those that are kept of earlier chunks. Backward:
        the kept ones, and logits and gradient of a chunk that is made again; the gradient of the output weight, if it
        is trained, in its own dtype, and in float32 unless --gradient-accumulation-fusion adds it to the buffer. In
        both three copies of the hidden states: gathered, selected, gradient.
        """
        args, size = self.args, params_dtype(self.args).itemsize
        if args.gkd_beta is not None:
            return self._divergence()
        rows, tokens, trained = self._output_layer()
        early = not args.entropy_coef
        kept = min(KEPT * CHUNK, tokens) * rows * size * (trained and early)
        again = not early or (trained and tokens > KEPT * CHUNK)
        chunk = min(CHUNK, tokens) * rows
        forward = chunk * (4 + size * early) + max(kept - chunk * size, 0)
        gradient = size if args.gradient_accumulation_fusion else 4 + size
        backward = kept + chunk * (4 + size) * again + rows * args.hidden_size * gradient * trained
        return max(forward, backward) + 3 * tokens * args.hidden_size * size

    def _output_layer(self) -> tuple[int, float, bool]:
        """Return a rank's rows of the output layer, the tokens of a micro-batch on it, and whether the layer trains."""
        args = self.args
        output = EMBEDDING if not args.untie_embeddings_and_output_weights else OUTPUT
        rows = args.padded_vocab_size // args.tensor_model_parallel_size
        return rows, self.tokens() / args.context_parallel_size, not args.lora_rank or f"{output}.weight" in self.saved

    def _divergence(self) -> float:
        """Return the bytes of models/divergence.py at its peak, as `_head`; the head has no gradient next to it.

        Of a chunk there are the logits of both models in float32, and their gradient; with the teacher's k tokens those
        of the policy, and two tensors of their size. From the teacher come its output layer and two copies of its
        hidden states (received, selected), or k tokens. Copies of the policy's hidden states: gathered, selected, of
        this teacher, gradient, in the backward pass its product. A loss with log-probabilities, entropies or a KL term
        adds what the head keeps.
        """
        args, size = self.args, params_dtype(self.args).itemsize
        rows, tokens, trained = self._output_layer()
        longest = divergence.KEPT * divergence.CHUNK
        kept = min(longest, tokens) * rows * size * trained
        chunk = min(divergence.CHUNK, tokens) * rows
        at_once = chunk * (8 + size if args.gkd_logits_topk is None else 12)
        gradient = size if args.gradient_accumulation_fusion or size == 4 else 4 + size
        copy = tokens * args.hidden_size * size
        forward = at_once + max(kept - chunk * size * trained, 0) + 4 * copy
        backward = kept + at_once * (trained and tokens > longest) + rows * args.hidden_size * gradient * trained
        backward += 5 * copy
        of_teacher = tokens * 8 * (args.gkd_logits_topk or 0)
        if args.gkd_logits_topk is None:
            widths = [own.hidden_size for own in teacher_args(args)]
            of_teacher = (rows * sum(widths) + 2 * tokens * max(widths)) * size
        also = min(KEPT * CHUNK, tokens) * rows * size * trained * learns_log_probs(args)
        return max(forward, backward) + of_teacher + also


def gpu_bytes(plan: Plan) -> float:
    """Return the memory that a GPU must have: the trainer's at the peak of training, and an engine's beside it.

    An engine that sleeps has its share only while it generates, beside what the trainer leaves on the GPU; infinite if
    it takes the whole GPU. With --rollout-ranks it is the larger one of a trainer and of an engine's weights. Not
    counted: communication buffers, libraries, fragmentation.
    """
    args, most = plan.args, plan.peak()
    stays = [memory.stays for memory in plan.memories]
    if args.rollout_engine == "megatron":
        return max(most, *(kept + plan.cache(stage) for stage, kept in enumerate(stays)))
    if not has_colocated_vllm(args):
        return most
    share, engine = args.vllm_gpu_memory_utilization, plan.engine() * params_dtype(args).itemsize
    if args.rollout_ranks:
        return max(most, engine / share)
    beside = max(stays) if args.sleep_level else most
    return max(most, beside / (1 - share) if share < 1 else inf, engine / share)


def _cache_per_token(args: Namespace, layers: Sequence[int]) -> int:
    """Return the elements of a token in the cache of one rank of the engine, for these layers."""
    if args.multi_latent_attention:  # every rank has the latents of all heads
        return len(layers) * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
    sizes = [with_layer(args, layer) for layer in {key_source(args, layer) for layer in layers}]
    return sum(2 * max(query_groups(one) // args.vllm_tensor_parallel_size, 1) * one.kv_channels for one in sizes)


def _by_place(weights: Sequence[Weight]) -> dict[int | str, list[Weight]]:
    """Return weights, the model's or its adapters', by layer number, module name (`MTP` ...), or their own name.

    Only the first expert of each layer is listed, and no buffer. Duplicates in the files are one parameter.
    """
    found: dict[int | str, list[Weight]] = {}
    seen = set()
    for weight in weights:
        if weight.expert or weight.name in seen or weight.name.endswith(model_weights.BUFFERS):
            continue
        seen.add(weight.name)
        first, *rest = weight.name.split(".")
        is_layer = first == "decoder" and rest[0] == "layers"
        place: int | str = int(rest[1]) if is_layer else first
        if first not in (MTP, TOWER, PER_LAYER_INPUTS) and not is_layer:
            place = weight.name.removesuffix(".weight")
        found.setdefault(place, []).append(weight)
    return found


def engine_share(args: Namespace) -> float | None:
    """Return the share of a GPU that an engine takes when it wakes; None if it never sleeps, or if only it knows."""
    own_size = "kv_cache_memory_bytes" in (args.vllm_engine_kwargs or {})
    sleeps = has_colocated_vllm(args) and args.sleep_level
    return args.vllm_gpu_memory_utilization if sleeps and not own_size else None


def _optimizer_bytes(args: Namespace, half: bool) -> tuple[float, float]:
    """Return the optimizer's bytes per parameter, (on the device, on the host).

    A float32 copy if the model has another dtype, and Adam's two moments or SGD's one; on the host the gradient, too.
    """
    main = 4.0 if half else 0.0
    if args.optimizer == "sgd":
        return main + 4, 0
    aware, share = args.use_precision_aware_optimizer, args.optimizer_offload_fraction
    if args.optimizer_cpu_offload:  # without use_precision_aware_optimizer the copy on the device stays
        return (1 - share) * (main + 8) + share * main * (not aware), share * 16
    if not aware:
        return main + 8, 0
    if half:
        main = DTYPES[args.main_params_dtype].itemsize
        if args.bf16 and main == 4 and args.store_param_remainders:
            main = 2  # the parameter itself holds the other 16 bits
    # Transformer Engine's tensors in FP8 hold their transpose, too.
    moments = [max(DTYPES[dtype].itemsize, 2) for dtype in (args.exp_avg_dtype, args.exp_avg_sq_dtype)]
    return main + sum(moments), 0


def _sequence_split(args: Namespace) -> int:
    """Return the number of ranks that shard the activations between tensor-parallel layers (sequence parallelism)."""
    return args.tensor_model_parallel_size if args.sequence_parallel else 1


def _attention(args: Namespace, share: float) -> tuple[float, float]:
    """Return the elements that attention stores per token, (projections and kernel inputs, output).

    Queries, keys and values are stored as projected and as kernel inputs; gathered keys and values are those of all
    context-parallel ranks. Latent attention also stores the latents before and after their norms, and pads values to
    the size of keys. In FP8 the output is stored in bf16 only (megatron-core's set_save_original_input).
    """
    tp, gathered = args.tensor_model_parallel_size, _gathered_keys(args)
    heads = args.num_attention_heads
    if not args.multi_latent_attention:
        queries, keys = heads * args.kv_channels, query_groups(args) * args.kv_channels
        return (2 * queries + (2 + 2 * gathered) * keys) / tp, queries / tp
    size = args.qk_head_dim + args.qk_pos_emb_head_dim
    latents = (1 + share) * ((args.q_lora_rank or 0) + args.kv_lora_rank) + args.qk_pos_emb_head_dim
    projected = heads * (2 * size + args.qk_head_dim + args.v_head_dim + 2 * gathered * size)
    return projected / tp, heads * (size + args.v_head_dim) / tp + latents / _sequence_split(args)


class _Kind(NamedTuple):
    """What a decoder layer has."""

    attention: bool
    recurrent: bool
    mlp: bool
    sparse: bool  # the MLP is experts


def _kinds(args: Namespace) -> list[_Kind]:
    """Return the kind of each decoder layer."""
    sparse = moe_layers(args) if args.num_experts else [False] * args.num_layers
    both = zip(attention_layers(args), recurrent_layers(args), mlp_layers(args), sparse, strict=True)
    return [_Kind(*kind) for kind in both]


def _recurrence(args: Namespace) -> float:
    """Return the elements that a recurrent layer stores per token: its projection, and its output twice.

    The scalars of each head are float32; under context parallelism the projection is also stored by heads.
    """
    sizes = recurrent_sizes(args)
    scalars, out = sizes.scalars * sizes.heads, sizes.heads * sizes.value
    exact = 4 / params_dtype(args).itemsize
    copies = 2 if args.context_parallel_size > 1 else 1
    return (copies * (sizes.mixed + scalars) + 3 * out + exact * scalars) / args.tensor_model_parallel_size


def _chunks(args: Namespace) -> float:
    """Return the elements per token that the backward pass of a recurrent layer holds while it computes chunks again.

    In float32: convolution and norm of queries, keys and values, their copies in chunks, the products of a chunk's
    tokens, and the state that enters each chunk. Mamba-2 has no norm and no correction of values.
    """
    size, sizes = RECURRENT_CHUNK, recurrent_sizes(args)
    v, by_head = sizes.heads * sizes.value, sizes.heads * sizes.key
    copies, of_values, of_keys, of_pairs, of_groups = (2, 4, 2, 3, 1) if args.hybrid_layer_pattern else (3, 5, 4, 4, 2)
    products = (of_pairs * sizes.heads + of_groups * sizes.groups) * size
    elements = copies * sizes.mixed + of_values * v + of_keys * by_head + products + by_head * sizes.value / size
    return 4 / params_dtype(args).itemsize * elements / args.tensor_model_parallel_size


def _core_attention(args: Namespace) -> float:
    """Return the elements per token that recomputed attention does not store.

    Keys and values are stored before they are gathered over context-parallel ranks and padded to one size; values of
    latent attention stay a part of the projection, and only the values' channels of a padded output are stored. The
    kernels store no scores in any case.
    """
    tp, gathered = args.tensor_model_parallel_size, _gathered_keys(args)
    if not args.multi_latent_attention:
        stored = 2 if args.transformer_impl == "local" else 1  # values are a part of Transformer Engine's projection
        copies = 2 * gathered - stored if has_packed_attention(args) else 0
        return copies * query_groups(args) * args.kv_channels / tp
    size, heads = args.qk_head_dim + args.qk_pos_emb_head_dim, args.num_attention_heads
    return heads * ((2 * gathered - 1) * size - args.v_head_dim + size) / tp


def _gathered_keys(args: Namespace) -> int:
    """Return the number of ranks whose keys and values are stored on each context-parallel rank."""
    return args.context_parallel_size if has_packed_attention(args) else 1


def _dense_mlp(args: Namespace, share: float) -> float:
    """Return the elements that an MLP stores per token: gate, up and product, or ReLU and its square."""
    return ((1 if args.squared_relu else 2) + share) * args.ffn_hidden_size / args.tensor_model_parallel_size


def _experts(args: Namespace, share: float) -> tuple[float, float]:
    """Return the elements that experts store per token, (inputs and projections, outputs of the activation function).

    Assumes that the router spreads tokens evenly.
    """
    split, etp = _sequence_split(args), args.expert_tensor_parallel_size
    topk, ffn = args.moe_router_topk, args.moe_ffn_hidden_size
    return topk * (share * etp * args.hidden_size + 2 * ffn) / split, topk * share * ffn / split


def _shared_experts(args: Namespace, share: float) -> float:
    return (
        ((1 if args.squared_relu else 2) + share)
        * (args.moe_shared_expert_intermediate_size or 0)
        / args.tensor_model_parallel_size
    )


def _norm_outputs(args: Namespace, kind: _Kind, share: float) -> float:
    """Return the elements of the norms' outputs that a layer stores per token.

    Down projections of latent attention save a copy each in FP8. The router saves its input in the model's dtype; the
    shared experts use the same tensor.
    """
    attention = 2 * share if args.multi_latent_attention and share < 1 else share
    before = attention if kind.attention or kind.recurrent else 0
    mlp = (1 if kind.sparse else share) if kind.mlp else 0
    return (before + mlp) * args.hidden_size / _sequence_split(args)


def _layer(args: Namespace, kind: _Kind, share: float) -> float:
    """Return the elements that a layer stores per token; ``share``: `Plan._saved_share`.

    Inputs and outputs of its norms (two, or one in a layer of one branch); with --sandwich-norm, inputs of two more;
    attention or the recurrence; the MLP.
    """
    norms = ((kind.attention or kind.recurrent) + kind.mlp) * (2 if args.sandwich_norm else 1)
    found = norms * args.hidden_size / _sequence_split(args) + _norm_outputs(args, kind, share)
    if args.gemma4_config:  # inputs of two more norms; gate, its activation, product
        size = args.gemma4_config["hidden_size_per_layer_input"]
        found += (2 * args.hidden_size * (size > 0) + 3 * size) / _sequence_split(args)
        if kind.sparse:  # the MLP beside the experts, and five norms
            found += _dense_mlp(args, share) + 5 * args.hidden_size / _sequence_split(args)
    if kind.sparse:
        found += sum(_experts(args, share)) + _shared_experts(args, share)
    elif kind.mlp:
        found += _dense_mlp(args, share)
    if kind.recurrent:
        found += _recurrence(args)
    elif kind.attention:
        found += sum(_attention(args, share)) + _output_gate(args)
    return found


def _output_gate(args: Namespace) -> float:
    """Return the elements that the output gate of attention stores per token: gate, output before, and sigmoid."""
    if not args.attention_output_gate:
        return 0
    exact = 4 / params_dtype(args).itemsize
    return (2 + exact) * args.num_attention_heads * args.kv_channels / args.tensor_model_parallel_size


def _recomputed(args: Namespace, kind: _Kind, share: float) -> float:
    """Return the elements of `_layer` that selective recomputation does not store (flash attention stores none)."""
    if args.recompute_granularity != "selective":
        return 0
    core_attention = _core_attention(args) if kind.attention else 0
    parts = {"layernorm": _norm_outputs(args, kind, share), "core_attn": core_attention}
    if args.multi_latent_attention:
        parts["mla_up_proj"] = _attention(args, share)[0]
    if not kind.sparse:
        parts["mlp"] = _dense_mlp(args, share) if kind.mlp else 0
    elif "moe" in (args.recompute_modules or ()):
        parts["moe"] = sum(_experts(args, share)) + _shared_experts(args, share)
    else:
        parts |= {"moe_act": _experts(args, share)[1], "shared_experts": _shared_experts(args, share)}
    return sum(number for name, number in parts.items() if name in (args.recompute_modules or ("core_attn",)))
