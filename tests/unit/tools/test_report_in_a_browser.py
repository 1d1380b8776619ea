"""The page of tools/report.py in a browser: hostile runs, a run that goes on, runs of different length, and times."""

import csv
import json
import random
import re
import threading
import time
from contextlib import contextmanager

import PIL.Image
import pytest
from browser import Browser, chromium
from test_report import ROWS, SAMPLE, report, write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser():
    with Browser(chromium()) as browser:
        yield browser


def shown(browser, tmp_path, *runs, **window):
    output = tmp_path / "report.html"
    assert report.main([*map(str, runs), "-o", str(output)]) == 0
    browser.open(f"file://{output}", **window)
    browser.wait("document.documentElement.dataset.ready")
    return browser


@contextmanager
def served(folder, num_rollouts=30):
    """The address of the live page of a run."""
    server = report.server([report.Record(folder, "run")], num_rollouts, 0, "secret")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/secret/"
    finally:
        server.shutdown()
        server.server_close()


def outside(browser):
    """What the page asked for besides its own file."""
    return [url for url in browser.requests[1:] if not url.startswith(("data:", "about:", "file:"))]


EVIL = [
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'><svg onload='window.pwned = 1'>",
    "<iframe src='http://127.0.0.1:9/x'></iframe><link rel=stylesheet href=http://127.0.0.1:9/y>",
    "javascript:window.pwned=1",
    "__proto__",
    "constructor",
    "\u2028\u0000\udc80 ]]> <!-- ${window.pwned = 1} `",
]


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_of_a_run_is_executed_or_loaded(browser, tmp_path, evil):
    sample = SAMPLE | {"prompt": evil, "completion": evil, "tokens": [evil, evil], "rewards": {evil: 1.0, "b": 0.5}}
    sample |= {"finish_reason": evil, "picked": evil, "images": [evil, "http://127.0.0.1:9/z.png", 3]}
    sample |= {"response_mask": [1, 0], evil: evil}
    rows = [{"iteration": i, evil: i / 7, f"reward/{evil}/mean": 0.5 / i, "kl": 0.1 * i} for i in range(1, 9)]
    args, environment = {evil: evil, "lr": evil, "train_iters": 8}, {"command": evil, "given": [evil], evil: evil}
    folder = write_run(tmp_path / "run", rows, [sample, sample | {"iteration": 2}], args, environment)
    held_out = {name: sample[name] for name in ("prompt", "completion", "rewards", "finish_reason", "length", "row")}
    (folder / "eval_completions.jsonl").write_text(
        json.dumps(held_out | {"iteration": 1, "file": evil, "kind": evil}) + "\n"
    )
    shown(browser, tmp_path, folder)
    for table in ("completions", "held_out"):
        for mode in ("rollout", "prompt", "all"):
            browser.evaluate(
                f"for (const [id, value] of [['table', '{table}'], ['mode', '{mode}']]) {{"
                " byId(id).value = value; byId(id).dispatchEvent(new Event('change'));"
                " byId(id).dispatchEvent(new Event('input')); }"
                " for (const line of document.querySelectorAll('#completions details')) line.open = true;"
            )
            text = browser.wait("document.querySelector('#completions').textContent")
            if evil.isprintable():
                assert evil in text
    time.sleep(0.2)  # an image that is loaded fails a moment later
    assert browser.evaluate("window.pwned === undefined && ({}).polluted === undefined && !Object.prototype.kl")
    assert browser.evaluate("document.querySelectorAll('img, iframe, link, object').length") == 0
    assert browser.evaluate("document.scripts.length") == 2
    assert browser.errors == [] and outside(browser) == []
    if evil.isprintable() and evil != "__proto__":
        assert browser.evaluate(f"runs[0].metrics.get({json.dumps(evil)})[6]") == 1.0


def test_a_script_that_gets_into_the_page_does_not_run(browser, tmp_path):
    """The second wall: the page allows no script but its own, and no connection."""
    shown(browser, tmp_path, write_run(tmp_path / "run"))
    browser.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"window.pwned = 1\">');"
        "const script = document.createElement('script'); script.textContent = 'window.pwned = 2';"
        "document.body.append(script);"
    )
    time.sleep(0.2)
    assert browser.evaluate("window.pwned === undefined")
    assert browser.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"


