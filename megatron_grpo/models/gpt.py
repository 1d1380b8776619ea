"""The policy model: megatron-core's ``GPTModel`` with log-probabilities and entropies as output of the last stage."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_grpo.data.pack import IGNORED_LABEL, SharedPrompts
from megatron_grpo.models.balancing import counting
from megatron_grpo.models.config import trains_mtp, transformer_config_from_args
from megatron_grpo.models.divergence import (
    Head,
    TopK,
    WholeVocabulary,
    vocab_parallel_divergence,
    vocab_parallel_top_k,
)
from megatron_grpo.models.exact.layers import norm_with_addition
from megatron_grpo.models.expert_dispatch import replace_dispatchers
from megatron_grpo.models.gemma4 import PerLayerInputs, Ropes
from megatron_grpo.models.head import float32_logits, vocab_parallel_log_probs
from megatron_grpo.models.layer_graphs import LayerGraphs
from megatron_grpo.models.layer_specs import decoder_spec, mtp_spec
from megatron_grpo.models.rope import frequencies, set_attention_factor
from megatron_grpo.models.shared_prompts import SharedPack, angles_of_tokens
from megatron_grpo.models.softcap import soft_cap
from megatron_grpo.models.two_ropes import TwoRopes
from megatron_grpo.models.weight_gradients import AddingEmbedding
from megatron_grpo.parallel.param_gather import wait_for_weights
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
    distribution: Literal["hidden"] | int | None = None  # of a teacher: return hidden states, or its k likely tokens
    teacher_heads: Sequence[Head] = ()  # of a policy, on the last stage during updates from teachers' hidden states
    gkd_beta: float | None = None

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
        teacher: Mapping[str, np.ndarray] | None = None,
        log_probs_gradient: bool = True,
        **kwargs,
    ):
        """Extend megatron-core's method by ``label_positions`` ``[l]``, ``kept_token_ids`` ``[l, k]`` of the labels,
        ``entropy_gradient`` and ``temperature`` [the model's] (`vocab_parallel_log_probs`), ``rope_positions``
        ``[3, t]`` of all tokens of the pack (`MRope`), its ``images``, ``further_tokens`` ``[n, t]`` and
        ``further_labels`` ``[n, l]`` of `Pack`, and ``teacher``: a teacher's distributions, ``Pack.of_own_labels``.
        ``log_probs_gradient``: False leaves out the gradient of log-probabilities and entropies, next to a teacher's.

        Without ``label_positions`` the head finds them in the labels, and the host waits for the device.
        """
        self._label_positions = label_positions
        self._kept_token_ids, self._images, self._entropy_gradient = kept_token_ids, images, entropy_gradient
        self._further = further_tokens, further_labels
        self._teacher, self._log_probs_gradient = teacher, log_probs_gradient
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

        The rows are log-probabilities, entropies and, in training, the divergences from a teacher, if there is one, and
        the log-probabilities of n multi-token-prediction layers. A teacher returns its `_distributions`. The head skips
        the positions of the prompt, which saves most of its work for long prompts. Without labels and on other stages
        the result is megatron-core's.
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
        hidden = self._at(hidden_states, kept)
        if self.distribution is not None:
            return self._distributions(hidden, weight)
        distils = bool(self._teacher) and torch.is_grad_enabled()
        inputs = hidden, weight
        if distils and not self._log_probs_gradient:
            inputs = hidden.detach(), weight.detach()
        of_labels = labels[0].index_select(0, kept)
        rows = [*self._head(*inputs, of_labels, self._kept_token_ids, self._entropy_gradient)]
        if distils:
            rows.append(self._divergences(hidden, weight))
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

    def _at(self, hidden_states, kept):
        """Return the hidden states ``[l, h]`` at the positions ``kept`` ``[l]``, equal on tensor-parallel ranks."""
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
        return hidden[:, 0].index_select(0, kept)

    def _of_head(self) -> tuple[float, int, dist.ProcessGroup]:
        """Return the arguments that all functions of the head have: temperature, vocabulary and ranks."""
        return self._temperature, self.vocab_size_without_padding, parallel_state.get_tensor_model_parallel_group()

    def _head(self, hidden, weight, labels, kept_token_ids=None, entropy_gradient=False):
        """Return (log_probs [l], entropies [l]) of ``labels`` [l] from hidden states [l, h]."""
        return vocab_parallel_log_probs(
            hidden,
            weight,
            labels,
            *self._of_head(),
            cap=self.final_logit_softcapping,
            kept_token_ids=kept_token_ids,
            entropy_gradient=entropy_gradient,
            accumulate=self.config.gradient_accumulation_fusion,
            exact=self.exact_log_probs,
        )

    def _divergences(self, hidden, weight):
        """Return the divergences [l] of the distributions of hidden states [l, h] from those of the teacher."""
        assert self._teacher is not None
        given = {name: to_device(torch.from_numpy(array), device()) for name, array in self._teacher.items()}
        if "teacher_hidden" not in given:
            return self._divergence(hidden, weight, TopK(given["teacher_token_ids"], given["teacher_token_log_probs"]))
        numbers = self._teacher.get("teacher_numbers", np.zeros(len(hidden), np.int32))
        found, rows = [], [torch.from_numpy(np.flatnonzero(numbers == n)) for n in range(len(self.teacher_heads))]
        for own, head in zip(rows, self.teacher_heads, strict=True):
            at = to_device(own, device())
            columns = head.weight.shape[1] * head.weight.itemsize // 2
            theirs = given["teacher_hidden"].index_select(0, at)[:, :columns].contiguous().view(head.weight.dtype)
            found.append(self._divergence(hidden.index_select(0, at), weight, WholeVocabulary(theirs, head)))
        order = torch.cat(rows).argsort()
        return torch.cat(found).index_select(0, to_device(order, device()))

    def _divergence(self, hidden, weight, teacher: TopK | WholeVocabulary):
        assert self.gkd_beta is not None
        return vocab_parallel_divergence(
            hidden,
            weight,
            teacher,
            self.gkd_beta,
            *self._of_head(),
            cap=self.final_logit_softcapping,
            accumulate=self.config.gradient_accumulation_fusion,
        )

    def _distributions(self, hidden, weight):
        """Return a teacher's distributions, a column of each label: hidden states [h, l], or its k likely tokens.

        Of these there are the k + 1 log-probabilities of `TopK` and the k tokens, float32 [2 k + 1, l].
        """
        if self.distribution is None or self.distribution == "hidden":
            return hidden.T
        top = vocab_parallel_top_k(
            hidden, weight, self.distribution, *self._of_head(), cap=self.final_logit_softcapping
        )
        return torch.cat([top.log_probs, top.token_ids.float()], 1).T  # ids below 2^24 are exact

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
            hidden = self._at(output, kept.index_select(0, known))
            log_probs, _ = self._head(hidden, weight, labels.index_select(0, known))
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
    model.exact_log_probs = args.exact_log_probs
    if args.exact_log_probs:
        norm_with_addition(model.decoder)
    model.vocab_size_without_padding = args.vocab_size
    model.gkd_beta = args.gkd_beta
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
