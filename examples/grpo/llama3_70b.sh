#!/usr/bin/env bash
# GRPO for Llama-3.1-70B on 16 GPUs of 80 GB: TP 8, PP 2, sequence parallel, the optimizer in host memory.
#
#   HF_MODEL=/models/Llama-3.1-70B-Instruct TRAIN_DATA=train.parquet VALID_DATA=test.parquet \
#       bash examples/grpo/llama3_70b.sh [more flags]
#   DRY_RUN=1 bash examples/grpo/llama3_70b.sh    print layers and memory of each rank, on any machine
#
#   HF_MODEL    the model as Hugging Face publishes it (config.json, safetensors, tokenizer)
#   TRAIN_DATA, VALID_DATA   JSON lines or Parquet with prompt and answer (tools/data/gsm8k.py writes such files)
#   SAVE        folder for checkpoints, metrics and the export; a second start resumes from it
#
#   NNODES 2, GPUS_PER_NODE all, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500: start the script on each node
#
# Each pipeline stage has 40 of the 80 layers. A rank has 4.4 x 10^9 parameters. At 18 bytes each, with Adam's state,
# they would fill its GPU. So Adam's state is in host memory, 66 GiB per rank (0.6 TB per node), and the update runs on
# the CPU. Requires Transformer Engine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NNODES=${NNODES:-2}
HF_MODEL=${HF_MODEL:-/models/Llama-3.1-70B-Instruct}
# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh # flags of data, loss, optimizer and logging: MATH_ARGS

# A run compares these flags with the model's config.json; a dry run does not read the model.
MODEL_ARGS=(
    --model-family llama
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
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
    --pipeline-model-parallel-size 2
    --use-distributed-optimizer
    --use-precision-aware-optimizer # with the next flag: float32 weights and moments, and their update, on the CPU
    --optimizer-cpu-offload
)
TRAINING_ARGS=(
    --global-batch-size 256         # completions per update
    --transformer-impl transformer_engine # --use-precision-aware-optimizer needs its Adam
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
ROLLOUT_ARGS=(
    --max-completion-length 4096
    --vllm-tensor-parallel-size 8
    --vllm-gpu-memory-utilization 0.55
)
[[ ${DRY_RUN:-0} == 1 ]] || MODEL_ARGS+=(--load-hf "$HF_MODEL")

launch "${MATH_ARGS[@]}" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
