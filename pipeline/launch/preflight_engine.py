"""Checks that ask the engine: its tool parser, thoughts, token continuity, logprobs, and the same model in the trainer.

Nothing is sampled for the parser: what the chat template writes for a call is handed to the engine's parser as ids,
as `capture.turn` hands over what was sampled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

from pipeline.capture import ids
from pipeline.capture.canonical import ChatMessage, Memo
from pipeline.capture.continuity import CALL, TEXT, USER, NoBridge, SelfTest, Template, inlined, suffix
from pipeline.capture.dialects import ANTHROPIC, CHAT, GEMINI, RESPONSES
from pipeline.capture.dialects.base import Answer, ChatRequest, Dialect, ToolCall
from pipeline.capture.upstream import Engine, Message, Rendered, Sampled
from pipeline.config import Config
from pipeline.engine.server import SERVED_MODEL_NAME
from pipeline.harness.base import Action, HarnessRecipe, get_harness
from pipeline.launch.preflight_check import LATER, Forward, Grounds, NotHere, Refused

ASK_S, OUTAGE_S = 60.0, 5.0
SALT = "preflight"
CALL_ID = "call00000"
COMMAND = "cat 'a file.txt' && echo \"é\""
OPEN, CLOSE = "<think>", "</think>"
FEW, MORE = 24, 64  # tokens to sample
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
# Largest and mean difference of a token's logprob between engine and trainer, by type of the weights. Measured: 2e-5
# in float32, 0.12 and 0.025 in bfloat16; a wrong rotary embedding gave 0.82 and 0.12.
GAPS = {"float32": (0.01, 0.002), "bfloat16": (1.0, 0.06), "float16": (0.25, 0.02)}
NEEDED = {TEXT: "user", CALL: "tool"}  # shape of a harness's turns: the pattern of new messages that follows them
T = TypeVar("T")


def ask(grounds: Grounds, question: Callable[[Engine], Awaitable[T]]) -> T:
    """What ``question`` learns from the engine, in an event loop of its own. Raises NotHere where there is none."""
    if not grounds.url:
        raise NotHere("there is no engine to ask")

    async def asking() -> T:
        return await question(Engine(grounds.url, SERVED_MODEL_NAME, ASK_S, OUTAGE_S))

    return asyncio.run(asking())


def learn_template(grounds: Grounds) -> Template:
    """See `Grounds.template`."""
    return ask(grounds, lambda engine: SelfTest(engine, _thinking(grounds)).run())


def _thinking(grounds: Grounds) -> bool | None:
    return grounds.config.harness.sampling.thinking


def engine(grounds: Grounds) -> str:
    """Start the engine where none is up; whether it serves the window that everybody is told of."""
    if not grounds.url and grounds.start_engine is None:
        raise NotHere(LATER)
    if grounds.start_engine is not None:
        grounds.url = grounds.start_engine(grounds.stack)
    window = ask(grounds, lambda engine: engine.context_length())
    if window < grounds.config.model.max_model_len:
        raise Refused(
            f"model.max_model_len={grounds.config.model.max_model_len}, but the engine serves {window} tokens"
        )
    return f"it answers, with a window of {window} tokens"


# --- the tool parser


def parser(grounds: Grounds) -> str:
    """A call in the spelling of the chat template, through the engine's parser and each harness's dialect."""
    template = grounds.template
    recipes = [get_harness(name) for name in grounds.config.mix.harnesses]
    silent = [recipe.name for recipe in recipes if recipe.acts_by == Action()]
    heard = [recipe for recipe in recipes if recipe.acts_by != Action()]
    answers = ask(grounds, lambda engine: _heard(engine, grounds, template, heard))
    wrong = {
        recipe.name: text for recipe, message in zip(heard, answers, strict=True) if (text := _wrong(recipe, message))
    }
    if wrong:
        raise Refused("; ".join(f"{name}: {text}" for name, text in wrong.items()))
    said = [f"{recipe.name} {recipe.acts_by.tool or 'in text'}" for recipe in heard]
    return ", ".join(said) + (f"; not known what a model says to {', '.join(silent)}" if silent else "")


async def _heard(
    engine: Engine, grounds: Grounds, template: Template, recipes: Sequence[HarnessRecipe]
) -> list[Message | str]:
    """What the engine hears of each harness's action; a text where it cannot be told what the model would say."""
    answers: list[Message | str] = []
    for recipe in recipes:
        try:
            answers.append(await _message(engine, grounds, template, recipe))
        except NoBridge as error:
            answers.append(f"the chat template cannot write it ({error})")
    return answers


