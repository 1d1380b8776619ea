"""A model whose next token is a function of the last one: attention and MLP add nothing, and the head has a table."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

WIDTH = 320  # channels; one for each token


def make_chain_model(directory: str | Path, following: Mapping[int, int], vocab_size: int) -> str:
    """Write a Hugging Face directory; return it. Tokens without an entry in ``following`` follow themselves."""
    assert vocab_size <= WIDTH
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, WIDTH))
        head = model.lm_head.weight.zero_()
        for token in range(vocab_size):
            head[following.get(token, token), token] = 2.0  # a lead of 36 in the logits
    model.save_pretrained(directory)
    return str(directory)
