"""The error file of a rank, which torchrun reads for its report."""

import json

from full_disk import files_up_to

from megatron_grpo.utils.errors import record_for_torchrun


def test_a_full_disk_leaves_no_part_of_an_error_file(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with files_up_to(10):
        record_for_torchrun("--lr is wrong: the cure")
    assert not file.exists()
    record_for_torchrun("--lr is wrong: the cure")
    assert json.loads(file.read_text())["message"]["message"] == "--lr is wrong: the cure"