async def _message(engine: Engine, grounds: Grounds, template: Template, recipe: HarnessRecipe) -> Message:
    action = _action(recipe)
    tools = request_of(recipe).tools
    fields = engine.fields(tools.data if tools else None, _thinking(grounds))
    answer, after = _answer(action), _follow_up(action)
    prompt = await engine.render([USER], fields)
    turn_end, _ = await suffix(engine, template, answer, after, fields)
    said = await _spelt(engine, fields, prompt, _spoken(action), after, turn_end)
    ended = ids.join((said, turn_end.partition(b",")[0]))
    sampled = Sampled(ended, ids.count(ended), [], "stop", None, [], 0)
    return await engine.derender(prompt.text, ids.count(prompt.text), prompt.frame, sampled, fields)


async def _spelt(
    engine: Engine, fields: bytes, prompt: Rendered, message: ChatMessage, after: list[ChatMessage], turn_end: bytes
) -> bytes:
    """The ids between the prompt and the end of the turn: of a bare answer, or of one with thoughts where the prompt
    has begun a thought. Raises NoBridge when the template writes no history that goes on from the prompt.
    """
    thoughtful = message | {"reasoning": "hm"}
    for spoken in (message, thoughtful, inlined(thoughtful)):
        whole = (await engine.render([USER, spoken, *after], fields)).text
        head, tail = prompt.text + b",", b"," + turn_end
        if whole.startswith(head) and whole.endswith(tail) and len(whole) > len(head) + len(tail):
            return whole[len(head) : -len(tail)]
    raise NoBridge("its history does not go on from its own prompt")


def _action(recipe: HarnessRecipe) -> Action:
    return recipe.acts_by.filled(command=COMMAND, path="answer.txt", content="42")


