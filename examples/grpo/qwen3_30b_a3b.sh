#!/usr/bin/env bash
# GRPO for Qwen3-30B-A3B on 32 GPUs of 80 GB: TP 2, PP 2 with 2 virtual stages, EP 8, DP 8.
#
#   HF_MODEL=/models/Qwen3-30B-A3B TRAIN_DATA=train.parquet VALID_DATA=test.parquet \
#       bash examples/grpo/qwen3_30b_a3b.sh [more flags]
#   DRY_RUN=1 bash examples/grpo/qwen3_30b_a3b.sh    print layers and memory of each rank, on any machine
#
#   HF_MODEL    the model as Hugging Face publishes it (config.json, safetensors, tokenizer)
#   TRAIN_DATA, VALID_DATA   JSON lines or Parquet with prompt and answer (tools/data/gsm8k.py writes such files)
#   SAVE        folder for checkpoints, metrics and the export; a second start resumes from it
#
#   NNODES 4, GPUS_PER_NODE all, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500: start the script on each node
#
# Each pipeline stage has 24 of the 48 layers, in 2 virtual stages. Each of the 8 ranks of a node holds 16 of the 128
# experts (EP 8, expert TP 1), so the token dispatch stays within a node. A stage has 2 nodes with the same experts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NNODES=${NNODES:-4}
HF_MODEL=${HF_MODEL:-/models/Qwen3-30B-A3B}
# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh # flags of data, loss, optimizer and logging: MATH_ARGS

# A run compares these flags with the model's config.json; a dry run does not read the model.
MODEL_ARGS=(
    --model-family qwen3_moe
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --rotary-base 1000000
    --vocab-size 151936
    --max-position-embeddings 40960
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 768
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 12
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
)
TRAINING_ARGS=(
    --global-batch-size 512         # completions per update
    --transformer-impl local        # transformer_engine when it is installed
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-dtype fp32
    --recompute-granularity selective
    --recompute-modules moe
)
ROLLOUT_ARGS=(
    --max-completion-length 4096
    --vllm-tensor-parallel-size 4
    --vllm-gpu-memory-utilization 0.45
)
[[ ${DRY_RUN:-0} == 1 ]] || MODEL_ARGS+=(--load-hf "$HF_MODEL")

launch "${MATH_ARGS[@]}" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
