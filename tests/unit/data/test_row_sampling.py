"""What rows may say about their own sampling, what is refused with file and line, and the order by pass rate."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_prompts import Characters

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.data.row_sampling import structured_json
from megatron_grpo.data.sampler import PromptSampler
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.plan import evaluation_plans, training_sampling
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError


def dataset(path, *rows, flags=""):
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset([file], Characters(), parse_args(flags.split()))


def row(**sampling):
    return {"prompt": "a", "sampling_params": sampling}


def test_a_rows_own_sampling_wins(tmp_path):
    rows = [{"prompt": "a"}, row(max_tokens=3), row(stop="x"), row(stop=["y", "zz"], max_tokens=None)]
    rows += [row(structured_outputs={"regex": "[0-9]+", "json": None}), {"prompt": "a", "sampling_params": None}]
    data = dataset(tmp_path, *rows)
    run = Sampling(16, temperature=0.7, stop=("run",), log_probs=True)
    found = [prompt.sampling(run) for prompt in data]
    assert found[0] == found[5] == run
    assert found[1] == Sampling(3, temperature=0.7, stop=("run",), log_probs=True)
    assert found[2].stop == ("x",) and found[3].stop == ("y", "zz") and found[3].max_tokens == 16
    # What a constraint leaves is another distribution: its log-probabilities are not compared.
    assert json.loads(found[4].structured_outputs) == {"regex": "[0-9]+"} and not found[4].log_probs
    # A special token has no text: the engine compares its id, beside the run's end tokens.
    ends = [
        prompt.sampling(Sampling(16, stop_token_ids=(2,))) for prompt in dataset(tmp_path, row(stop=["y", "<end>"]))
    ]
    assert ends == [Sampling(16, stop=("y", "<end>"), stop_token_ids=(2, 7))]
    assert data.engine_decodes and not dataset(tmp_path, {"prompt": "a"}, row(max_tokens=3)).engine_decodes


@pytest.mark.parametrize(
    ("sampling", "flags", "message"),
    [
        ("fast", "", "must be an object"),
        ({"temperature": 0.5}, "", "temperature of sampling_params cannot differ by row"),
        ({"top_p": 0.5}, "", "give --top-p for all rows"),
        ({"seed": 3}, "", "has 'seed': a row can set max_tokens, stop and structured_outputs only"),
        ({"max_tokens": 17}, "--max-completion-length 16", r"from 1 to --max-completion-length \(16\)"),
        ({"max_tokens": 0}, "", "max_tokens of sampling_params is 0"),
        ({"max_tokens": True}, "", "max_tokens of sampling_params is True"),
        ({"stop": []}, "", "give a string, or a list of strings"),
        ({"stop": ["a", ""]}, "", "give a string, or a list of strings"),
        ({"stop": "a"}, "--tokenizer-type SentencePieceTokenizer", "needs --tokenizer-type HuggingFaceTokenizer"),
        ({"stop": "a"}, "--rollout-ranks 1 --vllm-mode server", "sees no stop word across its begin"),
        ({"structured_outputs": {"regex": "a"}}, "--rollout-ranks 1 --vllm-mode server", "constraint begins again"),
        ({"structured_outputs": "[0-9]"}, "", "give an object with one of regex, json, choice, grammar"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "", "give an object with one of"),
        ({"structured_outputs": {"regex": "(a"}}, "", "unterminated subpattern"),
        ({"structured_outputs": {"regex": 3}}, "", "wrong type"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "", "give a list of strings"),
        ({"structured_outputs": {"json": "{"}}, "", "json of structured_outputs"),
        ({"structured_outputs": {"regex": "a"}}, "--rollout-engine megatron", "needs --rollout-engine vllm: megatron"),
        ({"structured_outputs": {"regex": "a"}}, "--rollout-engine sglang", "needs --rollout-engine vllm: sglang"),
        ({"structured_outputs": {"regex": "a"}}, "--ignore-eos", "cannot be used with --ignore-eos"),
        (
            {"structured_outputs": {"regex": "a"}},
            "--rollout-importance-sampling-mode token_mask",
            "cannot be used with --rollout-importance-sampling-mode",
        ),
    ],
)
def test_what_a_row_cannot_set_is_refused_with_its_place(tmp_path, sampling, flags, message):
    rows = [{"prompt": "a"}, {"prompt": "a", "sampling_params": sampling}]
    with pytest.raises(GrpoError, match=rf"rows\.jsonl:2: .*{message}"):
        dataset(tmp_path, *rows, flags=flags)


def test_the_regex_of_all_rows_is_in_every_sampling_and_switches_log_probabilities_off():
    args = parse_args(["--structured-outputs-regex", "[0-9]+", "--eval-num-generations", "2"])
    constraint = structured_json({"regex": "[0-9]+"})
    assert training_sampling(args, 1) == Sampling(512, structured_outputs=constraint)
    plans = evaluation_plans(args, [])
    assert len(plans) == 2 and all(plan.sampling.structured_outputs == constraint for plan in plans.values())
    assert training_sampling(parse_args([]), 1) == Sampling(512, log_probs=True)


def rated(*rates):
    return [{"prompt": str(rate), "pass_rate": rate} for rate in rates]


def test_prompts_outside_the_pass_rates_are_left_out(tmp_path, capsys):
    data = dataset(tmp_path, *rated(0, 0.25, 1, 0.5), flags="--min-pass-rate 0.25 --max-pass-rate 0.5 --curriculum")
    assert [(prompt.id, prompt.row["pass_rate"]) for prompt in data] == [(0, 0.25), (1, 0.5)]
    assert data.pass_rates.tolist() == [0.25, 0.5] and data[1].ids == [ord(c) for c in "0.5"]
    assert "left out 2 of 4 prompts with a pass_rate below --min-pass-rate (0.25)" in capsys.readouterr().out
    with pytest.raises(
        GrpoError, match=r"no prompts left: left out 2 of 2 .*with a pass_rate below --min-pass-rate \(0.6\)"
    ):
        dataset(tmp_path, *rated(0.25, 0.5), flags="--min-pass-rate 0.6")


@pytest.mark.parametrize("rate", [None, "0.5", True, 1.5, -0.1, float("nan")])
def test_a_row_without_a_pass_rate_is_named(tmp_path, rate):
    with pytest.raises(GrpoError, match=r'rows\.jsonl:2: "pass_rate" is .*: --curriculum'):
        dataset(tmp_path, *rated(0.5, rate), flags="--curriculum")


rates = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=20)


@given(rates, st.integers(0, 99), st.booleans(), st.lists(st.integers(0, 20), max_size=6))
def test_each_epoch_goes_from_easy_to_hard(rates, seed, shuffle, portions):
    sampler, size = PromptSampler(len(rates), seed, shuffle, np.array(rates)), len(rates)
    numbers = [number for n in [*portions, 2 * size] for number in sampler.next(n)]
    for start in range(0, len(numbers) - size + 1, size):
        epoch = numbers[start : start + size]
        assert sorted(epoch) == list(range(size))
        visited = [rates[number] for number in epoch]
        assert visited == sorted(rates, reverse=True)


def test_equal_rates_are_shuffled_anew_in_each_epoch_or_stay_in_the_files_order():
    sampler = PromptSampler(40, 0, True, np.full(40, 0.5))
    assert sampler.next(40) != sampler.next(40)
    assert PromptSampler(4, 0, False, np.array([0.5, 1, 0.5, 1])).next(4) == [1, 3, 0, 2]


def test_a_resume_with_another_order_is_refused():
    state = PromptSampler(3, 1).state_dict()
    with pytest.raises(GrpoError, match="--curriculum was False and is now True"):
        PromptSampler(3, 1, True, np.ones(3)).load_state_dict(state)


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 12), st.randoms()), max_size=8), st.booleans())
def test_what_is_given_back_comes_first_and_a_resume_knows(size, portions, easy_first):
    """Everything is still handed out and kept in the sampler's order: as often as without the giving back."""
    pass_rates = np.arange(size) / size if easy_first else None
    sampler = PromptSampler(size, 3, True, pass_rates)
    kept = 0
    for n, random in portions:
        numbers = sampler.next(n)
        back = [number for number in numbers if random.random() < 0.5]
        sampler.give_back(back)
        kept += n - len(back)
        assert sampler.consumed == kept
        resumed = PromptSampler(size, 3, True, pass_rates)
        resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        again = resumed.next(len(back) + 3)
        assert again[: len(back)] == back
        assert sampler.next(len(back) + 3) == again
        sampler.give_back(again)
        assert sampler.consumed == kept


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"regex": "(?<=a)b"}, "regex of structured_outputs .* vLLM cannot compile it: .*look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "a\0"}, "it has a NUL character"),
        ({"json": {"type": "nonsense"}}, "json of structured_outputs .* Invalid type: nonsense"),
        ({"json": '{"type": "string", "pattern": "(a"}'}, "unclosed group"),
        ({"json": {"items": json.loads('{"items":' * 70 + "{}" + "}" * 70)}}, "nested more than 64 levels deep"),
        ({"grammar": "root ::= missing"}, 'Rule "missing" is not defined'),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
    ],
)
def test_a_constraint_that_vllm_cannot_compile_is_a_bad_row(tmp_path, constraint, message):
    pytest.importorskip("llguidance")
    good = [{"regex": "[0-9]+"}, {"json": {"type": "object"}}, {"json": '{"type": "integer"}'}, {"choice": ["a", "b"]}]
    good += [{"grammar": 'root ::= "a" | "b"'}, {"grammar": 'start: "a" | "b"'}]
    rows = [row(structured_outputs=one) for one in good]
    assert len(dataset(tmp_path, *rows)) == len(rows)
    with pytest.raises(GrpoError, match=rf"rows\.jsonl:{len(rows) + 1}: .*{message}"):
        dataset(tmp_path, *rows, row(structured_outputs=constraint))
    assert len(dataset(tmp_path, *rows, row(structured_outputs=constraint), flags="--bad-rows skip")) == len(rows)
