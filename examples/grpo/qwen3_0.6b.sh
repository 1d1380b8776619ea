#!/usr/bin/env bash
# GRPO for Qwen3-0.6B on GSM8K, on one or more nodes with GPUs. Install first: pip install -r requirements-gpu.txt
#
#   hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B
#   hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k
#   HF_MODEL=models/Qwen3-0.6B GSM8K=data/gsm8k bash examples/grpo/qwen3_0.6b.sh [more flags of pretrain_grpo.py]
#
#   HF_MODEL    the model as Hugging Face publishes it (config.json, safetensors, tokenizer)
#   GSM8K       folder of GSM8K as "hf download" makes it, or with train.jsonl and test.jsonl of its authors
#   SAVE        folder for checkpoints, metrics, the export (default: runs/qwen3_0.6b); a second start resumes from it
#   GPUS_PER_NODE all, NNODES 1, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500: with more nodes, start it on each
#
# Flags at the end override those below: "... qwen3_0.6b.sh --dry-run" prints batch sizes and the layers of each rank.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

HF_MODEL=${HF_MODEL:?the folder of Qwen3-0.6B}
GSM8K=${GSM8K:?the folder of GSM8K, from its authors or from Hugging Face}
# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh

DATA=$SAVE/data
for split in train test; do
    input=$GSM8K/main/$split-00000-of-00001.parquet  # Hugging Face's
    [[ -e $input ]] || input=$GSM8K/$split.jsonl
    if [[ ! -e $input ]]; then
        echo "qwen3_0.6b: GSM8K=$GSM8K has neither main/$split-00000-of-00001.parquet nor $split.jsonl:" \
            "hf download openai/gsm8k --repo-type dataset --local-dir DIR" >&2
        exit 1
    fi
    [[ -e $DATA/$split.parquet ]] || python tools/data/gsm8k.py --input "$input" --output "$DATA/$split.parquet"
done

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
MODEL_ARGS=(
    --load-hf "$HF_MODEL"           # architecture, weights and tokenizer
    --transformer-impl local        # transformer_engine when it is installed
    --bias-activation-fusion
    --bias-dropout-fusion
    --gradient-accumulation-fusion
    --bf16
)
DATA_ARGS=(
    --train-data-path "$DATA/train.parquet"
    --valid-data-path "$DATA/test.parquet"
    --system-prompt 'Reason step by step. Put the final answer within \boxed{}.'
    # Qwen3 thinks for some thousand tokens before it answers: --max-completion-length would cut most answers off. To
    # train it while it thinks, add --chat-template-kwargs '{}' --max-completion-length 8192.
    --chat-template-kwargs '{"enable_thinking": false}'
    --max-prompt-length 512
    --truncation-strategy delete
)
ROLLOUT_ARGS=(
    --rollout-engine vllm
    --vllm-mode colocate
    --vllm-tensor-parallel-size 1
    --vllm-gpu-memory-utilization 0.4
    --num-generations 8
    --max-completion-length 1024
    --temperature 1.0
)
GRPO_ARGS=(
    --reward-funcs accuracy
    --loss-type dapo
    --scale-rewards group
    --epsilon 0.2
    --epsilon-high 0.28
    --beta 0
)
OPTIM_ARGS=(
    --global-batch-size 512         # completions: 64 prompts of 8
    --max-tokens-per-microbatch 16384
    --train-iters 200
    --lr 2e-6
    --lr-warmup-iters 10
    --weight-decay 0
    --clip-grad 1.0
)
LOGGING_ARGS=(
    --save "$SAVE"
    --load "$SAVE"
    --save-interval 50
    --max-checkpoints-to-keep 2
    --val-before-train
    --eval-interval 25
    --mismatch-sample-rate 0.1
    --tensorboard-dir "$SAVE/tensorboard"
)

launch "${PARALLEL_ARGS[@]}" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIM_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
