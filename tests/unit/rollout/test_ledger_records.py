"""Files of the ledger: what a kill or a crash of the host leaves, and damage."""

import os
import re

import numpy as np
import pytest

from megatron_grpo.rollout.ledger import records
from megatron_grpo.utils.errors import GrpoError

ARRAYS = [
    {"ids": np.arange(n, dtype=np.int32), "rewards": np.full((2, n), 0.5, np.float32), "none": np.empty(0, np.int64)}
    for n in (3, 5, 2)
]


@pytest.fixture
def file(tmp_path):
    written = records.RecordFile(tmp_path / "groups-00000-0000.bin")
    for number, arrays in enumerate(ARRAYS):
        written.append({"kind": "groups", "number": number}, arrays)
    written.close()
    return written.path


def numbers(file):
    return [record.head["number"] for record in records.scan(file)]


def test_it_reads_what_was_written(file):
    found = list(records.scan(file))
    assert numbers(file) == [0, 1, 2] and found[-1].end == file.stat().st_size
    for record, arrays in zip(found, ARRAYS, strict=True):
        read = records.read_arrays(file, record.offset)
        assert read.keys() == arrays.keys()
        for name, array in arrays.items():
            assert read[name].dtype == array.dtype and np.array_equal(read[name], array)


def test_a_torn_last_record_is_left_out_wherever_it_ends(file):
    begin, end = list(records.scan(file))[-1].offset, file.stat().st_size
    for size in range(end - 1, begin - 1, -1):
        os.truncate(file, size)
        assert numbers(file) == [0, 1]


def test_a_crash_of_the_host_may_leave_zeros_in_the_last_record(file):
    whole, last = file.read_bytes(), list(records.scan(file))[-1]
    for begin in (last.offset, last.offset + 10, last.offset + 40, last.end - 5):
        file.write_bytes(whole[:begin] + bytes(last.end - begin))
        assert numbers(file) == [0, 1]


def test_damage_before_the_last_record_is_an_error_by_name(file):
    """Every byte of the middle record: of its head the scan finds it, of its arrays the read."""
    whole = bytearray(file.read_bytes())
    _, middle, last = records.scan(file)
    for place in range(middle.offset, middle.end):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(GrpoError, match=re.escape(f"{file} is damaged: the record at byte {middle.offset}")):
            list(records.scan(file))
            records.read_arrays(file, middle.offset)
        assert np.array_equal(records.read_arrays(file, last.offset)["ids"], ARRAYS[2]["ids"])


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    written = records.RecordFile(tmp_path / "batches-0000.bin")
    written.append({"number": 0}, ARRAYS[0])

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            written.append({"number": 1}, ARRAYS[1])
    written.append({"number": 2}, ARRAYS[2])
    assert numbers(written.path) == [0, 2]
