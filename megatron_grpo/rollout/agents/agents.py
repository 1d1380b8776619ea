"""Rollouts of agent programs: `Agents` wraps any engine, and each of its completions is one run of a program.

A request starts the program in a process of the environment pool, with a URL of its own (endpoint.py). Its calls are
rendered, broadcast to the ranks of the replica, and generated; prompts and answers are recorded token by token
(tree.py). When the program has ended, its calls are one completion: every leaf of the tree is a sample.

All calls of a run may sample --max-completion-length tokens; prompts, counted once for each sample, may have
--max-prompt-length + --max-environment-tokens. A call beyond that is refused as OpenAI's servers refuse a prompt that
is too long, and the run's finish reason is "length". Calls side by side reserve what they may sample; a call waits
while others have reserved what it asks for. A program that fails (environments/pool.py) is repeated with a new
URL; if that fails, its finish reason is "failed": not scored, and not in the loss.

Messages for a vision-language model can have images. The bytes of each go to all ranks of the replica once, with the
first call that shows it, and are recorded in the tree: a sample has those on its path.

Rollouts can be interrupted (--partial-rollouts, --rollout-ranks). The program does not see it: the call that is being
generated goes on after its tokens under the new weights, and calls that come meanwhile wait. After a resume the program
starts again from its row.
"""

import base64
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from megatron_grpo.environments.agent import URL
from megatron_grpo.environments.environment import Turn
from megatron_grpo.environments.pool import Answer
from megatron_grpo.environments.rendering import Mark
from megatron_grpo.parallel.agreement import of_lead
from megatron_grpo.rollout.agents.endpoint import Call, Endpoint
from megatron_grpo.rollout.agents.tree import Message, Node, Tree, normalised, without_hashes, without_images
from megatron_grpo.rollout.engine import Completion, Request, request_seed
from megatron_grpo.rollout.episodes import Conversing, before_stop_word
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.images import RowImages, opened

_CALLS = 1 << 20  # of one run: ids of the engine's requests are id * _CALLS + number of the call, from 1
_WAIT = 0.02  # s between looks at the programs while nothing generates


@dataclass(frozen=True)
class _Prompt:
    """What a call asks: tokens after those of ``parent``, an answer that it continues."""

    parent: Node | None
    ids: list[int]
    messages: list[Message] = field(default_factory=list)  # normalised
    tools: str = ""
    images: list[bytes] = field(default_factory=list)  # encoded, in ``ids``
    marks: Sequence[Mark] = ()  # of all tokens with those of ``parent``

    def cost(self, branches: bool) -> int:
        """Return the tokens that it adds to a run's: those before it, too, if another call has continued ``parent``."""
        return len(self.ids) + (len(self.parent.ids) if branches and self.parent is not None else 0)


class _AtLimit(GrpoError):
    """A call cannot be answered, as at the limit of tokens."""


@dataclass(eq=False)
class _Run:
    """A run of a program, on the lead rank."""

    request: Request
    key: int  # in the pool
    session: str
    program: str | None = None  # the URL's part of the run: a repeated program has another one
    earlier: set[str] = field(default_factory=set)
    tree: Tree = field(default_factory=Tree)
    calls: int = 0
    sampled: int = 0
    malformed_calls: int = 0
    prompts: int = 0  # tokens of all samples that were not sampled in it
    over: bool = False  # a call was refused at a limit
    refused: str = ""  # why the newest call was, if it was: clients often raise without the text of the answer
    decoded: set[bytes] = field(default_factory=set)  # images that are whole
    numbers: dict[bytes, int] = field(default_factory=dict)  # of the images that all ranks have

    def begin_again(self, program: str) -> None:
        """Forget what an earlier program has said."""
        self.earlier |= {self.program} if self.program else set()
        self.program, self.tree, self.sampled, self.prompts, self.over = program, Tree(), 0, 0, False
        self.malformed_calls, self.refused = 0, ""

    def with_refusal(self, error: str) -> str:
        """Return the error of the program, with the refusal of its last call in its first line."""
        first, newline, rest = error.partition("\n")
        told = not self.refused or self.refused in error
        return error if told else f"{first}; a call was refused: {self.refused}{newline}{rest}"


