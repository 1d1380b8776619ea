"""Numbers of engine ranks: the formula by hand, against measured splits, and against all other splits; the estimate."""

import good_args
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.estimate.dry_run import dry_run_report
from megatron_grpo.estimate.memory import Plan
from megatron_grpo.estimate.sides import BYTES, FLOPS, TurnSeconds, concurrent, decode_seconds, estimated, train_flops
from megatron_grpo.estimate.split import fastest, measured, step_seconds
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.batch_sizes import possible_rollout_ranks
from megatron_grpo.utils.errors import GrpoError


def test_a_step_is_the_longer_side_or_both_in_turn():
    """24 and 8 rank seconds on 6 engines and 2 trainers: 4 s each."""
    assert step_seconds(measured(24, 8), 6, 2, max_staleness=1) == 4
    assert step_seconds(measured(24, 8), 6, 2, max_staleness=0) == 8


@pytest.mark.parametrize(
    ("generate", "train", "ranks", "multiple", "best"),
    [
        (5.5, 1.4, 4, 1, 3),  # 0.5B, seconds of one GPU: three engines and one trainer took 2.92 s, two and two 4.02
        (2 * 31, 2 * 20, 8, 1, 5),  # 8B, seconds of two GPUs: docs/asynchronous.md
        (2 * 31, 2 * 20, 8, 2, 4),  # trainers of TP 2
    ],
)
def test_measured_runs(generate, train, ranks, multiple, best):
    possible = range(multiple, ranks, multiple)
    assert fastest(possible, ranks, measured(generate, train), max_staleness=1) == best


def test_without_staleness_the_ranks_are_as_the_roots_of_the_work():
    """E / N + T / (R - N) is least at N = R sqrt(E) / (sqrt(E) + sqrt(T)): 9 and 1 rank seconds of 8 ranks: 6."""
    assert fastest(range(1, 8), 8, measured(9, 1), max_staleness=0) == 6
    assert fastest(range(1, 8), 8, measured(9, 1), max_staleness=1) == 7  # 9 / 7 and 1


SECONDS = st.floats(1e-3, 1e3)


@given(SECONDS, SECONDS, st.sets(st.integers(1, 63), min_size=1), st.integers(0, 2), st.integers(0, 63))
def test_no_split_is_faster_than_the_chosen_one(generate, train, possible, staleness, present):
    def step(engines):
        trainers = 64 - engines
        sides = generate / engines, train / trainers
        return max(sides) if staleness else sum(sides)

    chosen = fastest(possible, 64, measured(generate, train), staleness)
    assert chosen in possible and all(step(chosen) <= step(other) for other in possible)
    kept = fastest(possible, 64, measured(generate, train), staleness, present)
    assert kept in (chosen, present) and kept in possible and step(kept) <= 1.05 * step(chosen)


@pytest.mark.parametrize(
    ("flags", "ranks", "possible"),
    [
        ("", 4, [2, 3]),  # three trainers do not divide 64 completions
        ("--max-tokens-per-microbatch 4096", 4, [1, 2, 3]),
        ("--tensor-model-parallel-size 2 --vllm-tensor-parallel-size 2", 8, [4, 6]),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 8, [4]),
        ("--expert-model-parallel-size 4 --max-tokens-per-microbatch 4096", 12, [4, 8]),
        ("", 2, [1]),
    ],
)
def test_possible_splits(flags, ranks, possible):
    args = parse_args(f"{good_args.MODEL} {good_args.RUN} {flags}".split())
    assert possible_rollout_ranks(args, ranks) == possible


@pytest.mark.parametrize(("flags", "ranks"), [("", 1), ("--tensor-model-parallel-size 4", 4), ("", 0)])
def test_too_few_ranks_are_refused(flags, ranks):
    args = parse_args(f"{good_args.MODEL} {good_args.RUN} {flags}".split())
    with pytest.raises(GrpoError, match=f"--rollout-ranks auto: {ranks} processes cannot be split"):
        possible_rollout_ranks(args, ranks)


