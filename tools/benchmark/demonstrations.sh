#!/usr/bin/env bash
# Learn the quickstart's task from a weak start, with demonstrations beside the rollout or without, on CPU cores:
#
#     bash tools/benchmark/demonstrations.sh METHOD [SEED] [UPDATES]
#
# METHOD: grpo    rewards alone
#         sft     (1 - mu) GRPO + mu SFT, mu from 0.9 to 0.05 by a cosine over two thirds of the updates (CHORD-mu)
#         chord   (1 - mu) GRPO + mu SFT-phi, mu 0.1 (CHORD-phi)
#         luffy   the demonstration of each prompt in its group
#
# The model has learnt until 5% of sampled answers are right. An update has 512 completions of 64 prompts, and 64
# demonstrations: right answers to training problems, of the same file as the prompts. Prints the accuracy of greedy and
# of sampled answers on held-out problems, by update. WORK=DIR is the folder of all runs (default:
# runs/demonstrations); data and start are made once for each seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

METHOD=${1:?give grpo, sft, chord or luffy}
SEED=${2:-1}
UPDATES=${3:-60}
WORK=${WORK:-runs/demonstrations}
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR TRANSFORMERS_VERBOSITY=error

DATA=$WORK/seed$SEED/data HF=$WORK/seed$SEED/model RUN=$WORK/seed$SEED/$METHOD
case $METHOD in
    grpo) MIX=() ;;
    sft)
        MIX=(--sft-loss-type sft --sft-batch-size 64)
        MIX+=(--chord-mu-peak 0.9 --chord-mu-valley 0.05 --chord-mu-decay-steps $((UPDATES * 2 / 3)))
        ;;
    chord) MIX=(--sft-loss-type chord --sft-batch-size 64 --chord-mu-peak 0.1) ;;
    luffy) MIX=(--sft-loss-type luffy) ;;
    *) echo "unknown method '$METHOD'; give grpo, sft, chord or luffy" >&2; exit 1 ;;
esac
[[ $METHOD == grpo ]] || MIX+=(--sft-data-path "$DATA/train.jsonl")

[[ -d $DATA ]] || python tools/data/arithmetic.py --save "$DATA" --operations + --digits 2 --reversed --seed "$SEED"
[[ -d $HF ]] || python tools/make_tiny_model.py --save "$HF" --train "$DATA/warmup.jsonl" --valid "$DATA/valid.jsonl" \
    --stop-accuracy 0.05 --seed "$SEED"
rm -rf "$RUN"
torchrun --standalone --nproc-per-node 1 pretrain_grpo.py \
    --load-hf "$HF" --transformer-impl local --micro-batch-size 512 --global-batch-size 512 \
    --train-data-path "$DATA/train.jsonl" --valid-data-path "$DATA/test.jsonl" --max-prompt-length 8 \
    --rollout-engine vllm --vllm-mode colocate --vllm-max-num-seqs 512 --num-generations 8 --max-completion-length 5 \
    --reward-funcs exact_match --loss-type dapo --scale-rewards group --beta 0 \
    --lr 3e-4 --lr-warmup-iters 5 --weight-decay 0 --train-iters "$UPDATES" --seed "$SEED" "${MIX[@]}" \
    --save "$RUN" --no-save-hf --save-interval "$UPDATES" --val-before-train --eval-interval 10 \
    --eval-num-generations 2 >"$RUN.log" 2>&1 || { tail -n 30 "$RUN.log" >&2; exit 1; }
python tools/benchmark/learning_table.py "$RUN"
