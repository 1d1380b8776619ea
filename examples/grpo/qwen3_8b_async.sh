#!/usr/bin/env bash
# GRPO for Qwen3-8B on 8 GPUs of 80 GB: 4 train (TP 2, DP 2), 4 generate the next batch meanwhile. docs/asynchronous.md
# says when this is faster than qwen3_8b.sh, in which all 8 GPUs do both in turn.
#
#   HF_MODEL=/models/Qwen3-8B TRAIN_DATA=train.parquet VALID_DATA=test.parquet \
#       bash examples/grpo/qwen3_8b_async.sh [more flags]
#   DRY_RUN=1 bash examples/grpo/qwen3_8b_async.sh    print layers, roles and memory of each rank, on any machine
#
#   HF_MODEL    the model as Hugging Face publishes it (config.json, safetensors, tokenizer)
#   TRAIN_DATA, VALID_DATA   JSON lines or Parquet with prompt and answer (tools/data/gsm8k.py writes such files)
#   SAVE        folder for checkpoints, metrics and the export; a second start resumes from it
#
#   GPUS_PER_NODE all, NNODES 1, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500
#
# Flags at the end of the line override these. The last --rollout-ranks processes are vLLM engines, one a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NNODES=${NNODES:-1}
HF_MODEL=${HF_MODEL:-/models/Qwen3-8B}
# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh # flags of data, loss, optimizer and logging: MATH_ARGS
# shellcheck source=examples/grpo/qwen3_8b_model.sh
source examples/grpo/qwen3_8b_model.sh # the architecture: MODEL_ARGS

PARALLEL_ARGS=(                     # of the four trainers
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --use-distributed-optimizer     # each of the two replicas keeps half of the optimizer's state
    --overlap-grad-reduce
    --overlap-param-gather
)
TRAINING_ARGS=(
    --global-batch-size 512         # completions per update
    --max-tokens-per-microbatch 6144 # half of the optimizer's state is on each GPU: less room than in qwen3_8b.sh
    --transformer-impl local        # transformer_engine when it is installed
    --val-before-train
)
ROLLOUT_ARGS=(
    --max-completion-length 4096
    --rollout-ranks 4               # auto: an estimate now, a resume takes the times that the run has measured
    --vllm-tensor-parallel-size 1
    --vllm-gpu-memory-utilization 0.85
    --max-staleness 1               # batches that the engines may be ahead
    --rollout-importance-sampling-mode token_truncate # required with stale samples
)
[[ ${DRY_RUN:-0} == 1 ]] || MODEL_ARGS+=(--load-hf "$HF_MODEL")

launch "${MATH_ARGS[@]}" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
