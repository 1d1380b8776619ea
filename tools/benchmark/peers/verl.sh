#!/usr/bin/env bash
# verl with Megatron-Core for the table: common.sh says how it is called.
#
# Pages: verl.readthedocs.io/en/latest/perf/perf_tuning.html (packing, micro-batches by tokens, larger ones without a backward pass,
# max_num_batched_tokens above 2048), /perf/best_practices.html, /algo/rollout_corr.html (bypass mode: no forward pass for old log-probabilities),
# and examples/grpo_trainer/run_qwen3_8b_megatron.sh of its repository.
source "$(dirname "$0")/common.sh"
export VERL_FILE_LOGGER_PATH=$out/metrics.jsonl
"$PYTHON" -m verl.trainer.main_ppo model_engine=megatron \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.rollout_correction.bypass_mode=True \
    data.train_files="$inputs/rows.parquet" data.val_files="$inputs/rows.parquet" data.train_batch_size=$((batch / generations)) \
    data.max_prompt_length=$prompt data.max_response_length=$completion \
    reward.custom_reward_function.path="$here/reward_verl.py" reward.custom_reward_function.name=compute_score \
    actor_rollout_ref.model.path="$inputs/model" actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=$((batch / generations)) actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$micro_tokens \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.megatron.use_mbridge=True actor_rollout_ref.actor.megatron.vanilla_mbridge=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=$generations \
    actor_rollout_ref.rollout.calculate_log_probs=True actor_rollout_ref.rollout.gpu_memory_utilization=$engine_share \
    actor_rollout_ref.rollout.max_num_seqs=$batch actor_rollout_ref.rollout.max_num_batched_tokens=$micro_tokens \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$((2 * micro_tokens)) \
    trainer.logger='["console","file"]' trainer.n_gpus_per_node=$GPUS trainer.nnodes=1 trainer.val_before_train=False \
    trainer.save_freq=-1 trainer.test_freq=-1 trainer.total_training_steps=$updates "$@" 2>&1 | tee "$out/log.txt"
