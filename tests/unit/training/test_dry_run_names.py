"""A dry run refuses what the run would refuse: unknown names, for which it loads nothing, and flags without others."""

import pytest
from good_args import MODEL, validated

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


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ("--rollout-ranks 2 --max-staleness 1", "--rollout-importance-sampling-mode"),
        ("--partial-rollouts --max-staleness 1", "--rollout-importance-sampling-mode"),
        ("--weight-decay-incr-style linear --start-weight-decay 0.1", "--end-weight-decay"),
        ("--rollout-only", "--ledger"),
    ],
)
def test_a_flag_without_the_one_that_it_needs(flags, missing):
    """Only what no estimate needs may be missing: data, rewards, learning rate, length, tokenizer and servers."""
    for dry_run in ("", "--dry-run"):
        with pytest.raises(GrpoError, match=f"^{missing} is missing: "):
            validated(f"{flags} {dry_run}")
    validated("--vllm-mode server --dry-run", base=MODEL)
    with pytest.raises(GrpoError, match="--rollout-ranks 2 is more than the 1 servers"):
        validated("--vllm-mode server --vllm-server-base-url http://127.0.0.1:1 --rollout-ranks 2 --dry-run")


def test_what_a_machine_has_is_not_named(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    args = validated(f"--train-data-path 0.5 {data} 0.5 {tmp_path}/gone.jsonl --tokenizer-model {tmp_path}")
    assert setup._not_here(args) == [f"--train-data-path {tmp_path}/gone.jsonl"]
    assert setup._not_here(validated("--train-data-path hf:some/name")) == ["--tokenizer-model tokenizer"]
