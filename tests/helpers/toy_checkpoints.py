"""Toy Hugging Face checkpoints made by transformers, and their Megatron models."""

import json
from pathlib import Path
from types import SimpleNamespace

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from megatron_grpo.models.forward import build_model
from megatron_grpo.models.gpt import model_provider, packed_seq_params
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import families, hf, model_weights
from megatron_grpo.weights.families.mla import set_latent_epsilon
from megatron_grpo.weights.stream import stream_hf

DENSE = ("qwen3", "qwen2", "llama", "mistral", "phi3", "glm")
MOE = ("qwen3_moe", "mixtral", "minimax_m2", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "gpt_oss")
MOE += ("gemma4_moe",)
MODEL_TYPES = {"gemma4_moe": "gemma4_text"}  # toys that are another member of a family -> the family's name
SANDWICHED = ("gemma2", "gemma3_text", "gemma4_text", "glm4")
GEMMA4 = ("gemma4_text", "gemma4_moe")
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MAMBA = ("nemotron_h",)
MAMBA_MOE = "nemotron_h_moe"  # the same family with experts, which vLLM does not compute on a CPU
FAMILIES = DENSE + MOE + SANDWICHED + HYBRID + MAMBA
# (family, tied embeddings)
_OTHERS = (
    ("gpt_oss", True),
    ("minimax_m2", True),
    ("gemma2", False),
    ("nemotron_h", True),
)  # variants that these families do not have
MEMBERS = [member for family in FAMILIES for tied in (False, True) if (member := (family, tied)) not in _OTHERS]
VOCAB, PADDED_VOCAB = 109, 112
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
# Small values, so that windows and caps affect sequences of 40 tokens.
_GEMMA = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}
# Key heads of another size than value heads, two value heads for each; a full layer between linear ones.
_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_key_value_heads": 8,
    "global_head_dim": 32,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "final_logit_softcapping": 3.0,
    "rope_parameters": _ROPES,
}
# vLLM's kernel for delta nets on a CPU has these heads, in bfloat16.
DELTA = {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_SHARED = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
# Heads of another size than a state, four for each group.
_MAMBA = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "ssm_state_size": 12,
    "mamba_num_heads": 16,
    "mamba_head_dim": 8,
    "n_groups": 4,
}
# Not the default of a family, so that a norm that ignores config.json's is detected; gpt-oss has one epsilon only.
EPSILON = 1e-3
SHAPES = {
    "qwen3_next": {**_HYBRID, **_SHARED},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": {**_HYBRID, **_SHARED},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {
        **_GEMMA,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    # All parts of the published models, of which each has some: the last two layers share keys, and the full layer
    # before them has keys for values.
    "gemma4_text": {
        **_GEMMA4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_moe": {
        **_GEMMA4,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
    "glm4": {"num_hidden_layers": 4, "head_dim": 16},
    "glm": {"head_dim": 16, "attention_bias": False},
    "qwen3": {"head_dim": 16},  # 8 heads of 16: more than hidden_size, as in Qwen3 0.6B
    "llama": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "mistral": {"sliding_window": 13, "head_dim": 16},
    "phi3": {
        "hidden_size": 128,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 5.0],
            "long_factor": [9.0] * 6,
        },
        "sliding_window": 17,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "glm4_moe": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.5,
        "num_mtp_layers": 0,
    },
    "minimax_m2": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        # Keys of the published config.json that transformers does not know; vLLM reads the first two.
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "attn_type_list": [1, 1, 1, 1],
    },
    "glm4_moe_lite": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": 1,  # this and the next are vLLM's keys, and transformers ignores them
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,  # as in GLM-4.7-Flash more than a key's part without positions
        "num_nextn_predict_layers": 0,
        "num_mtp_layers": 0,
        "mtp_mlp_layer_types": ["sparse"],
    },
    # Both kinds of branches of attention between the others.
    "nemotron_h": {**_MAMBA, "hybrid_override_pattern": "M-M*-M"},
    "nemotron_h_moe": {
        **_MAMBA,
        "hybrid_override_pattern": "ME*ME-",
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    },
    "qwen3_moe": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [2],
    },
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "truncate": False, **_YARN},
    },
    "deepseek_v2": {
        "num_key_value_heads": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": None,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_scaling": {"rope_type": "yarn", **_YARN},
    },
    "deepseek_v3": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_scaling": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.2, **_YARN},
        "num_nextn_predict_layers": 0,
    },
}


