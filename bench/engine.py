"""A fake vLLM: render, generate, derender and Chat Completions over the bench's tokens, after a chosen latency.

    python -m bench.engine PORT [--latency LOW HIGH] [--tokens LOW HIGH]

Shapes are those of vLLM 0.32. GET /stats tells what it saw, GET /prompts a digest of each prompt by seed, GET /reset
forgets both. A raw asyncio protocol on uvloop, because its cost must stay small beside the proxy's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import uvloop
import xxhash

from bench import tokens
from bench.limits import raise_open_files
from bench.tokens import CLOSE, ID_PIECES, LOGPROB_DECIMALS, MARK, POOL, Pieces, Span

MODEL = "fake"
WINDOW = 262_144
KEY_IDS = 4  # so many leading ids identify a sampled answer
TOKEN_IDS = re.compile(rb'"token_ids":\s*\[')


class Function(msgspec.Struct):
    """A function that a tool offers or a call names."""

    name: str
    arguments: str = ""


class Tool(msgspec.Struct):
    """A tool, or a call of one."""

    function: Function


class Message(msgspec.Struct):
    """A message of a chat request; what the template does not show is not read."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    reasoning: str | None = None
    tool_calls: list[Tool] | None = None


class ChatBody(msgspec.Struct):
    """A request to render, or to answer at once."""

    messages: list[Message] = []
    tools: list[Tool] | None = None
    tool_choice: Any = None
    logprobs: bool = False
    return_token_ids: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class SamplingParams(msgspec.Struct):
    """The parameters of generate that matter here."""

    max_tokens: int = 1 << 20
    temperature: float = 1.0
    logprobs: int | None = None
    allowed_token_ids: list[int] | None = None


class GenerateBody(msgspec.Struct):
    """A request to generate, without its ids."""

    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    cache_salt: str = ""


class GeneratedChoice(msgspec.Struct):
    """The choice that derender is to parse."""

    token_ids: msgspec.Raw


class GeneratedReply(msgspec.Struct):
    """What generate answered, as derender gets it."""

    choices: list[GeneratedChoice]


class DerenderBody(msgspec.Struct):
    """A request to derender."""

    generate_response: GeneratedReply
    chat_request: ChatBody = msgspec.field(default_factory=ChatBody)
    prompt_tokens: int = 0


class Reply(NamedTuple):
    """A reply, sent after ``delay_s``."""

    body: bytes
    delay_s: float = 0.0
    status: int = 200


@dataclass
class Stats:
    """What the engine saw since the last reset; ``inflight`` and ``conns`` are of now."""

    requests: int = 0
    generated: int = 0
    inflight: int = 0
    max_inflight: int = 0
    conns: int = 0
    max_conns: int = 0
    total_conns: int = 0
    aborted: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    salts: dict[str, int] = field(default_factory=dict)


class Sample(NamedTuple):
    """One sampled answer."""

    seed: int
    span: Span
    latency_s: float
    finish_reason: str

    @property
    def ids(self) -> bytes:
        return ID_PIECES.cut(self.span) + (b",%d" % CLOSE if self.finish_reason == "stop" else b"")

    @property
    def size(self) -> int:
        return self.span.size + (self.finish_reason == "stop")


def _entries(kind: bytes) -> Callable[[Sample], bytes]:
    """The logprob entries of a sample, of a given form."""
    pieces = Pieces(kind % (token, logprob) for token, logprob in zip(POOL.tolist(), _decimals(), strict=True))
    close = kind % (CLOSE, b"%r" % tokens.CLOSE_LOGPROB)

    def of(sample: Sample) -> bytes:
        return pieces.cut(sample.span) + (b"," + close if sample.finish_reason == "stop" else b"")

    return of


def _decimals() -> list[bytes]:
    return [b"%r" % logprob for logprob in LOGPROB_DECIMALS]


GENERATE_ENTRIES = _entries(b'{"token_id":%d,"logprob":%b,"rank":1,"top_logprobs":[]}')
CHAT_ENTRIES = _entries(b'{"token":"token_id:%d","logprob":%b,"bytes":null,"top_logprobs":[]}')


