#!/usr/bin/env bash
# A published shape at full size: the memory that the dry run plans, two updates, and the memory that they took.
#
#   NPROC=2 bash tools/benchmark/full_shape.sh local RUN_DIR DIRECTORY_WITH_CONFIG_JSON [more flags of pretrain_grpo.py]
#
# The run is that of step.sh: random weights, 128 completions of 512 tokens. Two H200s take gpt-oss-20b with all weights
# trained, if the optimizer's state is small (Adam is Transformer Engine's):
#
#   --expert-model-parallel-size 2 --vllm-tensor-parallel-size 2 --moe-grouped-gemm --moe-router-dtype fp32
#   --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 --grad-reduce-in-bf16
#   --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
set -euo pipefail
impl=${1:?local or transformer_engine} run=${2:?folder for the results} SHAPE=${3:?folder with config.json}; shift 3
here=$(cd "$(dirname "$0")" && pwd)
export SHAPE

DRY_RUN=1 bash "$here/step.sh" "$impl" "$run" "$@" 2>&1 | sed -n '/^memory of a rank/,/^engine/p'
samples=$(mktemp)
nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits -lms 500 > "$samples" & sampler=$!
trap 'kill $sampler 2>/dev/null; rm -f "$samples"' EXIT
status=0
bash "$here/step.sh" "$impl" "$run" "$@" || status=$?
echo "GiB of each GPU in use at most, by all programs:"
awk -F', ' '$2 > most[$1] {most[$1] = $2} END {for (gpu in most) printf "  GPU %s: %.1f\n", gpu, most[gpu] / 1024}' "$samples"
[[ -s $run/metrics.jsonl ]] || exit $((status ? status : 1))
python3 - "$run/metrics.jsonl" <<'PYTHON'
import json
import sys

for line in open(sys.argv[1]):
    row = json.loads(line)
    names = [name for name in row if name.startswith(("memory/", "time/")) or name in ("perf/mfu", "mismatch/mean_abs")]
    print(f"update {row['iteration']}: " + ", ".join(f"{name} {row[name]:.4g}" for name in sorted(names)))
PYTHON
exit $status
