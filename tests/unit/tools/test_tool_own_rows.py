"""tools/data/own_rows.py on tables as users have them, written for this test."""

import csv
import datetime
import json
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from run_files import json_lines

from tools.data import own_rows

COLUMNS = ["--prompt-column", "q", "--answer-column", "a"]


def converted(tmp_path, source, *words):
    code = own_rows.main(["--input", str(source), "--output", str(tmp_path / "out.jsonl"), *words])
    return code, json_lines(tmp_path / "out.jsonl") if (tmp_path / "out.jsonl").exists() else None


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_every_form_of_a_table(tmp_path, suffix):
    """A spreadsheet's byte-order mark, line breaks in cells, other scripts: the same rows from each form."""
    rows = [
        {"q": "Was ist 3 + 4?\nNur die Zahl – 😀", "a": "7", "level": "1"},
        {"q": 'Say "2, 3"', "a": "2, 3", "level": "2"},
        {"q": "5 と 6 の合計は？", "a": "11", "level": "1"},
    ]
    source = tmp_path / f"in.{suffix}"
    if suffix == "csv":
        with source.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif suffix == "tsv":  # has no line breaks in cells, and no quotes around them
        rows[0]["q"] = '"Was" ist 3 + 4? 😀'
        source.write_text(
            "".join("\t".join(cells) + "\r\n" for cells in [rows[0], *(r.values() for r in rows)]), "utf-8-sig"
        )
    elif suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    else:
        text = json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows))
        source.write_text(text)
    code, found = converted(tmp_path, source, *COLUMNS, "--instruction", "Short.")
    assert code == 0
    assert found == [
        {"prompt": [{"role": "user", "content": f"{row['q']}\n\nShort."}], "answer": row["a"], "level": row["level"]}
        for row in rows
    ]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (7, "7"),
        (7.0, "7"),
        (0.5, "0.5"),
        ([7], "7"),
        (" 7 ", "7"),
        ("[7]", "7"),
        ("[0, 1]", "[0, 1]"),
        ("x = 2", "x = 2"),
    ],
)
def test_an_answer_is_text(tmp_path, answer, text):
    (tmp_path / "in.jsonl").write_text(json.dumps({"q": "1?", "a": answer}))
    code, found = converted(tmp_path, tmp_path / "in.jsonl", *COLUMNS)
    assert (code, found[0]["answer"]) == (0, text)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"q": "", "a": "1"}, '"q" is empty'),
        ({"q": "  ", "a": "1"}, '"q" is empty'),
        ({"q": None, "a": "1"}, '"q" must be a text, found null'),
        ({"q": 3, "a": "1"}, '"q" must be a text, found a number'),
        ({"q": "1?", "a": None}, 'no answer in "a"'),
        ({"q": "1?", "a": ""}, 'no answer in "a"'),
        ({"q": "1?", "a": [1, 2]}, "has several values, [1, 2]: give one, or compare with all of them in a reward"),
        ({"q": "1?", "a": float("nan")}, 'no answer in "a"'),
        ({"q": "1?", "a": True}, '"a" is True: write the text that the policy should answer, such as yes'),
        ({"q": "1?", "a": {"x": 1}}, '"a" must be a text or a number, found an object: leave out --answer-column'),
        ({"q": [{"role": "user", "content": "1?"}], "a": "1"}, "chat messages need no conversion"),
        ({"question": "1?", "a": "1"}, 'no column "q" (--prompt-column), found question, a'),
        ({"q": "first?", "a": "2"}, "the answer is '2', and '1' in an earlier row with the same prompt"),
    ],
)
def test_a_bad_row_is_named_or_left_out(tmp_path, capsys, row, message):
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, [{"q": "first?", "a": "1"}, row])))
    assert converted(tmp_path, tmp_path / "in.jsonl", *COLUMNS) == (1, None)
    error = capsys.readouterr().err
    assert "in.jsonl:2: " in error and message in error
    code, found = converted(tmp_path, tmp_path / "in.jsonl", *COLUMNS, "--bad-rows", "skip")
    assert (code, [row["answer"] for row in found]) == (0, ["1"])


