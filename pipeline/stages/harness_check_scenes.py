"""The scenes of `yoke harness check`: what the scripted model answers, as calls of the harness's own tools.

A scene's task carries a mark, ``[scene TAG]``; the engine finds it in the prompt and answers the next step of the
conversation's play. A sub-agent's prompt and a summary carry marks too, so that their conversations are told apart.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.capture.dialects.responses_items import joined_name
from pipeline.engine.scripted import END, Scripted, Template, call_text, parsed
from pipeline.harness.base import Action, HarnessRecipe

MARK = re.compile(r"\[scene ([\w.-]+)\]")
PRINTED = re.compile(
    r"out_42_([a-z]+-\d+)"
)  # by a command of the compaction; a request for a summary may hold only that
ANSWER = {"answer.txt": "42"}
RECOVERED = {"recovered.txt": "1"}
SOLVE = "printf 42 > answer.txt && echo started"
SUB = ".sub"  # after a scene's tag: its sub-agent's
NEVER_S = 3600.0
NOTHING: Mapping[str, str] = {}
TOGETHER_S = 45.0
COMPACTS_WITHIN = 30  # calls
Message = tuple[str, str]  # role, text


@dataclass(frozen=True)
class Step:
    """One answer of a play. ``parts``: the actions in it. ``last``: the run may end with it. ``kill``: instead of
    answering, kill the proxy's shard, which drops the connection.
    """

    name: str
    answer: Scripted
    parts: tuple[str, ...] = ()
    last: bool = False
    kill: bool = False


@dataclass
class Given:
    """A step that was given to a prompt."""

    step: Step
    prompt: list[int]
    at: float

    @property
    def ids(self) -> list[int]:
        """What the engine sampled, unless the answer was something else."""
        return [*self.step.answer.text.encode(), *[END] * (self.step.answer.finish == "stop")]


class Party:
    """Conversations whose first answers wait for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived: set[str] = set()
        self.complete = asyncio.Event()

    def held(self, tag: str, answer: Scripted) -> Scripted:
        """The answer, not before all have asked."""
        self.arrived.add(tag)
        if len(self.arrived) == self.size:
            self.complete.set()
        return replace(answer, delay_s=TOGETHER_S, gate=self.complete)


@dataclass
class Play:
    """What one conversation is answered with: the steps in their order, then ``ending``, the last of it for ever."""

    tag: str
    steps: Sequence[Step]
    ending: Sequence[Step]
    kill: Callable[[], None] = lambda: None
    party: Party | None = None
    given: list[Given] = field(default_factory=list)

    def answer(self, prompt: list[int], messages: Sequence[Message]) -> Scripted:
        """The next answer."""
        step = self.choose(messages)
        first = not self.given
        self.given.append(Given(step, prompt, time.monotonic()))
        if step.kill:
            self.kill()
        return self.party.held(self.tag, step.answer) if self.party and first else step.answer

    def choose(self, messages: Sequence[Message]) -> Step:
        """The step that follows those given."""
        script = [*self.steps, *self.ending]
        return script[min(len(self.given), len(script) - 1)]


@dataclass
class Compaction(Play):
    """Commands that print much until the history comes back as a summary; then the task.

    A request that is no follow-up to the latest command is for a summary.
    """

    recipe: HarnessRecipe | None = None

    def choose(self, messages: Sequence[Message]) -> Step:
        """See Play.choose. Decided by what stands in the history: nobody knows which calls a harness makes for it."""
        assert self.recipe is not None
        turn = len(self.given)
        heard = "\n".join(text for role, text in messages if role != "assistant")
        if f"done_42_{self.tag}" in heard or turn > COMPACTS_WITHIN:
            return self.ending[min(sum(given.step in self.ending for given in self.given), len(self.ending) - 1)]
        if f"[summary {self.tag}]" in "\n".join(text for _, text in messages):
            return run("solve", self.recipe, f"printf 42 > answer.txt && echo done_$((40+2))_{self.tag}")
        if turn and not self._follows_up(messages):
            return Step(
                "summary",
                Scripted(f"<summary>[summary {self.tag}] [scene {self.tag}] Write 42 to answer.txt.</summary>"),
            )
        # the mark stands at the start as well: a request for a summary may hold no more than that of each output
        return run(
            "long", self.recipe, f"echo [scene {self.tag}]; seq {1000 + turn} 2500; echo out_$((40+2))_{self.tag}"
        )

    def _follows_up(self, messages: Sequence[Message]) -> bool:
        """Whether a history ends with what the latest command printed. A summary may be asked for in one message."""
        role, text = messages[-1]
        told = f"out_42_{self.tag}" in text and any(role == "assistant" for role, _ in messages)
        return role == "tool" or told