@pytest.mark.parametrize(
    ("flags", "ranks", "cure"),
    [
        # no number of ranks helps
        (
            "--micro-batch-size 3",
            16,
            "(64) must be divisible by micro_batch_size (3) x dp_size (1) = 3: give a multiple",
        ),
        ("--micro-batch-size 3 --tensor-model-parallel-size 2", 16, "= 3: give a multiple, or another --micro-batch"),
        ("--tensor-model-parallel-size 8", 8, "start more processes (torchrun --nproc-per-node), or lower"),
    ],
)
def test_the_cure_is_that_of_the_reason(flags, ranks, cure):
    args = parse_args(f"{good_args.MODEL} {good_args.RUN} {flags}".split())
    with pytest.raises(GrpoError) as error:
        possible_rollout_ranks(args, ranks)
    assert cure in str(error.value) and "leave the flag out" not in str(error.value)


def test_no_engine_is_on_two_hosts(monkeypatch):
    """Two hosts of 6: engines of 4 begin at rank 8 (6 to 11 are a host), or at rank 4, where 4 to 7 are on two."""
    flags = "--vllm-tensor-parallel-size 4 --max-tokens-per-microbatch 4096"
    args = parse_args(f"{good_args.MODEL} {good_args.RUN} {flags}".split())
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert possible_rollout_ranks(args, 12) == [4, 8]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    assert possible_rollout_ranks(args, 12) == [4]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(GrpoError, match="on two hosts of 2 ranks"):
        possible_rollout_ranks(args, 12)


LENGTHS = "--max-prompt-length 100 --max-completion-length 300 --num-generations 8 --bf16 --no-share-prompts --beta 0"
STALE = "--rollout-ranks 1 --max-staleness 1 --rollout-importance-sampling-mode token_truncate"


def args_of(flags):
    return good_args.validated(f"{LENGTHS} {STALE} {flags}", world_size=1)


def test_a_decode_step_by_hand():
    """Layers of 64 x (128 + 64 + 64 + 128) + 3 x 64 x 192 weights and norms, four KV heads of 16, sequences of 250.

    vLLM fills the 1,000 rows of the embedding up to a multiple of 64.
    """
    weights = 1024 * 64 + 64 + 4 * (64 * 384 + 3 * 64 * 192 + 2 * 64 + 2 * 16)
    cache = 50 * 250 * 4 * 2 * 4 * 16
    assert pytest.approx(3.84e12) == BYTES
    want = 1.2e-3 + 50 * 4.2e-6 + 2 * (weights + cache) / 3.84e12
    assert decode_seconds(Plan(args_of("")), 50) == pytest.approx(want, rel=1e-12)


def test_turns_by_hand():
    """30 tokens after 200, of 50 sequences with 215 on average; a history of 100; both on two ranks of an engine."""
    weights = 1024 * 64 + 64 + 4 * (64 * 384 + 3 * 64 * 192 + 2 * 64 + 2 * 16)
    cache = 50 * 215 * 4 * 2 * 4 * 16
    costs, history = TurnSeconds(args_of("")), 2 * 4 * (64 * 384 + 3 * 64 * 192) * 100 + 4 * 4 * 8 * 16 * 5050
    want = 30 / 50 * (1.2e-3 + 50 * 4.2e-6 + 2 * (weights + cache) / 3.84e12)
    assert costs.turn(30, 200, 50) == pytest.approx(want, rel=1e-12)
    assert costs.history(100) == pytest.approx(history / FLOPS)
    two = good_args.validated(f"{LENGTHS} --vllm-tensor-parallel-size 2", world_size=2)
    assert TurnSeconds(two).history(100) == pytest.approx(history / FLOPS / 2)
    assert TurnSeconds(two).turn(30, 200, 50) < costs.turn(30, 200, 50)


