#!/usr/bin/env bash
# Installs what is missing and runs the tests that a CPU can run:
#
#     bash tests/run_tests.sh                      every capability once, in minutes; slow proofs are left out
#     bash tests/run_tests.sh --all                every test, with more examples, and runs that torchrun itself starts
#     bash tests/run_tests.sh [pytest arguments]   the tests that they select, slow ones included
#     bash tests/run_tests.sh --gpu [files] [pytest arguments]
#
# With --gpu it installs nothing, and runs tests/gpu, or these files of it, in the environment of $PYTHON (default: python3),
# made from requirements-gpu.txt and requirements-test.txt. $REPORT (default: runs/gpu_tests.txt) gets a line for each case as
# soon as it has ended, with the text of a failure. -m "not gpus" selects the cases that need one GPU only.
# Order: format and lint, directions of imports, links of the documentation, unit tests, then those that start torchrun or
# vLLM (tests/conftest.py); types are checked meanwhile. Three files run at a time, on more than six cores one to two cores:
# tests wait for processes that start and for time limits. With pytest arguments all run in order.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { echo "== $*"; }

if [[ ${1:-} == --gpu ]]; then
    shift
    PYTHON=${PYTHON:-python3} REPORT=${REPORT:-runs/gpu_tests.txt}
    files=() options=() selected=""
    while (($#)); do
        case $1 in
            -m) selected=" and ($2)"; shift ;;
            -k) options+=("$1" "$2"); shift ;;
            *) if [[ $1 != -* && -e ${1%%::*} ]]; then files+=("$1"); else options+=("$1"); fi ;;
        esac
        shift
    done
    ((${#files[@]})) || files=(tests/gpu)
    "$PYTHON" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null \
        || { echo "run_tests.sh --gpu: $PYTHON finds no torch with a GPU; name the environment: PYTHON=/path/to/python3" >&2; exit 1; }
    "$PYTHON" - hypothesis megatron.core pytest transformers vllm xdist <<'END' || exit 1
import importlib.util, sys
missing = [name for name in sys.argv[1:] if not importlib.util.find_spec(name.partition(".")[0])]
if missing:
    sys.exit(f"run_tests.sh --gpu: {', '.join(missing)} missing: install requirements-gpu.txt and requirements-test.txt")
END
    mkdir -p "$(dirname "$REPORT")"
    echo "$(git describe --always --dirty 2>/dev/null || echo no commit), $(date -u +%FT%TZ), ${files[*]} ${options[*]}" >"$REPORT"
    step "GPUs: $(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | xargs)" | tee -a "$REPORT"
    step "report: $REPORT"
    failed=0 ended=0 running=
    trap 'ended=1; kill -TERM $running 2>/dev/null' INT TERM
    part() {  # in the background: bash runs a trap while it waits, but not during a program in the foreground
        ((ended == 0)) || exit 143
        step "$1" | tee -a "$REPORT"
        shift
        "$PYTHON" -m pytest "${files[@]}" --case-report "$REPORT" "$@" "${options[@]}" &
        running=$!
        local code
        while code=0; wait $running || code=$?; kill -0 $running 2>/dev/null; do :; done
        ((code == 0 || code == 5)) || failed=1  # 5: the part has no case
    }
    gpus=$("$PYTHON" -c 'import torch; print(min(4, torch.cuda.device_count()))')
    part "pytest: tests that measure free memory, one on each GPU" -m "alone and not gpus$selected" --numprocesses "$gpus"
    part "pytest: tests that measure free memory of several GPUs, one by one" -m "alone and gpus$selected"
    part "pytest: the other tests, five at a time on each GPU" -m "not alone$selected" --numprocesses $((5 * gpus)) --dist loadgroup
    ((ended == 0)) || exit 143
    exit $failed
fi

# Compiled modules are written, whatever the caller's setting: hundreds of processes import them.
export VENV=${VENV:-.venv} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONDONTWRITEBYTECODE=
selection=(-m "not slow")
if [[ ${1:-} == --all ]]; then
    shift
    selection=(--thorough)
    (($# == 0)) || { echo "run_tests.sh --all takes no other arguments; give --thorough to pytest" >&2; exit 1; }
fi

step environment
bash tools/make_venv.sh --test
types=$(mktemp)
nice -n 19 "$VENV/bin/python" -m mypy >"$types" 2>&1 &  # while the tests wait
checking=$!
trap 'rm -f "$types"; kill $checking 2>/dev/null || true' EXIT
step "ruff (lint and format)"
"$VENV/bin/ruff" check --quiet .
"$VENV/bin/ruff" format --check --quiet . || { echo "not formatted as ruff does; run: $VENV/bin/ruff format ." >&2; exit 1; }
step "imports (import-linter)"
"$VENV/bin/python" "$VENV/bin/lint-imports" --no-logo --no-cache
step "documentation (mkdocs --strict)"
SITE=$(mktemp -d)  # not with --quiet: it hides warnings from --strict, too
NO_MKDOCS_2_WARNING=1 "$VENV/bin/python" -m mkdocs build --strict --site-dir "$SITE" || { rm -rf "$SITE"; exit 1; }
rm -rf "$SITE"
failed=0
if (($#)); then
    step pytest
    "$VENV/bin/python" -m pytest "$@" || failed=1
else
    lanes=$(($(nproc) / 2)) && lanes=$((lanes < 3 ? 3 : lanes > 8 ? 8 : lanes))
    step "pytest: $lanes files at a time"
    "$VENV/bin/python" -m pytest "${selection[@]}" --numprocesses $lanes --dist loadfile --no-loadscope-reorder || failed=1
fi
step "types (mypy)"
wait $checking || failed=1
cat "$types"
exit $failed
