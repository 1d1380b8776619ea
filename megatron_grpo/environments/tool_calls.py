"""Tool calls in what the policy said, read by vLLM's own parsers (--tool-call-parser)."""

import json
import logging
from typing import Any

from megatron_grpo.environments.environment import ToolCall
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.packages import require


class ToolCallParser:
    """The parser of a model family; ``name`` as vLLM's --tool-call-parser ("hermes", "llama3_json", "deepseek_v3")."""

    def __init__(self, name: str, tokenizer: Any):
        require(f"--tool-call-parser {name}, a parser of vLLM,", "vllm")
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        try:
            parser = ToolParserManager.get_tool_parser(name)
        except (KeyError, ImportError) as error:
            raise GrpoError(f"--tool-call-parser {name}: {error}") from error
        # A parser looks up the family's special tokens, and raises RuntimeError if the vocabulary lacks them.
        try:
            self._parser = parser(tokenizer)
        except (RuntimeError, ValueError) as error:
            raise GrpoError(f"--tool-call-parser {name} does not fit the tokenizer: {error}") from error
        # They log a traceback for each malformed call; a policy makes many, and they stay text.
        logging.getLogger(type(self._parser).__module__).setLevel(logging.CRITICAL)
        self._request = ChatCompletionRequest(messages=[])

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text without the tool calls, and these; a call that is not valid JSON stays text."""
        found = self._parser.extract_tool_calls(text, self._request)
        if not found.tools_called:
            return text, []
        calls = []
        for call in found.tool_calls:
            try:
                arguments = json.loads(call.function.arguments or "{}")
            except ValueError:
                return text, []
            if not isinstance(arguments, dict):
                return text, []
            calls.append(ToolCall(call.function.name, arguments, call.id))
        return found.content or "", calls
