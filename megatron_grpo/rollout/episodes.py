"""An engine whose completions are episodes: the policy speaks, an environment answers, the policy goes on.

`Episodes` wraps any engine and is one itself, so that every kind of rollout takes episodes as it takes completions. A
request begins an episode. When the engine finishes a turn, the environment sees it; its answer is appended, and the
engine continues from there. Meanwhile the other episodes generate. What comes out is one completion: all tokens after
the prompt, with a response mask of 0 on those that the policy did not sample.

A finished turn ends its episode when the environment says so, at --max-turns, and at the limits of sampled tokens
(--max-completion-length) and of the environment's tokens (--max-environment-tokens), in which images have all their
tokens. A turn of a vision-language model in which it has sampled an image token ends an episode like a limit if the
answer has images, or could begin another sample: the engine would put an image in place of that token. An environment
that fails (environments/pool.py) ends it with the finish reason "failed": no reward function scores it, and its tokens
are not in the loss.

Rollouts can be interrupted (--partial-rollouts, --rollout-ranks). An interrupted episode stays here: its turn goes on
after the tokens that it has, and its environment is not called again. Its completion so far is what others see of it.
A request with the same row object continues the episode. After a resume there is no such episode: it is made again from
what its completion so far holds (`Completion.episode_state`), with the environment's snapshot, or by a reset and the
earlier turns. If these get other answers than before, the episode starts again from its row.
"""

import base64
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_grpo.data.row_prompt import parse_prompt, parse_template_variables, parse_tools
from megatron_grpo.environments.environment import Message, Turn
from megatron_grpo.environments.pool import Answer, EnvironmentPool
from megatron_grpo.environments.registry import environment_of, tools_of
from megatron_grpo.environments.rendering import Mark, TurnRenderer
from megatron_grpo.environments.tool_calls import ParsedTurn, ToolCallParser
from megatron_grpo.parallel.agreement import of_lead
from megatron_grpo.rollout.engine import Completion, Engine, GeneratingEngine, Request, request_seed
from megatron_grpo.rollout.working_set import Costs, WorkingSet
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import log
from megatron_grpo.vision.encoded import as_one, as_source
from megatron_grpo.vision.images import ImageReader

_CONTINUES, _ENDS, _FAILS, _SPLITS, _STOPS, _RESUMES, _RESTARTS = range(7)
_LOOK_BACK = 32  # tokens of a prompt, in which the mark of open reasoning is the last text
_WAIT = 0.2  # s between looks at the environments while nothing generates


def _number_of(tokens: Sequence[int], images: Sequence[bytes]) -> int:
    """Return a number for an environment's answer, by the hash of its tokens and images."""
    hashed = hashlib.blake2b(np.array(tokens, np.int32).tobytes(), digest_size=8)
    for image in images:
        hashed.update(image)
    return int(np.frombuffer(hashed.digest(), np.int64)[0])


def _without_images(messages: Sequence[Message]) -> tuple[list[Message], list[bytes]]:
    """Return the messages of an environment without their images and videos, and these, encoded."""
    without, images = [], []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            images += [_encoded(part) for part in content if part["type"] != "text"]
            content = [part if part["type"] == "text" else {"type": part["type"]} for part in content]
        without.append({**message, "content": content})
    return without, images


def _encoded(part: Mapping[str, Any]) -> bytes:
    """Return the bytes of a part's image or video, which the environment's process has encoded."""
    data = [as_source(uri, "an image") for uri in ([part["image"]] if part["type"] == "image" else part["frames"])]
    frames = [image for image in data if isinstance(image, bytes)]
    return frames[0] if part["type"] == "image" else as_one(frames, part["fps"])


def before_stop_word(text: str, words: Sequence[str]) -> tuple[str, str]:
    """Return (the text before the first of ``words``, this word); "" if there is none."""
    found = [(place, word) for word in words if (place := text.find(word)) >= 0]
    place, word = min(found, default=(len(text), ""))
    return text[:place], word


