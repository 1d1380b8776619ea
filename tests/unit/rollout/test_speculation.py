"""A draft model that does not fit the policy is refused at the start."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.rollout.speculation import check_draft_tokenizer, longest_of_engine
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from tools import made_up

MODEL = """--num-layers 1 --hidden-size 64 --num-attention-heads 2 --vocab-size 61 --max-position-embeddings 64
    --model-family qwen3 --qk-layernorm --swiglu --normalization RMSNorm --disable-bias-linear""".split()


def arguments(directory, **config):
    (directory / "config.json").write_text(json.dumps(config))
    drafts = {"model": str(directory), "num_speculative_tokens": 2}
    return made_up.parse([*MODEL, "--vllm-speculative-config", json.dumps(drafts)], 1)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"vocab_size": 7}, r"has vocab_size 7, the policy has \d+: give a draft model with the policy's tokenizer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized, which has not been checked: give one in 16"),
    ],
)
def test_sizes(tmp_path, config, error):
    with pytest.raises(GrpoError, match=error):
        arguments(tmp_path, **config)


def tokenizer(directory, *words: str) -> HuggingFaceTokenizer:
    vocabulary = {word: number for number, word in enumerate(("<unk>", "</s>", *words))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>").save_pretrained(directory)
    return HuggingFaceTokenizer(directory)


def test_another_tokenizer(tmp_path):
    policys = tokenizer(tmp_path / "policy", "a", "b")
    args = parse_args(["--vllm-speculative-config", json.dumps({"model": str(tmp_path / "draft")})])
    tokenizer(tmp_path / "draft", "a", "b")
    check_draft_tokenizer(args, policys)
    tokenizer(tmp_path / "draft", "b", "a")
    with pytest.raises(GrpoError, match=r"has another tokenizer than .*policy: give a draft model with the same"):
        check_draft_tokenizer(args, policys)


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX = {"method": "suffix"}


@pytest.mark.parametrize(
    ("config", "longest", "of_engine"),
    [
        (NGRAM, 32, 40),
        (NGRAM, 60, 64),
        (NGRAM, 64, 64),
        (SUFFIX | {"num_speculative_tokens": 4}, 32, 40),
        (SUFFIX, 12, 60),  # vLLM's default: as many tokens as its tree is deep, 24
        (SUFFIX | {"suffix_decoding_max_tree_depth": 8}, 12, 28),
    ],
)
def test_room_for_drafts_behind_the_longest_sequence(config, longest, of_engine):
    """Of twice the tokens of a draft, within the model's 64 positions."""
    drafts = json.dumps(config)
    lengths = ["--max-prompt-length", "8", "--max-completion-length", str(longest - 8)]
    args = made_up.parse([*MODEL, *lengths, "--vllm-speculative-config", drafts, "--dry-run"], 1)
    assert (args.vllm_max_model_len, longest_of_engine(args)) == (longest, of_engine)
    args = replaced(args, vllm_speculative_config=None)
    assert longest_of_engine(args) == longest


def test_arctic_inference_replaces_nothing_of_vllm(monkeypatch):
    """With this variable the package, which is a plug-in of vLLM, would replace the model runner."""
    monkeypatch.setenv("ARCTIC_INFERENCE_ENABLED", "1")
    for drafts in (SUFFIX, NGRAM, {}):
        with pytest.raises(GrpoError, match=r"ARCTIC_INFERENCE_ENABLED=1: .* unset"):
            made_up.parse([*MODEL, "--dry-run", "--vllm-speculative-config", json.dumps(drafts)], 1)
    made_up.parse([*MODEL, "--dry-run", "--rollout-engine", "megatron"], 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0 and must be a whole number above 0"),
        ({"num_speculative_tokens": True}, "is True and must be"),
        ({"suffix_decoding_max_tree_depth": "x"}, "is 'x' and must be"),
        ({"suffix_decoding_min_token_prob": 7}, "must be from 0 to 1"),
        ({"model": "/nowhere"}, "model is '/nowhere' and must be left out"),
    ],
)
def test_what_suffix_decoding_takes(more, said):
    with pytest.raises(GrpoError, match=said):
        made_up.parse([*MODEL, "--dry-run", "--vllm-speculative-config", json.dumps(SUFFIX | more)], 1)
