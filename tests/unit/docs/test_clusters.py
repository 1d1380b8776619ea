"""Launch files of clusters: scripts pass shellcheck, manifests their schemas, and SLURM scripts run on stand-ins."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import good_args
import pytest
import yaml
from bad_input_runs import launch
from test_examples import SCRIPTS as MODELS

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration
from megatron_grpo.parallel.initialize import free_port

REPO = Path(__file__).resolve().parents[3]
SCRIPTS = sorted([*REPO.glob("examples/**/*.sh"), *REPO.glob("examples/**/*.sbatch"), *REPO.glob("t*s/*.sh")])
# Of requirements-test.txt, as is shellcheck.
kubernetes_validate = pytest.importorskip("kubernetes_validate")
MANIFESTS = sorted(REPO.glob("examples/kubernetes/*.yaml"))
# What SLURM sets in a job of two nodes, in both scripts' names.
JOB = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_ON_NODE": "1"}
JOB |= {f"SLURM_JOB_{name}_HET_GROUP_0": JOB[f"SLURM_JOB_{name}"] for name in ("NUM_NODES", "NODELIST")}
JOB |= {"SLURM_JOB_NUM_NODES_HET_GROUP_1": "2", "SLURM_JOB_NODELIST_HET_GROUP_1": "server[1-2]"}
# srun starts the command once for each node, hands SIGUSR1 to each, and returns the largest exit code.
SRUN = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
start = next(i for i, word in enumerate(words) if word in ("bash", "python"))
nodes = int(words[words.index("--nodes") + 1])
tasks = [
    subprocess.Popen(words[start:], env=os.environ | {{"SLURM_NODEID": str(n)}}, start_new_session=True)
    for n in range(nodes)
]
def forward(number, frame):
    for task in tasks:
        os.killpg(task.pid, number)
signal.signal(signal.SIGUSR1, forward)
signal.signal(signal.SIGTERM, forward)
open(os.environ["STAND_IN"] + "/srun.pid", "w").write(str(os.getpid()))
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """#!/bin/sh
case $1 in
    show) printf '%s\n' ${HOST:-node1} "$(echo "$3" | sed 's/\\[.*/2/')" ;;
    requeue) echo "$2" >> "$STAND_IN/requeued" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """An environment with stand-ins for srun and scontrol."""
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    paths = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {
        "PATH": paths,
        "VENV": "",
        "SLURM_SUBMIT_DIR": str(REPO),
        "STAND_IN": str(tmp_path),
        "SAVE": f"{tmp_path}/run",
    }
    return os.environ | JOB | own


@pytest.mark.slow
def test_scripts_pass_shellcheck():
    assert len(SCRIPTS) > 10
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run([tool, "-x", *SCRIPTS], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_have_the_schemas_of_kubernetes(file):
    for manifest in yaml.safe_load_all(file.read_text()):
        if manifest["kind"] != "JobSet":
            kubernetes_validate.validate(manifest, "1.33", strict=True)
            continue
        # JobSet's own schema is not among those of Kubernetes.
        assert set(manifest["spec"]) == {"network", "failurePolicy", "replicatedJobs"}
        for job in manifest["spec"]["replicatedJobs"]:
            assert set(job) == {"name", "replicas", "template"}
            template = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}} | job["template"]
            kubernetes_validate.validate(template, "1.33", strict=True)


def test_a_schema_refuses_what_kubernetes_would():
    (volume,) = yaml.safe_load_all((REPO / "examples/kubernetes/volume.yaml").read_text())
    volume["spec"]["acessModes"] = volume["spec"].pop("accessModes")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(volume, "1.33", strict=True)


