"""What test_adapter_sync.py runs under torchrun: a trainer with a LoRA adapter, a colocated vLLM, and many syncs.

    torchrun --nproc-per-node W tests/distributed/adapter_sync_worker.py OUT FLAGS

Every rank writes its findings to OUT/RANK.json; rank 0 also OUT/adapter-NUMBER.safetensors, the trainer's adapters.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import made_up  # first of ours: it prepares for machines without a GPU

# isort: split
import torch
import torch.distributed as dist
from refusals import says
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.lora.attach import local_adapter
from megatron_grpo.lora.stream import stream_adapter
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.vllm import adapter as slots
from megatron_grpo.rollout.weight_sync import adapter_sync
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.setup import build_engine
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.stream import stream_hf

TOKENS = 12
# The longest is longer than a block of vLLM's cache on a CPU, so that a prefix can be found in it.
LENGTHS = (5, 40, 290)
FLAGS = f"""--max-prompt-length {max(LENGTHS)} --max-completion-length {TOKENS} --temperature 1 --lora-rank 6
    --lora-alpha 15 --vllm-max-num-seqs 8""".split()


def prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocabulary - 2, (length,), generator=generator).tolist() for length in LENGTHS]


class Operations(TorchDispatchMode):
    """Counts the calls of torch's operations."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[str(function).split(".")[1]] += 1
        return function(*args, **kwargs or {})


class Worker:
    """A trainer and its engine, and what was found."""

    def __init__(self, args, out: Path):
        self.args, self.out, self.found = args, out, {"answers": [], "sync": args.lora_weight_sync}
        parts = made_up.trainer(args)
        self.model = parts.model
        self.engine = build_engine(args, self.model, SimpleNamespace(decode=None))
        self.trainer = SimpleNamespace(args=args, model=self.model, engine=self.engine, timers=Timers(), iteration=0)

    def run(self) -> None:
        base = self.trainer_bits()
        for number in range(3):
            if number:
                self.change(0.2)
            self.sync()
            if not number and self.args.lora_weight_sync == "adapter":
                engine = self.engine_bits()  # the engine started with random weights
                self.found["probe"] = says(lambda: adapter_sync.probe_adapter(self.engine))
                self.found["after the probe"] = self.engine.compare_adapter(self.adapter())
            self.answer()
        self.found["metrics"] = self.trainer.synced.metrics
        if self.args.lora_weight_sync == "adapter":
            for _ in range(int(os.environ["SYNCS"])):
                self.change(1e-3)
                self.sync()
            self.found["operations"] = self.operations()
            self.found["engine's base kept"] = same(engine, self.engine_bits())
            self.found["engine's difference"] = self.engine.compare_weights(stream_hf(self.model, self.args))
            self.spoil()
        self.answer()
        self.found["trainer's base kept"] = same(base, self.trainer_bits())

    def sync(self) -> None:
        self.trainer.iteration += 1
        EngineLifecycle.sync(self.trainer, self.trainer.iteration)

    def operations(self) -> dict[str, int]:
        """What loads an adapter like those before it into the engine: operation of torch -> calls."""
        adapter = self.adapter()
        with Operations() as counted:
            self.engine.update_adapter(adapter, self.trainer.iteration)
        return counted.calls

    def change(self, size: float) -> None:
        """Add to every matrix what depends on its name only, so that all ranks have parts of one adapter."""
        for weight, tensor in local_adapter(self.model):
            shapes = dict(weight.hf)
            change = torch.empty_like(tensor)
            weight.fill(
                change,
                *model_weights.tensor_parallel(weight),
                lambda name, index, shapes=shapes: self.numbers(name, shapes[name])[index],
            )
            tensor.add_(size * change)

    def numbers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return made_up.weight(f"{name} {self.trainer.iteration}", shape)

    def adapter(self) -> dict:
        return adapter_sync.sent_adapter(self.args, self.model)

    def answer(self) -> None:
        """Write the trainer's adapter and the engine's greedy completions."""
        adapter = {name: tensor.contiguous() for name, tensor in stream_adapter(self.model, self.args)}
        if dist.get_rank() == 0:
            save_file(adapter, self.out / f"adapter-{len(self.found['answers'])}.safetensors")
        sampling = Sampling(TOKENS, temperature=0, log_probs=True)
        requests = [Request(i, ids, sampling) for i, ids in enumerate(prompts(self.args.vocab_size))]
        with self.engine.rollout(seed=1):
            done = sorted(generate(self.engine, requests), key=lambda completion: completion.id)
        assert {version for completion in done for version in completion.weight_versions} == {self.trainer.iteration}
        self.found["answers"].append([[completion.token_ids, completion.log_probs] for completion in done])

    def spoil(self) -> None:
        """Withhold an adapter, and alter one bit of one, on the way into the engine; then ignore a kind of layers."""
        load, found = slots.load_adapter, self.found

        def altered(worker, adapter) -> None:
            adapter = dict(adapter)
            name = next(name for name in reversed(adapter) if "down_proj.lora_B" in name)
            adapter[name] = adapter[name].clone()
            adapter[name].view(torch.int32)[1, 2] ^= 1
            load(worker, adapter)

        for case, mutated in (("withheld", lambda worker, adapter: None), ("altered", altered)):
            slots.load_adapter = mutated
            self.change(1e-3)
            found[case] = says(self.sync)
            slots.load_adapter = load
        self.sync()
        wrappers = self.engine._llm.collective_rpc(slots._manager)[0].modules
        ignoring = [wrapper for name, wrapper in wrappers.items() if name.endswith("o_proj")]
        for wrapper in ignoring:
            wrapper.apply = lambda x, bias=None, layer=wrapper.base_layer: layer.quant_method.apply(layer, x, bias)
        found["ignored"] = says(lambda: adapter_sync.probe_adapter(self.engine))
        for wrapper in ignoring:
            del wrapper.apply  # the class's method again

    def trainer_bits(self) -> list:
        return [tensor.clone() for _, tensor in model_weights.named_weights(self.model)]

    def engine_bits(self) -> list:
        """Every parameter of the engine's model, as its kernels hold it."""
        return [parameter.clone() for parameter in self.engine._llm.collective_rpc(parameters)[0]]


def parameters(worker) -> list:
    return list(worker.model_runner.get_model().parameters())


def same(before: list, after: list) -> bool:
    assert len(before) == len(after) > 0
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(before, after, strict=True))


def main() -> None:
    out = Path(sys.argv[1])
    args = made_up.parse([*FLAGS, *sys.argv[2:]], int(os.environ["WORLD_SIZE"]))
    initialize_distributed(args)
    worker = Worker(args, out)
    worker.run()
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(worker.found))
    worker.engine.close()


if __name__ == "__main__":
    run(main)
