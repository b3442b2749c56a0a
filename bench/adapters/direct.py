"""The bare engine: the client itself renders, generates and derenders, as a proxy would do for it. The floor."""

from __future__ import annotations

import json
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from bench.contract import Opened, Place, ReadCall, expect_status
from bench.dialects import CHAT_TOOLS, Chat, Retry, Talk
from bench.filler import TOOL_NAMES
from bench.tokens import CLOSE
from bench.wire import Connection, Reply

PREFIX, HEALTH = "", "/health"
SENTINEL = "QUARTZ"


class _Trace(NamedTuple):
    """The last prompt of a conversation; each call's (bytes of it that were its prompt, sampled ids, logprobs)."""

    prompt: bytes
    calls: list[tuple[int, bytes, list[float]]]


_traces: dict[str, _Trace] = {}


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    token_ids: msgspec.Raw
    logprobs: _Logprobs


class _Generated(msgspec.Struct):
    choices: list[_Choice]


_RENDERED, _GENERATED = msgspec.json.Decoder(_Rendered), msgspec.json.Decoder(_Generated)
_SAMPLING = msgspec.json.encode({"temperature": 1.0, "max_tokens": 4096, "logprobs": 0, "detokenize": False})


class Bare(Chat):
    """A Chat conversation whose turns are the three calls; it shows the engine only what is new."""

    retry: ClassVar[Retry] = Retry(0.1, 1.0, 1)

    def __init__(self, key: str, prefix: str = "", extra: dict[str, Any] | None = None) -> None:
        super().__init__(key, prefix, extra)
        self._prompt = b""  # of the last turn, with what was sampled
        self._sent = 0  # bytes of the history that are in it

    async def ask(self, connection: Connection, body: bytes) -> Reply:
        prompt = self._prompt + await self._new_ids(connection, body) if self._prompt else b""
        prompt = prompt or await self._render(connection, body)
        form = b'{"model":"fake","token_ids":[%b],"sampling_params":%b,"cache_salt":"0"}'
        reply = await self._post(connection, "/inference/v1/generate", form % (prompt, _SAMPLING))
        choice = _GENERATED.decode(reply.body).choices[0]
        sampled = bytes(choice.token_ids)[1:-1]
        said = sampled.removesuffix(b",%d" % CLOSE)
        self._prompt = prompt + b"," + sampled
        self._record(prompt, sampled, [entry.logprob for entry in choice.logprobs.content])
        return await self._derender(connection, said)

    async def _new_ids(self, connection: Connection, body: bytes) -> bytes:
        """The ids of the messages since the last answer, by a short render around a sentinel."""
        answer_and_new = bytes(self.history[self._sent :])
        answer_end = answer_and_new.index(b'},{"role":"tool"') + 1
        new = answer_and_new[answer_end + 1 :]
        self._sent = len(self.history) + 1
        arguments = msgspec.json.encode(msgspec.json.encode({"a": SENTINEL}).decode())
        call = b'{"id":"%b","type":"function","function":{"name":"%b","arguments":%b}}'
        shape = call % (self.call_id.encode(), TOOL_NAMES[0].encode(), arguments)
        form = b'{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":null,"tool_calls":[%b]},%b]}'
        rendered = await self._render(connection, form % (shape, new))
        closed = b",%d," % CLOSE
        second = rendered.index(closed, rendered.index(closed) + 1)  # the sentinel's message is the second
        return rendered[second + len(closed) - 1 :]

    async def _render(self, connection: Connection, body: bytes) -> bytes:
        self._sent = self._sent or len(self.history) + 1
        reply = await self._post(connection, "/v1/chat/completions/render", body)
        return bytes(_RENDERED.decode(reply.body).token_ids)[1:-1]

    async def _derender(self, connection: Connection, said: bytes) -> Reply:
        tail = self._prompt[-48:].partition(b",")[2]
        form = (
            b'{"model":"fake","generate_response":{"choices":[{"index":0,"finish_reason":"stop","token_ids":[%b]}],'
            b'"prompt_token_ids":[%b]},"prompt_token_ids":[%b],"chat_request":{"messages":[],"tools":%b}}'
        )
        return await self._post(connection, "/v1/chat/completions/derender", form % (said, tail, tail, CHAT_TOOLS))

    def _record(self, prompt: bytes, sampled: bytes, logprobs: list[float]) -> None:
        calls = _traces[self.key].calls if self.key in _traces else []
        _traces[self.key] = _Trace(prompt, [*calls, (len(prompt), sampled, logprobs)])

    async def _post(self, connection: Connection, path: str, body: bytes) -> Reply:
        reply = await connection.request("POST", path, "", body)
        expect_status(reply.status, reply.body, 200)
        return reply


def _numbers(text: bytes) -> Any:
    return np.asarray(json.loads(b"[%b]" % text), dtype=np.int32)


DIALECTS: dict[str, type[Talk]] = {"chat": Bare}


def start_cmd(place: Place) -> None:
    return None


async def register(control: Connection, number: int) -> Opened:
    return Opened(f"direct{number}", control.host, control.port)


async def read_trace(control: Connection, key: str) -> list[ReadCall]:
    trace = _traces.pop(key)
    return [
        ReadCall(_numbers(trace.prompt[:length]), _numbers(sampled), np.asarray(logprobs, dtype=np.float32))
        for length, sampled, logprobs in trace.calls
    ]


async def delete(control: Connection, key: str) -> None:
    _traces.pop(key, None)
