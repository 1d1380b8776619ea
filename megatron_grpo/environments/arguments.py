"""Flags and rules of environments."""

from argparse import Namespace
from typing import Any

from megatron_grpo.environments.threads import DEFAULT_SIZES
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, SECONDS, FlagRow, Number, count_to
from megatron_grpo.utils.rules import flag, needs, was_given

AGENT = "agent:"  # begins the environment's name of --agent
UNDER = " under "  # comes before --agent-python in it
TOOL_ROLES = ("tool", "user", "observation", "ipython", "function")

ENVIRONMENTS: tuple[FlagRow, ...] = (
    (
        "--environment",
        str,
        None,
        "name of the environment that answers the policy's turns; a row's column environment names its own [one turn]",
    ),
    (
        "--agent",
        str,
        None,
        "module:function or FILE.py:function, an agent program that calls the policy behind an OpenAI-compatible URL "
        "[no agent]",
    ),
    (
        "--agent-python",
        str,
        None,
        "Python interpreter of a virtual environment of its own, under which the program of --agent runs; --agent "
        "verifiers:NAME is an environment of the library verifiers [the run's own]",
    ),
    ("--max-turns", COUNT, 8, "turns of the policy in an episode"),
    (
        "--max-environment-tokens",
        COUNT,
        1024,
        "tokens of an environment in an episode, beside --max-completion-length, which counts sampled tokens",
    ),
    ("--environment-timeout", SECONDS, 60.0, "time limit of one call of an environment, in seconds in which it runs"),
    ("--environment-retries", Number(int, 0, 1000), 1, "number of retries of a failed call"),
    ("--environment-workers", count_to(1024), 1, "worker processes of each rank that generates, for environments"),
    (
        "--environment-threads",
        count_to(2**16),
        DEFAULT_SIZES.threads,
        "calls at the same time in each worker process that are no coroutines: of environments, tools and agents; the "
        "others wait, which takes no time of theirs",
    ),
    (
        "--environment-sandboxes",
        count_to(1024),
        None,
        "programs of the environment python at the same time in each worker process [the host's CPUs, divided by all "
        "worker processes of its ranks]",
    ),
    (
        "--tool-call-parser",
        str,
        None,
        "format of the policy's tool calls, by vLLM's names: hermes, llama3_json, mistral, deepseek_v3, glm45, "
        "glm47, kimi_k2, minimax_m2, qwen3_coder, gemma4, openai [no tool calls]",
    ),
    (
        "--reasoning-parser",
        str,
        None,
        "format of the policy's reasoning, by vLLM's names: deepseek_r1, qwen3, glm45; no tool is called in it [the "
        "marks in the chat template]",
    ),
    (
        "--on-rewritten-history",
        ("keep", "split", "refuse"),
        "keep",
        "when the chat template renders earlier turns otherwise than they were sampled: go on from the sampled tokens, "
        "split the episode into samples that share its reward, or end the run",
    ),
    ("--tool-role", TOOL_ROLES, TOOL_ROLES[0], "role of tools' answers, for chat templates without the role tool"),
)


def check_agent(args: Namespace) -> None:
    """Raise GrpoError for flags that do not go with an agent program, or need one."""
    if args.agent is not None:
        if "environment" in args.explicit or "max_turns" in args.explicit:
            raise GrpoError(
                "--agent cannot be used with --environment or --max-turns: the program decides; leave them out"
            )
        if args.agent_python is None and args.agent.startswith("verifiers:"):
            raise GrpoError(
                f"--agent {args.agent} needs --agent-python: the interpreter of a virtual environment with verifiers, "
                "whose dependencies differ from vLLM's"
            )
        if "environment_sandboxes" in args.explicit:
            raise GrpoError("--environment-sandboxes has no effect with --agent, whose tools are its own: leave it out")
    elif args.agent_python is not None:
        raise GrpoError("--agent-python needs --agent: it is the interpreter of the agent program")


def resolve_environment(args: Namespace) -> dict[str, Any]:
    """Return --environment: the name that stands for the program of --agent."""
    if args.agent is None:
        return {}
    return {"environment": f"{AGENT}{args.agent}" + (f"{UNDER}{args.agent_python}" if args.agent_python else "")}


def check_environments(args: Namespace) -> None:
    """Raise GrpoError for flags of environments without one, and for what does not work with one."""
    if args.environment is None:
        for name, *_ in ENVIRONMENTS:
            dest = name[2:].replace("-", "_")
            if was_given(args, dest):
                raise GrpoError(f"{flag(dest)} needs --environment: without one an episode has one turn")
        if "environment" in (args.reward_funcs or []):
            raise GrpoError("--reward-funcs environment needs --environment, whose rewards it returns")
        return
    needs(args, "reasoning_parser", "tool_call_parser", "reasoning is set aside before tool calls are read")
    user = "--agent" if args.agent else "--environment"
    if args.tokenizer_type != "HuggingFaceTokenizer":
        raise GrpoError(f"{user} needs --tokenizer-type HuggingFaceTokenizer: turns need a chat template")
    if args.on_rewritten_history == "split" or args.agent:
        several = "--agent" if args.agent else "--on-rewritten-history split"
        if args.teacher_server:
            raise GrpoError(f"{several} cannot be used with --teacher-server yet: leave one of them out")
    for given, what in (
        (args.router_replay_mode == "R3", "--router-replay-mode R3"),
        (args.over_sampling_ratio > 1, "--over-sampling-ratio"),
        (args.structured_outputs_regex, "--structured-outputs-regex"),
        (args.rollout_balancing == "dynamic", "--rollout-balancing dynamic"),
    ):
        if given:
            raise GrpoError(f"{user} cannot be used with {what} yet: leave one of them out")