class FakeEngine:
    """Answers requests; knows nothing of sockets."""

    def __init__(self, latency_s: tuple[float, float], sizes: tuple[int, int]) -> None:
        self.stats = Stats()
        self._latency_s, self._sizes = latency_s, sizes
        self._random = random.Random(7)
        self._seeds = itertools.count(1)
        self._samples: dict[bytes, Sample] = {}  # by the first ids
        self._prompts: dict[int, str] = {}
        self._routes: dict[tuple[bytes, bytes], Callable[[bytes], Reply]] = {
            (b"POST", b"/v1/chat/completions/render"): self._render,
            (b"POST", b"/inference/v1/generate"): self._generate,
            (b"POST", b"/v1/chat/completions/derender"): self._derender,
            (b"POST", b"/v1/chat/completions"): self._chat,
            (b"GET", b"/v1/models"): lambda _: Reply(MODELS),
            (b"GET", b"/health"): lambda _: Reply(b""),
            (b"GET", b"/stats"): lambda _: Reply(msgspec.json.encode(asdict(self.stats))),
            (b"GET", b"/prompts"): lambda _: Reply(msgspec.json.encode(self._prompts)),
            (b"GET", b"/reset"): self._reset,
        }

    def answer(self, method: bytes, path: bytes, body: bytes) -> Reply:
        """The reply to one request."""
        handler = self._routes.get((method, path.partition(b"?")[0]))
        if handler is None:
            return _refusal(404, "no such route")
        try:
            return handler(body)
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            return _refusal(400, repr(error))

    def _reset(self, _: bytes) -> Reply:
        self.stats = Stats(inflight=self.stats.inflight, conns=self.stats.conns, max_conns=self.stats.conns)
        self._prompts.clear()
        return Reply(b"{}")

    def _render(self, body: bytes) -> Reply:
        text = render(CHAT.decode(body))
        return Reply(
            b'{"request_id":"render","token_ids":[%b],"token_offsets":null,"sampling_params":{"n":1,"temperature":1.0,'
            b'"stop":[],"stop_token_ids":[],"max_tokens":%d,"skip_special_tokens":true},"reasoning_ended":null,'
            b'"reasoning_parser_kwargs":null,"model":"fake","stream":false}' % (text, WINDOW)
        )

    def _generate(self, body: bytes) -> Reply:
        found = TOKEN_IDS.search(body)
        if found is None:
            return _refusal(400, "token_ids are missing")
        start, end = found.end(), body.index(b"]", found.end())
        prompt = body[start:end]
        wish = GENERATE.decode(body[:start] + body[end:])
        if wish.sampling_params.allowed_token_ids:
            return self._forced(wish)
        sample = self._sample(prompt, wish.sampling_params.max_tokens)
        self.stats.salts[wish.cache_salt] = self.stats.salts.get(wish.cache_salt, 0) + 1
        entries = GENERATE_ENTRIES(sample) if not wish.sampling_params.logprobs else _with_tops(sample, wish)
        return Reply(_generated(sample.ids, entries, sample.finish_reason, wish, _count(prompt)), sample.latency_s)

    def _sample(self, prompt: bytes, max_tokens: int) -> Sample:
        size = self._random.randint(*self._sizes)
        finish = "stop" if size < max_tokens else "length"
        share = min(1.0, max_tokens / self._sizes[0])  # a probe for a token or two is answered soon
        latency_s = round(self._random.uniform(*self._latency_s) * share, 3)
        size = min(size, max_tokens)
        seed = self._unlike_others(size)
        sample = Sample(seed, tokens.sampled_span(seed, size), latency_s, finish)
        self._samples[_key(sample.ids)] = sample
        self._prompts[seed] = digest(prompt.replace(b" ", b"") if b" " in prompt else prompt)
        self.stats.generated += 1
        return sample

    def _unlike_others(self, size: int) -> int:
        """The next seed whose sample begins as none before."""
        for seed in self._seeds:
            if _key(ID_PIECES.cut(tokens.sampled_span(seed, size))) not in self._samples:
                return seed
        raise AssertionError("seeds never end")

    def _forced(self, wish: GenerateBody) -> Reply:
        """A probe: one of the allowed ids, again and again until it is the stop id."""
        token = (wish.sampling_params.allowed_token_ids or [CLOSE])[0]
        count = 1 if token == CLOSE else wish.sampling_params.max_tokens
        entry = b'{"token_id":%d,"logprob":0.0,"rank":1,"top_logprobs":[]}' % token
        ids, entries = b",".join([b"%d" % token] * count), b",".join([entry] * count)
        return Reply(_generated(ids, entries, "stop" if token == CLOSE else "length", wish, 1))

    def _derender(self, body: bytes) -> Reply:
        wish = DERENDER.decode(body)
        ids = bytes(wish.generate_response.choices[0].token_ids)[1:-1]
        sample = self._samples.get(_key(ids))
        if not ids:
            return _refusal(400, "choice 0 has empty or null token_ids")
        if sample is None:
            content, calls = f"<{ids.decode()}>", b""
        else:
            calls = _called(sample, wish.chat_request)
            content = _said(sample, calls)
        return Reply(_completion(content, calls, "stop", wish.prompt_tokens, ids.count(b",") + 1))

    def _chat(self, body: bytes) -> Reply:
        wish = CHAT.decode(body)
        prompt = render(wish)
        sample = self._sample(prompt, wish.max_completion_tokens or wish.max_tokens or WINDOW)
        calls = _called(sample, wish)
        finish = "tool_calls" if calls and sample.finish_reason == "stop" else sample.finish_reason
        logprobs = b'{"content":[%b]}' % CHAT_ENTRIES(sample) if wish.logprobs else b"null"
        ids = b',"token_ids":[%b]' % sample.ids if wish.return_token_ids else b""
        whole = _completion(_said(sample, calls), calls, finish, _count(prompt), sample.size, logprobs, ids)
        if wish.return_token_ids:
            whole = whole[:-1] + b',"prompt_token_ids":[%b]}' % prompt
        return Reply(whole, sample.latency_s)


