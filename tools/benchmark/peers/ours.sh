#!/usr/bin/env bash
# This project's run for the table beside its peers: common.sh says how it is called. IMPL: transformer_engine (the default) or local.
source "$(dirname "$0")/common.sh"
layers=(--transformer-impl "${IMPL:=transformer_engine}" --bias-activation-fusion --bias-dropout-fusion)
"${torchrun[@]}" pretrain_grpo.py \
    --load-hf "$inputs/model" --save "$out" --no-save-hf \
    --train-data-path "$inputs/rows.jsonl" --max-prompt-length $prompt --max-completion-length $completion \
    --generation-batch-size $batch --num-generations $generations --max-tokens-per-microbatch $micro_tokens \
    --train-iters $updates --lr 1e-6 --clip-grad 1.0 --beta 0 --bf16 \
    --external-plugins tools/benchmark/even_tokens.py --reward-funcs even_tokens \
    "${layers[@]}" --vllm-max-num-seqs $batch --vllm-gpu-memory-utilization $engine_share --mismatch-sample-rate 0.1 \
    "$@" 2>&1 | tee "$out/log.txt"
