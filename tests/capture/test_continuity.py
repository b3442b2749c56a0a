"""Token continuity over scripted templates: self-test, suffixes, forks by cause, the audit, and the matcher's rules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from proxy_helpers import BASH

from pipeline.capture import ids, turn
from pipeline.capture.canonical import Memo
from pipeline.capture.continuity import suffix
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.journal import Journal, Node, Policy
from pipeline.capture.rows import rows
from pipeline.capture.session import Session
from pipeline.capture.trace import trace_of
from pipeline.capture.turn import EngineTurns
from pipeline.capture.upstream import Engine
from pipeline.engine.scripted import END, END_OF_TEXT, FakeEngine, Scripted, Template, call_text, render
from pipeline.records import Trace

CHAT = Chat()
USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "late news"}


@pytest.fixture(autouse=True)
def no_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "AUDITED", 0.0)


class Talk:
    """A conversation with the turns, without HTTP. Every answer counts as delivered."""

    def __init__(self, engine: FakeEngine, turns: EngineTurns, **policy: Any) -> None:
        self.engine, self.turns = engine, turns
        self.session = Session("s", Policy(1.0, 10_000, 100, "policy", **policy))
        self.history: list[dict[str, Any]] = [USER]

    async def ask(self, *new: dict[str, Any], text: str = "ok", **scripted: Any) -> Node:
        """Add messages, get an answer, and take it into the history as a harness that spells JSON its own way."""
        self.history += new
        self.engine.script.append(Scripted(text, **scripted))
        body = json.dumps({"messages": self.history, "tools": [BASH]}).encode()
        node = await self.turns.answer(self.session, CHAT.parse(body, self.session.memo))
        self.turns.delivered(self.session, node)
        message: dict[str, Any] = {"role": "assistant", "content": node.answer.text.strip()}
        if node.answer.reasoning:
            message["reasoning_content"] = node.answer.reasoning
        if node.answer.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _respelt(c.arguments)}}
                for c in node.answer.tool_calls
            ]
        self.history.append(message)
        return node

    async def run_tool(self, index: int, text: str = "", **scripted: Any) -> Node:
        """Answer the last call, get the next one."""
        call_id = self.history[-1]["tool_calls"][-1]["id"]
        result = {"role": "tool", "tool_call_id": call_id, "content": f"output {index}"}
        return await self.ask(result, text=text or _call(index), **scripted)

    def trace(self) -> Trace:
        return trace_of(self.session)


def _respelt(arguments: str) -> str:
    return json.dumps(json.loads(arguments), indent=1)


def _call(index: int) -> str:
    """Spelt as the template would not spell it, so that rendering the history again would drift."""
    return f'go <tool_call>{{"name": "bash",  "arguments":{{"command":"ls {index}"}}}}</tool_call>'


@asynccontextmanager
async def talking(tmp_path: Path, template: Template | None = None, **policy: Any) -> AsyncIterator[Talk]:
    engine = FakeEngine(template=template or Template())
    await engine.start()
    journal = Journal(tmp_path / "j")
    try:
        yield Talk(engine, EngineTurns(Engine(engine.url, "policy", outage_s=1.0), journal), **policy)
    finally:
        journal.close()
        await engine.stop()


@pytest.mark.parametrize("template", [Template(), Template(gap="\n"), Template(strips_thoughts=True)])
def test_eight_tool_calls_are_one_row(tmp_path: Path, template: Template) -> None:
    async def run() -> None:
        async with talking(tmp_path, template) as talk:
            await talk.ask(text=_call(0))
            for index in range(1, 8):
                await talk.run_tool(index)
            await talk.run_tool(8, "done")
            (row,) = rows(talk.trace())
            assert row.trained_tokens == sum(len(call.sampled_ids) for call in talk.trace().calls)
            assert not [name for name in talk.session.counters if name.startswith(("fork", "drift"))]
            short = [body for body in talk.engine.rendered if body["messages"][0]["content"] == "x"]
            assert all("tools" not in body for body in short[-8:]), "a suffix does not need the tools"

    asyncio.run(run())


def test_ids_of_a_bridged_prompt_are_those_of_the_true_conversation(tmp_path: Path) -> None:
    """The suffix is what the template writes after the turn; what was sampled stands as it was sampled."""

    async def run() -> None:
        async with talking(tmp_path) as talk:
            first = await talk.ask(text=_call(0))
            second = await talk.run_tool(1)
            whole = render(talk.history[:-1])
            end = len(whole) - 1 - whole[::-1].index(END, whole[::-1].index(END) + 1)  # of the assistant's turn
            prompt = ids.numbers(talk.session.tree.prompt(second.call_id))
            begun = ids.numbers(talk.session.tree.sequence(first.call_id))
            assert prompt == begun + whole[end + 1 :] and second.answer.prompt_tokens == len(prompt)

    asyncio.run(run())


def test_a_cut_answer_goes_on_with_the_end_mark_that_it_lacks(tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(tmp_path) as talk:
            await talk.ask(text="cut sho", finish="length")
            second = await talk.ask({"role": "user", "content": "go on"})
            assert second.parent == 0 and ids.numbers(second.suffix)[0] == END

    asyncio.run(run())


def test_another_end_token_is_replaced_and_counted(tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(tmp_path) as talk:
            await talk.ask(text="well", end=END_OF_TEXT)
            second = await talk.ask({"role": "user", "content": "go on"})
            assert second.parent is None and talk.session.counters["fork_turn_end"] == 1
            prompt = ids.numbers(talk.session.tree.prompt(1))
            assert END_OF_TEXT not in prompt and second.answer.prompt_tokens == len(prompt)
            assert len(rows(talk.trace())) == 2

    asyncio.run(run())


@pytest.mark.parametrize(("policy", "forks"), [("fork", 1), ("keep", 0)])
def test_thoughts_fork_or_stay(tmp_path: Path, policy: str, forks: int) -> None:
    async def run() -> None:
        async with talking(tmp_path, Template(strips_thoughts=True), thoughts=policy) as talk:
            await talk.ask(text="<think>hm</think>" + _call(0))
            await talk.run_tool(1, "done")
            assert len(rows(talk.trace())) == 1, "the template keeps thoughts until the next user message"
            await talk.ask({"role": "user", "content": "and now"})
            assert talk.session.counters["fork_thoughts"] == forks
            assert len(rows(talk.trace())) == 1 + forks and talk.session.counters["drift"] == 0

    asyncio.run(run())


@pytest.mark.parametrize("late", ["keeps", "raises", "hoists"])
def test_a_late_system_message_is_never_lost(tmp_path: Path, late: str) -> None:
    async def run() -> None:
        async with talking(tmp_path, Template(late_system=late)) as talk:
            await talk.ask(text="first")
            second = await talk.ask(SYSTEM, {"role": "user", "content": "go on"})
            assert b"late news" in bytes(i for i in ids.numbers(second.suffix) if i < 256)
            assert second.parent == 0
            learnt = await talk.turns.template(None)
            assert learnt.late_system == ("system" if late == "keeps" else "user")

    asyncio.run(run())


def test_continuity_off_renders_every_history_anew_and_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(tmp_path, continuity=False) as talk:
            await talk.ask(text=_call(0))
            await talk.run_tool(1, "done")
            assert len(rows(talk.trace())) == 2
            assert talk.session.counters["fork_text_in"] == 1 and talk.session.counters["drift"] == 1

    asyncio.run(run())


async def _wrong(*arguments: Any) -> Any:
    follow, frame = await suffix(*arguments)
    return follow + b",7", frame


def test_an_audit_that_fails_ends_continuity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "AUDITED", 1.0)

    async def run() -> None:
        async with talking(tmp_path) as talk:
            await talk.ask(text=_call(0))
            await talk.run_tool(1)
            await asyncio.gather(*talk.turns._audits)
            assert talk.session.counters["audited"] == 1 and talk.session.counters["audit_failed"] == 0
            monkeypatch.setattr(turn, "suffix", _wrong)
            await talk.run_tool(2)
            await asyncio.gather(*talk.turns._audits)
            assert talk.session.counters["audit_failed"] == 1
            await talk.run_tool(3)
            assert talk.session.counters["fork_text_in"] == 1

    asyncio.run(run())


def test_a_retry_is_a_sibling_with_the_same_prompt_and_needs_no_render(tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(tmp_path) as talk:
            await talk.ask(text=_call(0))
            before = list(talk.history)
            await talk.run_tool(1)
            rendered = len(talk.engine.rendered)
            talk.history = before
            again = await talk.run_tool(1, _call(2))
            assert len(talk.engine.rendered) == rendered
            assert again.parent == 0 and talk.session.tree.prompt(2) == talk.session.tree.prompt(1)
            assert [row.trained_tokens > 0 for row in rows(talk.trace())] == [True, True]

    asyncio.run(run())


def test_changed_arguments_under_our_id_are_taken_and_counted(tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(tmp_path) as talk:
            await talk.ask(text=_call(0))
            talk.history[-1]["tool_calls"][0]["function"]["arguments"] = '{"unparsed": "x"}'
            second = await talk.run_tool(1)
            assert second.parent == 0 and talk.session.counters["arguments_rewritten"] == 1
            talk.history[-1]["tool_calls"][0] |= {"id": "theirs"}
            talk.history[-1]["tool_calls"][0]["function"] |= {"arguments": '{"command": "rm"}'}
            third = await talk.run_tool(2)
            assert third.parent == 0, "without our id other arguments are another answer, which follows the first"

    asyncio.run(run())


def test_two_calls_are_matched_in_their_order(tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(tmp_path) as talk:
            await talk.ask(text=call_text("bash", {"c": "a"}) + call_text("bash", {"c": "b"}))
            calls = talk.history[-1]["tool_calls"]
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
            assert (await talk.ask(*results)).parent == 0
            calls.reverse()
            assert (await talk.ask({"role": "user", "content": "?"})).parent is None

    asyncio.run(run())


def test_a_self_test_that_finds_no_way_serves_text_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with talking(tmp_path) as talk:
            monkeypatch.setattr("pipeline.capture.continuity.SENTINELS", ("SAME", "SAME"))
            await talk.ask(text=_call(0))
            await talk.run_tool(1, "done")
            assert (await talk.turns.template(None)).problem
            assert talk.session.counters["fork_text_in"] == 1

    asyncio.run(run())


def test_memory_grows_with_tokens_not_with_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(tmp_path) as talk:
            await talk.ask(text=_call(0))
            for index in range(1, 30):
                await talk.run_tool(index)
            stored = sum(len(node.suffix) + len(node.sampled) for node in talk.session.tree.nodes)
            assert stored < 1.1 * len(talk.session.tree.sequence(29))

    asyncio.run(run())


def test_a_memo_tells_instructions_from_messages() -> None:
    memo = Memo()
    plain = CHAT.parse(b'{"messages":[{"role":"user","content":"a"}]}', memo)
    assert plain.atoms == CHAT.parse(b'{"messages":[{"role":"user","content":"a"}]}', memo).atoms
    assert len(memo.atoms) == 1
