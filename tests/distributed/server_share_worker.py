"""What test_server_share.py runs under torchrun: rollouts over doubles of servers, which several ranks receive."""

import sys
from argparse import Namespace

import numpy as np
import torch.distributed as dist

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from server_double import LAYERS, VOCABULARY, Double, tiny_model

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel import initialize
from megatron_grpo.rollout.collect import collect_rollout
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.servers import pool
from megatron_grpo.rollout.servers.engine import ServerEngine
from megatron_grpo.rollout.vllm.server import VllmServer
from megatron_grpo.rollout.weight_sync.transfer import CheckpointTransfer
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced

PROMPTS, SIZE = 4, 4


class Scorer:
    """The reward of a completion: the number of its tokens."""

    def __init__(self):
        self.samples, self.failures = {}, []

    def submit(self, key, sample, member):
        self.samples[key] = sample

    def finish(self, keys):
        self.scored = len(keys)
        return np.array([[len(self.samples[key].token_ids)] for key in keys], np.float32).reshape(len(keys), 1)


def arguments() -> Namespace:
    args = parse_args([])
    sizes = {"num_layers": LAYERS, "vocab_size": VOCABULARY, "hidden_size": 32, "model_family": "qwen3"}
    lengths = {"max_prompt_length": 8, "max_completion_length": 8, "vllm_server_timeout": 20.0}
    args = replaced(
        args, **sizes | lengths | {"weight_sync_method": "checkpoint"}, untie_embeddings_and_output_weights=True
    )
    return args


def main() -> None:
    directory = sys.argv[1]
    pool.WATCH_INTERVAL, pool._pause = 0.1, lambda retry: 0.05 * 2**retry
    dist.init_process_group("gloo")
    initialize._host_group = dist.group.WORLD
    rank, world = dist.get_rank(), dist.get_world_size()
    doubles = [Double(), Double()] if rank == 0 else []
    urls = [[double.url for double in doubles]]
    dist.broadcast_object_list(urls, src=0)
    prompts = [Prompt(p, [2 + p, 3, 4], {}, f"row {p}") for p in range(PROMPTS)]
    sampling = Sampling(8, temperature=1.0, stop_token_ids=(1,), log_probs=True)
    seen = {}
    for receivers in (1, world):
        servers = [VllmServer(url, arguments()) for url in urls[0]]
        engine = ServerEngine(servers, CheckpointTransfer(directory), 20.0, 8, receivers=receivers)
        scorer = Scorer() if engine.is_lead else None
        for version in (1, 2):
            engine.wake_weights()
            assert not engine.has_weights or version > 1
            engine.update_weights(iter(tiny_model(version).state_dict().items()), version)
            if rank == 0 and version == 2:
                doubles[1].fault = "die"  # while requests run: each rank finds out by itself
            plan = RolloutPlan(prompts, SIZE, sampling, version)
            batch, failures = collect_rollout(engine, plan, scorer, Namespace(decode=str), Timers())
            assert failures == 0 and batch.num_completions == PROMPTS * SIZE
            assert set(batch.weight_version[batch.response_mask == 1]) == {version}
            assert (batch.rewards[:, 0] == batch.response_lengths).all()
            if scorer is not None:
                assert scorer.scored == PROMPTS * SIZE // receivers
            assert (scorer is not None) == (rank % (world // receivers) == 0)
            for name, array in batch.arrays().items():
                if (version, name) in seen:
                    assert seen[version, name].tobytes() == array.tobytes(), (receivers, version, name)
                seen[version, name] = array
            dist.barrier()
            if rank == 0:
                doubles[1].fault = ""
            dist.barrier()
        engine.close()
    print(f"rank {rank}: equal for 1 and {world} receivers", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
