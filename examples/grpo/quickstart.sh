#!/usr/bin/env bash
# Train a tiny model with GRPO on two CPU cores, in a few minutes: bash examples/grpo/quickstart.sh [--fresh]
#
# A language model of 0.8 M parameters learns to add: megatron-core trains it in two data-parallel processes, and vLLM,
# in the same two processes, samples from it. On GPUs the same pretrain_grpo.py runs (qwen3_0.6b.sh).
#
#   --fresh     delete the run folder first; without this flag, finished steps are not repeated
#   SHAPE=qwen3_5_text   gated delta nets in three of four layers, in a few minutes more (default: qwen3)
#   SEED=1      random seed of the data, the model and the run
#   WORK=DIR    the run folder (default: runs/quickstart)
#   VENV=DIR    the Python environment (default: .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SEED=${SEED:-1}
SHAPE=${SHAPE:-qwen3}
WORK=${WORK:-runs/quickstart}
export VENV=${VENV:-.venv}

case ${1:-} in
    "") ;;
    --fresh) rm -rf "$WORK" ;;
    *) echo "unknown argument '$1'; the only argument is --fresh" >&2; exit 1 ;;
esac

DATA=$WORK/data HF=$WORK/model_hf MEGATRON=$WORK/model_megatron RUN=$WORK/run
STAMPS=$WORK/.stamps

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --micro-batch-size 512
    --global-batch-size 1024
)
MODEL_ARGS=(
    --pretrained-checkpoint "$MEGATRON"
    --use-checkpoint-args
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$MEGATRON/hf_assets"
    --transformer-impl local
)
DATA_ARGS=(
    --train-data-path "$DATA/train.jsonl"
    --valid-data-path "$DATA/test.jsonl"
    --max-prompt-length 8
)
ROLLOUT_ARGS=(
    --rollout-engine vllm
    --vllm-mode colocate
    --vllm-max-num-seqs 512
    --num-generations 8
    --max-completion-length 5
    --temperature 1.0
)
case $SHAPE in
    qwen3) SHAPE_ARGS=() ;;
    qwen3_5_text)
        SHAPE_ARGS=(--shape "$SHAPE")
        ROLLOUT_ARGS+=(--vllm-dtype bfloat16) # all that vLLM has on a CPU for delta nets; the trainer stays in float32
        ;;
    *) echo "unknown SHAPE '$SHAPE'; give qwen3 or qwen3_5_text" >&2; exit 1 ;;
esac
GRPO_ARGS=(
    --reward-funcs exact_match
    --loss-type dapo
    --scale-rewards group
    --epsilon 0.2
    --beta 0
)
OPTIM_ARGS=(
    --optimizer adam
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style linear
    --lr-warmup-iters 10
    --weight-decay 0
    --adam-beta1 0.9
    --adam-beta2 0.999
    --clip-grad 1.0
    --train-iters 120
    --seed "$SEED"
)
LOGGING_ARGS=(
    --save "$RUN"
    --load "$RUN"
    --save-interval 40
    --max-checkpoints-to-keep 2
    --val-before-train
    --eval-interval 20
    --eval-num-generations 4
    --log-interval 1
    --tensorboard-dir "$RUN/tensorboard"
)

# run_step TITLE OUTPUT COMMAND...: runs the command, unless OUTPUT exists from the same command and inputs.
# The stamp of a step is a hash of its command and of all earlier commands; it is written after the command succeeds.
number=1 inputs="" ran=0
run_step() {
    local title=$1 output=$2 stamp start=$SECONDS; shift 2
    number=$((number + 1)) inputs=$(printf '%s\n' "$inputs" "$@" | sha256sum | cut -d' ' -f1)
    stamp=$STAMPS/$number
    if [[ -e $output && $(cat "$stamp" 2>/dev/null) == "$inputs" ]]; then
        echo "[$number/8] $title: exists already ($output)"
        return
    fi
    echo "[$number/8] $title"
    mkdir -p "$STAMPS"
    # A partial output of the same command is kept, so that the command resumes; that of another command is deleted.
    [[ $(cat "$stamp.begun" 2>/dev/null) == "$inputs" ]] || rm -rf "$output"
    rm -f "$stamp"
    echo "$inputs" >"$stamp.begun"
    "$@" || fail "step $number ($title) failed. Finished steps are kept: mend what it says and start again."
    [[ -e $output ]] || fail "step $number ($title) ended without making $output"
    echo "$inputs" >"$stamp"
    echo "      $((SECONDS - start)) s"
    ran=1
}

