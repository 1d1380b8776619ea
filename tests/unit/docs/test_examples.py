"""The launch scripts of large models: each passes a dry run, fits its GPUs, and describes the published model."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ranks
from bad_input_runs import launch

from megatron_grpo.training import run_rules
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.batch_sizes import trainer_ranks
from megatron_grpo.weights import families
from megatron_grpo.weights.arguments import resolve_architecture

REPO = Path(__file__).resolve().parents[3]
H100 = 79.6  # GiB of an "80 GB" card
SPARE = 5.0  # GiB for the CUDA context, NCCL's buffers and fragmentation
ASLEEP = 5.0  # GiB that an engine keeps while it sleeps: its graphs, buffers and communicators

# config.json of the published models, shortened to what a family reads.
DENSE = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
QWEN = DENSE | {"rms_norm_eps": 1e-6, "rope_theta": 1000000, "head_dim": 128, "vocab_size": 151936}
QWEN |= {"max_position_embeddings": 40960, "use_sliding_window": False}
LLAMA = DENSE | {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072, "mlp_bias": False, "architectures": ["LlamaForCausalLM"]}
LLAMA["rope_scaling"] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def shape(layers: int, hidden: int, ffn: int, heads: int, groups: int) -> dict:
    names = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads".split()
    return dict(zip(names, (layers, hidden, ffn, heads, groups), strict=True))


class Script(NamedTuple):
    """What is known of a model and what its script says that it does."""

    billions: float  # parameters, as published
    ranks: int
    layers: list[int]  # of each (virtual) stage, in the order of the report
    config: dict


def qwen3_5(name: str) -> dict:
    return json.loads((REPO / f"tests/data/instruct_models/{name}/config.json").read_text())


QWEN3_8B = QWEN | shape(36, 4096, 12288, 32, 8) | {"architectures": ["Qwen3ForCausalLM"]}
SCRIPTS = {
    "qwen2.5_1.5b": Script(
        1.54,
        1,
        [28],
        {key: QWEN[key] for key in "hidden_act rms_norm_eps rope_theta vocab_size use_sliding_window".split()}
        | shape(28, 1536, 8960, 12, 2)
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "sliding_window": 32768,
            "max_window_layers": 21,
        },
    ),
    "qwen3_8b": Script(8.19, 8, [36], QWEN3_8B),
    "qwen3_8b_async": Script(8.19, 4, [36], QWEN3_8B),  # ranks of the trainer
    "qwen3_30b_a3b": Script(
        30.53,
        32,
        [12] * 4,
        QWEN
        | shape(48, 2048, 6144, 32, 4)
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "qwen3.5_27b": Script(26.90, 8, [64], qwen3_5("Qwen3.5-27B")),
    "qwen3.5_35b_a3b": Script(34.66, 16, [40], qwen3_5("Qwen3.5-35B-A3B")),
    "llama3_70b": Script(70.55, 16, [40] * 2, LLAMA | shape(80, 8192, 28672, 64, 8)),
    "llama3_405b": Script(405.85, 256, [7] + [8] * 14 + [7], LLAMA | shape(126, 16384, 53248, 128, 8)),
    "deepseek_v3": Script(
        671.03,
        1024,
        [3] + [4] * 14 + [2],
        DENSE
        | shape(61, 7168, 18432, 128, 128)
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 1,
        },
    ),
}


@cache
def dry_run(name: str, *flags: str, **variables: str) -> tuple[str, float]:
    """The report of a script with variables before and flags at the end of the command, and the seconds it took.

    Without --thorough pretrain_grpo.py runs in this process: importing takes ten times what a dry run does.
    """
    start = time.monotonic()
    if not flags and not variables and ranks.thorough:
        return run_script(name, Path(sys.executable).parent), time.monotonic() - start
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        world_size, program, *words = command_of(name, *flags, **variables)
        assert launch(program, words, int(world_size)) == 0
    return printed.getvalue(), time.monotonic() - start


def command_of(name: str, *flags: str, **variables: str) -> list[str]:
    """The number of ranks, the program and the flags of a script's dry run."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "python")
        python.write_text('#!/bin/sh\nprintf "%s\\0" "$WORLD_SIZE" "$@"\n')
        python.chmod(0o755)
        return run_script(name, folder, *flags, **variables).split("\0")[:-1]