def make(
    directory: Path, family: str, tied: bool, dtype: torch.dtype = torch.float32, seed: int = 17, **config
) -> torch.nn.Module:
    """Save a model with a few layers and random tensors in several shards; return the model."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "layer_norm_epsilon" if family.startswith("nemotron_h") else "rms_norm_eps": EPSILON,
    }
    shape |= {**SHAPES.get(family, {}), **config}
    if pattern := shape.get("hybrid_override_pattern"):  # which transformers counts
        shape["hybrid_override_pattern"] = pattern[: shape["num_hidden_layers"]]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model({**MODEL_TYPES, MAMBA_MOE: "nemotron_h"}.get(family, family), **shape),
        attn_implementation="eager",  # other implementations ignore Gemma 2's soft cap
    )
    set_latent_epsilon(model, model.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            ones = ("linear_attn.norm",) if family in HYBRID else ("norm", ".D")  # other norms multiply by 1 + weight
            centre = 1.0 if any(part in name for part in ones) or name.endswith("scale") else 0.0
            # gpt-oss clamps values beyond 7; decays of delta nets differ by factors, as those of log(U(0, 16)) do.
            deviation = 5.0 if name.endswith("gate_up_proj_bias") else 1.0 if name.endswith("A_log") else 0.1
            parameter.copy_(centre + deviation * torch.randn(parameter.shape))
            if not name.endswith("A_log"):  # stays float32, as Qwen3.5's on the Hub
                parameter.data = parameter.data.to(dtype)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # stays float32, as in transformers and on the Hub
                buffer.copy_(0.2 * torch.randn(buffer.shape))
            if name.endswith("layer_scalar"):
                buffer.data = (1 + 0.1 * torch.randn(buffer.shape)).to(dtype)
    save(model, directory)
    assert len(list(directory.glob("*.safetensors"))) > 1
    return model


def from_files(directory: Path, dtype: torch.dtype = torch.float32, **options) -> torch.nn.Module:
    """Return transformers' model of a directory, with the epsilons of vLLM."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options)
    set_latent_epsilon(model, model.config)
    return model


def save(model: torch.nn.Module, directory: Path) -> None:
    """Write a model with the names of published files; transformers would write each expert of Qwen3.5 apart."""
    stacked = model.config.model_type == "qwen3_5_moe_text"
    model.save_pretrained(directory, max_shard_size="60KB", save_original_format=not stacked)


