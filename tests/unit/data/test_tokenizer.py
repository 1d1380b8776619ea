"""Tokenizers built by hand: ten words for Hugging Face, sentences for SentencePiece, three merges for tiktoken."""

import argparse
import base64
import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data.tokenizer import build_tokenizer, check_vocabulary
from megatron_grpo.utils.errors import GrpoError

WORDS = ["<eos>", "<pad>", "<user>", "<assistant>", "1", "2", "+", "=", "3", "?"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{% elif m.role == 'system' %}?{% else %}"
    "{{ raise_exception('only users here') }}{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def args(path, kind="HuggingFaceTokenizer"):
    return argparse.Namespace(
        tokenizer_type=kind, tokenizer_model=str(path), chat_template=None, trust_remote_code=False
    )


def make_hf(directory, template=TEMPLATE, eos="<eos>", post_processor=None):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if post_processor:
        tokenizer.post_processor = post_processor
    special = {"pad_token": "<pad>", "additional_special_tokens": ["<user>", "<assistant>"]}
    if eos:
        special["eos_token"] = eos
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


@pytest.fixture
def sentencepiece_model(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one and two", "two and three", "three and one"] * 5),
        model_prefix=str(tmp_path / "tiny"),
        vocab_size=16,
        minloglevel=2,
    )
    return tmp_path / "tiny.model"


def test_hugging_face(tmp_path):
    tokenizer = build_tokenizer(args(make_hf(tmp_path / "t")))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (10, 0, 1)
    assert tokenizer.encode("1+2=") == [4, 6, 5, 7]
    assert tokenizer.longest_token == len("<assistant>")
    assert tokenizer.decode([8, 0]) == "3"
    assert tokenizer.decode([8, 0], skip_special_tokens=False) == "3<eos>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+2"}]) == [2, 4, 6, 5, 3]


def test_sentencepiece(sentencepiece_model):
    tokenizer = build_tokenizer(args(sentencepiece_model, "SentencePieceTokenizer"))
    ids = tokenizer.encode("two and one")
    assert ids and tokenizer.decode([*ids, tokenizer.eos_id]) == "two and one"
    # SentencePiece's own defaults: unk 0, bos 1, eos 2, no pad.
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (16, 2, 2)
    assert 1 not in ids
    assert tokenizer.longest_token >= max(len(tokenizer.decode([i])) for i in range(16))
    with pytest.raises(GrpoError, match="SentencePiece model has none"):
        tokenizer.apply_chat_template([{"role": "user", "content": "one"}])


def test_refusals_hugging_face(tmp_path):
    with pytest.raises(GrpoError, match="no such directory"):
        build_tokenizer(args(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(GrpoError, match=r"none of tokenizer\.json"):
        build_tokenizer(args(tmp_path / "empty"))
    (tmp_path / "empty" / "tokenizer.json").write_text(json.dumps({"model": "cut off"})[:9])
    with pytest.raises(GrpoError, match="cannot read this tokenizer"):
        build_tokenizer(args(tmp_path / "empty"))
    with pytest.raises(GrpoError, match="no eos_token"):
        build_tokenizer(args(make_hf(tmp_path / "no-eos", eos=None)))
    ends = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 0)])
    with pytest.raises(GrpoError, match="ends every text"):
        build_tokenizer(args(make_hf(tmp_path / "ends", post_processor=ends)))
    with pytest.raises(GrpoError, match="NullTokenizer is not supported"):
        build_tokenizer(args(tmp_path, "NullTokenizer"))


def test_refusals_of_chat_templates(tmp_path):
    with pytest.raises(GrpoError, match="has none; give the prompts as plain strings"):
        build_tokenizer(args(make_hf(tmp_path / "a", template=None))).apply_chat_template([])
    with pytest.raises(GrpoError, match="only users here"):
        build_tokenizer(args(make_hf(tmp_path / "b"))).apply_chat_template([{"role": "tool", "content": "1"}])


def test_refusals_sentencepiece(tmp_path):
    with pytest.raises(GrpoError, match="no such file"):
        build_tokenizer(args(tmp_path, "SentencePieceTokenizer"))
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(GrpoError, match="not a SentencePiece model"):
        build_tokenizer(args(tmp_path / "bad.model", "SentencePieceTokenizer"))


def vocabulary(path, *merges):
    """Megatron-LM's JSON form: the 256 bytes, then these."""
    tokens = [bytes([byte]) for byte in range(256)] + list(merges)
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return entries


def tik(path, **changes):
    words = {"tiktoken_pattern": "v2", "tiktoken_num_special_tokens": 10, "tiktoken_special_tokens": None}
    return argparse.Namespace(
        **{"tokenizer_type": "TikTokenizer", "tokenizer_model": str(path), "vocab_size": None} | words | changes
    )


