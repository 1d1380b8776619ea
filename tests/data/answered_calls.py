"""Environment for tests whose tool answers six turns, and a parser of vLLM that reads a tool call in every turn."""

import json
import sys

from megatron_grpo.environments.registry import Environment, Reply, register_environment


def calculate(expression: str) -> str:
    """Calculate.

    Args:
        expression: What to calculate.
    """
    return expression


@register_environment("answered_calls")
class AnsweredCalls(Environment):
    immediate = True
    tools = (calculate,)

    def step(self, turn):
        if turn.number == 6:
            return Reply(reward=float(len(turn.text)), done=True)
        (call,) = turn.tool_calls
        answer = {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": f"it is {turn.number}"}
        return Reply([answer], reward=float(len(call.arguments["expression"])))


if "torch" in sys.modules:  # not in an environment's process
    from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
    from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

    @ToolParserManager.register_module("every_turn")
    class EveryTurn(ToolParser):
        def extract_tool_calls(self, model_output, request):
            arguments = json.dumps({"expression": "".join(c for c in model_output if c.isalnum())})
            call = ToolCall(id="call00001", function=FunctionCall(name="calculate", arguments=arguments))
            return ExtractedToolCallInformation(tools_called=True, tool_calls=[call], content="")