def test_grace_periods_follow_each_other():
    """The run ends before torchrun kills it, and torchrun before Kubernetes does."""
    (jobset,) = yaml.safe_load_all((REPO / "examples/kubernetes/train.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    run = int(container["command"][container["command"].index("--exit-grace-seconds") + 1])
    assert run < int(variables["PET_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert variables["MASTER_ADDR"] == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert int(variables["NNODES"]) == job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"]


@pytest.mark.parametrize("name", ["train", "train_with_servers"])
def test_each_node_starts_torchrun_with_the_jobs_variables(name, slurm, tmp_path):
    """torchrun is a stand-in, too, and so is the python that the servers start with."""
    for stand_in in ("torchrun", "python"):
        text = f'#!/bin/sh\necho "{stand_in} node $SLURM_NODEID: $*"\n'
        text += "env | grep -E '^(PET_|MASTER_|VLLM_SERVER)' | sort\n" if stand_in == "torchrun" else ""
        (tmp_path / stand_in).write_text(text.replace("\\\n", "\n"))
        (tmp_path / stand_in).chmod(0o755)
    command = ["bash", f"examples/slurm/{name}.sbatch", "examples/grpo/recipe.sh", "dapo", "--seed", "5"]
    done = subprocess.run(command, cwd=REPO, env=slurm | {"HF_MODEL": "/m"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    nodes = [line for line in done.stdout.splitlines() if line.startswith("torchrun node")]
    assert sorted(line.split(":")[0] for line in nodes) == ["torchrun node 0", "torchrun node 1"]
    flags = nodes[0].partition("pretrain_grpo.py")[2]
    assert nodes[0].partition(": ")[2].startswith("--nproc-per-node 1 --nnodes 2 ")
    assert "--seed 5" in flags and flags.endswith("--exit-signal-handler --exit-grace-seconds 240")
    assert ("--vllm-server-base-url http://node1:8000 http://server2:8000" in flags) == (name == "train_with_servers")
    for line in (
        "PET_RDZV_ID=4242",
        "PET_RDZV_BACKEND=c10d",
        "PET_RDZV_ENDPOINT=node1:24242",
        "PET_MAX_RESTARTS=3",
        "PET_SHUTDOWN_TIMEOUT=270",
        "PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    ):
        assert done.stdout.count(f"{line}\n") == 2
    assert not (tmp_path / "requeued").exists()


def command_of(text: str, batch_script: str) -> tuple[dict[str, str], list[str]]:
    """(variables, words after the batch script) of the first command of a page, or of a script's head, with sbatch."""
    lines = re.sub(r"\\\n[# ]*", "", text).splitlines()
    words = shlex.split(next(line for line in lines if re.search(rf"sbatch .*{batch_script}", line)).lstrip("# "))
    given = dict(word.split("=", 1) for word in words[: words.index("sbatch")])
    return given, [word for word in words[words.index(batch_script) + 1 :] if word != "[flags]"]


@pytest.mark.parametrize(
    ("file", "name"),
    [("docs/clusters.md", "train"), ("examples/slurm/train.sbatch", "train")]
    + [("examples/slurm/train_with_servers.sbatch", "train_with_servers")],
)
def test_the_command_that_a_user_reads_starts_a_run(file, name, slurm, tmp_path, capsys):
    """It is typed as it stands, with stand-ins for torchrun and servers; the flags of a rank then pass a dry run."""
    script = f"examples/slurm/{name}.sbatch"
    given, words = command_of((REPO / file).read_text(), script)
    (tmp_path / "torchrun").write_text('#!/bin/bash\n[ $SLURM_NODEID = 1 ] || printf "%s\\0" "$@" >"$STAND_IN/words"\n')
    (tmp_path / "python").write_text("#!/bin/sh\n")
    for program in ("torchrun", "python"):
        (tmp_path / program).chmod(0o755)
    job = subprocess.run(["bash", script, *words], cwd=REPO, env=slurm | given, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    flags = (tmp_path / "words").read_text().split("\0")[:-1]
    flags = flags[flags.index("pretrain_grpo.py") + 1 :]
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3_8b"].config))  # all that a dry run reads of a model
    assert flags.count(given["HF_MODEL"]) == 1 and flags.count(given["SAVE"]) >= 2
    flags = [str(tmp_path) if word == given["HF_MODEL"] else word for word in flags]
    assert launch("pretrain_grpo.py", [*flags, "--dry-run"], 16) == 0
    printed = capsys.readouterr().out
    assert "a model of 8,190,735,360 parameters" in printed
    if name == "train":  # the other one's script takes flags
        assert given["TRAIN_DATA"] in flags and given["VALID_DATA"] in flags


def test_the_environment_of_a_job(slurm, tmp_path):
    """VENV goes first in PATH, by whatever path; without torchrun the job ends at once; flags of srun are handed on."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    stand_in(tmp_path / "venv/bin/torchrun", "echo of the venv")
    stand_in(tmp_path / "venv/bin/python", "")
    bare = slurm | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    job = ["bash", "examples/slurm/train.sbatch", "examples/grpo/recipe.sh", "dapo"]

    def start(**variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(job, cwd=REPO, env=bare | variables, capture_output=True, text=True)

    for path in (str(tmp_path / "venv"), os.path.relpath(tmp_path / "venv", REPO)):
        assert start(VENV=path).stdout == "of the venv\n" * 2
    missing = start()
    assert missing.returncode == 1 and "no torchrun in PATH" in missing.stderr and "VENV=DIR" in missing.stderr
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    assert (
        " --container-image=x --container-mounts=/a:/a bash "
        in start(SRUN_ARGS="--container-image=x --container-mounts=/a:/a").stdout
    )


def stand_in(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--learning-rate 1", "pretrain_grpo.py: error: ms-swift's and TRL's --learning-rate is --lr here"),
        ("--reward-funcs acuracy", 'pretrain_grpo.py: error: --reward-funcs: unknown reward function "acuracy"'),
        ("", None),
    ],
)
def test_a_wrong_flag_ends_a_job_before_torchrun_tries_it_again(slurm, tmp_path, flags, message):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    stand_in(tmp_path / "torchrun", "echo started")
    words = (
        f"{good_args.MODEL} {good_args.RUN} --train-data-path {tmp_path}/train.jsonl --save {tmp_path} {flags}".split()
    )
    command = ["bash", "examples/slurm/train.sbatch", "examples/grpo/recipe.sh", "dapo", *words]
    done = subprocess.run(command, cwd=REPO, env=slurm, capture_output=True, text=True)
    assert done.stdout.count("started") == (0 if message else 2), done.stderr
    if message:
        assert done.returncode in (1, 2) and done.stderr.count(message) == 2  # of each node


def test_a_preempted_job_goes_back_to_the_queue_with_the_code_of_its_run(slurm, tmp_path):
    stand_in(tmp_path / "torchrun", 'mkdir -p "$SAVE"; touch "$SAVE/preempted"; exit 1')
    stand_in(tmp_path / "python", "")  # of the check of flags
    command = ["bash", "examples/slurm/train.sbatch", "examples/grpo/recipe.sh", "dapo"]
    done = subprocess.run(command, cwd=REPO, env=slurm, capture_output=True, text=True)
    assert done.returncode == 1 and "goes back to the queue" in done.stdout
    assert (tmp_path / "requeued").read_text() == "4242\n"


def test_a_job_that_fails_before_its_run_starts_does_not_go_back_to_the_queue(slurm, tmp_path):
    """A file of an earlier job stays until a run starts, or ends regularly."""
    marker = Path(slurm["SAVE"], "preempted")
    marker.parent.mkdir(exist_ok=True)
    marker.touch()
    stand_in(tmp_path / "torchrun", "exit 1")
    stand_in(tmp_path / "python", "")  # of the check of flags
    command = ["bash", "examples/slurm/train.sbatch", "examples/grpo/recipe.sh", "dapo"]
    done = subprocess.run(command, cwd=REPO, env=slurm, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "requeued").exists()


PLUGIN = """
from megatron_grpo.rewards.registry import Sample, register_reward

@register_reward("digits")
def digits(sample: Sample) -> float:
    return float(sum(c.isdigit() for c in sample.completion))
"""
FLAGS = """--transformer-impl local --rollout-engine megatron --num-generations 4 --lr 2e-3 --max-prompt-length 16
    --max-completion-length 6 --ignore-eos --train-iters 12 --save-interval 4 --micro-batch-size 4 --beta 0
    --reward-funcs digits --no-save-hf"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_job_of_two_nodes_is_preempted_and_goes_on(slurm, tiny_models, tmp_path):
    """Real torchruns, one for each of two nodes on this machine, in rollouts that take more than a second."""
    (tmp_path / "digits.py").write_text(PLUGIN)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{a} and {b}?"}}\n' for a in "abc" for b in "xyz"))
    flags = f"{FLAGS} --load-hf {tiny_models['qwen3']} --train-data-path {tmp_path}/train.jsonl"
    flags += f" --external-plugins {tmp_path}/digits.py --save {slurm['SAVE']}"
    worker = "tests/distributed/disturbed_worker.py 1 slow"
    launch = tmp_path / "launch.sh"
    torchrun = f"{sys.executable} -m torch.distributed.run"
    launch.write_text(
        f'exec {torchrun} --nnodes "$NNODES" --nproc-per-node 1 {worker} {" ".join(flags.split())} "$@"\n'
    )
    port = free_port()
    own = {"HOST": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "GRACE": "60"}
    own |= {"SLURM_JOB_ID": str(port - 20000) if 20000 < port < 40000 else "123"}

    def start() -> subprocess.Popen:
        command = ["bash", "examples/slurm/train.sbatch", str(launch)]
        return subprocess.Popen(command, cwd=REPO, env=slurm | own, stdout=log, stderr=log, start_new_session=True)

    metrics, output = Path(slurm["SAVE"], "metrics.jsonl"), tmp_path / "log"
    with open(output, "w") as log:
        job = start()
        while job.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.05)
        assert job.poll() is None, output.read_text()
        os.kill(int((tmp_path / "srun.pid").read_text()), 10)  # SIGUSR1, as SLURM's --signal
        assert job.wait(timeout=120) == 1, output.read_text()
        saved = latest_iteration(slurm["SAVE"])
        assert (tmp_path / "requeued").exists() and 2 <= saved < 12, output.read_text()
        assert start().wait(timeout=300) == 0, output.read_text()
    assert f"resumed from {slurm['SAVE']} at iteration {saved}" in output.read_text()
    assert latest_iteration(slurm["SAVE"]) == 12
    iterations = [int(line.split(":")[1].split(",")[0]) for line in metrics.read_text().splitlines()]
    assert iterations == list(itertools.chain(range(1, 13)))
