#!/usr/bin/env python3
"""Show one run, or several: a page that follows running jobs, or one HTML file without external resources.

    python tools/report.py RUN_DIR [RUN_DIR ...] --serve [PORT]
    python tools/report.py RUN_DIR [RUN_DIR ...] -o report.html [--rollouts N]

RUN_DIR is the --save directory of a run. The page has what the run does now, what went wrong, curves of all logged
metrics, the seconds of each phase, the device's time in the phases of a profile (--profile), completions of rollouts
and of evaluations with the probabilities and the advantage of each token, arguments (differences between the runs are
marked), and the environment. --serve opens it on this machine only, under an address that holds a secret; from another
machine: ssh -L PORT:localhost:PORT HOST. tools/report/ has the template and the scripts of the page.
"""

import argparse
import base64
import contextlib
import datetime
import hashlib
import json
import math
import secrets
import string
import sys
import threading
import time
from collections.abc import Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_grpo.observability.findings import findings
from megatron_grpo.observability.metric_guide import METRICS, TITLES, documented, heading, remedy
from megatron_grpo.observability.run_folder import PROFILE_COLUMNS, Record, SampleFile, labels, read_record
from megatron_grpo.observability.run_status import read_status, state_in_words
from megatron_grpo.utils.errors import GrpoError

PAGE = Path(__file__).resolve().parent / "report"
SCRIPTS = "vendor/uPlot.iife.min.js", "curves.js", "completions.js", "script.js"
PORT = 8060
MOST_FOUND = 100  # completions that a search returns
MOST_BYTES = 60_000_000  # completions in a page: a browser reads 512 MB at once, and a letter has up to six bytes there
Cursor = tuple[int, int, int, int]  # generation, rows, completions and held-out ones that a page has


# ---- data of the scripts