def test_megabytes_of_a_completion_do_not_stop_the_page(browser, tmp_path):
    text = "é\n<b>" * 1_000_000
    sample = SAMPLE | {"prompt": text, "completion": text, "length": 4_000_000}
    shown(browser, tmp_path, write_run(tmp_path / "run", samples=[sample]))
    assert browser.evaluate("document.querySelector('#completions').textContent.length") < 100_000
    assert browser.errors == []
    browser.evaluate("document.querySelector('#completions .prompt button').click()")
    assert browser.evaluate("document.querySelector('#completions .prompt').textContent.length") == len(text)


def test_images_are_shown(browser, tmp_path):
    pixel = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
    sample = SAMPLE | {"images": [pixel, "data:image/svg+xml;base64,PHN2Zy8+", "data:text/html,x"]}
    shown(browser, tmp_path, write_run(tmp_path / "run", samples=[sample]))
    assert browser.evaluate("[...document.querySelectorAll('#completions img')].map((image) => image.src)") == [pixel]
    assert browser.wait("document.querySelector('#completions img').naturalWidth") == 1


def test_a_run_is_followed_without_loading_the_page_again(browser, tmp_path):
    folder = write_run(tmp_path / "run", rows=ROWS[:2])
    with served(folder) as url:
        browser.open(url + "#smooth=5&y-axis=log&theme=dark")
        browser.evaluate("window.mark = 1")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(ROWS[2]) + "\n" + json.dumps(ROWS[3])[:15])
            file.flush()
            browser.wait("runs[0].x.iteration.length === 3")
            file.write(json.dumps(ROWS[3])[15:] + "\n")
        with open(folder / "completions.jsonl", "a") as file:
            file.write(json.dumps(SAMPLE | {"iteration": 3, "completion": "a new answer"}) + "\n")
        browser.wait("runs[0].x.iteration.length === 4")
        browser.wait("document.querySelector('#completions').textContent.includes('update 3')")
        status = {"state": "running", "phase": "rollout", "phase_seconds": 1.0, "quiet_seconds": 0.0, "waits": ""}
        status |= {"rollout": {"finished": 3, "running": 5, "tokens": 77}}
        (folder / "status.json").write_text(json.dumps(status))
        browser.wait("document.querySelector('.status').textContent.includes('3 of 8 completions, 77 tokens')")
        assert browser.evaluate("window.mark") == 1 and browser.requests.count(url) == 1
        assert browser.evaluate("[byId('smooth').value, byId('y-axis').value]") == ["5", "log"]
        assert "smooth=5" in browser.evaluate("saveState(), location.hash")
        assert browser.errors == [] and all(request.startswith(url) for request in browser.requests[1:])
    browser.wait("document.querySelector('#live').textContent.includes('does not answer')")


def test_runs_end_where_they_ended(browser, tmp_path):
    runs = []
    for name, count in (("a", 116), ("b", 74)):
        rows = [{"iteration": i, "reward/mean": i / 100, "time/step": 2.0} for i in range(1, count + 1)]
        samples = [SAMPLE | {"iteration": i} for i in range(1 if name == "a" else 4, count, 10)]
        runs.append(write_run(tmp_path / name, rows, samples, {"lr": 1.0 if name == "a" else 2.0, "train_iters": 200}))
    shown(browser, tmp_path, *runs)
    rows = browser.evaluate("curveRows('reward/mean', 100).map(([, label, text]) => [label, text])")
    assert rows[0][1].startswith("1") and rows[1] == ["b", "ended at 74"]
    # Completions of both runs at the chosen update: those of the nearest one.
    browser.evaluate("state.at = 31; buildCompletions()")
    text = browser.evaluate("document.querySelector('#completions').textContent")
    assert "update 31" in text and "update 34, the nearest to 31" in text
    table = browser.evaluate("[...document.querySelectorAll('#comparison tbody tr')].map((row) => row.innerText)")
    assert [line.split()[0] for line in table] == ["a", "b"] and "1.16" in table[0]
    browser.evaluate(
        "[...document.querySelectorAll('#comparison th button')].find((b) => b.textContent === 'updates').click()"
    )
    browser.evaluate(
        "[...document.querySelectorAll('#comparison th button')].find((b) => b.textContent === 'updates').click()"
    )
    first = browser.evaluate("document.querySelector('#comparison tbody th').textContent.trim()")
    assert first == "b" and "lr" in browser.evaluate("document.querySelector('#comparison thead').textContent")


