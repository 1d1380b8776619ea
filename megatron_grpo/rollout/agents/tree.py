"""The record of an agent's calls, token by token: an append-only tree, whose branches become samples.

A node is one answer of the policy after a prompt. A call whose messages begin with those of a node, its answer
included, continues it: the tokens of the node stay, and those of the new messages are appended. Any other call begins a
tree of its own. At the end every leaf is a sample: the tokens from the root to the leaf. A token that several leaves
share is trained in the first of them only.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_grpo.data.tokenizer import arguments_object
from megatron_grpo.environments.rendering import Mark
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.encoded import as_source, source_of_part

Message = dict[str, Any]


@dataclass(eq=False)
class Node:
    """An answer: ``prompt_ids`` are the tokens since the parent's answer, or the whole prompt of a root."""

    parent: "Node | None"
    prompt_ids: list[int]
    answer: Completion
    messages: list[Message] = field(default_factory=list)  # normalised: all before the answer, and the answer
    tools: str = ""
    text: str = ""  # of all tokens, for calls without messages
    stop_word: str = ""  # that ended the answer; the program sees what is before it, as in OpenAI's protocol
    cut: str = ""  # of the answer: the stop word and what follows it in its last token
    continued: bool = False  # by a call, whether it was answered or not
    trained: bool = False
    images: list[bytes] | None = None  # encoded, in ``prompt_ids``; None without a vision-language model
    marks: Sequence[Mark] = ()  # of all tokens from the root on

    @property
    def ids(self) -> list[int]:
        """All tokens from the root on."""
        return [token for node in self.path for token in (*node.prompt_ids, *node.answer.token_ids)]

    @property
    def images_so_far(self) -> list[bytes]:
        """All images from the root on."""
        return [image for node in self.path for image in node.images or ()]

    @property
    def path(self) -> list["Node"]:
        """The nodes from the root to this one."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]


class Tree:
    """The calls of one run of an agent program, in the order of their answers."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, node: Node) -> None:
        """Append an answer."""
        self.nodes.append(node)

    def continued_by(self, messages: Sequence[Message], tools: str) -> Node | None:
        """Return the node whose messages are the longest beginning of normalised ``messages``; None for a new tree."""
        begun = [
            node
            for node in self.nodes
            if node.messages
            and node.tools == tools
            and len(node.messages) < len(messages)
            and list(messages[: len(node.messages)]) == node.messages
        ]
        return max(begun, key=lambda node: len(node.messages), default=None)

    def continued_by_text(self, text: str) -> Node | None:
        """Return the node whose text is the longest beginning of ``text``; None for a new tree."""
        begun = [node for node in self.nodes if node.text and text.startswith(node.text) and text != node.text]
        return max(begun, key=lambda node: len(node.text), default=None)

    def samples(self, number: int) -> list[Completion]:
        """Return the leaves as completions with the id ``number``, each with its ``prompt_ids``."""
        parents = {id(node.parent) for node in self.nodes}
        return [self._sample(number, node) for node in self.nodes if id(node) not in parents]

    @staticmethod
    def _sample(number: int, leaf: Node) -> Completion:
        root, *later = leaf.path
        whole = _part(root)
        for node in later:
            whole = _part(node).after(whole.with_environment_tokens(node.prompt_ids))
        shown = None if leaf.images is None else [leaf.images_so_far]
        return replace(whole, id=number, prompt_ids=root.prompt_ids, shown_images=shown)


def _part(node: Node) -> Completion:
    """Return a node's answer, with a response mask of 0 if an earlier sample has it."""
    answer, count = node.answer, len(node.answer.token_ids)
    if not node.trained:
        node.trained = True
        return replace(answer, response_mask=[1] * count)
    return replace(
        answer, response_mask=[0] * count, log_probs=None if answer.log_probs is None else [math.nan] * count
    )


def normalised(message: Message) -> Message:
    """Return a message as calls are compared: without null fields, ids of calls, and differences of JSON text.

    Images are those of `without_images`.
    """
    calls = [
        {"type": "function", "function": _normalised_function(call["function"])}
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content")
    if isinstance(content, list) and all(part.get("type") != "image" for part in content):  # OpenAI's parts of a text
        content = "".join(part.get("text", "") for part in content)
    made = {"role": message["role"], "content": content or ""}
    made |= {key: message[key] for key in ("name", "reasoning_content") if message.get(key)}
    return made | ({"tool_calls": calls} if calls else {})


def _normalised_function(function: dict[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": arguments_object(function.get("arguments") or {})}


def without_images(message: Message) -> tuple[Message, list[bytes]]:
    """Return a message with a hash in place of each image, and these, encoded; GrpoError for what is no image or text.

    An image is a part ``image_url`` of OpenAI's protocol with a data URI.
    """
    if not isinstance(message.get("content"), list):
        return message, []
    parts, images = [], []
    for part in message["content"]:
        kind, value = part.get("type"), source_of_part(part)
        if kind == "image_url":
            if not isinstance(value, str) or not value.startswith("data:"):
                raise GrpoError(
                    f"the image_url {str(value)[:80]!r} is no data URI: this endpoint downloads nothing and reads no "
                    "files; send the encoded image itself, as data:image/png;base64,..."
                )
            data = as_source(value, "an image_url")
            assert isinstance(data, bytes)
            images.append(data)
            parts.append({"type": "image", "hash": hashlib.blake2b(data, digest_size=16).hexdigest()})
        elif isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise GrpoError(f"a message has a part of the type {kind!r}: send text and image_url")
    return message | {"content": parts}, images


def without_hashes(message: Message) -> Message:
    """Return a message as rewards and ledgers get it: ``{"type": "image"}`` in the place of each image."""
    content = message["content"]
    if isinstance(content, list):
        content = [{"type": "image"} if part["type"] == "image" else part for part in content]
    return message | {"content": content}
