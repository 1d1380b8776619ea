"""The table of other systems' flags: our names exist, theirs are unique, and values are converted."""

import re

import pytest

from megatron_grpo.migration.launch_script import launch_script
from megatron_grpo.migration.rows import Settings, key_of
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
        # get_grpo_returns takes only the shape of the KL
        ("slime", {"kl_coef": "0.1"}, {"--beta": "0", "--kl-in-reward": None}),
        ("slime", {"kl_coef": "0.1", "advantage_estimator": "gspo"}, {"--beta": "0", "--kl-in-reward": None}),
        (
            "slime",
            {"kl_coef": "0.1", "advantage_estimator": "reinforce_plus_plus"},
            {"--beta": "0.1", "--kl-in-reward": ""},
        ),
        (
            "slime",
            {"kl_coef": "0.1", "advantage_estimator": "reinforce_plus_plus_baseline"},
            {"--beta": "0.1", "--kl-in-reward": ""},
        ),
        ("slime", {"over_sampling_batch_size": "48", "rollout_batch_size": "32"}, {"--over-sampling-ratio": "1.5"}),
        (
            "slime",
            {"eval_prompt_data": ["aime", "a.jsonl", "math", "b.jsonl"]},
            {"--valid-data-path": "a.jsonl b.jsonl"},
        ),
        (  # of Nemotron 3 Nano
            "slime",
            {"hybrid_override_pattern": "MEM*E", "mamba_num_heads": "64", "squared_relu": "True"},
            {"--hybrid-layer-pattern": "MEM*E", "--mamba-num-heads": None, "--squared-relu": None},
        ),
        ("slime", {"rm_type": "dapo"}, {"--reward-funcs": "accuracy", "--answer-extraction": "line"}),
        ("slime", {"rm_type": "math"}, {"--reward-funcs": "accuracy", "--answer-extraction": None}),
        ("TRL", {"num_generations": "4"}, {"--max-completion-length": "256", "--lora-target-modules": None}),
        ("TRL", {"use_peft": "True"}, {"--lora-target-modules": "q_proj v_proj"}),
        ("TRL", {"use_peft": "True", "lora_target_modules": "[o_proj]"}, {"--lora-target-modules": "o_proj"}),
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
            "ms-swift",  # 2 x 4 x 16 GPUs
            {
                "chord_sft_dataset": "/d/sft.jsonl",
                "chord_sft_per_device_train_batch_size": "2",
                "gradient_accumulation_steps": "4",
                "chord_mu_peak": "0.9",
                "chord_mu_valley": "0.05",
                "chord_mu_warmup_steps": "0",
                "chord_mu_decay_steps": "200",
            },
            {
                "--sft-loss-type": "sft",
                "--sft-batch-size": "128",
                "--chord-mu-peak": "0.9",
                "--chord-mu-valley": "0.05",
                "--chord-mu-warmup-steps": None,
                "--chord-mu-decay-steps": "200",
            },
        ),
        (
            "ms-swift",  # without a decay mu is the valley from the first update
            {
                "chord_sft_dataset": "/d",
                "chord_enable_phi_function": "true",
                "chord_mu_peak": "1",
                "chord_mu_valley": "0.1",
            },
            {"--sft-loss-type": "chord", "--chord-mu-peak": "0.1", "--chord-mu-valley": None},
        ),
        (
            "NeMo-RL",
            {"loss_fn__use_cispo": "True", "loss_fn__ratio_clip_max": "4.0"},
            {"--loss-type": "cispo", "--epsilon-high": "5"},
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
        (  # NeMo-RL's schedule takes a step for each rollout, too: 32 x 4 completions / 32
            "NeMo-RL",
            {
                "policy__megatron_cfg__enabled": "true",
                "policy__megatron_cfg__scheduler__lr_warmup_iters": "10",
                "policy__train_global_batch_size": "32",
                "grpo__num_prompts_per_step": "32",
                "grpo__num_generations_per_prompt": "4",
            },
            {"--lr-warmup-iters": "40"},
        ),
        (
            "verl",  # mini-batches are taken in order unless actor.shuffle is given; with one there is no order
            {"data__train_batch_size": "512", "actor_rollout_ref__actor__ppo_mini_batch_size": "256"},
            {"--no-shuffle-completions": ""},
        ),
        (
            "verl",
            {"actor_rollout_ref__actor__shuffle": "True", "actor_rollout_ref__actor__megatron__dtype": "float16"},
            {"--no-shuffle-completions": None, "--fp16": "", "--bf16": None},
        ),
        # settings of verl, by its formulas in trainer/ppo/core_algos.py and its defaults in trainer/config
        ("verl", {"actor_rollout_ref__actor__use_kl_loss": "True"}, {"--beta": "0.001"}),
        ("verl", {"algorithm__use_kl_in_reward": "True"}, {"--beta": "0.001", "--kl-in-reward": ""}),
        (
            "verl",  # low_var_kl+ has the gradient of k2
            {"actor_rollout_ref__actor__use_kl_loss": "True", "actor_rollout_ref__actor__kl_loss_type": "low_var_kl+"},
            {"--kl-estimator": "k2"},
        ),
        ("verl", {"actor_rollout_ref__actor__clip_ratio": "0.3"}, {"--epsilon": None, "--epsilon-high": None}),
        ("verl", {"actor_rollout_ref__actor__clip_ratio_low": "0.1"}, {"--epsilon": "0.1", "--epsilon-high": "0.2"}),
        (
            "verl",
            {"actor_rollout_ref__actor__policy_loss__loss_mode": "gspo"},
            {"--loss-type": "gspo", "--epsilon": None, "--dual-clip": None},
        ),
        (
            "verl",
            {
                "actor_rollout_ref__actor__policy_loss__loss_mode": "gspo",
                "actor_rollout_ref__actor__clip_ratio_low": "0.0003",
                "actor_rollout_ref__actor__clip_ratio_high": "0.0004",
            },
            {"--epsilon": "0.0003", "--epsilon-high": "0.0004"},
        ),
        (
            "verl",
            {"actor_rollout_ref__actor__policy_loss__loss_mode": "kl_cov"},
            {
                "--loss-type": "dapo",
                "--epsilon": "0.99999",
                "--epsilon-high": "1e6",
                "--kl-cov-ratio": "0.0002",
                "--kl-cov-coef": "0.1",
                "--clip-cov-ratio": None,
            },
        ),
        (
            "verl",  # null: clip_ratio takes its place (verl/trainer/ppo/core_algos.py)
            {
                "actor_rollout_ref__actor__clip_ratio": "0.28",
                "actor_rollout_ref__actor__clip_ratio_low": "null",
                "actor_rollout_ref__actor__clip_ratio_high": "null",
            },
            {"--epsilon": "0.28", "--epsilon-high": "0.28"},
        ),
        (
            "verl",
            {"actor_rollout_ref__actor__clip_ratio": "0.28", "actor_rollout_ref__actor__clip_ratio_low": "null"},
            {"--epsilon": "0.28", "--epsilon-high": "0.2"},
        ),
        (
            "verl",
            {"actor_rollout_ref__actor__clip_ratio_low": "null", "actor_rollout_ref__actor__clip_ratio_high": "0.3"},
            {"--epsilon": "0.2", "--epsilon-high": "0.3"},
        ),
        (
            "verl",
            {
                "actor_rollout_ref__actor__policy_loss__loss_mode": "cispo",
                "actor_rollout_ref__actor__clip_ratio": "0.28",
                "actor_rollout_ref__actor__clip_ratio_high": "null",
            },
            {"--epsilon": None, "--epsilon-high": "1.28"},
        ),
        (
            "verl",
            {"trainer__val_only": "True", "data__val_files": "b.parquet"},
            {"--eval-only": "", "--valid-data-path": "b.parquet"},
        ),
        (
            "verl",  # verl evaluates only with val_before_train, and trains
            {"trainer__val_only": "True", "data__val_files": "b.parquet", "trainer__val_before_train": "False"},
            {"--eval-only": None},
        ),
        (
            "verl",  # the settings of another loss have no effect
            {
                "actor_rollout_ref__actor__policy_loss__clip_cov_ratio": "0.0002",
                "actor_rollout_ref__actor__tau_pos": "1",
            },
            {"--clip-cov-ratio": None, "--tau-pos": None},
        ),
        (
            "verl",
            {"algorithm__adv_estimator": "rloo", "algorithm__norm_adv_by_std_in_grpo": "True"},
            {"--advantage-estimator": "rloo", "--scale-rewards": None},
        ),
        (
            "verl",
            {"algorithm__adv_estimator": "grpo_passk", "actor_rollout_ref__rollout__n": "8"},
            {"--advantage-estimator": "pass_at_k", "--pass-at-k": "8", "--scale-rewards": "group"},
        ),
        (
            "verl",
            {
                "algorithm__rollout_correction__rollout_is": "token",
                "algorithm__rollout_correction__rollout_is_threshold": "0.5_5.0",
            },
            {
                "--rollout-importance-sampling-mode": "icepop",
                "--rollout-importance-sampling-threshold": "5.0",
                "--rollout-importance-sampling-lower-bound": "0.5",
            },
        ),
        (
            "verl",
            {"algorithm__rollout_correction__rollout_is": "sequence"},
            {"--rollout-importance-sampling-mode": None},
        ),
        (
            "verl",
            {"actor_rollout_ref__actor__use_dynamic_bsz": "True", "actor_rollout_ref__rollout__n": "4"},
            {
                "--max-tokens-per-microbatch": "16384",
                "--generation-batch-size": "4096",
                "--global-batch-size": "1024",
            },
        ),
        (
            "verl",
            {"actor_rollout_ref__actor__optim__betas": "[0.9,0.95]"},
            {"--adam-beta1": "0.9", "--adam-beta2": "0.95"},
        ),
        (
            "verl",
            {"actor_rollout_ref__actor__optim__lr": "2e-6", "actor_rollout_ref__actor__optim__min_lr_ratio": "0.1"},
            {"--lr": "2e-6", "--min-lr": "2e-07"},
        ),
        (
            "verl",  # sampled evaluation: a temperature above 0
            {
                "data__val_files": "b.parquet",
                "actor_rollout_ref__rollout__val_kwargs__temperature": "1.0",
                "actor_rollout_ref__rollout__val_kwargs__n": "4",
            },
            {"--eval-num-generations": "4", "--val-before-train": ""},
        ),
        (
            "verl",
            {"data__val_files": "b.parquet", "actor_rollout_ref__rollout__val_kwargs__n": "4"},
            {"--eval-num-generations": None, "--val-before-train": "", "--valid-data-path": "b.parquet"},
        ),
        (
            "verl",
            {"data__val_files": "b.parquet", "trainer__val_before_train": "False"},
            {"--valid-data-path": None, "--val-before-train": None},
        ),
        (
            "verl",  # old names, and a reward manager that does not read the buffer
            {
                "custom_reward_function__path": "my.py",
                "custom_reward_function__name": "f",
                "reward_model__reward_kwargs__overlong_buffer_cfg__enable": "True",
                "reward_model__reward_kwargs__overlong_buffer_cfg__len": "512",
            },
            {"--reward-adapter": "score=my.py:f", "--reward-funcs": "score", "--soft-cache-length": None},
        ),
        (
            "verl",
            {
                "custom_reward_function__path": "my.py",
                "reward_model__reward_manager": "dapo",
                "reward_model__reward_kwargs__overlong_buffer_cfg__enable": "True",
                "reward_model__reward_kwargs__overlong_buffer_cfg__len": "512",
                "algorithm__filter_groups__enable": "True",
                "algorithm__filter_groups__metric": "seq_final_reward",
            },
            {
                "--reward-funcs": "score soft_overlong",
                "--reward-weights": "1 1",
                "--soft-cache-length": "512",
                "--dynamic-sample-reward": "score soft_overlong",
            },
        ),
        (
            "verl",  # the rows of GSM8K ask for "#### 72", those of MATH for a box, those of DAPO for a last line
            {"data__train_files": "['/x/gsm8k/train.parquet', '/x/math/train.parquet']"},
            {
                "--reward-funcs": "gsm8k accuracy",
                "--reward-routing": "openai/gsm8k=gsm8k DigitalLearningGmbH/MATH-lighteval=accuracy",
                "--answer-extraction": None,
            },
        ),
        (
            "verl",
            {
                "data__train_files": "/x/gsm8k/train.parquet",
                "data__val_files": "/x/dapo.parquet",
                "trainer__val_before_train": "False",
            },
            {"--reward-funcs": "gsm8k", "--reward-routing": None, "--answer-extraction": None},
        ),
        (
            "verl",
            {"data__train_files": "data/dapo-math-17k.parquet", "data__val_files": "data/aime-2024.parquet"},
            {"--reward-funcs": "accuracy", "--reward-routing": None, "--answer-extraction": "line"},
        ),
        (
            "verl",  # "aime" within another word
            {"data__train_files": "/x/reclaimed/train.parquet"},
            {"--reward-funcs": "accuracy", "--reward-routing": None, "--answer-extraction": None},
        ),
        (
            "verl",  # math_dapo.compute_score gives 1 or -1, the penalty goes down to -penalty_factor
            {
                "data__train_files": "dapo-math-17k.parquet",
                "data__val_files": "aime-2024.parquet",
                "reward__reward_manager__name": "dapo",
                "reward__reward_kwargs__overlong_buffer_cfg__enable": "True",
                "reward__reward_kwargs__overlong_buffer_cfg__len": "512",
            },
            {"--reward-funcs": "accuracy soft_overlong", "--reward-weights": "2 1", "--answer-extraction": "line"},
        ),
        (
            "verl",  # which of the two forms a mixed batch has is the row's
            {"data__train_files": "['gsm8k.parquet', 'dapo.parquet', 'mine.parquet']"},
            {"--reward-funcs": "accuracy", "--reward-routing": None, "--answer-extraction": None},
        ),
        (
            "verl",  # a field of megatron-core without a row
            {"actor_rollout_ref__actor__megatron__override_transformer_config__moe_router_load_balancing_type": "none"},
            {"--moe-router-load-balancing-type": "none"},
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
        # ms-swift subtracts the mean of the group, then divides by the std of the differences: over the batch by
        # default; over the group it is that of the rewards, as GRPO's
        (
            "ms-swift",
            {"advantage_estimator": "reinforce_plus_plus"},
            {"--advantage-estimator": "reinforce_plus_plus_baseline", "--scale-rewards": None},
        ),
        (
            "ms-swift",
            {"advantage_estimator": "reinforce_plus_plus", "scale_rewards": "batch"},
            {"--advantage-estimator": "reinforce_plus_plus_baseline", "--scale-rewards": None},
        ),
        (
            "ms-swift",
            {"advantage_estimator": "reinforce_plus_plus", "scale_rewards": "group"},
            {"--advantage-estimator": "grpo", "--scale-rewards": "group"},
        ),
        (
            "ms-swift",
            {"advantage_estimator": "reinforce_plus_plus", "scale_rewards": "false"},
            {"--advantage-estimator": "grpo", "--scale-rewards": "none"},
        ),
        (
            "ms-swift",
            {"advantage_estimator": "rloo", "scale_rewards": "batch"},
            {"--advantage-estimator": "rloo", "--scale-rewards": "batch"},
        ),
        # NeMo-RL: minus_baseline is true by default; keys outside adv_estimator count without that block only
        (
            "NeMo-RL",
            {"grpo__adv_estimator__name": "reinforce_plus_plus", "grpo__normalize_rewards": "true"},
            {"--advantage-estimator": "reinforce_plus_plus_baseline", "--scale-rewards": None},
        ),
        (
            "NeMo-RL",
            {
                "grpo__adv_estimator__name": "reinforce_plus_plus",
                "grpo__adv_estimator__minus_baseline": "true",
                "grpo__adv_estimator__normalize_rewards": "true",
                "grpo__adv_estimator__use_leave_one_out_baseline": "true",
            },
            {"--advantage-estimator": "reinforce_plus_plus_baseline", "--scale-rewards": None},
        ),
        (
            "NeMo-RL",
            {"grpo__adv_estimator__name": "reinforce_plus_plus", "grpo__adv_estimator__minus_baseline": "false"},
            {"--advantage-estimator": "reinforce_plus_plus", "--scale-rewards": None},
        ),
        (
            "NeMo-RL",
            {
                "grpo__adv_estimator__name": "grpo",
                "grpo__adv_estimator__normalize_rewards": "false",
                "grpo__adv_estimator__use_leave_one_out_baseline": "true",
                "grpo__normalize_rewards": "true",
                "grpo__use_leave_one_out_baseline": "false",
            },
            {"--advantage-estimator": "rloo", "--scale-rewards": "none"},
        ),
        (
            "NeMo-RL",
            {
                "grpo__adv_estimator__name": "grpo",
                "grpo__adv_estimator__use_leave_one_out_baseline": "false",
                "grpo__use_leave_one_out_baseline": "true",
            },
            {"--advantage-estimator": None, "--scale-rewards": None},
        ),
        # max_length bounds the prompt, and is the model's maximum where it is not given; --max-prompt-length is 512
        ("ms-swift", {}, {"--truncation-strategy": "raise", "--max-prompt-length": None}),
        ("ms-swift", {"truncation_strategy": "delete"}, {"--truncation-strategy": "raise"}),
        ("ms-swift", {"max_length": "4096"}, {"--truncation-strategy": "left", "--max-prompt-length": "4096"}),
        ("ms-swift", {"max_length": "4096", "truncation_strategy": "delete"}, {"--truncation-strategy": "delete"}),
        # ROLL centres the rewards of reinforce in the group with norm_mean_type group, divides them by the std of
        # norm_std_type, and whitens the advantages over the batch with whiten_advantages
        (
            "ROLL",
            {
                "adv_estimator": "reinforce",
                "norm_mean_type": "group",
                "norm_std_type": "batch",
                "whiten_advantages": "true",
                "gamma": "1.0",
            },
            {"--advantage-estimator": "reinforce_plus_plus_baseline", "--scale-rewards": None, "--gamma": None},
        ),
        (
            "ROLL",
            {"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "batch"},
            {"--advantage-estimator": "grpo", "--scale-rewards": "batch"},
        ),
        (
            "ROLL",
            {"adv_estimator": "reinforce", "norm_mean_type": "group"},
            {"--advantage-estimator": "grpo", "--scale-rewards": "none"},
        ),
        (
            "ROLL",
            {"adv_estimator": "reinforce", "gamma": "0.9"},
            {"--advantage-estimator": "reinforce_plus_plus", "--scale-rewards": None, "--gamma": "0.9"},
        ),
        # kl_in_reward is true by default of these estimators, and teacher_kl_coef 1 in GRPO
        ("ms-swift", {"advantage_estimator": "rloo", "beta": "0.001"}, {"--kl-in-reward": "", "--beta": "0.001"}),
        ("ms-swift", {"advantage_estimator": "reinforce_plus_plus"}, {"--kl-in-reward": ""}),
        ("ms-swift", {"advantage_estimator": "rloo", "kl_in_reward": "false"}, {"--kl-in-reward": None}),
        ("ms-swift", {"advantage_estimator": "rloo", "beta": "0"}, {"--kl-in-reward": None}),
        ("ms-swift", {"advantage_estimator": "grpo"}, {"--kl-in-reward": None, "--teacher-kl-coef": None}),
        ("ms-swift", {"teacher_model": "/t"}, {"--teacher-load-hf": "/t", "--teacher-kl-coef": "1"}),
        ("ms-swift", {"teacher_model": "/t", "teacher_kl_coef": "0.5"}, {"--teacher-kl-coef": "0.5"}),
        ("ms-swift", {"teacher_model": "/t", "rlhf_type": "gkd"}, {"--teacher-kl-coef": None}),
        (  # normalize_rewards is true by default there, --scale-rewards of rloo is none here
            "NeMo-RL",
            {"grpo__use_leave_one_out_baseline": "true"},
            {"--advantage-estimator": "rloo", "--scale-rewards": "group"},
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
        ("verl", {"actor_rollout_ref__actor__clip_ratio": "0.3"}, "clip_ratio=0.3 has no effect in verl"),
        (
            "verl",
            {"actor_rollout_ref__actor__use_kl_loss": "True", "actor_rollout_ref__actor__kl_loss_type": "kl"},
            "the gradient of kl is 0 on average",
        ),
        (
            "verl",
            {"reward_model__reward_kwargs__overlong_buffer_cfg__enable": "True"},
            "overlong_buffer_cfg: verl's reward manager naive ignores it",
        ),
        ("verl", {"actor_rollout_ref__actor__ppo_mini_batch_size": "${MINI}"}, "ppo_mini_batch_size: this value is"),
        (
            "TRL",
            {"reward_funcs": ["rewards.mine"]},
            "mine is not a reward here; --reward-adapter NAME=FILE.py:FUNCTION",
        ),
        ("ms-swift", {"async_generate": "true"}, "--rollout-ranks N, with --max-staleness"),
        (
            "verl",
            {"data__train_batch_size": "${BATCH}"},
            "data.train_batch_size: this value is '${BATCH}', which is not a number",
        ),
        ("TRL", {"steps_per_generation": "3", "gradient_accumulation_steps": "2"}, "3 micro-batches of 2 an update"),
        ("TRL", {"loss_type": "luspo"}, "there is no 'luspo' here"),
        ("ms-swift", {"reward_funcs": ["accuracy", "mine"]}, "mine: register it with @register_reward"),
        (
            "ROLL",
            {"adv_estimator": "reinforce", "norm_mean_type": "group", "gamma": "0.9"},
            "no estimator has both gamma and norm_mean_type group",
        ),
        ("slime", {"spec": ["my.models", "get_spec"]}, "a layer of another model"),
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


@pytest.mark.parametrize(
    "system, settings, change",
    [
        ("verl", {}, "algorithm.adv_estimator is not given"),
        ("verl", {"algorithm__rollout_correction__rollout_is": "sequence"}, "the product of its tokens' ratios"),
        (
            "verl",
            {"algorithm__rollout_correction__rollout_rs": "token_k1"},
            "rollout_rs=token_k1: no tokens are left out",
        ),
        ("verl", {"algorithm__rollout_correction__bypass_mode": "True"}, "not those of the engine"),
        ("verl", {"actor_rollout_ref__actor__policy_loss__loss_mode": "gspo"}, "clipped at 3e-4 and 4e-4"),
        ("verl", {"actor_rollout_ref__actor__policy_loss__loss_mode": "cispo"}, "no lower bound of the ratio"),
        (
            "verl",
            {
                "data__val_files": "b",
                "actor_rollout_ref__rollout__val_kwargs__temperature": "0.6",
                "actor_rollout_ref__rollout__temperature": "1.0",
            },
            "val_kwargs.temperature=0.6: sampled evaluation has the rollout's --temperature",
        ),
        (
            "verl",
            {
                "reward__reward_manager__name": "dapo",
                "reward__reward_kwargs__overlong_buffer_cfg__enable": "True",
                "reward__reward_kwargs__max_resp_len": "1024",
                "data__max_response_length": "2048",
            },
            "max_resp_len=1024: soft_overlong ends at --max-completion-length (2048)",
        ),
        # TRL sums the log-ratios of a completion, compares the exponential and multiplies by it
        ("TRL", {"use_vllm": "true"}, "sequence_mask, the default there: the product of a completion's ratios"),
        (
            "TRL",
            {"use_vllm": "true", "vllm_importance_sampling_mode": "sequence_truncate"},
            "vllm_importance_sampling_mode=sequence_truncate: the product of a completion's ratios",
        ),
        (
            "Oumi",
            {
                "training__trainer_type": "TRL_GRPO",
                "training__grpo__use_vllm": "true",
                "vllm_importance_sampling_mode": "sequence_mask",
            },
            "vllm_importance_sampling_mode=sequence_mask: the product of a completion's ratios",
        ),
        ("ms-swift", {"rlhf_type": "gkd"}, "--lmbda is 0.5, the default there: all completions are the policy's"),
        ("ms-swift", {"loss_type": "fipo"}, "--fipo_clip_high_only is true, the default there: weights are clipped on"),
        (  # a completion is kept where ratio_min <= g <= ratio
            "NeMo-RL",
            {
                "loss_fn__use_importance_sampling_correction": "true",
                "loss_fn__truncated_importance_sampling_type": "seq-mask-tis",
                "loss_fn__truncated_importance_sampling_ratio": "1.002",
                "loss_fn__truncated_importance_sampling_ratio_min": "0.999",
            },
            "ratio_min=0.999: --rollout-importance-sampling-mode sequence_mask has no lower bound",
        ),
        ("TRL", {"use_adaptive_entropy": "true"}, "use_adaptive_entropy=true: --entropy-coef is constant"),
        ("slime", {"eval_top_p": "0.7"}, "sampled evaluation has the rollout's settings"),
    ],
)
def test_what_changes_behaviour_is_said(system, settings, change):
    values = {name.replace("__", "."): value for name, value in settings.items()}
    changes = translate(SYSTEMS[system], Settings(values), GROUPS).changes
    assert any(change in point for point in changes), changes


@pytest.mark.parametrize(
    "system, settings, name",
    [
        ("TRL", {"use_vllm": "true", "vllm_importance_sampling_correction": "false"}, "importance_sampling"),
        ("TRL", {"use_vllm": "true", "vllm_importance_sampling_mode": "token_mask"}, "importance_sampling"),
        ("TRL", {"vllm_importance_sampling_mode": "sequence_mask"}, "importance_sampling"),
        ("ms-swift", {"rlhf_type": "gkd", "lmbda": "1"}, "lmbda"),
        ("ms-swift", {"rlhf_type": "grpo"}, "lmbda"),
        ("ms-swift", {"loss_type": "fipo", "fipo_clip_high_only": "false"}, "fipo"),
        ("ms-swift", {"loss_type": "grpo"}, "fipo"),
    ],
)
def test_what_a_run_does_in_the_same_way_is_no_change(system, settings, name):
    changes = translate(SYSTEMS[system], Settings(settings), GROUPS).changes
    assert not any(name in point for point in changes), changes


@pytest.mark.parametrize(
    "settings",
    [
        {
            "algorithm.rollout_correction.rollout_rs": "null",
            "trainer.val_only": "False",
            "algorithm.adv_estimator": "grpo",
        },
        {
            "data.train_max_samples": "-1",
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.rollout.do_sample": "True",
        },
        {
            "actor_rollout_ref.actor.optim.num_cycles": "0.50",
            "algorithm.adv_estimator": "grpo",
            "reward_model.enable": "false",
        },
    ],
)
def test_settings_that_are_off_change_nothing(settings):
    result = translate(SYSTEMS["verl"], Settings(settings), GROUPS)
    names = [name for name in settings if name != "algorithm.adv_estimator"]
    assert result.changes == [] and not any(name in point for name in names for point in result.decide)
    assert {name for name, _ in result.without} == set(names)


@pytest.mark.parametrize(
    "spec",
    [
        ["slime_plugins.models.qwen3_5", "get_qwen3_5_spec"],
        ["slime_plugins.models.gemma4", "get_gemma4_spec"],
        ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    ],
)
def test_slimes_layers_of_a_family_here_need_no_decision(spec):
    settings = {"spec": spec, "is_hybrid_model": "True", "hybrid_mlp_ratio": "0.5"}
    result = translate(SYSTEMS["slime"], Settings(settings), GROUPS)
    assert not any("spec" in point for point in result.decide) and not result.unknown
    assert {name for name, _ in result.without} == {"--spec", "--is-hybrid-model", "--hybrid-mlp-ratio"}


def test_clip_ratio_that_verl_reads_needs_no_decision():
    names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    values = {f"actor_rollout_ref.actor.{name}": "null" for name in names} | {
        "actor_rollout_ref.actor.clip_ratio": "0.28"
    }
    assert not any("clip_ratio" in point for point in translate(SYSTEMS["verl"], Settings(values), GROUPS).decide)


@pytest.mark.parametrize("system", SYSTEMS)
def test_null_is_never_the_value_of_a_flag_and_an_unknown_variable_is_no_error(system):
    wrong = []
    for name in {row.theirs for row in SYSTEMS[system].rows if not row.theirs.endswith("*")}:
        given = translate(SYSTEMS[system], Settings({key_of(name): "null"}), GROUPS).given.values()
        wrong += [(name, flag.flag) for flag in given if {"null", "None"} & set(flag.values)]
        translate(SYSTEMS[system], Settings({key_of(name): "${X}"}), GROUPS)
    assert wrong == []


@pytest.mark.parametrize(
    "settings, resumes",
    [
        ({}, True),
        ({"trainer.resume_mode": "auto"}, True),
        ({"trainer.resume_mode": "disable"}, False),
        ({"trainer.val_only": "True", "data.val_files": "b"}, False),  # HF_MODEL is evaluated
        ({"trainer.val_only": "True"}, True),
    ],
)
@pytest.mark.parametrize("system", ["verl", "Oumi"])
def test_a_start_that_does_not_resume_there_does_not_resume_here(system, settings, resumes):
    settings = Settings({"trainer.default_local_dir": "/s"} | settings)
    result = translate(SYSTEMS[system], settings, GROUPS)
    assert result.resumes is resumes and ("--load" in result.given) is resumes
    script = launch_script("run.sh", system, result, settings, GROUPS)
    assert ('--load "$SAVE"' in script) is resumes and '--save "$SAVE"' in script


@pytest.mark.parametrize(
    "system, settings",
    [
        ("verl", {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/c/global_step_5"}),
        ("TRL", {"resume_from_checkpoint": "/c/checkpoint-5"}),
        ("ms-swift", {"resume_from_checkpoint": "/c/checkpoint-5"}),
        ("ROLL", {"resume_from_checkpoint": "/c/checkpoint-5"}),
        ("Oumi", {"training.resume_from_checkpoint": "/c/checkpoint-5"}),
    ],
)
def test_a_checkpoint_of_another_system_is_left_to_a_person(system, settings):
    result = translate(SYSTEMS[system], Settings(settings), GROUPS)
    assert any("checkpoints of another system do not load here" in point for point in result.decide)


@pytest.mark.parametrize(
    "name", ["actor.clip_ration", "actor.optim.lrr", "rollout.temprature", "actor.megatron.override_ddp_config.oops"]
)
def test_a_name_that_no_row_knows_is_left_to_a_person(name):
    settings = {f"actor_rollout_ref.{name}": "1", "data.trian_files": "a", "reward.custom_reward_function.pth": "b"}
    result = translate(SYSTEMS["verl"], Settings(settings), GROUPS)
    assert sorted(result.unknown) == sorted(settings)


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