def test_filters_and_one_prompt_through_time(browser, tmp_path):
    samples = [
        SAMPLE | {"iteration": i, "row": row, "completion": f"<answer> {i} of {row}", "rewards": {"f1": i / 10}}
        for i in (1, 5, 9)
        for row in (7, 8, 8)
    ]
    shown(browser, tmp_path, write_run(tmp_path / "run", samples=samples))

    def lines(**values):
        for name, value in values.items():
            browser.evaluate(
                f"byId('{name}').value = {json.dumps(value)}; byId('{name}').dispatchEvent(new Event('input'))"
            )
        return browser.evaluate("[...document.querySelectorAll('#completions .line q')].map((one) => one.textContent)")

    assert browser.evaluate("document.querySelector('#completions .count').textContent") == "2 equal"
    assert len(lines(mode="all")) == 9
    assert lines(text="OF 7") == ["<answer> 1 of 7", "<answer> 5 of 7", "<answer> 9 of 7"]
    assert lines(**{"reward-from": "0.5"}) == ["<answer> 5 of 7", "<answer> 9 of 7"]
    assert lines(text="", **{"reward-from": "", "turns-from": "2"}) == []
    browser.evaluate("byId('turns-from').value = ''; showPrompt('|7')")
    assert lines() == ["<answer> 1 of 7", "<answer> 5 of 7", "<answer> 9 of 7"]


def test_ten_thousand_updates_are_drawn_soon(browser, tmp_path):
    """A second on a quiet core (docs/performance); a busy machine may take some of them."""
    noise = random.Random(0)
    names = [f"reward/f{k}/mean" for k in range(60)]
    rows = [{"iteration": i, "time/step": 1.0} | {name: noise.random() for name in names} for i in range(1, 10_001)]
    rows[5000]["reward/f0/mean"] = 1e6  # one spike
    shown(browser, tmp_path, write_run(tmp_path / "run", rows))
    assert int(browser.evaluate("document.documentElement.dataset.ready")) < 10_000
    low, high = browser.wait(
        "document.querySelector('figure').panel.plot && document.querySelector('figure').panel.ranges.y"
    )
    assert low <= 0.0 and high < 2.0  # the spike does not flatten the panel
    assert browser.evaluate("document.querySelector('figure').panel.plot.data[0].length") < 1000  # bins
    least, most = browser.evaluate(
        "document.querySelector('figure').panel.plot.data.slice(1, 3).map((c) => c.slice(0, 50))"
    )
    assert all(a <= b for a, b in zip(least, most, strict=True)) and max(most) <= 1.0
    seconds = browser.evaluate(
        "(() => { const start = performance.now(); setZoom([2000, 4000]); return performance.now() - start; })()"
    )
    assert seconds < 10_000
    assert browser.evaluate("document.querySelector('figure').panel.ranges.x") == [2000, 4000]
    assert "zoom=2000%2C4000" in browser.evaluate("location.hash") and browser.errors == []


def test_an_enlarged_panel_is_saved_as_a_picture_and_as_a_table(browser, tmp_path):
    rows = [{"iteration": i, "reward/mean": i / 100, "time/step": 2.0, "tokens/total": 7 * i} for i in range(1, 31)]
    rows[9]["reward/mean"] = None
    got = tmp_path / "got"
    got.mkdir()
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(got))
    shown(browser, tmp_path, write_run(tmp_path / 'a "quoted", one', rows), write_run(tmp_path / "b", rows[:5]))
    figure = "[...document.querySelectorAll('#curves figure')].find((one) => one.dataset.metric === 'reward/mean')"
    browser.evaluate(f"[...{figure}.querySelectorAll('button')].find((one) => one.textContent === '⤢').click()")
    browser.wait("byId('enlarged').open && byId('enlarged').querySelector('figure').panel.plot")
    assert "When it goes wrong" in browser.evaluate("byId('enlarged').innerText")

    def saved(label):
        browser.evaluate(
            f"[...byId('enlarged').querySelectorAll('button')].find((one) => one.textContent === '{label}').click()"
        )
        end = time.monotonic() + 60
        while not (files := list(got.glob(f"*.{label.lower()}"))):
            assert time.monotonic() < end, f"{label} wrote no file"
            time.sleep(0.02)
        return files[0]

    table = list(csv.reader(saved("CSV").read_text().splitlines()))
    assert table[0] == ["run", "update", "tokens", "minutes", "reward/mean"] and len(table) == 1 + 29 + 5
    assert table[1] == ['a "quoted", one', "1", "7", table[1][3], "0.01"] and float(table[1][3]) == pytest.approx(
        2 / 60
    )
    picture = PIL.Image.open(saved("PNG")).convert("RGB")
    assert picture.width > 800 and len(picture.getcolors(1 << 24)) > 20  # lines, axes and names are drawn
    corner = browser.evaluate("paint('panel')")
    assert picture.getpixel((2, 2)) == tuple(int(part) for part in re.findall(r"\d+", corner)[:3])
    browser.evaluate("byId('enlarged').close()")
    assert browser.errors == []


