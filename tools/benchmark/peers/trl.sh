#!/usr/bin/env bash
# TRL's GRPOTrainer for the table: common.sh says how it is called, grpo_trl.py what is set.
source "$(dirname "$0")/common.sh"
if [[ $GPUS == 1 ]]; then torchrun=("$PYTHON"); fi  # under torchrun TRL wraps the model in DDP, which costs one GPU time
"${torchrun[@]}" tools/benchmark/peers/grpo_trl.py --model "$inputs/model" --data "$inputs/rows.jsonl" --save "$out" \
    --max-completion-length $completion --batch-size $((batch / GPUS)) --micro-batch-size $micro_batch \
    --max-prompt-length $prompt --num-generations $generations --engine-share $engine_share --updates $updates "$@" 2>&1 | tee "$out/log.txt"
