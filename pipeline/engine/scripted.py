"""A scripted engine in place of vLLM, for checks and tests: render, generate and derender over a toy template.

Token ids are bytes and a few marks; the template is hermes-like and comes in variants (``Template``). What the model
"samples" is scripted text, byte by byte; the parser spells arguments in its own way, so that only exact ids reproduce
what was sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

END, ASSISTANT = 1000, 1001
ROLES = {"system": 1002, "user": 1003, "assistant": ASSISTANT, "tool": 1004}
END_OF_TEXT = 1005  # the model's other stop id, which the template never writes
STOPS = (END, END_OF_TEXT)
MARKS = {END: "<|end|>", END_OF_TEXT: "<|endoftext|>"} | {mark: f"<|{role}|>" for role, mark in ROLES.items()}
WINDOW = 200_000
THOUGHT = b"<think>"
GAP = 2.0  # between the two best logprobs at temperature 1


@dataclass(frozen=True)
class Template:
    """A chat template's habits. ``gap`` follows every end mark of the history, but is never sampled."""

    gap: str = ""
    strips_thoughts: bool = False  # of every turn before the last user message
    late_system: str = "keeps"  # or "raises", "hoists"
    opens_thought: str = "never"  # the generation prompt; or "unless off" (the request's switch), "always"


@dataclass
class Scripted:
    """One answer of the engine: ``text`` is sampled byte by byte, then the end mark unless it was cut."""

    text: str = "ok"
    finish: str = "stop"
    delay_s: float = 0.0
    gate: asyncio.Event | None = None  # ends the delay when it is set
    version: str | None = None  # None: the engine's
    synced: tuple[int, str] | None = None  # a sync lands before this token: from there on it is another version's
    drop: bool = False  # close the connection instead of answering
    status: int = 200
    error: str = "scripted"  # the message that goes with another status
    retry_after: int | None = None
    end: int = END
    seed: int = 0  # shifts the logprobs, so that they tell samples apart