def test_repeated_rows_are_left_out_and_columns_are_kept(tmp_path, capsys):
    rows = [{"q": "1?", "n": 1}, {"q": "1?", "n": 2}, {"q": "1?", "n": 1}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, found = converted(tmp_path, tmp_path / "in.jsonl", "--prompt-column", "q", "--prompt-style", "plain")
    assert (code, found) == (0, [{"prompt": "1?", "n": 1}, {"prompt": "1?", "n": 2}])
    assert "left out 1 repeated rows" in capsys.readouterr().out


def test_many_rows_with_one_error_are_three_lines_and_a_number(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "1"}\n' * 300)
    assert converted(tmp_path, tmp_path / "in.jsonl", *COLUMNS)[0] == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and lines[3].startswith('297 more rows: no column "q"')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q,a\n1,2,3\n", "more or fewer"),
        ("q,a\n1\n", "more or fewer"),
        (b"q,a\n\xff,1\n", "position 4: invalid start byte: save it in UTF-8, or convert it: iconv -f ENCODING -t"),
        ("q,a\n1?,1\n".encode("utf-16"), "or convert it: iconv -f UTF-16 -t UTF-8"),
        ("q,a\n", "in.csv: no rows"),
        ('q,a\n1?,1\n2?,"2\n3?,3\n', "in.csv: the row that begins in line 3 has a wrong quote"),
        ('q,a\n"Why" he asked,1\n', "in.csv: the row that begins in line 2 has a wrong quote"),
        ('q,"a\n1?,1\n', "in.csv: the row that begins in line 1 has a wrong quote"),
        ("q,a,a\n1?,1,9\n", 'in.csv: the header has "a" more than once'),
        ("q;a\n1?;1\n", "the header has ';' and no ','"),
    ],
)
def test_a_broken_table(tmp_path, capsys, content, message):
    (tmp_path / "in.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert converted(tmp_path, tmp_path / "in.csv", *COLUMNS) == (1, None)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_values_of_parquet_that_json_lacks(tmp_path, capsys, suffix):
    """Dates and decimals are text in JSON lines, and stay what they are in Parquet; bytes need Parquet."""
    day = datetime.date(2026, 1, 31)
    row = {"q": "1?", "a": 1.0, "day": day, "price": Decimal("1.50")}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "in.parquet")
    words = ["--input", str(tmp_path / "in.parquet"), "--output", str(tmp_path / f"out{suffix}")]
    assert own_rows.main([*words, *COLUMNS]) == 0
    shown = json.loads(capsys.readouterr().out.partition("the first: ")[2])
    assert (shown["day"], shown["price"], shown["answer"]) == ("2026-01-31", "1.50", "1")
    if suffix == ".jsonl":
        (found,) = json_lines(tmp_path / "out.jsonl")
        assert (found["day"], found["price"]) == ("2026-01-31", "1.50")
    else:
        (found,) = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
        assert (found["day"], found["price"]) == (day, Decimal("1.50"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"q": "1?", "a": 1, "image": b"\xff"}]), words[1])
    assert own_rows.main([*words, *COLUMNS]) == (suffix == ".jsonl")
    assert ("a column has bytes (b'\\xff'...)" in capsys.readouterr().err) == (suffix == ".jsonl")


@pytest.mark.parametrize(
    ("name", "message"), [("in.xlsx", "save its sheet as CSV in UTF-8"), ("gone.csv", "no such file")]
)
def test_a_file_that_is_no_table(tmp_path, capsys, name, message):
    (tmp_path / "in.xlsx").write_bytes(b"PK")
    assert converted(tmp_path, tmp_path / name, *COLUMNS) == (1, None)
    assert f"{name}: " in (error := capsys.readouterr().err) and message in error


def test_a_cell_of_tsv_that_begins_with_a_quote_ends_with_its_line(tmp_path, capsys):
    (tmp_path / "in.tsv").write_text('q\ta\n1?\t"one\n2?\t"two"\n3?\t"""\n')
    code, found = converted(tmp_path, tmp_path / "in.tsv", *COLUMNS)
    assert (code, [row["answer"] for row in found]) == (0, ['"one', '"two"', '"""'])
    (tmp_path / "in.tsv").write_text('q\ta\n"say ""1"""\t1\n')
    assert converted(tmp_path, tmp_path / "in.tsv", *COLUMNS)[0] == 1
    assert 'in.tsv:2: "q" is quoted as in CSV' in capsys.readouterr().err


def test_a_whole_number_of_pandas_in_csv(tmp_path):
    """pandas writes a column of whole numbers with gaps as 72.0; other columns and other texts stay."""
    cells = ["72.0", "-3.0", "0.0", "0.50", "007", "1.0.0", "007.0"]
    (tmp_path / "in.csv").write_text("q,a,b\n" + "".join(f"{n}.0,{cell},{cell}\n" for n, cell in enumerate(cells)))
    code, found = converted(tmp_path, tmp_path / "in.csv", *COLUMNS, "--prompt-style", "plain")
    assert (code, [row["answer"] for row in found]) == (0, ["72", "-3", "0", "0.50", "007", "1.0.0", "007.0"])
    assert [row["b"] for row in found] == cells and found[0]["prompt"] == "0.0"


def test_an_instruction_needs_chat_messages(tmp_path, capsys):
    (tmp_path / "in.csv").write_text("q,a\n1?,1\n")
    words = ["--prompt-style", "plain", "--instruction", "Short."]
    assert converted(tmp_path, tmp_path / "in.csv", *COLUMNS, *words) == (1, None)
    assert "--instruction has no effect with --prompt-style plain" in capsys.readouterr().err


def test_a_decimal_is_an_answer(tmp_path):
    for number, text in (("3.50", "3.5"), ("7.00", "7"), ("1200", "1200")):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([{"q": "1?", "a": Decimal(number)}]), tmp_path / "d.parquet"
        )
        assert converted(tmp_path, tmp_path / "d.parquet", *COLUMNS)[1][0]["answer"] == text


def test_a_column_of_two_types_and_a_file_of_another_kind_are_named(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"q": "1?", "m": {"x": 1}}\n{"q": "2?", "m": 5}\n')
    command = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "o.parquet"), "--prompt-column", "q"]
    assert own_rows.main(command) == 1
    assert 'Parquet needs one type in all rows of "m"' in capsys.readouterr().err
    (tmp_path / "in.txt").write_text("q,a\n1?,1\n")
    assert converted(tmp_path, tmp_path / "in.txt", *COLUMNS)[0] == 1
    assert "in.txt: rows are read from .csv, .tsv, .jsonl" in capsys.readouterr().err