class Director:
    """Answers every conversation by the play that the first mark outside of system messages names."""

    def __init__(self) -> None:
        self.plays: dict[str, Play] = {}
        self.strangers: list[list[int]] = []  # prompts that no play is for
        self._count = 0

    def __call__(self, prompt: list[int]) -> Scripted:
        messages = messages_of(prompt)
        play = self.plays.get(tag_of(messages))
        self._count += 1
        if play is None:
            self.strangers.append(prompt)
            return Scripted(seed=self._count)
        return replace(play.answer(prompt, messages), seed=self._count)


def tag_of(messages: Sequence[Message]) -> str:
    """The first mark of a conversation; "" without one."""
    found = (MARK.search(text) for role, text in messages if role != "system")
    return next((match[1] for match in found if match), "")


def tag_of_prompt(prompt: list[int]) -> str:
    """The same, of ids."""
    return tag_of(messages_of(prompt))


def messages_of(prompt: list[int]) -> list[Message]:
    """The messages of a prompt; none of one that the template did not write."""
    try:
        return parsed(prompt, Template())
    except ValueError:
        return []


# --- answers


def said(action: Action) -> str:
    """An action as the toy model writes it."""
    name = joined_name(action.tool, action.namespace)
    return action.text + call_text(name, dict(action.arguments)) if name else action.text


def run(name: str, recipe: HarnessRecipe, *commands: str, files: Mapping[str, str] = NOTHING) -> Step:
    """An answer that makes the harness run commands, or write ``files`` where it has no shell, all in one answer."""
    if recipe.write is None:
        actions = [recipe.shell.filled(command=command) for command in commands]
    else:
        actions = [recipe.write.filled(path=path, content=content) for path, content in files.items()]
    return _acting(name, recipe, [said(action) for action in actions])


def _acting(name: str, recipe: HarnessRecipe, parts: Sequence[str]) -> Step:
    """An answer of several actions; where the harness takes commands as JSON text, the lists in it are joined."""
    if len(parts) == 1 or recipe.acts_by.tool:
        return Step(name, Scripted("".join(parts)), tuple(parts))
    if not parts[0].startswith("{"):
        return Step(name, Scripted("\n".join(parts)), tuple(parts))
    first, *rest = map(json.loads, parts)
    for other in rest:
        first |= {key: first[key] + value for key, value in other.items() if isinstance(value, list)}
    return Step(name, Scripted(json.dumps(first)), tuple(parts))


def at_once(recipe: HarnessRecipe, steps: Sequence[Step]) -> list[Step]:
    """The steps for a harness that ends after the first answer that acts: one such answer, after all others."""
    parts = [part for step in steps for part in step.parts]
    if not parts:
        return list(steps)
    others = [step for step in steps if not step.parts]
    solve = _acting("solve", recipe, parts)
    return [*(step for step in others if not step.last), solve, *(step for step in others if step.last)]


def ending(recipe: HarnessRecipe) -> list[Step]:
    """What ends the run."""
    return [Step("finish", Scripted(said(action.filled()))) for action in recipe.finish]


