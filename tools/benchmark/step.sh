#!/usr/bin/env bash
# GRPO updates of a Qwen3-shaped model with random weights, 512 completions an update; no checkpoint is read.
#
#   bash tools/benchmark/step.sh local|transformer_engine RUN_DIR [more flags of pretrain_grpo.py]
#   NPROC=2 SHAPE=8b bash tools/benchmark/step.sh local runs/8b
#
#   SHAPE   0.6b (the default): ten updates of 512 tokens a completion
#           4b: four updates of 256 completions
#           30b_a3b: five updates of 128 completions; with --lora-rank on one GPU, with as many as it needs otherwise
#           8b: three updates of 1,024 tokens a completion, TP 2, with the flags of examples/grpo/qwen3_8b.sh; 107 GiB of disk for
#           its checkpoint and 150 GiB of host memory
#           a folder with a published config.json: two updates of 128 completions of 512 tokens. gpt-oss-20b on two H200s:
#           --expert-model-parallel-size 2 --vllm-tensor-parallel-size 2 --moe-grouped-gemm --moe-router-dtype fp32
#           --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 --grad-reduce-in-bf16
#           --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
#   NPROC   GPUs, 1 by default. DRY_RUN=1 prints the memory of each and runs nothing. SCRIPT replaces pretrain_grpo.py.
#   OFFLOADS  flags that free memory for the engine of 4b and larger shapes; empty on a GPU that has room for both
#   MEDIAN, MEAN   lengths of completions are drawn (lognormal, at most --max-completion-length): tools/benchmark/long_tail.py
#
# Afterwards: python tools/benchmark/step_table.py RUN_DIR
set -euo pipefail
impl=${1:?local or transformer_engine} run=${2:?folder for the results}; shift 2
cd "$(dirname "$0")/../.."
export CUDA_DEVICE_MAX_CONNECTIONS=1
NPROC=${NPROC:-1}
read -ra OFFLOADS <<< "${OFFLOADS---sleep-level 2 --offload-model --offload-gradients --offload-optimizer}"
if [[ -n ${MEDIAN:-} ]]; then
    SCRIPT=tools/benchmark/long_tail.py
    set -- --median "$MEDIAN" --mean "${MEAN:?the mean length, with MEDIAN}" "$@"
fi

inputs=$(dirname "$run")/step_inputs  # the runs of a folder share them
mkdir -p "$run"
if [[ ! -d $inputs ]]; then
    making=$(mktemp -d "$inputs.XXXX")
    python3 tools/make_tiny_model.py --save "$making/tokenizer" --steps 0 --tokenizer bytes --quiet & model=$!
    python3 tools/data/arithmetic.py --save "$making/data" --digits 3 --pairs 2000 > /dev/null
    wait $model
    mv "$making" "$inputs"
fi

MODEL_ARGS=(
    --group-query-attention --kv-channels 128 --qk-layernorm
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --rotary-base 1000000 --vocab-size 151936 --max-position-embeddings 40960
)
ROLLOUT_ARGS=(
    --num-generations 8 --max-prompt-length 32 --ignore-eos
    --vllm-max-num-seqs 512 --mismatch-sample-rate 0.1
)
GRPO_ARGS=(
    --external-plugins tools/benchmark/even_tokens.py --reward-funcs even_tokens --beta 0 --lr 1e-6 --clip-grad 1.0
)
case ${SHAPE:-0.6b} in
    0.6b) SHAPE_ARGS=(
        --model-family qwen3 --num-query-groups 8 --generation-batch-size 512
        --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16
        --max-completion-length 512 --max-tokens-per-microbatch 16384 --train-iters 10
        --vllm-gpu-memory-utilization 0.3
    ) ;;
    4b) SHAPE_ARGS=(
        --model-family qwen3 --num-query-groups 8 --generation-batch-size 256
        --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
        --max-completion-length 512 --max-tokens-per-microbatch 8192 --train-iters 4
        --vllm-gpu-memory-utilization 0.4 "${OFFLOADS[@]}"
        --bias-activation-fusion --bias-dropout-fusion
    ) ;;
    30b_a3b) SHAPE_ARGS=(
        --model-family qwen3_moe --num-query-groups 4 --generation-batch-size 128
        --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
        --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --moe-router-dtype fp32
        --untie-embeddings-and-output-weights
        --max-completion-length 512 --max-tokens-per-microbatch 4096 --train-iters 5
        --vllm-gpu-memory-utilization 0.6 "${OFFLOADS[@]}"
    ) ;;
    8b) SHAPE_ARGS=(
        --model-family qwen3 --num-query-groups 8 --generation-batch-size 512
        --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32
        --untie-embeddings-and-output-weights
        --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
        --max-completion-length 1024 --max-tokens-per-microbatch 8192 --train-iters 3
        --vllm-tensor-parallel-size 2 --vllm-gpu-memory-utilization 0.6 "${OFFLOADS[@]}"
        --bias-activation-fusion --bias-dropout-fusion
    ) ;;
    *)  [[ -f $SHAPE/config.json ]] || { echo "step.sh: SHAPE is 0.6b, 4b, 8b, 30b_a3b or a folder with config.json, not $SHAPE" >&2; exit 1; }
        MODEL_ARGS=()
        mapfile -t SHAPE_ARGS < <(python3 tools/benchmark/published_shape.py "$SHAPE")
        SHAPE_ARGS+=(
            --generation-batch-size 128 --max-completion-length 512 --max-tokens-per-microbatch 4096 --train-iters 2
            --vllm-gpu-memory-utilization 0.6 "${OFFLOADS[@]}"
        ) ;;
esac
ARGS=(--bf16 --transformer-impl "$impl" --train-data-path "$inputs/data/train.jsonl" --tokenizer-model "$inputs/tokenizer"
    --save "$run" --no-save-hf "${MODEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${SHAPE_ARGS[@]}")

if [[ ${DRY_RUN:-0} == 1 ]]; then
    WORLD_SIZE=$NPROC python3 "${SCRIPT:-pretrain_grpo.py}" "${ARGS[@]}" --dry-run "$@"
else
    torchrun --standalone --nproc-per-node "$NPROC" "${SCRIPT:-pretrain_grpo.py}" "${ARGS[@]}" "$@"
fi
