"""Scripted clients that replay history, fail and retry as the ten harnesses do; what they say is filler text.

``RECIPES`` is the table of habits, ``Agent`` the loop that they share, ``Stage`` the engine's side of the play.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from harness_wire import (
    AnthropicWire,
    Call,
    ChatWire,
    Entry,
    GeminiWire,
    Late,
    Prompt,
    ResponsesWire,
    Results,
    Said,
    Torn,
    Traits,
    User,
    Wire,
    compact,
    dumps,
    parsed,
    user,
)

from pipeline.capture.rows import rows
from pipeline.engine.scripted import ASSISTANT, Scripted, decoded
from pipeline.records import Trace

MODEL = "maker/model-1"
RETRIED = (408, 409, 429, 500, 502, 503, 504, 529)
PLAY = re.compile(r"\[\[(.+?)\]\]")
NONCE = re.compile(r"§(\d+)§")
CAFE = "caf\u00e9 \u2192 \U0001f600"


@dataclass(frozen=True)
class Recipe:
    """The habits of one harness.

    ``retries``: seconds before each retry of a failed request. ``malformed``, ``empty``, ``length``: what follows such
    an answer: "error" (a tool's error, the call rewritten by ``rewrites``), "reask" (the same prompt), "more" (the
    same, with more tokens), "append" (a text beside the last user message), "drop" (the turn is replaced by a user
    message), "resume" (a user message), "end". ``agent_headers`` mark a sub-agent's requests.
    """

    wire: type[Wire]
    traits: Traits
    retries: tuple[float, ...]
    malformed: str
    empty: str
    length: str
    system: str = "You are a coding agent."
    tools: tuple[str, ...] = ("shell", "read", "note")
    rewrites: Callable[[Call], Call] = lambda call: call
    torn: str = "retry"  # or "resume", "end"
    json_in_text: bool = False  # commands stand in the text
    background: bool = False  # sub-agents run beside their parent
    headers: dict[str, str] = field(default_factory=dict)
    agent_headers: dict[str, str] = field(default_factory=dict)
    compacts: str = ""  # "in_context" (one more user message), "aside" (without tools)


def emptied(call: Call) -> Call:
    return dataclasses.replace(call, arguments="{}")


def renamed(call: Call) -> Call:
    why = {"tool": call.name, "error": "arguments are no JSON"}
    return dataclasses.replace(call, name="invalid", arguments=json.dumps(why))


def marked(call: Call) -> Call:
    why = {"_malformed_tool_call": True, "raw": call.arguments}
    return dataclasses.replace(call, arguments=json.dumps(why))


RECIPES: dict[str, Recipe] = {
    "claude": Recipe(
        AnthropicWire,
        Traits(
            extra={
                "thinking": {"type": "adaptive"},
                "metadata": {"user_id": '{"device_id": "d"}'},
                "output_config": {"effort": "high"},
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            }
        ),
        retries=(0.6, 1.3, 2.5, 4, 9, 16, 36, 34, 34),
        malformed="error",
        empty="append",
        length="resume",
        background=True,
        headers={"x-stainless-retry-count": "0", "anthropic-beta": "one,two"},
        agent_headers={"x-claude-code-agent-id": "agent-1"},
        compacts="in_context",
    ),
    "codex": Recipe(
        ResponsesWire,
        Traits(
            extra={
                "parallel_tool_calls": True,
                "reasoning": {"summary": "auto"},
                "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": "thread",
                "client_metadata": {"a": "b"},
            }
        ),
        retries=(0.2, 0.4, 0.8, 1.6, 3.2) * 5,
        malformed="error",
        empty="end",
        length="end",
        tools=("shell", "read", "note", "patch", "crew", "web_search"),
        background=True,
        headers={"thread-id": "main", "x-codex-turn-metadata": "{}"},
        agent_headers={"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "main", "thread-id": "sub"},
        compacts="aside",
    ),
    "gemini": Recipe(
        GeminiWire, Traits(), retries=(4.3, 10, 18, 33, 22, 21, 20, 20, 20), malformed="reask", empty="append",
        length="end", torn="end",
    ),
    "gemini-ids": Recipe(
        GeminiWire, Traits(own_ids=True), retries=(4.3, 10, 18, 33, 22, 21, 20, 20, 20), malformed="reask",
        empty="append", length="end", torn="end",
    ),
    "qwen": Recipe(
        ChatWire, Traits(arguments=compact, result_parts=True), retries=(0.5, 1, 2, 4, 8, 8) * 4, malformed="reask",
        empty="reask", length="more", torn="resume", background=True, compacts="aside",
    ),
    "opencode": Recipe(
        ChatWire, Traits(arguments=compact, empty='""', extra={"tool_choice": "auto"}), retries=(2.2, 4, 8.6, 19, 40),
        malformed="error", empty="end", length="end", rewrites=renamed, headers={"x-session-id": "main"},
        agent_headers={"x-session-id": "sub", "x-parent-session-id": "main"}, compacts="aside",
    ),
    "pi": Recipe(
        ChatWire, Traits(arguments=compact, max_tokens="max_completion_tokens", extra={"store": False}),
        retries=(2.1, 4, 8), malformed="error", empty="end", length="end", rewrites=emptied,
    ),
    "mini": Recipe(
        ChatWire, Traits(streams=False, max_tokens=""), retries=(0.45, 1, 4) * 10, malformed="drop", empty="drop",
        length="drop", tools=("shell",),
    ),
    "vibe": Recipe(
        ChatWire, Traits(indexed=True, empty='""', extra={"temperature": 1.0}), retries=(0.6, 1, 2, 4, 8, 16, 29) * 2,
        malformed="error", empty="end", length="drop", rewrites=emptied, compacts="in_context",
    ),
    "openhands": Recipe(
        ChatWire,
        Traits(
            streams=False, arguments=dumps, empty="missing", parts=True, result_parts=True, thoughts=False,
            max_tokens="", extra={"reasoning_effort": "high", "prompt_cache_key": "k"},
        ),
        retries=(8.1, 16, 32, 64, 64), malformed="error", empty="drop", length="end", rewrites=marked,
    ),
    "terminus": Recipe(
        ChatWire, Traits(streams=False, max_tokens=""), retries=(0.4, 1, 4) * 9, malformed="drop", empty="drop",
        length="resume", system="", tools=(), json_in_text=True, compacts="aside",
    ),
}  # fmt: skip


class Ended(Exception):
    """The harness gave up; the argument says why."""


@dataclass
class Asked:
    """One answer that a harness got: to which history, and the history's texts in order."""

    said: Said
    texts: list[str]
    kept: bool = True