class Sample(NamedTuple):
    """What the engine answered, as ids."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


class Refused(Exception):
    """The template raised."""


@dataclass
class FakeEngine:
    """Serves on a free port; ``script`` is used up call by call, then ``answers`` is asked, and else it is "ok".

    ``answers`` makes the answer from a prompt's ids: for clients whose calls arrive in any order. Probes of a
    self-test (forced ids, more than one logprob) leave the script alone and stand in ``probes`` only.
    """

    version: str | None = None  # None: named as the request's salt
    template: Template = Template()
    answers: Callable[[list[int]], Scripted] | None = None
    script: deque[Scripted] = field(default_factory=deque)
    generated: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rendered: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    aborted: int = 0
    running: int = 0
    port: int = 0
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close every connection too, those that a client keeps for its next call."""
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.lower().split("\r\n")
                length = next((int(line[15:]) for line in lines if line.startswith("content-length")), 0)
                self.heads.append(head)
                body = json.loads(await reader.readexactly(length) or b"null")
                reply = await self._answer(head.split(" ")[1], body, reader)
                if reply is None:
                    break
                status, payload, *more = reply
                data = json.dumps(payload).encode()
                extra = "".join(f"{name}: {value}\r\n" for name, value in more).encode()
                writer.write(b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n" % (status, extra, len(data)) + data)
                await writer.drain()

    async def _answer(self, path: str, body: Any, reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "max_model_len": WINDOW}]}
        if path == "/detokenize":
            return 200, {"prompt": decoded(body["tokens"])}
        if path.endswith("/derender"):
            return 200, derender(body)
        if path.endswith("/render"):
            return self._render(body)
        return await self._generate(body, reader)

    def _render(self, body: Any) -> tuple[Any, ...]:
        self.rendered.append(body)
        try:
            ids = render(body["messages"], self.template)
        except Refused as error:
            return 400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}
        ids += self._thought(body.get("chat_template_kwargs") or {})
        return 200, {"token_ids": ids, "sampling_params": {"top_k": 20, "temperature": 0.1}}

    def _thought(self, switches: dict[str, Any]) -> bytes:
        """What the generation prompt begins for the model."""
        off = switches.get("enable_thinking") is False
        return THOUGHT if self.template.opens_thought in ("always", *(() if off else ("unless off",))) else b""

    async def _generate(self, body: Any, reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
        if _is_probe(body["sampling_params"]):
            self.probes.append(body)
            return 200, _probed(body)
        self.generated.append(body)
        answer = self._next(body["token_ids"])
        self.running += 1
        try:
            if answer.delay_s and await self._left(reader, answer):
                self.aborted += 1
                return None
        finally:
            self.running -= 1
        if answer.drop:
            return None
        if answer.status != 200:
            again = [("retry-after", answer.retry_after)] if answer.retry_after else []
            return answer.status, {"error": {"message": answer.error}}, *again
        return 200, self._sampled(answer, body)

    def _next(self, prompt: list[int]) -> Scripted:
        if self.script:
            return self.script.popleft()
        return self.answers(prompt) if self.answers else Scripted()

    def _sampled(self, answer: Scripted, body: Any) -> dict[str, Any]:
        whole = list(answer.text.encode()) + [answer.end] * (answer.finish == "stop")
        ids = whole[: body["sampling_params"]["max_tokens"]]
        finish = answer.finish if answer.finish != "stop" or ids[-1:] == [answer.end] else "length"
        logprobs = [logprob(position, answer.seed) for position in range(len(ids))]
        self.samples.append(Sample(body["token_ids"], ids, logprobs))
        choice = _choice(ids, finish, [{"token_id": i, "logprob": p} for i, p in zip(ids, logprobs, strict=True)])
        choice["stop_reason"] = answer.end if finish == "stop" and answer.end != END else None
        version = answer.version or self.version or body["cache_salt"]
        start, newer = answer.synced or (len(ids), version)
        spans = [(version, 0, start), (newer, start, len(ids))]
        choice["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in spans if s < e]
        return {"choices": [choice], "usage": {"prompt_tokens_details": None}}

    @staticmethod
    async def _left(reader: asyncio.StreamReader, answer: Scripted) -> bool:
        """Wait as long as the answer takes; True when the client leaves first."""
        leaves = asyncio.ensure_future(reader.read(1))
        ends: set[asyncio.Future[Any]] = {leaves}
        if answer.gate is not None:
            ends.add(asyncio.ensure_future(answer.gate.wait()))
        done, waiting = await asyncio.wait(ends, timeout=answer.delay_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return leaves in done and leaves.result() == b""


def logprob(position: int, seed: int = 0) -> float:
    """Exact in float32, and told apart by the seed."""
    return -0.5 - position / 64 - (seed % 64) / 4096


def _is_probe(sampling: dict[str, Any]) -> bool:
    return bool(sampling.get("allowed_token_ids")) or (sampling.get("logprobs") or 0) > 1


def _probed(body: Any) -> dict[str, Any]:
    """The forced id (else END_OF_TEXT) until it is a stop id or there are ``max_tokens``; logprobs at temperature."""
    sampling = body["sampling_params"]
    forced = (sampling.get("allowed_token_ids") or [END_OF_TEXT])[0]
    stopped = forced in STOPS
    ids = [forced] * (1 if stopped else sampling["max_tokens"])
    second = {"token_id": 0, "logprob": -0.1 - GAP / (sampling.get("temperature") or 1.0)}
    first = {"token_id": forced, "logprob": -0.1}
    choice = _choice(ids, "stop" if stopped else "length", [first | {"top_logprobs": [first, second]} for _ in ids])
    choice["stop_reason"] = forced if stopped and forced != END else None
    return {"choices": [choice], "usage": None}


def _choice(ids: list[int], finish: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"index": 0, "finish_reason": finish, "token_ids": ids, "logprobs": {"content": logprobs}}


def call_text(name: str, arguments: Any) -> str:
    """A tool call as the toy model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def render(messages: list[dict[str, Any]], template: Template = Template()) -> list[int]:
    """The toy template: role mark, thoughts, content and calls as bytes, end mark; then the generation prompt.

    Raises Refused as a template's ``raise_exception`` does.
    """
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    ids: list[int] = []
    for index, message in enumerate(_placed(messages, template)):
        stripped = template.strips_thoughts and index < last_user
        text = _thoughts(message, stripped) + _text(message.get("content"))
        for call in message.get("tool_calls") or ():
            text += call_text(call["function"]["name"], json.loads(call["function"]["arguments"]))
        ids += [ROLES[message["role"]], *text.encode(), END, *template.gap.encode()]
    return [*ids, ASSISTANT]


def _placed(messages: list[dict[str, Any]], template: Template) -> list[dict[str, Any]]:
    """The messages in the template's order."""
    late = [i for i, message in enumerate(messages) if message["role"] == "system" and i]
    if late and template.late_system == "raises":
        raise Refused("System message must be at the beginning.")
    if template.late_system == "hoists":
        return sorted(messages, key=lambda message: message["role"] != "system")
    return messages


def _thoughts(message: dict[str, Any], stripped: bool) -> str:
    thoughts = message.get("reasoning")
    return f"<think>{thoughts}</think>" if thoughts and not stripped else ""


def decoded(ids: Iterable[int]) -> str:
    """Ids as text, marks written out."""
    data = b"".join(MARKS[i].encode() if i in MARKS else bytes([i]) for i in ids)
    return data.decode(errors="replace")


def parsed(prompt: list[int], template: Template) -> list[tuple[str, str]]:
    """The (role, text) of each message of a prompt. Raises ValueError where it is not as the template writes it."""
    roles = {mark: role for role, mark in ROLES.items()}
    gap = list(template.gap.encode())
    messages, position = [], 0
    while position < len(prompt) - 1:
        end = prompt.index(END, position)
        text = prompt[position + 1 : end]
        if prompt[position] not in roles or any(i > 255 for i in text) or prompt[end + 1 : end + 1 + len(gap)] != gap:
            raise ValueError(decoded(prompt[position : end + 9]))
        messages.append((roles[prompt[position]], decoded(text)))
        position = end + 1 + len(gap)
    if prompt[position:] != [ASSISTANT]:
        raise ValueError(decoded(prompt[position:]))
    return messages


def derender(body: dict[str, Any]) -> dict[str, Any]:
    """A hermes-like parser: thoughts and whole calls are taken out of the text, anything else stays in it.

    Arguments come back in the parser's own spelling; where the model wrote a string, it is passed on as it is.
    """
    text = decoded(body["generate_response"]["choices"][0]["token_ids"])
    reasoning = None
    if text.startswith("<think>"):
        reasoning, _, text = text.removeprefix("<think>").partition("</think>")
    content, _, rest = text.partition("<tool_call>")
    calls = []
    try:
        for part in rest.split("<tool_call>") if rest else ():
            call = json.loads(part.removesuffix("</tool_call>"))
            arguments = call["arguments"]
            spelt = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append({"id": "theirs", "type": "function", "function": {"name": call["name"], "arguments": spelt}})
    except ValueError:
        content, calls = text, []
    message = {"content": content or None, "reasoning": reasoning, "tool_calls": calls}
    return {"choices": [{"index": 0, "message": message}]}


def _text(content: Any) -> str:
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise Refused("this model does not take images")
        return "\n".join(part["text"] for part in content)
    return content or ""