def malformed(recipe: HarnessRecipe) -> Step:
    """A call whose arguments are no JSON, or text that breaks off."""
    if tool := recipe.acts_by.tool:
        return Step("malformed", Scripted(call_text(tool, '{"command": ')))
    (whole,) = run("", recipe, "echo 1", files={"malformed.txt": "1"}).parts
    return Step("malformed", Scripted('{"commands": [{' if whole.startswith("{") else whole[: len(whole) * 3 // 4]))


def unknown_tool(recipe: HarnessRecipe) -> list[Step]:
    """A call of a tool that does not exist, or JSON text without what must be in it. Other text is no mistake."""
    if not recipe.by_text:
        return [Step("unknown tool", Scripted(call_text("no_such_tool", {"x": 1})))]
    return [Step("unknown tool", Scripted('{"x": 1}'))] if recipe.acts_by.text.startswith("{") else []


# --- scenes


def calls(recipe: HarnessRecipe, tag: str) -> list[Step]:
    """Eight answers that call tools; the second calls two at once."""
    return [
        run("solve", recipe, SOLVE, files=ANSWER),
        run("parallel", recipe, "echo 1 > one.txt", "echo 2 > two.txt", files={"one.txt": "1", "two.txt": "2"}),
        *(
            run(f"step {n}", recipe, f"echo step {n} && wc -c answer.txt", files={f"step-{n}.txt": str(n)})
            for n in range(3, 9)
        ),
    ]


def mistakes(recipe: HarnessRecipe, tag: str) -> list[Step]:
    """Malformed arguments, an unknown tool, and, when both are got over, an empty answer."""
    recovered = run("recovered", recipe, "echo 1 > recovered.txt", files=RECOVERED)
    return [
        run("solve", recipe, SOLVE, files=ANSWER),
        malformed(recipe),
        *unknown_tool(recipe),
        recovered,
        Step("empty", Scripted(""), last=True),
    ]


def cut(recipe: HarnessRecipe, tag: str) -> list[Step]:
    """An answer that the limit of tokens cuts."""
    return [run("solve", recipe, SOLVE, files=ANSWER), Step("cut", Scripted("Now I shall", finish="length"))]


def faults(recipe: HarnessRecipe, tag: str) -> list[Step]:
    """Errors 429 and 500 and a dropped connection, each before an answer that is needed."""
    return [
        Step("429", Scripted(status=429, retry_after=1)),
        run("solve", recipe, SOLVE, files=ANSWER),
        Step("500", Scripted(status=500)),
        run("recovered", recipe, "echo 1 > recovered.txt", files=RECOVERED),
        Step("drop", Scripted(delay_s=NEVER_S), kill=True),
    ]


def hang(recipe: HarnessRecipe, tag: str) -> list[Step]:
    """A process that outlives its command (a mistake, where the run ends after a command), and no second answer."""
    command = f"(setsid sleep 1{digits(tag)} > /dev/null 2>&1 &) ; {SOLVE}"
    first = run("daemon", recipe, command, files=ANSWER) if recipe.finish else malformed(recipe)
    return [first, Step("hang", Scripted(delay_s=NEVER_S))]


def subagent(recipe: HarnessRecipe, tag: str) -> list[Step]:
    """Work for a sub-agent, which runs a command; meanwhile or after it the task."""
    assert recipe.subagent is not None
    prompt = f"Run one command, then say what it printed. [scene {tag}{SUB}]"
    wait = Scripted(said(recipe.shell.filled(command="sleep 3")))
    return [
        Step("subagent", Scripted(said(recipe.subagent.filled(prompt=prompt)))),
        Step("wait", wait),
        run("solve", recipe, SOLVE, files=ANSWER),
    ]


def digits(tag: str) -> str:
    """The number at the end of a tag."""
    return tag.rpartition("-")[2]


def _goes_on(recipe: HarnessRecipe) -> bool:
    """Whether it has a shell, and asks again after an answer that acts."""
    return recipe.write is None and bool(recipe.finish)


@dataclass(frozen=True)
class Scene:
    """One run of a harness. ``files``: what must lie in the workspace in the end. ``faulty``: the proxy passes the
    engine's failures on at once. ``together``: four of these run at once.
    """

    name: str
    script: Callable[[HarnessRecipe, str], list[Step]]
    files: dict[str, str] = field(default_factory=lambda: dict(ANSWER))
    needs: Callable[[HarnessRecipe], bool] = lambda recipe: True
    faulty: bool = False
    together: bool = False
    timeout_s: float = 240.0


SCENES = {
    scene.name: scene
    for scene in (
        Scene("calls", calls, {**ANSWER, "one.txt": "1", "two.txt": "2"}),
        Scene("mistakes", mistakes, {**ANSWER, **RECOVERED}, together=True),
        Scene("cut", cut, together=True),
        Scene("faults", faults, {**ANSWER, **RECOVERED}, faulty=True, together=True),
        Scene("hang", hang, together=True),
        Scene("subagent", subagent, needs=lambda recipe: recipe.subagent is not None and _goes_on(recipe)),
        Scene("compaction", lambda recipe, tag: [], needs=lambda recipe: recipe.compacts and _goes_on(recipe)),
    )
}


def plays(scene: Scene, recipe: HarnessRecipe, tag: str, kill: Callable[[], None]) -> Iterator[Play]:
    """The conversations of a scene, the harness's own first."""
    if scene.name == "compaction":
        yield Compaction(tag, [], ending(recipe), recipe=recipe)
        return
    steps = scene.script(recipe, tag)
    yield Play(tag, steps if recipe.finish else at_once(recipe, steps), ending(recipe), kill)
    if scene.name == "subagent":
        yield Play(tag + SUB, [run("sub", recipe, "echo found")], [Step("report", Scripted("It printed found."))])
