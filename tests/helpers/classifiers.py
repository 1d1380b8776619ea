"""Sequence classifiers as reward models: a random classifier, and the scores of transformers."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer


def make_classifier(source: str, directory: Path) -> Path:
    config = AutoConfig.from_pretrained(source)
    config.num_labels, config.initializer_range = 1, 0.5
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)
    return directory


def by_transformers(directory: Path, texts: list[str]) -> list[float]:
    """Return the logit of each text, computed one text at a time by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        return [float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in texts]
