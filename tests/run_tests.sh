#!/usr/bin/env bash
# Installs what is missing and runs every test that a CPU can run: bash tests/run_tests.sh [pytest arguments]
# Order: format and lint, types of the pure modules, directions of imports, unit tests, then those that start torchrun or
# vLLM (tests/conftest.py). The unit tests run one to a core, the others in two lanes, a file in one of them: each has up to
# four processes, which often wait for each other. With arguments all run in order.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VENV=${VENV:-.venv} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

step() { echo "== $*"; }

step environment
bash tools/make_venv.sh --test
step "ruff (lint and format)"
"$VENV/bin/ruff" check --quiet .
"$VENV/bin/ruff" format --check --quiet . || { echo "not formatted as ruff does; run: $VENV/bin/ruff format ." >&2; exit 1; }
step "mypy (pure modules)"
"$VENV/bin/python" -m mypy
step "imports (import-linter)"
"$VENV/bin/lint-imports" --no-logo --no-cache
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
