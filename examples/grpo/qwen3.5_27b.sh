#!/usr/bin/env bash
# GRPO for the language model of Qwen3.5-27B on 8 GPUs of 80 GB: TP 8 with sequence parallelism.
#
#   HF_MODEL=/models/Qwen3.5-27B TRAIN_DATA=train.parquet VALID_DATA=test.parquet \
#       bash examples/grpo/qwen3.5_27b.sh [more flags]
#   DRY_RUN=1 bash examples/grpo/qwen3.5_27b.sh    print layers and memory of each rank, on any machine
#
#   HF_MODEL    the model as Hugging Face publishes it (config.json, safetensors, tokenizer)
#   TRAIN_DATA, VALID_DATA   JSON lines or Parquet with prompt and answer (tools/data/gsm8k.py writes such files)
#   SAVE        folder for checkpoints, metrics and the export; a second start resumes from it
#
#   NNODES 1, GPUS_PER_NODE all, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500: start the script on each node
#
# The 8 GPUs of a node hold one replica of the model; with NNODES=2 two replicas share the optimizer's state. Each rank has
# 2 of the 16 key heads of a gated delta net. Engines of 4 GPUs generate. Trainer and engine take turns on the memory of
# the GPUs. This script was planned by its dry run and has not run yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NNODES=${NNODES:-1}
HF_MODEL=${HF_MODEL:-/models/Qwen3.5-27B}
# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh # flags of data, loss, optimizer and logging: MATH_ARGS

# A run compares these flags with the model's config.json; a dry run does not read the model.
MODEL_ARGS=(
    --model-family qwen3_5_text
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 17408
    --num-attention-heads 24
    --group-query-attention
    --num-query-groups 4
    --kv-channels 256
    --qk-layernorm
    --attention-output-gate
    --experimental-attention-variant gated_delta_net
    --linear-attention-freq 4
    --linear-conv-kernel-dim 4
    --linear-key-head-dim 128
    --linear-value-head-dim 128
    --linear-num-key-heads 16
    --linear-num-value-heads 48
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
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --use-distributed-optimizer     # needed in 16 bits: A_log of a delta net is float32
)
TRAINING_ARGS=(
    --global-batch-size 512         # completions per update
    --transformer-impl local        # has the delta nets; pip install fla-core for their kernels
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
ROLLOUT_ARGS=(
    --max-completion-length 4096
    --vllm-tensor-parallel-size 4
    --vllm-gpu-memory-utilization 0.6
    --sleep-level 2                 # the engine frees its memory during updates
    --offload-model                 # moves the trainer's tensors to host memory during generation
    --offload-gradients
    --offload-optimizer
)
[[ ${DRY_RUN:-0} == 1 ]] || MODEL_ARGS+=(--load-hf "$HF_MODEL")

launch "${MATH_ARGS[@]}" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
