"""A vLLM in this process: the directory of its model; when it fails, the message, what the ranks do next, and what is
left of the trainer's stream.
"""

import contextlib
import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import Request, generate, lost_on_failure
from megatron_grpo.rollout.vllm import colocate
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.rollout.vllm.load_weights import name_loaders
from megatron_grpo.rollout.vllm.scheduler import collect_log_probs
from megatron_grpo.utils.errors import EngineLost, GrpoError


def engine(**methods) -> VllmColocate:
    """An engine that sleeps between rollouts, around a vLLM of which only some methods exist."""
    made = object.__new__(VllmColocate)
    made.replica, made._version, made._loads, made._submitted, made._under_way = 0, 0, 0, 0, {}
    made.has_weights, made._awake, made._sleep_level, made._seeds_requests = True, True, 1, False
    made._sees_images, made._keeps_prefixes, made._finished, made._dropped = False, True, [], -1
    made._speculates, made._mtp_prefixes, made._draft_directory = False, (), None
    made._adapter_request, made._drafts_from_completions = None, False
    made._llm = SimpleNamespace(**methods)
    made._engine = SimpleNamespace(**methods)
    return made


def failing(error: Exception):
    def method(*args, **kwargs):
        raise error

    return method


def test_another_programs_memory_while_it_goes_to_sleep_is_told_in_plain_words(one_process):
    vllm = engine(sleep=failing(AssertionError("Memory usage increased after sleeping.")))
    expected = "another program allocated more on the same GPU; give this GPU to the run alone, or add --sleep-level 0"
    with pytest.raises(EngineLost, match=expected):
        vllm.sleep()
    assert not vllm._awake  # its memory is free


@pytest.mark.parametrize(
    ("call", "method", "action"),
    [
        ("sleep", "sleep", "vLLM's sleep"),
        ("wake_weights", "wake_up", "vLLM's wake_up for the weights"),
        ("wake_cache", "wake_up", "vLLM's wake_up for the KV cache"),
    ],
)
def test_a_failure_says_what_failed_where_and_how(one_process, capfd, call, method, action):
    vllm = engine(**{method: failing(RuntimeError("CUDA error: unspecified launch failure.\nCompile with more"))})
    with pytest.raises(EngineLost) as caught:
        getattr(vllm, call)()
    assert str(caught.value) == f"{action} failed on rank 0: RuntimeError: CUDA error: unspecified launch failure."
    assert "Compile with more" in capfd.readouterr().err


@pytest.mark.vllm
def test_an_engine_that_fails_in_a_rollout_is_lost(one_process):
    from vllm.v1.engine.exceptions import EngineDeadError

    vllm = engine(
        add_request=lambda *_, **options: None, step=failing(EngineDeadError()), reset_prefix_cache=lambda: True
    )
    with pytest.raises(EngineLost, match="vLLM's step failed on rank 0: EngineDeadError"), vllm.rollout(1):
        list(generate(vllm, [Request(0, [3], Sampling(4))]))


def test_the_prefix_cache_is_dropped_once_after_requests(one_process):
    drops = []

    def drop() -> bool:
        drops.append(vllm._submitted)
        return len(drops) != 2  # then a request still uses it

    vllm = engine(add_request=lambda *_, **options: None, reset_prefix_cache=drop)
    for requests in (0, 0, 1):
        vllm._submitted += requests
        with contextlib.suppress(GrpoError), vllm.rollout(1):
            pass
    with vllm.rollout(1):
        pass
    vllm._drop_prefix_cache()
    assert drops == [0, 1, 1]
    vllm._keeps_prefixes = False
    vllm._submitted += 1
    vllm._drop_prefix_cache()
    assert drops == [0, 1, 1], "vLLM would look at each block, of which none keeps a prefix"


def collected(scheduler, states: dict) -> None:
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    collect_log_probs(SimpleNamespace(engine_core=core, output_processor=SimpleNamespace(request_states=states)))


@pytest.mark.vllm
def test_log_probs_are_collected_from_the_installed_vllm():
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = object.__new__(Scheduler)
    collected(scheduler, {})
    assert "update_from_output" in vars(scheduler)


