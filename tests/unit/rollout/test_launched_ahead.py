"""New weights while vLLM has launched a step ahead: every token has the version of the weights that sampled it."""

import queue
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.patches import cpu_backend
from megatron_grpo.rollout.engine import Request

cpu_backend.install()

pytestmark = pytest.mark.vllm
FIRST = 20  # the token that weights of version 0 sample; version v samples token FIRST + v


@pytest.fixture(params=[False, True], ids=["one token", "several tokens"])
def engine(one_process, request):
    """A `VllmColocate` whose engine core, scheduler and outputs are vLLM's, with a runner that samples versions.

    With several tokens of a request in a step, where the scheduler can.
    """
    import scheduler_lives as lives
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

    from megatron_grpo.rollout.vllm.colocate import VllmColocate

    life = lives.Life(True, True, True, 8, 200, 8, 4096, 0, False, {})
    world, device, launched = lives.World(life, True), SimpleNamespace(version=0), []
    world.scheduler.takes_several = lambda ids: request.param

    def of(result):
        future: Future = Future()
        future.set_result(result)
        return future

    def execute_model(step, non_block):
        launched.append(step)
        return of(None if step.total_num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT)

    def sample_tokens(grammar, non_block):
        names, each = list(launched[-1].num_scheduled_tokens), getattr(launched[-1], "tokens", 1)
        sampled = [[FIRST + device.version] * each for _ in names]  # vLLM drops tokens from these lists
        number = each * len(names)
        starts = list(range(0, number + 1, each)) if each > 1 else None
        values = LogprobsLists(*(lives.np.zeros((number, 1)) for _ in range(2)), lives.np.zeros(number, int), starts)
        return of(ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled, values))

    core = EngineCore.__new__(EngineCore)
    core.scheduler, core.batch_queue, core.batch_queue_size = world.scheduler, lives.deque(maxlen=2), 2
    core.model_executor = SimpleNamespace(execute_model=execute_model, sample_tokens=sample_tokens)
    core.vllm_config = lives.Settings(observability_config=lives.Settings())
    core.aborts_queue = queue.Queue()
    for name in ("is_ec_consumer", "is_pooling_model", "is_mm_encoder_only", "log_stats", "_weight_version"):
        setattr(core, name, name == "is_ec_consumer")

    def step():
        outputs, _ = core.step_with_batch_queue()
        of_core = (outputs or {}).get(0) or EngineCoreOutputs()
        return world.outputs.process_outputs(of_core.outputs).request_outputs

    def add_request(name, prompt, sampling, lora_request):
        made = lives.EngineCoreRequest(
            name, prompt["prompt_token_ids"], None, sampling, None, 0.0, None, prompt["cache_salt"], None,
            external_req_id=name,
        )  # fmt: skip
        world.outputs.add_request(made, None)
        world.scheduler.add_request(
            lives.Request.from_engine_core_request(made, lives.get_request_block_hasher(8, world.hash_of))
        )

    made = VllmColocate.__new__(VllmColocate)
    made._engine = SimpleNamespace(
        step=step,
        add_request=add_request,
        abort_request=world._abort,
        output_processor=world.outputs,
        engine_core=SimpleNamespace(engine_core=core),
        reset_prefix_cache=world.scheduler.reset_prefix_cache,
    )
    made._llm = SimpleNamespace(collective_rpc=lambda function, args: vars(device).update(version=device.version + 1))
    made._under_way, made._finished, made._version, made._loads, made._submitted = {}, [], 0, 0, 0
    made._dropped = -1
    made._speculates = made._seeds_requests = made._sees_images = made._mtp_prefixes = False
    made._keeps_prefixes = True
    made._adapter_request = None
    made.launched, made.takes_several = launched, request.param
    return made


def completions(engine, steps_before, lengths):
    """The completions of requests that get new weights after each of ``steps_before`` steps."""
    engine.submit(Request(i, [3 + i] * 5, Sampling(most, log_probs=True)) for i, most in enumerate(lengths))
    done = []
    for version, steps in enumerate(steps_before, start=1):
        for _ in range(steps):
            done += engine.poll()
        engine.update_weights(iter(()), version)
    while len(done) < len(lengths):
        done += engine.poll()
    return sorted(done, key=lambda completion: completion.id)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9, 10, 11])  # the first request ends in the step before, or in it
def test_tokens_of_a_step_launched_ahead_are_of_the_weights_before(engine, steps):
    from megatron_grpo.rollout.vllm.decode_steps import AT_ONCE

    lengths = (9, 20, 70)
    done = completions(engine, [steps, 4], lengths)
    for completion, length in zip(done, lengths, strict=True):
        assert len(completion.token_ids) == length == len(completion.log_probs)
        assert [FIRST + version for version in completion.weight_versions] == completion.token_ids
    assert {0, 1, 2} <= set(done[2].weight_versions)
    assert max(len(step.num_scheduled_tokens) for step in engine.launched) == 3  # nothing is launched twice
    tokens = sum(step.total_num_scheduled_tokens for step in engine.launched)
    # Prompts once; once more where a request had no token at new weights.
    each = max(getattr(step, "tokens", 1) for step in engine.launched)
    assert each == (AT_ONCE if engine.takes_several else 1)
    # A step that ends a request, and the next one, which is launched before, have tokens after its last one.
    assert tokens - sum(len(c.token_ids) for c in done) < 3 * 5 * (2 if steps == 1 else 1) + 3 * (2 * each - 1)


def test_a_completion_that_ends_before_new_weights_can_be_aborted(engine):
    engine.submit(Request(i, [3 + i] * 5, Sampling(most, log_probs=True)) for i, most in enumerate((4, 20)))
    while not engine._finished:
        assert not engine.poll()
        engine.update_weights(iter(()), engine._version + 1)
    engine.abort([0])
    done = []
    while not done:
        done += engine.poll()
    assert [completion.id for completion in done] == [1] and len(done[0].token_ids) == 20


def test_a_completion_that_ends_before_new_weights_survives_an_interrupt(engine):
    """It comes with the next step, and is not among the interrupted ones."""
    engine.submit(Request(i, [3 + i] * 5, Sampling(most, log_probs=True)) for i, most in enumerate((4, 20)))
    done = []
    while not engine._finished:
        done += engine.poll()
        assert not done
        engine.update_weights(iter(()), engine._version + 1)
    assert [completion.id for completion in engine.interrupt()] == [1]
    (completion,) = engine.poll()
    assert completion.id == 0 and len(completion.token_ids) == 4
    assert [FIRST + version for version in completion.weight_versions] == completion.token_ids


def test_requests_of_new_weights_find_no_prefix_of_earlier_ones(engine):
    """A request that goes on keeps its keys and values in the prefix cache, for requests of its own weights."""
    manager, found = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager, []
    find = manager.get_computed_blocks

    def noted(request):
        blocks = find(request)
        found.append(blocks[1])
        return blocks

    manager.get_computed_blocks = noted
    for number in range(4):
        if number == 2:
            engine.update_weights(iter(()), 1)
        engine.submit([Request(number, [3] * 30, Sampling(60, log_probs=True))])
        while not engine.unfinished()[-1].token_ids:
            assert not engine.poll()
    assert found == [0, 24, 0, 24]  # whole blocks of 8 tokens
    assert len(engine.interrupt()) == 4
