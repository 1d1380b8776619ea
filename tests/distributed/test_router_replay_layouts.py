"""Routing replay in every layout; router_replay_worker.py has the runs."""

import functools
import json

import numpy as np
import pytest
from ranks import run_torchrun
from router_replay_worker import FAMILIES, FULL, MOE

SHARED = "--max-tokens-per-microbatch"
LAYOUTS = {
    1: {"TP1": "", "recomputed MoE": MOE, "recomputed": FULL, "shared prompts": f"{SHARED} 70"},
    2: {
        "DP2": "--use-distributed-optimizer",
        "TP2 SP": f"--tensor-model-parallel-size 2 --sequence-parallel {MOE}",
        "PP2": f"--pipeline-model-parallel-size 2 {MOE}",
        "PP2 VPP2": f"--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 {FULL}",
        "CP2": f"--context-parallel-size 2 {FULL}",
        "EP2": f"--expert-model-parallel-size 2 {MOE}",
        "CP2 EP2": f"--context-parallel-size 2 --expert-model-parallel-size 2 {MOE}",
        "CP2, hybrid": f"{SHARED} 17 --no-share-prompts --context-parallel-size 2 --hybrid-context-parallel {MOE}",
        "DP2, shared prompts": (
            f"{SHARED} 50 --moe-token-dispatcher-type allgather --logprobs-max-tokens-per-microbatch 100"
        ),
        "TP2 SP, shared prompts": f"{SHARED} 70 --tensor-model-parallel-size 2 --sequence-parallel",
        "PP2 VPP2, shared prompts": (
            f"{SHARED} 50 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 {MOE}"
        ),
        "CP2 EP2, shared prompts": f"{SHARED} 70 --context-parallel-size 2 --expert-model-parallel-size 2",
        "CP2, hybrid, shared prompts": f"{SHARED} 30 --context-parallel-size 2 --hybrid-context-parallel",
    },
}


CASES = [(name, mode) for flags in LAYOUTS.values() for name in flags if name != "TP1" for mode in ("R2", "R3")]
FEW = [("PP2 VPP2", "R2"), ("CP2 EP2", "R3"), ("CP2 EP2, shared prompts", "R2")]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Gives the directory with the results of a case and of TP1; the few cases, or all others, are run at once.

    The few cases have half the completions.
    """

    @functools.cache
    def run(few: bool):
        out = tmp_path_factory.mktemp("layouts")
        for world_size, flags in LAYOUTS.items():
            names = [(name, m) for name in flags for m in ("R2", "R3") if name == "TP1" or ((name, m) in FEW) == few]
            more = "--global-batch-size 8" if few else ""
            cases = [f"{name} {m}:--router-replay-mode {m} {flags[name]} {more}" for name, m in names]
            run_torchrun(world_size, "tests/distributed/router_replay_worker.py", out, *cases)
        return out

    return lambda case: run(case in FEW)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "mode"), CASES)
def test_layouts(layouts, layout, mode):
    compare(layouts((layout, mode)), f"{layout} {mode}", f"TP1 {mode}")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["R2", "R3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family, mode, tmp_path):
    """Layers of one branch; a mixture beside an MLP, whose router has scales of its own."""
    names = ["TP2 SP", "EP2", "CP2 EP2, shared prompts"]
    for world_size, cases in ((1, ["TP1"]), (2, names)):
        flags = [f"{FAMILIES[family]} --router-replay-mode {mode} {LAYOUTS[world_size][name]}" for name in cases]
        words = [f"{name}:{' '.join(words.split())}" for name, words in zip(cases, flags, strict=True)]
        run_torchrun(world_size, "tests/distributed/router_replay_worker.py", tmp_path, *words)
    for name in names:
        compare(tmp_path, name, "TP1")


def compare(directory, name, reference):
    experts, expected = (np.load(directory / f"{one}.npy") for one in (name, reference))
    np.testing.assert_array_equal(experts, expected)
    rows, want_rows = (json.loads((directory / f"{one}.json").read_text()) for one in (name, reference))
    for row, want in zip(rows, want_rows, strict=True):
        for key in ("loss", "grad_norm", "kl", "entropy", "ratio/max"):
            assert row[key] == pytest.approx(want[key], rel=1e-5), key
