"""Metrics of an evaluation against loops over single completions, with missing and fractional rewards."""

import math
from argparse import Namespace

import numpy as np
import pytest

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.observability.metric_guide import check_names
from megatron_grpo.rollout.evaluation import HeldOut, correct, evaluation_metrics, held_out_prompts, logged

NAN = math.nan
REWARDS = [[1.0, 0.5], [0.7, 1.0], [NAN, 1.0], [0.0, NAN], [2.0, 0.0], [-1.0, 1.0]]  # two of each of three prompts
LENGTHS = [1, 2, 3, 4, 5, 6]
FILES = {"first": range(0, 1), "second": range(1, 3)}


def batch(rewards=REWARDS, generations=2, order=None):
    """Completions of prompt 0, 1, ... in this order; every third one is cut off."""
    order = list(range(len(rewards))) if order is None else order
    built = RolloutBatch.from_completions(
        prompts=[[1]] * len(order),
        completions=[[2] * LENGTHS[i] for i in order],
        log_probs=[None] * len(order),
        weight_version=0,
        group_ids=[i // generations for i in order],
        row_ids=[i // generations for i in order],
        sample_ids=order,
        finish_reasons=[FinishReason.LENGTH if i % 3 == 2 else FinishReason.STOP for i in order],
    )
    built.rewards = np.array([rewards[i] for i in order], np.float32)
    return built


def held_out(judges=(0, 0, 0), files=FILES):
    return HeldOut([Prompt(i, [1], {}, "made up") for i in range(3)], files, judges=np.array(judges))


def flags(**values):
    defaults = {"eval_correct_reward": 1.0, "reward_weights": [1.0, 0.2], "eval_num_generations": 2}
    return Namespace(**defaults | values)


def mean(values):
    values = [value for value in values if not math.isnan(value)]
    return sum(values) / len(values) if values else NAN


def by_hand(places, judge, least):
    """Accuracy, reward, length, cut off, unscored and pass@2 of some prompts, one completion after the other."""
    members = [i for i in range(6) if i // 2 in places]
    judged = {i: REWARDS[i][judge[i // 2]] for i in members}
    right = [NAN if math.isnan(value) else float(value >= least) for value in judged.values()]
    rewards = [
        NAN
        if all(map(math.isnan, REWARDS[i]))
        else sum(w * r for w, r in zip((1.0, 0.2), REWARDS[i], strict=True) if not math.isnan(r))
        for i in members
    ]
    whole = [p for p in places if not any(math.isnan(judged[i]) for i in (2 * p, 2 * p + 1))]
    passed = [float(any(judged[i] >= least for i in (2 * p, 2 * p + 1))) for p in whole]
    return {
        "sampled_accuracy": mean(right),
        "sampled_reward": mean(rewards),
        "sampled_length": mean([float(LENGTHS[i]) for i in members]),
        "sampled_truncated": mean([float(i % 3 == 2) for i in members]),
        "sampled_unscored": mean([float(math.isnan(value)) for value in judged.values()]),
    } | ({"pass_at_2": mean(passed)} if whole else {})


@pytest.mark.parametrize("least", [1.0, 0.7, -1.0])
@pytest.mark.parametrize("judges", [(0, 0, 0), (1, 0, 1)])
@pytest.mark.parametrize("order", [None, [5, 1, 0, 3, 2, 4]])
def test_each_file_has_the_metrics_of_its_prompts(least, judges, order):
    metrics = evaluation_metrics(flags(eval_correct_reward=least), "sampled", batch(order=order), held_out(judges))
    check_names(metrics)
    for name, places in {"": range(3), "first/": FILES["first"], "second/": FILES["second"]}.items():
        for metric, value in by_hand(places, judges, least).items():
            assert metrics[f"eval/{name}{metric}"] == pytest.approx(value, nan_ok=True), (name, metric)


def test_one_file_has_the_names_that_it_always_had():
    metrics = evaluation_metrics(flags(), "greedy", batch(), held_out(files={"only": range(3)}))
    assert {name.count("/") for name in metrics} == {1}
    assert {"eval/greedy_accuracy", "eval/greedy_reward"} <= metrics.keys()
    assert not any("pass" in name for name in metrics)


@pytest.mark.parametrize(("least", "right"), [(1.0, [1, 0, 0]), (0.7, [1, 1, 0]), (0.1, [1, 1, 1])])
def test_a_fraction_is_correct_from_the_given_reward_on(least, right):
    """0.7 as a float32 is less than 0.7, and 0.7 + 0.2 + 0.1 is less than 1: both count."""
    rewards = [[0.7 + 0.2 + 0.1], [0.7], [0.1]]
    assert 0.7 + 0.2 + 0.1 < 1 and float(np.float32(0.7)) < 0.7
    found = correct(batch(rewards, generations=1), held_out(), least)
    assert found.tolist() == right


def test_no_reward_at_all_is_no_accuracy():
    rewards = [[NAN]] * 3
    args = flags(reward_weights=[1.0], eval_num_generations=1)
    metrics = evaluation_metrics(args, "sampled", batch(rewards, generations=1), held_out())
    assert math.isnan(metrics["eval/sampled_accuracy"]) and metrics["eval/sampled_unscored"] == 1.0
    assert "eval/pass_at_1" not in metrics


def test_the_first_prompts_of_each_file_are_logged_once():
    found = logged(batch(), held_out(), 1)
    assert np.flatnonzero(found).tolist() == [0, 2]
    assert not logged(batch(), held_out(), 0).any()
    assert np.flatnonzero(logged(batch(), held_out(), 9)).tolist() == [0, 2, 4]


class Data:
    """A data set of two files, with the rows of --reward-routing."""

    def first_of_files(self, count):
        files = [[Prompt(0, [1], {"data_source": "a"}, "")], [Prompt(1, [1], {"data_source": "b"}, "")] * 2]
        return [prompts[:count] for prompts in files]

    def row_in_file(self, prompt):
        return 0


def test_the_first_function_of_a_rows_route_judges_it():
    args = Namespace(valid_data_path=["x.jsonl", "b=y.jsonl"], eval_max_prompts=None, reward_funcs=["f", "g"])
    args.reward_routing = ["a=g,f", "b=f"]
    found = held_out_prompts(args, Data())
    assert found.judges.tolist() == [1, 0, 0] and found.files == {"x": range(1), "b": range(1, 3)}
    assert [found.file_of(place) for place in range(3)] == ["x", "b", "b"]
    args.reward_routing = None
    assert held_out_prompts(args, Data()).judges.tolist() == [0, 0, 0]
    args.eval_max_prompts = 1
    assert held_out_prompts(args, Data()).files == {"x": range(1), "b": range(1, 2)}
