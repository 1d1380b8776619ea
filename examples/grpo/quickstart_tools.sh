#!/usr/bin/env bash
# The quickstart with a tool: bash examples/grpo/quickstart_tools.sh [--fresh]
#
# A model of 0.9 M parameters that cannot add four-digit numbers learns by GRPO to call a calculator, on two CPU cores in a
# few minutes. The warm-up has conversations: in 20% of them the assistant calls the tool and repeats the result, in the
# others it answers at once. Ten updates without the tool follow: their accuracy stays where it began.
# docs/environments.md explains the flags.
#
#   --fresh     delete the run folder first; without this flag, runs resume from their checkpoints
#   UPDATES=30  updates with the tool
#   SEED=1      random seed of the data, the model and the runs
#   WORK=DIR    the run folder (default: runs/quickstart_tools)
#   VENV=DIR    the Python environment (default: .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SEED=${SEED:-1} UPDATES=${UPDATES:-30}
WORK=${WORK:-runs/quickstart_tools}
export VENV=${VENV:-.venv}
DATA=$WORK/data HF=$WORK/model_hf

case ${1:-} in
    "") ;;
    --fresh) rm -rf "$WORK" ;;
    *) echo "unknown argument '$1'; the only argument is --fresh" >&2; exit 1 ;;
esac

TOOL_ARGS=(
    --environment calculator
    --tool-call-parser hermes
    --max-turns 2                   # a call, and the answer
    --max-environment-tokens 24
)
MODEL_ARGS=(
    --load-hf "$HF"
    --transformer-impl local
)
BATCH_ARGS=(
    --micro-batch-size 128
    --global-batch-size 512
)
DATA_ARGS=(
    --train-data-path "$DATA/train.jsonl"
    --valid-data-path "$DATA/test.jsonl"
    --max-prompt-length 16
)
ROLLOUT_ARGS=(
    --rollout-engine vllm
    --vllm-mode colocate
    --vllm-max-num-seqs 256
    --num-generations 8
    --max-completion-length 24
    --temperature 1.0
)
GRPO_ARGS=(
    --reward-funcs exact_match      # of the last turn: a call alone is no answer
    --loss-type dapo
    --scale-rewards group
    --epsilon 0.2
    --beta 0
)
OPTIM_ARGS=(
    --optimizer adam
    --lr 1e-3
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
    --save-interval 5
    --max-checkpoints-to-keep 2
    --val-before-train
    --eval-interval 10
    --eval-num-generations 2
)

train() { # NAME FLAGS...: a run in $WORK/NAME
    local run=$WORK/$1; shift
    torchrun --standalone --nproc-per-node 2 pretrain_grpo.py "${MODEL_ARGS[@]}" "${BATCH_ARGS[@]}" "${DATA_ARGS[@]}" \
        "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIM_ARGS[@]}" "${LOGGING_ARGS[@]}" --save "$run" --load "$run" "$@"
}

bash tools/make_venv.sh
PATH=$(cd "$VENV/bin" && pwd):$PATH
export PATH OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR

echo "[1/5] data: sums of four-digit numbers as chats"
[[ -e $DATA/test.jsonl ]] || python tools/data/arithmetic.py --save "$DATA" --digits 4 --pairs 20000 --tool-calls 0.2 \
    --shares 0.5 0.477 0.01 0.013 --seed "$SEED"
echo "[2/5] model: random weights, then supervised steps until 10% of sampled conversations are right by the tool"
[[ -e $HF/model.safetensors ]] || python tools/make_tiny_model.py --save "$HF" --tokenizer tools --stop-accuracy 0.1 \
    --train "$DATA/warmup.jsonl" --valid "$DATA/valid.jsonl" --seed "$SEED"
echo "[3/5] training by GRPO with the calculator, on 2 processes, vLLM in both"
train with_tool "${TOOL_ARGS[@]}" --train-iters "$UPDATES"
echo "[4/5] the same without the calculator"
train without_tool --train-iters 10
echo "[5/5] curves and evaluations"
python tools/plot_metrics.py "$WORK/with_tool" "$WORK/without_tool" --smooth 3 --output "$WORK/curves.png"
python - "$WORK/with_tool/metrics.jsonl" "$WORK/without_tool/metrics.jsonl" <<'END' | tee "$WORK/evaluations.txt"
import json, sys

print("greedy, sampled: share of held-out problems answered right; turns: 2 with a call, 1 without")
print("run           update  greedy  sampled  turns")
for file in sys.argv[1:]:
    for row in map(json.loads, open(file)):
        if "eval/greedy_accuracy" in row:
            run, turns = file.split("/")[-2], row.get("environment/turns")
            accuracies = f"{row['eval/greedy_accuracy']:6.3f}  {row['eval/sampled_accuracy']:7.3f}"
            print(f"{run:12s}  {row['iteration']:6d}  {accuracies}  {'' if turns is None else format(turns, '5.2f')}")
END
echo "Done. Completions turn by turn: $WORK/with_tool/completions.jsonl. Curves: $WORK/curves.png."
