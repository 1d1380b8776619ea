#!/usr/bin/env bash
# The quickstart with reward models on vLLM servers: bash examples/grpo/quickstart_reward_models.sh
#
# Starts a sequence classifier and a generative judge as stock vLLM servers on this machine, and trains with their
# scores and exact_match. During training it kills and restarts one server: this costs time, but no score is lost. Both
# models have random weights, so their scores are meaningless and have small weights; replace them with your own models.
# Run quickstart.sh first: this script uses its environment, data and model.
#
#   PORT=8821     port of the classifier; the judge has the next port
#   QUICKSTART=DIR  the run folder of quickstart.sh (default: runs/quickstart)
#   WORK=DIR      the run folder (default: runs/quickstart_reward_models); it is deleted at the start
#   VENV=DIR      the Python environment (default: .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PORT=${PORT:-8821}
QUICKSTART=${QUICKSTART:-runs/quickstart}
WORK=${WORK:-runs/quickstart_reward_models}
DATA=$QUICKSTART/data MEGATRON=$QUICKSTART/model_megatron RUN=$WORK/run
PATH=$(cd "${VENV:-.venv}/bin" && pwd):$PATH
export PATH OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
[[ -e $MEGATRON ]] || { echo "quickstart_reward_models: $MEGATRON does not exist: run examples/grpo/quickstart.sh first" >&2; exit 1; }
rm -rf "$WORK"
mkdir -p "$WORK"

VLLM_ENVIRONMENT=(
    VLLM_CPU_KVCACHE_SPACE=1
    VLLM_CPU_OMP_THREADS_BIND=nobind
    VLLM_NO_USAGE_STATS=1
)
VLLM_SERVE=(
    --host 127.0.0.1
    --dtype float32
    --max-model-len 256
    --enforce-eager
)
PARALLEL_ARGS=(
    --micro-batch-size 128
    --global-batch-size 256
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
    --max-prompt-length 8
)
ROLLOUT_ARGS=(
    --rollout-engine vllm
    --vllm-mode colocate
    --vllm-max-num-seqs 128
    --num-generations 8
    --max-completion-length 5
    --temperature 1.0
)
REWARD_ARGS=(
    --reward-funcs exact_match liked grade
    --reward-weights 1 0.01 0.01
    --reward-model "liked=http://127.0.0.1:$PORT" "grade=http://127.0.0.1:$((PORT + 1))/v1"
    --reward-model-plugin grade=grade # the class in this file writes the judge's requests and reads its answers
    --external-plugins examples/grpo/grade_judge.py
    --reward-model-timeout 300        # seconds for a server to start or restart
)
GRPO_ARGS=(
    --loss-type dapo
    --scale-rewards group
    --beta 0
)
OPTIM_ARGS=(
    --lr 3e-4
    --lr-warmup-iters 4
    --weight-decay 0
    --clip-grad 1.0
    --train-iters 12
    --seed "${SEED:-1}"
)
LOGGING_ARGS=(
    --save "$RUN"
    --no-save-hf
)

python tools/make_tiny_model.py --save "$WORK/judge" --tokenizer bytes --steps 0 --max-position-embeddings 256
python - "$WORK/judge" "$WORK/classifier" <<'END'
import sys
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

source, target = sys.argv[1:]
config = AutoConfig.from_pretrained(source, num_labels=1)
AutoModelForSequenceClassification.from_config(config).save_pretrained(target)
AutoTokenizer.from_pretrained(source).save_pretrained(target)
END

declare -A pids
trap '[[ ${#pids[@]} == 0 ]] || kill "${pids[@]}" 2>/dev/null' EXIT
serve() { # NAME PORT OPTION...: starts a server and stores its process id
    local name=$1 port=$2; shift 2
    env "${VLLM_ENVIRONMENT[@]}" setsid python -m vllm.entrypoints.openai.api_server --model "$WORK/$name" --port "$port" \
        "${VLLM_SERVE[@]}" "$@" >>"$WORK/$name.log" 2>&1 &
    pids[$name]=$!
}
serve classifier "$PORT" --runner pooling
serve judge $((PORT + 1))

# The trainer waits until the servers are ready.
torchrun --standalone --nproc-per-node 2 pretrain_grpo.py "${PARALLEL_ARGS[@]}" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" "${REWARD_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIM_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@" &
pids[trainer]=$!
until [[ $(wc -l 2>/dev/null <"$RUN/metrics.jsonl") -ge 6 ]] || ! kill -0 "${pids[trainer]}" 2>/dev/null; do sleep 0.2; done
echo "killing and restarting the classifier"
kill -KILL -- "-${pids[classifier]}"
serve classifier "$PORT" --runner pooling
wait "${pids[trainer]}"
unset "pids[trainer]"
