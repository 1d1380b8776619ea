#!/usr/bin/env bash
# What the pages say of eight GPUs, measured: bash tools/benchmark/eight_gpus.sh RUN_DIR PART...
#
#   page     docs/qwen3_8b.md with random weights of that shape: four updates of 64 prompts of 8, 1,024 tokens each; a kill
#            after the checkpoint of update 2, a resume, the export
#   async    qwen3_8b_async.sh with the same flags: four trainers, four engines, four updates
#   experts  30B-A3B's shape, all weights, EP 8: two updates and their syncs, beside the plan of the dry run
#   layouts  updates of 4B's shape: DP 8, TP 8, PP 8, CP 8
#
# CONFIG=FILE     Qwen3-8B's config.json (page, async)
# TOKENIZER=DIR   a folder with its tokenizer (page, async)
# GSM8K=DIR       a folder with GSM8K's train and test files, .jsonl or .parquet (page, async)
# NPROC=8         GPUs. TRIAL=1 rehearses all parts with tiny models on two processes of a CPU.
#
# Needs 150 GiB of disk in RUN_DIR and 400 GB of host memory. Each part ends with its table, and leaves its logs.
set -euo pipefail
RUN=$(realpath -m "${1:?folder for the results}"); shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CUDA_DEVICE_MAX_CONNECTIONS=1
NPROC=${NPROC:-8} SMALL=()
mkdir -p "$RUN"
if [[ -n ${TRIAL:-} ]]; then  # the same commands; later flags win
    NPROC=2
    SMALL=(--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --kv-channels 32
        --vocab-size 512 --max-position-embeddings 512)
    AWAKE=(--sleep-level 0 --no-offload-model --no-offload-gradients --no-offload-optimizer)  # no engine sleeps on a CPU
fi
say() { echo "$SECONDS s: $*"; }
logged() { # NAME COMMAND...: its output goes to a log, of which the end is shown if it fails
    local name=$1; shift
    say "$name begins"
    "$@" > "$RUN/$name.log" 2>&1 || { local rc=$?; tail -n 20 "$RUN/$name.log"; say "$name failed with $rc: $RUN/$name.log"; return 1; }
    say "$name has ended"
}
table() { # RUN...
    local run
    for run in "$@"; do
        python3 - "$run/metrics.jsonl" <<'END'
import json, sys

names = "time/step time/rollout time/logprobs time/update time/offload time/sync stream/trainer_wait stream/engine_idle".split()
names += "perf/mfu memory/peak mismatch/mean_abs completion/length_mean".split()
rows = [json.loads(line) for line in open(sys.argv[1])]
names = [name for name in names if any(row.get(name) is not None for row in rows)]
print(f"{sys.argv[1]}\n| update | " + " | ".join(names) + " |\n|--:" + "|--:" * len(names) + "|")
for row in rows:
    if "loss" in row:
        print(f"| {row['iteration']} | " + " | ".join(f"{row[n]:.3f}" if row.get(n) is not None else "" for n in names) + " |")
END
    done
}

