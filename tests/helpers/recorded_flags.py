"""Record of the flags that a run reads after its checks, from the parsed arguments and megatron-core's configs."""

import importlib.util
import re
import sys
import types

import pytest
from bad_input_runs import TRAIN, StubEngine, launch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.rollout.vllm import colocate
from megatron_grpo.training import arguments, setup
from megatron_grpo.utils.arguments import Arguments
from megatron_grpo.utils.core_flags import CONFIGS, core_flags

# Functions that read every flag, or every field, whatever it does.
READ_ALL = re.compile(r"^(core_config|check_values|print_args|args_to_json)\b|__(repr|eq|post_init)__$")


class Recorded(Arguments):
    """Parsed arguments that record the names of the attributes that are read."""

    def __getattribute__(self, name):
        record(name, sys._getframe(1))
        return super().__getattribute__(name)


_reads: set[str] = set()


def record(name: str, caller: types.FrameType) -> None:
    if not READ_ALL.search(caller.f_code.co_qualname):
        _reads.add(name)


class EngineWithFlags(StubEngine):
    """The stub of an engine that also makes vLLM's arguments from the flags."""

    def __init__(self, args, hf_config):
        super().__init__(args, hf_config)
        colocate._build(args, "directory")


def flags_read_by(words: list[str]) -> set[str]:
    """Run pretrain_grpo.py with these flags; return the attributes whose values something reads after the checks."""
    fields = {field: dest for dest, flag in core_flags().items() for _, field in flag.feeds}
    parse, resolve, join = arguments.parse_args, setup.resolve_args, setup.join
    of_rendezvous: set[str] = set()

    def after_the_rules(args, world_size):
        args = resolve(args, world_size)
        _reads.clear()
        return args

    def joined(args):  # before the checks that need files
        _reads.clear()
        join(args)
        of_rendezvous.update(_reads)

    def of_config(self, name):
        if name in fields:
            record(fields[name], sys._getframe(1))
        return object.__getattribute__(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "parse_args", lambda: Recorded(**vars(parse())))
        patch.setattr(setup, "resolve_args", after_the_rules)
        patch.setattr(setup, "join", joined)
        # Both modules that _build imports, or the outcome depends on what an earlier test of the worker has imported.
        spec = importlib.util.find_spec("vllm")  # for the check of replaced names, which reads its files
        patch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=lambda **options: None, __spec__=spec))
        registry = types.SimpleNamespace(_run_in_subprocess=None)
        patch.setitem(sys.modules, "vllm.model_executor.models", types.SimpleNamespace(registry=registry))
        patch.setitem(sys.modules, "vllm.model_executor.models.registry", registry)
        patch.setattr(colocate, "_cpu_options", lambda args: {})
        patch.setattr("bad_input_runs.StubEngine", EngineWithFlags)
        for config in (TransformerConfig, *CONFIGS[1:]):
            patch.setattr(config, "__getattribute__", of_config)
        assert launch(TRAIN, words) == 0
    return _reads | of_rendezvous
