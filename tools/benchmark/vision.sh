#!/usr/bin/env bash
# GRPO updates of Qwen2.5-VL-3B's shape with random weights: 256 completions of 512 tokens, a picture of one megapixel in each prompt.
#
#   bash tools/benchmark/vision.sh RUN_DIR [more flags of pretrain_grpo.py]
#
# Afterwards: python tools/benchmark/step_table.py RUN_DIR
set -euo pipefail
run=${1:?folder for the results}; shift
cd "$(dirname "$0")/../.."
export CUDA_DEVICE_MAX_CONNECTIONS=1
python3 tools/benchmark/vision_inputs.py "$run"
torchrun --standalone --nproc-per-node "${NPROC:-1}" pretrain_grpo.py --bf16 --transformer-impl local --load-hf "$run/model" \
    --train-data-path "$run/data/train.jsonl" --save "$run" --no-save-hf --external-plugins tools/benchmark/even_tokens.py \
    --reward-funcs even_tokens --beta 0 --lr 1e-6 --clip-grad 1.0 --train-iters 4 --num-generations 8 --generation-batch-size 256 \
    --max-prompt-length 1400 --max-completion-length 512 --ignore-eos --max-tokens-per-microbatch 8192 \
    --vllm-max-num-seqs 256 --vllm-gpu-memory-utilization 0.4 --sleep-level 2 --offload-model --offload-gradients \
    --offload-optimizer --mismatch-sample-rate 0.1 --bias-activation-fusion --bias-dropout-fusion "$@"