inputs() { # the model, its tokenizer, the data
    [[ ! -e $RUN/model/config.json ]] || return 0
    if [[ -n ${TRIAL:-} ]]; then
        python3 tools/make_tiny_model.py --save "$RUN/tiny" --steps 0 --tokenizer bytes --shape qwen3 --num-layers 2 --hidden-size 64 \
            --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --kv-channels 32 --max-position-embeddings 512 --quiet
        CONFIG=$RUN/tiny/config.json TOKENIZER=$RUN/tiny
    fi
    logged model python3 tools/benchmark/random_checkpoint.py --config "${CONFIG:?config.json of Qwen3-8B}" \
        --tokenizer "${TOKENIZER:?a folder with the tokenizer}" --save "$RUN/model"
    local split file
    for split in train test; do
        file=$(find "${GSM8K:?a folder with GSM8K}" -name "$split*.jsonl" -o -name "$split*.parquet" | head -n 1)
        logged "$split" python3 tools/data/gsm8k.py --input "$file" --output "$RUN/$split.parquet"
    done
}
# The command of docs/qwen3_8b.md, step 5, for four updates. Random weights end no completion.
script() ( # NAME SCRIPT FLAGS...: torchrun takes the place of the subshell, so that a signal reaches it
    local name=$1 script=$2; shift 2
    [[ -z ${TRIAL:-} ]] || set -- "$@" "${SMALL[@]}" --vocab-size 258 --rotary-base 10000 --max-prompt-length 320 --max-completion-length 16 \
        --global-batch-size 32 --max-tokens-per-microbatch 2048 --vllm-gpu-memory-utilization 0.1 "${AWAKE[@]}"
    HF_MODEL=$RUN/model TRAIN_DATA=$RUN/train.parquet VALID_DATA=$RUN/test.parquet SAVE=$RUN/$name GPUS_PER_NODE=$NPROC \
        exec bash "examples/grpo/$script" --max-completion-length 1024 --train-iters 4 --lr-warmup-iters 0 --eval-max-prompts 64 \
        --system-prompt 'Reason step by step. Put the final answer within \boxed{}. /no_think' --max-checkpoints-to-keep 1 "$@"
)
page() {
    inputs
    rm -rf "$RUN/page"; say "page begins"
    script page qwen3_8b.sh --save-interval 2 > "$RUN/page.log" 2>&1 & local run=$!
    until [[ $(cat "$RUN/page/latest_checkpointed_iteration.txt" 2>/dev/null) == 2 ]]; do
        kill -0 $run 2>/dev/null || { tail -n 20 "$RUN/page.log"; say "page failed: $RUN/page.log"; return 1; }
        sleep 1
    done
    kill -TERM $run; wait $run || true
    say "ended after the checkpoint of update 2: $(du -sh "$RUN/page" | cut -f1)"
    logged resumed script page qwen3_8b.sh --save-interval 2
    grep -E "^(resumed|Hugging Face export|done)" "$RUN/resumed.log"
    rm -rf "$RUN"/page/iter_*
    table "$RUN/page"
}
async() {
    inputs
    rm -rf "$RUN/async"
    local own=()
    [[ -z ${TRIAL:-} ]] || own=(--rollout-ranks 1 --tensor-model-parallel-size 1 --no-sequence-parallel)
    logged async script async qwen3_8b_async.sh --save-interval 1000 --no-save-hf "${own[@]}"
    rm -rf "$RUN"/async/iter_*
    table "$RUN/async"
}
experts() {
    local flags=(--expert-model-parallel-size "$NPROC" --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16
        --grad-reduce-in-bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --sequence-parallel --gradient-accumulation-fusion
        --train-iters 2 --mismatch-limit 10 --no-save-hf)
    [[ -z ${TRIAL:-} ]] || flags=(--expert-model-parallel-size 2 --use-distributed-optimizer "${SMALL[@]}" --num-experts 4 --moe-router-topk 2
        --moe-ffn-hidden-size 32 --max-prompt-length 32 --max-completion-length 16 --generation-batch-size 32 --vllm-gpu-memory-utilization 0.1
        --train-iters 2 --no-save-hf "${AWAKE[@]}")
    rm -rf "$RUN/experts"
    export NPROC SHAPE=30b_a3b
    DRY_RUN=1 bash tools/benchmark/step.sh local "$RUN/experts" "${flags[@]}" | tail -n 20
    logged experts bash tools/benchmark/step.sh local "$RUN/experts" "${flags[@]}"
    rm -rf "$RUN"/experts/iter_*
    table "$RUN/experts"
}
layouts() {
    local n=$NPROC shape=(--model-family qwen3 --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
        --num-query-groups 8 --kv-channels 128 --vocab-size 151936 --max-position-embeddings 40960 --group-query-attention --qk-layernorm
        --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --rotary-base 1000000)
    local completions=$((128 * n)) tokens=544 packs=(8192 65536 4352 65536)
    [[ -z ${TRIAL:-} ]] || { shape+=("${SMALL[@]}"); completions=16 tokens=32 packs=(128 256 64 256); }
    local gpu=(--bias-activation-fusion --bias-dropout-fusion --attention-backend flash --gradient-accumulation-fusion)
    [[ -z ${TRIAL:-} ]] || gpu=()
    logged layouts torchrun --standalone --nproc-per-node "$n" tools/benchmark/update.py --completions $completions --tokens $tokens --updates 3 \
        "${shape[@]}" --bf16 --transformer-impl local --use-distributed-optimizer "${gpu[@]}" --layouts \
        "DP$n: --max-tokens-per-microbatch ${packs[0]} --overlap-grad-reduce --overlap-param-gather" \
        "TP$n: --sequence-parallel --max-tokens-per-microbatch ${packs[1]}" \
        "PP$n: --max-tokens-per-microbatch ${packs[2]} --pipeline-model-parallel-layout auto" \
        "CP$n: --max-tokens-per-microbatch ${packs[3]}"
    grep "^|" "$RUN/layouts.log"
}
for part in "$@"; do
    case $part in
        page | async | experts | layouts) "$part" ;;
        *) echo "eight_gpus.sh: a part is page, async, experts or layouts, not $part" >&2; exit 1 ;;
    esac
done
