"""Messages on standard output: the rank in front, and a logger that a program can give more handlers."""

import logging
import sys

from tqdm import tqdm

from megatron_grpo.utils.log import log, print_rank_0


def test_a_message_of_one_rank_begins_with_its_number(capsys, monkeypatch):
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        print_rank_0("the run has started")
        log("a disk is full")
    assert capsys.readouterr().out == "the run has started\n[rank 0] a disk is full\n[rank 3] a disk is full\n"


def test_a_program_adds_a_handler(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logging.getLogger("megatron_grpo").addHandler(handler)
    try:
        print_rank_0("100% of %s")
        log("{}")
    finally:
        logging.getLogger("megatron_grpo").removeHandler(handler)
    assert records == [("INFO", "100% of %s"), ("WARNING", "[rank 0] {}")]


def test_a_line_does_not_break_a_progress_bar(capsys):
    with tqdm(total=2, file=sys.stdout, ascii=True) as bar:
        bar.update()
        log("a server has restarted")
    lines = [line.rpartition("\r")[2] for line in capsys.readouterr().out.split("\n")]
    assert "[rank 0] a server has restarted" in lines


def test_a_plug_in_that_configures_logging_hides_no_message(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    logger = logging.getLogger("megatron_grpo")
    try:
        logger.disabled = True  # as logging.config does by default; it would also close the handlers of the tests
        logging.disable(logging.CRITICAL)
        print_rank_0("the run has started")
        log("a disk is full")
    finally:
        logging.disable(logging.NOTSET)
        logger.disabled = False
    assert capsys.readouterr().out == "the run has started\n[rank 0] a disk is full\n"
