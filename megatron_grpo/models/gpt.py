"""The policy model: megatron-core's ``GPTModel`` with log-probabilities and entropies as output of the last stage."""

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_grpo.data.pack import IGNORED_LABEL, SharedPrompts
from megatron_grpo.models.balancing import counting
from megatron_grpo.models.config import trains_mtp, transformer_config_from_args
from megatron_grpo.models.expert_dispatch import replace_dispatchers
from megatron_grpo.models.gemma4 import PerLayerInputs, Ropes
from megatron_grpo.models.head import float32_logits, vocab_parallel_log_probs
from megatron_grpo.models.layer_graphs import LayerGraphs
from megatron_grpo.models.layer_specs import decoder_spec, mtp_spec
from megatron_grpo.models.param_gather import wait_for_weights
from megatron_grpo.models.rope import frequencies, set_attention_factor
from megatron_grpo.models.shared_prompts import SharedPack, angles_of_tokens
from megatron_grpo.models.softcap import soft_cap
from megatron_grpo.models.two_ropes import TwoRopes
from megatron_grpo.models.weight_gradients import AddingEmbedding
from megatron_grpo.parallel.sequence_parallel import own_tokens
from megatron_grpo.patches import megatron_core as core
from megatron_grpo.utils.device import device, to_device
from megatron_grpo.vision.tower import MRope, PackImages, VisionTower


