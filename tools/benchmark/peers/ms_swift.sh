#!/usr/bin/env bash
# ms-swift's Megatron GRPO for the table: common.sh says how it is called.
#
# Pages: swift.readthedocs.io/en/latest/Megatron-SWIFT/Quick-start.html ("Training Tips": throughput by packing, data parallelism
# and less recomputation) and examples/megatron/grpo/dense_colocate.sh of its repository, less the offloads and the
# recomputation that this shape does not need. --torch_dtype: with a float32 checkpoint ms-swift sets --fp16 beside --bf16 and trains in float16.
source "$(dirname "$0")/common.sh"
export NPROC_PER_NODE=$GPUS USE_HF=1
"${torchrun[@]}" -m swift.cli._megatron.rlhf --rlhf_type grpo \
    --model "$inputs/model" --model_type qwen3 --template roles --tuner_type full --torch_dtype bfloat16 \
    --dataset "$inputs/messages.jsonl" --split_dataset_ratio 0 --load_from_cache_file false --dataset_num_proc 1 \
    --external_plugins tools/benchmark/peers/plugin_ms_swift.py --reward_funcs even_tokens \
    --train_iters $updates --global_batch_size $batch --steps_per_generation 1 --num_generations $generations \
    --micro_batch_size $micro_batch --padding_free true --attention_backend auto --recompute_granularity none \
    --max_length $prompt --max_completion_length $completion --temperature 1.0 \
    --use_vllm true --vllm_mode colocate --sleep_level 1 --vllm_gpu_memory_utilization $engine_share \
    --vllm_max_model_len $((prompt + completion)) --vllm_max_num_seqs $batch \
    --lr 1e-6 --bf16 true --beta 0 --loss_type grpo --finetune --no_save_optim --no_save_rng \
    --logging_steps 1 --save_steps 1000 --eval_steps 1000 --dataloader_num_workers 1 --log_completions false \
    --report_to tensorboard --output_dir "$out" --add_version false "$@" 2>&1 | tee "$out/log.txt"