@pytest.mark.vllm
def test_runs_of_a_host_share_no_memory(one_process, monkeypatch):
    """The names of vLLM's files in /dev/shm: equal on the ranks of a run, another in every run."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    monkeypatch.setattr(_CPUSHMDistributed, "make_group_name", staticmethod(_CPUSHMDistributed.make_group_name))
    monkeypatch.setenv("VLLM_DIST_IDENT", "//")  # vLLM's of a process that torchrun has started
    communicator, names = SimpleNamespace(unique_name="tp", ranks=[0, 1]), []
    theirs = _CPUSHMDistributed.make_group_name(communicator)
    for _ in range(2):
        with colocate._private_shared_memory():
            names.append(_CPUSHMDistributed.make_group_name(communicator))
    assert names[0] != names[1] and all(name.startswith(theirs) for name in names)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("starts", [None, [0, 2, 3, 4]])
def test_log_probs_go_to_the_requests_of_their_rows(starts, columns):
    """The rows of a step are in another order than its outputs; one output has lost its request, one has no token."""
    new_tokens = {"c": [4], "b": [6], "a": [5, 5] if starts else [5], "aborted": [3], "failed": []}
    seen = []

    def update_from_output(scheduler_output, model_runner_output):
        seen.append(model_runner_output.logprobs)
        outputs = [SimpleNamespace(request_id=name, new_token_ids=ids) for name, ids in new_tokens.items()]
        return {0: SimpleNamespace(outputs=outputs)}

    flat = {name: SimpleNamespace(logprobs=[-9.0]) for name in ("a", "b", "failed")} | {"c": None}
    states = {name: SimpleNamespace(logprobs_processor=SimpleNamespace(logprobs=f)) for name, f in flat.items()}
    scheduler = SimpleNamespace(update_from_output=update_from_output)
    collected(scheduler, states)
    rows = torch.arange(5 if starts else 4).neg().double()[:, None].expand(-1, columns).numpy()
    lists = SimpleNamespace(logprobs=rows, cu_num_generated_tokens=starts)
    index = {"a": 0, "aborted": 1, "b": 2, "c": 3}
    scheduler.update_from_output(None, SimpleNamespace(logprobs=lists, req_id_to_index=index))
    if columns > 1:  # vLLM records them
        assert seen == [lists] and flat["a"].logprobs == flat["b"].logprobs == [-9]
        return
    assert seen == [None]
    assert flat["a"].logprobs == ([-9, 0, -1] if starts else [-9, 0])
    assert flat["b"].logprobs == ([-9, -3] if starts else [-9, -2])


@pytest.mark.parametrize("answers", [True, False])
def test_the_stream_of_weights_is_gone_through_after_a_failure_if_the_device_answers(one_process, monkeypatch, answers):
    monkeypatch.setattr(colocate, "device_answers", lambda: answers)
    weights = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])

    def load(method, args):
        next(args[0])
        raise RuntimeError("CUDA error")

    with pytest.raises(EngineLost, match="vLLM's update of the weights failed on rank 0"):
        engine(collective_rpc=load).update_weights(weights, 3)
    assert len(list(weights)) == (0 if answers else 1)


def test_what_is_no_failure_of_the_engine_passes():
    with pytest.raises(GrpoError, match="a constraint") as caught, lost_on_failure("vLLM's step"):
        raise GrpoError("a constraint")
    assert not isinstance(caught.value, EngineLost)
    with pytest.raises(RuntimeError, match="closed by peer"), lost_on_failure("vLLM's step"):
        raise RuntimeError("Connection closed by peer")


def test_the_same_model_has_the_same_directory_in_every_run(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    args = SimpleNamespace(vision_config=None)
    first, again, other = (colocate._config_directory(args, {"num_layers": layers}) for layers in (2, 2, 3))
    assert first == again != other
    assert json.loads((first / "config.json").read_text()) == {"num_layers": 2}
    assert sorted(first.parent.iterdir()) == sorted([first, other])  # nothing else is left


def test_a_gpu_has_a_directory_of_its_own(tmp_path, monkeypatch):
    # vLLM would load code for another GPU: it tells ranks apart, and a rank of engines may have any GPU
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = []
    for number in (0, 1):
        monkeypatch.setattr("torch.cuda.current_device", lambda number=number: number)
        found.append(colocate._config_directory(SimpleNamespace(vision_config=None), {}))
    assert found[0] != found[1]


def test_a_failed_start_names_its_place():
    def compiled():
        raise RuntimeError("invalid argument")

    with pytest.raises(RuntimeError) as caught:
        compiled()
    assert re.fullmatch(r"compiled, .*test_colocated_vllm.py:\d+", colocate._innermost(caught.value))


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    with pytest.raises(
        GrpoError, match=r"file/megatron_grpo/cpu cannot be written: .*; set VLLM_CACHE_ROOT to another"
    ):
        colocate._config_directory(SimpleNamespace(vision_config=None), {})


@pytest.mark.parametrize("layers", [("M*-", None), (None, "gated_delta_net")])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((True, None), "--vllm-enable-prefix-caching"),
        ((False, {"enable_prefix_caching": True}), "--vllm-engine-kwargs: 'enable_prefix_caching'"),
    ],
)
def test_states_of_prefixes_are_refused_on_a_cpu(layers, flags, named):
    names = "hybrid_layer_pattern experimental_attention_variant vllm_enable_prefix_caching vllm_engine_kwargs".split()
    args = SimpleNamespace(**dict(zip(names, [*layers, *flags], strict=True)), router_replay_mode=None)
    with pytest.raises(GrpoError, match=f"^{named}: vLLM on a CPU .* or use a GPU$"):
        colocate._cpu_options(args)


OURS = {"inductor_compile_config": {"shape_padding": False}, "max_cudagraph_capture_size": 600}
UNPADDED = {"inductor_compile_config": {"shape_padding": False}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"compilation_config": OURS}),
        ({"block_size": 32}, {"compilation_config": OURS, "block_size": 32}),
        ({"compilation_config": None}, {"compilation_config": OURS}),
        ({"compilation_config": 2}, {"compilation_config": OURS | {"mode": 2}}),  # as vLLM understands a number
        ({"compilation_config": {"mode": 3}}, {"compilation_config": OURS | {"mode": 3}}),
        (
            {"compilation_config": {"inductor_compile_config": {"size_asserts": True}}},
            {"compilation_config": OURS | {"inductor_compile_config": {"shape_padding": False, "size_asserts": True}}},
        ),
        (
            {"compilation_config": {"inductor_compile_config": {"shape_padding": True}}},
            {"compilation_config": OURS | {"inductor_compile_config": {"shape_padding": True}}},
        ),
        # vLLM refuses a largest graph that is not the largest size, or that is given twice.
        (
            {"compilation_config": {"cudagraph_capture_sizes": [1, 8]}},
            {"compilation_config": UNPADDED | {"cudagraph_capture_sizes": [1, 8]}},
        ),
        (
            {"compilation_config": {"max_cudagraph_capture_size": 8}},
            {"compilation_config": UNPADDED | {"max_cudagraph_capture_size": 8}},
        ),
        (
            {"cudagraph_capture_sizes": [1, 8]},
            {"compilation_config": UNPADDED, "cudagraph_capture_sizes": [1, 8]},
        ),
        ({"max_cudagraph_capture_size": 8}, {"compilation_config": UNPADDED, "max_cudagraph_capture_size": 8}),
    ],
)
def test_a_users_compilation_replaces_ours_key_by_key(given, expected, monkeypatch):
    """Compiled pieces read other numbers from padded products, whatever else a user gives."""
    monkeypatch.setattr(colocate, "longest_of_engine", lambda args: 64)
    args = SimpleNamespace(vllm_max_num_seqs=600, multi_latent_attention=False, exact_log_probs=False)
    options = colocate._gpu_options(args)
    found = colocate._with_given(options, given)
    assert found == options | expected
    assert options["compilation_config"] == OURS


def test_partial_loaders_get_a_name_for_vllms_reload():
    """MiniMax-M2's norms have such loaders, and the first sync of weights would end with vLLM's AttributeError."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader

    def own(parameter, loaded, shard):
        raise NotImplementedError

    model = torch.nn.Linear(1, 1)
    model.weight.weight_loader = partial(own, shard=1)
    model.bias.weight_loader = own
    with pytest.raises(AttributeError, match="__name__"):
        _get_original_loader(model.weight)
    name_loaders(model)
    assert _get_original_loader(model.weight) is model.weight.weight_loader
    assert _get_original_loader(model.bias) is own


