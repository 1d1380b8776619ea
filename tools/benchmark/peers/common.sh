# Sourced by the scripts of this folder: what all runs share (model, prompts, lengths, batch), and the environment of a peer.
#
#   bash tools/benchmark/peers/NAME.sh equal|long_tail RUN_DIR [more flags of its trainer]
#
#   GPUS    1 by default; SHAPE: 0.6b (Qwen3-0.6B's, the default), or tiny (two updates of a small model, to try a script)
#   ENVS    folder of the peers' virtual environments, runs/peers_envs by default: one is made at the first run.
#           PYTHON replaces it, on a machine without network
#
# Runs that start side by side find the inputs there after: PYTHON=python3 bash tools/benchmark/peers/common.sh equal RUN_DIR
#
# Afterwards: python tools/benchmark/peers/table.py RUN_DIR
set -euo pipefail
export LENGTHS=${1:?equal or long_tail}
mkdir -p "${2:?folder for the results}"; run=$(cd "$2" && pwd); shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../../.."
GPUS=${GPUS:-1} inputs=$run/inputs peer=$(basename "$0" .sh)
out=$run/$LENGTHS/$peer
case $LENGTHS in
    equal) completion=512 micro_batch=16 engine_share=0.45 ;;  # the cache holds 512 completions on a GPU of 79 GiB
    long_tail) completion=8192 micro_batch=4 engine_share=0.6 ;;
    *) echo "$peer.sh: the first argument is equal or long_tail, not $LENGTHS" >&2; exit 1 ;;
esac
prompt=320 generations=8 micro_tokens=16384
case ${SHAPE:-0.6b} in
    0.6b) batch=512 updates=10 sizes=(--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16
        --num-query-groups 8 --kv-channels 128 --vocab-size 151936 --max-position-embeddings 40960) ;;
    tiny) batch=16 updates=4 micro_batch=4 completion=$((completion / 32))
        sizes=(--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --max-position-embeddings 1024) ;;
    *) echo "$peer.sh: SHAPE is 0.6b or tiny, not $SHAPE" >&2; exit 1 ;;
esac

if [[ ! -e $inputs/model/config.json ]]; then
    python3 tools/make_tiny_model.py --save "$inputs/model" --steps 0 --tokenizer bytes --tie-embeddings "${sizes[@]}"
    python3 tools/benchmark/peers/prompts.py --save "$inputs"
fi
if [[ $peer == ours ]]; then
    PYTHON=python3
elif [[ -z ${PYTHON:-} ]]; then
    ENVS=${ENVS:-runs/peers_envs}
    PYTHON=$ENVS/$peer/bin/python
    if [[ ! -e $ENVS/$peer/complete ]]; then
        requirements=$here/requirements-$peer.txt
        python3.12 -m venv "$ENVS/$peer"
        # Some packages exist as source only; those with kernels are compiled against the torch that is installed first.
        "$PYTHON" -m pip install setuptools wheel packaging pybind11 ninja "$(grep ^torch== "$requirements")"
        "$PYTHON" -m pip install --no-build-isolation -r "$requirements"
        touch "$ENVS/$peer/complete"
    fi
fi
rm -rf "$out"; mkdir -p "$out"
export PYTHONPATH=$here/vllm_plugin${PYTHONPATH:+:$PYTHONPATH}
if [[ $peer != trl ]]; then export CUDA_DEVICE_MAX_CONNECTIONS=1; fi  # as Megatron-Core's launch scripts
torchrun=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS")
