"""tools/report.py: what made-up runs show in the page, that nothing in them can become markup, and what is refused."""

import base64
import hashlib
import importlib.util
import json
import math
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "report.py"
spec = importlib.util.spec_from_file_location("report", TOOL)
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)

from megatron_grpo.observability import run_folder

VOID = {"meta", "input"}
ROWS = [
    {"iteration": 0, "eval/greedy_accuracy": 0.25, "time/eval": 3.0, "time/step": 60.0},
    {"iteration": 1, "reward/f1/mean": 0.5, "kl": 0.0, "tokens/total": 40, "time/rollout": 0.5, "time/step": 2.0},
    {"iteration": 2, "reward/f1/mean": None, "kl": 0.0, "tokens/total": 90, "time/update": 1.0, "time/step": 1.0},
    {"iteration": 3, "reward/f1/mean": 0.75, "kl": 0.0, "tokens/total": 99, "time/update": 1.0, "time/step": 4.0},
]
SAMPLE = {
    "iteration": 1,
    "picked": "first",
    "prompt": "1+1=",
    "completion": "2",
    "rewards": {"f1": 1.0, "f2": None},
    "advantage": -0.5,
    "finish_reason": "stop",
    "length": 2,
    "row": 7,
    "tokens": ["2", "<eos>"],
    "log_probs": [-0.25, None],
}
ARGS = {"lr": 1e-6, "save": "runs/a", "beta": 0.0, "train_iters": 4}
ENVIRONMENT = {"command": "pretrain_grpo.py --lr 1e-6", "given": ["lr", "save"], "packages": {"torch": "2.13"}}