CHAT = msgspec.json.Decoder(ChatBody)
GENERATE = msgspec.json.Decoder(GenerateBody)
DERENDER = msgspec.json.Decoder(DerenderBody)
MODELS = msgspec.json.encode(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": WINDOW}]}
)  # fmt: skip


def render(request: ChatBody) -> bytes:
    """The prompt of a conversation, as ids."""
    return tokens.prompt_text(map(_shown, request.messages), len(request.tools or ()))


def digest(prompt: bytes) -> str:
    """Identifies a prompt, given as ids."""
    return xxhash.xxh3_64_hexdigest(prompt)


def _shown(message: Message) -> bytes:
    """One message as ids. An answer that was sampled here, text and call, is shown by the ids it was sampled with."""
    text = tokens.flat(message.content)
    mark = MARK.search(text) if message.role == "assistant" else None
    if mark:
        seed, size, _, call_size = map(int, mark.groups())
        span = tokens.sampled_span(seed, size)
        shown = span if message.tool_calls else span.first(size - call_size)
        return tokens.message_text("assistant", [ID_PIECES.cut(shown)])
    parts = [ID_PIECES.cut(tokens.text_span(text.encode()))] if text else []
    if message.reasoning:
        thought = ID_PIECES.cut(tokens.text_span(message.reasoning.encode()))
        parts.insert(0, b"%d,%b,%d" % (tokens.THOUGHT, thought, tokens.THOUGHT_END))
    parts += [tokens.call_text(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return tokens.message_text(message.role, parts)


def _key(ids: bytes) -> bytes:
    return b",".join(ids.split(b",", KEY_IDS)[:KEY_IDS])


def _count(ids: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(ids, dtype=np.uint8) == ord(","))) + 1


def _said(sample: Sample, calls: bytes) -> str:
    call_size = min(tokens.CALL_SIZE, sample.span.size - 1) if calls else 0
    return tokens.answer_text(sample.seed, sample.span.size, round(sample.latency_s * 1000), call_size)


def _called(sample: Sample, request: ChatBody) -> bytes:
    """The tool call of an answer, as JSON; b"" when no tool may be called."""
    if not request.tools or request.tool_choice == "none":
        return b""
    function = {"name": request.tools[0].function.name, "arguments": tokens.answer_arguments(sample.seed)}
    return msgspec.json.encode({"id": f"call_{sample.seed:024d}", "type": "function", "function": function})


def _with_tops(sample: Sample, wish: GenerateBody) -> bytes:
    """Logprob entries with the best tokens; the temperature shows in the gap between them."""
    params = wish.sampling_params
    listed = []
    for token, logprob in zip(sample.span.ids.tolist(), LOGPROB_DECIMALS[sample.span.offset :], strict=False):
        tops = [
            {"token_id": token + rank, "logprob": logprob - rank / params.temperature, "rank": rank + 1}
            for rank in range(params.logprobs or 0)
        ]
        listed.append({"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": tops})
    if sample.finish_reason == "stop":
        listed.append({"token_id": CLOSE, "logprob": tokens.CLOSE_LOGPROB, "rank": 1, "top_logprobs": []})
    return msgspec.json.encode(listed)[1:-1]


def _generated(ids: bytes, entries: bytes, finish: str, wish: GenerateBody, prompt_tokens: int) -> bytes:
    count = ids.count(b",") + 1
    salt = msgspec.json.encode(wish.cache_salt)
    return (
        b'{"request_id":"generate","choices":[{"index":0,"finish_reason":"%b","stop_reason":null,"token_ids":[%b],'
        b'"logprobs":{"content":[%b]},"weight_versions":[{"version":%b,"start":0,"end":%d}],"routed_experts":null}],'
        b'"prompt_token_ids":null,"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":0}}}'
    ) % (finish.encode(), ids, entries, salt, count, prompt_tokens, count, prompt_tokens + count)


def _completion(
    content: str, calls: bytes, finish: str, prompt_tokens: int, count: int, logprobs: bytes = b"null", ids: bytes = b""
) -> bytes:
    return (
        b'{"id":"chatcmpl-fake","object":"chat.completion","created":1,"model":"fake","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":%b,"reasoning":null,"tool_calls":[%b]},"logprobs":%b,"finish_reason":"%b"%b}],'
        b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":null}}'
    ) % (
        msgspec.json.encode(content), calls, logprobs, finish.encode(), ids, prompt_tokens, count,
        prompt_tokens + count,
    )  # fmt: skip


def _refusal(status: int, message: str) -> Reply:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return Reply(msgspec.json.encode({"error": error}), 0.0, status)


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._need = 0  # bytes that must be there before parsing is worth while
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        stats = self._engine.stats
        stats.conns += 1
        stats.total_conns += 1
        stats.max_conns = max(stats.max_conns, stats.conns)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.stats.conns -= 1
        if self._waiting is not None:
            self._waiting.cancel()
            self._engine.stats.inflight -= 1
            self._engine.stats.aborted += 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= self._need and self._waiting is None:
            self._take()

    def _take(self) -> None:
        """Answer the request in the buffer, if it is whole."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        size = _content_length(head)
        self._need = end + 4 + size
        if len(self._buffer) < self._need:
            return
        body = bytes(memoryview(self._buffer)[end + 4 : self._need])
        del self._buffer[: self._need]
        self._need = 0
        self._answer(head.split(b" ", 2), body)

    def _answer(self, request_line: list[bytes], body: bytes) -> None:
        stats = self._engine.stats
        stats.bytes_in += len(body)
        stats.requests += 1
        reply = self._engine.answer(request_line[0], request_line[1], body)
        if not reply.delay_s:
            self._send(reply)
            return
        stats.inflight += 1
        stats.max_inflight = max(stats.max_inflight, stats.inflight)
        self._waiting = asyncio.get_running_loop().call_later(reply.delay_s, self._done, reply)

    def _done(self, reply: Reply) -> None:
        self._waiting = None
        self._engine.stats.inflight -= 1
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        assert self._transport is not None
        self._engine.stats.bytes_out += len(reply.body)
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (reply.status, len(reply.body)) + reply.body)
        if self._buffer:
            self._take()


def _content_length(head: bytes) -> int:
    lowered = head.lower()
    at = lowered.find(b"content-length:")
    return int(lowered[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def serve(engine: FakeEngine, port: int) -> None:
    """Serve on 127.0.0.1 until cancelled."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--latency", type=float, nargs=2, default=(0.5, 2.0), metavar=("LOW", "HIGH"), help="seconds")
    parser.add_argument("--tokens", type=int, nargs=2, default=(128, 512), metavar=("LOW", "HIGH"))
    options = parser.parse_args()
    raise_open_files()
    engine = FakeEngine(tuple(options.latency), tuple(options.tokens))
    uvloop.run(serve(engine, options.port))


if __name__ == "__main__":
    main()
