#!/usr/bin/env bash
# GRPO for the language model of Qwen3.5-35B-A3B on 16 GPUs of 80 GB: TP 2, EP 8, DP 8.
#
#   HF_MODEL=/models/Qwen3.5-35B-A3B TRAIN_DATA=train.parquet VALID_DATA=test.parquet \
#       bash examples/grpo/qwen3.5_35b_a3b.sh [more flags]
#   DRY_RUN=1 bash examples/grpo/qwen3.5_35b_a3b.sh    print layers and memory of each rank, on any machine
#
#   HF_MODEL    the model as Hugging Face publishes it (config.json, safetensors, tokenizer)
#   TRAIN_DATA, VALID_DATA   JSON lines or Parquet with prompt and answer (tools/data/gsm8k.py writes such files)
#   SAVE        folder for checkpoints, metrics and the export; a second start resumes from it
#
#   NNODES 2, GPUS_PER_NODE all, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500: start the script on each node
#
# Each of the 8 ranks of a node holds 32 of the 256 experts (EP 8, expert TP 1), so the token dispatch stays within a node;
# both nodes have the same experts and share their optimizer's state. Trainer and engine take turns on the memory of the
# GPUs. This script was planned by its dry run and has not run yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NNODES=${NNODES:-2}
HF_MODEL=${HF_MODEL:-/models/Qwen3.5-35B-A3B}
# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh # flags of data, loss, optimizer and logging: MATH_ARGS

# A run compares these flags with the model's config.json; a dry run does not read the model.
MODEL_ARGS=(
    --model-family qwen3_5_moe_text
    --num-layers 40
    --hidden-size 2048
    --ffn-hidden-size 512
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
    --kv-channels 256
    --qk-layernorm
    --attention-output-gate
    --experimental-attention-variant gated_delta_net
    --linear-attention-freq 4
    --linear-conv-kernel-dim 4
    --linear-key-head-dim 128
    --linear-value-head-dim 128
    --linear-num-key-heads 16
    --linear-num-value-heads 32
    --normalization RMSNorm
    --apply-layernorm-1p
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --rotary-base 10000000
    --rotary-percent 0.25
    --vocab-size 248320
    --max-position-embeddings 262144
    --untie-embeddings-and-output-weights
    --num-experts 256
    --moe-router-topk 8
    --moe-ffn-hidden-size 512
    --moe-shared-expert-intermediate-size 512
    --moe-shared-expert-gate
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer     # needed in 16 bits: A_log of a delta net is float32
)
TRAINING_ARGS=(
    --global-batch-size 512         # completions per update
    --transformer-impl local        # has the delta nets; pip install fla-core for their kernels
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-dtype fp32
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
ROLLOUT_ARGS=(
    --max-completion-length 4096
    --vllm-tensor-parallel-size 2
    --vllm-gpu-memory-utilization 0.6
    --sleep-level 2                 # the engine frees its memory during updates
    --offload-model                 # moves the trainer's tensors to host memory during generation
    --offload-gradients
    --offload-optimizer
)
[[ ${DRY_RUN:-0} == 1 ]] || MODEL_ARGS+=(--load-hf "$HF_MODEL")

launch "${MATH_ARGS[@]}" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
