"""The training model as the engine, in one layout after the other, on toy checkpoints; test_megatron_engine_layouts.py.

torchrun --nproc-per-node 2 tests/distributed/megatron_engine_worker.py CHECKPOINTS OUT_DIR LAYOUT...

Each lead rank writes its completions as OUT_DIR/LAYOUT.REPLICA.json.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import numpy as np
from toy_checkpoints import build, toy_args

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.parallel.initialize import destroy_rank_groups, initialize_distributed, set_random_seed
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.megatron.engine import MegatronEngine
from megatron_grpo.training.entry_point import run
from megatron_grpo.weights import hf

MAX_TOKENS, SLOTS = 10, 3
# Tokens of the prompts; one is longer than the toys' windows, and two are alike.
LENGTHS = (5, 1, 23, 9, 5, 2, 14)
EOS = 2
GREEDY = Sampling(MAX_TOKENS, temperature=0.0, log_probs=True, stop_token_ids=(EOS,))
# name -> (family, tied, arguments); two ranks each
LAYOUTS = {
    "TP2": ("llama", False, {"tensor_model_parallel_size": 2}),
    "TP2 SP": ("deepseek_v3", False, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "TP2 SP EP2": (
        "qwen3_moe",
        False,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
    "PP2": ("gpt_oss", False, {"pipeline_model_parallel_size": 2}),
    "PP2 VPP2": (
        "gemma3_text",
        True,
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "overlap_p2p_comm": True},
    ),
    "EP2": ("qwen3_moe", False, {"expert_model_parallel_size": 2}),
    "EP2 allgather": (
        "deepseek_v3",
        False,
        {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
    ),
    "CP2": ("gemma2", True, {"context_parallel_size": 2}),
    "DP2": ("qwen3", False, {}),
    "TP2 SP, delta nets": (
        "qwen3_next",
        False,
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    ),
    "PP2, shared keys": ("gemma4_text", True, {"pipeline_model_parallel_size": 2}),
    "TP2, shared keys": ("gemma4_text", True, {"tensor_model_parallel_size": 2}),
    "PP2, delta nets": ("qwen3_5_text", False, {"pipeline_model_parallel_size": 2}),
    "TP2 SP, Mamba-2": ("nemotron_h", False, {"tensor_model_parallel_size": 2}),
    "PP2, Mamba-2": ("nemotron_h", False, {"pipeline_model_parallel_size": 2}),
}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    made = [rng.integers(4, 100, length).tolist() for length in LENGTHS]
    made[4] = made[0]
    return made


def decode(ids: list[int]) -> str:
    """A text in which every token is a character."""
    return "".join(chr(0x100 + token) for token in ids)


def make_engine(directory: Path, **more):
    """(model, engine) of a toy checkpoint in this process's layout, which is made first."""
    args = toy_args(
        directory,
        **{
            "expert_tensor_parallel_size": 1,
            "moe_token_dispatcher_type": "alltoall",
            "max_prompt_length": max(LENGTHS),
            "max_completion_length": MAX_TOKENS,
            "inference_max_requests": SLOTS,
            **more,
        },
    )
    initialize_distributed(args)
    set_random_seed(1)
    model = build(args)
    hf.load_hf(model, args, str(directory))
    return model, MegatronEngine(args, model, SimpleNamespace(decode=decode))


def complete(engine, requests: list[Request], seed: int = 0) -> dict[int, tuple[list[int], list[float], str]]:
    """{id: (ids, log-probabilities, finish reason)} of one rollout."""
    engine.wake_weights()
    engine.wake_cache()
    with engine.rollout(seed):
        done = {c.id: (c.token_ids, c.log_probs, c.finish_reason) for c in generate(engine, requests)}
        assert not engine.poll()
    engine.sleep()
    return done


def main(root: Path, out: Path, names: list[str]) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[module]  # warm_rank.py has imported it
    for name in names:
        family, tied, more = LAYOUTS[name]
        _, engine = make_engine(root / f"{family}-{tied}", **more)
        mine = range(engine.replica, len(LENGTHS), engine.num_replicas)
        # One replica makes nothing when there is a single prompt.
        few = complete(engine, [Request(i, prompts()[i], GREEDY) for i in mine if i == 0])
        done = complete(engine, [Request(i, prompts()[i], GREEDY) for i in mine])
        assert all(done[i][0] == ids for i, (ids, _, _) in few.items())
        assert "vllm" not in sys.modules
        if engine.is_lead:
            facts = {"replicas": engine.num_replicas, "done": done}
            (out / f"{name}.{engine.replica}.json").write_text(json.dumps(facts))
        destroy_rank_groups()


if __name__ == "__main__":
    run(lambda: main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
