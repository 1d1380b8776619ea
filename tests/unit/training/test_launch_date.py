"""The date that chat templates print: on ranks whose clocks are on two sides of midnight, and in a resumed run."""

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
    now = SimpleNamespace(now=lambda: here.now, fromisoformat=datetime.datetime.fromisoformat)
    monkeypatch.setattr(setup, "datetime", SimpleNamespace(datetime=now))
    monkeypatch.setattr(setup, "launch_group", lambda: here.group)

    def rank(number):
        here.now = (datetime.datetime(2024, 7, 25, 23, 59), datetime.datetime(2024, 7, 26, 0, 1))[number]
        here.group = dist.ProcessGroupGloo(store, number, 2, datetime.timedelta(seconds=60))
        found[number] = setup._read_inputs(args, [], False).train[0].ids

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = AutoTokenizer.from_pretrained(tmp_path / "model").apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, date_string="25 Jul 2024"
    )
    assert found == [expected, expected]


def test_a_resumed_run_prints_the_date_of_its_start(tmp_path):
    """Its unfinished episodes have prompts with this date."""
    directory = tmp_path / "iter_0000002"
    directory.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    args = replaced(parse_args([]), load=str(tmp_path))
    (directory / "args.json").write_text(json.dumps({"started": "2024-07-25T23:59:00"}))
    assert setup._started(args, resume=True) == "2024-07-25T23:59:00"
    before = datetime.datetime.now()
    assert datetime.datetime.fromisoformat(setup._started(args, resume=False)) >= before  # a run of its own
    (directory / "args.json").write_text("{}")  # of a checkpoint of an earlier version
    assert datetime.datetime.fromisoformat(setup._started(args, resume=True)) >= before
