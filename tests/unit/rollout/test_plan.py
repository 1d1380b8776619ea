"""How training rollouts and evaluations are sampled."""

import pytest

from megatron_grpo.data.row_sampling import with_row
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.plan import evaluation_plans, rollout_seed, training_sampling
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced


def asked(flags: str, rollouts: range) -> list[int]:
    """The rollouts for which the engine is asked for log-probabilities."""
    args = parse_args(flags.split())
    return [rollout for rollout in rollouts if training_sampling(args, rollout).log_probs]


def test_log_probabilities_are_asked_for_where_something_uses_them():
    assert asked("", range(1, 9)) == list(range(1, 9))
    assert asked("--mismatch-sample-rate 0", range(1, 99)) == []
    assert asked("--mismatch-sample-rate 0.25", range(1, 13)) == [4, 8, 12]
    assert asked("--mismatch-sample-rate 0.25", range(7, 13)) == [8, 12]  # a resumed run goes on in the same order
    correction = "--mismatch-sample-rate 0 --rollout-importance-sampling-mode token_truncate"
    assert asked(correction, range(1, 9)) == list(range(1, 9))


@pytest.mark.parametrize(
    ("flags", "replayed"),
    [
        ("--top-k 8 --temperature 0.6 --top-p 0.9 --min-p 0.01", True),
        ("--top-k 20", True),
        ("--top-k 21", False),  # vLLM's max_logprobs
        ('--top-k 21 --vllm-engine-kwargs {"max_logprobs":30}', True),
        ('--top-k 8 --vllm-engine-kwargs {"max_logprobs":5}', False),
        ('--top-k 200 --vllm-engine-kwargs {"max_logprobs":-1}', True),
        ("--top-k 50 --vllm-mode server", True),  # the server's limit is checked when the run connects to it
        ("--top-p 0.9 --temperature 0.6", False),
        ("--top-k 8 --no-top-k-replay", False),
        ("--top-k 8 --presence-penalty 1", False),
        ("--top-k 8 --vocab-size 7", False),
        ("--top-k 8 --structured-outputs-regex [0-9]", False),
        ("--top-k 8 --rollout-engine sglang", False),
        ("--top-k 8 --rollout-engine megatron", False),
    ],
)
def test_kept_tokens_are_asked_for_in_every_rollout_if_the_engine_can_return_them(flags, replayed):
    args = parse_args([*flags.split(), "--mismatch-sample-rate", "0"])
    for rollout in (1, 2):
        sampling = training_sampling(args, rollout)
        assert sampling.kept_token_ids == sampling.log_probs == replayed
        constrained = with_row(sampling, {"structured_outputs": "{}"})
        assert not constrained.kept_token_ids and not constrained.log_probs
    assert not any(plan.sampling.kept_token_ids for plan in evaluation_plans(args, []).values())


def test_experts_are_asked_for_where_updates_replay_them():
    for mode, wanted in (("R3", True), ("R2", False)):
        args = replaced(parse_args(["--eval-num-generations", "2"]), router_replay_mode=mode)
        assert training_sampling(args, 1).routed_experts == wanted
        assert not any(plan.sampling.routed_experts for plan in evaluation_plans(args, []).values())


def test_evaluations_ask_for_none_and_the_greedy_one_changes_nothing():
    flags = "--temperature 0.7 --top-p 0.9 --top-k 5 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 1"
    flags += " --frequency-penalty 1 --eval-num-generations 2 --stop-words a --max-completion-length 9"
    args = replaced(parse_args([*flags.split(), "--seed", "5"]), end_token_ids=(7, 8))
    plans = evaluation_plans(args, ["a prompt"])
    greedy, sampled = plans.pop("greedy"), plans.pop("sampled")
    assert not plans and (greedy.num_generations, sampled.num_generations) == (1, 2)
    assert greedy.sampling == Sampling(9, temperature=0.0, stop_token_ids=(7, 8), stop=("a",))
    assert sampled.sampling == Sampling(9, 0.7, 0.9, 5, 0.1, 1.1, 1.0, 1.0, stop_token_ids=(7, 8), stop=("a",))
    assert all(plan.seed == 5 and plan.prompts == ["a prompt"] and plan.selection is None for plan in (greedy, sampled))


def test_sampled_evaluations_are_asked_for():
    assert list(evaluation_plans(parse_args([]), [])) == ["greedy"]


def test_the_seed_depends_on_seed_and_rollout():
    seeds = [rollout_seed(seed, rollout) for seed in (1, 2) for rollout in range(1, 50)]
    assert len(set(seeds)) == len(seeds) and seeds[0] == rollout_seed(1, 1)
    assert all(0 <= seed < 2**31 for seed in seeds)