@dataclass
class Agent:
    """One harness at work, or one of its sub-agents. ``pace`` scales its waits before retries."""

    name: str
    key: str
    http: httpx.AsyncClient
    play: str  # names the script in the engine's stage
    pace: float = 0.02
    sub: bool = False
    history: list[Entry] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    retried: int = 0
    outputs: Callable[[Call], str] = lambda call: f"ran {call.name} {CAFE}\n{call.arguments}\n"

    def __post_init__(self) -> None:
        self.recipe = RECIPES[self.name]
        self.wire = self.recipe.wire(self.recipe.traits)
        tools = self.recipe.tools[:1] if self.sub else self.recipe.tools
        self.prompt = Prompt(self.recipe.system + " Sub-agent." * self.sub, tools)

    async def run(self, task: str = "do it") -> str:
        """Work on a task until the model ends; its last text. Raises Ended."""
        self.history.append(user(f"[[{self.play}]] " + task))
        return await self.go_on()

    async def go_on(self) -> str:
        while True:
            said = await self.ask()
            if said is None:
                continue
            if not self._goes_on(said):
                return said.text

    async def ask(self) -> Said | None:
        """One answer, put into the history as the harness keeps it; None when it asks again instead."""
        said = await self.exchange(self.prompt)
        fault = self._fault(said)
        if fault:
            return self._cope(said, fault)
        self.history.append(said)
        return said

    def _goes_on(self, said: Said) -> bool:
        if self.recipe.json_in_text:
            done = sum('"task_complete": true' in entry.text for entry in self.history if isinstance(entry, Said))
            if done < 2:
                self.history.append(user(f"terminal: {CAFE} {len(self.history)}\n"))
            return done < 2
        if said.calls:
            self.history.append(Results(said.calls, tuple(self.outputs(call) for call in said.calls)))
        return bool(said.calls)

    def _fault(self, said: Said) -> str:
        if said.finish == "malformed" or any(not isinstance(parsed(c.arguments), dict) for c in self._json_calls(said)):
            return "malformed"
        if said.finish == "length":
            return "length"
        if not said.text.strip() and not said.calls:
            return "empty"
        if self.recipe.json_in_text and parsed(said.text) is None:
            return "malformed"
        return ""

    @staticmethod
    def _json_calls(said: Said) -> list[Call]:
        return [call for call in said.calls if call.kind == "function"]

    def _cope(self, said: Said, fault: str) -> Said | None:
        """What the harness does about an answer that is no good; None when it asks again."""
        way = {"malformed": self.recipe.malformed, "empty": self.recipe.empty, "length": self.recipe.length}[fault]
        self.asked[-1].kept = way in ("error", "resume", "end")
        if way == "end":
            raise Ended(fault)
        if way == "more":
            self.prompt = dataclasses.replace(self.prompt, max_tokens=64000)
        elif way == "append":
            self._append("The last answer was empty.")
        elif way == "drop":
            self.history.append(user("The last answer could not be used."))
        elif way == "resume":
            self.history += [said, user("Cut off. Resume.")]
        elif way == "error":
            said = dataclasses.replace(said, calls=tuple(self._rewritten(call) for call in said.calls))
            self.history += [said, Results(said.calls, tuple("bad arguments" for _ in said.calls))]
        return None

    def _rewritten(self, call: Call) -> Call:
        return call if isinstance(parsed(call.arguments), dict) else self.recipe.rewrites(call)

    def _append(self, text: str) -> None:
        last = self.history[-1]
        if isinstance(last, User):
            self.history[-1] = User((*last.texts, text))
        elif isinstance(last, Results):
            self.history[-1] = dataclasses.replace(last, beside=(*last.beside, text))

    # --- over HTTP

    def body(self, prompt: Prompt | None = None, history: Sequence[Entry] | None = None) -> dict[str, Any]:
        return self.wire.body(prompt or self.prompt, self.history if history is None else history, MODEL)

    async def exchange(self, prompt: Prompt) -> Said:
        """The answer to the history; a failed request is repeated, body and all. Raises Ended."""
        said = await self._insist(json.dumps(self.body(prompt)).encode())
        self.asked.append(Asked(said, list(texts_of(self.history))))
        return said

    async def _insist(self, body: bytes) -> Said:
        why = ""
        for delay in (*self.recipe.retries, None):
            try:
                return await self.post(body)
            except Torn:
                if self.recipe.torn == "end":
                    raise Ended("the stream ended too early") from None
                why = "torn"
            except httpx.TransportError as error:
                why = repr(error)
            self.retried += 1
            if delay is not None:
                await asyncio.sleep(delay * self.pace)
        raise Ended(f"no answer after {len(self.recipe.retries)} retries: {why}")

    async def post(self, body: bytes) -> Said:
        """One try. Raises TransportError, Torn (after the headers) or Ended (a status that is not retried)."""
        headers = {"content-type": "application/json", **self.wire.key(self.key), **self.recipe.headers}
        headers |= self.recipe.agent_headers if self.sub else {}
        started = False
        try:
            async with self.http.stream("POST", self.wire.path(MODEL), content=body, headers=headers) as reply:
                started = reply.status_code == 200
                text = (await reply.aread()).decode()
        except httpx.TransportError as error:
            if started:
                raise Torn from error
            raise
        if reply.status_code in RETRIED:
            raise httpx.RemoteProtocolError(f"status {reply.status_code}: {text}")
        if reply.status_code != 200:
            raise Ended(f"status {reply.status_code}: {text}")
        return self.wire.read(text)

    # --- sub-agents and compaction

    def child(self, play: str) -> Agent:
        """A sub-agent on the same key."""
        return Agent(self.name, self.key, self.http, play, self.pace, sub=True)

    async def compact(self) -> None:
        """Have the history summed up and go on from the summary."""
        wish = user("Sum up. Call no tools.")
        if self.recipe.compacts == "in_context":
            self.history.append(wish)
            said = await self.exchange(self.prompt)
        else:
            whole = self.history
            self.history = [user(f"[[{self.play}/summary]] " + "\n".join(texts_of(whole)))]
            said = await self.exchange(Prompt("You sum up.", ()))
        self.history = [user(f"[[{self.play}/after]] Go on from here: " + said.text)]


