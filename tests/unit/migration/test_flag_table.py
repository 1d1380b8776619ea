"""The table of other systems' flags: our names exist, theirs are unique, and values are converted."""

import re

import pytest

from megatron_grpo.migration.rows import Settings
from megatron_grpo.migration.table import SYSTEMS, answer
from megatron_grpo.migration.translate import translate
from megatron_grpo.training.arguments import build_parser

FLAGS = build_parser()._option_string_actions
GROUPS = dict.fromkeys(FLAGS, "")
ROWS = [(system.name, row) for system in SYSTEMS.values() for row in system.rows]


@pytest.mark.parametrize(
    "system, settings, expected",
    [
        # the cap of cispo is of the ratio itself: 1 + 0.2
        (
            "verl",
            {
                "actor_rollout_ref__actor__policy_loss__loss_mode": "cispo",
                "actor_rollout_ref__actor__clip_ratio_high": "0.2",
            },
            {"--loss-type": "cispo", "--epsilon-high": "1.2", "--dual-clip": None},
        ),
        (
            "verl",
            {"actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean"},
            {"--loss-type": "grpo", "--dual-clip": "3"},
        ),
        (
            "verl",
            {"algorithm__use_kl_in_reward": "True", "algorithm__kl_ctrl__kl_coef": "0.01"},
            {"--beta": "0.01", "--kl-in-reward": ""},
        ),
        ("verl", {"actor_rollout_ref__nccl_timeout": "7200"}, {"--distributed-timeout-minutes": "120"}),
        ("verl", {"trainer__test_freq": "-1"}, {"--eval-interval": None}),
        ("slime", {"kl_coef": "0.1"}, {"--beta": "0.1", "--kl-in-reward": ""}),
        ("slime", {"over_sampling_batch_size": "48", "rollout_batch_size": "32"}, {"--over-sampling-ratio": "1.5"}),
        (
            "slime",
            {"eval_prompt_data": ["aime", "a.jsonl", "math", "b.jsonl"]},
            {"--valid-data-path": "a.jsonl b.jsonl"},
        ),
        ("TRL", {"warmup_steps": "20"}, {"--lr-warmup-iters": "20", "--lr-warmup-fraction": None}),
        (
            "TRL",
            {"generation_batch_size": "256", "save_steps": "5", "per_device_train_batch_size": "8"},
            # 8 x 16 GPUs = 128 an update, 2 updates a rollout: 5 -> 6
            {"--generation-batch-size": "256", "--global-batch-size": "128", "--save-interval": "6"},
        ),
        ("TRL", {"vllm_server_host": "a", "vllm_server_port": "8001"}, {"--vllm-server-base-url": "http://a:8001"}),
        ("ms-swift", {"lr": "1e-6", "gradient_checkpointing": "true"}, {"--recompute-granularity": "selective"}),
        ("ms-swift", {"beta": "0", "ref_model": "/m"}, {"--ref-load-hf": None}),
        (
            "NeMo-RL",
            {"loss_fn__use_cispo": "True", "loss_fn__ratio_clip_max": "4.0"},
            {"--loss-type": "cispo", "--epsilon-high": "5.0"},
        ),
        (
            "ROLL",
            {"importance_sampling": "seq", "add_token_level_kl": "true", "init_kl_coef": "0.2"},
            {"--loss-type": "gspo", "--beta": "0.2", "--kl-in-reward": ""},
        ),
        (
            "ms-swift",
            {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": "true"},
            {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise", "--fp8-param-gather": None},
        ),
        (
            "verl",
            {
                "actor_rollout_ref__actor__megatron__override_transformer_config__fp8": '"hybrid"',
                "actor_rollout_ref__actor__megatron__override_transformer_config__fp8_recipe": "tensorwise",
                "actor_rollout_ref__actor__megatron__override_transformer_config__first_last_layers_bf16": "True",
                "actor_rollout_ref__actor__megatron__override_transformer_config__num_layers_at_end_in_bf16": "2",
            },
            {
                "--fp8-format": "hybrid",
                "--fp8-recipe": "tensorwise",
                "--first-last-layers-bf16": "",
                "--num-layers-at-end-in-bf16": "2",
            },
        ),
        (
            "verl",  # a recipe alone has no effect there, and is refused here
            {
                "actor_rollout_ref__actor__megatron__override_transformer_config__fp8": "False",
                "actor_rollout_ref__actor__megatron__override_transformer_config__fp8_recipe": "blockwise",
            },
            {"--fp8-format": None, "--fp8-recipe": None},
        ),
        (
            "NeMo-RL",
            {
                "policy__megatron_cfg__enabled": "true",
                "policy__megatron_cfg__fp8_cfg__enabled": "true",
                "policy__megatron_cfg__fp8_cfg__fp8": "e4m3",
                "policy__megatron_cfg__fp8_cfg__fp8_recipe": "blockwise",
                "policy__generation__vllm_cfg__precision": "fp8",
            },
            {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise", "--vllm-quantization": "fp8", "--vllm-dtype": None},
        ),
        (
            "NeMo-RL",  # the example configurations have the settings, switched off
            {
                "policy__megatron_cfg__enabled": "true",
                "policy__megatron_cfg__fp8_cfg__enabled": "false",
                "policy__megatron_cfg__fp8_cfg__fp8": "e4m3",
                "policy__megatron_cfg__fp8_cfg__fp8_recipe": "blockwise",
            },
            {"--fp8-format": None, "--fp8-recipe": None},
        ),
        (
            "ROLL",
            {
                "actor_train__strategy_args__strategy_config__fp8": "e4m3",
                "actor_train__strategy_args__strategy_config__fp8_recipe": "blockwise",
            },
            {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise"},
        ),
        (
            "slime",
            {"fp8_format": "e4m3", "fp8_amax_history_len": "1024", "fp8_param_gather": "true"},
            {"--fp8-format": "e4m3", "--fp8-param-gather": None},
        ),
        (  # verl's schedule takes a step for each rollout: 1024 / 256 x 2 updates
            "verl",
            {
                "data__train_batch_size": "1024",
                "actor_rollout_ref__actor__ppo_mini_batch_size": "256",
                "actor_rollout_ref__actor__ppo_epochs": "2",
                "actor_rollout_ref__actor__optim__lr_warmup_steps": "10",
                "actor_rollout_ref__actor__optim__lr_decay_steps": "100",
            },
            {"--lr-warmup-iters": "80", "--lr-decay-iters": "800"},
        ),
        (
            "TRL",
            {"scale_rewards": "group", "multi_objective_aggregation": "normalize_then_sum"},
            {"--advantage-estimator": "gdpo", "--scale-rewards": None},
        ),
        (
            "NeMo-RL",
            {"grpo__normalize_rewards": "true", "grpo__adv_estimator__name": "gdpo"},
            {"--advantage-estimator": "gdpo", "--scale-rewards": None},
        ),
    ],
)
def test_values_are_converted(system, settings, expected):
    given = of(system, **settings)
    assert {flag: given.get(flag) for flag in expected} == expected


@pytest.mark.parametrize(
    "system, settings, question",
    [
        ("verl", {"algorithm__adv_estimator": "gae"}, "there is no 'gae' here"),
        (
            "verl",
            {"data__train_batch_size": "${BATCH}"},
            "data.train_batch_size: this value is '${BATCH}', which is not a number",
        ),
        ("TRL", {"steps_per_generation": "3", "gradient_accumulation_steps": "2"}, "3 micro-batches of 2 an update"),
        ("TRL", {"loss_type": "luspo"}, "there is no 'luspo' here"),
        ("ms-swift", {"reward_funcs": ["accuracy", "mine"]}, "mine: register it with @register_reward"),
        ("slime", {"custom_generate_function_path": "a.b"}, "write it as an --environment or as a program of --agent"),
        (
            "slime",
            {"fp8_format": "e4m3", "fp8_recipe": "delayed"},
            "--fp8-recipe: there is no 'delayed' here: --fp8-recipe blockwise or tensorwise: docs/fp8.md",
        ),
    ],
)
def test_a_person_decides(system, settings, question):
    values = {name.replace("__", "."): value for name, value in settings.items()}
    points = translate(SYSTEMS[system], Settings(values), GROUPS).decide
    assert any(question in point for point in points), points


def test_the_last_part_of_a_dotted_name_is_enough():
    assert answer("--ppo_mini_batch_size").startswith(
        "verl's actor_rollout_ref.actor.ppo_mini_batch_size is --global-batch-size here ("
    )
    assert "Oumi's training.enable_gradient_checkpointing is --recompute-granularity here" in answer(
        "--enable-gradient-checkpointing"
    )
    assert answer("--path") is answer("--tensor_model_parallel_sizes") is None


def of(system: str, **settings):
    """Return our flags for these settings, dots written as two underscores: {flag: value, empty for a switch}."""
    values = {name.replace("__", "."): value for name, value in settings.items()}
    result = translate(SYSTEMS[system], Settings(values, gpus_per_node=8, nnodes=2), dict.fromkeys(FLAGS, ""))
    return {given.flag: " ".join(given.values) for given in result.given.values()}


def test_our_flags_exist():
    named = {(system, row.ours) for system, row in ROWS if row.ours}
    named |= {(system.name, flag) for system in SYSTEMS.values() for flag, _, _ in system.implied}
    assert sorted(pair for pair in named if pair[1] not in FLAGS) == []


def test_flags_named_in_notes_exist_here_or_there():
    launcher = {"--nnodes", "--nproc-per-node", "--local-dir"}
    missing = []
    for name, row in ROWS:
        theirs = {other.theirs.replace("_", "-") for other in SYSTEMS[name].rows}
        words = re.findall(r"(?<![\w-])--[a-z][\w-]*", f"{row.note} {row.convert.words if row.convert else ''}")
        missing += [(row.theirs, word) for word in words if word.replace("_", "-") not in {*FLAGS, *theirs, *launcher}]
    assert missing == []


def test_every_row_says_something():
    assert [row.theirs for _, row in ROWS if not row.ours and not row.note and not row.convert] == []
    pairs = [(system, row.theirs, row.ours) for system, row in ROWS]
    assert sorted(pair for pair in set(pairs) if pairs.count(pair) > 1) == []
