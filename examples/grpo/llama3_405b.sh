#!/usr/bin/env bash
# GRPO for Llama-3.1-405B on 256 GPUs of 80 GB: TP 8, PP 16, DP 2, the optimizer in host memory.
#
#   HF_MODEL=/models/Llama-3.1-405B-Instruct TRAIN_DATA=train.parquet VALID_DATA=test.parquet \
#       bash examples/grpo/llama3_405b.sh [more flags]
#   DRY_RUN=1 bash examples/grpo/llama3_405b.sh    print layers and memory of each rank, on any machine
#
#   HF_MODEL    the bf16 model as Hugging Face publishes it (config.json, safetensors, tokenizer)
#   TRAIN_DATA, VALID_DATA   JSON lines or Parquet with prompt and answer (tools/data/gsm8k.py writes such files)
#   SAVE        folder for checkpoints, metrics and the export; a second start resumes from it
#
#   NNODES 32, GPUS_PER_NODE all, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500: start the script on each node
#
# Pipeline stages for 126 layers: 7 layers in the first and in the last stage, which also hold the embedding or the
# output layer; 8 layers in each of the other 14. An engine spans 4 nodes, with 24 GiB of weights on each GPU. The
# optimizer's state is in host memory, 24 GiB per rank. Requires Transformer Engine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NNODES=${NNODES:-32}
HF_MODEL=${HF_MODEL:-/models/Llama-3.1-405B-Instruct}
# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh # flags of data, loss, optimizer and logging: MATH_ARGS

# A run compares these flags with the model's config.json; a dry run does not read the model.
MODEL_ARGS=(
    --model-family llama
    --num-layers 126
    --hidden-size 16384
    --ffn-hidden-size 53248
    --num-attention-heads 128
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-5
    --rotary-base 500000
    --rope-scaling '{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}'
    --vocab-size 128256
    --max-position-embeddings 131072
    --untie-embeddings-and-output-weights
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 16
    --decoder-first-pipeline-num-layers 7
    --decoder-last-pipeline-num-layers 7
    --use-distributed-optimizer
    --use-precision-aware-optimizer # with the next flag: float32 weights and moments, and their update, on the CPU
    --optimizer-cpu-offload
)
TRAINING_ARGS=(
    --global-batch-size 512         # completions per update
    --transformer-impl transformer_engine # --use-precision-aware-optimizer needs its Adam
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
ROLLOUT_ARGS=(
    --max-completion-length 4096
    --vllm-tensor-parallel-size 32
    --vllm-gpu-memory-utilization 0.6
)
[[ ${DRY_RUN:-0} == 1 ]] || MODEL_ARGS+=(--load-hf "$HF_MODEL")

launch "${MATH_ARGS[@]}" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
