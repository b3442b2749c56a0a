"""A scripted teacher for the word tasks: what it would run, and the conversation that a harness makes of it.

It is lazy on purpose: it often stops without acting and sometimes looks at its own file, so that a student who copies
it starts far from perfect and reinforcement has something to find. It never writes a wrong word.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from pipeline.tasks.generate import ORDINALS, WordTask

Message = dict[str, Any]
FINAL_ANSWER = "Done."
IDLE_ANSWER = "Sure."  # of a lazy run: another word, so that unlearning it leaves the end of a good run alone
LOOK = "cat answer.txt"
MOST_LOOKS = 3
_INSTRUCTION = re.compile(r"Write the (\w+) word of this list to answer\.txt: ((?:\w+ ){3}\w+)\s*$")


@dataclass(frozen=True)
class Teacher:
    """``lazy``: share of tasks answered without acting; ``verify``: chance of each further needless look."""

    lazy: float = 0.5
    verify: float = 0.15
    seed: int = 0

    def plan(self, task: WordTask) -> tuple[str, ...]:
        """The shell commands for this task; the same for the same task and seed."""
        rng = random.Random(f"{self.seed}/{task.instruction}")
        if rng.random() < self.lazy:
            return ()
        looks = 0
        while looks < MOST_LOOKS and rng.random() < self.verify:
            looks += 1
        return act(task, looks)

    def answer(self, messages: list[Message]) -> Message:
        """The next assistant message after ``messages`` (Chat Completions). Raises ValueError without a word task."""
        task = parse_task(messages)
        done = sum(message["role"] == "assistant" for message in messages)
        commands = self.plan(task)
        return call_message(commands[done], f"call_{done}") if done < len(commands) else final_message(commands)


def act(task: WordTask, looks: int) -> tuple[str, ...]:
    """The commands of a run that solves the task and then looks at its own file ``looks`` times."""
    return (f"echo {task.answer} > answer.txt", *[LOOK] * looks)


def parse_task(messages: list[Message]) -> WordTask:
    """Find the word task in the user messages. Raises ValueError if there is none."""
    for message in messages:
        found = _INSTRUCTION.search(text_of(message)) if message["role"] == "user" else None
        if found:
            return WordTask(tuple(found[2].split()), ORDINALS.index(found[1]))
    raise ValueError("no word task among the user messages")


def text_of(message: Message) -> str:
    """The text of a message whose content is a string, a list of text parts or nothing."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def call_message(command: str, call_id: str) -> Message:
    """An assistant message that calls the harness's ``bash`` tool."""
    arguments = json.dumps({"command": command})
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def final_message(commands: tuple[str, ...]) -> Message:
    """The assistant message that ends a rollout in which ``commands`` ran."""
    return {"role": "assistant", "content": FINAL_ANSWER if commands else IDLE_ANSWER}


def conversation(system: str, task: WordTask, commands: tuple[str, ...]) -> list[Message]:
    """The whole conversation as Pi would record it if the teacher ran ``commands``; the tool results are foretold."""
    messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": task.instruction}]
    for number, command in enumerate(commands):
        result = f"{task.answer}\n" if command == LOOK else "(no output)"
        messages.append(call_message(command, f"call_{number}"))
        messages.append({"role": "tool", "content": result, "tool_call_id": f"call_{number}"})
    return [*messages, final_message(commands)]