def test_an_older_vllm_finds_the_sizes_of_gemma4s_full_layers(monkeypatch):
    """transformers has them for each layer, and vLLM 0.26 reads one of each."""
    from transformers import AutoConfig
    from vllm.config.model_arch import ModelArchitectureConfig

    sizes = {"global_head_dim": 64, "num_global_key_value_heads": 2}
    args = SimpleNamespace(gemma4_config={**sizes, "num_kv_shared_layers": 0}, vllm_engine_kwargs=None)
    config = AutoConfig.for_model("gemma4_text", head_dim=32, attention_k_eq_v=True, **sizes)
    assert colocate._sizes_of_full_layers(args) == {} and not hasattr(config, "global_head_dim")
    monkeypatch.delattr(ModelArchitectureConfig, "per_layer_overrides")
    config.update(colocate._sizes_of_full_layers(args)["hf_overrides"])  # as vLLM does
    assert (config.head_dim, config.global_head_dim, config.num_global_key_value_heads) == (32, 64, 2)
    args.vllm_engine_kwargs = {"hf_overrides": {"sliding_window": 16}}  # keeps the sizes
    config.update(colocate._sizes_of_full_layers(args)["hf_overrides"])
    assert (config.global_head_dim, config.sliding_window) == (64, 16)
    assert colocate._sizes_of_full_layers(SimpleNamespace(gemma4_config=None)) == {}
