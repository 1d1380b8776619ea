"""A dry run refuses names that no run knows, and loads nothing for it."""

import pytest
from good_args import validated

from megatron_grpo.training import setup
from megatron_grpo.utils.errors import GrpoError


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--reward-funcs acuracy", r'unknown reward function "acuracy" \(did you mean "accuracy"\?\)'),
        ("--environment calculater", r'unknown environment "calculater" \(did you mean "calculator"\?\)'),
    ],
)
def test_unknown_names_are_refused(monkeypatch, flags, message):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(setup, "dry_run_report", lambda *_: pytest.fail("the report of a run that cannot start"))
    args = validated(f"{flags} --dry-run")
    monkeypatch.setattr(setup, "_read_origin", lambda args: (args, None))
    with pytest.raises(GrpoError, match=message):
        setup.setup(args, None, None)


def test_what_a_machine_has_is_not_named(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    args = validated(f"--train-data-path 0.5 {data} 0.5 {tmp_path}/gone.jsonl --tokenizer-model {tmp_path}")
    assert setup._not_here(args) == [f"--train-data-path {tmp_path}/gone.jsonl"]
    assert setup._not_here(validated("--train-data-path hf:some/name")) == ["--tokenizer-model tokenizer"]
