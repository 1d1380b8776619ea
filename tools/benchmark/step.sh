#!/usr/bin/env bash
# Run ten GRPO updates of a random model with the architecture of Qwen3-0.6B: 512 completions of 512 tokens per update.
#
#   bash tools/benchmark/step.sh local|transformer_engine RUN_DIR [more flags of pretrain_grpo.py]
#
# NPROC is the number of GPUs (default 1). Print the result with: python tools/benchmark/step_table.py RUN_DIR
set -euo pipefail
impl=${1:?local or transformer_engine} run=${2:?folder for the results}; shift 2
cd "$(dirname "$0")/../.."
export CUDA_DEVICE_MAX_CONNECTIONS=1

mkdir -p "$run"
python3 tools/make_tiny_model.py --save "$run/tokenizer" --steps 0 --tokenizer bytes --quiet
python3 tools/data/arithmetic.py --save "$run/data" --digits 3 --pairs 2000 > /dev/null

MODEL_ARGS=(
    --model-family qwen3 --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072
    --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --rotary-base 1000000 --vocab-size 151936 --max-position-embeddings 40960
)
ROLLOUT_ARGS=(
    --num-generations 8 --generation-batch-size 512 --max-prompt-length 32 --max-completion-length 512 --ignore-eos
    --vllm-max-num-seqs 512 --vllm-gpu-memory-utilization 0.3 --mismatch-sample-rate 0.1
)
GRPO_ARGS=(
    --external-plugins tools/benchmark/even_tokens.py --reward-funcs even_tokens --beta 0
    --train-iters 10 --lr 1e-6 --max-tokens-per-microbatch 16384 --clip-grad 1.0
)
torchrun --nproc-per-node "${NPROC:-1}" pretrain_grpo.py --bf16 --transformer-impl "$impl" \
    --train-data-path "$run/data/train.jsonl" --tokenizer-model "$run/tokenizer" --save "$run" --no-save-hf \
    "${MODEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "$@"
