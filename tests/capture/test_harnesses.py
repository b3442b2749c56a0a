"""Ten harnesses' habits against the running proxy: every follow-up finds its parent, whatever the replay looks like."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from harness_clients import (
    RECIPES,
    Agent,
    Ended,
    Stage,
    check_samples,
    check_texts,
    counted,
    eight_calls,
    number_of,
    numbers_in,
    odd_call,
    raw_call,
    trained_numbers,
)
from harness_wire import Late, Results, Said, user
from proxy_helpers import Proxies, Proxy

from pipeline.capture.rows import rows
from pipeline.engine.scripted import FakeEngine, Scripted, Template, decoded, parsed
from pipeline.records import Trace

TEMPLATES = {
    "plain": Template(),
    "gap, strips": Template(gap="\n", strips_thoughts=True),
    "raises": Template(gap="\n", late_system="raises"),
    "hoists": Template(gap="\n", late_system="hoists"),
}
Scene = Callable[[Agent], Coroutine[Any, Any, None]]


@dataclass
class Shown:
    """What came of one harness's scene."""

    agent: Agent
    trace: Trace

    @property
    def parents(self) -> list[int | None]:
        return [call.parent for call in self.trace.calls]

    @property
    def rows(self) -> int:
        return len(rows(self.trace))

    @property
    def follow_ups(self) -> int:
        return sum(parent is not None for parent in self.parents)

    def trained(self) -> list[int]:
        """The numbers of the answers that rows train, one entry each time."""
        return trained_numbers(self.trace)


@contextlib.asynccontextmanager
async def stage(proxies: Proxies, plays: dict[str, list[Any]], template: str = "plain") -> AsyncIterator[Proxy]:
    engine = FakeEngine(template=TEMPLATES[template], answers=Stage(plays))
    async with proxies.run(engine=engine) as proxy:
        yield proxy


async def show(proxy: Proxy, name: str, play: str, scene: Scene) -> Shown:
    """One harness plays one scene in a session of its own; its trace holds nothing but the truth."""
    key = f"key-{play}"
    async with proxy.session(key, max_tokens=2000, max_calls=1000) as harness:
        agent = Agent(name, key, harness.http, play)
        await scene(agent)
        trace = await proxy.supervisor.close_session(key)
    check_samples(trace, proxy.engine.samples)
    for call in trace.calls:
        parsed(call.prompt_ids.tolist(), proxy.engine.template)
    check_texts(trace, agent.asked)
    assert "audit_failed" not in trace.counters
    trace.counters.pop("audited", None)  # one in a hundred
    return Shown(agent, trace)


async def show_all(proxy: Proxy, plays: dict[str, str], scene: Scene) -> dict[str, Shown]:
    """Every harness at once; ``plays``: harness -> play."""
    shown = await asyncio.gather(*(show(proxy, name, play, scene) for name, play in plays.items()))
    return dict(zip(plays, shown, strict=True))


async def plain(agent: Agent) -> None:
    await agent.run()


def wrong(shown: dict[str, Shown], holds: Callable[[Shown], bool]) -> dict[str, Any]:
    """Of the harnesses for which something does not hold: parents, rows and counters."""
    return {name: (one.parents, one.rows, one.trace.counters) for name, one in shown.items() if not holds(one)}


@pytest.mark.parametrize("template", TEMPLATES)
def test_eight_tool_calls_are_one_row(proxies: Proxies, template: str) -> None:
    async def run() -> dict[str, Shown]:
        async with stage(proxies, {name: eight_calls(name) for name in RECIPES}, template) as proxy:
            return await show_all(proxy, {name: name for name in RECIPES}, plain)

    shown = asyncio.run(run())

    def one_row(one: Shown) -> bool:
        length = 10 if RECIPES[one.agent.name].json_in_text else 9
        chain = one.parents == [None, *range(length - 1)]
        return chain and one.rows == 1 and len(one.trained()) == length and not one.trace.counters

    assert wrong(shown, one_row) == {}