def texts_of(history: Sequence[Entry]) -> list[str]:
    """What a history holds beside the model's own answers."""
    texts: list[str] = []
    for entry in history:
        if isinstance(entry, User):
            texts += entry.texts
        elif isinstance(entry, Late):
            texts.append(entry.text)
        elif isinstance(entry, Results):
            texts += [*entry.outputs, *entry.beside]
    return texts


@dataclass
class Stage:
    """The engine's side: plays by name, each a list of turns; every answer gets a number of its own (§n§).

    The turn is told by the number of answers in the prompt, so that a repeated prompt is answered again. A list as a
    turn is used up, one answer a try, down to its last.
    """

    plays: dict[str, list[Any]] = field(default_factory=dict)
    delay: Callable[[], float] = lambda: 0.0
    numbers: int = 0

    def __call__(self, prompt: list[int]) -> Scripted:
        turns = self.plays[play_of(prompt)]
        turn = turns[prompt.count(ASSISTANT) - 1]
        if isinstance(turn, list):
            turn = turn.pop(0) if len(turn) > 1 else turn[0]
        self.numbers += 1
        text = turn.text.replace("§", f"§{self.numbers}§")
        return dataclasses.replace(turn, text=text, seed=self.numbers, delay_s=turn.delay_s or self.delay())