class PolicyModel(GPTModel):
    """A GPT that returns the log-probability and the entropy of every labelled token of a pack."""

    temperature = 1.0
    vocab_size_without_padding: int
    embedding_scale: float | None = None
    final_logit_softcapping: float | None = None
    vision: VisionTower | None  # on the first stage of a vision-language model
    per_layer_inputs: PerLayerInputs | None  # on the first stage of a model that has them
    _images: PackImages | None = None

    def forward(
        self,
        *args,
        label_positions: torch.Tensor | None = None,
        kept_token_ids: torch.Tensor | None = None,
        rope_positions: torch.Tensor | None = None,
        images: PackImages | None = None,
        further_tokens: torch.Tensor | None = None,
        further_labels: torch.Tensor | None = None,
        entropy_gradient: bool = True,
        temperature: float | None = None,
        **kwargs,
    ):
        """Extend megatron-core's method by ``label_positions`` ``[l]``, ``kept_token_ids`` ``[l, k]`` of the labels,
        ``entropy_gradient`` and ``temperature`` [the model's] (`vocab_parallel_log_probs`), ``rope_positions``
        ``[3, t]`` of all tokens of the pack (`MRope`), its ``images``, and ``further_tokens`` ``[n, t]`` and
        ``further_labels`` ``[n, l]`` of `Pack`.

        Without ``label_positions`` the head finds them in the labels, and the host waits for the device.
        """
        self._label_positions = label_positions
        self._kept_token_ids, self._images, self._entropy_gradient = kept_token_ids, images, entropy_gradient
        self._further = further_tokens, further_labels
        self._temperature = self.temperature if temperature is None else temperature
        if self.config.mrope_section:
            self.rotary_pos_emb.positions = rope_positions
        return super().forward(*args, **kwargs)

    def _preprocess(self, input_ids, position_ids, *args, padding_mask=None, **kwargs):
        """Extend megatron-core's method by scaled embeddings, by images, and by the padding mask on every stage.

        megatron-core returns this rank's slice of the mask on the first stage only.
        """
        hidden_states, *out = super()._preprocess(input_ids, position_ids, *args, padding_mask=None, **kwargs)
        pack = kwargs.get("packed_seq_params")
        # None: latent attention, or no rotary embedding; positions: M-RoPE.
        of_tokens = out[0] is None or getattr(self.rotary_pos_emb, "positions", None) is not None
        if isinstance(pack, SharedPack) and not of_tokens:
            out[0] = angles_of_tokens(out[0], pack.position_ids)
        if self.embedding_scale is not None and self.pre_process:
            # A tensor in the weights' dtype, because transformers and the engine round the factor to it.
            hidden_states = hidden_states * hidden_states.new_full((), self.embedding_scale)
        if self.vision is not None:
            hidden_states = self.vision(hidden_states, self._images)
        if self.per_layer_inputs is not None:
            hidden_states = self.per_layer_inputs(input_ids, hidden_states)
        if padding_mask is not None:
            padding_mask = own_tokens(self.config, padding_mask[0])[None]
        return hidden_states, *out[:4], padding_mask, *out[5:]

    def _postprocess(self, hidden_states, input_ids, position_ids, labels=None, **kwargs):
        """Return ``[2 + n, l]`` on the last stage for the l positions with a label other than ``IGNORED_LABEL``.

        The rows are log-probabilities, entropies and, in training, the log-probabilities of n multi-token-prediction
        layers. The head skips the positions of the prompt, which saves most of its work for long prompts. Without
        labels and on other stages the result is megatron-core's.
        """
        if not self.post_process or labels is None:
            out = super()._postprocess(
                hidden_states=hidden_states, input_ids=input_ids, position_ids=position_ids, labels=labels, **kwargs
            )
            return soft_cap(out, self.final_logit_softcapping) if self.post_process else out
        wait_for_weights(self.output_layer)
        weight = self._output_weight()
        kept = self._label_positions
        if kept is None:
            kept = (labels[0] != IGNORED_LABEL).nonzero()[:, 0]
        log_probs, entropy = self._head(
            hidden_states, weight, labels[0].index_select(0, kept), kept, self._kept_token_ids, self._entropy_gradient
        )
        rows = [log_probs, entropy]
        if trains_mtp(self.config) and (torch.is_grad_enabled() or counting(self)):
            rows += self._mtp_log_probs(hidden_states, weight.detach(), position_ids, kept, kwargs)
        return torch.stack(rows)

    def _output_weight(self) -> torch.Tensor:
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def hidden_states(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the output ``[t, 1, h]`` of this chunk's layers for unpacked tokens ``[t]``.

        Under sequence parallelism the output is this rank's slice. After the first chunk the layers read the input
        tensor that was set instead of ``tokens``.
        """
        hidden_states, rotary_pos_emb, *_ = self._preprocess(tokens[None], position_ids[None])
        return self.decoder(hidden_states=hidden_states, attention_mask=None, rotary_pos_emb=rotary_pos_emb)

    def next_token_logits(self, hidden_states: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return float32 logits ``[l, vocabulary]`` at the positions ``kept`` ``[l]`` of the last chunk's output.

        All tensor-parallel ranks return the same logits.
        """
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)
        logits = float32_logits(hidden_states[:, 0].index_select(0, kept), self._output_weight())
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        return soft_cap(logits[:, : self.vocab_size_without_padding], self.final_logit_softcapping)

    def _head(self, hidden_states, weight, labels, kept, kept_token_ids=None, entropy_gradient=False):
        """Return (log_probs [l], entropies [l]) of ``labels`` [l] at the positions ``kept`` [l]."""
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
        return vocab_parallel_log_probs(
            hidden[:, 0].index_select(0, kept),
            weight,
            labels,
            self._temperature,
            self.vocab_size_without_padding,
            parallel_state.get_tensor_model_parallel_group(),
            cap=self.final_logit_softcapping,
            kept_token_ids=kept_token_ids,
            entropy_gradient=entropy_gradient,
            accumulate=self.config.gradient_accumulation_fusion,
        )

    def _mtp_log_probs(self, hidden_states, weight, position_ids, kept, inputs) -> list:
        """Return the log-probabilities [l] of each multi-token-prediction layer for the tokens 1, 2, ... further on.

        The values are over the whole vocabulary, and 0 where that token is not in the loss. The gradient stops at these
        layers (`mtp_detach_heads` in models/config.py).
        """
        further_tokens, further_labels = self._further
        assert further_labels is not None, "packs have them where the layers are trained"
        outputs = self.mtp(
            input_ids=further_tokens,
            position_ids=position_ids,
            hidden_states=hidden_states,
            embedding=self.embedding,
            packed_seq_params=inputs["packed_seq_params"],
            **{
                name: inputs[name]
                for name in ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "inference_params")
            },
        ).chunk(1 + self.config.mtp_num_layers)
        rows = []
        for output, labels in zip(outputs[1:], further_labels, strict=True):
            known = (labels != IGNORED_LABEL).nonzero()[:, 0]
            log_probs, _ = self._head(output, weight, labels.index_select(0, known), kept.index_select(0, known))
            rows.append(log_probs.new_zeros(len(labels)).index_copy(0, known, log_probs))
        return rows


