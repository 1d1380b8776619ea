"""What an environment is: the messages and turns of an episode, and the class that answers them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

# {"role": "user", "content": "..."}, as chat templates expect them; a vision-language model's content can be parts:
# [{"type": "image", "image": a PIL image, path, bytes or data URI}, {"type": "video", "video": [images], "fps": 2.0},
# {"type": "text", "text": "..."}].
Message = dict[str, Any]

type MaybeAsync[Value] = Value | Awaitable[Value]  # what a function or a coroutine function returns


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: its name and arguments; ``id`` connects the call with its answer."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class MalformedCall:
    """A tool call that cannot be read. It is answered with ``error``, whatever the environment is."""

    text: str
    error: str
    id: str
    name: str = "malformed_call"  # of the tool, where it can be recognised
    place: int = 0  # among all calls of the turn, from 0

    @property
    def answer(self) -> Message:
        """The message that the policy reads."""
        content = f"error: this tool call cannot be read: {self.error}"
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": content}


@dataclass(frozen=True)
class Turn:
    """A turn of the policy, as an environment sees it: the text without the tool calls, and these.

    ``text`` has the turn's reasoning, too, with its marks, as it was sampled; ``reasoning`` is that part of it.
    """

    text: str
    tool_calls: Sequence[ToolCall] = ()
    number: int = 1  # in its episode, from 1
    finish_reason: str = "stop"  # "length": cut at --max-completion-length, so that no answer can follow
    token_ids: Sequence[int] = ()
    malformed_calls: Sequence[MalformedCall] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Reply:
    """What follows a turn: messages and another turn of the policy, or the end of the episode."""

    messages: Sequence[Message] = ()
    # For the turn; the reward function "environment" sums those of an episode, and does not score one that has none.
    reward: float | None = None
    done: bool = False


class Environment:
    """Base class of environments; an object is one episode. Every method may be ``async``.

    An environment that can be copied also has ``snapshot() -> JSON`` and ``restore(state)``: a failed step is then
    repeated from the snapshot before it, and a resumed run goes on from the newest one of each unfinished episode.
    """

    tools: ClassVar[Sequence[Callable | Mapping[str, Any]]] = ()  # functions, or JSON schemas of tools
    # True: answers take milliseconds and depend on nothing else, so that a rollout waits for them, and repeats exactly.
    immediate: ClassVar[bool] = False
    videos: ClassVar[bool] = False  # messages have videos: vLLM reserves memory for them

    def reset(self, row: Mapping[str, Any]) -> MaybeAsync[Sequence[Message] | None]:
        """Begin an episode of a data row; messages to add to the row's prompt, or None."""
        return None

    def step(self, turn: Turn) -> MaybeAsync[Reply | Sequence[Message] | None]:
        """Answer a turn: a Reply, or only its messages; None ends the episode."""
        raise NotImplementedError

    def close(self) -> MaybeAsync[None]:
        """End the episode, however it ended."""
        return None
