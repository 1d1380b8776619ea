"""tools/report.py: what made-up runs show in the page, that nothing in them can become markup, and what is refused."""

import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "report.py"
spec = importlib.util.spec_from_file_location("report", TOOL)
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)

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
    assert run["label"] == f"{tmp_path.name}/run"
    assert run["metrics"]["reward/f1/mean"] == [None, 0.5, None, 0.75]
    assert run["metrics"]["eval/greedy_accuracy"] == [0.25, None, None, None]
    assert run["x"]["iteration"] == [0, 1, 2, 3]
    assert run["x"]["tokens"] == [0, 40, 90, 99]
    assert run["x"]["minutes"] == pytest.approx([1.0, 1.0 + 2 / 60, 1.05, 1.05 + 4 / 60], rel=1e-5)
    assert run["completions"] == [SAMPLE] and page.data["rollouts"] == [1]
    assert page.data["meanings"]["reward/f1/mean"][0] == "mean over completions of one reward function, unweighted"
    sections = {section["title"]: section for section in page.data["sections"]}
    assert sections["Learning"] == {"title": "Learning", "names": [], "constants": [["kl", 0.0]]}
    assert sections["Rewards"]["names"] == ["reward/f1/mean"]
    assert page.rows["lr"] == (["1e-06"], False)
    assert page.rows["command"] == (["pretrain_grpo.py --lr 1e-6"], False)
    assert page.rows["torch"] == (["2.13"], False)


def test_seconds_by_phase_add_up_to_the_step():
    phases = report.phase_seconds(ROWS)
    assert phases["iteration"] == [1, 2, 3]  # the evaluation before training is no step
    assert phases["seconds"] == {"rollout": [0.5, 0, 0], "update": [0, 1.0, 1.0], "rest": [1.5, 0, 3.0]}


def test_figures_of_a_run(tmp_path):
    rows = [{"iteration": i, "reward/mean": i / 20, "perf/tokens_per_second": 10.0 * i} for i in range(1, 21)]
    text = written(tmp_path, write_run(tmp_path / "run", rows=rows))
    assert "20 of 4 updates" in text
    assert "<dt>Training reward</dt><dd>0.075 → 0.975</dd>" in text  # means of two values at either end
    assert "<dt>Tokens per second</dt><dd>105</dd>" in text  # the median


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
    assert page.data["runs"][0]["completions"] == [sample]
    assert page.rows["command"][0] == [evil.replace("\udc80", "?")]


def test_nothing_is_loaded_from_anywhere(tmp_path):
    text = written(tmp_path, write_run(tmp_path / "run"))
    assert not {"src", "href", "srcset", "action"} & set(Page(text).attributes)
    assert "default-src 'none'" in text  # and a browser is told so
    assert set(re.findall(r"\w+://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}  # the name of SVG's elements
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


def test_a_run_that_goes_on_can_be_shown(tmp_path):
    folder = write_run(tmp_path / "run", samples=[])
    for name in ("metrics.jsonl", "completions.jsonl"):
        with open(folder / name, "a") as file:
            file.write('{"iteration": 4, "rew')
    page = Page(written(tmp_path, folder))
    assert page.data["runs"][0]["x"]["iteration"] == [0, 1, 2, 3]
    assert page.data["rollouts"] == []


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


def test_held_out_completions_are_shown_by_prompt_and_not_among_those_of_training(tmp_path):
    """A prompt's completions stand in a table by update; markup in them is text."""
    held_out = [
        {name: SAMPLE[name] for name in ("prompt", "completion", "rewards", "finish_reason", "length", "row")}
        | {"iteration": iteration, "file": "gsm8k", "kind": "greedy", "completion": f"<b>{iteration}"}
        for iteration in (0, 20)
    ]
    folder = write_run(tmp_path / "run")
    (folder / "eval_completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    text = written(tmp_path, folder)
    page = Page(text)
    assert page.data["runs"][0]["completions"] == [SAMPLE] and page.data["rollouts"] == [1]
    assert page.rows["0 greedy"] == (["f1 1, f2 not scored", "2, stop", "<b>0"], False)
    assert page.rows["20 greedy"][0][2] == "<b>20"
    assert text.count("<summary>gsm8k, row 7: 1+1=</summary>") == 1
    assert "Held-out completions" not in written(tmp_path, write_run(tmp_path / "without"))
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
