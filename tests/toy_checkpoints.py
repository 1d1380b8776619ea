"""Toy Hugging Face checkpoints made by transformers, and the Megatron model that belongs to one."""

from pathlib import Path

from megatron_grpo import cpu_backend

cpu_backend.install()

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo import training
from megatron_grpo.arguments import parse_args
from megatron_grpo.models.gpt import model_provider, packed_seq_params
from megatron_grpo.weights import families, hf

FAMILIES = ("qwen3", "qwen2", "llama")
VOCAB, PADDED_VOCAB = 109, 112


def make(directory: Path, family: str, tied: bool, dtype: torch.dtype = torch.float32, **config) -> torch.nn.Module:
    """Save a model of 2 layers with every tensor random, in several shards; returns it."""
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
    }
    if family == "qwen3":
        shape["head_dim"] = 16  # 8 heads of 16: more than hidden_size, as in Qwen3 0.6B
    if family == "llama":
        shape["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    torch.manual_seed(17)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**shape, **config})).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.1 * torch.randn(parameter.shape))
    model.save_pretrained(directory, max_shard_size="60KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return model


def toy_args(directory: Path, tp: int = 1, pp: int = 1, bf16: bool = False):
    """Arguments of the Megatron model for a checkpoint."""
    args = parse_args(["--transformer-impl", "local"])
    config = hf.read_config(directory)
    vars(args).update(families.for_hf_config(config).args_from_hf(config))
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp, pp
    args.padded_vocab_size, args.bf16 = PADDED_VOCAB, bf16
    return args


def build(args) -> list[torch.nn.Module]:
    """The Megatron model with every parameter not a number, so that one left out is seen."""
    chunks = training.build_model(args, model_provider)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.fill_(torch.nan)
    return chunks


@torch.no_grad()
def forward(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """What this stage gives for one sequence: logits [1, tokens, vocabulary of this rank] on the last, else hidden."""
    packed = packed_seq_params(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids), "local")
    return model(ids[None], torch.arange(len(ids))[None], attention_mask=None, packed_seq_params=packed)


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocabulary of this rank] of one sequence, on the last stage."""
    return forward(model, ids)[0]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the directory's safetensors files."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
