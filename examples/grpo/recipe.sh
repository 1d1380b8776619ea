#!/usr/bin/env bash
# Train with the flags of a published method, on your model and data: bash examples/grpo/recipe.sh METHOD FLAGS
#
#   bash examples/grpo/recipe.sh dapo --load-hf /models/Qwen3-8B --train-data-path train.parquet --reward-funcs accuracy \
#       --global-batch-size 512 --num-generations 16 --steps-per-generation 4 --lr 1e-6 --train-iters 1000 --bf16 ...
#   bash examples/grpo/recipe.sh list       print the names of the methods
#
#   GPUS_PER_NODE all, NNODES 1, NODE_RANK 0, MASTER_ADDR localhost, MASTER_PORT 29500: with more nodes, start it on each
#
# A recipe sets the flags of the method. Your flags set model, data, batch and parallel configuration; they come last
# and override the recipe. Formulas and sources: docs/algorithms.md. python tools/recipes.py trains the quickstart's
# model with each recipe.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

declare -A RECIPES=(
    [grpo]="--loss-type grpo --epsilon 0.2 --beta 0.04 --kl-estimator k3"
    [dr_grpo]="--loss-type dr_grpo --scale-rewards none --epsilon 0.2 --beta 0"
    [dapo]="--loss-type dapo --epsilon 0.2 --epsilon-high 0.28 --beta 0 --overlong-filter
        --dynamic-sample --max-resample-times 3"
    [gspo]="--loss-type gspo --beta 0"
    [cispo]="--loss-type cispo --epsilon-high 5 --beta 0"
    [sapo]="--loss-type sapo --tau-pos 1.0 --tau-neg 1.05 --beta 0"
    [gmpo]="--loss-type gmpo --epsilon 0.4 --epsilon-high 0.4 --beta 0"
    [fipo]="--loss-type fipo --epsilon 0.2 --epsilon-high 0.28 --fipo-decay-rate 32 --fipo-clip-range 0.2 --beta 0"
    [real]="--loss-type real --real-tau 0.5 --beta 0"
    [clip_cov]="--loss-type dapo --epsilon 1 --beta 0 --clip-cov-ratio 2e-4 --clip-cov-lb 1 --clip-cov-ub 5"
    [kl_cov]="--loss-type dapo --epsilon 0.99999 --epsilon-high 1e6 --beta 0 --kl-cov-ratio 2e-4 --kl-cov-coef 1"
    [m2po]="--loss-type dapo --epsilon 0.2 --beta 0 --m2po-threshold 0.04"
    [rloo]="--advantage-estimator rloo --loss-type dr_grpo --epsilon 0.2 --kl-in-reward --beta 0.03"
    [reinforce_plus_plus]="--advantage-estimator reinforce_plus_plus --loss-type dapo --epsilon 0.2
        --kl-in-reward --beta 1e-3"
    [reinforce_plus_plus_baseline]="--advantage-estimator reinforce_plus_plus_baseline --loss-type dapo --epsilon 0.2
        --kl-estimator k2 --beta 1e-3"
    [pass_at_k]="--advantage-estimator pass_at_k --pass-at-k 4 --loss-type dapo --epsilon 0.2 --beta 0"
)

METHOD=${1:?a method; \"list\" names them}
shift
if [[ $METHOD == list ]]; then
    printf '%s\n' "${!RECIPES[@]}" | sort
    exit
fi
[[ -n ${RECIPES[$METHOD]:-} ]] || { echo "recipe.sh: no method '$METHOD'; there are: ${!RECIPES[*]}" >&2; exit 1; }
read -r -d '' -a RECIPE_ARGS <<<"${RECIPES[$METHOD]}" || true

# shellcheck source=examples/grpo/launch.sh
source examples/grpo/launch.sh
launch "${RECIPE_ARGS[@]}" "$@"
