# What the launch scripts for GPUs share: source examples/grpo/launch.sh
# shellcheck shell=bash
#
#   launch FLAGS   start torchrun on this node; with DRY_RUN=1 print layers and memory of each rank instead, on any machine
#   MATH_ARGS      flags that the scripts of large models share: data, loss, optimizer, engine and logging of mathematics
#
# Later flags override earlier ones: a script's come after MATH_ARGS, those of the command line last.
#
#   NNODES 1, GPUS_PER_NODE all of the node (8 in a dry run), NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500:
#                  start the script on each node
#   SAVE           folder for checkpoints, metrics and the export: runs/ with the name of the script
export CUDA_DEVICE_MAX_CONNECTIONS=1
SAVE=${SAVE:-runs/$(basename "$0" .sh)}

gpus_here() {  # those that a program sees; 1 without any, so that the program says what is missing
    local found
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
        found=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
    else
        found=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || true
    fi
    echo $((found > 0 ? found : 1))
}

launch() {
    local nodes=${NNODES:-1} gpus=${GPUS_PER_NODE:-$(gpus_here)}
    if [[ ${DRY_RUN:-0} == 1 ]]; then
        WORLD_SIZE=$((nodes * ${GPUS_PER_NODE:-8})) python pretrain_grpo.py "$@" --dry-run
    else
        # torchrun would try a wrong flag as often. It also takes words and ranges, which give no world size.
        if [[ ${PET_MAX_RESTARTS:-0} != 0 && $nodes =~ ^[1-9][0-9]*$ && $gpus =~ ^[1-9][0-9]*$ ]]; then
            WORLD_SIZE=$((nodes * gpus)) python -m megatron_grpo.training.command_line "$@" || exit
        fi
        exec torchrun --nproc-per-node "$gpus" --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" \
            --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" pretrain_grpo.py "$@"
    fi
}

# shellcheck disable=SC2034
MATH_ARGS=(
    --train-data-path "${TRAIN_DATA:-data/train.parquet}"
    --valid-data-path "${VALID_DATA:-data/test.parquet}"
    --system-prompt 'Reason step by step. Put the final answer within \boxed{}.'
    --max-prompt-length 1024
    --truncation-strategy delete
    --reward-funcs accuracy
    --loss-type dapo
    --epsilon 0.2
    --epsilon-high 0.28
    --beta 0                        # no KL term, no reference model
    --bf16
    --bias-activation-fusion
    --bias-dropout-fusion
    --max-tokens-per-microbatch 8192
    --train-iters 500
    --lr 1e-6
    --lr-warmup-iters 10
    --weight-decay 0.1
    --clip-grad 1.0
    --rollout-engine vllm
    --vllm-mode colocate
    --num-generations 8             # completions per prompt
    --temperature 1.0
    --save "$SAVE"
    --load "$SAVE"
    --save-interval 50
    --max-checkpoints-to-keep 2
    --eval-interval 25
    --mismatch-sample-rate 0.1
    --tensorboard-dir "$SAVE/tensorboard"
)
