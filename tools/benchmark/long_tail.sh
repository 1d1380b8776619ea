#!/usr/bin/env bash
# Synchronous and partial rollouts with lengths as real ones are: step.sh with completions of drawn lengths (long_tail.py).
#
#   bash tools/benchmark/long_tail.sh local|transformer_engine RUN_DIR [more flags of pretrain_grpo.py]
#   NPROC=2 STALENESS="1 4" bash tools/benchmark/long_tail.sh local runs/long_tail
#
# One run without --partial-rollouts, then one for each --max-staleness of STALENESS ("1 2 4"); at the end a table of the updates
# after the first WARMUP (6), of ITERS (14). DRY_RUN=1 prints the memory of each run, and no table.
set -euo pipefail
impl=${1:?local or transformer_engine} run=${2:?folder for the results}; shift 2
here=$(cd "$(dirname "$0")" && pwd)
STALENESS=${STALENESS-1 2 4} WARMUP=${WARMUP:-6} ITERS=${ITERS:-14}
export MEDIAN=${MEDIAN:-384} MEAN=${MEAN:-687}  # of the lengths

run_one() {  # NAME FLAGS
    local name=$1; shift
    bash "$here/step.sh" "$impl" "$run/$name" \
        --max-completion-length 8192 --max-tokens-per-microbatch 16384 --vllm-gpu-memory-utilization 0.6 \
        --rollout-importance-sampling-mode token_truncate --mismatch-limit 10 --train-iters "$ITERS" "$@"
}
run_one synchronous "$@"
runs=("$run/synchronous")
for bound in $STALENESS; do
    run_one "partial_$bound" --partial-rollouts --max-staleness "$bound" "$@"
    runs+=("$run/partial_$bound")
done
[[ ${DRY_RUN:-0} == 1 ]] || python3 "$here/step_table.py" --warm-up "$WARMUP" "${runs[@]}"
