"""The benchmark beside other trainers: one table of four kinds of logs, the same prompts and lengths for all."""

import json
import statistics
import sys
from types import ModuleType, SimpleNamespace

import pyarrow.parquet
import pytest
from run_files import json_lines

from megatron_grpo.utils.errors import GrpoError
from tools.benchmark.peers import prompts
from tools.benchmark.peers.table import table
from tools.benchmark.peers.vllm_plugin import drawn_lengths

# Three updates of 9, 4 and 2 seconds with completions of 100, 100 and 200 tokens, as each trainer logs them.
LOGS = {
    "ours/metrics.jsonl": [
        {"iteration": i, "loss": 0.0, "time/step": s, "completion/length_mean": n}
        for i, s, n in ((1, 9, 100), (2, 4, 100), (3, 2, 200))
    ]
    + [{"iteration": 3, "eval/reward": 1.0}],
    "trl/steps.jsonl": [
        {"step": i, "seconds": 2 * s, "length": n} for i, s, n in ((1, 9, 1), (2, 4, 100), (3, 2, 200))
    ],
    "ms_swift/logging.jsonl": [  # the mean over all updates so far: 9, 13 and 15 seconds in all
        {"iteration": f"{i}/3", "train_speed(s/it)": s / i, "completions/mean_length": n}
        for i, s, n in ((1, 9, 100), (2, 13, 100), (3, 15, 200))
    ]
    + [{"last_model_checkpoint": "x"}],
    "verl/metrics.jsonl": [
        {"step": i, "data": {"perf/time_per_step": s, "response_length/mean": n}}
        for i, s, n in ((1, 9, 100), (2, 12, 100), (3, 6, 200))
    ],
}


def test_the_table_of_all_trainers(tmp_path):
    for name, rows in LOGS.items():
        path = tmp_path / "equal" / name
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / "equal/ours/metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lo')  # a run that was killed while it wrote
    (tmp_path / "long_tail/verl").mkdir(parents=True)
    # Without the first update 3 s for 150 tokens each: 50 tokens a second of one completion, and eight of them.
    assert table(tmp_path, warm_up=1, batch=8)[2:] == [
        "| equal | ours | 2 | 3.00 | 400 | 1.00 |",
        "| equal | trl | 2 | 6.00 | 200 | 2.00 |",
        "| equal | ms_swift | 2 | 3.00 | 400 | 1.00 |",
        "| equal | verl | 2 | 9.00 | 133 | 3.00 |",
        f"| long_tail | verl | none: see {tmp_path}/long_tail/verl/log.txt | | | |",
    ]


def test_no_runs(tmp_path):
    with pytest.raises(GrpoError, match=r"has no runs: bash .*ours.sh equal"):
        table(tmp_path, 2, 512)


@pytest.mark.slow
def test_drawn_lengths_have_the_stated_mean_and_median():
    drawn = [drawn_lengths.length(number) for number in range(100_000)]
    assert statistics.median(drawn) == pytest.approx(384, rel=0.02)
    assert statistics.mean(drawn) == pytest.approx(687, rel=0.02)


@pytest.mark.parametrize("lengths, expected", [("equal", [512, 512]), ("long_tail", None)])
def test_every_request_gets_its_length_and_no_end_token(monkeypatch, lengths, expected):
    class InputProcessor:
        def process_inputs(self, request_id, prompt, params, supported_tasks):
            return SimpleNamespace(sampling_params=SimpleNamespace(**vars(params)))

    module = ModuleType("vllm.v1.engine.input_processor")
    module.InputProcessor = InputProcessor
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("LENGTHS", lengths)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    drawn_lengths.register()
    drawn_lengths.register()
    params = SimpleNamespace(ignore_eos=False, stop=["x"], stop_token_ids=[2], max_tokens=512)
    requests = [InputProcessor().process_inputs("a", [1], params, ()).sampling_params for _ in range(2)]
    # The second of two ranks has the odd numbers.
    assert [r.max_tokens for r in requests] == (expected or [min(drawn_lengths.length(n), 512) for n in (1, 3)])
    assert all(r.ignore_eos and not r.stop and not r.stop_token_ids for r in requests)
    assert params.max_tokens == 512


def test_all_formats_have_the_same_problems(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["prompts.py", "--save", str(tmp_path), "--count", "3"])
    assert prompts.main() == 0
    rows = json_lines(tmp_path / "rows.jsonl")
    messages = json_lines(tmp_path / "messages.jsonl")
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert len(rows) == 3 and rows == table and [row["messages"] for row in messages] == [row["prompt"] for row in rows]
    words = rows[0]["prompt"][0]["content"].split()
    sold, factor = int(words[2]), int(words[words.index("times") - 1])
    assert rows[0]["answer"] == rows[0]["reward_model"]["ground_truth"] == str(sold * (1 + factor))
