#!/usr/bin/env bash
# Installs what is missing and runs every test that a CPU can run: bash tests/run_tests.sh [pytest arguments]
# With --gpu it installs nothing, and runs tests/gpu in the environment of $PYTHON (default: python3), made from
# requirements-gpu.txt and requirements-test.txt: bash tests/run_tests.sh --gpu [pytest arguments]
# Order: format and lint, types of the pure modules, directions of imports, links of the documentation, unit tests, then those
# that start torchrun or vLLM (tests/conftest.py). The unit tests run one to a core, the others in two lanes, a file in one of them: each has up to
# four processes, which often wait for each other. With arguments all run in order.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { echo "== $*"; }

if [[ ${1:-} == --gpu ]]; then
    shift
    PYTHON=${PYTHON:-python3}
    "$PYTHON" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null \
        || { echo "run_tests.sh --gpu: $PYTHON finds no torch with a GPU; name the environment: PYTHON=/path/to/python3" >&2; exit 1; }
    "$PYTHON" -c 'import hypothesis, megatron.core, pytest, transformers, vllm, xdist' \
        || { echo "run_tests.sh --gpu: install requirements-gpu.txt and requirements-test.txt" >&2; exit 1; }
    step "GPUs: $(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | xargs)"
    failed=0
    step "pytest: tests that measure free memory, one by one"
    "$PYTHON" -m pytest tests/gpu -m alone "$@" || failed=1
    step "pytest: the other tests, five at a time"
    "$PYTHON" -m pytest tests/gpu -m "not alone" --numprocesses 5 --dist loadgroup "$@" || failed=1
    exit $failed
fi

export VENV=${VENV:-.venv} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

step environment
bash tools/make_venv.sh --test
step "ruff (lint and format)"
"$VENV/bin/ruff" check --quiet .
"$VENV/bin/ruff" format --check --quiet . || { echo "not formatted as ruff does; run: $VENV/bin/ruff format ." >&2; exit 1; }
step "mypy (pure modules)"
"$VENV/bin/python" -m mypy
step "imports (import-linter)"
"$VENV/bin/lint-imports" --no-logo --no-cache
step "documentation (mkdocs --strict)"
SITE=$(mktemp -d)  # not with --quiet: it hides warnings from --strict, too
NO_MKDOCS_2_WARNING=1 "$VENV/bin/mkdocs" build --strict --site-dir "$SITE" || { rm -rf "$SITE"; exit 1; }
rm -rf "$SITE"
if (($#)); then
    step pytest
    exec "$VENV/bin/python" -m pytest "$@"
fi
failed=0
step "pytest: unit tests, one to a core"
"$VENV/bin/python" -m pytest -m "not distributed and not vllm" --numprocesses logical --maxprocesses 8 --dist loadfile || failed=1
step "pytest: tests that start torchrun or vLLM, in two lanes"
"$VENV/bin/python" -m pytest -m "distributed or vllm" --numprocesses 2 --dist loadfile --no-loadscope-reorder || failed=1
exit $failed
