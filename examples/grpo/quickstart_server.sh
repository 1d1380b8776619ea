#!/usr/bin/env bash
# The quickstart with separate vLLM servers: bash examples/grpo/quickstart_server.sh
#
# Starts SERVERS stock vLLM servers on this machine and trains with them; quickstart.sh runs vLLM in the training
# processes. Run quickstart.sh first: this script uses its environment, data and model. Training continues without a
# server that is killed; a restarted server (the command is printed) is used from the next update on.
#
#   SERVERS=1     number of servers
#   PORT=8801     port of the first server
#   QUICKSTART=DIR  the run folder of quickstart.sh (default: runs/quickstart)
#   WORK=DIR      the run folder (default: runs/quickstart_server); a second start resumes from it
#   VENV=DIR      the Python environment (default: .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SERVERS=${SERVERS:-1}
PORT=${PORT:-8801}
QUICKSTART=${QUICKSTART:-runs/quickstart}
WORK=${WORK:-runs/quickstart_server}
DATA=$QUICKSTART/data HF=$QUICKSTART/model_hf MEGATRON=$QUICKSTART/model_megatron RUN=$WORK/run
PATH=$(cd "${VENV:-.venv}/bin" && pwd):$PATH
export PATH OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
[[ -e $MEGATRON ]] || { echo "quickstart_server: $MEGATRON does not exist: run examples/grpo/quickstart.sh first" >&2; exit 1; }
mkdir -p "$WORK"

# Servers and trainer read the key from the environment; other users can read a command line.
VLLM_API_KEY=${VLLM_API_KEY:-$(python -c "import secrets; print(secrets.token_hex(16))")}
export VLLM_API_KEY

VLLM_ENVIRONMENT=(
    VLLM_SERVER_DEV_MODE=1          # enables the routes that the trainer needs: do not expose the port
    VLLM_CPU_KVCACHE_SPACE=1
    VLLM_CPU_OMP_THREADS_BIND=nobind
    VLLM_NO_USAGE_STATS=1
)
VLLM_SERVE=(
    --model "$HF"
    --host 127.0.0.1
    --dtype float32                 # the dtype of the trainer
    --max-model-len 13
    --max-num-seqs 512
    --logprobs-mode processed_logprobs
    --no-enable-chunked-prefill     # vLLM on CPUs cannot chunk a prompt with a seed
    --enforce-eager
)
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
    --vllm-mode server
    --vllm-max-num-seqs 512
    --weight-sync-method checkpoint # through /dev/shm; on GPUs: nccl
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
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style linear
    --lr-warmup-iters 10
    --weight-decay 0
    --adam-beta1 0.9
    --adam-beta2 0.999
    --clip-grad 1.0
    --train-iters 120
    --seed "${SEED:-1}"
)
LOGGING_ARGS=(
    --save "$RUN"
    --load "$RUN"
    --save-interval 40
    --max-checkpoints-to-keep 2
    --val-before-train
    --eval-interval 20
    --eval-num-generations 4
    --tensorboard-dir "$RUN/tensorboard"
)

pids=() urls=()
trap '[[ ${#pids[@]} == 0 ]] || kill "${pids[@]}" 2>/dev/null' EXIT
for ((i = 0; i < SERVERS; i++)); do
    command=(env "${VLLM_ENVIRONMENT[@]}" python -m vllm.entrypoints.openai.api_server "${VLLM_SERVE[@]}" --port $((PORT + i)))
    echo "server $i: ${command[*]} (log: $WORK/server_$i.log; key: VLLM_API_KEY)"
    "${command[@]}" >"$WORK/server_$i.log" 2>&1 &
    pids+=($!) urls+=("http://127.0.0.1:$((PORT + i))")
done

# The trainer waits until the servers are ready.
torchrun --standalone --nproc-per-node 2 pretrain_grpo.py "${PARALLEL_ARGS[@]}" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" --vllm-server-base-url "${urls[@]}" "${GRPO_ARGS[@]}" "${OPTIM_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
