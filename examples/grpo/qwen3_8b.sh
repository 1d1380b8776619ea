#!/usr/bin/env bash
# GRPO for Qwen3-8B on 8 GPUs of 80 GB: TP 2 with sequence parallelism, DP 4. docs/qwen3_8b.md is a tutorial.
#
#   HF_MODEL=/models/Qwen3-8B TRAIN_DATA=train.parquet VALID_DATA=test.parquet \
#       bash examples/grpo/qwen3_8b.sh [more flags]
#   DRY_RUN=1 bash examples/grpo/qwen3_8b.sh    print layers and memory of each rank, on any machine
#
#   HF_MODEL    the model as Hugging Face publishes it (config.json, safetensors, tokenizer)
#   TRAIN_DATA, VALID_DATA   JSON lines or Parquet with prompt and answer (tools/data/gsm8k.py writes such files)
#   SAVE        folder for checkpoints, metrics and the export; a second start resumes from it
#
#   GPUS_PER_NODE all, NNODES 1, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500
#
# Flags at the end of the line override these. Two GPUs hold a replica of the model; the four replicas share the optimizer's
# state. Four engines of 2 GPUs each generate. Trainer and engine take turns on the memory of the GPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NNODES=${NNODES:-1}
HF_MODEL=${HF_MODEL:-/models/Qwen3-8B}
# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh # flags of data, loss, optimizer and logging: MATH_ARGS
# shellcheck source=examples/grpo/qwen3_8b_model.sh
source examples/grpo/qwen3_8b_model.sh # the architecture: MODEL_ARGS

PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --use-distributed-optimizer     # each replica keeps a quarter of the optimizer's state
    --overlap-grad-reduce
    --overlap-param-gather
)
TRAINING_ARGS=(
    --global-batch-size 512         # completions per update
    --transformer-impl local        # transformer_engine when it is installed
    --val-before-train
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
