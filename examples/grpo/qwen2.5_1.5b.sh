#!/usr/bin/env bash
# GRPO for Qwen2.5-1.5B-Instruct on one GPU of 80 GB, all weights or an adapter. docs/one_gpu.md is a tutorial.
#
#   HF_MODEL=models/Qwen2.5-1.5B-Instruct TRAIN_DATA=data/train.parquet VALID_DATA=data/test.parquet \
#       bash examples/grpo/qwen2.5_1.5b.sh [more flags]
#   LORA=1 ... bash examples/grpo/qwen2.5_1.5b.sh    train an adapter (LoRA) instead of all weights
#   DRY_RUN=1 bash examples/grpo/qwen2.5_1.5b.sh     print sizes and memory, on any machine
#
#   HF_MODEL    the model as Hugging Face publishes it (config.json, safetensors, tokenizer)
#   TRAIN_DATA, VALID_DATA   JSON lines or Parquet with prompt and answer (tools/data/gsm8k.py writes such files)
#   SAVE        folder for checkpoints, metrics and the export; a second start resumes from it
#
#   GPUS_PER_NODE all (1 in a dry run), NNODES 1, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500
#
# Flags at the end of the line override these. Each GPU holds the model; several GPUs share the completions of an update.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

HF_MODEL=${HF_MODEL:-models/Qwen2.5-1.5B-Instruct}
[[ ${DRY_RUN:-0} != 1 ]] || GPUS_PER_NODE=${GPUS_PER_NODE:-1}
[[ ${LORA:-0} != 1 ]] || SAVE=${SAVE:-runs/qwen2.5_1.5b_lora} # apart from a run of all weights
# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh # flags of data, loss, optimizer and logging: MATH_ARGS

# A run compares these flags with the model's config.json; a dry run does not read the model.
MODEL_ARGS=(
    --model-family qwen2
    --num-layers 28
    --hidden-size 1536
    --ffn-hidden-size 8960
    --num-attention-heads 12
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --add-qkv-bias
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --rotary-base 1000000
    --vocab-size 151936
    --max-position-embeddings 32768
)
TRAINING_ARGS=(
    --global-batch-size 512         # completions per update: 64 prompts of 8
    --max-prompt-length 512
    --train-iters 100
    --transformer-impl local        # transformer_engine when it is installed
    --use-distributed-optimizer
    --val-before-train
)
ROLLOUT_ARGS=(
    --max-completion-length 1024
    --vllm-gpu-memory-utilization 0.5
    --sleep-level 2                 # the engine frees its memory during updates
)
LORA_ARGS=()
if [[ ${LORA:-0} == 1 ]]; then
    LORA_ARGS=(
        --lora-rank 32
        --lora-alpha 64
        --lr 1e-5                   # ten times the rate for all weights
        --sleep-level 0             # trainer and engine fit at the same time
    )
fi
[[ ${DRY_RUN:-0} == 1 ]] || MODEL_ARGS+=(--load-hf "$HF_MODEL")

launch "${MATH_ARGS[@]}" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${LORA_ARGS[@]}" "$@"
