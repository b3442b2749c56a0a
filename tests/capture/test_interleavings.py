"""Calls, retries, forks, lost answers and restarts in any order: rows train what they should, once."""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness_clients import check_samples, odd_call, raw_call, trained_numbers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_helpers import BASH

from pipeline.capture import journal as journals
from pipeline.capture import turn
from pipeline.capture.canonical import Memo
from pipeline.capture.client import Reply
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.journal import Journal, Node, Opened, Policy
from pipeline.capture.rows import rows
from pipeline.capture.session import Session, restore
from pipeline.capture.trace import trace_of
from pipeline.capture.turn import EngineTurns
from pipeline.capture.upstream import Engine
from pipeline.engine.scripted import END_OF_TEXT, FakeEngine, Scripted, Template, parsed
from pipeline.records import Trace

CHAT = Chat()
TEMPLATES = [
    Template(),
    Template(gap="\n", strips_thoughts=True),
    Template(gap="\n", strips_thoughts=True, late_system="raises"),
    Template(late_system="hoists"),
]
ANSWERS = {
    "text": Scripted("said §"),
    "same": Scripted("the same"),
    "call": Scripted("§" + odd_call("bash")),
    "calls": Scripted(odd_call("bash") + odd_call("bash", "2")),
    "thought": Scripted("<think>hm §</think>so §"),
    "thought and call": Scripted("<think>hm §</think>" + odd_call("bash")),
    "cut": Scripted("cut §", finish="length"),
    "cut in a call": Scripted('§<tool_call>{"name": "ba', finish="length"),
    "empty": Scripted(""),
    "malformed": Scripted("§" + raw_call("bash", '"{no"')),
    "other end": Scripted("ends otherwise §", end=END_OF_TEXT),
}

LEARNT: dict[Template, Any] = {}  # what the self-test found out


class DirectClient:
    """The scripted engine without sockets, in place of the engine's HTTP client."""

    def __init__(self, fake: FakeEngine) -> None:
        self._fake = fake

    async def request(self, method: str, path: str, body: Sequence[bytes], timeout_s: float) -> Reply:
        await asyncio.sleep(0)
        reply = await self._fake._answer(path, json.loads(b"".join(body) or b"null"), asyncio.StreamReader())
        assert reply is not None
        return Reply(reply[0], json.dumps(reply[1]).encode())


def direct(fake: FakeEngine) -> Engine:
    engine: Any = Engine("http://127.0.0.1:1", "policy")
    engine._client = DirectClient(fake)
    return engine


@dataclass
class Play:
    """A harness that keeps every history it ever had, and may go on from any of them."""

    engine: FakeEngine
    path: Path
    policy: Policy
    histories: list[list[dict[str, Any]]] = field(default_factory=lambda: [[]])
    delivered: set[int] = field(default_factory=set)
    asked: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    numbers: int = 0

    def __post_init__(self) -> None:
        self.journal = Journal(self.path)
        self.session = Session("s", self.policy)
        self.journal.append(Opened("s", self.policy, self.session.opened))
        self.turns = self._turns()

    def _turns(self) -> EngineTurns:
        """Turns that need no self-test of their own."""
        turns = EngineTurns(direct(self.engine), self.journal)
        if self.engine.template in LEARNT:
            turns._templates[None] = copy.copy(LEARNT[self.engine.template])
        return turns

    async def ask(self, history: list[dict[str, Any]], step: dict[str, Any]) -> Node:
        """One request; the engine gives scripted answers in the order in which it is asked."""
        self.numbers += 1
        scripted = ANSWERS[step["answer"]]
        text = scripted.text.replace("§", f"§{self.numbers}§")
        self.engine.script.append(Scripted(text, scripted.finish, end=scripted.end, seed=self.numbers))
        body = {"messages": history, "tools": [BASH], **({"tool_choice": "required"} if step["forced"] else {})}
        node = await self.turns.answer(self.session, CHAT.parse(json.dumps(body).encode(), self.session.memo))
        self.asked[node.call_id] = history
        if step["delivered"]:
            self.turns.delivered(self.session, node)
            self.delivered.add(node.call_id)
        return node

    async def step(self, step: dict[str, Any]) -> None:
        """Ask from one of the histories, and keep the answer if it arrived."""
        asked = self.histories[step["from"] % len(self.histories)] or [{"role": "user", "content": "begin"}]
        node = await self.ask(asked, step)
        if step["delivered"]:
            message = replayed(node, step["keeps_ids"], step["keeps_thoughts"])
            self.histories.append([*asked, message, *following(message, step["new"])])
        else:
            self.histories.append(asked)

    def mutate(self, history: list[dict[str, Any]]) -> None:
        """Another text in the last answer: a history that is none of the model's."""
        said = [i for i, message in enumerate(history) if message["role"] == "assistant"]
        if said:
            changed = history[said[-1]] | {"content": f"{history[said[-1]]['content']} changed"}
            self.histories.append([*history[: said[-1]], changed, *history[said[-1] + 1 :]])

    def restart(self) -> None:
        """What a killed shard's successor begins with."""
        self.journal.close()
        self.session = restore(journals.read(self.path))["s"]
        self.session.memo = Memo()
        self.journal = Journal(self.path)
        self.turns = self._turns()


