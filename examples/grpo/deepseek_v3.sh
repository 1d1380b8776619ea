#!/usr/bin/env bash
# GRPO for DeepSeek-V3 (671B) on 1,024 GPUs of 80 GB: TP 4, PP 16, EP 64, DP 16.
#
#   HF_MODEL=/models/DeepSeek-V3-bf16 TRAIN_DATA=train.parquet VALID_DATA=test.parquet \
#       bash examples/grpo/deepseek_v3.sh [more flags]
#   DRY_RUN=1 bash examples/grpo/deepseek_v3.sh    print layers and memory of each rank, on any machine
#
#   HF_MODEL    the model in bf16: convert the published one with DeepSeek's inference/fp8_cast_bf16.py, and remove
#               quantization_config from config.json
#   TRAIN_DATA, VALID_DATA   JSON lines or Parquet with prompt and answer (tools/data/gsm8k.py writes such files)
#   SAVE        folder for checkpoints, metrics and the export; a second start resumes from it
#
#   NNODES 128, GPUS_PER_NODE all, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500: start the script on each node
#
# Pipeline stages for 61 layers: the embedding and 3 dense layers; 14 stages of 4 layers; 2 layers, multi-token
# prediction (not trained) and the output layer. A rank holds 4 of the 256 experts of each of its layers: EP 64 x PP 16
# are all ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NNODES=${NNODES:-128}
HF_MODEL=${HF_MODEL:-/models/DeepSeek-V3-bf16}
# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh # flags of data, loss, optimizer and logging: MATH_ARGS

# A run compares these flags with the model's config.json; a dry run does not read the model.
MODEL_ARGS=(
    --model-family deepseek_v3
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --kv-channels 128
    --qk-layernorm
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --rotary-base 10000
    --rope-type yarn
    --rotary-scaling-factor 40
    --original-max-position-embeddings 4096
    --beta-fast 32
    --beta-slow 1
    --mscale 1.0
    --mscale-all-dim 1.0
    --vocab-size 129280
    --max-position-embeddings 163840
    --untie-embeddings-and-output-weights
    --num-experts 256
    --moe-layer-freq '([0]*3+[1]*58)'
    --moe-router-topk 8
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-topk-scaling-factor 2.5
    --mtp-num-layers 1
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout 'Et*3|(tttt|)*14ttmL'
    --expert-model-parallel-size 64
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
)
TRAINING_ARGS=(
    --global-batch-size 1024        # completions per update
    --transformer-impl local        # transformer_engine when it is installed
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-dtype fp32
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
ROLLOUT_ARGS=(
    --max-completion-length 7168
    --vllm-tensor-parallel-size 32
    --vllm-gpu-memory-utilization 0.65
)
[[ ${DRY_RUN:-0} == 1 ]] || MODEL_ARGS+=(--load-hf "$HF_MODEL")

launch "${MATH_ARGS[@]}" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