def run_script(name: str, folder: str | Path, *flags: str, **variables: str) -> str:
    """What a script prints with DRY_RUN=1, and with the ``python`` of that folder."""
    environment = os.environ | {"DRY_RUN": "1", "PATH": f"{folder}:{os.environ['PATH']}"} | variables
    command = ["bash", f"examples/grpo/{name}.sh", *flags]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def section(report: str, title: str) -> list[list[str]]:
    """The rows of a table in the report, split into words, without its header."""
    rows = report.split(f"{title}", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [row.split() for row in rows if re.match(r" +\d", row)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_dry_run(name):
    script, (report, seconds) = SCRIPTS[name], dry_run(name)
    parameters = int(re.search(r"a model of ([\d,]+) parameters", report)[1].replace(",", ""))
    assert round(parameters / 1e9, 2) == script.billions
    assert [int(row[2]) for row in section(report, "pipeline stages")] == script.layers
    assert int(section(report, "\nranks")[-1][0]) == script.ranks - 1
    assert "nothing is moved" not in report  # by --offload-* of an engine that stays awake
    assert seconds < 120  # a few on a machine that does nothing else


@pytest.mark.parametrize(
    ("given", "listed", "processes"),
    [({}, 4, "4"), ({}, 0, "1"), ({"CUDA_VISIBLE_DEVICES": "2,3"}, 4, "2"), ({"GPUS_PER_NODE": "3"}, 4, "3")],
)
def test_a_process_for_each_gpu(tmp_path, given, listed, processes):
    """nvidia-smi and torchrun are stand-ins; without a GPU one process starts and says what is missing."""
    cards = "\n".join(f"GPU {i}: a card" for i in range(listed)) or "No devices found"
    for name, text in {
        "nvidia-smi": f"echo '{cards}'",
        "torchrun": 'printf "%s " "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HF_MODEL": "model",
        "SAVE": str(tmp_path / "run"),
    } | given
    command = ["bash", "examples/grpo/qwen3_8b.sh"]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"--nproc-per-node {processes} --nnodes 1 ")


def test_gsm8k_is_read_as_hugging_face_has_it(tmp_path):
    """Its folder has Parquet files; torchrun is a stand-in."""
    rows = [{"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(3)]
    (tmp_path / "gsm8k/main").mkdir(parents=True)
    for split in "train", "test":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"gsm8k/main/{split}-00000-of-00001.parquet")
    (tmp_path / "torchrun").write_text("#!/bin/sh\n")
    (tmp_path / "torchrun").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SAVE": str(tmp_path / "run")}
    environment |= {"HF_MODEL": "model", "GSM8K": str(tmp_path / "gsm8k")}
    subprocess.run(["bash", "examples/grpo/qwen3_0.6b.sh"], cwd=REPO, env=environment, capture_output=True, check=True)
    assert pq.read_table(tmp_path / "run/data/test.parquet").column("answer").to_pylist() == ["1", "2", "3"]


def test_a_folder_without_gsm8k_is_refused(tmp_path):
    environment = os.environ | {"HF_MODEL": "model", "GSM8K": str(tmp_path), "SAVE": str(tmp_path / "run")}
    done = subprocess.run(
        ["bash", "examples/grpo/qwen3_0.6b.sh"], cwd=REPO, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"{tmp_path} has neither main/train-00000-of-00001.parquet nor train.jsonl" in done.stderr


def test_a_dry_run_names_what_this_machine_lacks():
    lines = dry_run("qwen3_8b")[0].splitlines()
    files = "--train-data-path data/train.parquet, --valid-data-path data/test.parquet"
    assert f"not on this machine, and not read: {files}" in lines


@pytest.mark.parametrize("name", SCRIPTS)
def test_eval_only_takes_the_flags_of_a_script(name, monkeypatch):
    """--dry-run, which a run does not take with --eval-only, stands for the GPUs that this machine lacks."""
    rule = run_rules.excludes
    monkeypatch.setattr(run_rules, "excludes", lambda args, dest, *rest: dest == "eval_only" or rule(args, dest, *rest))
    world_size, _, *words = command_of(name)
    args = parse_args([*words, "--eval-only"])
    assert resolve_args(args, trainer_ranks(args, int(world_size))).eval_only


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_fits_beside_the_engine(name):
    report, _ = dry_run(name)
    engine = float(re.search(r"engine: ([\d.]+) of weights", report)[1])
    utilization = float(re.search(r"weights and cache use ([\d.]+) of (?:a|the) GPU", report)[1])
    sleeps, apart = "0 while asleep" in report, "of its own (--rollout-ranks" in report
    room = H100 - SPARE - ASLEEP if sleeps else H100 - SPARE if apart else H100 * (1 - utilization) - SPARE
    rows = [list(map(float, row)) for row in section(report, "memory of a rank")]
    assert len(rows) == len({row[0] for row in section(report, "pipeline stages")})
    for row in rows:
        assert row[7] == pytest.approx(sum(row[2:7]), abs=0.03)  # training: the sum of its parts
        assert row[7] < room
        if sleeps:  # what does not leave the GPU has room beside the engine
            assert row[8] < H100 * (1 - utilization) - SPARE
    assert engine + 8 < H100 * utilization  # at least 8 GiB of cache


def test_the_dry_run_of_the_tutorial():
    """docs/qwen3_8b.md shows the end of the report of its command, and a GPU's GiB with the flags of its table."""
    page = (REPO / "docs/qwen3_8b.md").read_text()
    flags = shlex.split(re.search(r"DRY_RUN=1 bash examples/grpo/qwen3_8b.sh (.*)", page)[1])
    shown = textwrap.dedent(re.search(r"^    memory of a rank.*?\n\n", page, re.S | re.M)[0]).rstrip()
    assert dry_run("qwen3_8b", *flags)[0].rstrip().endswith(shown)
    rows = re.findall(r"^\| 8 x .*\| (none|`--.*`).* \| ([\d.]+) \|$", page, re.M)
    assert len(rows) == 4
    for more, size in rows:
        more = [] if more == "none" else shlex.split(more.strip("`"))
        assert f"a GPU must have {size}:" in dry_run("qwen3_8b", *flags, *more)[0]


def test_the_dry_runs_of_the_tutorial_for_one_gpu():
    """docs/one_gpu.md has the GiB that its commands print."""
    page = (REPO / "docs/one_gpu.md").read_text()
    rows = re.findall(r"^\| `DRY_RUN=1 (.*?)bash examples/grpo/qwen2.5_1.5b.sh` \| ([\d.]+) \|", page, re.M)
    assert [variables for variables, _ in rows] == ["", "LORA=1 "]
    for variables, size in rows:
        given = dict(word.split("=") for word in variables.split())
        report = dry_run("qwen2.5_1.5b", **given)[0]
        assert f"a GPU must have {size}" in report and float(size) < H100 - SPARE - ASLEEP


def test_the_dry_runs_of_hybrid_models():
    """docs/models.md has the GiB that its commands print, and says what fits."""
    page = (REPO / "docs/models.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(DRY_RUN=1 .*?examples/grpo/(.*?)\.sh(.*?))` \| ([\d.]+) \| (yes|no)", page, re.M)
    assert len(rows) == 4
    for gpus, command, name, flags, size, fits in rows:
        given = dict(re.findall(r"(NNODES)=(\d)", command))
        report = dry_run(name, *shlex.split(flags), **given)[0]
        assert f"a GPU must have {size}" in report
        assert int(section(report, "\nranks")[-1][0]) == int(gpus) - 1
        assert (float(size) < H100 - SPARE - ASLEEP) == (fits == "yes")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_flags_describe_the_published_model(name):
    text = (REPO / f"examples/grpo/{name}.sh").read_text()
    for shared in re.findall(r"^source (examples/grpo/\w+_model\.sh)", text, re.M):
        text += (REPO / shared).read_text()
    words = shlex.split(re.search(r"^MODEL_ARGS=\(\n(.*?)^\)", text, re.S | re.M)[1])
    args, config = parse_args(words), SCRIPTS[name].config
    source = families.for_hf_config(config, args.model_family).args_from_hf(config)
    args = replaced(args, **resolve_architecture(args, source, "config.json"))  # a flag that differs is refused
    ours = parse_args(words)
    assert {dest: getattr(ours, dest) for dest, value in source.items() if value is not None} == {
        dest: value for dest, value in source.items() if value is not None
    }  # and none is missing


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_size_of_the_cluster_comes_from_the_environment(name, tmp_path):
    """On the cluster the script starts torchrun on each node, with the same flags and the model's directory."""
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    where = {
        "GPUS_PER_NODE": "8",
        "NNODES": "3",
        "NODE_RANK": "2",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1",
        "HF_MODEL": "/m",
    }
    environment = os.environ | where | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", f"examples/grpo/{name}.sh", "--seed", "5"]
    words = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    joined = " ".join(words)
    assert "--nproc-per-node 8 --nnodes 3 --node-rank 2 --master-addr head --master-port 1 pretrain_grpo.py" in joined
    assert "--load-hf /m " in joined and joined.endswith(" --seed 5 ") and "--dry-run" not in joined


@pytest.mark.slow
def test_the_table_of_model_sizes():
    """docs/model_sizes.md is what its tool writes, and the models have as many parameters as their cards say."""
    subprocess.run([sys.executable, "tools/generate_model_sizes_doc.py", "--check"], cwd=REPO, check=True)
    table = (REPO / "docs/model_sizes.md").read_text().split("## Memory")[0]
    cards = {
        "Qwen3-0.6B": 0.6,
        "Qwen3-1.7B": 1.7,
        "Qwen3-8B": 8.2,
        "Qwen3-14B": 14.8,
        "Qwen3-32B": 32.8,
        "Qwen3-30B-A3B": 30.5,
        "Qwen3.5-27B": 26.9,
        "Qwen3.5-35B-A3B": 34.7,
        "Llama-3.1-70B": 70.6,
        "Qwen3-235B-A22B": 235.1,
        "Llama-3.1-405B": 405.9,
        "DeepSeek-V3, 671B": 671.0,
    }
    rows = dict(re.findall(r"^\| ([^|]+) \| ([\d.]+) \|", table, re.M))
    assert {model: float(count) for model, count in rows.items()} == pytest.approx(cards, abs=0.051)