def test_tiktoken(tmp_path):
    """Ids by hand: 10 special tokens, then the bytes, then the merges."""
    vocabulary(tmp_path / "v.json", b"12", b" 1", "é".encode())
    tokenizer = build_tokenizer(tik(tmp_path / "v.json"))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (269, 2, 4)  # <unk> <s> </s> <mask> <pad> ..
    assert tokenizer.longest_token == len("<unk>") + 1  # <mask>
    # A digit is a word by itself, so neither "12" nor " 1" is ever merged.
    assert tokenizer.encode("a 12é") == [10 + 97, 10 + 32, 10 + 49, 10 + 50, 268]
    ids = tokenizer.encode("1é</s>")
    assert ids == [10 + 49, 268, 2]
    assert tokenizer.decode(ids) == "1é" and tokenizer.decode(ids, skip_special_tokens=False) == "1é</s>"
    euro = [10 + byte for byte in "€".encode()]
    assert tokenizer.encode("€") == euro and tokenizer.decode(euro) == "€"  # of three tokens, put together
    assert tokenizer.decode(tokenizer.encode("x €, 12\n\n🙂?")) == "x €, 12\n\n🙂?"
    # v2 splits a word before a capital, v1 does not.
    vocabulary(tmp_path / "w.json", b"oW")
    assert build_tokenizer(tik(tmp_path / "w.json", tiktoken_pattern="v1")).encode("oW") == [266]
    assert build_tokenizer(tik(tmp_path / "w.json")).encode("oW") == [10 + ord("o"), 10 + ord("W")]
    cut = build_tokenizer(tik(tmp_path / "v.json", vocab_size=268))
    assert cut.vocab_size == 268 and cut.encode("é") == [10 + 0xC3, 10 + 0xA9]
    custom = ["<eod>", "<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
    renamed = build_tokenizer(tik(tmp_path / "v.json", tiktoken_special_tokens=custom))
    assert (renamed.eos_id, renamed.pad_id) == (3, 5) and renamed.encode("<eod>") == [0]
    with pytest.raises(GrpoError, match="tiktoken vocabulary has none; give the prompts as plain strings"):
        tokenizer.apply_chat_template([{"role": "user", "content": "one"}])


def test_refusals_tiktoken(tmp_path):
    path = tmp_path / "v.json"
    with pytest.raises(GrpoError, match=r"\.tiktoken file or a directory .* --tokenizer-type HuggingFaceTokenizer"):
        build_tokenizer(tik(tmp_path / "v.tiktoken"))
    path.write_text("[")
    with pytest.raises(GrpoError, match="cannot be read as JSON"):
        build_tokenizer(tik(path))
    for spoil in (
        lambda entries: entries[3].update(rank=4),
        lambda entries: entries[3].update(token_bytes="!"),
        lambda entries: entries[3].update(token_bytes=None),
        lambda entries: entries[3].pop("token_str"),
        lambda entries: entries.__setitem__(3, 5),
        lambda entries: entries[3].update(token_bytes="AA=="),
    ):
        entries = vocabulary(path)
        spoil(entries)
        path.write_text(json.dumps(entries))
        with pytest.raises(GrpoError, match=r"v\.json: entry 3 is .*; expected a list of"):
            build_tokenizer(tik(path))
    path.write_text(json.dumps(vocabulary(path)[:200]))
    with pytest.raises(GrpoError, match="has 200 tokens"):
        build_tokenizer(tik(path))
    vocabulary(path, b"aa", b"aa")
    with pytest.raises(GrpoError, match="entry 257"):
        build_tokenizer(tik(path))
    vocabulary(path)
    with pytest.raises(GrpoError, match=r"--tiktoken-num-special-tokens \(6\) must be at least 7"):
        build_tokenizer(tik(path, tiktoken_num_special_tokens=6))
    with pytest.raises(GrpoError, match="give each token once, and include all of <unk>"):
        build_tokenizer(tik(path, tiktoken_special_tokens=["<unk>"]))
    with pytest.raises(
        GrpoError, match=r"--vocab-size \(200\) must be at least --tiktoken-num-special-tokens \(10\) \+ 256"
    ):
        build_tokenizer(tik(path, vocab_size=200))


def test_check_vocabulary(tmp_path):
    tokenizer = build_tokenizer(args(make_hf(tmp_path / "t")))
    check_vocabulary(tokenizer, 10)
    with pytest.raises(GrpoError, match="10 entries but the model's vocabulary holds 9"):
        check_vocabulary(tokenizer, 9)


def test_reserved_entries_above_the_models_vocabulary_are_not_counted(tmp_path):
    """As in the tokenizers of Kimi-K2 and Moonlight, which have 163842 entries; config.json has vocab_size 163840."""
    fast = PreTrainedTokenizerFast.from_pretrained(make_hf(tmp_path / "t"))
    fast.add_tokens([AddedToken(f"<|reserved_token_{i}|>", special=True) for i in (9, 11, 12)])
    fast.save_pretrained(tmp_path / "t")
    tokenizer = build_tokenizer(args(tmp_path / "t"))
    assert tokenizer.vocabulary()["<|reserved_token_9|>"] == 10  # it is not named after its id
    assert tokenizer.vocabulary()["<|reserved_token_12|>"] == 12
    check_vocabulary(tokenizer, 11)
    with pytest.raises(GrpoError, match="11 entries but the model's vocabulary holds 10"):
        check_vocabulary(tokenizer, 10)
    assert tokenizer.encode("1<|reserved_token_9|>") == [4, 10]
    for encode in (tokenizer.encode, lambda text: tokenizer.apply_chat_template([{"role": "user", "content": text}])):
        with pytest.raises(GrpoError, match=r"has <\|reserved_token_12\|>, a reserved token of the tokenizer in"):
            encode("1<|reserved_token_12|>")