def _spoken(action: Action) -> ChatMessage:
    if not action.tool:
        return {"role": "assistant", "content": action.text}
    function = {"name": action.tool, "arguments": json.dumps(action.arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
    }


def _follow_up(action: Action) -> list[ChatMessage]:
    return [{"role": "tool", "tool_call_id": CALL_ID, "content": "o"}] if action.tool else [USER]


def _answer(action: Action, arguments: str = "{}") -> Answer:
    calls = (ToolCall(CALL_ID, action.tool, arguments),) if action.tool else ()
    return Answer("preflight", action.text, "", calls, "tool_calls" if calls else "stop", 1, 1, 0, 0)


def _wrong(recipe: HarnessRecipe, message: Message | str) -> str:
    """What is wrong with what the engine heard; "" when the harness would be told the very action."""
    action = _action(recipe)
    if isinstance(message, str):
        return message
    calls = message.tool_calls or []
    if not action.tool:
        if (message.content or "").strip().endswith(action.text.strip()) and not calls:  # thoughts may stand before
            return ""
        return f"its text came back as {_shown(message)}"
    if [call.function.name for call in calls] != [action.tool]:
        return f"a call of {action.tool} came back as {_shown(message)}"
    arguments = calls[0].function.arguments
    if json.loads(arguments) != action.arguments:
        return f"a call of {action.tool} came back with the arguments {arguments}"
    body = DIALECTS[recipe.dialect][0].answer(request_of(recipe), _answer(action, arguments))
    return "" if f'"{action.tool}"' in json.dumps(body) else f"its dialect lost the call of {action.tool}"


def _shown(message: Message) -> str:
    if message.tool_calls:
        return f"calls of {', '.join(call.function.name for call in message.tool_calls)}"
    kind, words = ("text", message.content) if message.content else ("a thought", message.reasoning)
    return f"{kind}: {words[:80]!r}" if words else "nothing"


def _chat_body(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": name, "description": "run", "parameters": parameters}}
    return {"messages": [USER], "tools": [tool]}


def _responses_body(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"input": "x", "tools": [{"type": "function", "name": name, "description": "run", "parameters": parameters}]}


def _anthropic_body(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    tools = [{"name": name, "description": "run", "input_schema": parameters}]
    return {"messages": [USER], "max_tokens": FEW, "tools": tools}


def _gemini_body(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    declared = [{"name": name, "description": "run", "parametersJsonSchema": parameters}]
    return {"contents": [{"role": "user", "parts": [{"text": "x"}]}], "tools": [{"functionDeclarations": declared}]}


DIALECTS: dict[str, tuple[Dialect, Callable[[str, dict[str, Any]], dict[str, Any]]]] = {
    "chat": (CHAT, _chat_body),
    "responses": (RESPONSES, _responses_body),
    "anthropic": (ANTHROPIC, _anthropic_body),
    "gemini": (GEMINI, _gemini_body),
}


def request_of(recipe: HarnessRecipe) -> ChatRequest:
    """A request with the one tool of a harness's recipe, in its dialect; without tools where it acts by text."""
    dialect, body_of = DIALECTS[recipe.dialect]
    action = _action(recipe)
    properties = {name: {"type": JSON_TYPES[type(value)]} for name, value in action.arguments.items()}
    body = body_of(action.tool, {"type": "object", "properties": properties, "required": list(properties)})
    if not action.tool:
        del body["tools"]
    return dialect.parse(json.dumps({"model": SERVED_MODEL_NAME} | body).encode(), Memo())


# --- thoughts


def thinking(grounds: Grounds) -> str:
    """Whether harness.sampling.thinking does what it says: the end of the prompt, and a few sampled tokens."""
    wanted = _thinking(grounds)
    prompt, other = ask(grounds, lambda engine: _prompts(engine, wanted))
    text = _text(grounds, prompt.text)
    opened = text.rfind(OPEN) > text.rfind(CLOSE)
    if wanted is None:
        return f"left to the chat template, which {'opens' if opened else 'does not open'} a thought"
    if wanted:
        if prompt.text == other.text:
            raise Refused("harness.sampling.thinking=true, but the chat template has no switch for thoughts")
        return "on: the switch changes the prompt"
    if opened:
        raise Refused(f"harness.sampling.thinking=false, but the prompt ends in an open thought: {text[-40:]!r}")
    message = ask(grounds, lambda engine: _sampled_message(engine, grounds.config, prompt))
    if message.reasoning or OPEN in (message.content or ""):
        raise Refused(
            f"harness.sampling.thinking=false, but the model thinks: {(message.reasoning or message.content)!r}"
        )
    return "off: the prompt opens no thought, and none was sampled" + (
        "" if prompt.text != other.text else " (the chat template has no switch)"
    )


async def _prompts(engine: Engine, wanted: bool | None) -> tuple[Rendered, Rendered]:
    """The prompt as sessions get it, and with the switch the other way."""
    return (
        await engine.render([USER], engine.fields(None, wanted)),
        await engine.render([USER], engine.fields(None, not wanted)),
    )


async def _sampled_message(engine: Engine, config: Config, prompt: Rendered) -> Message:
    sampled = await engine.generate(prompt.text, prompt.frame, _sampling(config, FEW), SALT)
    fields = engine.fields(None, config.harness.sampling.thinking)
    return await engine.derender(prompt.text, ids.count(prompt.text), prompt.frame, sampled, fields)


def _sampling(config: Config, tokens: int) -> dict[str, Any]:
    return {"temperature": config.harness.sampling.temperature, "max_tokens": tokens}


def _text(grounds: Grounds, prompt: bytes) -> str:
    body = {"model": SERVED_MODEL_NAME, "tokens": ids.numbers(prompt)}
    reply = httpx.post(f"{grounds.url}/detokenize", json=body, timeout=ASK_S, trust_env=False)
    reply.raise_for_status()
    return str(reply.json()["prompt"])


# --- continuity and logprobs


def continuity(grounds: Grounds) -> str:
    """Whether a turn's prompt and sample begin the next prompt, for the turns that each harness makes."""
    if not grounds.config.harness.sampling.continuity:
        raise NotHere("harness.sampling.continuity=false renders every history anew")
    template = grounds.template
    if template.problem:
        raise Refused(f"every history would be rendered anew: {template.problem}")
    recipes = [get_harness(name) for name in grounds.config.mix.harnesses]
    shapes = {recipe.name: NEEDED[TEXT if recipe.by_text else CALL] for recipe in recipes}
    wrong = [
        f"{name} ({get_harness(name).dialect}): {pattern}: {template.verdicts.get(pattern)}"
        for name, pattern in shapes.items()
        if template.verdicts.get(pattern) != "ok"
    ]
    if wrong:
        raise Refused("a row would end with every turn of " + "; ".join(wrong))
    partly = [f"{pattern}: {verdict}" for pattern, verdict in template.verdicts.items() if verdict != "ok"]
    return f"it holds for {', '.join(shapes)}" + (f"; a row ends at: {'; '.join(partly)}" if partly else "")


def logprobs(grounds: Grounds) -> str:
    """Whether logprobs are of the distribution that is sampled from: at twice the temperature the gap is half."""
    if not grounds.template.processed_logprobs:
        raise Refused("the engine's logprobs do not change with the temperature")
    return "they are those of the temperature"


# --- the trainer


def trainer(grounds: Grounds) -> str:
    """The engine's logprobs of a sample against the trainer's forward over the same ids."""
    if grounds.forward is None or not grounds.url:
        raise NotHere(LATER)
    prompt, sampled = ask(grounds, lambda engine: _sample(engine, grounds.config))
    forward = grounds.forward(ids.numbers(prompt.text), ids.numbers(sampled.text))
    dtype = grounds.config.model.dtype
    if forward.dtype != dtype:
        raise Refused(f"model.dtype={dtype} in the engine, but the trainer computes in {forward.dtype}")
    gaps = [abs(one - other) for one, other in zip(sampled.logprobs, forward.logprobs, strict=True)]
    largest, mean = max(gaps), sum(gaps) / len(gaps)
    seen = f"largest difference {largest:.2g}, mean {mean:.2g}, over {len(gaps)} tokens in {dtype}"
    most, most_mean = GAPS[dtype]
    if not (largest <= most and mean <= most_mean):
        raise Refused(f"{seen}; at most {most:g} and {most_mean:g} are rounding")
    return seen


async def _sample(engine: Engine, config: Config) -> tuple[Rendered, Sampled]:
    prompt = await engine.render([USER], engine.fields(None, config.harness.sampling.thinking))
    sampling = _sampling(config, MORE) | {"ignore_eos": True}
    return prompt, await engine.generate(prompt.text, prompt.frame, sampling, SALT)


def forward_of(trainer: Any, prompt: Sequence[int], sampled: Sequence[int]) -> Forward:
    """The trainer's logprobs of ``sampled`` after ``prompt``. Collective: every rank runs the same row."""
    import numpy as np
    import torch

    from pipeline.records import Row
    from pipeline.training.batch import WeightedRow, collate, plan

    trained = np.arange(len(prompt) + len(sampled)) >= len(prompt)
    row = Row(np.array([*prompt, *sampled], np.int32), trained, np.zeros(len(trained), np.float32))
    weighted = WeightedRow(row, 0.0, 0.0, True, "preflight", 0)
    ((batch,),) = plan([weighted], trainer.training.token_budget, trainer.policy.packs)
    with torch.no_grad():
        logprobs = trainer.engine(collate(batch).to(trainer.device))[0]
    dtype = str(next(trainer.policy.parameters()).dtype).removeprefix("torch.")
    return Forward(logprobs.float().cpu().tolist(), dtype)
