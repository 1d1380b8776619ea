"""The date that chat templates print, on ranks whose clocks are on two sides of midnight."""

import datetime
import json
import threading
from types import SimpleNamespace

from instruct_models import build_tokenizer
from transformers import AutoTokenizer

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import torch.distributed as dist

from megatron_grpo.training import setup
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced


def test_all_ranks_print_the_date_of_rank_0(tmp_path, monkeypatch):
    """Two ranks, in threads, read one prompt: both have the ids of transformers with rank 0's date."""
    ids = build_tokenizer("Llama-3.2-3B-Instruct", tmp_path / "model")
    messages = [{"role": "user", "content": "When?"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": messages, "answer": "1"}) + "\n")
    words = ["--tokenizer-model", tmp_path / "model", "--train-data-path", tmp_path / "rows.jsonl"]
    args = replaced(
        parse_args([*map(str, words), "--reward-funcs", "exact_match"]), vocab_size=len(ids) + 256, vision_config=None
    )
    here, store, found = threading.local(), dist.HashStore(), [None, None]
    now = SimpleNamespace(now=lambda: here.now)
    monkeypatch.setattr(setup, "datetime", SimpleNamespace(datetime=now))
    monkeypatch.setattr(setup, "launch_group", lambda: here.group)

    def rank(number):
        here.now = (datetime.datetime(2024, 7, 25, 23, 59), datetime.datetime(2024, 7, 26, 0, 1))[number]
        here.group = dist.ProcessGroupGloo(store, number, 2, datetime.timedelta(seconds=60))
        found[number] = setup._read_inputs(args, []).train[0].ids

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = AutoTokenizer.from_pretrained(tmp_path / "model").apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, date_string="25 Jul 2024"
    )
    assert found == [expected, expected]