fail() { echo "quickstart: $1" >&2; exit 1; }

evaluations() { # prints the rows of metrics.jsonl with an evaluation, and the seconds of training before each
    python - "$RUN/metrics.jsonl" >"$WORK/evaluations.part" <<'END' || return 1
import json, sys

print("update  greedy  sampled  seconds   (greedy, sampled: share of held-out problems answered right)")
seconds = 0.0
for row in map(json.loads, open(sys.argv[1])):
    seconds += row["time/step"]
    if "eval/greedy_accuracy" in row:
        greedy, sampled = row["eval/greedy_accuracy"], row["eval/sampled_accuracy"]
        print(f"{row['iteration']:6d}  {greedy:6.3f}  {sampled:7.3f}  {seconds:7.0f}")
END
    mv "$WORK/evaluations.part" "$WORK/evaluations.txt"
    sed 's/^/  /' "$WORK/evaluations.txt"
}

check_export() {
    python tools/check_export.py --hf "$RUN/hf_model" --data "$DATA/test.jsonl" --max-completion-length 5 \
        >"$WORK/check.part" || { cat "$WORK/check.part"; return 1; }
    mv "$WORK/check.part" "$WORK/export_check.txt"
    sed 's/^/  /' "$WORK/export_check.txt"
}

echo "[1/8] environment"
start=$SECONDS
bash tools/make_venv.sh
echo "      $((SECONDS - start)) s"
installed=$SECONDS
PATH=$(cd "$VENV/bin" && pwd):$PATH
export PATH OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR TRANSFORMERS_VERBOSITY=error

run_step "data: sums of two-digit numbers as prompts" "$DATA" \
    python tools/data/arithmetic.py --save "$DATA" --operations + --digits 2 --reversed --seed "$SEED"
run_step "model: random weights, then supervised steps until 30% of sampled answers are right" "$HF" \
    python tools/make_tiny_model.py --save "$HF" --train "$DATA/warmup.jsonl" --valid "$DATA/valid.jsonl" \
    --stop-accuracy 0.3 --seed "$SEED" "${SHAPE_ARGS[@]}"
run_step "conversion to a Megatron checkpoint" "$MEGATRON" \
    python tools/checkpoint/convert.py --hf-to-megatron --load "$HF" --save "$MEGATRON" --verify
run_step "training by GRPO on 2 processes, vLLM in both" "$RUN" \
    torchrun --standalone --nproc-per-node 2 pretrain_grpo.py "${PARALLEL_ARGS[@]}" "${MODEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIM_ARGS[@]}" "${LOGGING_ARGS[@]}"
run_step "evaluation on held-out problems, before and after" "$WORK/evaluations.txt" evaluations
run_step "the Hugging Face export in transformers and in vLLM" "$WORK/export_check.txt" check_export
run_step "curves" "$WORK/curves.png" python tools/plot_metrics.py "$RUN" --smooth 5 --output "$WORK/curves.png"

before=$(sed -n 2p "$WORK/evaluations.txt") after=$(tail -n 1 "$WORK/evaluations.txt")
read -r _ greedy_before sampled_before _ <<<"$before"
read -r updates greedy_after sampled_after seconds <<<"$after"
echo
[[ $ran == 1 ]] && word=Done || word="Finished before"
echo "$word: $updates GRPO updates of 1,024 completions, $seconds s of training; $((SECONDS - installed)) s now for steps 2 to 8."
echo "Held-out accuracy, no problem seen in either order: greedy $greedy_before -> $greedy_after, sampled $sampled_before -> $sampled_after."
echo "The exported model: $(tail -n 1 "$WORK/export_check.txt")."
echo "Model: $RUN/hf_model. Checkpoints, metrics.jsonl, completions.jsonl, tensorboard: $RUN. Curves: $WORK/curves.png."
echo "Start again from nothing: bash examples/grpo/quickstart.sh --fresh; other seeds: SEED=2 WORK=runs/seed2; on GPUs: examples/grpo/qwen3_0.6b.sh."