def test_an_update_by_hand():
    """6 FLOPs a weight and token, 6 a weight of the head and label, 12 x heads x size for a pair of tokens a layer."""
    layers, pairs = 4 * (64 * 384 + 3 * 64 * 192), 400 * 401 // 2
    one = 6 * layers * 400 + 6 * 64_000 * 300 + 12 * 4 * 8 * 16 * pairs
    assert train_flops(args_of("")) == pytest.approx(64 * one)
    prompts = 6 * layers * 100 + 12 * 4 * 8 * 16 * 5050  # of all but one of a group
    shared = args_of("--share-prompts --max-tokens-per-microbatch 4096")
    assert train_flops(shared) == pytest.approx(64 * one - 56 * prompts)
    assert train_flops(args_of("--beta 0.1")) == pytest.approx(64 * one * (1 + 1 / 3))  # the reference model
    assert train_flops(args_of("--num-iterations 2")) == pytest.approx(64 * one * (2 + 1 / 3))  # and old ones


def test_sides_by_hand():
    """A batch of 64, two of them at a time; an engine of 16 sequences needs four waves without staleness."""
    args = args_of("")
    assert [concurrent(args, engines) for engines in (1, 2, 3)] == [128, 64, 43]
    prompts = 8 * (2 * 4 * (64 * 384 + 3 * 64 * 192) * 100 + 4 * 4 * 8 * 16 * 5050) / FLOPS
    generate, train = estimated(args)(1, 2)
    assert generate == pytest.approx(prompts + 300 / 2 * decode_seconds(Plan(args), 128))
    assert train == pytest.approx(train_flops(args) / FLOPS / 2)
    few = good_args.validated(f"{LENGTHS} --rollout-ranks 1 --vllm-max-num-seqs 16", world_size=1)
    assert estimated(few)(1, 1)[0] == pytest.approx(prompts + 4 * 300 * decode_seconds(Plan(few), 16))
    assert estimated(few)(3, 1)[0] == pytest.approx(prompts / 3 + 2 * 300 * decode_seconds(Plan(few), 16))


@pytest.mark.parametrize(
    ("flags", "times"),
    [
        ("--no-vllm-enable-prefix-caching", 8),
        ('--vllm-engine-kwargs {"enable_prefix_caching":false}', 8),
        ("--vllm-mode server --vllm-server-base-url http://localhost:1 --no-vllm-enable-prefix-caching", 1),
    ],
)
def test_engines_without_prefixes_compute_a_prompt_for_each_completion(flags, times):
    args, prompt = args_of(""), 2 * 4 * (64 * 384 + 3 * 64 * 192) * 100 + 4 * 4 * 8 * 16 * 5050
    more = estimated(args_of(flags))(1, 2)[0] - estimated(args)(1, 2)[0]
    assert more == pytest.approx((times - 1) * 8 * prompt / FLOPS)


def test_the_dry_run_prints_the_estimate_and_its_numbers():
    """Three splits of four ranks; the marks are at the shortest step and at the flags' split."""
    args = good_args.validated(f"{LENGTHS} {STALE} --max-tokens-per-microbatch 4096 --share-prompts", world_size=3)
    report = dry_run_report(args, 3).split("split of 4 ranks")[1].split("\n\n")[0].splitlines()
    assert f"{1000 * decode_seconds(Plan(args), 128):.2f} ms" in report[1]
    table = {int(line.split()[0]): line.split() for line in report[3:]}
    sides = estimated(args)
    for engines in (1, 2, 3):
        generate, train = sides(engines, 4 - engines)
        assert [float(cell) for cell in table[engines][2:5]] == pytest.approx(
            [generate, train, max(generate, train)], rel=5e-3
        )
    (best,) = (engines for engines, row in table.items() if "fastest" in row)
    assert float(table[best][4]) == min(float(row[4]) for row in table.values())
    assert table[1][-2:] == ["this", "run"]
