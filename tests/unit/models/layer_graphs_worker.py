"""What test_layer_graphs.py runs: three updates with and without graphs, which are imitated by calls."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tools import made_up  # first of ours: it prepares for machines without a GPU

# isort: split
import torch

import pretrain_grpo
from megatron_grpo.models import layer_graphs
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.utils.arguments import replaced

MODEL = """--model-family qwen3 --num-layers 3 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --kv-channels 8 --qk-layernorm --normalization RMSNorm --swiglu
    --disable-bias-linear --vocab-size 64 --max-position-embeddings 4096 --max-tokens-per-microbatch 150""".split()


def imitated(function, pool):
    """A graph writes its result to the same place at each replay."""
    result = function()

    def replay() -> None:
        with torch.enable_grad():
            again = function()
        if result is not None:
            result.detach().copy_(again)

    return result, replay


def updates(flags: list[str], graphs: bool) -> tuple[list[dict], torch.Tensor]:
    args = made_up.parse([*made_up.size_flags(24, 60), *MODEL, *flags], 1)
    args = replaced(args, cuda_graphs=graphs)  # the flag is refused without a GPU
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    batch, chosen = made_up.one_update(args, made_up.lognormal_lengths(24, 20, 26, 60))
    metrics = [pretrain_grpo.update(args, trainer, batch, chosen) for _ in range(3)]
    weights = torch.cat([p.detach().flatten().double() for chunk in trainer.model for p in chunk.parameters()])
    made_up.release(trainer)
    return metrics, weights


layer_graphs.record = imitated
replays = []
plain_forward = layer_graphs._Recorded.forward
layer_graphs._Recorded.forward = lambda self, hidden: replays.append(0) or plain_forward(self, hidden)
plain, weights = updates(sys.argv[1:], graphs=False)
assert not replays
graphs, others = updates(sys.argv[1:], graphs=True)
difference = (weights - others).abs().max().item()
print(json.dumps({"plain": plain, "graphs": graphs, "difference": difference, "replays": len(replays)}))
