"""The scheduler of a vLLM in this process: its class, and the log-probabilities and draft counts taken from it."""

import contextlib
import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_grpo.patches import vllm as patches
from megatron_grpo.rollout.draft_counts import DraftCounts
from megatron_grpo.utils.log import log


def scheduler_of(engine):
    """Return the scheduler of an ``LLMEngine`` that runs its core in this process."""
    return engine.engine_core.engine_core.scheduler


def request_states(engine) -> list:
    """Return vLLM's states of all requests, with all tokens that are recorded."""
    if settle := getattr(scheduler_of(engine), "settle", None):  # of `decode_steps`
        settle()
    return list(engine.output_processor.request_states.values())


def step_under_way(engine) -> bool:
    """Return whether vLLM has launched a step and not recorded its tokens.

    With asynchronous scheduling this is so after any step.
    """
    return bool(engine.engine_core.engine_core.batch_queue)


@contextlib.contextmanager
def launching_nothing(engine) -> Iterator[None]:
    """Context in which a step of the engine records what is launched, and launches no request."""
    from vllm.v1.core.sched.interface import PauseState

    made = scheduler_of(engine)
    made.set_pause_state(PauseState.PAUSED_ALL)
    try:
        yield
    finally:
        made.set_pause_state(PauseState.UNPAUSED)


def scheduler_options() -> dict[str, str]:
    """Return vLLM's option for `decode_steps`; none, with a line, for a vLLM whose scheduler the tests do not know."""
    sources = patches.DECODE_STEPS
    if sources.known():
        return {"scheduler_cls": "megatron_grpo.rollout.vllm.decode_steps.scheduler"}
    if dist.get_rank() == 0:
        *others, newest = sources.digests
        log(
            f"vLLM's own scheduler runs the rollouts, and takes longer: decode steps of {sources.by} are tested with "
            f"vLLM {', '.join(others)} and {newest}, and the sources of this version differ"
        )
    return {}


def shorten_decode_steps(engine):
    """Give the engine's model runner the short path of `decode_runner` and return it; None without one."""
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    if not (is_nvidia and engine.vllm_config.use_v2_model_runner and patches.DECODE_RUNNER.known()):
        return None
    from megatron_grpo.rollout.vllm import decode_runner

    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    made = decode_runner.install(runner)
    if made is not None:
        scheduler_of(engine).takes_several = made.takes_several
    return made


def use_decode_attention(longest_prompt: int) -> None:
    """Let engines of this process attend as `decode_attention` does where its kernel has been measured: on Hopper.

    ``longest_prompt``: tokens of a prompt that completions can share.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9:
        return
    if patches.DECODE_ATTENTION.known():
        from megatron_grpo.rollout.vllm import decode_attention

        decode_attention.register(longest_prompt)


def attention_choices(engine) -> list:
    """Return each `decode_choice.Choice` of the engine's layers once; none where FlashAttention alone can attend."""
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    found = [getattr(getattr(layer, "impl", None), "choice", None) for layer in layers]
    return list(dict.fromkeys(choice for choice in found if choice is not None))


def collect_log_probs(engine) -> None:
    """Append the log-probabilities of a step's sampled tokens to each request's ``FlatLogprobs.logprobs`` directly.

    vLLM slices three arrays per request and step, and also records ranks and positions; with stop words it decodes
    each token once more. vLLM still records the kept tokens of truncation. The tokens of a decode step are appended
    with them (`decode_steps`).
    """
    states = engine.output_processor.request_states

    def collecting(scheduler_output, model_runner_output):
        lists = model_runner_output.logprobs
        if lists is not None and lists.logprobs.shape[1] > 1:  # with kept tokens
            return update(scheduler_output, model_runner_output)
        log_probs = None if lists is None else lists.logprobs[:, 0]
        starts = None if lists is None else lists.cu_num_generated_tokens
        model_runner_output.logprobs = None
        # Several tokens of a request: by drafts, which `record` leaves to vLLM, or of a decode step.
        if record is not None and (starts is None or getattr(scheduler_output, "tokens", 1) > 1):
            scheduler_output = record(scheduler_output, model_runner_output, log_probs, states)
            if scheduler_output is None:
                return {}
        outputs = update(scheduler_output, model_runner_output)
        if log_probs is None:
            return outputs
        for output in itertools.chain.from_iterable(of_client.outputs for of_client in outputs.values()):
            state = states.get(output.request_id)  # None: aborted
            if state is not None and state.logprobs_processor.logprobs is not None and output.new_token_ids:
                row = model_runner_output.req_id_to_index[output.request_id]
                start = row if starts is None else starts[row]
                own = log_probs[start : start + len(output.new_token_ids)]
                state.logprobs_processor.logprobs.logprobs += own.tolist()
        return outputs

    scheduler = scheduler_of(engine)
    record = getattr(scheduler, "record", None)  # of `decode_steps`
    update = patches.LOG_PROBS.install_on(scheduler, collecting)


def count_drafts(engine, counts: DraftCounts) -> None:
    """Add all drafts from now on to ``counts``: vLLM's scheduler forgets them without its own logging of statistics."""

    def counting(stats, num_draft_tokens: int, num_accepted_tokens: int, num_invalid_spec_tokens, request_id: str):
        if num_draft_tokens:
            counts[:] += 1, num_draft_tokens, num_accepted_tokens
        return make(stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id)

    make = patches.DRAFT_COUNTS.install_on(scheduler_of(engine), counting)