class HybridMtp(torch.nn.Module):
    """Multi-token prediction of a model with gated delta nets, by the formula of vLLM's Qwen3NextMTP and Qwen3_5MTP.

    norm(layer(fc [norm(embedding of the next token), norm(hidden state)])), with the published names. The layer has
    attention and is transformers'. Called as transformers' MtpLayer, with the attributes of its MtpModel.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        last, hidden = model.model.layers[-1], model.config.hidden_size
        self.layer = type(last)(model.config, model.config.num_hidden_layers - 1)
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.register_parameter(name, torch.nn.Parameter(torch.empty(hidden)))
        self.eps = model.config.rms_norm_eps

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (1 + weight) * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def forward(self, embedded, hidden, rotary, causal, positions, cache) -> torch.Tensor:
        embedded = self._normed(embedded, self.pre_fc_norm_embedding)
        both = torch.cat([embedded, self._normed(hidden, self.pre_fc_norm_hidden)], -1)
        out = self.layer(self.fc(both), rotary, causal, positions, cache)
        return self._normed(out, self.norm)

    def published(self) -> dict[str, torch.Tensor]:
        """Return the parameters by their names in files, where each expert is apart."""
        names = {name: name if "." in name else f"{name}.weight" for name, _ in self.named_parameters()}
        return {
            f"mtp.{names[name].replace('layer.', 'layers.0.', 1)}": parameter
            for name, parameter in self.named_parameters()
        }


def _hybrid_mtp(model: torch.nn.Module) -> tuple[SimpleNamespace, dict[str, torch.Tensor]]:
    mtp = HybridMtp(model)
    for tensor in mtp.state_dict().values():
        tensor.copy_(0.1 * torch.randn(tensor.shape))
    parts = {"embed_tokens": model.model.embed_tokens, "rotary_emb": model.model.rotary_emb}
    return SimpleNamespace(layers=[mtp], shared_head=model.lm_head, **parts), mtp.published()


def _deepseek_mtp(model: torch.nn.Module) -> tuple[MtpModel, dict[str, torch.Tensor]]:
    mtp = MtpModel(model, 1)
    set_latent_epsilon(mtp, model.config)
    for name, tensor in mtp.layers.state_dict().items():
        tensor.copy_((1.0 if "norm" in name else 0.0) + 0.1 * torch.randn(tensor.shape))
    path = f"model.layers.{model.config.num_hidden_layers}."
    copies = {
        path + "embed_tokens.weight": model.model.embed_tokens.weight,
        path + "shared_head.head.weight": model.lm_head.weight,
    }
    return mtp, copies | {
        path + name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm"): tensor
        for name, tensor in mtp.layers[0].state_dict().items()
    }


def add_mtp(directory: Path, model: torch.nn.Module) -> MtpModel | SimpleNamespace:
    """Add a random multi-token-prediction layer to a checkpoint, with the published names; return it."""
    torch.manual_seed(18)
    family = model.config.model_type
    hybrid = family in HYBRID
    key = "mtp_num_hidden_layers" if family.startswith("qwen3_5") else "num_nextn_predict_layers"
    mtp, stacked = (_hybrid_mtp if hybrid else _deepseek_mtp)(model)
    tensors = {}
    for name, tensor in stacked.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    tensors[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = half
        elif name.endswith("experts.down_proj"):
            for expert, part in enumerate(tensor):
                tensors[name.replace("down_proj", f"{expert}.down_proj.weight")] = part
        else:
            tensors[name] = tensor
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, directory / "mtp.safetensors")
    for file, change in (
        ("model.safetensors.index.json", {"weight_map": dict.fromkeys(tensors, "mtp.safetensors")}),
        ("config.json", {key: 1}),
    ):
        content = json.loads((directory / file).read_text())
        for key, value in change.items():
            content[key] = {**content[key], **value} if isinstance(value, dict) else value
        (directory / file).write_text(json.dumps(content))
    return mtp


def toy_args(directory: Path, family: str | None = None, **more):
    """Return the arguments of the Megatron model for a checkpoint; ``more`` are arguments to set.

    ``family``: see `families.for_hf_config`.
    """
    args = parse_args(["--transformer-impl", "local"])
    config = hf.read_config(directory)
    architecture = families.for_hf_config(config, family).args_from_hf(config)
    args = replaced(args, **architecture | {"padded_vocab_size": PADDED_VOCAB} | more)
    # megatron-core requires it for experts with tensor parallelism
    return replaced(args, sequence_parallel=args.tensor_model_parallel_size > 1 and bool(args.num_experts))


def build(args) -> list[torch.nn.Module]:
    """Return the Megatron model with all weights NaN, so that a weight that is not loaded is detected."""
    chunks = build_model(args, model_provider)
    for chunk in chunks:
        buffers = [buffer for name, buffer in chunk.named_buffers() if name.endswith(model_weights.BUFFERS)]
        for tensor in [*chunk.parameters(), *buffers]:
            tensor.data.fill_(torch.nan)
    return chunks


def packed(ids: torch.Tensor) -> PackedSeqParams:
    """Return the packing parameters of one sequence."""
    return packed_seq_params(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids), "local")


@torch.no_grad()
def forward(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the stage output for one sequence: logits [1, tokens, vocabulary of this rank] or hidden states."""
    return model(ids[None], torch.arange(len(ids))[None], attention_mask=None, packed_seq_params=packed(ids))


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [tokens, vocabulary of this rank] of one sequence, on the last stage."""
    return forward(model, ids)[0]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def verify_hf(chunks, args, directory: Path) -> int:
    """Compare a model bit for bit with a checkpoint in the model's dtype; return the number of tensors. Collective."""
    source, count = hf.open_weights(directory, args.model_family, args.mtp_num_layers), 0
    held = {name for weight in hf.check_tensors(source, args, model_weights.table(args)) for name in weight.hf}
    for name, tensor in stream_hf(chunks, args):
        if name in held:
            assert same_bits(source.read(name).to(tensor.dtype), tensor.cpu()), name
            count += 1
    return count


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the directory's safetensors files by name."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
