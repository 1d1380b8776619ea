"""Files that are streamed (small blocks stand for large ones): order, memory, resume, blends, rows left out."""

import json
import os
import pickle
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from bad_input_bench import GOOD
from bad_input_runs import TRAIN, launch, model  # noqa: F401 (a fixture)
from hypothesis import given, settings
from hypothesis import strategies as st
from run_files import json_lines, metrics_of
from test_prompts import Characters

from megatron_grpo.data import prompts, row_files, sampler
from megatron_grpo.data.blend import read_blend
from megatron_grpo.data.prompts import PromptDataset, draw
from megatron_grpo.data.row_files import Blocks, ParquetRows, RowFiles, read_rows
from megatron_grpo.data.sampler import BlendedSampler, PromptSampler
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError

ROW = 1024  # bytes that a short row counts for


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 rows, windows of 4 blocks; more than 10 rows are streamed."""
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 4 * ROW)
    monkeypatch.setattr(sampler, "WINDOW_BYTES", 16 * ROW)
    monkeypatch.setattr(prompts, "WINDOW_BYTES", 16 * ROW)
    monkeypatch.setattr(prompts, "CHECKED_BYTES", 10 * ROW)


def rows(count, begin=0):
    return [{"prompt": str(number), "answer": number} for number in range(begin, begin + count)]


def jsonl(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def parquet(path, lines, row_group_size=10):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), path, row_group_size=row_group_size)
    return path


def dataset(*words, flags=""):
    return PromptDataset(words, Characters(), parse_args(flags.split()))


def answers(found):
    return [prompt.row["answer"] for prompt in found]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_every_row_is_found_in_any_order(tmp_path, write):
    path = write(tmp_path / f"a.{write.__name__}", rows(103))
    files = RowFiles([path, path], 8 * ROW)
    assert len(files) == 206 and files.row_bounds.tolist() == [0, 103, 206]
    for number in [*range(206), *np.random.default_rng(0).permutation(206)]:
        file, block, index, where = files.find(int(number))
        assert file.row(block, index)["answer"] == number % 103
        assert where == (f"{path}:{number % 103 + 1}" if write is jsonl else f"{path}, row {number % 103 + 1}")
        assert sum(files.blocks.bytes[b] for b in files._cached_blocks) <= 12 * ROW
    assert [row["answer"] for _, row in read_rows(path)] == list(range(103))


@pytest.mark.parametrize("size", [1, 3, 4, 5, 99])
def test_arrow_may_give_a_row_group_in_batches_of_any_size(tmp_path, size):
    path = parquet(tmp_path / "a.parquet", rows(23), row_group_size=23)
    file = ParquetRows(path)
    batches = file._file.read().to_batches(size)
    file._file = SimpleNamespace(iter_batches=lambda *_, **__: iter(batches))
    assert file.blocks.rows.tolist() == [4, 4, 4, 4, 4, 3]
    for block in (0, 1, 5, 2, 2, 4):
        table = file.read(block)
        assert [file.row(table, i)["answer"] for i in range(table.num_rows)] == list(range(23))[4 * block :][:4]


@given(st.lists(st.sampled_from(["", " ", "\t\r", "{}", ' {"a": 1} \r', '{"a": "é"}']), max_size=12), st.booleans())
@settings(deadline=None)
def test_lines_are_those_that_python_sees(tmp_path_factory, lines, ends):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(("\n".join(lines) + "\n" * ends).encode())
    expected = [
        (f"{path}:{number}", json.loads(line))
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1)
        if line.strip()
    ]
    for scan in (1, 2, 3, 2**24):  # chunks that end anywhere
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_files, "_SCAN_BYTES", scan)
            assert list(read_rows(path)) == expected


blocks_of_rows = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=12)


def made_up(blocks):
    count, steps = zip(*blocks, strict=True)
    return Blocks(np.array(count), np.array(count) * ROW, np.cumsum([bool(step) for step in steps]))


@given(blocks_of_rows, st.integers(0, 99), st.booleans(), st.integers(0, 60))
@settings(deadline=None)
def test_an_epoch_of_blocks_has_every_row_once_and_each_block_in_one_window(blocks, seed, shuffle, before):
    blocks = made_up(blocks)
    total = int(blocks.rows.sum())
    order = PromptSampler(total, seed, shuffle, blocks=blocks)
    epochs = [order.next(total) for _ in range(2)]
    block_of = np.repeat(np.arange(len(blocks.rows)), blocks.rows)
    for epoch in epochs:
        assert sorted(epoch) == list(range(total))
        assert shuffle or epoch == sorted(epoch)
        # Where a window ends nobody outside knows; but every block comes within one window's rows and its own.
        for block in range(len(blocks.rows)):
            at = np.flatnonzero(block_of[epoch] == block)
            assert at[-1] - at[0] < 16 + 2 * blocks.rows.max()
        # The parts of a row group begin one after the other, or share a window.
        first = [int(np.flatnonzero(block_of[epoch] == block)[0]) for block in range(len(blocks.rows))]
        for a, b in pairwise(range(len(blocks.rows))):
            if blocks.groups[a] == blocks.groups[b]:
                assert first[a] - first[b] < 16 + blocks.rows.max()
    again, resumed = (PromptSampler(total, seed, shuffle, blocks=blocks) for _ in range(2))
    whole = PromptSampler(total, seed, shuffle, blocks=blocks).next(before + total)
    assert again.next(before) == whole[:before]
    resumed.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert resumed.next(total) == whole[before:]


def test_a_streamed_epoch_reads_each_block_once(tmp_path, monkeypatch):
    data = dataset(
        parquet(tmp_path / "a.parquet", rows(200), row_group_size=50), jsonl(tmp_path / "b.jsonl", rows(99, 200))
    )
    assert data.streamed and len(data) == 299
    reads = Counter()
    for file in data._files.files:

        def read(block, file=file, read=file.read):
            reads[file, block] += 1
            return read(block)

        monkeypatch.setattr(file, "read", read)
    order = data.sampler()
    found = answers(draw(data, order, 299))
    assert sorted(found) == list(range(299)) and found != sorted(found)
    assert set(reads.values()) == {1} and len(reads) == 4 * 13 + 25
    assert answers(draw(data, order, 299)) != found  # another epoch


def test_small_files_keep_the_order_of_a_plain_permutation(tmp_path):
    data = dataset(jsonl(tmp_path / "a.jsonl", rows(9)), flags="--seed 5")
    assert not data.streamed
    assert answers(draw(data, data.sampler(), 9)) == np.random.default_rng((5, 0)).permutation(9).tolist()


FILTERS = "--bad-rows skip --max-prompt-length 3 --truncation-strategy delete --min-pass-rate 0.5"


def mixed(count):
    """Of six rows one is bad, one too long, one too hard."""
    lines = [{"prompt": "ok", "answer": n, "pass_rate": 0.5 + n / 1000} for n in range(count)]
    for n in range(0, count, 6):
        lines[n] |= {"prompt": None}
    for n in range(1, count, 6):
        lines[n] |= {"prompt": "long"}
    for n in range(2, count, 6):
        lines[n] |= {"pass_rate": 0.1}
    return lines, [n for n in range(count) if n % 6 > 2]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_rows_that_do_not_fit_are_left_out_and_counted_and_a_resume_is_exact(tmp_path, write, capsys):
    lines, good = mixed(60)
    path = write(tmp_path / f"a.{write.__name__}", lines)
    data = dataset(path, flags=FILTERS)
    order = data.sampler()
    taken = answers(draw(data, order, 17))
    state = json.loads(json.dumps(order.state_dict()))
    taken += answers(draw(data, order, 13))
    assert sorted(taken) == good and order.consumed == 30 and order.left_out <= 30
    resumed = dataset(path, flags=FILTERS)
    order_again = resumed.sampler()
    order_again.load_state_dict(state)
    assert answers(draw(resumed, order_again, 13)) == taken[17:]
    assert order_again.state_dict() == order.state_dict()
    said = capsys.readouterr().out
    assert "left out " + f"{path}" in said and '"prompt"' in said
    # Checked at the start, the same rows are left.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "CHECKED_BYTES", 2**20)
        assert answers(dataset(path, flags=FILTERS)) == good
    said = capsys.readouterr().out
    assert "left out 10 of 60 prompts that are invalid" in said and "left out 10 of 60 prompts that are longer" in said
    assert "left out 10 of 60 prompts with a pass_rate" in said


def test_a_bad_row_ends_a_streamed_run_when_its_turn_comes(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*rows(40), {"prompt": 3}])
    data = dataset(path)
    with pytest.raises(GrpoError, match=r'a\.jsonl:41: "prompt" must be .* found a number \(give --bad-rows skip'):
        draw(data, data.sampler(), 41)


def test_nothing_that_can_be_used_is_said(tmp_path):
    data = dataset(
        jsonl(tmp_path / "a.jsonl", rows(20, 100)), flags="--max-prompt-length 2 --truncation-strategy delete"
    )
    with pytest.raises(GrpoError, match=r"no prompts left in all files: left out .* longer than --max-prompt-length 2"):
        draw(data, data.sampler(), 1)


def test_curriculum_looks_at_all_rows_first_whatever_the_size(tmp_path):
    lines, good = mixed(60)
    data = dataset(jsonl(tmp_path / "a.jsonl", lines), flags=FILTERS + " --curriculum")
    assert not data.streamed
    assert answers(draw(data, data.sampler(), 30)) == good[::-1]  # the rate rises with the number


weights_of = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6)


@given(weights_of, st.integers(1, 300))
@settings(deadline=None)
def test_a_blend_is_within_one_of_its_weights_after_every_draw(weights, draws):
    """And within Tijdeman's bound 1 - 1/(2k - 2)."""
    count = len(weights)
    order = BlendedSampler([PromptSampler(7, 0) for _ in weights], weights, range(0, 7 * count, 7))
    drawn = np.zeros(count)
    share = np.array(weights) / sum(weights)
    bound = 1 - 1 / (2 * count - 2) if count > 1 else 0
    for n in range(1, draws + 1):
        drawn[order.next(1)[0] // 7] += 1
        assert np.abs(drawn - n * share).max() <= bound + 1e-6


@given(weights_of.filter(lambda weights: len(weights) == 2), st.integers(1, 99))
@settings(deadline=None)
def test_two_files_come_as_in_megatron_lms_blends(weights, draws):
    """Its rule: always the data set whose n w - drawn is the largest; ties aside, which rounding decides."""
    order = BlendedSampler([PromptSampler(7, 0), PromptSampler(7, 0)], weights, [0, 7])
    drawn = np.zeros(2)
    for n in range(1, draws + 1):
        lags = np.array(weights) / sum(weights) * n - drawn
        source = order.next(1)[0] // 7
        assert lags[source] >= lags.max() - 1e-6
        drawn[source] += 1


def test_weighted_files_are_resumed_exactly_and_replace_rows_of_their_own(tmp_path):
    lines, _ = mixed(60)
    words = ["0.75", jsonl(tmp_path / "a.jsonl", lines), "0.25", parquet(tmp_path / "b.parquet", rows(12, 100))]
    flags = FILTERS.replace("--min-pass-rate 0.5", "")
    data = dataset(*words, flags=flags)
    order = data.sampler()
    taken = answers(draw(data, order, 20))
    assert sum(answer >= 100 for answer in taken) == 5  # although a quarter and more of the others are left out
    state = json.loads(json.dumps(order.state_dict()))
    order.give_back([order.next(1)[0]])
    more = draw(data, order, 21)
    again = dataset(*words, flags=flags)
    order_again = again.sampler()
    order_again.load_state_dict(state)
    assert answers(draw(again, order_again, 21)) == answers(more)
    assert order_again.consumed == order.consumed == 41
    changed = dataset("0.5", words[1], "0.5", words[3], flags=flags).sampler()
    with pytest.raises(GrpoError, match=r"--train-data-path \(weights\) was .* and is now"):
        changed.load_state_dict(state)
    with pytest.raises(GrpoError, match="weights"):
        changed.load_state_dict(PromptSampler(72, 1234).state_dict())


def test_small_weighted_files(tmp_path):
    data = dataset("2", jsonl(tmp_path / "a.jsonl", rows(4)), "1", jsonl(tmp_path / "b.jsonl", rows(5, 10)))
    assert not data.streamed
    taken = answers(draw(data, data.sampler(), 12))
    assert sorted(taken[:12])[:8] == [0, 0, 1, 1, 2, 2, 3, 3] and sum(answer >= 10 for answer in taken) == 4
    (tmp_path / "b.jsonl").write_text("")
    for other in (tmp_path / "a.jsonl", jsonl(tmp_path / "c.jsonl", rows(50))):
        with pytest.raises(GrpoError, match=r"b\.jsonl has a weight in --train-data-path but no prompts"):
            dataset("2", other, "1", tmp_path / "b.jsonl")


def test_blends_in_words():
    assert read_blend(["a.jsonl", "b.jsonl"]) == (["a.jsonl", "b.jsonl"], None)
    assert read_blend(["0.7", "a", "3", "b"]) == (["a", "b"], [0.7, 3.0])
    for words in (["0.7", "a", "b"], ["0.7", "a", "b", "0.3"], ["a", "0.7"], ["0.7"], ["0.5", "0.5"]):
        with pytest.raises(GrpoError, match="give a weight before each file"):
            read_blend(words)
    for weight in ("0", "-1", "inf", "nan"):
        with pytest.raises(GrpoError, match="weights must be finite and greater than 0"):
            read_blend([weight, "a"])


def test_a_damaged_row_group_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", [{"prompt": "x" * 5000 + str(n)} for n in range(40)], row_group_size=20)
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    data = dataset(path, flags="--max-prompt-length 9000")
    with pytest.raises(GrpoError, match=r"a\.parquet: row group 1 is damaged"):
        draw(data, data.sampler(), 40)


def test_a_streamed_run_that_was_stopped_goes_on_with_the_same_prompts(tmp_path, model):
    """pretrain_grpo.py itself, with weights, bad rows and long ones, and a stub for the engine."""
    bad, long = {"prompt": 3, "answer": "x"}, {"prompt": "123456789+", "answer": "x"}
    lines = [bad if n % 7 == 3 else long if n % 7 == 5 else {"prompt": f"{n}+1=", "answer": "1"} for n in range(60)]
    words = ["0.7", jsonl(tmp_path / "a.jsonl", lines), "0.3", parquet(tmp_path / "b.parquet", rows(40))]
    flags = f"{GOOD} --load-hf {model} --bad-rows skip --truncation-strategy delete --micro-batch-size 16".split()
    flags += ["--num-completions-to-log", "16", "--train-data-path", *map(str, words)]

    def train(save, *more):
        assert launch(TRAIN, [*flags, "--save", str(save), *more]) == 0
        read = metrics_of(save)
        logged = json_lines(save / "completions.jsonl")
        counts = [(row["consumed/prompts"], row["consumed/left_out"]) for row in read if "consumed/prompts" in row]
        return counts, [(line["iteration"], line["row"]) for line in logged]

    whole = train(tmp_path / "whole", "--train-iters", "6")
    train(tmp_path / "parts", "--train-iters", "6", "--exit-interval", "3")
    assert train(tmp_path / "parts", "--train-iters", "6", "--load", str(tmp_path / "parts")) == whole
    counts, logged = whole
    assert [used for used, _ in counts] == [4, 8, 12, 16, 20, 24] and counts[-1][1] > 0
    assert len({row for _, row in logged}) == 24
    assert sum(row >= 60 for row in {row for _, row in logged}) == 7  # 0.3 * 24, to within one


@pytest.mark.parametrize("count", [4, 30])  # checked at the start, and streamed
@pytest.mark.parametrize("flags", ["", "--curriculum", "--bad-rows skip --min-pass-rate 0.2", "--no-shuffle"])
@pytest.mark.parametrize("write", [jsonl, parquet])
def test_other_ranks_have_the_data_of_rank_0_without_its_work(tmp_path, monkeypatch, write, flags, count):
    lines = [row | {"pass_rate": number / count} for number, row in enumerate(rows(count))]
    lines[3]["prompt"] = "" if "skip" in flags else "3"
    words = ["0.7", str(write(tmp_path / "a", lines)), "0.3", str(write(tmp_path / "b", lines))]
    for place in (1, 3):
        suffix = ".jsonl" if write is jsonl else ".parquet"
        words[place] = str((tmp_path / words[place]).rename(words[place] + suffix))
    first = dataset(*words, flags=flags)
    first.first(1)
    reading = pickle.loads(pickle.dumps(first.reading()))
    monkeypatch.setattr(row_files.JsonLines, "_scan", lambda self: pytest.fail("the file is read again"))
    tokenizer, encode, encoded = Characters(), Characters.encode, []
    monkeypatch.setattr(Characters, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    other = PromptDataset(words, tokenizer, parse_args(flags.split()), read_by_rank_0=reading)
    assert not encoded and other.streamed == first.streamed == (count == 30 and "curriculum" not in flags)
    assert (len(other), other.engine_decodes, other.summary()) == (len(first), first.engine_decodes, first.summary())
    ours, theirs = first.sampler(), other.sampler()
    for _ in range(3):
        assert answers(draw(other, theirs, 7)) == answers(draw(first, ours, 7))
    assert theirs.state_dict() == ours.state_dict()


@pytest.mark.parametrize("change", ["overwritten", "appended", "touched", "renamed"])
def test_a_file_that_changes_after_the_start_gives_all_ranks_the_same_rows_or_none(tmp_path, change):
    """Rank 0 has read all rows; another rank reads those that it draws later."""
    path = jsonl(tmp_path / "a", rows(4)).rename(tmp_path / "a.jsonl")
    first = dataset(str(path))
    other = PromptDataset([str(path)], Characters(), parse_args([]), read_by_rank_0=first.reading())
    expected, text = answers(draw(first, first.sampler(), 4)), path.read_text()
    if change == "renamed":
        (tmp_path / "new").write_text(text.swapcase())
        (tmp_path / "new").rename(path)
    elif change != "touched":
        path.write_text(text + text if change == "appended" else text.swapcase())
    os.utime(path, ns=(1, 1))
    if change == "overwritten":
        with pytest.raises(GrpoError, match=r"was changed on host \S+ after the start"):
            draw(other, other.sampler(), 4)
    else:
        assert answers(draw(other, other.sampler(), 4)) == expected


def test_rank_0_tells_of_the_file_that_it_has_read(tmp_path):
    """Not of one that took its name meanwhile, as long as the first."""
    path = jsonl(tmp_path / "a", rows(4)).rename(tmp_path / "a.jsonl")
    first = dataset(str(path))
    (tmp_path / "new").write_text(path.read_text().swapcase())
    (tmp_path / "new").rename(path)
    with pytest.raises(GrpoError, match="another content on host"):
        PromptDataset([str(path)], Characters(), parse_args([]), read_by_rank_0=first.reading())


@pytest.mark.parametrize("count", [4, 400])  # shorter and longer than the samples of a file
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_file_that_grows_during_the_start_is_the_same_file(tmp_path, count, end):
    """A writer appends rows after rank 0 has read them, also behind a last line without an end."""
    path = jsonl(tmp_path / "a", rows(count)).rename(tmp_path / "a.jsonl")
    text = path.read_text().rstrip("\n") + end
    path.write_text(text)
    first = dataset(str(path))
    path.write_text(text + ("" if end else "\n") + jsonl(tmp_path / "b", rows(9, count)).read_text())
    other = PromptDataset([str(path)], Characters(), parse_args([]), read_by_rank_0=first.reading())
    assert len(other) == len(first) == count
    assert answers(draw(other, other.sampler(), count)) == answers(draw(first, first.sampler(), count))