class FailureCounts:
    """Episodes that failed since the last report, by reason."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, error: str) -> None:
        """Count a failure by the first line of its error."""
        reason = error.partition("\n")[0]
        self._counts[reason] = self._counts.get(reason, 0) + 1

    def lines(self, what: str) -> list[str]:
        """Return one line for each reason, and count anew."""
        counts, self._counts = self._counts, {}
        return [
            f"{what} failed in {count} episode{'s' * (count > 1)}: {reason}; not scored, and not in the loss"
            for reason, count in counts.items()
        ]


# Episode, what follows, reward, tokens, and encoded images in base64: JSON's types.
_Said = tuple[int, int, float | None, list[int], list[str]]


class HistoryRewritten(GrpoError):
    """The chat template renders what was sampled otherwise (--on-rewritten-history refuse)."""


@dataclass(eq=False)
class _Episode:
    """An episode on one rank; the lead rank alone knows the conversation."""

    request: Request
    key: int = -1  # in the pool
    trajectory: Completion | None = None  # of the newest sample, without the turn that is being generated
    interrupted: Completion | None = None  # the same with that turn, as far as it was generated
    samples: list[Completion] = field(default_factory=list)  # the earlier ones
    turns: int = 0
    malformed_calls: int = 0
    environment_tokens: int = 0
    shown_images: list[bytes] = field(default_factory=list)  # by the environment
    messages: list[Message] = field(default_factory=list)  # before the policy's next turn
    turn: Message = field(default_factory=dict)  # the policy's newest turn
    answer: list[Message] = field(default_factory=list)  # to that turn
    text: str = ""  # of that turn, with its tool calls
    rewards: list[float | None] = field(default_factory=list)  # of the reset, then of each turn
    states: list[int] = field(default_factory=list)  # a number for what each turn answers
    marks: Sequence[Mark] = ()  # of the newest sample, up to its newest turn's answer
    # Of a checkpoint, until the environment is there: the request that starts the episode from its row.
    again: Request | None = None

    @property
    def all_sampled(self) -> bool:
        """Whether no further token can be sampled; the last turn may have ended by itself."""
        return self.trajectory is not None and self.trajectory.num_sampled >= self.request.sampling.max_tokens


class Conversing:
    """An engine around ``engine``, in which programs answer the policy's turns.

    ``pool``, ``renderer`` and ``parser`` are those of the lead rank, None on the others. ``group`` is the gloo process
    group of the replica's ranks, None for a single rank. ``images`` reads the images of a vision-language model.
    """

    program: str  # the noun of the messages

    def __init__(
        self,
        engine: GeneratingEngine,
        pool: EnvironmentPool | None,
        renderer: TurnRenderer | None,
        parser: ToolCallParser | None,
        tokenizer: Any,
        args: Any,
        group: dist.ProcessGroup | None = None,
        images: ImageReader | None = None,
    ):
        self._engine, self._pool, self._renderer, self._parser = engine, pool, renderer, parser
        self._tokenizer, self._args, self._group = tokenizer, args, group
        self._images = images  # reader of a vision-language model
        self._failures = FailureCounts()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine, which keeps weights, memory and the rest."""
        return getattr(self._engine, name)

    def _read_turn(
        self, ids: list[int], before: Sequence[int], with_calls: bool = True, stop: Sequence[str] = (), **given: Any
    ) -> tuple[str, ParsedTurn]:
        """Return (the policy's text without its end of turn, what it says before the first word of ``stop``) of a turn.

        ``before`` are the tokens before it; ``given`` is what `ToolCallParser.parse` takes besides.
        """
        spoken = ids[:-1] if ids and ids[-1] in self._args.end_token_ids else ids
        raw = self._tokenizer.decode(spoken, skip_special_tokens=self._parser is None)
        seen, _ = before_stop_word(raw, stop)
        if self._parser is None or not with_calls:
            return raw, ParsedTurn(seen, text_with_malformed=seen)
        end_of_prompt = self._tokenizer.decode(list(before[-_LOOK_BACK:]), skip_special_tokens=False)
        return raw, self._parser.parse(seen, ids=ids, before=end_of_prompt, **given)

    def failures(self) -> list[str]:
        """Return what went wrong since the last call, one line for each reason, on the lead rank."""
        return self._failures.lines(self.program)


