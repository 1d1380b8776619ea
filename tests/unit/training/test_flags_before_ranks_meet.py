"""With a checkpoint to load, flags that no model can have are refused before the ranks meet, which takes minutes."""

import re

import pytest
from good_args import MODEL, MOE, RUN
from ranks import REPO

from megatron_grpo.training import setup
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError

# Wrong flags of each folder with rules, and a word of the message.
WRONG = {
    "algorithm": ("--kl-estimator k1", "--kl-estimator k1"),
    "checkpointing": ("--async-save", "--async-save needs --save"),
    "data": ("--chat-template absent.jinja", "--chat-template absent.jinja"),
    "environments": ("--max-turns 3", "--max-turns needs --environment"),
    "models": ("--cuda-graphs --overlap-grad-reduce", "--cuda-graphs with --overlap-grad-reduce"),
    "models/fp8": ("--fp8-format hybrid", "--fp8-format hybrid needs --transformer-impl"),
    "observability": ('--watchdog-phase-timeouts {"saves":1}', "no phase 'saves'"),
    "parallel": ("--sequence-parallel", "--sequence-parallel needs"),
    "parallel/stages": ("--num-virtual-stages-per-pipeline-rank 2", "needs --pipeline-model-parallel-size 2"),
    "reference": ("--beta 0 --ref-load ref", "--ref-load needs --beta"),
    "rewards": ("--reward-weights 1 2", "--reward-weights"),
    "rollout": ("--top-k 0", "--top-k (0) must be at least 1"),
    "rollout/lengths": ("--max-tokens-per-microbatch 1000", "(1000) must be at least 1024"),
    "rollout/servers": ("--vllm-mode server", "--vllm-server-base-url is missing"),
    "training": ("--on-bad-update restore", "needs --save and --save-interval"),
    "utils": ("--optimizer-offload-fraction 0.5", "has no effect without --optimizer-cpu-offload"),
    "packages": ("--rollout-engine vllm --reward-funcs absent_package", "absent_package"),
}
# Flags that only some models allow, with checkpoints that may hold one of these.
OF_MODELS = (
    "--vllm-tensor-parallel-size 8",
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "--expert-model-parallel-size 8 --ref-expert-model-parallel-size 4",
    "--router-replay-mode R3 --moe-aux-loss-coeff 1e-3 --moe-layer-recompute",
    "--lora-alpha 16 --lora-weight-sync merged",
    "--mtp-loss-scaling-factor 0.1 --max-image-pixels 100000",
    "--max-completion-length 100000",
    MOE,
)


class Joined(Exception):
    """The ranks would meet now."""


@pytest.fixture
def join(monkeypatch):
    """A function that starts a run with these flags up to the rendezvous: Joined, or the GrpoError before it."""

    def joined(args):
        raise Joined

    monkeypatch.setattr(setup, "join", joined)
    monkeypatch.setenv("WORLD_SIZE", "8")

    def start(flags):
        words = f"{RUN} --rollout-engine megatron --transformer-impl local {flags}".split()
        setup.setup(parse_args(words), None, None)

    return start


@pytest.mark.parametrize("origin", ["--load run", "--load run --finetune", "--pretrained-checkpoint base"])
def test_wrong_flags_are_refused_before_the_ranks_meet(join, monkeypatch, origin):
    monkeypatch.setitem(setup.check_packages.__globals__, "check_package", _refuse)
    for folder, (flags, word) in WRONG.items():
        with pytest.raises(GrpoError) as error:
            join(f"{origin} {flags}")
        assert word in str(error.value), folder


@pytest.mark.parametrize("origin", ["--load run", MODEL])
def test_a_run_without_rewards_is_refused_before_its_packages_are_looked_for(origin):
    """With --external-plugins no check comes earlier: a plugin can add flags."""
    words = f"{RUN} {origin}".replace("--reward-funcs exact_match", "").split()
    with pytest.raises(GrpoError, match=r"^--reward-funcs is missing"):
        setup.setup(parse_args(words), None, None)


def _refuse(name):
    if name == "absent_package":
        raise GrpoError(f"--reward-funcs {name} needs a package")


def test_what_depends_on_the_checkpoint_is_not_refused_before_it_is_read(join):
    recipes = re.findall(r'^    \[(\w+)\]="(.*?)"', (REPO / "examples/grpo/recipe.sh").read_text(), re.M | re.S)
    assert len(recipes) > 15
    accepted = [f"{flags} --steps-per-generation 4 --rollout-engine vllm" for _, flags in recipes]
    for flags in [*accepted, *(f"{flags} --rollout-engine vllm" for flags in OF_MODELS)]:
        with pytest.raises(Joined):
            join(f"--load run {flags}")
