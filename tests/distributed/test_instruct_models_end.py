"""Completions of instruct models end where the model's turns end, in the engines and in a whole run."""

import json
import shutil

import pytest
from chain_model import make_chain_model
from instruct_models import NAMES, build_tokenizer, published
from ranks import run_torchrun
from run_files import json_lines
from transformers import AutoTokenizer

from megatron_grpo.data.end_of_turn import end_token_ids
from megatron_grpo.data.tokenizer import build_tokenizer as build
from megatron_grpo.training.arguments import parse_args

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]
LONGEST, BYTES, VOCAB = 4, 256, 320
# What the tables of the models say ends a turn (tests/data/instruct_models), by the token's text.
TURNS = {
    "GLM-4-9B-0414": {"<|endoftext|>", "<|user|>", "<|observation|>"},
    "Llama-3.1-8B-Instruct": {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
    "Phi-3-mini-4k-instruct": {"<|endoftext|>", "<|assistant|>", "<|end|>"},
    "Qwen3-8B": {"<|im_end|>", "<|endoftext|>"},
    "gemma-2-2b-it": {"<eos>", "<end_of_turn>"},
    "gemma-3-1b-it": {"<eos>", "<end_of_turn>"},
    "gpt-oss-20b": {"<|return|>", "<|endoftext|>", "<|call|>"},
}


@pytest.mark.slow
def test_every_engine_ends_at_every_end_token_and_at_no_other(tmp_path):
    """The model writes special token number i after byte i, and repeats it to the length limit, unless it is an end."""
    model = make_chain_model(tmp_path / "model", {i: BYTES + i for i in range(VOCAB - BYTES)}, VOCAB)
    asked, expected = [], []
    for name in NAMES:
        ids = build_tokenizer(name, tmp_path / name)
        args = parse_args(["--tokenizer-model", str(tmp_path / name)])
        ends = end_token_ids(args, build(args))
        if name in TURNS:
            assert {token for token, i in ids.items() if i in ends} == TURNS[name]
        for token in ids.values():
            asked.append([[token - BYTES], ends])
            expected.append([[token], "stop"] if token in ends else [[token] * LONGEST, "length"])
    assert sum(reason == "stop" for _, reason in expected) >= 2 * len(NAMES)
    (tmp_path / "requests.json").write_text(json.dumps(asked))
    flags = f"""--load-hf {model} --lr 1e-3 --train-iters 1 --transformer-impl local --train-data-path unused
        --reward-funcs exact_match --micro-batch-size 2 --global-batch-size 4 --num-generations 4 --max-prompt-length 4
        --max-completion-length {LONGEST} --tokenizer-model unused"""
    run_torchrun(1, "tests/distributed/end_of_turn_worker.py", tmp_path, *flags.split())
    answers = json.loads((tmp_path / "completions.json").read_text())
    assert answers["vllm"] == expected
    assert answers["megatron"] == expected


@pytest.mark.slow
def test_a_run_of_an_instruct_model_ends_its_turns(tmp_path):
    """Gemma 2's template and ends of turn: the tokenizer's own end of sequence never comes."""
    model = tmp_path / "model"
    ids = build_tokenizer("gemma-2-2b-it", tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    newline, four = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("\n", "4"))
    make_chain_model(model, {newline: four, four: ids["<end_of_turn>"]}, BYTES + len(ids))
    for file in (tmp_path / "tokenizer").iterdir():
        if file.name != "config.json":
            shutil.copy(file, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": ids["<eos>"]}))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}))
    save = tmp_path / "save"
    flags = f"""--load-hf {model} --train-data-path {tmp_path}/rows.jsonl --reward-funcs exact_match --lr 1e-6
        --train-iters 1 --transformer-impl local --global-batch-size 4 --num-generations 4 --micro-batch-size 2
        --max-prompt-length 64 --max-completion-length 16 --num-completions-to-log 4 --save {save}"""
    done = run_torchrun(1, "pretrain_grpo.py", *flags.split())
    ends = f"<eos> ({ids['<eos>']}), <end_of_turn> ({ids['<end_of_turn>']})"
    assert f"completions end at {ends}\n" in done.stdout
    samples = json_lines(save / "completions.jsonl")
    assert len(samples) == 4
    for sample in samples:
        assert sample["prompt"] == "user\n2+2?\nmodel\n"  # special tokens are not shown
        assert sample["tokens"] == ["4", "<end_of_turn>"] and sample["completion"] == "4"
        assert sample["finish_reason"] == "stop" and sample["rewards"] == {"exact_match": 1.0}
        assert len(sample["log_probs"]) == 2  # the end token is in the loss
    row = json.loads((save / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["completion/truncated"] == 0 and row["tokens/rollout"] == 8
    for directory in (save / "hf_model", save / "hf_assets"):
        kept = json.loads((directory / "generation_config.json").read_text())
        assert kept == json.loads((model / "generation_config.json").read_text())
        assert kept["eos_token_id"] == [ids["<eos>"], ids["<end_of_turn>"]]
    assert published("gemma-2-2b-it", "generation_config.json")["eos_token_id"] == [1, 107]
