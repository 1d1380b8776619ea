#!/usr/bin/env bash
# The quickstart with LoRA: bash examples/grpo/quickstart_lora.sh
#
# Trains adapters of rank 8 on every linear layer of the quickstart's model; its weights stay as they are. The run stops
# after 40 of 80 updates in two data-parallel processes, and resumes in two tensor-parallel ones. At the end PEFT and vLLM
# load the adapter's files in a new process and answer the held-out problems. Run quickstart.sh first: this script uses
# its data and model. docs/lora.md explains the flags.
#
#   QUICKSTART=DIR  the run folder of quickstart.sh (default: runs/quickstart)
#   WORK=DIR      the run folder (default: runs/quickstart_lora); a second start resumes from it
#   VENV=DIR      the Python environment with peft (default: .venv, made by tools/make_venv.sh --test)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

QUICKSTART=${QUICKSTART:-runs/quickstart}
WORK=${WORK:-runs/quickstart_lora}
DATA=$QUICKSTART/data HF=$QUICKSTART/model_hf RUN=$WORK/run
PATH=$(cd "${VENV:-.venv}/bin" && pwd):$PATH
export PATH OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
[[ -e $HF ]] || { echo "quickstart_lora: $HF does not exist: run examples/grpo/quickstart.sh first" >&2; exit 1; }
mkdir -p "$WORK"

LORA_ARGS=(
    --lora-rank 8
    --lora-alpha 16
    --lora-target-modules all-linear
)
MODEL_ARGS=(
    --load-hf "$HF"
    --transformer-impl local
)
BATCH_ARGS=(
    --micro-batch-size 512
    --global-batch-size 1024
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
GRPO_ARGS=(
    --reward-funcs exact_match
    --loss-type dapo
    --scale-rewards group
    --epsilon 0.2
    --beta 0
)
OPTIM_ARGS=(
    --optimizer adam
    --lr 3e-3                       # ten times the rate for all weights
    --min-lr 3e-4
    --lr-decay-style linear
    --lr-warmup-iters 10
    --weight-decay 0
    --adam-beta1 0.9
    --adam-beta2 0.999
    --clip-grad 1.0
    --train-iters 80
    --seed "${SEED:-1}"
)
LOGGING_ARGS=(
    --save "$RUN"
    --load "$RUN"
    --save-interval 40
    --exit-interval 40
    --val-before-train
    --eval-interval 20
    --eval-num-generations 4
)

for size in 1 2; do
    # The second start resumes from the adapter's checkpoint; the base is read again from --load-hf.
    torchrun --standalone --nproc-per-node 2 pretrain_grpo.py --tensor-model-parallel-size "$size" "${LORA_ARGS[@]}" "${MODEL_ARGS[@]}" \
        "${BATCH_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIM_ARGS[@]}" \
        "${LOGGING_ARGS[@]}" "$@"
done

python tools/check_export.py --hf "$HF" --adapter "$RUN/adapter" --data "$DATA/test.jsonl" --max-completion-length 5
python - "$RUN/metrics.jsonl" <<'END'
import json, sys

rows = [json.loads(line) for line in open(sys.argv[1])]
accuracy = {row["iteration"]: row["eval/greedy_accuracy"] for row in rows if "eval/greedy_accuracy" in row}
print("greedy accuracy of the trainer's engine by update:", {update: round(a, 3) for update, a in accuracy.items()})
END
