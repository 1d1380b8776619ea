"""Runs of vision-language models on a stock vLLM server, which gets token ids and images."""

import json

import pytest
from ranks import run_torchrun
from run_files import metrics_of
from test_vision_environments import AGENT, data, run  # noqa: F401
from test_vision_environments import make as make_model
from test_vision_runs import PLUGIN as EVEN
from vision_models import picture

from tools.cpu_server import cpu_server

pytestmark = [pytest.mark.vllm, pytest.mark.distributed, pytest.mark.slow]

SERVER = "--logprobs-mode raw_logprobs --skip-mm-profiling"
FLAGS = "--vllm-mode server --vllm-server-timeout 300 --no-save-hf --max-prompt-length 100 --max-environment-tokens 270"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava_onevision"])
def served(request, data):
    """(model family, address of its server)."""
    shape = request.param
    if not (data / shape).exists():
        make_model(data / shape, shape=shape)
    flags = SERVER + " --enable-scale-out --max-model-len 512"
    with cpu_server(data / shape, data / f"{shape}.log", flags) as (url, _):
        yield shape, url


def test_episodes_with_screenshots(data, served, tmp_path):
    """Two ranks send turns with images; the tower trains, and the server gets its weights."""
    shape, url = served
    flags = [*FLAGS.split(), "--vllm-server-base-url", url, "--micro-batch-size", "4"]
    rows = run(data, 2, tmp_path / "run", *flags, shape=shape)
    assert len(rows) == 2 and all(row["mismatch/mean_abs"] < 1e-5 for row in rows)
    assert all(row["environment/turns"] > 1.5 and row["environment/failed"] == 0 for row in rows)


# Flags of the run, its ranks.
AGENT_LAYOUTS = {
    "DP2": ("--micro-batch-size 2 --use-distributed-optimizer", 2),
    "PP2": ("--pipeline-model-parallel-size 2", 2),
    "PP2 DP2": ("--pipeline-model-parallel-size 2 --micro-batch-size 2", 4),
    "engines of their own, DP2": ("--micro-batch-size 2 --rollout-ranks 1", 3),
    "engines of their own, PP2": ("--pipeline-model-parallel-size 2 --rollout-ranks 1", 3),
}


@pytest.mark.parametrize("layout", AGENT_LAYOUTS)
def test_agents_with_pictures(data, served, tmp_path, layout):
    """Branches with shared pictures; the server has the weights of the tower that trains.

    One server has all these runs: each loads the first weights again, and shows the pictures of the run before.
    """
    (shape, url), (more, ranks) = served, AGENT_LAYOUTS[layout]
    flags = f"{FLAGS} {more} --vllm-server-base-url {url} --max-prompt-length 200 --environment-timeout 300".split()
    rows = run(data, ranks, tmp_path / "run", *flags, shape=shape, agent=AGENT)
    assert len(rows) == 2 and all(row["mismatch/mean_abs"] < 1e-5 for row in rows)
    assert all(row["environment/turns"] > 4 and row["environment/failed"] == 0 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)


def test_images_of_rows_with_engines_of_their_own(data, served, tmp_path):
    """Streams of tokens; two rows whose images have the same tokens."""
    shape, url = served
    for number in (1, 2):
        (data / f"same{number}.png").write_bytes(picture(60, 80, number))
    lines = [{"prompt": [{"role": "user", "content": "?"}], "images": [f"same{1 + n % 2}.png"]} for n in range(8)]
    (data / "rows.jsonl").write_text("".join(json.dumps(line | {"seed": 0}) + "\n" for line in lines))
    flags = [*FLAGS.split(), "--vllm-server-base-url", url, "--micro-batch-size", "4", "--rollout-ranks", "1"]
    flags += ["--train-data-path", str(data / "rows.jsonl"), "--lr", "1e-12", "--max-staleness", "1"]
    flags += ["--rollout-importance-sampling-mode", "token_truncate"]
    rows = run(data, 2, tmp_path / "run", *flags, shape=shape)
    assert len(rows) == 2 and all(row["mismatch/max_abs"] < 1e-4 for row in rows)


def test_a_server_without_the_endpoint(data, tmp_path):
    with (
        cpu_server(data / "qwen2_5_vl", tmp_path / "log", SERVER) as (url, _),
        pytest.raises(pytest.fail.Exception, match=r"start it .* with --enable-scale-out"),
    ):
        run(data, 1, tmp_path / "run", *FLAGS.split(), "--vllm-server-base-url", url)


VIDEOS = """--max-prompt-length 200 --max-completion-length 16 --num-generations 4 --global-batch-size 16
    --train-iters 2 --lr 1e-3 --micro-batch-size 4 --transformer-impl local --reward-funcs even --no-shuffle
    --vllm-mode server --vllm-server-timeout 300 --no-save-hf"""


@pytest.mark.parametrize("shape", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_videos(data, tmp_path, shape):
    """The server gets all frames, at the rate of its flags; a video with another rate ends the run."""
    if not (data / shape).exists():
        make_model(data / shape, shape=shape)
    for frame in range(5):
        (tmp_path / f"{frame}.png").write_bytes(picture(84, 56, frame))
    frames = [{"frames": [f"{n % 5}.png" for n in range(count)], "fps": 4} for count in (3, 4)]
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "videos": frames[: 1 + n % 2]} for n in range(8)]
    (tmp_path / "videos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows[0]["videos"] = [{**frames[0], "fps": 2}]
    (tmp_path / "slow.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = SERVER + ' --enable-scale-out --media-io-kwargs {"video":{"num_frames":-1,"fps":4}}'
    (tmp_path / "plugin.py").write_text(EVEN)
    with cpu_server(data / shape, tmp_path / "log", flags) as (url, _):
        words = f"--load-hf {data}/{shape} --external-plugins {tmp_path}/plugin.py --vllm-server-base-url {url}".split()
        words += VIDEOS.split()
        run_torchrun(1, "pretrain_grpo.py", *words, "--train-data-path", tmp_path / "videos.jsonl", "--save", tmp_path)
        rows = metrics_of(tmp_path)
        assert len(rows) == 2 and all(row["mismatch/mean_abs"] < 1e-5 and row["grad_norm"] > 0 for row in rows)
        with pytest.raises(pytest.fail.Exception, match=r"start it with --media-io-kwargs .* all videos need one fps"):
            run_torchrun(1, "pretrain_grpo.py", *words, "--train-data-path", tmp_path / "slow.jsonl", "--save",
                         tmp_path / "slow")  # fmt: skip
