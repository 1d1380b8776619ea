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
#   NNODES 4, GPUS_PER_NODE 8, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500: start the script on each node
#
# Each pipeline stage has 24 of the 48 layers, in 2 virtual stages. Each of the 8 ranks of a node holds 16 of the 128
# experts (EP 8, expert TP 1), so the token dispatch stays within a node. A stage has 2 nodes with the same experts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CUDA_DEVICE_MAX_CONNECTIONS=1

NNODES=${NNODES:-4} GPUS_PER_NODE=${GPUS_PER_NODE:-8}
HF_MODEL=${HF_MODEL:-/models/Qwen3-30B-A3B}
TRAIN_DATA=${TRAIN_DATA:-data/train.parquet}
VALID_DATA=${VALID_DATA:-data/test.parquet}
SAVE=${SAVE:-runs/qwen3_30b_a3b}
GLOBAL_BATCH_SIZE=512        # completions per update
NUM_GENERATIONS=8            # completions per prompt
MAX_PROMPT_LENGTH=1024
MAX_COMPLETION_LENGTH=4096
MAX_TOKENS=8192              # tokens per micro-batch
SAVE_INTERVAL=50
EVAL_INTERVAL=25

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
)
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
    --bf16
    --transformer-impl local        # transformer_engine when it is installed
    --bias-activation-fusion
    --bias-dropout-fusion
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --max-tokens-per-microbatch "$MAX_TOKENS"
    --train-iters 500
    --lr 1e-6
    --lr-warmup-iters 10
    --weight-decay 0.1
    --clip-grad 1.0
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-dtype fp32
    --recompute-granularity selective
    --recompute-modules moe
)
DATA_ARGS=(
    --train-data-path "$TRAIN_DATA"
    --valid-data-path "$VALID_DATA"
    --system-prompt 'Reason step by step. Put the final answer within \boxed{}.'
    --max-prompt-length "$MAX_PROMPT_LENGTH"
    --truncation-strategy delete
)
ROLLOUT_ARGS=(
    --rollout-engine vllm
    --vllm-mode colocate
    --vllm-tensor-parallel-size 4
    --vllm-gpu-memory-utilization 0.45
    --offload-model                 # moves the trainer's tensors to host memory during generation
    --offload-gradients
    --offload-optimizer
    --num-generations "$NUM_GENERATIONS"
    --max-completion-length "$MAX_COMPLETION_LENGTH"
    --temperature 1.0
)
GRPO_ARGS=(
    --reward-funcs accuracy
    --loss-type dapo
    --epsilon 0.2
    --epsilon-high 0.28
    --beta 0                        # no KL term, no reference model
)
LOGGING_ARGS=(
    --save "$SAVE"
    --load "$SAVE"
    --save-interval "$SAVE_INTERVAL"
    --max-checkpoints-to-keep 2
    --eval-interval "$EVAL_INTERVAL"
    --mismatch-sample-rate 0.1
    --tensorboard-dir "$SAVE/tensorboard"
)
ARGS=("${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}"
    "${GRPO_ARGS[@]}" "${LOGGING_ARGS[@]}")

if [[ ${DRY_RUN:-0} == 1 ]]; then
    WORLD_SIZE=$((NNODES * GPUS_PER_NODE)) python pretrain_grpo.py "${ARGS[@]}" --dry-run "$@"
else
    exec torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_grpo.py "${ARGS[@]}" --load-hf "$HF_MODEL" "$@"
fi
