"""Token continuity without a tokenizer: the ids that follow a known sequence when new messages arrive.

A short conversation, ``[user, assistant with a sentinel, new messages]``, is rendered; what comes after the sentinel
and the words that close the assistant's turn is the suffix. A self-test learns sentinel and closing ids, and what the
chat template does with late system messages and earlier thoughts; a template that fails it is served text-in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from pipeline.capture import ids
from pipeline.capture.canonical import ChatMessage, calls_of
from pipeline.capture.dialects.base import Answer, ApiError, Fault
from pipeline.capture.upstream import Engine, Frame

SENTINELS = ("QUARTZ", "MAPLE")
TEXT, CALL = "text", "call"
WINDOWS = {TEXT: 4, CALL: 40}  # so many ids after the sentinel may belong to the turn's closing words
PROBE_TOOL = msgspec.json.encode(
    [{"type": "function", "function": {"name": "bash", "description": "run", "parameters": {"type": "object"}}}]
)
THOUGHT_START, THOUGHT_END = "<think>", "</think>"
USER: ChatMessage = {"role": "user", "content": "x"}

log = logging.getLogger(__name__)


class NoBridge(Exception):
    """The suffix cannot be told for certain; the argument names the cause."""


@dataclass
class Template:
    """What the self-test found out about a chat template. ``problem`` is "" when continuity works."""

    problem: str = ""
    sentinels: dict[str, bytes] = field(default_factory=dict)  # shape -> ids of the first sentinel
    closers: dict[str, bytes] = field(default_factory=dict)  # shape -> ids between sentinel and turn end
    with_tools: bool = False  # the suffix depends on the tools, so they are sent along
    late_system: str = "system"  # the role that carries a system message in the middle
    strips_after: tuple[str, ...] = ()  # roles of new messages at which earlier thoughts vanish
    inline_thoughts: bool = False  # thoughts survive as <think> text only: the engine does not hand them on (LFM2.5)
    parallel_calls: bool = True  # the template can express two calls in one turn
    processed_logprobs: bool = True  # logprobs are of the distribution that was sampled from, temperature included
    verdicts: dict[str, str] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """The findings as plain data."""
        plain = asdict(self)
        for name in ("sentinels", "closers"):
            plain[name] = {shape: text.decode() for shape, text in plain[name].items()}
        return plain


def renderable(messages: Sequence[ChatMessage], template: Template, start: bool = True) -> list[ChatMessage]:
    """Messages as the template takes them: late system messages in a role it keeps, arguments always an object.

    ``start``: the first message is the first of the conversation.
    """
    fixed: list[ChatMessage] = []
    late = not start
    for message in messages:
        late = late or message["role"] != "system"
        if message["role"] == "system" and late:
            message = message | {"role": template.late_system}
        if any(not _is_object(call["function"]["arguments"]) for call in calls_of(message)):
            message = message | {"tool_calls": [_with_object(call) for call in calls_of(message)]}
        fixed.append(inlined(message) if template.inline_thoughts and message.get("reasoning") else message)
    return fixed


def inlined(message: ChatMessage) -> ChatMessage:
    """A message with its thoughts in the text."""
    thoughts = f"{THOUGHT_START}{message['reasoning']}{THOUGHT_END}"
    return {k: v for k, v in message.items() if k != "reasoning"} | {
        "content": thoughts + (message.get("content") or "")
    }


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if _is_object(arguments):
        return call
    wrapped = msgspec.json.encode({"unparsed": arguments}).decode()
    return call | {"function": call["function"] | {"arguments": wrapped}}


def shaped(calls: Sequence[tuple[str, str]], sentinel: str) -> ChatMessage:
    """An assistant message in the shape of an answer, with a sentinel where its last words stood.

    ``calls``: (id, name) of each tool call.
    """
    if not calls:
        return {"role": "assistant", "content": sentinel}
    words = ["x"] * (len(calls) - 1) + [sentinel]
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": f'{{"a":"{word}"}}'}}
            for (call_id, name), word in zip(calls, words, strict=True)
        ],
    }


async def suffix(
    engine: Engine, template: Template, answer: Answer, messages: list[ChatMessage], fields: bytes
) -> tuple[bytes, Frame]:
    """The ids from the turn end of ``answer`` on, when ``messages`` follow it, and what generate needs beside ids.

    Raises NoBridge.
    """
    shape = CALL if answer.tool_calls else TEXT
    sentinel = template.sentinels.get(shape)
    if sentinel is None:
        raise NoBridge("shape")
    calls = [(call.id, call.name) for call in answer.tool_calls]
    new = renderable(aligned(messages, calls), template, start=False)
    try:
        rendered = await engine.render([USER, shaped(calls, SENTINELS[0]), *new], fields)
    except ApiError as error:
        if error.fault is not Fault.INVALID:
            raise
        raise NoBridge("refused") from error
    after = _after(rendered.text, sentinel)
    return _unclosed(after, template.closers[shape]), rendered.frame


def aligned(messages: list[ChatMessage], calls: Sequence[tuple[str, str]]) -> list[ChatMessage]:
    """Tool results under ids that the harness made up itself get the ids of the calls that they answer, in order."""
    known = {call_id for call_id, _ in calls}
    open_ids = [call_id for call_id, _ in calls]
    fixed = []
    for message in messages:
        if message["role"] == "tool" and open_ids:
            call_id = message["tool_call_id"] if message["tool_call_id"] in known else open_ids[0]
            if call_id in open_ids:
                open_ids.remove(call_id)
            message = message | {"tool_call_id": call_id}
        fixed.append(message)
    return fixed


def _after(text: bytes, sentinel: bytes) -> bytes:
    """What follows the sentinel, at its first place: new messages, which may hold it too, come after it.

    Raises NoBridge when it is not there.
    """
    framed, mark = b",%b," % text, b",%b," % sentinel
    place = framed.find(mark)
    if place < 0:
        raise NoBridge("sentinel")
    return framed[place + len(mark) : -1]


def _unclosed(after: bytes, closer: bytes) -> bytes:
    """``after`` without the closing words of the turn. Raises NoBridge when it begins otherwise."""
    if not closer:
        return after
    if not after.startswith(closer + b","):
        raise NoBridge("closer")
    return after[len(closer) + 1 :]


def joined(sequence: bytes, ended: bool, follow: bytes) -> tuple[bytes, bool]:
    """A call's sequence and the suffix that follows it, and whether the sequence stands in it unchanged.

    ``ended``: the engine stopped at an end token, which the suffix repeats or replaces.
    """
    first, _, rest = follow.partition(b",")
    if ended and ids.last(sequence) == first:
        return ids.join((sequence, rest)), True
    if ended:
        return ids.join((ids.without_last(sequence), follow)), False
    return ids.join((sequence, follow)), True


class SelfTest:
    """Learns one template. ``thinking`` is the switch with which every render is made."""

    def __init__(self, engine: Engine, thinking: bool | None = None) -> None:
        self._engine = engine
        self._plain = engine.fields(None, thinking)
        self._tooled = engine.fields(PROBE_TOOL, thinking)
        self._stops: dict[bytes, bool] = {}
        self._frame = Frame()
        self._some_prompt = b""

    async def run(self) -> Template:
        """The findings. Raises ApiError only when the engine is away."""
        template = Template()
        try:
            await self._learn(template, TEXT, [], [USER | {"content": "alpha"}])
        except NoBridge as error:
            template.problem = f"plain text: {error}"
            return template
        template.with_tools = await self._depends_on_tools()
        try:
            await self._learn(template, CALL, [("call00000", "bash")], [_result(0, "alpha")])
        except NoBridge as error:
            template.verdicts["tool"] = f"no: {error}"
        for name, (calls, make) in PATTERNS.items():
            template.verdicts.setdefault(name, await self._verdict(template, calls, make))
        template.parallel_calls = template.verdicts["two tools"] not in ("raises", "sentinel lost")
        if template.verdicts["late system"] != "ok":
            template.late_system = "user"
        await self._thoughts(template)
        template.processed_logprobs = await self._processed()
        return template

    async def _render(self, messages: list[ChatMessage], fields: bytes | None = None) -> bytes:
        """The ids of a rendered conversation. Raises NoBridge when the template refuses it."""
        try:
            rendered = await self._engine.render(messages, self._plain if fields is None else fields)
        except ApiError as error:
            if error.fault is not Fault.INVALID:
                raise
            raise NoBridge("raises") from error
        self._frame, self._some_prompt = rendered.frame, rendered.text
        return rendered.text

    async def _two(
        self, calls: Sequence[tuple[str, str]], messages: list[ChatMessage], fields: bytes | None = None
    ) -> tuple[list[int], list[int]]:
        """(ids of the first sentinel, ids common to both renders after it)."""
        one, two = [
            ids.numbers(await self._render([USER, shaped(calls, sentinel), *messages], fields))
            for sentinel in SENTINELS
        ]
        head = _common(one, two)
        end = _common(one[head:][::-1], two[head:][::-1])
        if head == len(one) or not end:
            raise NoBridge("sentinel lost")
        return one[head : len(one) - end], one[len(one) - end :]

    async def _learn(
        self, template: Template, shape: str, calls: Sequence[tuple[str, str]], messages: list[ChatMessage]
    ) -> None:
        sentinel, after = await self._two(calls, messages)
        end = await self._turn_end(after[: WINDOWS[shape]])
        if end is None and shape == CALL:
            raise NoBridge("no turn end")
        template.sentinels[shape] = ids.text_of(sentinel)
        template.closers[shape] = ids.text_of(after[: end or 0])  # gpt-oss writes another end than it samples

    async def _turn_end(self, tokens: list[int]) -> int | None:
        """Where the first id stands at which the engine ends a sample."""
        for position, token in enumerate(tokens):
            if await self._stops_at(token):
                return position
        return None

    async def _stops_at(self, token: int) -> bool:
        """Whether the engine ends a sample at this id."""
        text = b"%d" % token
        if text not in self._stops:
            probe = {"allowed_token_ids": [token], "max_tokens": 2, "temperature": 1.0}
            sampled = await self._engine.generate(self._some_prompt, self._frame, probe, "selftest")
            self._stops[text] = sampled.finish_reason == "stop" and sampled.count == 1
        return self._stops[text]

    async def _depends_on_tools(self) -> bool:
        new = [USER | {"content": "alpha"}]
        try:
            return (await self._two([], new))[1] != (await self._two([], new, self._tooled))[1]
        except NoBridge:
            return True

    async def _verdict(
        self, template: Template, calls: Sequence[tuple[str, str]], make: Callable[[str], list[ChatMessage]]
    ) -> str:
        """ "ok", "raises", "lost" (the template drops or moves the message) or what else is wrong."""
        shape = CALL if calls else TEXT
        if shape not in template.sentinels:
            return "no tool calls"
        tails = []
        for text in ("alpha beta", "gamma delta epsilon"):
            try:
                _, after = await self._two(calls, make(text))
                one = await self._render([USER, shaped(calls, SENTINELS[0]), *make(text)])
                follow = _unclosed(_after(one, template.sentinels[shape]), template.closers[shape])
            except NoBridge as error:
                return str(error)
            if not ids.text_of(after).endswith(follow):
                return "one render differs from two"
            tails.append(follow)
        return "lost" if tails[0] == tails[1] else "ok"

    async def _thoughts(self, template: Template) -> None:
        """Where thoughts vanish, and whether they have to be put into the text to be kept at all.

        A template that keeps them in the text for ever (gpt-oss) does not know that they are thoughts.
        """
        template.strips_after = tuple([role for role in ("tool", "user") if await self._strips(role, False)])
        if "tool" not in template.strips_after or await self._strips("tool", True):
            return
        if await self._strips("user", True):
            template.inline_thoughts, template.strips_after = True, ("user",)

    async def _strips(self, role: str, inline: bool) -> bool:
        """Whether thoughts of an assistant message vanish once a message of ``role`` follows."""
        if role == "tool":
            message, new = shaped([("call00000", "bash")], "y"), _result(0, "out")
        else:
            message, new = shaped([], "y"), USER
        thinking = [message | {"reasoning": word} for word in SENTINELS]
        try:
            one, two = [await self._render([USER, inlined(m) if inline else m, new]) for m in thinking]
        except NoBridge:
            return False
        return one == two

    async def _processed(self) -> bool:
        """Doubling the temperature halves the gap between the two best logprobs only when it is applied to them."""
        plain, halved = [await self._engine.gap(self._some_prompt, self._frame, heat) for heat in (1.0, 2.0)]
        return plain < 1e-4 or halved < 0.75 * plain


def _result(index: int, text: str) -> ChatMessage:
    return {"role": "tool", "tool_call_id": f"call{index:05d}", "content": text}


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many leading ids are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


ONE, BOTH = [("call00000", "bash")], [("call00000", "bash"), ("call00001", "bash")]
PATTERNS: dict[str, tuple[list[tuple[str, str]], Callable[[str], list[ChatMessage]]]] = {
    "user": ([], lambda text: [{"role": "user", "content": text}]),
    "tool": (ONE, lambda text: [_result(0, text)]),
    "two tools": (BOTH, lambda text: [_result(0, text), _result(1, "o")]),
    "tool, user": (ONE, lambda text: [_result(0, "o"), {"role": "user", "content": text}]),
    "user, user": ([], lambda text: [{"role": "user", "content": "u"}, {"role": "user", "content": text}]),
    "late system": ([], lambda text: [{"role": "system", "content": text}, {"role": "user", "content": "u"}]),
    "tool, late system": (ONE, lambda text: [_result(0, "o"), {"role": "system", "content": text}]),
    "user, assistant, user": (
        [],
        lambda text: [USER, {"role": "assistant", "content": text}, {"role": "user", "content": "u"}],
    ),
}