class _Asked(NamedTuple):
    """A call that the engine generates, on the lead rank."""

    call: Call
    prompt: _Prompt
    most: int  # tokens of the answer
    run: _Run
    branches: bool  # whether another call has continued the same one before
    stop: list[str]  # words

    def give_back(self) -> None:
        """Give the run the tokens of the call back: nobody reads the answer, and the program can ask again."""
        if self.call.run != self.run.program:  # an earlier one
            return
        self.run.sampled -= self.most
        self.run.prompts -= self.prompt.cost(self.branches)
        if self.prompt.parent is not None:
            self.prompt.parent.continued = self.branches


@dataclass(eq=False)
class _Paused:
    """An interrupted run, on all ranks of the replica."""

    request: Request
    run: _Run | None  # on the lead rank
    images: RowImages | None
    asked: list[Request] = field(default_factory=list)  # that the engine was generating, with the tokens so far
    calls: dict[int, _Asked] = field(default_factory=dict)  # of the asked, on the lead rank


class Agents(Conversing):
    """``engine`` with agent programs."""

    program = "the agent"

    def __init__(self, *parts: Any, **more: Any):
        super().__init__(*parts, **more)
        self._endpoint = Endpoint() if self._pool is not None else None
        self._requests: dict[int, Request] = {}
        self._run_images: dict[int, RowImages] = {}  # by the same ids: the images of all calls of a run, each once
        self._asked: dict[int, Request] = {}  # that the engine generates, by its id
        self._paused: dict[int, _Paused] = {}  # an evaluation can have the same ids
        # On the lead rank:
        self._runs: dict[int, _Run] = {}
        self._sessions: dict[str, _Run] = {}  # those of paused runs, too
        self._by_key: dict[int, _Run] = {}
        self._keys = itertools.count()
        self._calls: dict[int, _Asked] = {}  # by the engine's id
        self._waiting_calls: list[Call] = []  # of paused runs, and for tokens that other calls have reserved
        self._waiting_ends: list[Answer] = []

    # ---- requests

    def submit(self, requests: Iterable[Request]) -> None:
        """See `Submits.submit`; a request without a row has no program."""
        for request in requests:
            paused = self._paused.get(request.id)
            if not request.row:
                self._ask([replace(request, id=request.id * _CALLS)])
            # The row object is that of the draw; an evaluation has others.
            elif paused is not None and paused.request.row is request.row:
                self._resume(request.id)
            else:
                self._begin(request)

    def _begin(self, request: Request) -> None:
        self._requests[request.id] = request
        if self._images is not None:
            self._run_images[request.id] = self._images.of(())
        if self._pool is not None and self._endpoint is not None:
            session, url = self._endpoint.open()
            run = self._runs[request.id] = _Run(request, next(self._keys), session)
            self._sessions[session] = self._by_key[run.key] = run
            self._pool.begin(run.key, self._args.environment, {**request.row, URL: url})

    def _ask(self, requests: list[Request]) -> None:
        self._asked.update((request.id, request) for request in requests)
        self._engine.submit(requests)

    def poll(self) -> list[Completion]:
        """Take calls and ends of programs, run an engine step, and return the runs that ended."""
        new, calls, ended = [], [], []
        if self._requests:
            gone, calls, ended = of_lead(self._news() if self._pool is not None else None, self._group)
            if gone:
                self._engine.abort(gone)
            for number in gone:
                del self._asked[number]
        for number, prompt_ids, max_tokens, stop, added, shown in calls:
            run, call = divmod(number, _CALLS)
            request = self._requests[run]
            sampling = replace(request.sampling, max_tokens=max_tokens, stop=(*request.sampling.stop, *stop))
            seed = None if request.seed is None else request_seed(request.seed, call)
            images = self._read(request, added, shown)
            new.append(Request(number, prompt_ids, sampling, seed=seed, images=images, session=run * _CALLS))
        self._ask(new)
        done = []
        if self._asked:
            for completion in self._engine.poll():
                del self._asked[completion.id]
                if completion.id % _CALLS == 0:  # a request without a program
                    done.append(replace(completion, id=completion.id // _CALLS))
                elif self._pool is not None:
                    self._answer(completion)
        return done + [self._end(number, reason, reward) for number, reason, reward in ended]

    def _read(self, request: Request, added: list[str], shown: list[int]) -> RowImages | None:
        """Return the images of a call: ``added``, in base64, follow those of the run's earlier calls; ``shown`` are the
        numbers of the call's.
        """
        if self._images is None:
            return None
        if added:
            new = self._images.of([base64.b64decode(image) for image in added])
            self._run_images[request.id] = self._run_images[request.id].followed_by(new)
        where = "an agent's call" if request.images is None else f"{request.images.where}: an agent's call"
        return replace(self._run_images[request.id].only(shown), where=where)

    def _news(self) -> tuple[list[int], list[Any], list[Any]]:
        """Return what all ranks of a replica receive: (ids of abandoned calls, calls as of `_accept`, ends of runs)."""
        gone = sorted(number for number, asked in self._calls.items() if asked.call.abandoned)
        for number in gone:
            self._calls.pop(number).give_back()
        calls, ended = self._new_calls(), self._new_ends()
        if not (calls or ended or len(self._asked) > len(gone)):
            calls = self._new_calls(_WAIT)
        return gone, sorted(calls), ended

    def _new_calls(self, wait: float = 0.0) -> list[Any]:
        assert self._endpoint is not None
        accepted, calls = [], [*self._waiting_calls, *self._endpoint.calls(wait)]
        self._waiting_calls, waiting = [], set()
        for call in calls:
            run = self._sessions.get(call.session)
            # In the order of their arrival: smaller calls do not pass.
            if run is not None and (self._is_paused(run) or call.session in waiting or self._lacks_tokens(run, call)):
                self._waiting_calls.append(call)
                waiting.add(call.session)
            elif (news := self._accept(run, call)) is not None:
                accepted.append(news)
        return accepted

    def _new_ends(self) -> list[tuple[int, str, float | None]]:
        """Start programs after their resets; return (id, finish reason, reward) of the runs whose program has ended."""
        assert self._pool is not None
        ended, answers = [], [*self._waiting_ends, *self._pool.poll()]
        self._waiting_ends = []
        for answer in answers:
            run = self._by_key[answer.key]
            if answer.error is None and not answer.done:
                self._pool.step(answer.key, Turn(""))
            elif self._is_paused(run):
                self._waiting_ends.append(answer)
            else:
                ended.append((run.request.id, *self._ended(run, answer)))
        return ended

    def _is_paused(self, run: _Run) -> bool:
        return self._runs.get(run.request.id) is not run

    def _ended(self, run: _Run, answer: Answer) -> tuple[str, float | None]:
        """Return (finish reason, reward) of a run whose program has ended."""
        if answer.error is not None and not run.over:
            self._failures.add(run.with_refusal(answer.error))
            return "failed", None
        if not run.tree.nodes:
            self._failures.add(run.with_refusal("the agent ended without a call that was answered"))
            return "failed", None
        return "length" if run.over else "stop", answer.reward

    # ---- calls

    def _lacks_tokens(self, run: _Run, call: Call) -> bool:
        """Return whether other calls under way have reserved tokens that a call asks for: they may need fewer."""
        most = run.request.sampling.max_tokens
        if call.run != run.program or call.abandoned:
            return False
        try:
            needed = max(1, min(_most(call.body) or 1, most))
        except (TypeError, ValueError):  # `_accept` refuses it
            return False
        lacks = most - run.sampled < needed
        return lacks and any(asked.run is run and asked.call.run == run.program for asked in self._calls.values())

    def _accept(
        self, run: _Run | None, call: Call
    ) -> tuple[int, list[int], int, list[str], list[str], list[int]] | None:
        """Return (id, prompt, most tokens, stop words, new images in base64, numbers of its images) of a call, or
        refuse it.
        """
        assert self._endpoint is not None
        if run is None or call.abandoned:
            self._endpoint.refuse(call, "this session has ended", "not_found", 404)
            return None
        if call.run in run.earlier:
            self._endpoint.refuse(call, "this run has failed, and was begun again", "not_found", 404)
            return None
        if call.run != run.program:
            run.begin_again(call.run)
        left = run.request.sampling.max_tokens - run.sampled
        try:
            prompt = self._prompt(run, call)
            stop = self._stop_words(call.body)
            most = _most(call.body) or left
        except _AtLimit as error:
            run.over = True
            self._endpoint.refuse(call, str(error), "context_length_exceeded")
            return None
        except GrpoError as error:
            run.refused = str(error)
            self._endpoint.refuse(call, run.refused)
            return None
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # the program sent other JSON than OpenAI's
            run.refused = f"the request is malformed: {type(error).__name__}: {error}"
            self._endpoint.refuse(call, run.refused)
            return None
        before = prompt.parent.ids if prompt.parent is not None else []
        branches = prompt.parent is not None and prompt.parent.continued
        prompts = run.prompts + prompt.cost(branches)
        if left < 1 or prompts > self._args.max_prompt_length + self._args.max_environment_tokens:
            run.over = True
            message = (
                f"the run has {run.sampled} sampled tokens (--max-completion-length {run.request.sampling.max_tokens}) "
                f"and would have {prompts} tokens of prompts (--max-prompt-length {self._args.max_prompt_length} + "
                f"--max-environment-tokens {self._args.max_environment_tokens})"
            )
            self._endpoint.refuse(call, message, "context_length_exceeded")
            return None
        most = max(1, min(most, left))
        run.prompts, run.sampled = prompts, run.sampled + most  # reserved: calls can run side by side
        if prompt.parent is not None:
            prompt.parent.continued = True
        run.calls += 1
        run.refused = ""  # the program went on
        number = run.request.id * _CALLS + run.calls
        self._calls[number] = _Asked(call, prompt, most, run, branches, stop)
        shown = [*(prompt.parent.images_so_far if prompt.parent is not None else ()), *prompt.images]
        added = [image for image in dict.fromkeys(shown) if image not in run.numbers]
        run.numbers.update(zip(added, itertools.count(len(run.numbers))))
        encoded = [base64.b64encode(image).decode() for image in added]
        return number, [*before, *prompt.ids], most, stop, encoded, [run.numbers[image] for image in shown]

    def _prompt(self, run: _Run, call: Call) -> _Prompt:
        """Return what a call asks; GrpoError if it is malformed."""
        assert self._renderer is not None
        if (call.body.get("n") or 1) != 1:
            raise GrpoError("n must be 1: send a request for each answer, they share their prompt")
        if not call.chat:
            return self._text_prompt(run, call.body.get("prompt"))
        given = call.body.get("messages")
        if not isinstance(given, list) or not all(isinstance(m, dict) and "role" in m for m in given) or not given:
            raise GrpoError("messages must be a list of objects with a role")
        given, of_messages = map(list, zip(*(without_images(message) for message in given), strict=True))
        images = list(chain.from_iterable(of_messages))
        self._check_images(run, images)
        messages, tools = [normalised(message) for message in given], call.body.get("tools") or None
        if self._parser is not None:
            self._parser.check(tools or ())
        shown = [self._shown(message) for message in given]
        variables = self._variables(call)
        key = json.dumps([tools, variables], sort_keys=True)
        parent = run.tree.continued_by(messages, key)
        if parent is not None:
            before, so_far = len(parent.messages), parent.ids
            added = list(chain.from_iterable(of_messages[before:]))
            if self._images is not None:
                earlier = self._images.of(parent.images_so_far)
                if (added or self._args.on_rewritten_history == "split") and not earlier.fits(so_far):
                    raise _AtLimit("the policy has sampled the token of an image, behind which no image can follow")
                so_far = earlier.collapse(so_far)
            marks: Sequence[Mark] = ()
            if self._args.on_rewritten_history != "keep":
                sampled = _as_sampled(shown, parent)
                whole, marks = self._renderer.rewritten(so_far, sampled, tools, variables, parent.marks)
                if whole is not None and sampled != shown:  # a new sample has what the program has sent
                    whole, marks = self._renderer.rewritten(so_far, shown, tools, variables, parent.marks)
                if whole is not None:
                    if self._args.on_rewritten_history == "refuse":
                        raise GrpoError("the chat template changes earlier turns (--on-rewritten-history refuse)")
                    return self._expanded(None, whole, messages, key, images, marks)
            turn, last = shown[before - 1], so_far[-1]
            new = self._renderer.after_turn(shown[: before - 1], turn, shown[before:], last, tools, variables)
            return self._expanded(parent, new, messages, key, added, marks)
        return self._expanded(None, self._renderer.whole(shown, tools, variables), messages, key, images)

    def _variables(self, call: Call) -> dict[str, Any]:
        """Return the chat template's further variables in a call."""
        return (self._args.chat_template_kwargs or {}) | (call.body.get("chat_template_kwargs") or {})

    def _expanded(
        self,
        parent: Node | None,
        ids: list[int],
        messages: list[Message],
        key: str,
        images: list[bytes],
        marks: Sequence[Mark] = (),
    ) -> _Prompt:
        """Return the prompt in which each image has all its tokens."""
        if self._images is not None:
            ids = self._images.of(images).expand(ids)
        return _Prompt(parent, ids, messages, key, images, marks)

    def _check_images(self, run: _Run, images: list[bytes]) -> None:
        """Decode the images that the run shows for the first time: GrpoError for a damaged one."""
        if images and self._images is None:
            raise GrpoError(
                f"a message has an image, and model family {self._args.model_family} takes texts only: send texts, or "
                "train a vision-language model"
            )
        if self._images is None or run.decoded.issuperset(images):
            return
        self._images.of(images)  # sizes that the processor refuses
        for number, image in enumerate(images, 1):
            if image not in run.decoded:
                opened(image, number)
                run.decoded.add(image)

    def _text_prompt(self, run: _Run, prompt: Any) -> _Prompt:
        if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            if not 0 <= min(prompt) <= max(prompt) < self._args.vocab_size:
                raise GrpoError(
                    f"a token of the prompt is not below {self._args.vocab_size}, the size of the vocabulary"
                )
            return self._expanded(None, prompt, [], "", [])
        if not isinstance(prompt, str) or not prompt:
            raise GrpoError("prompt must be one text, or a list of token ids")
        parent = run.tree.continued_by_text(prompt)
        if parent is None:
            return self._expanded(None, self._tokenizer.encode(prompt), [], "", [])
        rest = prompt[len(parent.text) :]
        if parent.stop_word and rest.startswith(parent.stop_word):  # its tokens are there
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(rest, parent.cut))
            rest = rest[len(list(same)) :]
        return self._expanded(parent, self._tokenizer.encode_rest(rest), [], "", [])

    def _shown(self, message: Message) -> Message:
        """Return a message as the chat template gets it: as `normalised`, with the ids of tool calls."""
        made = normalised(message)
        for call, given in zip(made.get("tool_calls", ()), message.get("tool_calls") or ()):
            call["id"] = given.get("id")
        if message["role"] == "tool":
            made |= {"role": self._args.tool_role, "tool_call_id": message.get("tool_call_id")}
        return made

    def _stop_words(self, body: dict[str, Any]) -> list[str]:
        stop = body.get("stop") or []
        words = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(word, str) and word for word in words):
            raise GrpoError("stop must be a text, or a list of texts")
        if words and self._args.vllm_speculative_config:
            raise GrpoError(
                "stop and --vllm-speculative-config cannot both be given: vLLM keeps tokens of a draft behind a stop "
                "word; send no stop, or leave the flag out"
            )
        return words

    def _answer(self, completion: Completion) -> None:
        """Record an answer and send it."""
        assert self._endpoint is not None
        asked = self._calls.pop(completion.id)
        call, prompt, most, run, _, words = asked
        ids = completion.token_ids
        if call.run != run.program:
            self._endpoint.refuse(call, "this run has ended", "not_found", 404)
            return
        if call.abandoned:
            asked.give_back()
            return
        run.sampled -= most - len(ids)
        stop = words if completion.finish_reason == "stop" else []
        raw, said = self._read_turn(
            ids,
            [*(prompt.parent.ids if prompt.parent is not None else ()), *prompt.ids],
            with_calls=call.chat and call.body.get("tool_choice") != "none",
            tools=call.body.get("tools"),
            number=len(run.tree.nodes) + 1,
            cut=completion.finish_reason == "length",
            variables=self._variables(call),
            stop=stop,
        )
        run.malformed_calls += len(said.malformed)
        content, _ = before_stop_word(said.text_with_malformed, stop)  # gpt-oss's is read from token ids
        reply: Message = {"role": "assistant", "content": content or None}
        if said.calls:
            reply["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for c in said.calls
            ]
        images = None if self._images is None else prompt.images
        node = Node(prompt.parent, prompt.ids, completion, images=images, marks=prompt.marks)
        raw, node.stop_word = before_stop_word(whole := raw, stop)
        node.cut = whole[len(raw) :]
        if call.chat:
            node.messages, node.tools = [*prompt.messages, normalised(reply)], prompt.tools
        else:
            given = call.body["prompt"]
            node.text = f"{given if isinstance(given, str) else self._tokenizer.decode(prompt.ids)}{raw}"
        run.tree.add(node)
        reason = "tool_calls" if said.calls else completion.finish_reason
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"message": reply} if call.chat else {"text": raw}
        self._endpoint.answer(call, choice, (len(node.ids) - len(ids), len(ids)))

    # ---- ends and interruptions

    def _end(self, number: int, reason: str, reward: float | None) -> Completion:
        request = self._requests.pop(number)
        self._run_images.pop(number, None)
        self._stop_calls({number})
        if self._pool is None:
            return Completion(number, [], None, reason, [])  # the lead rank has the tokens
        run = self._close(number)
        samples = run.tree.samples(number)
        if not samples:
            return replace(
                Completion(number, [], None, reason, []),
                prompt_ids=request.prompt_ids,
                sample_starts=[],
                shown_images=None if self._images is None else [[]],
            )
        messages = next((node.messages for node in reversed(run.tree.nodes) if node.messages), None)
        return replace(
            Completion.joined(samples),
            finish_reason=reason,
            turns=len(run.tree.nodes),
            malformed_calls=run.malformed_calls,
            environment_reward=reward,
            messages=None if messages is None else [without_hashes(message) for message in messages],
        )

    def _close(self, number: int) -> _Run:
        assert self._pool is not None and self._endpoint is not None
        run = self._runs.pop(number)
        del self._sessions[run.session], self._by_key[run.key]
        self._endpoint.close(run.session)
        self._pool.end(run.key)
        return run

    def unfinished(self) -> list[Completion]:
        """See `InterruptibleEngine.unfinished`; a run has no tokens here, because a resume starts its program again."""
        return [Completion(number, [], None, "abort", []) for number in sorted(self._requests)]

    def interrupt(self) -> list[Completion]:
        """See `InterruptibleEngine.interrupt`; a request with the same row object continues the run."""
        stopped = self.unfinished()
        for number, request in self._requests.items():
            self._paused[number] = _Paused(request, self._runs.get(number), self._run_images.pop(number, None))
        for completion in self._engine.interrupt():  # type: ignore[attr-defined]
            asked = self._asked.pop(completion.id)
            number, call = divmod(completion.id, _CALLS)
            paused, tokens = self._paused[number], len(completion.token_ids)
            before = paused.request.seed
            seed = None if asked.seed is None or before is None else request_seed(before, call, tokens)
            paused.asked.append(replace(asked, begun=completion, seed=seed))
            if completion.id in self._calls:
                paused.calls[completion.id] = self._calls.pop(completion.id)
        self._requests.clear()
        self._runs.clear()
        return stopped

    def _resume(self, number: int) -> None:
        paused = self._paused.pop(number)
        self._requests[number] = paused.request
        if paused.run is not None:
            self._runs[number] = paused.run
        if paused.images is not None:
            self._run_images[number] = paused.images
        self._calls |= paused.calls
        self._ask(paused.asked)

    def abort(self, ids: Iterable[int]) -> None:
        ids = set(ids)
        self._stop_calls(ids)
        for number in sorted(ids & self._requests.keys()):
            self._requests.pop(number)
            self._run_images.pop(number, None)
            if self._pool is not None:
                self._close(number)

    def _stop_calls(self, ids: set[int]) -> None:
        """Abort the calls of runs: a program can end before its calls do."""
        stopped = sorted(number for number in self._asked if number // _CALLS in ids)
        if stopped:
            self._engine.abort(stopped)
        for number in stopped:
            del self._asked[number]
            if number in self._calls and self._endpoint is not None:
                self._endpoint.refuse(self._calls.pop(number)[0], "this run has ended", "not_found", 404)

    def close(self) -> None:
        """End the endpoint, then the engine."""
        if self._endpoint is not None:
            self._endpoint.shut_down()
        self._engine.close()


def _most(body: dict[str, Any]) -> int:
    """Return how many tokens a call asks for; 0 for all that are left."""
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 0)


def _as_sampled(messages: Sequence[Message], newest: Node) -> list[Message]:
    """Return the messages that continue ``newest`` with the stop words that their answers were sampled with."""
    found = list(messages)
    for node in newest.path:
        place = len(node.messages) - 1
        if node.cut:
            found[place] = found[place] | {"content": f"{found[place].get('content') or ''}{node.cut}"}
    return found