async def talkative(agent: Agent) -> None:
    """Parallel calls, texts beside results, late system messages, further user messages."""
    await agent.run()
    late = [Late("A reminder.")] if agent.name in ("claude", "codex", "vibe") else []
    agent.history += [user("More, please.", "And this."), *late]
    said = await agent.ask()
    assert said and len(said.calls) == (0 if agent.recipe.json_in_text else 3)
    if said.calls:
        agent.history.append(Results(said.calls, ("one\n\n", "", "three"), ("By the way.",)))
        await agent.go_on()
    agent.history.append(user("Thanks."))
    await agent.ask()
    agent.history.append(user("Bye."))
    await agent.ask()


def talk(name: str) -> list[Any]:
    if RECIPES[name].json_in_text:
        return [Scripted('{"t": "§", "task_complete": true}') for _ in range(6)]
    three = odd_call("shell") + odd_call("read") + odd_call("shell", "2")
    return [
        Scripted("a §" + odd_call("read")),
        Scripted("hello §"),
        Scripted("§ all of them:" + three),
        Scripted("ok §"),
        Scripted(" you are welcome § "),
        Scripted("bye §"),
    ]


def test_every_follow_up_finds_its_parent(proxies: Proxies) -> None:
    """Two runs of each harness; of the real ones 123 follow-ups could be collected, and all of them matched."""

    async def run() -> list[dict[str, Shown]]:
        plays = {f"{name}/calls": eight_calls(name) for name in RECIPES} | {
            f"{name}/talk": talk(name) for name in RECIPES
        }
        async with stage(proxies, plays, "raises") as proxy:
            return [
                await show_all(proxy, {name: f"{name}/calls" for name in RECIPES}, plain),
                await show_all(proxy, {name: f"{name}/talk" for name in RECIPES}, talkative),
            ]

    calls, talks = asyncio.run(run())

    def chained(one: Shown) -> bool:
        return one.parents == [None, *range(len(one.parents) - 1)] and one.rows == 1

    assert wrong(calls, chained) == {} and wrong(talks, chained) == {}
    assert sum(one.follow_ups for shown in (calls, talks) for one in shown.values()) >= 123


# --- bad answers

BAD = {
    "malformed": Scripted("§" + raw_call("shell", '"{not json"')),
    "empty": Scripted(""),
    "length": Scripted("cut §", finish="length"),
}
CHAIN, BRANCH, STOP = [None, 0, 1, 2], [None, 0, 0, 2], [None, 0]
WAYS = {"error": CHAIN, "resume": CHAIN, "reask": BRANCH, "more": BRANCH, "append": BRANCH, "drop": BRANCH, "end": STOP}


def with_bad(name: str, fault: str) -> list[Any]:
    """A call, then a bad answer and a good one to whatever the harness makes of it, then the end."""
    if RECIPES[name].json_in_text:
        step, end = Scripted('{"t": "§", "task_complete": false}'), Scripted('{"t": "§", "task_complete": true}')
        bad = Scripted("{no §") if fault == "malformed" else BAD[fault]
        return [step, [bad, end], end, end]
    good = Scripted("§" + odd_call("shell"))
    return [good, [BAD[fault], good], [good, Scripted("done §")], Scripted("done §")]


async def until_it_ends(agent: Agent) -> None:
    with contextlib.suppress(Ended):
        await agent.run()


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_answer_is_trained_whatever_the_harness_does_with_it(proxies: Proxies, fault: str) -> None:
    async def run() -> dict[str, Shown]:
        async with stage(proxies, {name: with_bad(name, fault) for name in RECIPES}, "gap, strips") as proxy:
            return await show_all(proxy, {name: name for name in RECIPES}, until_it_ends)

    shown = asyncio.run(run())

    def as_expected(one: Shown) -> bool:
        recipe = one.agent.recipe
        way = {"malformed": recipe.malformed, "empty": recipe.empty, "length": recipe.length}[fault]
        trained = sum(row.trained_tokens for row in rows(one.trace))
        sampled = sum(len(call.sampled_ids) for call in one.trace.calls)
        return one.parents[:4] == WAYS[way][:4] and trained == sampled and "drift" not in one.trace.counters

    assert wrong(shown, as_expected) == {}
    if fault == "malformed":
        rewrites = {name for name, one in shown.items() if one.trace.counters.get("arguments_rewritten")}
        assert rewrites == {"claude", "opencode", "pi", "vibe", "openhands"} & set(RECIPES)