def print_failures(engine: Engine, where: str = "") -> list[str]:
    """Print what went wrong in environments or agents since the last call, and return the lines."""
    lines = engine.failures() if isinstance(engine, Conversing) else []
    for line in lines:
        log(f"{where}{line}")
    return lines


class Episodes(Conversing):
    """``engine`` with environments. ``costs`` and ``resumes`` are those of its `WorkingSet`."""

    program = "the environment"
    _engine: WorkingSet

    def __init__(
        self, engine: GeneratingEngine, *parts: Any, costs: Costs | None = None, resumes: bool = True, **more: Any
    ):
        super().__init__(WorkingSet(engine, costs, resumes), *parts, **more)
        self._generating: set[int] = set()  # ids of the engine's requests
        self._episodes: dict[int, _Episode] = {}  # by the id of the request
        self._waiting: set[int] = set()  # for the environment
        self._immediate: set[int] = set()  # those of them whose environment answers at once
        self._paused: dict[int, _Episode] = {}  # interrupted; an evaluation can have the same ids
        self._keys = itertools.count()
        self._by_key: dict[int, _Episode] = {}  # those in the pool
        self._arrived: dict[int, Answer] = {}  # by the episode's key
        self._restarts = 0  # resumed episodes that started again, since the last report
        self._changed = 0  # episodes that went on although repeated turns got other answers, since the last report

    def failures(self) -> list[str]:
        """See `Conversing.failures`."""
        lines, restarts, self._restarts = super().failures(), self._restarts, 0
        if restarts:
            lines.append(
                f"{restarts} interrupted episode{'s' * (restarts > 1)} of the checkpoint started again from the row: "
                "the environment has changed, or answered the earlier turns otherwise than before; with snapshot() and "
                "restore() it goes on from its state"
            )
        changed, self._changed = self._changed, 0
        if changed:
            lines.append(
                f"the environment answered repeated turns otherwise than the first time in {changed} "
                f"episode{'s' * (changed > 1)}, after a call failed or its process ended: the first answers stay, "
                "because the policy has read them; with snapshot() and restore() no turn is repeated"
            )
        return lines

    # ---- requests

    def submit(self, requests: Iterable[Request]) -> None:
        """See `Submits.submit`; a request without a row has no environment."""
        to_generate = []
        for request in requests:
            paused = self._paused.get(request.id)
            if not request.row:
                to_generate.append(request)
            # The row object is that of the draw; an evaluation has others.
            elif paused is not None and paused.request.row is request.row:
                to_generate += self._resume(request.id)
            elif request.begun is not None and request.begun.episode_state is not None:
                self._restore(replace(request, session=request.id), request.begun)
            else:
                self._begin(replace(request, begun=None, session=request.id))
        self._generate(to_generate)

    def _generate(self, requests: Sequence[Request]) -> None:
        self._generating.update(request.id for request in requests)
        self._engine.submit(requests)

    def _begin(self, request: Request) -> None:
        episode = self._episodes[request.id] = _Episode(request)
        self._waits(request.id)
        if self._pool is None:
            return
        row, episode.key = request.row, next(self._keys)
        self._by_key[episode.key] = episode
        if request.images is not None:
            prompt = request.images.prompt
        else:
            prompt = parse_prompt(dict(row), self._args.prompt_key, self._args.system_prompt)
        episode.messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        self._pool.begin(episode.key, environment_of(row, self._args.environment).name, row)

    def _restore(self, request: Request, so_far: Completion) -> None:
        """Make an episode of a checkpoint again; its environment's answer says whether it can go on."""
        state = so_far.episode_state
        assert state is not None
        if state["environment"]["name"] != environment_of(request.row, self._args.environment).name:
            self._restarts += 1
            self._begin(replace(request, begun=None))
            return
        *samples, newest = replace(so_far, episode_state=None).separated()
        sampled = sum(sample.num_sampled for sample in samples)
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - sampled)
        now = replace(request, begun=None, prompt_ids=newest.prompt_ids or request.prompt_ids, sampling=sampling)
        names = ("turns", "environment_tokens", "messages", "turn", "text", "rewards", "states")
        counted = {"malformed_calls": state.get("malformed_calls", 0)}  # none in checkpoints of earlier versions
        episode = self._episodes[request.id] = _Episode(
            replace(now, sampled_before=sampled),
            samples=samples,
            again=replace(request, begun=None),
            **{name: state[name] for name in names} | counted,
        )
        self._show(episode, so_far.shown_images[-1] if so_far.shown_images else [])
        if state["generates"]:
            episode.interrupted = newest
            begin = max((i + 1 for i, sampled in enumerate(newest.mask) if not sampled), default=0)
            episode.trajectory = newest.part(0, begin) if begin else None
        else:
            episode.trajectory = replace(newest, finish_reason=state["finish_reason"])
        self._waits(request.id)
        if self._pool is not None:
            episode.key = next(self._keys)
            self._by_key[episode.key] = episode
            self._pool.resume(episode.key, request.row, state["environment"])

    def _next_turn(self, episode: _Episode, begun: Completion | None) -> Request:
        """Return the engine's request for what follows ``begun``; each has another seed."""
        request = episode.request
        tokens = len(begun.token_ids) if begun is not None else 0
        if request.seed is None or not (episode.turns or tokens):
            return replace(request, begun=begun)
        return replace(request, begun=begun, seed=request_seed(request.seed, episode.turns, tokens))

    def _waits(self, number: int) -> None:
        self._waiting.add(number)
        if environment_of(self._episodes[number].request.row, self._args.environment).immediate:
            self._immediate.add(number)

    def poll(self) -> list[Completion]:
        """Take the environments' answers, run an engine step, and return the episodes that ended."""
        ended = self._take_answers() if self._waiting else []
        if self._generating:
            for completion in self._engine.poll():
                self._generating.remove(completion.id)
                if completion.id in self._episodes:
                    self._finish_turn(completion)
                else:
                    self._engine.end(completion.id)
                    ended.append(completion)
        return ended

    def _finish_turn(self, completion: Completion) -> None:
        """Show the environment a turn that the engine has finished."""
        episode = self._episodes[completion.id]
        begin = len(episode.trajectory.token_ids) if episode.trajectory is not None else 0
        ids = completion.token_ids[begin:]
        episode.trajectory, episode.turns = completion, episode.turns + 1
        self._waits(completion.id)
        if self._pool is None:
            return
        tools, variables = self._template_parts(episode)
        raw, said = self._read_turn(
            ids,
            [*episode.request.prompt_ids, *completion.token_ids[:begin]],
            tools=tools,
            number=episode.turns,
            cut=completion.finish_reason == "length",
            variables=variables,
        )
        episode.text = said.text if said.thinking else raw
        episode.malformed_calls += len(said.malformed)
        episode.turn = said.message
        turn = Turn(said.text, said.calls, episode.turns, completion.finish_reason, ids, said.malformed, said.reasoning)
        self._pool.step(episode.key, turn)

    def _template_parts(self, episode: _Episode) -> tuple[list[Any] | None, dict[str, Any]]:
        """Return the tools that the chat template shows in an episode, and its further variables."""
        row = episode.request.row
        variables = (self._args.chat_template_kwargs or {}) | parse_template_variables(row, episode.messages)
        return parse_tools(row, episode.messages) or tools_of(row, self._args.environment), variables

    # ---- answers

    def _take_answers(self) -> list[Completion]:
        """Apply the answers that have come; all ranks of the replica apply the same ones."""
        said = self._answers() if self._pool is not None else []
        ended, continued = [], []
        for number, what, reward, tokens, images in of_lead(said, self._group):
            self._waiting.remove(number)
            self._immediate.discard(number)
            episode = self._episodes[number]
            if what == _RESTARTS:
                assert episode.again is not None
                self._forget(episode)
                self._begin(episode.again)
                continue
            episode.again = None
            if what == _RESUMES:
                begun, episode.interrupted = episode.interrupted, None
                continued.append(self._next_turn(episode, begun))
                continue
            episode.rewards.append(reward)
            shown = [base64.b64decode(image) for image in images]
            episode.states.append(_number_of(tokens, shown) if episode.turns else 0)
            if what == _FAILS:
                ended.append(self._end(number, "failed"))
            elif episode.turns == 0:  # the messages of the environment's reset are part of the prompt
                if tokens:
                    self._take(episode, shown)
                    episode.request = replace(episode.request, prompt_ids=tokens)
                continued.append(self._next_turn(episode, None))
            elif what == _ENDS:
                assert episode.trajectory is not None
                ended.append(self._end(number, episode.trajectory.finish_reason))
            elif what == _STOPS or self._at_a_limit(episode, len(tokens)):
                ended.append(self._end(number, "length"))
            else:
                if what == _SPLITS:
                    self._begin_sample(episode, tokens)  # its last sample has not these images
                else:
                    assert episode.trajectory is not None
                    episode.trajectory = episode.trajectory.with_environment_tokens(tokens)
                self._take(episode, shown)
                episode.environment_tokens += len(tokens)
                continued.append(self._next_turn(episode, episode.trajectory))
        self._generate(continued)
        return ended

    def _take(self, episode: _Episode, images: list[bytes]) -> None:
        """Add the environment's answer, with these images, to the conversation: it does not end at a limit."""
        episode.messages += [episode.turn] if episode.turns else []
        episode.messages += episode.answer
        self._show(episode, images)

    def _show(self, episode: _Episode, images: list[bytes]) -> None:
        """Add images to those of an episode."""
        if images:
            assert self._images is not None and episode.request.images is not None
            more = episode.request.images.followed_by(self._images.of(images))
            episode.request = replace(episode.request, images=more)
            episode.shown_images += images

    def _begin_sample(self, episode: _Episode, prompt_ids: list[int]) -> None:
        """Go on from another prompt, in a sample of its own."""
        assert episode.trajectory is not None
        request, sampled, shown = episode.request, episode.trajectory.num_sampled, self._shown_in(episode)
        episode.samples.append(replace(episode.trajectory, prompt_ids=request.prompt_ids, shown_images=shown))
        episode.trajectory = None
        episode.request = replace(
            request,
            prompt_ids=prompt_ids,
            sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - sampled),
            sampled_before=request.sampled_before + sampled,
        )

    def _answers(self) -> list[_Said]:
        """Return what each answer says, on the lead rank."""
        self._read_answers(0.0)
        if not (self._generating or self._answered()):
            self._read_answers(_WAIT)
        while not {self._episodes[number].key for number in self._immediate} <= self._arrived.keys():
            self._read_answers(_WAIT)
        return [self._said(number, self._arrived.pop(key)) for number, key in self._answered()]

    def _answered(self) -> list[tuple[int, int]]:
        """Return (id, key) of the waiting episodes whose answer has come, in order; paused ones do not wait."""
        found = []
        for key in self._arrived:
            episode = self._by_key[key]
            number = episode.request.id
            if number in self._waiting and self._episodes[number] is episode:
                found.append((number, key))
        return sorted(found)

    def _read_answers(self, wait: float) -> None:
        assert self._pool is not None
        self._arrived.update((answer.key, answer) for answer in self._pool.poll(wait) if answer.key in self._by_key)

    def _said(self, number: int, answer: Answer) -> _Said:
        episode = self._episodes[number]
        self._changed += answer.changed
        if answer.differs:
            self._restarts += 1
            return number, _RESTARTS, None, [], []
        if answer.error is None and episode.interrupted is not None:
            return number, _RESUMES, None, [], []
        error = answer.error
        if error is None and not answer.done and not episode.all_sampled and answer.messages:
            messages, images = _without_images(answer.messages)
            try:
                what, tokens = self._render(episode, messages, images)
                limit = self._args.max_prompt_length
                if not episode.turns and limit is not None and len(tokens) > limit:
                    raise GrpoError(
                        f"the prompt with the messages of reset has {len(tokens)} tokens, more than "
                        f"--max-prompt-length {limit}: raise it, or let reset say less"
                    )
            except HistoryRewritten:
                raise
            except GrpoError as refused:
                error = str(refused)
            else:
                episode.answer = messages
                return number, what, answer.reward, tokens, [base64.b64encode(image).decode() for image in images]
        if error is not None:
            self._failures.add(error)
            return number, _FAILS, None, [], []
        return number, _ENDS if answer.done else _CONTINUES, answer.reward, [], []

    def _render(self, episode: _Episode, messages: Sequence[Message], images: list[bytes]) -> tuple[int, list[int]]:
        """Return (_CONTINUES, the tokens between the policy's newest turn and its next one), or (_SPLITS, a prompt).

        ``images`` are those of the messages. (_STOPS, []) if they cannot follow what the policy has sampled.
        """
        assert self._renderer is not None
        seen = episode.request.images
        if self._images is None or seen is None:
            if any(not isinstance(message["content"], str) for message in messages):
                raise GrpoError(
                    f"a message of the environment has parts, and model family {self._args.model_family} takes texts "
                    "only: return texts, or train a vision-language model"
                )
            return self._render_text(episode, messages)
        new = self._images.of(images)
        if new.has_videos and not environment_of(episode.request.row, self._args.environment).videos:
            raise GrpoError(
                "a message of the environment has a video: write `videos = True` in its class, so that vLLM reserves "
                "memory for videos"
            )
        if episode.trajectory is None:
            what, ids = self._render_text(episode, messages)
            return what, seen.followed_by(new).expand(ids)
        renders_again = self._args.on_rewritten_history == "split"
        if (images or renders_again) and not seen.fits([*episode.request.prompt_ids, *episode.trajectory.token_ids]):
            return _STOPS, []
        what, ids = self._render_text(episode, messages)
        return what, (seen.followed_by(new) if what == _SPLITS else new).expand(ids)

    def _render_text(self, episode: _Episode, messages: Sequence[Message]) -> tuple[int, list[int]]:
        """Return what `_render` does, with one token for each image."""
        assert self._renderer is not None
        tools, variables = self._template_parts(episode)
        role = self._args.tool_role
        messages = [{**m, "role": role} if m["role"] == "tool" else m for m in messages]
        if episode.trajectory is None:
            return _CONTINUES, self._tokenizer.apply_chat_template([*episode.messages, *messages], tools, variables)
        turn = episode.turn if role == "tool" else {k: v for k, v in episode.turn.items() if k != "tool_calls"}
        if self._args.on_rewritten_history != "keep":
            spoken = turn if role == "tool" else turn | {"content": episode.text}
            so_far, images = [*episode.request.prompt_ids, *episode.trajectory.token_ids], episode.request.images
            so_far = so_far if images is None else images.collapse(so_far)
            conversation = [*episode.messages, spoken, *messages]
            whole, episode.marks = self._renderer.rewritten(so_far, conversation, tools, variables, episode.marks)
            if whole is not None:
                return self._rewritten(episode, whole)
        last = episode.trajectory.token_ids[-1]
        return _CONTINUES, self._renderer.after_turn(episode.messages, turn, messages, last, tools, variables)

    def _rewritten(self, episode: _Episode, whole: list[int]) -> tuple[int, list[int]]:
        if self._args.on_rewritten_history == "split":
            return _SPLITS, whole
        assert episode.trajectory is not None
        ids = [*episode.request.prompt_ids, *episode.trajectory.token_ids]
        sampled, rendered = (self._tokenizer.decode(part, skip_special_tokens=False) for part in (ids, whole))
        place = next((i for i, (a, b) in enumerate(zip(sampled, rendered)) if a != b), 0)
        raise HistoryRewritten(
            f"the chat template changes turn {episode.turns} or an earlier one (--on-rewritten-history refuse): "
            f"sampled was {sampled[place : place + 60]!r}, and it renders {rendered[place : place + 60]!r}; give "
            "--on-rewritten-history split or keep, or another --chat-template"
        )

    def _at_a_limit(self, episode: _Episode, num_tokens: int) -> bool:
        """Return whether an episode cannot go on after ``num_tokens`` tokens of the environment."""
        too_many = episode.environment_tokens + num_tokens > self._args.max_environment_tokens
        return episode.all_sampled or too_many or episode.turns >= self._args.max_turns

    # ---- ends and interruptions

    def _end(self, number: int, reason: str) -> Completion:
        episode = self._episodes.pop(number)
        self._forget(episode)
        rewards = [reward for reward in episode.rewards if reward is not None]
        most = max(self._args.max_turns, episode.turns)  # a resume can have another limit
        turn_rewards, turn_states = np.full(most, np.nan, np.float32), np.zeros(most, np.int64)
        turn_rewards[: episode.turns] = [math.nan if r is None else r for r in episode.rewards[1:]]
        turn_states[: episode.turns] = episode.states[: episode.turns]
        return replace(
            self._so_far(episode, episode.trajectory),
            turn_rewards=turn_rewards,
            turn_states=turn_states,
            finish_reason=reason,
            turns=max(episode.turns, 1),
            malformed_calls=episode.malformed_calls,
            environment_reward=sum(rewards) if rewards else None,
            messages=[*episode.messages, episode.turn] if self._pool is not None else None,
        )

    def _so_far(self, episode: _Episode, newest: Completion | None) -> Completion:
        """Return the completion of an episode whose newest sample is ``newest``."""
        trajectory = newest or Completion(episode.request.id, [], None, "abort", [])
        trajectory = replace(
            trajectory,
            prompt_ids=episode.request.prompt_ids,
            finish_reason="abort",
            shown_images=self._shown_in(episode),
        )
        if self._args.on_rewritten_history == "split":
            return Completion.joined([*episode.samples, trajectory])
        return trajectory

    def _shown_in(self, episode: _Episode) -> list[list[bytes]] | None:
        """Return `Completion.shown_images` of the newest sample."""
        return None if self._images is None else [list(episode.shown_images)]

    def _forget(self, episode: _Episode) -> None:
        self._engine.end(episode.request.id)
        self._arrived.pop(episode.key, None)
        self._by_key.pop(episode.key, None)
        if self._pool is not None:
            self._pool.end(episode.key)

    def unfinished(self) -> list[Completion]:
        """See `InterruptibleEngine.unfinished`."""
        turns = {completion.id: completion for completion in self._engine.unfinished()}
        return self._with_episodes(turns)

    def _with_episodes(self, turns: dict[int, Completion]) -> list[Completion]:
        """Return the completions so far, given those of the engine."""
        for number, episode in self._episodes.items():
            turn = turns.get(number) or episode.interrupted
            so_far = self._so_far(episode, turn or episode.trajectory)
            turns[number] = replace(so_far, episode_state=self._state(episode, generates=turn is not None))
        return [turns[number] for number in sorted(turns)]

    def _state(self, episode: _Episode, generates: bool) -> dict[str, Any] | None:
        """Return what `_restore` reads; nothing of it is changed later."""
        environment = self._pool.state(episode.key) if self._pool is not None else None
        if environment is None:
            return None
        return {
            "generates": generates,
            "finish_reason": episode.trajectory.finish_reason if episode.trajectory is not None else None,
            "turns": episode.turns,
            "malformed_calls": episode.malformed_calls,
            "environment_tokens": episode.environment_tokens,
            "messages": [*episode.messages],
            "turn": episode.turn,
            "text": episode.text,
            "rewards": [*episode.rewards],
            "states": [*episode.states],
            "environment": environment,
        }

    def interrupt(self) -> list[Completion]:
        """See `InterruptibleEngine.interrupt`."""
        turns = {completion.id: completion for completion in self._engine.interrupt()}
        for number, episode in self._episodes.items():
            episode.interrupted = turns.get(number) or episode.interrupted
        stopped = self._with_episodes(turns)
        for completion in stopped:
            if completion.id in self._episodes:
                self._paused[completion.id] = self._episodes.pop(completion.id)
        for numbers in (self._generating, self._waiting, self._immediate):
            numbers.clear()
        return stopped

    def _resume(self, number: int) -> list[Request]:
        """Go on with an interrupted episode; return the engine's request for its turn, if it was being generated."""
        episode = self._episodes[number] = self._paused.pop(number)
        if episode.interrupted is None or episode.again is not None:
            self._waits(number)
            return []
        begun, episode.interrupted = episode.interrupted, None
        return [self._next_turn(episode, begun)]

    def abort(self, ids: Iterable[int]) -> None:
        ids = list(ids)
        self._engine.abort([number for number in ids if number in self._generating])
        for number in ids:
            self._generating.discard(number)
            self._waiting.discard(number)
            self._immediate.discard(number)
            if episode := self._episodes.pop(number, None):
                self._forget(episode)
