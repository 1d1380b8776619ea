# Architecture of Qwen3-8B, which qwen3_8b.sh and qwen3_8b_async.sh share: source examples/grpo/qwen3_8b_model.sh
# shellcheck shell=bash
#
# A run compares these flags with the model's config.json; a dry run does not read the model.
# shellcheck disable=SC2034
MODEL_ARGS=(
    --model-family qwen3
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --rotary-base 1000000
    --vocab-size 151936
    --max-position-embeddings 40960
    --untie-embeddings-and-output-weights
)