def test_a_resumed_and_merged_answer_is_nobodys(proxies: Proxies) -> None:
    """Qwen Code after a drop in mid-stream: the part that came and "Resume"; then both parts as one answer."""
    play = [Scripted("§" + odd_call("shell")), [Scripted("one two three §"), Scripted(" three §")], Scripted("§ end")]

    async def scene(agent: Agent) -> None:
        agent.history.append(user("[[qwen]] go"))
        await agent.ask()
        agent.history.append(Results(agent.asked[0].said.calls, ("out",)))
        torn = await agent.exchange(agent.prompt)
        begun = len(agent.history)
        agent.history += [Said(torn.text[:7]), user("Resume")]
        rest = await agent.exchange(agent.prompt)
        agent.history[begun:] = [Said(torn.text[:7] + rest.text), user("go on")]
        await agent.ask()

    async def run() -> Shown:
        async with stage(proxies, {"qwen": [*play, Scripted("§ later")]}) as proxy:
            return await show(proxy, "qwen", "qwen", scene)

    one = asyncio.run(run())
    assert one.parents == [None, 0, 0, 0]
    assert len(one.trained()) == 4 == len(set(one.trained()))


# --- sub-agents and compaction


@pytest.mark.parametrize("name", ["claude", "codex", "qwen", "opencode", "gemini"])
def test_sub_agents_are_rows_of_their_own(proxies: Proxies, name: str) -> None:
    """Two sub-agents with the same prompt, beside their parent or before it goes on, on one key."""
    steps = [Scripted("§" + odd_call("shell", str(i))) for i in range(3)]
    plays = {name: [*steps, Scripted("§ done")], f"{name}/sub": [*steps, Scripted("§ found")]}

    async def scene(agent: Agent) -> None:
        agent.history.append(user(f"[[{name}]] go"))
        await agent.ask()
        children = [agent.child(f"{name}/sub") for _ in range(2)]
        work = asyncio.gather(*(child.run("look around") for child in children))
        calls = agent.asked[0].said.calls
        if agent.recipe.background:
            agent.history.append(Results(calls, ("launched",)))
            await agent.ask()
            agent.history.append(Results(agent.asked[-1].said.calls, ("out",)))
            agent.history.append(user("Sub-agents: " + " ".join(await work)))
        else:
            agent.history.append(Results(calls, (" ".join(await work),)))
        await agent.go_on()
        for child in children:
            agent.asked += child.asked

    async def run() -> Shown:
        async with stage(proxies, plays, "gap, strips") as proxy:
            return await show(proxy, name, name, scene)

    one = asyncio.run(run())
    numbers = {number_of(asked.said) for asked in one.agent.asked}
    assert sorted(one.trained()) == sorted(number for number in numbers if number is not None)
    agents = [call for call in one.trace.calls if call.parent is None]
    assert len(agents) in (2, 3)  # the two may share answers that one of them had not read yet
    assert counted(one.trace, "drift", "fork_") in ({}, {"fork_root": 1}, {"fork_root": 2})


async def with_summary(agent: Agent) -> None:
    await agent.run()
    await agent.compact()
    await agent.go_on()
    agent.history.append(user("Thanks."))
    await agent.ask()


def test_compaction_begins_a_new_row(proxies: Proxies) -> None:
    names = [name for name, recipe in RECIPES.items() if recipe.compacts]
    plays: dict[str, list[Any]] = {}
    for name in names:
        step = Scripted('{"t": "§", "task_complete": true}') if name == "terminus" else Scripted("§" + odd_call("read"))
        end = Scripted('{"t": "§", "task_complete": true}') if name == "terminus" else Scripted("§ end")
        plays |= {name: [step, end, end], f"{name}/summary": [Scripted("§ sum")], f"{name}/after": [step, end, end]}

    async def run() -> dict[str, Shown]:
        async with stage(proxies, plays) as proxy:
            return await show_all(proxy, {name: name for name in names}, with_summary)

    shown = asyncio.run(run())

    def as_expected(one: Shown) -> bool:
        aside = one.agent.recipe.compacts == "aside"
        chains = [[None, 0], [None], [None, 3, 4]] if aside else [[None, 0, 1], [None, 3, 4]]
        fine = one.parents == list(itertools.chain(*chains)) and one.rows == len(chains)
        return fine and len(one.trained()) == 6 and "drift" not in one.trace.counters

    assert wrong(shown, as_expected) == {}