def replayed(node: Node, keeps_ids: bool, keeps_thoughts: bool) -> dict[str, Any]:
    """An answer as a harness sends it back."""
    answer = node.answer
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if keeps_thoughts and answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id if keeps_ids else f"own_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": respelt(call.arguments)},
            }
            for i, call in enumerate(answer.tool_calls)
        ]
    return message


def respelt(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=1)
    except ValueError:
        return arguments


def following(message: dict[str, Any], new: str) -> list[dict[str, Any]]:
    """The results of an answer's calls, and what comes after them."""
    calls = message.get("tool_calls") or ()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"out {i} \u00e9"} for i, call in enumerate(calls)
    ]
    beside = {"nothing": [], "user": [{"role": "user", "content": "go on"}]}
    beside["late"] = [{"role": "system", "content": "late"}, {"role": "user", "content": "so"}]
    return results + (beside[new] if results else beside[new] or beside["user"])


ASK = st.fixed_dictionaries(
    {
        "from": st.integers(0, 30),
        "answer": st.sampled_from(sorted(ANSWERS)),
        "delivered": st.sampled_from([True, True, True, False]),
        "forced": st.sampled_from([False, False, False, True]),
        "keeps_ids": st.booleans(),
        "keeps_thoughts": st.booleans(),
        "new": st.sampled_from(["nothing", "user", "late"]),
    }
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.lists(ASK, min_size=1, max_size=3)),  # all at once
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("mutate"), st.integers(0, 30)),
    ),
    min_size=3,
    max_size=14,
)


async def play(steps: list[tuple[str, Any]], scene: Play) -> None:
    LEARNT.setdefault(scene.engine.template, copy.copy(await scene.turns.template(None)))
    for action, what in steps:
        if action == "restart":
            scene.restart()
        elif action == "ask":
            await asyncio.gather(*(scene.step(step) for step in what))
            scene.engine.script.clear()
        else:
            scene.mutate(scene.histories[what % len(scene.histories)])


def check(scene: Play) -> None:
    trace = trace_of(scene.session)
    check_samples(trace, scene.engine.samples)
    assert len(trace.calls) == len(scene.engine.samples)
    assert {call.call_id for call in trace.calls if call.delivered} == scene.delivered
    wanted = sum(len(call.sampled_ids) for call in trace.calls if call.delivered and call.trainable)
    assert sum(row.trained_tokens for row in rows(trace)) == wanted
    trained = Counter(trained_numbers(trace))
    assert max(trained.values(), default=1) == 1
    assert_parents(trace)
    late = "system" if scene.engine.template.late_system == "keeps" else "user"
    for call in trace.calls:
        assert_said(parsed(call.prompt_ids.tolist(), scene.engine.template), scene.asked[call.call_id], late)


def assert_said(messages: list[tuple[str, str]], asked: list[dict[str, Any]], late: str) -> None:
    """A prompt holds what was asked, message by message; of the model's own turns it holds as many."""
    roles = {"system": late}
    wanted = [(roles.get(message["role"], message["role"]), message["content"]) for message in asked]
    assert [role for role, _ in messages] == [role for role, _ in wanted]
    for (role, text), (_, content) in zip(messages, wanted, strict=True):
        assert role == "assistant" or text == content


def assert_parents(trace: Trace) -> None:
    for call in trace.calls:
        if call.parent is not None:
            parent = trace.calls[call.parent]
            whole = [*parent.prompt_ids.tolist(), *parent.sampled_ids.tolist()]
            assert call.prompt_ids.tolist()[: len(whole)] == whole


@pytest.mark.parametrize("thoughts", ["fork", "keep"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, template=st.sampled_from(TEMPLATES))
def test_rows_train_each_delivered_sample_once(thoughts: str, steps: list[tuple[str, Any]], template: Template) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn, "AUDITED", 1.0)
        scene = Play(FakeEngine(template=template), Path(directory) / "j", Policy(1.0, 500, 100, "policy", thoughts))
        asyncio.run(settled(play(steps, scene)))
        scene.restart()
        check(scene)
        assert "audit_failed" not in scene.session.counters


async def settled(work: Coroutine[Any, Any, None]) -> None:
    """The work and the audits that it left behind."""
    await work
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks)
