"""What the documents show works: flags and files exist, the README's reward scores, the launch scripts parse."""

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from markdown.extensions.toc import slugify
from plugins import plugins  # noqa: F401

from megatron_grpo.algorithm.advantages import ADVANTAGES
from megatron_grpo.algorithm.arguments import STEPS
from megatron_grpo.algorithm.policy_term import policy_term
from megatron_grpo.algorithm.registry import call
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.registry import _BUILTIN, Sample, get_rewards, load_plugins
from megatron_grpo.training.arguments import build_parser, parse_args
from megatron_grpo.utils.arguments import resolved
from megatron_grpo.utils.core_flags import EXCLUDED
from megatron_grpo.weights.families import FAMILIES
from tools import generate_plugin_doc

REPO = Path(__file__).resolve().parents[3]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{path.name}" for path in sorted((REPO / "docs").glob("*.md"))),
    *(f"docs/performance/{path.name}" for path in sorted((REPO / "docs/performance").glob("*.md"))),
]
DOCUMENTS.remove("docs/arguments.md")  # generated: tests/unit/training/test_arguments.py has it
# Flags of torchrun, pip and our tools, which are not the trainer's.
OTHERS = "--nproc-per-node --hf-to-megatron --fresh --test --input --output --kills --tokenizer".split()
OTHERS += "--layouts --all --random --world-sizes --tolerance --out --lengths --nnodes --cuda".split()
OTHERS += "--hf-config --prompts --prompt-length --rounds --with-transformers".split()
OTHERS += "--completions --workers --security-opt --trl --verl --no-deps --target".split()
OTHERS += ["--gpu", "--thorough"]  # of tests/run_tests.sh
OTHERS += (
    "--list-gpus --repo-type --local-dir --logdir --served-model-name".split()
)  # nvidia-smi, hf, tensorboard, vllm
OTHERS += ["--hybrid-override-pattern"]  # of Megatron-LM
OTHERS += ["--foo-alpha"]  # of the plug-in in docs/algorithms.md
OTHERS += "--lora-modules --enable-lora --max-lora-rank --logprobs-mode --speculative-config".split()  # of vLLM
OTHERS += "--generate --test-output --test-share".split()  # of tools/data/countdown.py, and of all tools there
OTHERS += "--prompt-column --answer-column --instruction".split()  # of tools/data/own_rows.py
OTHERS += "--quick --shm-size --ipc".split()  # of tools/check_install.py, and of docker, which it names
OTHERS += (
    "--hf-to-hf --merge-lora --adapter --hf --data".split()
)  # of tools/checkpoint/convert.py and tools/check_export.py
OTHERS += "--completions --tokens --kernels --prompt --median --mean".split()  # of tools/benchmark/update.py
OTHERS += ["--capture-range"]  # of nsys
OTHERS += ["--extra-index-url"]  # of pip
OTHERS += ["--rollout-max-response-len"]  # slime's, in docs/migrate.md
OTHERS += "--launcher".split()  # of tools/benchmark/wrong_starts.py
OTHERS += "--log-dir --tee --local-ranks-filter".split()  # of torchrun
OTHERS += "--max-restarts --rdzv-id --rdzv-backend --rdzv-endpoint --node-rank --master-addr --master-port".split()
OTHERS += "--signals-to-handle --shutdown-timeout --standalone".split()
OTHERS += (
    "--account --nodes --partition --signal --container-image --container-mounts --container-workdir".split()
)  # of sbatch, srun and pyxis
OTHERS += "--build-arg --for --tail --timeout".split()  # of docker and kubectl
OTHERS += ["--serve", "--rollouts"]  # of tools/report.py
OTHERS += "--updates --server".split()  # of tools/soak.py
OTHERS += ["--staleness", "--seeds"]  # of tools/benchmark/staleness.py
OTHERS += ["--no-hub-kernels", "--liger"]  # of tools/benchmark/peers
OTHERS += ["--count"]  # of environments/libraries/of_verifiers.py
OTHERS += "--one-run --saves --ranks --megabytes".split()  # of tools/resume_check.py, benchmark/save.py and exchange.py
OTHERS += ["--mode", "--layers", "--steps"]  # of tools/ledger_check.py and check_engine.py
OTHERS += ["--concurrency", "--tails", "--config"]  # of tools/benchmark/drafts.py and planned_transfer.py
OTHERS += ["--examples", "--sizes"]  # of tools/data/gsm8k.py and tools/benchmark/trees.py
OTHERS += "--batch --group --check".split()  # of tools/ledger.py
OTHERS += "--megatron-to-hf --verify --no-load-optim --no-load-rng --dist-ckpt-strictness".split()
OTHERS += ["--dist-ckpt-optim-fully-reshardable"]  # of Megatron-LM
OTHERS += ["--numprocesses"]  # of pytest-xdist
# Of vLLM's and SGLang's servers.
OTHERS += "--model-path --skip-tokenizer-init".split()
OTHERS += "--attention-backend --enable-memory-saver --enable-weights-cpu-backup --tp".split()
OTHERS += (
    "--model --dtype --max-model-len --max-logprobs --logprobs-mode --weight-transfer-config --hf-overrides".split()
)
OTHERS += ["--compilation-config", "--no-enable-prefix-caching", "--enable-return-routed-experts"]
OTHERS += "--no-enable-chunked-prefill --enable-deterministic-inference --standalone --runner --port".split()
OTHERS += (
    "--mamba-ssm-cache-dtype --enable-scale-out --skip-mm-profiling --media-io-kwargs --mm-processor-kwargs".split()
)
REMOVED = {  # flags of earlier versions
    "CHANGELOG.md": "--shuffle-completions --batch-invariant-mode --fp32-residual-connection".split()
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_flags_exist(name):
    known = set(build_parser()._option_string_actions).union(OTHERS, REMOVED.get(name, ()))
    missing = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (REPO / name).read_text())) - known
    assert not missing


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_exist(name):
    text = (REPO / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = re.findall(r"(?:tools|examples|tests|megatron_grpo|docs)/[\w./-]*\.(?:py|sh|md|png)", text)
    for path in [(REPO / name).parent / link for link in links] + [REPO / path for path in paths]:
        assert path.exists(), path


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_anchors_exist(name):
    """mkdocs checks those of docs/; these files are not part of the site."""
    for page, anchor in re.findall(r"\]\(([^)#:]+)#([^)]+)\)", (REPO / name).read_text()):
        text = re.sub(r"```.*?```", "", (REPO / page).read_text(), flags=re.S)
        headings = [re.sub(r"\]\(.*?\)|[\[`]", "", heading) for heading in re.findall(r"^#+ (.*)", text, re.M)]
        assert anchor in [slugify(heading, "-") for heading in headings], f"{page}#{anchor}"


def test_the_example_of_a_family_is_the_family():
    block = re.search(r"```python\n(.*?)```", (REPO / "docs/models.md").read_text(), re.S)
    assert block.group(1) == (REPO / "megatron_grpo/weights/families/mistral.py").read_text()


def test_all_families_are_in_the_table():
    text = (REPO / "docs/models.md").read_text()
    for family in FAMILIES.values():
        assert f"`{family.name}`" in text and family.architecture in text


def test_the_readmes_reward_scores(tmp_path):
    block = re.search(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.S)
    plugin = tmp_path / "my_reward.py"
    plugin.write_text(block.group(1))
    load_plugins([plugin])
    (reward,) = get_rewards(["short"])
    assert reward(Sample("1+1=", "2 ", {"answer": "2"}, token_ids=[5, 6])) == pytest.approx(0.8)
    assert reward(Sample("1+1=", "3", {"answer": "2"}, token_ids=[5, 6])) == 0.0


@pytest.mark.parametrize("name", DOCUMENTS)
def test_dated_figures_are_in_one_place(name):
    """A figure with a date grows old: docs/performance/ has them all. The changelog is by version."""
    if not name.startswith("docs/performance/"):
        assert not re.findall(r"\b20\d\d-\d\d-\d\d\b", (REPO / name).read_text())


def test_the_documentation_stays_short():
    """At most 8,000 words of measurements, 60,000 of all pages that people write, 3,000 of the changelog."""
    pages = {path: path.read_text() for path in (REPO / "docs").rglob("*.md")}
    written = {path: len(text.split()) for path, text in pages.items() if "Generated by" not in text[:1000]}
    measured = sum(words for path, words in written.items() if path.parent.name == "performance")
    assert measured <= 8000 and sum(written.values()) <= 60000
    assert len((REPO / "CHANGELOG.md").read_text().split()) <= 3000


def test_the_tutorial_has_the_readmes_reward():
    blocks = [
        re.search(r"```python\n(.*?)```", (REPO / name).read_text(), re.S).group(1)
        for name in ("README.md", "docs/quickstart.md")
    ]
    assert blocks[0] == blocks[1]


def test_the_interface_of_plugins_is_fresh():
    page = (REPO / "docs/plugin_reference.md").read_text()
    assert generate_plugin_doc.document() == page, "run python tools/generate_plugin_doc.py"
    for field in fields(RolloutBatch):
        assert f"| `{field.name}` |" in page


def test_settings_without_a_flag_are_listed():
    """docs/arguments.md names every setting of megatron-core that is refused; docs/not_there_yet.md links there."""
    named = set(re.findall(r"`(\w+)`", (REPO / "docs/arguments.md").read_text()))
    assert set(EXCLUDED) <= named


def test_the_rewards_of_the_document(tmp_path):
    """Every reward that ships has a row, and the example, of fewer than ten lines, scores as the text says."""
    text = (REPO / "docs/rewards.md").read_text()
    for name in _BUILTIN:
        assert f"| `{name}` |" in text
    block = re.search(r"```python\n(.*?)```", text, re.S)
    plugin = tmp_path / "polite.py"
    plugin.write_text(block.group(1))
    assert len(block.group(1).splitlines()) < 10
    pool = RewardPool(["polite"], [plugin], flags={"max_completion_length": 10})
    row = {"greeting": "good day"}
    values, _ = pool.score(
        [
            Sample("", "Good day to you", row, token_ids=[1] * 5),
            Sample("", "Good day", row, "length", [1] * 10),
            Sample("", "Hey", row, token_ids=[1] * 5),
        ]
    )
    pool.close()
    assert values.ravel().tolist() == [0.5, 0.0, 0.0]


def test_the_group_reward_of_the_document(tmp_path):
    block = re.findall(r"```python\n(.*?)```", (REPO / "docs/rewards.md").read_text(), re.S)[1]
    (tmp_path / "diverse.py").write_text(block)
    pool = RewardPool(["diverse", "exact_match"], [tmp_path / "diverse.py"])
    values, failures = pool.score([Sample("", text, {"answer": "5"}) for text in "5553"], group_size=4)
    pool.close()
    np.testing.assert_allclose(values, [[1 / 3, 1], [1 / 3, 1], [1 / 3, 1], [1, 0]], rtol=1e-6)
    assert failures == []


def test_the_loss_of_the_document(tmp_path, plugins):
    """The plug-in of docs/algorithms.md: at most 15 lines of code, its flags parse, and numbers worked by hand."""
    block = re.search(r"```python\n(.*?)```", (REPO / "docs/algorithms.md").read_text(), re.S).group(1)
    assert len([line for line in block.splitlines() if line]) <= 15
    (tmp_path / "foo.py").write_text(block)
    words = f"--external-plugins {tmp_path}/foo.py --loss-type foo --foo-alpha 2 --advantage-estimator median"
    args = resolved(parse_args(words.split()), *STEPS)
    old, advantages = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 1.0, -2.0])
    log_probs = (old + torch.tensor([2.0, 1.0, 0.5]).log()).requires_grad_()  # ratios 2, 1 and 1/2
    batch = {"advantages": advantages, "completion": torch.tensor([0, 0, 1])}
    term = policy_term(args, log_probs, old, batch)
    assert term.loss.tolist() == pytest.approx([-2.0, -0.5, 0.25])  # -ratio^2 A / 2
    assert term.metrics["foo/power"].tolist() == pytest.approx([4.0, 1.0, 0.25])
    term.loss.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-4.0, -1.0, 0.5])  # -ratio^2 A
    rewards = np.array([1, 0, 0, np.nan, 5, 2, 3], np.float32)
    ids = np.array([0, 0, 0, 0, 1, 1, 1])
    values = call(ADVANTAGES.get("median").function, {"rewards": rewards, "group_ids": ids}, args)
    assert values.tolist() == [1, 0, 0, 0, 2, -1, 0]


@pytest.mark.parametrize("script", sorted(REPO.glob("examples/grpo/*.sh")), ids=lambda path: path.name)
def test_launch_scripts_parse(script):
    """bash accepts the script, and its flag arrays hold flags of the trainer; recipe.sh has an array of its own."""
    subprocess.run(["bash", "-n", script], check=True)
    known = set(build_parser()._option_string_actions)
    arrays = re.findall(r"^([A-Z]+)_ARGS=\(\n(.*?)^\)", script.read_text(), re.S | re.M)
    assert arrays or script.name == "recipe.sh"
    for _, body in arrays:
        assert set(re.findall(r"(?<!\S)--[a-z0-9-]+", body)) <= known
