"""LoRA adapters in stock vLLM servers, through files that they share with rank 0 (``--lora-weight-sync adapter``).

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server \\
        --model DIR --enable-lora --max-lora-rank 16 --logprobs-mode processed_logprobs

The servers keep the base that they have started with. Every version of the adapter is a directory of PEFT's files below
--weight-sync-dir, which every server loads under a name of its own (``/v1/load_lora_adapter``); vLLM's prefix cache has
separate entries for each name. The files stay until the next version is loaded, because vLLM reads them again after it
has dropped the adapter from its memory.

A stock server does not return an adapter's matrices, so the proof is weaker than that of an engine in these processes:

- *at every sync* an adapter with other matrices than the last one must change a log-probability of a greedy completion,
  by whatever little: without it, or with another one, the completion would be the same bit for bit;
- *once* a random adapter on each kind of layers must change them by more than rounding, as in other engines;
- *once* the log-probabilities of a few prompts are compared with the trainer's, which shows that the bases are equal.
"""

import shutil
from operator import methodcaller

import torch

from megatron_grpo.lora import files
from megatron_grpo.parallel.initialize import led_by_rank_0
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.servers.engine import ServerEngine, Weights
from megatron_grpo.rollout.servers.pool import ServerPool
from megatron_grpo.rollout.servers.server import weight_tag
from megatron_grpo.rollout.vllm.adapter import Adapter, B, differ, kinds, probe_request, random_adapter
from megatron_grpo.rollout.weight_sync.transfer import SharedDirectory
from megatron_grpo.utils.batch_sizes import longest_sequence


class AdapterFiles:
    """Transfer of an adapter to servers through PEFT's files; a `WeightTransfer` of the adapter's tensors."""

    def __init__(self, args):
        self._args, self._directory, self._sent = args, SharedDirectory(args.weight_sync_dir), 0

    def send(self, weights: Weights, version: int, servers: ServerPool) -> None:
        """Write the files, have every server load them under a new name, and delete the last files.

        The name is new even for the same version, which a server receives again after a restart of another one.
        """
        self._sent += 1
        name, path = f"{weight_tag(version)}:{self._sent}", self._directory.path / str(self._sent)
        args = self._args
        config = files.config_of(args) | {"lora_alpha": args.lora_rank, "use_rslora": False}  # the scale is in B
        with self._directory.written("the adapter"):
            tensors = {files.PREFIX + name: tensor.to("cpu", copy=True).contiguous() for name, tensor in weights}
            files.write_files(path, tensors, config, files.base_of(args))
        load = methodcaller("load_adapter", name, str(path), servers.timeout)  # of VllmServer
        servers.update_servers(version, load)
        for older in self._directory.path.iterdir():
            if older != path:
                shutil.rmtree(older, ignore_errors=True)

    def close(self) -> None:
        self._directory.remove()


class AdapterServers(ServerEngine):
    """Engine over vLLM servers that hold a base, and load the run's adapter from files."""

    has_base = True

    def __init__(self, servers, args, receivers: int):
        self._vocab_size, self._longest = args.vocab_size, longest_sequence(args)
        # On rank 0: the adapter that the servers have, and the one with which they made these completions (by URL).
        self._newest: Adapter = {}
        self._proven: tuple[Adapter, dict[str, Completion]] = {}, {}
        self._files = AdapterFiles(args)
        super().__init__(servers, self._files, args.vllm_server_timeout, args.vllm_max_num_seqs, receivers=receivers)

    def update_adapter(self, adapter: Adapter, version: int) -> None:
        if self._leader:
            self._newest = {name: tensor.to("cpu", copy=True) for name, tensor in adapter.items()}
        self.update_weights(iter(adapter.items()), version)

    def compare_adapter(self, adapter: Adapter) -> list[str]:
        """Return one line for each server that computes bit for bit what it computed with another adapter."""
        lines: list[str] = []
        with led_by_rank_0():
            if self._leader:
                last, before = self._proven
                now = self._complete()
                lines = [
                    f"{url} returns the log-probabilities of the last adapter, bit for bit"
                    for url, completion in now.items()
                    if url in before and completion.log_probs == before[url].log_probs and _differ(last, self._newest)
                ]
                self._proven = self._newest, now
        return lines

    def compare_weights(self, weights: Weights) -> None:
        """Return None: a server does not return its base, which it has read itself."""

    def probe_adapter(self) -> list[str]:
        silent: list[str] = []
        with led_by_rank_0():
            if self._leader:
                without = self._probe(None)
                for kind in kinds(self._newest):
                    completions = self._probe(kind)
                    same = [url for url in completions if url in without and not differ(completions[url], without[url])]
                    silent += [f"{kind} of {url}" for url in same]
                self._files.send(iter(self._newest.items()), self._version, self._leader)
        return silent

    def _probe(self, kind: str | None) -> dict[str, Completion]:
        """Return the servers' completions with an adapter that is random on the layers of one kind and 0 elsewhere."""
        assert self._leader
        adapter = random_adapter(self._newest, kind, torch.device("cpu"))
        self._files.send(iter(adapter.items()), self._version, self._leader)
        return self._complete()

    def _complete(self) -> dict[str, Completion]:
        """Return a greedy completion of one prompt by each server, by its URL."""
        assert self._leader
        found: dict[str, Completion] = {}

        async def complete(server) -> None:
            (found[server.url],) = await server.generate([probe_request(self._vocab_size, self._longest)], 0)

        self._leader.each(complete, "complete a prompt")
        return found


def _differ(one: Adapter, other: Adapter) -> bool:
    """Return whether two adapters compute something else; two with a B of zeros do not, whatever their A."""
    if not any(tensor.any() for adapter in (one, other) for name, tensor in adapter.items() if name.endswith(B)):
        return False
    return one.keys() != other.keys() or not all(torch.equal(tensor, other[name]) for name, tensor in one.items())