# --- answers that are not the model's


def mutations(said: Said, following: Any) -> Iterator[tuple[str, Said, Any]]:
    """What a harness never does to an answer: (words that must be in the prompt then, answer, what follows it)."""
    yield "mutant", replace(said, text=said.text + "mutant"), following
    if said.text.strip():
        yield "mutant", replace(said, text="mutant"), following
    if not said.calls:
        return
    first, rest = said.calls[0], said.calls[1:]
    for foreign in (replace(first, id="call_of_another"), replace(first, id="")):
        changed = replace(foreign, arguments='{"command": "mutant"}')
        yield "mutant", replace(said, calls=(changed, *rest)), replace(following, of=(changed, *rest))
    added = replace(first, id="call_added", arguments='{"command": "mutant"}')
    outputs = (*following.outputs, "more")
    yield "mutant", replace(said, calls=(*said.calls, added)), Results((*said.calls, added), outputs)
    kept = Results(rest, following.outputs[1:], ("go on",)) if rest else user("go on")
    yield "go on", replace(said, text=said.text or "x", calls=rest), kept


async def mutated(agent: Agent) -> dict[int, tuple[int, str]]:
    """Ask with every mutation of every answer; number of the new answer -> (number of the mutated one, words)."""
    asked: dict[int, tuple[int, str]] = {}
    history = [*agent.history, user("so?")]
    for index, said in enumerate(history[:-1]):
        if not isinstance(said, Said):
            continue
        for words, other, following in mutations(said, history[index + 1]):
            body = agent.body(history=[*history[:index], other, following])
            number, old = number_of(await agent.post(json.dumps(body).encode())), number_of(said)
            assert number is not None and old is not None
            asked[number] = old, words
    return asked


def test_no_mutated_answer_is_taken_for_the_models(proxies: Proxies) -> None:
    asked: dict[str, dict[int, tuple[int, str]]] = {}

    def then_mutated(scene: Scene) -> Scene:
        async def both(agent: Agent) -> None:
            await scene(agent)
            asked[agent.play] = await mutated(agent)

        return both

    async def run() -> list[dict[str, Shown]]:
        plays = {f"{name}/calls": [*eight_calls(name), Scripted("§ aha")] for name in RECIPES}
        plays |= {f"{name}/talk": [*talk(name), Scripted("§ aha")] for name in RECIPES}
        async with stage(proxies, plays) as proxy:
            return [
                await show_all(proxy, {name: f"{name}/{kind}" for name in RECIPES}, then_mutated(scene))
                for kind, scene in (("calls", plain), ("talk", talkative))
            ]

    shown = {one.agent.play: one for several in asyncio.run(run()) for one in several.values()}
    assert sum(len(numbers) for numbers in asked.values()) >= 500
    for play, numbers in asked.items():
        calls = {number: call for call in shown[play].trace.calls for number in numbers_in(call.sampled_ids)}
        for number, (old, words) in numbers.items():
            prompt, known = calls[number].prompt_ids.tolist(), calls[old]
            whole = [*known.prompt_ids.tolist(), *known.sampled_ids.tolist()]
            assert calls[number].parent != known.call_id and prompt[: len(whole)] != whole, (play, number)
            assert words in decoded(prompt), (play, number)
        trained = shown[play].trained()
        assert len(trained) == len(set(trained)) == len(shown[play].trace.calls)


def test_arguments_under_our_own_id_may_change_and_are_counted(proxies: Proxies) -> None:
    async def scene(agent: Agent) -> None:
        agent.history.append(user(f"[[{agent.play}]] go"))
        said = await agent.ask()
        assert said
        changed = replace(said, calls=(replace(said.calls[0], arguments='{"command": "other"}'),))
        agent.history[-1:] = [changed, Results(changed.calls, ("out",))]
        await agent.ask()

    names = [name for name in RECIPES if name not in ("terminus", "gemini-ids")]

    async def run() -> dict[str, Shown]:
        async with stage(proxies, {name: eight_calls(name) for name in names}) as proxy:
            return await show_all(proxy, {name: name for name in names}, scene)

    shown = asyncio.run(run())
    taken = wrong(shown, lambda one: one.parents == [None, 0] and one.trace.counters == {"arguments_rewritten": 1})
    assert taken == {}