def test_what_is_known_of_an_update_only_as_a_whole_is_told(browser, tmp_path):
    """The trainer's probabilities and the clipping are computed within an update: the log has their means."""
    rows = [row | {"mismatch/mean_abs": 0.0123, "clip/high": 0.25} for row in ROWS]
    shown(browser, tmp_path, write_run(tmp_path / "run", rows))
    text = browser.evaluate("document.querySelector('#completions').innerText")
    assert "all tokens of update 1:" in text and "mismatch/mean_abs 0.0123" in text and "clip/high 0.25" in text
    assert "Clipped tokens are not marked" in browser.evaluate("byId('completions-note').textContent")
    browser.evaluate("byId('colour').value = 'trainer'; byId('colour').dispatchEvent(new Event('input'))")
    assert "within its updates" in browser.evaluate("byId('completions-note').textContent")
    logged = SAMPLE | {"rollout_log_probs": [-0.5, None], "clipped": [1, 0]}
    shown(browser, tmp_path, write_run(tmp_path / "other", ROWS, [logged]))
    assert browser.evaluate("byId('completions-note').textContent").startswith("Underlined: the rollout importance")
    assert browser.evaluate("document.querySelector('.tokens .clipped').textContent") == SAMPLE["tokens"][0]


def test_a_live_page_forgets_the_oldest_completions_and_asks_for_them_again(browser, tmp_path):
    samples = [SAMPLE | {"iteration": i, "completion": f"answer {i}"} for i in range(1, 6)]
    folder = write_run(tmp_path / "run", ROWS, samples)
    with served(folder) as url:
        browser.open(url)
        browser.evaluate("limits.kept = 100_000")
        picture = "data:image/gif;base64," + "A" * 30_000
        with open(folder / "completions.jsonl", "a") as file:
            file.write(json.dumps(SAMPLE | {"iteration": 6, "completion": "answer 6", "images": [picture]}) + "\n")
        kept = "[...runs[0].completions.samples.values()].map((sample) => sample.iteration)"
        browser.wait(f"{kept}.at(-1) === 6")
        assert browser.evaluate(kept) == [3, 4, 5, 6]  # 15 kB each, and the picture
        browser.evaluate("state.at = 1; buildCompletions()")
        browser.wait("document.querySelector('#completions .sample')?.innerText.includes('update 1,')")
        assert browser.evaluate(kept) == [3, 4, 5, 6, 1] and browser.errors == []


def test_ticks_of_updates_are_whole_numbers(browser, tmp_path):
    rows = [{"iteration": i, "reward/mean": i / 10, "time/step": 30.0} for i in range(1, 4)]
    shown(browser, tmp_path, write_run(tmp_path / "run", rows))
    browser.wait("document.querySelector('figure').panel.plot")
    ticks = "document.querySelector('figure').panel.plot.axes[0]._splits"
    assert browser.evaluate(ticks) == [0, 1, 2, 3]
    browser.evaluate("byId('x-axis').value = 'minutes'; byId('x-axis').dispatchEvent(new Event('change'))")
    browser.wait(f"{ticks}.some((tick) => tick % 1)")  # 1.5 minutes in all


def test_a_search_asks_the_server_once_for_each_row(browser, tmp_path):
    samples = [SAMPLE | {"iteration": i, "completion": f"found {i}"} for i in range(1, 60)]
    folder = write_run(tmp_path / "run", ROWS, samples)
    with served(folder, num_rollouts=2) as url:
        browser.open(f"{url}#mode=all")
        for text in ("fou", "foun", "found", "found 5"):  # typed
            browser.evaluate(f"byId('text').value = '{text}'; byId('text').dispatchEvent(new Event('input'))")
        browser.wait("document.querySelectorAll('#completions .line').length === 11")  # 5 and 50 to 59
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(ROWS[3] | {"iteration": 4}) + "\n")
        browser.wait("runs[0].x.iteration.length === 5")
        time.sleep(0.5)
        asked = [request for request in browser.requests if "samples?" in request and "text=" in request]
        assert len(asked) == 1 and asked[0].endswith("from=0")
        with open(folder / "completions.jsonl", "a") as file:
            file.write(json.dumps(SAMPLE | {"iteration": 60, "completion": "found 5 again"}) + "\n")
        browser.wait("runs[0].cursor[2] === 60")
        browser.evaluate("buildCompletions()")
        browser.wait("document.querySelectorAll('#completions .line').length === 12")