class Page(HTMLParser):
    """The page as a browser sees it: tags that must close, contents of scripts, rows of tables by their first cell."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.scripts, self.rows = [], [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag == "tr":
            self.row, self.marked = [], ("class", "differs") in attrs
        if tag in ("th", "td"):
            self.row.append("")
        if tag == "script":
            self.scripts.append((dict(attrs).get("id"), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "tr":
            self.rows[self.row[0]] = (self.row[1:], self.marked)

    def handle_data(self, text):
        if self.open and self.open[-1] in ("th", "td"):
            self.row[-1] += text
        if self.open and self.open[-1] == "script":
            name, before = self.scripts[-1]
            self.scripts[-1] = (name, before + text)

    @property
    def data(self):
        return json.loads(dict(self.scripts)["data"])


def write_run(directory, rows=ROWS, samples=(SAMPLE,), args=ARGS, environment=ENVIRONMENT):
    directory.mkdir(parents=True)
    for name, lines in {"metrics.jsonl": rows, "completions.jsonl": samples}.items():
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, content in {"args.json": args, "environment.json": environment}.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def written(tmp_path, *runs):
    output = tmp_path / "report.html"
    assert report.main([*map(str, runs), "-o", str(output)]) == 0
    return output.read_text(encoding="utf-8")


def test_the_page_holds_what_the_run_wrote(tmp_path):
    page = Page(written(tmp_path, write_run(tmp_path / "run")))
    (run,) = page.data["runs"]
    assert run["label"] == f"{tmp_path.name}/run" and run["total"] == 4 and run["whole"]
    assert run["metrics"]["reward/f1/mean"] == [None, 0.5, None, 0.75]
    assert run["metrics"]["eval/greedy_accuracy"] == [0.25, None, None, None]
    assert run["x"]["iteration"] == [0, 1, 2, 3]
    assert run["x"]["tokens"] == [0, 40, 90, 99]
    assert run["x"]["minutes"] == pytest.approx([1.0, 1.0 + 2 / 60, 1.05, 1.05 + 4 / 60], rel=1e-5)
    assert run["completions"]["samples"] == [SAMPLE | {"id": 0}] and run["completions"]["iterations"] == [1]
    guide = {name: row for name, *row in run["guide"]}
    assert guide["reward/f1/mean"][:2] == ["Rewards", "mean over completions of one reward function, unweighted"]
    assert list(guide).index("reward/f1/mean") < list(guide).index("kl") < list(guide).index("time/step")
    assert run["status"]["state"] == "silent" and "update 3 of 4" in run["status"]["text"]
    assert page.rows["lr"] == (["1e-06"], False)
    assert page.rows["command"] == (["pretrain_grpo.py --lr 1e-6"], False)
    assert page.rows["torch"] == (["2.13"], False)


def test_the_page_has_the_findings_of_a_run(tmp_path):
    rows = [{"iteration": i, "completion/truncated": 0.5} for i in range(1, 21)]
    (run,) = Page(written(tmp_path, write_run(tmp_path / "run", rows=rows))).data["runs"]
    (finding,) = run["findings"]
    assert finding["metric"] == "completion/truncated" and finding["update"] == 1
    assert finding["cure"].startswith("Above about 0.1: raise --max-completion-length")


def test_a_page_is_told_only_what_is_new(tmp_path):
    folder = write_run(tmp_path / "run", rows=ROWS[:2])
    record = report.Record(folder, "run")
    record.read()
    first = report.part(record, None, 30)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(ROWS[2]) + "\n" + json.dumps(ROWS[3])[:20])  # a row, and a part of the next one
    with open(folder / "completions.jsonl", "a") as file:
        file.write(json.dumps(SAMPLE | {"iteration": 2}) + "\n")
    assert record.read()
    part = report.part(record, tuple(first["cursor"]), 30)
    assert not part["whole"] and part["x"]["iteration"] == [2] and part["x"]["tokens"] == [90]
    assert part["x"]["minutes"] == pytest.approx([1.05], rel=1e-5)
    assert part["metrics"]["reward/f1/mean"] == [None] and "eval/greedy_accuracy" not in part["metrics"]
    assert [(sample["id"], sample["iteration"]) for sample in part["completions"]["samples"]] == [(1, 2)]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(ROWS[3])[20:] + "\n")
    assert record.read() and not record.read()
    part = report.part(record, tuple(part["cursor"]), 30)
    assert part["x"]["iteration"] == [3] and part["completions"]["samples"] == []
    # A resumed run writes its files anew: the page is told all.
    (folder / "new").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:1]))
    (folder / "new").rename(folder / "metrics.jsonl")
    record.read()
    part = report.part(record, tuple(part["cursor"]), 30)
    assert part["whole"] and part["x"]["iteration"] == [0] and record.generation == 1


def test_completions_are_found_by_update_prompt_and_text(tmp_path):
    samples = [SAMPLE | {"iteration": i, "row": i % 2, "completion": f"answer {i}"} for i in range(1, 7)]
    record = report.Record(write_run(tmp_path / "run", samples=samples), "run")
    record.read()

    def found(**query):
        return [sample["iteration"] for sample in report.asked(record.completions, query)]

    assert found(iteration="3") == [3] and found(file="", row="1") == [1, 3, 5] and found(iteration="9") == []
    assert found(text="ANSWER 4", **{"from": "0"}) == [4] and found(text="none", **{"from": "0"}) == []
    part = report.part(record, None, 2)
    assert [sample["iteration"] for sample in part["completions"]["samples"]] == [1, 6]  # of two rollouts
    assert part["completions"]["iterations"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("block", [1, 400, 4 << 20])
def test_a_search_finds_what_a_loop_over_the_rows_finds(tmp_path, monkeypatch, block, ascii_only):
    monkeypatch.setattr(run_folder, "BLOCK", block)
    texts = [
        "Über 1/2",
        "über",
        'say "yes"',
        "back\\slash",
        "two\nlines",
        "数学の答え",
        "ÉCOLE 数学",
        "prompt",
        "😀 ok",
        "<b>",
    ]
    samples = [SAMPLE | {"completion": text, "row": i} for i, text in enumerate(3 * texts)]
    folder = write_run(tmp_path / "run", samples=[])
    with open(folder / "completions.jsonl", "w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample, ensure_ascii=ascii_only) + "\n" + "damaged 数学\n" * (sample["row"] % 2))
    record = report.Record(folder, "run")
    record.read()
    for text in [
        "ÜBER",
        "1/2",
        '"YES"',
        "k\\s",
        "o\nl",
        "数学",
        "école 数",
        "Prompt",
        "😀",
        "<B>",
        "1+1=",
        "damaged",
        "é",
    ]:
        lower = text.lower()
        expected = [s["row"] for s in samples if lower in s["completion"].lower() or lower in s["prompt"].lower()]
        for begin in (0, 17):
            found = record.completions.with_text(text, 99, begin)
            assert [sample["id"] for sample in found] == [row for row in expected if row >= begin], text
        assert [sample["id"] for sample in record.completions.with_text(text, 2)] == expected[-2:]


def test_damaged_lines_of_a_run_that_is_followed_are_left_out_and_named(tmp_path):
    folder = write_run(tmp_path / "run", samples=[SAMPLE, SAMPLE | {"advantage": None}])
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"iteration": 4, "\xff": 1.0}\n' + b"[" * 99999 + b'\n{"iteration": 5, "kl": "x"}\n')
    record = report.Record(folder, "run")
    record.read()
    assert [row["iteration"] for row in record.rows] == [0, 1, 2, 3, 4]
    assert record.rows[-1] == {"iteration": 4, "\ufffd": 1.0}
    assert [text.partition(":")[2].partition(":")[0].split()[0] for text in record.damaged] == ["6", "7", "2"]
    assert len(report.part(record, None, 9)["completions"]["samples"]) == 1


def test_a_run_with_bad_numbers_or_files_does_not_take_the_page_from_the_others(tmp_path):
    """NaN of another program is no value, as null; numbers that are too large, and a folder, are named."""
    bad = write_run(tmp_path / "bad", samples=[SAMPLE, SAMPLE | {"rewards": {"f1": math.nan, "f2": math.inf}}])
    with open(bad / "metrics.jsonl", "a") as file:
        for iteration, value in enumerate(("NaN", str(10**400), "1e999"), 4):
            file.write(f'{{"iteration": {iteration}, "kl": {value}}}\n')
    (bad / "eval_completions.jsonl").mkdir()
    (bad / "environment.json").write_text("{}")
    records = [report.Record(write_run(tmp_path / "good"), "good"), report.Record(bad, "bad")]
    for _ in range(2):  # the second time, too, the same sentences
        for record in records:
            record.read()
        good, shown = Page(report.page(records, 9)).data["runs"]
        assert good["damaged"] == [] and len(good["completions"]["samples"]) == 1
        assert shown["completions"]["samples"][1]["rewards"] == {"f1": None, "f2": None}
        assert shown["x"]["iteration"] == [0, 1, 2, 3, 4] and shown["metrics"]["kl"][-1] is None
        folder, huge, infinite, other = shown["damaged"]
        assert "environment.json has no list 'given'" in other and len(huge) < 300
        assert "eval_completions.jsonl cannot be read: Is a directory" in folder
        assert "metrics.jsonl:6: kl is 1000" in huge and "metrics.jsonl:7: kl is inf" in infinite


@pytest.fixture
def served(tmp_path):
    """A server of a run, and the function that asks it."""
    folder = write_run(tmp_path / "run")
    server = report.server([report.Record(folder, "run")], 30, 0, "secret")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    host, port = server.server_address

    def ask(path):
        try:
            with urllib.request.urlopen(f"http://{host}:{port}{path}") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    yield folder, host, ask
    server.shutdown()
    server.server_close()


def test_the_server_answers_those_who_know_the_address(served):
    folder, host, ask = served
    assert host == "127.0.0.1"
    for path in ("/", "/wrong/", "/secre/poll", "/secret%00/", "/../args.json", "/%C3%A9/"):
        assert ask(path)[0] in (400, 403) and "iteration" not in ask(path)[1]
    code, text = ask("/secret/")
    assert code == 200 and Page(text).data["live"] and "connect-src 'self'" in text
    cursor = ",".join(map(str, Page(text).data["runs"][0]["cursor"]))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 4, "kl": 0.5}\n')
    (part,) = json.loads(ask(f"/secret/poll?cursors={cursor}")[1])
    assert part["x"]["iteration"] == [4] and part["metrics"] == {"kl": [0.5]}
    (sample,) = json.loads(ask("/secret/samples?run=0&table=completions&iteration=1")[1])
    assert sample == SAMPLE | {"id": 0}
    for query in ("samples?run=7&table=completions&iteration=1", "samples", "poll", "poll?cursors=x", "etc/passwd"):
        assert ask(f"/secret/{query}")[0] == 400


def test_the_page_follows_the_run_while_a_search_reads(served, monkeypatch):
    _, _, ask = served
    cursor = ",".join(map(str, Page(ask("/secret/")[1]).data["runs"][0]["cursor"]))
    begun, polled = threading.Event(), threading.Event()

    def slow(*arguments):
        begun.set()
        assert polled.wait(60)
        return []

    monkeypatch.setattr(run_folder.SampleFile, "with_text", slow)
    search = threading.Thread(target=ask, args=["/secret/samples?run=0&table=completions&text=none&from=0"])
    search.start()
    assert begun.wait(60) and ask(f"/secret/poll?cursors={cursor}")[0] == 200
    polled.set()
    search.join(60)


def test_a_port_in_use_and_a_folder_that_is_none_are_refused(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert report.main([str(write_run(tmp_path / "run")), "--serve", port]) == 1
    assert f"--serve {port}: Address already in use; give another port" in capsys.readouterr().err
    assert report.main([str(tmp_path / "absent"), "--serve"]) == 1
    assert "is no folder: give the --save directory" in capsys.readouterr().err


PROFILE = {
    "rank": 1,
    "updates": [11, 12],
    "phases": [
        {"name": "update", "calls": 2, "seconds": 7.0, "busy": 5.2, "communication": 0.25, "only_communication": 0.125}
        | {"waiting": 1.5, "idle": 0.3},
        {"name": "<save>", "calls": 1, "seconds": 2.0, "busy": None, "communication": None, "only_communication": None}
        | {"waiting": None, "idle": None},
    ],
}


def write_profile(run, content):
    (run / "profile").mkdir()
    (run / "profile" / "rank1.phases.json").write_text(json.dumps(content))
    return run


def test_the_phases_of_a_profile_are_shown(tmp_path):
    run = write_run(tmp_path / "{a}")
    assert "<h2>Profile</h2>" not in written(tmp_path, run)
    rows = Page(written(tmp_path, write_profile(run, PROFILE))).rows
    head = next(cells for name, (cells, _) in rows.items() if name.endswith("/{a}, rank 1, updates 11 to 12"))
    assert dict(zip(head, rows["update"][0], strict=True)) == {
        "calls": "2",
        "seconds": "7.000",
        "device busy": "5.200",
        "communication": "0.250",
        "communication alone": "0.125",
        "waiting for launches": "1.500",
        "idle otherwise": "0.300",
    }
    assert rows["<save>"][0] == ["1", "2.000", *"–" * 5]


@pytest.mark.parametrize(
    "change",
    [
        {"phases": [{"name": "update"}]},
        {"updates": [1]},
        {"rank": "1"},
        {"phases": [PROFILE["phases"][0] | {"busy": "x"}]},
    ],
)
def test_a_damaged_profile_is_named(tmp_path, capsys, change):
    run = write_profile(write_run(tmp_path / "a"), PROFILE | change)
    assert report.main([str(run), "-o", str(tmp_path / "report.html")]) == 1
    assert f"{run}/profile/rank1.phases.json is not the phases of a profile" in capsys.readouterr().err


def test_nothing_in_a_run_becomes_markup(tmp_path):
    evil = "</script><script>alert('x')</script><img src=x onerror=alert(1)> & \u2028 \udc80 ]]> <!--"
    sample = SAMPLE | {"prompt": evil, "completion": evil, "tokens": [evil, evil], "rewards": {evil: 1.0}}
    sample |= {"finish_reason": evil, "picked": evil}
    rows = [{"iteration": 1, f"reward/{evil}/mean": 0.5}, {"iteration": 2, f"reward/{evil}/mean": 0.25}]
    environment = ENVIRONMENT | {"command": evil, "device": evil, evil: evil}
    folder = write_run(tmp_path / "<b>run", rows, [sample], {evil: evil, "lr": evil}, environment)
    text = written(tmp_path, folder)
    page = Page(text)
    assert page.tags.count("script") == 2 and "img" not in page.tags and "b" not in page.tags
    assert "onerror" not in page.attributes and "<!--" not in text
    (script,) = (content for name, content in page.scripts if name is None)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in text  # no other script runs
    assert page.data["runs"][0]["completions"]["samples"] == [sample | {"id": 0}]
    assert page.rows["command"][0] == [evil.replace("\udc80", "?")]


def test_nothing_is_loaded_from_anywhere(tmp_path):
    text = written(tmp_path, write_run(tmp_path / "run"))
    assert not {"src", "href", "srcset", "action"} & set(Page(text).attributes)
    assert "default-src 'none'" in text  # and a browser is told so
    # The name of SVG's elements, and the home of the chart library in its heading.
    known = {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
    assert set(re.findall(r"\w+://[^\s\"']+", text)) == known
    assert "@import" not in text and "url(" not in text


def test_what_differs_between_runs_is_marked(tmp_path):
    a = write_run(tmp_path / "a" / "run")
    b = write_run(tmp_path / "b" / "run", args=ARGS | {"lr": 3e-6, "save": "runs/b", "clip_grad": 1.0})
    page = Page(written(tmp_path, a, b))
    marked = {name for name, (_, differs) in page.rows.items() if differs}
    assert marked == {"lr", "save", "clip_grad"}
    assert page.rows["clip_grad"] == (["null", "1.0"], True)  # one of the runs has no such argument
    assert page.rows["lr"] == (["1e-06", "3e-06"], True)
    assert [run["label"] for run in page.data["runs"]] == ["a/run", "b/run"]


def test_completions_of_some_rollouts_go_in():
    assert report.evenly([1, 2, 3], 5) == {1, 2, 3}
    assert report.evenly(list(range(101)), 5) == {0, 25, 50, 75, 100}
    assert report.evenly([4, 8, 9], 1) == {4}


def test_long_completions_of_fewer_rollouts_go_in(tmp_path):
    samples = [SAMPLE | {"iteration": i, "completion": 10_000 * "x"} for i in range(10)]
    record = report.Record(write_run(tmp_path / "run", samples=samples), "run")
    record.read()
    for most, counts in ((10**9, {10}), (2 * 60_000, {5, 6}), (0, {2})):  # half of it for the completions of rollouts
        part = report.part(record, None, 30, most)["completions"]
        assert len({sample["iteration"] for sample in part["samples"]}) in counts and len(part["iterations"]) == 10


def test_a_run_that_goes_on_can_be_shown(tmp_path):
    folder = write_run(tmp_path / "run", samples=[])
    for name in ("metrics.jsonl", "completions.jsonl"):
        with open(folder / name, "a") as file:
            file.write('{"iteration": 4, "rew')
    page = Page(written(tmp_path, folder))
    assert page.data["runs"][0]["x"]["iteration"] == [0, 1, 2, 3]
    assert page.data["runs"][0]["completions"] == {"iterations": [], "prompts": [], "samples": []}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", None, "metrics.jsonl cannot be read"),
        ("metrics.jsonl", "", "metrics.jsonl is empty"),
        ("metrics.jsonl", '{"iteration": 1, "kl": "x"}\n', "metrics.jsonl:1: kl is 'x', which is not a number"),
        ("completions.jsonl", None, "completions.jsonl cannot be read"),
        ("completions.jsonl", "{}\n", "completions.jsonl:1 is not a row of a run"),
        ("completions.jsonl", '{"iteration": 1}\n', "completions.jsonl:1: 'prompt' is missing"),
        ("args.json", None, "args.json cannot be read"),
        ("args.json", "[]", "args.json holds no JSON object"),
        ("environment.json", '{"given"', "environment.json is not JSON"),
        ("args.json", "[" * 9999, "args.json is not JSON"),
        ("environment.json", "{}", "environment.json has no list 'given'"),
    ],
)
def test_a_damaged_or_missing_file_is_named(tmp_path, capsys, file, content, message):
    folder = write_run(tmp_path / "run")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    assert report.main([str(folder), "-o", str(tmp_path / "report.html")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_run_that_stopped_before_its_first_update_says_why(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    (folder / "status.json").write_text(json.dumps({"state": "stopped", "error": "the server is away"}))
    assert report.main([str(folder), "-o", str(tmp_path / "report.html")]) == 1
    assert capsys.readouterr().err.endswith("its first update; it has stopped: the server is away\n")


def test_held_out_completions_are_not_among_those_of_training(tmp_path):
    held_out = [
        {name: SAMPLE[name] for name in ("prompt", "completion", "rewards", "finish_reason", "length", "row")}
        | {"iteration": iteration, "file": "gsm8k", "kind": "greedy", "completion": f"<b>{iteration}"}
        for iteration in (0, 20)
    ]
    folder = write_run(tmp_path / "run")
    (folder / "eval_completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    (run,) = Page(written(tmp_path, folder)).data["runs"]
    assert run["completions"]["iterations"] == [1] and len(run["completions"]["samples"]) == 1
    assert run["held_out"] == {
        "iterations": [0, 20],
        "prompts": [["gsm8k", 7]],
        "samples": [row | {"id": i} for i, row in enumerate(held_out)],
    }
    (folder / "eval_completions.jsonl").write_text(json.dumps(held_out[0] | {"file": 1}) + "\n")
    assert report.main([str(folder), "-o", str(tmp_path / "report.html")]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": ["2"]},
        {"log_probs": [1, "2"]},
        {"log_probs": None},
        {"token_advantages": [0.5]},
        {"advantage": None},
        {"rewards": [1.0]},
        {"rewards": {"f1": True}},
        {"length": "2"},
    ],
)
def test_a_damaged_completion_is_named(tmp_path, capsys, change):
    folder = write_run(tmp_path / "run", samples=[SAMPLE, SAMPLE | change])
    assert report.main([str(folder), "-o", str(tmp_path / "report.html")]) == 1
    assert "completions.jsonl:2: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--rollouts", "0"], "--rollouts 0 must be at least 1"), (["-o", "absent/r.html"], "cannot be written")],
)
def test_bad_options_are_refused(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert report.main([str(write_run(tmp_path / "run")), "-o", "report.html", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["report", "plot_metrics", "generate_metrics_doc"])
def test_the_tools_start_without_torch(tool):
    program = f"import sys, runpy; runpy.run_path({str(TOOL.with_stem(tool))!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