def model_provider(args, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> PolicyModel:
    """Build this pipeline stage of the policy that ``args`` describe, randomly initialised."""
    config = transformer_config_from_args(args)
    rope = args.position_embedding_type == "rope" and not config.multi_latent_attention
    if rope:
        inv_freq, factor = frequencies(args, args.rotary_base, args.rope_scaling)
        set_attention_factor(config, factor)
    mtp = mtp_spec(config, args, vp_stage)
    model = PolicyModel(
        config,
        decoder_spec(config, args, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )
    if rope:
        model.rotary_pos_emb.inv_freq = inv_freq
    if mtp is not None and config.mtp_loss_scaling_factor == 0:
        model.mtp.requires_grad_(False)  # not trained: no gradient, no optimizer state, no weight decay
    if config.gradient_accumulation_fusion and pre_process:
        AddingEmbedding.replace(model)
    replace_dispatchers(model)
    if args.gemma4_config:
        model.rotary_pos_emb = Ropes(args)
    elif args.rotary_base_local:
        model.rotary_pos_emb = TwoRopes(model.rotary_pos_emb, args)
    if args.mrope_section:
        model.rotary_pos_emb = MRope(model.rotary_pos_emb, args)
    has_inputs = pre_process and args.gemma4_config and args.gemma4_config["hidden_size_per_layer_input"]
    model.per_layer_inputs = PerLayerInputs(args, config) if has_inputs else None
    model.vision = None
    if args.vision_config and pre_process:
        model.vision = VisionTower(args, config)
        model.vision.enter(model.decoder.layers)
    if args.cuda_graphs:
        core.LAYERS.install_on(model.decoder, LayerGraphs(model))
    model.embedding_scale = args.hidden_size**0.5 if args.scale_embeddings else None
    model.final_logit_softcapping = args.final_logit_softcapping
    model.temperature = args.temperature
    model.vocab_size_without_padding = args.vocab_size
    return model


def packed_seq_params(
    cu_seqlens: torch.Tensor, max_seqlen: int, transformer_impl: str, shared: SharedPrompts | None = None
) -> PackedSeqParams:
    """Build megatron-core's description of a pack from ``cu_seqlens`` (int32 ``[n + 1]``, on the host)."""
    on_device = to_device(cu_seqlens, device())
    # megatron-core's unfused rope reads the padded offsets as numbers in every layer; on the host this needs no sync.
    # Transformer Engine's attention needs them on the device (`host_offsets`).
    for_rope = on_device if transformer_impl == "transformer_engine" else cu_seqlens
    pack = {
        "qkv_format": "thd",
        "cu_seqlens_q": on_device,
        "cu_seqlens_kv": on_device,
        "cu_seqlens_q_padded": for_rope,
        "cu_seqlens_kv_padded": for_rope,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
    }
    if shared is None:
        params = PackedSeqParams(**pack)
        params.on_host = cu_seqlens
        return params
    pack["max_seqlen_kv"] = int(np.diff(shared.cu_keys).max())
    return SharedPack(**pack, shared=shared, position_ids=to_device(torch.from_numpy(shared.position_ids), device()))
