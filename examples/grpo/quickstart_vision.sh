#!/usr/bin/env bash
# The quickstart with pictures: bash examples/grpo/quickstart_vision.sh [--fresh]
#
# A vision-language model of 0.7 M parameters (Qwen2.5-VL's architecture) learns by GRPO to name the colour that a generated
# picture shows, one of six, on two CPU cores in a few minutes. The warm-up stops at 25% of right sampled answers. At the
# end the same questions are asked with white pictures: the accuracy is then that of guessing.
# docs/vision.md explains the flags.
#
#   --fresh     delete the run folder first; without this flag, runs resume from their checkpoints
#   UPDATES=150  updates
#   SEED=1      random seed of the data, the model and the run
#   WORK=DIR    the run folder (default: runs/quickstart_vision)
#   VENV=DIR    the Python environment (default: .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SEED=${SEED:-1} UPDATES=${UPDATES:-150}
WORK=${WORK:-runs/quickstart_vision}
export VENV=${VENV:-.venv}
DATA=$WORK/data HF=$WORK/model_hf

case ${1:-} in
    "") ;;
    --fresh) rm -rf "$WORK" ;;
    *) echo "unknown argument '$1'; the only argument is --fresh" >&2; exit 1 ;;
esac

MODEL_ARGS=(
    --transformer-impl local
)
BATCH_ARGS=(
    --micro-batch-size 128
    --global-batch-size 512
)
DATA_ARGS=(
    --train-data-path "$DATA/train.parquet"
    --max-prompt-length 24          # 9 tokens of a picture of 84 x 84 pixels and the question
)
ROLLOUT_ARGS=(
    --rollout-engine vllm
    --vllm-mode colocate
    --vllm-max-num-seqs 256
    --num-generations 8
    --max-completion-length 8
    --temperature 1.0
)
GRPO_ARGS=(
    --reward-funcs exact_match
    --loss-type dapo
    --scale-rewards group
    --epsilon 0.2
    --beta 0
)
OPTIM_ARGS=(
    --optimizer adam
    --lr 5e-4
    --min-lr 1e-4
    --lr-decay-style linear
    --lr-warmup-iters 5
    --weight-decay 0
    --adam-beta1 0.9
    --adam-beta2 0.999
    --clip-grad 1.0
    --seed "$SEED"
)
LOGGING_ARGS=(
    --val-before-train
    --eval-interval 10
    --eval-num-generations 2
)

train() { # NAME FLAGS...: a run in $WORK/NAME
    local run=$WORK/$1; shift
    torchrun --standalone --nproc-per-node 2 pretrain_grpo.py "${MODEL_ARGS[@]}" "${BATCH_ARGS[@]}" "${DATA_ARGS[@]}" \
        "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIM_ARGS[@]}" "${LOGGING_ARGS[@]}" --save "$run" "$@"
}

bash tools/make_venv.sh
PATH=$(cd "$VENV/bin" && pwd):$PATH
export PATH OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR

echo "[1/5] data: pictures of a coloured shape"
[[ -e $DATA/blank.parquet ]] || python tools/data/pictures.py --save "$DATA" --seed "$SEED"
echo "[2/5] model: random weights, then supervised steps until 25% of sampled answers are right"
[[ -e $HF/model.safetensors ]] || python tools/make_tiny_model.py --save "$HF" --shape qwen2_5_vl --num-layers 2 \
    --batch-size 32 --lr-warmup-steps 1 --threads 2 --stop-accuracy 0.25 \
    --train "$DATA/warmup.parquet" --valid "$DATA/valid.parquet" --seed "$SEED"
echo "[3/5] training by GRPO, on 2 processes, vLLM in both"
train run --load-hf "$HF" --load "$WORK/run" --valid-data-path "$DATA/test.parquet" --save-interval 10 \
    --max-checkpoints-to-keep 2 --train-iters "$UPDATES"
echo "[4/5] the trained model and white pictures: an evaluation, and one update that nobody uses"
rm -rf "$WORK/blank"
train blank --load-hf "$WORK/run/hf_model" --valid-data-path "$DATA/blank.parquet" --train-iters 1 --lr-warmup-iters 0 --no-save-hf
echo "[5/5] curve and evaluations"
python tools/plot_metrics.py "$WORK/run" --smooth 3 --output "$WORK/curve.png"
python - "$WORK/run/metrics.jsonl" "$WORK/blank/metrics.jsonl" <<'END' | tee "$WORK/evaluations.txt"
import json, sys

print("greedy, sampled: share of held-out pictures whose colour is named")
print("pictures  update  greedy  sampled")
for file, pictures in zip(sys.argv[1:], ("shown", "white"), strict=True):
    for row in map(json.loads, open(file)):
        if "eval/greedy_accuracy" in row:
            accuracies = f"{row['eval/greedy_accuracy']:6.3f}  {row['eval/sampled_accuracy']:7.3f}"
            print(f"{pictures:8s}  {row['iteration']:6d}  {accuracies}")
END
echo "Done. Completions: $WORK/run/completions.jsonl. Curve: $WORK/curve.png."
