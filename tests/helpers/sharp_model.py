"""A tiny model whose next-token distributions are peaked, so that wrong weights show in its log-probabilities.

A newly initialized model gives every token nearly the same probability, independent of its layers. In this model all
matrices are larger, the weights of norms differ from 1, and the end of the sequence and three digits are frequent:
completions differ in length, and some of them contain a number.
"""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def make_sharp_model(source: str | Path, target: str | Path) -> str:
    """Write a sharp version of the model in the Hugging Face directory ``source`` to ``target``; return ``target``."""
    shutil.copytree(source, target)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    often = [tokenizer.eos_token_id, *tokenizer.encode("579")]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5, generator=generator))
            else:
                parameter.mul_(8.0)
        model.get_output_embeddings().weight[often] *= 3.0
    model.save_pretrained(target)
    return str(target)
