#!/usr/bin/env bash
# Learning in FP8 beside bf16 on one Hopper GPU: the quickstart's task (sums of two-digit numbers), 80 updates of 1,024 completions.
#
#   bash tools/benchmark/fp8_learning.sh bf16|fp8|fp8_corrected|fp8_rollout RUN_DIR [more flags of pretrain_grpo.py]
#
#   bf16            trainer and engine in bf16
#   fp8             the trainer's linear layers in FP8, the engine in bf16
#   fp8_corrected   the same with rollout importance weights
#   fp8_rollout     the trainer's and the engine's linear layers in FP8, without rollout importance weights
#
# All variants start from the same warmed-up model of 2.4 M parameters, which is made on the CPU (half a minute) in
# fp8_learning_inputs beside RUN_DIR when it is missing. Once it is there, variants may run at the same time, on one GPU or several
# (CUDA_VISIBLE_DEVICES).
#
# Afterwards: python tools/benchmark/learning_table.py RUN_DIR [RUN_DIR ...]
set -euo pipefail
variant=${1:?bf16, fp8, fp8_corrected or fp8_rollout} run=${2:?folder for the results}; shift 2
cd "$(dirname "$0")/../.."
export CUDA_DEVICE_MAX_CONNECTIONS=1

FP8=(--fp8-format e4m3)
case $variant in
    bf16) VARIANT_ARGS=() ;;
    fp8) VARIANT_ARGS=("${FP8[@]}") ;;
    fp8_corrected) VARIANT_ARGS=("${FP8[@]}" --rollout-importance-sampling-mode token_truncate) ;;
    fp8_rollout) VARIANT_ARGS=("${FP8[@]}" --vllm-quantization fp8) ;;
    *) echo "fp8_learning.sh: no variant '$variant'; give bf16, fp8, fp8_corrected or fp8_rollout" >&2; exit 1 ;;
esac

inputs=$(dirname "$run")/fp8_learning_inputs  # the runs of a folder share them
mkdir -p "$run"
if [[ ! -d $inputs ]]; then
    making=$(mktemp -d "$inputs.XXXX")
    python3 tools/data/arithmetic.py --save "$making/data" --operations + --digits 2 --reversed --seed 1 > /dev/null
    python3 tools/make_tiny_model.py --save "$making/model" --train "$making/data/warmup.jsonl" --valid "$making/data/valid.jsonl" \
        --stop-accuracy 0.3 --seed 1 --hidden-size 256 --ffn-hidden-size 512 --kv-channels 64
    mv -T "$making" "$inputs"
fi

MODEL_ARGS=(
    --load-hf "$inputs/model" --transformer-impl transformer_engine --bf16
)
DATA_ARGS=(
    --train-data-path "$inputs/data/train.jsonl" --valid-data-path "$inputs/data/test.jsonl" --max-prompt-length 8
)
ROLLOUT_ARGS=(
    --num-generations 8 --max-completion-length 5 --mismatch-sample-rate 1
    --vllm-max-num-seqs 1024 --vllm-gpu-memory-utilization 0.1 --vllm-enforce-eager
    --vllm-engine-kwargs '{"kv_cache_memory_bytes": 268435456}'  # a fixed size, so that runs may share a GPU
)
GRPO_ARGS=(
    --reward-funcs exact_match --loss-type dapo --beta 0
)
OPTIM_ARGS=(
    --global-batch-size 1024 --max-tokens-per-microbatch 16384 --train-iters 80 --lr 3e-4 --min-lr 3e-5
    --lr-decay-style linear --lr-warmup-iters 10 --weight-decay 0 --adam-beta2 0.999 --clip-grad 1.0 --seed 1
)
LOGGING_ARGS=(
    --save "$run" --no-save-hf --val-before-train --eval-interval 20 --eval-num-generations 4
)
torchrun --standalone --nproc-per-node 1 pretrain_grpo.py "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${GRPO_ARGS[@]}" "${OPTIM_ARGS[@]}" "${LOGGING_ARGS[@]}" "${VARIANT_ARGS[@]}" "$@"