def part(record: Record, cursor: Cursor | None, num_rollouts: int, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return what a page that has read up to ``cursor`` lacks of a run; all for None or another generation.

    Of completions all iterations are told, and those of ``num_rollouts`` rollouts are in it, fewer if they have more
    than ``most_bytes``; later only the newest.
    """
    whole = cursor is None or cursor[0] != record.generation
    _, rows, *taken = (0, 0, 0, 0) if cursor is None or whole else cursor
    last = record.rows[-1]["iteration"] if record.rows else 0
    total = record.args.get("train_iters")
    total = total if isinstance(total, int) else None
    shown = part_of_rows(record.rows, rows) | {"whole": whole, "label": record.label, "total": total}
    shown["cursor"] = [
        record.generation,
        len(record.rows),
        *(len(f.places) for f in (record.completions, record.held_out)),
    ]
    for name, file, begin in zip(
        ("completions", "held_out"), (record.completions, record.held_out), taken, strict=True
    ):
        shown[name] = part_of_samples(file, begin, num_rollouts, most_bytes // 2)
    shown["damaged"] = record.damaged[:20]
    try:
        age = time.time() - record.metrics.file.stat().st_mtime
    except OSError:
        age = 0.0
    shown["status"] = state_in_words(read_status(record.directory), last, total, age)
    if whole or len(record.rows) > rows:
        shown["findings"] = [one.as_json() for one in findings(record.rows)]
    return shown


def part_of_rows(rows: Sequence[dict[str, Any]], begin: int) -> dict[str, Any]:
    """Return the columns of ``rows[begin:]``: metrics by name (None where missing), and values of the x axis.

    The values of the x axis are updates, tokens and minutes, both since the start of the run. ``guide`` has heading,
    meaning and remedy of each metric, in the order of the page.
    """
    new = rows[begin:]
    found = dict.fromkeys(name for row in new for name in row if name != "iteration")
    order: dict[str | None, int] = {name: place for place, name in enumerate(METRICS)}
    names = sorted(found, key=lambda name: order.get(documented(name), len(order)))
    tokens, minutes, sums = 0.0, 0.0, []
    for row in rows if new else ():
        tokens = _rounded(row.get("tokens/total")) or tokens
        minutes += (_rounded(row.get("time/step")) or 0.0) / 60
        sums.append((tokens, minutes))
    return {
        "x": {
            "iteration": [row["iteration"] for row in new],
            "tokens": [tokens for tokens, _ in sums[begin:]],
            "minutes": [_rounded(minutes) for _, minutes in sums[begin:]],
        },
        "metrics": {name: [_rounded(row.get(name)) for row in new] for name in names},
        "guide": [
            [name, heading(name), METRICS.get(documented(name) or "", ""), remedy(documented(name) or "")]
            for name in names
        ],
    }


def part_of_samples(file: SampleFile, begin: int, num_rollouts: int, most_bytes: int) -> dict[str, Any]:
    """Return iterations and (file, row) of the samples from ``begin`` on, and some of these samples whole.

    From the first on those of ``num_rollouts`` iterations, fewer if they have more than ``most_bytes``, at least two.
    """
    new = range(begin, len(file.places))
    iterations = list(dict.fromkeys(file.places[number][1] for number in new))
    kept = set(iterations[-1:])
    if begin == 0:
        kept = evenly(iterations, num_rollouts)
        size = file.bytes_of(number for number in new if file.places[number][1] in kept)
        if size > most_bytes:
            kept = evenly(iterations, max(2, len(kept) * most_bytes // size))
    prompts = dict.fromkeys(file.places[number][2:] for number in new) if file.file.name.startswith("eval") else {}
    return {
        "iterations": iterations,
        "prompts": list(prompts),
        "samples": file.samples(number for number in new if file.places[number][1] in kept),
    }


def asked(file: SampleFile, query: dict[str, str]) -> list[dict[str, Any]]:
    """Return the samples of an iteration, of a prompt (file and row) or with a text, from number ``from`` on."""
    if "text" in query:
        return file.with_text(query["text"], MOST_FOUND, int(query["from"]))
    if "iteration" in query:
        numbers = [i for i, place in enumerate(file.places) if place[1] == int(query["iteration"])]
    else:
        wanted = query.get("file", ""), int(query["row"])
        numbers = [i for i, place in enumerate(file.places) if place[2:] == wanted]
        numbers = sorted(evenly(numbers, 5 * MOST_FOUND))
    return file.samples(numbers[: 5 * MOST_FOUND])


def evenly(values: list[int], count: int) -> set[int]:
    """Return at most ``count`` of the values: the first, the last, and others at even distances."""
    if len(values) <= count:
        return set(values)
    return {values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(1, count)} | {values[0]}


def _rounded(value: float | None) -> float | None:
    """Round to six significant digits, more than a screen shows; return None for a value that is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


# ---- static HTML


def table(names: list[str], values: list[dict[str, Any]], runs: list[str]) -> str:
    """Return a table with one row per name and one column per run; rows with different values are marked."""
    head = "".join(f"<th>{escape(run)}</th>" for run in runs)
    body = []
    for name in names:
        cells = "".join(f"<td>{escape(_text(of_run.get(name)))}</td>" for of_run in values)
        mark = ' class="differs"' if differs(name, values) else ""
        body.append(f"<tr{mark}><th>{escape(name)}</th>{cells}</tr>")
    return (
        f'<div class="table"><table><thead><tr><th></th>{head}</tr></thead><tbody>\n'
        + "\n".join(body)
        + "</tbody></table></div>"
    )


def differs(name: str, values: list[dict[str, Any]]) -> bool:
    """Return whether the runs have different values of this name."""
    return any(_text(of_run.get(name)) != _text(values[0].get(name)) for of_run in values[1:])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def configuration(records: list[Record]) -> str:
    """Return the arguments: first the different and the given ones, then the others, folded."""
    values = [record.args for record in records]
    runs = [record.label for record in records]
    names = sorted({name for of_run in values for name in of_run})
    given = {name for record in records for name in record.environment["given"] if isinstance(name, str)}
    first = sorted((n for n in names if differs(n, values) or n in given), key=lambda n: (not differs(n, values), n))
    rest = [name for name in names if name not in first]
    differing = sum(differs(name, values) for name in names)
    given_first = "Arguments of the command line come first"
    note = f"{differing} arguments differ between the runs and come first, then those of the command line"
    return (
        f'<p class="note">{note if len(records) > 1 else given_first}; the others are folded.</p>'
        '<div><input type="search" placeholder="find an argument" aria-label="Find an argument">'
        f"{table(first, values, runs)}"
        f'<details class="rest"><summary>{len(rest)} arguments that were not given</summary>'
        f"{table(rest, values, runs)}</details></div>"
    )


def environment(records: list[Record]) -> str:
    """Return the table of each run's environment and command."""
    values = []
    for record in records:
        flat = {name: value for name, value in record.environment.items() if name not in ("given", "packages")}
        packages = record.environment.get("packages")
        values.append(flat | (packages if isinstance(packages, dict) else {}))
    names = list(dict.fromkeys(name for of_run in values for name in of_run))
    return table(names, values, [record.label for record in records])


def profiles(records: list[Record]) -> str:
    """Return a table of phases for each profile of the runs; nothing if there is none."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in PROFILE_COLUMNS.values())
    tables = []
    for record in records:
        for profile in record.profiles:
            first, last = profile["updates"]
            title = f"{record.label}, rank {profile['rank']}, updates {first} to {last}"
            body = []
            for phase in profile["phases"]:
                values = (phase[name] for name in PROFILE_COLUMNS)
                cells = "".join(f"<td>{_figure(value)}</td>" for value in values)
                body.append(f"<tr><th>{escape(phase['name'])}</th>{cells}</tr>")
            tables.append(
                f'<div class="table"><table><thead><tr><th>{escape(title)}</th>{head}</tr></thead><tbody>\n'
                + "\n".join(body)
                + "</tbody></table></div>"
            )
    if not tables:
        return ""
    note = (
        "Seconds of the device. It waits for launches while it is idle and the host has not launched what comes next; "
        "busy, waiting and idle otherwise add up to the phase."
    )
    return f'<section>\n<h2>Profile</h2>\n<p class="note">{note}</p>\n' + "\n".join(tables) + "\n</section>"


def _figure(value: float | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"


def page(records: list[Record], num_rollouts: int, live: bool = False) -> str:
    """Return the whole page; ``live``: one that asks its server for what is new.

    Data is inserted as JSON without ``<``, all other text is escaped: neither can contain markup. The page allows no
    script but its own.
    """
    runs = [record.label for record in records]
    content = {
        "live": live,
        "titles": TITLES,
        "runs": [part(record, None, num_rollouts, MOST_BYTES // len(records)) for record in records],
    }
    data = json.dumps(content, allow_nan=False, separators=(",", ":"))
    script = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = [(PAGE / name).read_text(encoding="utf-8") for name in ("vendor/uPlot.min.css", "style.css")]
    written = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return string.Template((PAGE / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(runs[0] if len(runs) == 1 else f"{len(runs)} runs compared"),
        connect="'self'" if live else "'none'",
        hash=base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode(),
        style="\n".join(style),
        script=script,
        profiles=profiles(records),
        configuration=configuration(records),
        environment=environment(records),
        written="Follows the run" if live else f"Written on {written}",
        data=data.replace("<", "\\u003c").replace("&", "\\u0026"),
    )


# ---- server


def server(records: list[Record], num_rollouts: int, port: int, token: str) -> ThreadingHTTPServer:
    """Return the server of a live page at http://127.0.0.1:``port``/``token``/; GrpoError if the port is in use.

    ``/token/poll`` answers with what is new, ``/token/samples`` with completions. Others get nothing.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            given, _, name = url.path.lstrip("/").partition("/")
            query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
            if not secrets.compare_digest(given.encode("utf-8", "replace"), token.encode()):
                return self._answer(403, "text/plain", "The address lacks the secret that report.py has printed.")
            try:
                # A search takes seconds in a log of gigabytes; what it reads does not change meanwhile.
                with contextlib.nullcontext() if name == "samples" and "text" in query else lock:
                    kind, text = self._content(name, query)
            except (KeyError, ValueError, IndexError) as error:
                return self._answer(400, "text/plain", f"not understood: {error!r}")
            return self._answer(200, kind, text)

        def _content(self, name: str, query: dict[str, str]) -> tuple[str, str]:
            if name == "samples":
                record = records[int(query["run"])]
                found = asked(record.held_out if query["table"] == "held_out" else record.completions, query)
                return "application/json", json.dumps(found)
            if name not in ("", "poll"):
                raise KeyError(name)
            for record in records:
                record.read()
            if name == "":
                return "text/html", page(records, num_rollouts, live=True)
            cursors = []
            for text in query["cursors"].split(";"):
                generation, rows, completions, held_out = map(int, text.split(","))
                cursors.append((generation, rows, completions, held_out))
            return "application/json", json.dumps(
                [part(record, cursor, num_rollouts) for record, cursor in zip(records, cursors, strict=True)],
                allow_nan=False,
            )

        def _answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode("utf-8", "replace")  # UTF-8 cannot encode a lone surrogate
            self.send_response(code)
            headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
            headers |= {
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
            }
            for header in headers.items():
                self.send_header(*header)
            with contextlib.suppress(ConnectionError):  # a tab that was closed meanwhile
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Print nothing for each request."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise GrpoError(f"--serve {port}: {error.strerror}; give another port, or 0 for any free one") from error


def serve(records: list[Record], num_rollouts: int, port: int) -> None:
    """Serve the page until Ctrl-C."""
    token = secrets.token_urlsafe(16)
    served = server(records, num_rollouts, port, token)
    port = served.server_address[1]
    print(
        f"http://127.0.0.1:{port}/{token}/  (from another machine first: ssh -L {port}:localhost:{port} HOST)",
        flush=True,
    )
    try:
        served.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        served.server_close()


def main(argv: list[str] | None = None) -> int:
    """Read the runs, write or serve the page, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help="a run's --save directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-o", "--output", type=Path, metavar="FILE", help="write this HTML file")
    what.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=PORT,
        metavar="PORT",
        help=f"serve a page that follows the runs, on this machine only [port {PORT}]",
    )
    parser.add_argument(
        "--rollouts",
        type=int,
        default=30,
        metavar="N",
        help="rollouts per run with completions in the page; a served page reads the others when they are needed [30]",
    )
    args = parser.parse_args(argv)
    try:
        if args.rollouts < 1:
            raise GrpoError(f"--rollouts {args.rollouts} must be at least 1")
        if args.serve is not None and not 0 <= args.serve < 65536:
            raise GrpoError(f"--serve {args.serve} is no port: give one from 0 to 65535")
        names = labels(args.runs) if len(args.runs) > 1 else ["/".join(args.runs[0].resolve().parts[-2:])]
        runs = list(zip(args.runs, names, strict=True))
        if args.serve is not None:
            for path, _ in runs:
                if not path.is_dir():
                    raise GrpoError(f"{path} is no folder: give the --save directory of a run that has begun")
            serve([Record(path, name) for path, name in runs], args.rollouts, args.serve)
            return 0
        text = page([read_record(path, name) for path, name in runs], args.rollouts)
        try:
            args.output.write_text(text, encoding="utf-8", errors="replace")  # UTF-8 cannot encode a lone surrogate
        except OSError as error:
            raise GrpoError(f"--output {args.output} cannot be written: {error}") from error
    except GrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}, {len(text) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
