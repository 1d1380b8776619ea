#!/usr/bin/env bash
# Makes the CPU environment, or reuses it: bash tools/make_venv.sh [--test]
#   --test        also what the tests need (requirements-test.txt)
#   VENV=DIR      where it lies (default: .venv in the repository)
#   PYTHON=EXE    the interpreter it is made with, 3.11 or 3.12 (default: the first of python3, python3.12, python3.11 that fits)
# A stamp in the environment holds the requirements it was made from, so that a second run is instant.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
TORCH="torch==2.13.0+cpu"
TORCH_INDEX=https://download.pytorch.org/whl/cpu
LOG=$VENV/install.log

fail() { printf 'make_venv: %s\n' "$@" >&2; exit 1; }

FILES=(requirements-cpu.txt)
for arg in "$@"; do
    case $arg in
        --test) FILES+=(requirements-test.txt) ;;
        *) fail "unknown argument '$arg'; there is only --test" ;;
    esac
done

if [[ "$(uname -s) $(uname -m)" != "Linux x86_64" ]]; then
    fail "this is $(uname -s) on $(uname -m), but the CPU build of vLLM is pinned for Linux on x86_64." \
         "Use a Linux machine, a container or WSL 2."
fi

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }

# Runs a command with its output in the log; shows the seconds meanwhile (on a terminal every second, else every 20).
logged() {
    local title=$1 start=$SECONDS; shift
    printf '\n==== %s\n$ %s\n' "$title" "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 &
    local pid=$! rc=0 wait_s
    trap 'kill '"$pid"' 2>/dev/null; exit 130' INT TERM
    [[ -t 1 ]] || echo "  $title"
    while kill -0 "$pid" 2>/dev/null; do
        wait_s=$((SECONDS - start))
        if [[ -t 1 ]]; then
            printf '\r  %s: %d s ' "$title" "$wait_s"
        elif ((wait_s > 0 && wait_s % 20 == 0)); then
            echo "    ... $wait_s s"
        fi
        sleep 1
    done
    wait "$pid" || rc=$?
    trap - INT TERM
    if [[ -t 1 ]]; then echo; fi
    return $rc
}

failed() {
    echo "make_venv: $1; the last lines of $LOG:" >&2
    tail -n 15 "$LOG" | sed 's/^/    /' >&2
    exit 1
}

if ! [[ -x $VENV/bin/python ]] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    if [[ -n ${PYTHON:-} ]]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not a program"
        fits "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 || true), needed is 3.11 or 3.12"
    else
        for exe in python3 python3.12 python3.11; do
            if fits "$exe"; then PYTHON=$exe; break; fi
        done
        [[ -n ${PYTHON:-} ]] || fail "no Python 3.11 or 3.12 found (python3 is: $(python3 --version 2>&1 || true)); name one: PYTHON=/path/to/python3.12"
    fi
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || fail "$PYTHON cannot make environments; install its venv package (Debian, Ubuntu: python3-venv)"
    mkdir -p "$VENV"
    logged "making $VENV with $("$PYTHON" --version)" "$PYTHON" -m venv "$VENV" || failed "the environment could not be made"
fi
fits "$VENV/bin/python" || fail "$VENV holds $("$VENV/bin/python" --version 2>&1), needed is 3.11 or 3.12; remove it, or move it: VENV=DIR"

PIP=("$VENV/bin/python" -m pip --disable-pip-version-check)
stamp() { printf '%s ' "$TORCH"; cat "$@" | sha256sum; }

if [[ $(cat "$VENV/.stamp-requirements-cpu.txt" 2>/dev/null) != "$(stamp requirements-cpu.txt)" ]]; then
    # --no-deps throughout: what torch needs is in the locked file too. PyPI has no "+cpu" build, so pip says at once whether one
    # of the configured indexes has it.
    logged "$TORCH" "${PIP[@]}" install --no-deps "$TORCH" \
        || logged "$TORCH from $TORCH_INDEX" "${PIP[@]}" install --no-deps --index-url "$TORCH_INDEX" "$TORCH" \
        || failed "torch could not be installed"
fi
for file in "${FILES[@]}"; do
    if [[ $(cat "$VENV/.stamp-$file" 2>/dev/null) != "$(stamp "$file")" ]]; then
        logged "$(grep -c '^[a-z].*==' "$file") packages of $file" "${PIP[@]}" install --no-deps --require-hashes -r "$file" \
            || failed "$file could not be installed"
        # Complete? The three that are left out on purpose (requirements-cpu.txt says why) may be missed, nothing else.
        missed=$("${PIP[@]}" check 2>&1 | grep -vE 'No broken requirements|requires (torchaudio|torchcodec|triton),' || true)
        [[ -z $missed ]] || fail "after installing $file pip misses:" "$missed"
        stamp "$file" >"$VENV/.stamp-$file"
    fi
done

# PyPI's builds of these are CUDA ones: beside torch's CPU build they break `import transformers`.
extra=$("$VENV/bin/python" -c '
from importlib.util import find_spec
print(*[name for name in ("torchaudio", "torchcodec") if find_spec(name)])')
[[ -z $extra ]] || fail "$VENV holds $extra, which breaks transformers here; remove: $VENV/bin/python -m pip uninstall -y $extra"

site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp tools/cpu_torchvision.py "$site/"
echo "import cpu_torchvision" >"$site/cpu_torchvision.pth"  # a line that Python runs at its start

echo "  environment: $VENV ($("$VENV/bin/python" --version), $TORCH)"