def play_of(prompt: list[int]) -> str:
    """The name of the play that a prompt belongs to."""
    found = PLAY.search(decoded(prompt))
    assert found, decoded(prompt)[:500]
    return found.group(1)


def raw_call(name: str, arguments: str) -> str:
    """A call whose arguments are spelt as given."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def odd_call(name: str, note: str = "") -> str:
    """A call spelt as no library spells it; the parser, the harness and the template each spell it anew."""
    return raw_call(name, '{ "command":  "echo caf\\u00e9 \\/x ' + note + '§" }')


def eight_calls(name: str) -> list[Any]:
    """A play of eight tool calls in eight turns and an end, with texts, thoughts and odd spellings."""
    if RECIPES[name].json_in_text:
        steps = [f'{{ "analysis":  "caf\\u00e9 {i} §", "commands": [], "task_complete": false}}' for i in range(8)]
        return [Scripted(step) for step in [*steps, *['{"analysis": "§", "task_complete": true}'] * 2]]
    thought = "<think>hm, caf\u00e9\n</think>"
    texts = ["", "\n  Plan: caf\u00e9 first.  \n\n", thought, thought + "so: ", "", "x", "", "  "]
    return [Scripted(text + odd_call("shell", str(i))) for i, text in enumerate(texts)] + [Scripted("done §\n")]


# --- what must hold of a trace


def numbers_in(ids: Sequence[int]) -> set[int]:
    return {int(number) for number in NONCE.findall(decoded(ids))}


def check_samples(trace: Trace, samples: Sequence[Any]) -> None:
    """Every call of the trace is an answer of the engine, id for id and logprob for logprob; no two are the same."""
    left = by_key(samples)
    for call in trace.calls:
        same = left[sample_key(call.prompt_ids.tolist(), call.sampled_ids.tolist())]
        same.remove(call.logprobs.tolist())


def sample_key(prompt: list[int], ids: list[int]) -> bytes:
    return repr((prompt, ids)).encode()


def by_key(samples: Sequence[Any]) -> dict[bytes, list[list[float]]]:
    """The logprobs of samples, by their ids."""
    found: dict[bytes, list[list[float]]] = {}
    for sample in samples:
        found.setdefault(sample_key(sample.prompt, sample.ids), []).append(sample.logprobs)
    return found


def check_texts(trace: Trace, asked: Sequence[Asked]) -> None:
    """The prompt of every answer that the harness got holds what the harness had said, in order."""
    calls = {number: call for call in trace.calls for number in numbers_in(call.sampled_ids)}
    for one in asked:
        number = number_of(one.said)
        if number is None:
            continue
        prompt, position = decoded(calls[number].prompt_ids), 0
        for text in one.texts:
            position = prompt.index(text, position) + len(text)


def number_of(said: Said) -> int | None:
    """The number that the stage gave an answer."""
    found = NONCE.search(said.text + said.reasoning + "".join(call.arguments for call in said.calls))
    return int(found.group(1)) if found else None


def counted(trace: Trace, *prefixes: str) -> Counter[str]:
    """The trace's counters whose names start so."""
    return Counter({name: n for name, n in trace.counters.items() if name.startswith(prefixes)})


def trained_numbers(trace: Trace) -> list[int]:
    """The numbers of the answers that a trace's rows train, one entry each time."""
    found: list[int] = []
    for row in rows(trace):
        edges = np.flatnonzero(np.diff(row.loss_mask.astype(int), prepend=0, append=0))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            found += sorted(numbers_in(row.input_ids[start:end].tolist()))
    return found
