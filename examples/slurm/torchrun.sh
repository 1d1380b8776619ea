# What the batch scripts share: source examples/slurm/torchrun.sh with NNODES and NODELIST. It sets the variables of torchrun,
# which reads PET_<FLAG> for each flag that its command line lacks.
# shellcheck shell=bash

GRACE=${GRACE:-240}
# sbatch hands on the PATH of the shell that called it. Nodes whose command runs in a container (SRUN_ARGS) have the image's.
[[ -z ${VENV:-} ]] || PATH=$(realpath -m -s "$VENV")/bin:$PATH
if [[ -z ${SRUN_ARGS:-} ]] && ! command -v torchrun >/dev/null; then
    echo "no torchrun in PATH: source DIR/bin/activate before sbatch, or give VENV=DIR (docs/clusters.md)" >&2
    exit 1
fi
read -r -a SRUN_ARGS <<<"${SRUN_ARGS:-}"

hosts=$(scontrol show hostnames "$NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}  # not by head: it would end scontrol, and pipefail the job
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node have different ports
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
export NNODES MASTER_ADDR MASTER_PORT GPUS_PER_NODE

# A requeued job has the same id, and so has each restart: the run knows its own checkpoints in SAVE by it.
export PET_RDZV_ID=$SLURM_JOB_ID
export PET_RDZV_BACKEND=c10d
export PET_RDZV_ENDPOINT=$MASTER_ADDR:$MASTER_PORT
export PET_MAX_RESTARTS=${MAX_RESTARTS:-3}
# SLURM's SIGUSR1 reaches torchrun, too; without this line it would end torchrun at once.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export PET_SHUTDOWN_TIMEOUT=$((GRACE + 30))

# train SRUN_FLAGS COMMAND...: run the command on each node, and end the job with its status; a preempted job goes back to
# the queue. torchrun returns 1 after a signal, whatever its ranks return: the run marks a preemption by a file.
train() {
    local status=0
    rm -f "$SAVE/preempted" # of an earlier job: a run that fails before it starts would leave it, and be requeued without end
    srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --kill-on-bad-exit=0 "${SRUN_ARGS[@]}" "$@" \
        --exit-signal-handler --exit-grace-seconds "$GRACE" || status=$?
    if [[ -e $SAVE/preempted ]]; then
        echo "preempted; job $SLURM_JOB_ID goes back to the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$status"
}
