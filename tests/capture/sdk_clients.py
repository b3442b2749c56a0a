"""The official SDKs behind one face: each keeps a history as its users do and tells an answer in the same words."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anthropic
import openai
from google import genai
from google.genai import types as gemini
from proxy_helpers import Harness

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = ("bash", "look")
MODEL = "any/model-1"
VERDICT = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}


@dataclass
class Said:
    """One answer. ``finish`` in Chat Completions' words; ``calls`` as (id, name, arguments)."""

    text: str
    calls: list[tuple[str, str, dict[str, Any]]]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    reasoning: str = ""


@dataclass
class Sdk(ABC):
    """A client with its history. ``turn`` asks and appends the answer in the SDK's own form."""

    harness: Harness
    retries: int = 0
    timeout_s: float = 30.0
    history: list[Any] = field(default_factory=list)
    errors: ClassVar[dict[str, Any]]  # what went wrong -> the exception's class
    full_context: ClassVar[str]  # words by which clients recognise a full context

    @property
    def base(self) -> str:
        return str(self.harness.http.base_url).rstrip("/")

    async def turn(self, stream: bool = False, **wishes: Any) -> Said:
        async with self.client() as client:
            answer = await (self.streamed(client, wishes) if stream else self.whole(client, wishes))
        self.history += self.replayed(answer)
        return self.told(answer)

    @abstractmethod
    def client(self) -> Any:
        """A fresh client, to be entered."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Append a user message."""

    @abstractmethod
    def results(self, said: Said, outputs: list[str]) -> None:
        """Append the results of the calls."""

    @abstractmethod
    async def whole(self, client: Any, wishes: dict[str, Any]) -> Any:
        """An answer that is not streamed."""

    @abstractmethod
    async def streamed(self, client: Any, wishes: dict[str, Any]) -> Any:
        """A streamed answer, put together by the SDK."""

    @abstractmethod
    def replayed(self, answer: Any) -> list[Any]:
        """The answer as items of the history."""

    @abstractmethod
    def told(self, answer: Any) -> Said:
        """The answer in the common words."""

    @abstractmethod
    def choose(self, choice: str) -> dict[str, Any]:
        """The wishes for tool_choice auto, none, required or a tool's name."""

    @abstractmethod
    def one_call_only(self) -> dict[str, Any]:
        """The wishes against parallel calls; {} where the API has none."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """The wishes for an answer by the schema VERDICT."""

    @abstractmethod
    def at_most(self, tokens: int) -> dict[str, Any]:
        """The wish for a short answer."""

    @abstractmethod
    async def count(self) -> int:
        """The tokens of the history, where the API counts them."""

    @abstractmethod
    async def ask_elsewhere(self) -> Any:
        """A request to a route that the proxy does not have."""


class OpenAI(Sdk):
    """What both of OpenAI's APIs share."""

    errors: ClassVar[dict[str, Any]] = {
        "key": openai.AuthenticationError,
        "route": openai.NotFoundError,
        "large": openai.APIStatusError,
        "request": openai.BadRequestError,
        "rate": openai.RateLimitError,
        "overload": openai.InternalServerError,
        "internal": openai.InternalServerError,
        "upstream_timeout": openai.InternalServerError,
        "timeout": openai.APITimeoutError,
        "connection": openai.APIConnectionError,
    }
    full_context = "context_length_exceeded"

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.base}/v1", api_key=self.harness.key, max_retries=self.retries, timeout=self.timeout_s
        )

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    async def ask_elsewhere(self) -> Any:
        return await self.client().embeddings.create(model=MODEL, input="x")


class ChatSdk(OpenAI):
    """Chat Completions."""

    def results(self, said: Said, outputs: list[str]) -> None:
        for (call_id, _, _), output in zip(said.calls, outputs, strict=True):
            self.history.append({"role": "tool", "tool_call_id": call_id, "content": output})

    def _body(self, wishes: dict[str, Any]) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in TOOLS]
        return {"model": MODEL, "messages": self.history, "tools": tools, **wishes}

    async def whole(self, client: Any, wishes: dict[str, Any]) -> Any:
        return await client.chat.completions.create(**self._body(wishes))

    async def streamed(self, client: Any, wishes: dict[str, Any]) -> Any:
        usage: Any = {"include_usage": True}
        async with client.chat.completions.stream(stream_options=usage, **self._body(wishes)) as stream:
            try:
                return await stream.get_final_completion()
            except openai.LengthFinishReasonError as error:  # how this SDK tells of a cut answer
                return error.completion

    def replayed(self, answer: Any) -> list[Any]:
        return [answer.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})]

    def told(self, answer: Any) -> Said:
        message = answer.choices[0].message
        calls = [(c.id, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
        reasoning = getattr(message, "reasoning_content", None) or ""
        finish, usage = answer.choices[0].finish_reason, answer.usage
        return Said(message.content or "", calls, finish, usage.prompt_tokens, usage.completion_tokens, reasoning)

    def choose(self, choice: str) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": choice}}
        return {"tool_choice": named if choice in TOOLS else choice}

    def one_call_only(self) -> dict[str, Any]:
        return {"parallel_tool_calls": False}

    def as_json(self) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}}

    def at_most(self, tokens: int) -> dict[str, Any]:
        return {"max_completion_tokens": tokens}

    async def count(self) -> int:
        raise NotImplementedError


class ResponsesSdk(OpenAI):
    """Responses, without state on the server."""

    def results(self, said: Said, outputs: list[str]) -> None:
        for (call_id, _, _), output in zip(said.calls, outputs, strict=True):
            self.history.append({"type": "function_call_output", "call_id": call_id, "output": output})

    def _body(self, wishes: dict[str, Any]) -> dict[str, Any]:
        tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in TOOLS]
        return {"model": MODEL, "input": self.history, "tools": tools, "store": False, **wishes}

    async def whole(self, client: Any, wishes: dict[str, Any]) -> Any:
        return await client.responses.create(**self._body(wishes))

    async def streamed(self, client: Any, wishes: dict[str, Any]) -> Any:
        async with client.responses.stream(**self._body(wishes)) as stream:
            return [event async for event in stream][-1].response  # the SDK's shortcut knows no cut answer

    def replayed(self, answer: Any) -> list[Any]:
        return [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]

    def told(self, answer: Any) -> Said:
        items = [item for item in answer.output if item.type == "function_call"]
        calls = [(item.call_id, item.name, json.loads(item.arguments)) for item in items]
        thoughts = [item for item in answer.output if item.type == "reasoning"]
        reasoning = "".join(part.text for item in thoughts for part in (item.content or item.summary or ()))
        cut = answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
        finish = "length" if cut else "tool_calls" if calls else "stop"
        usage = answer.usage
        return Said(answer.output_text, calls, finish, usage.input_tokens, usage.output_tokens, reasoning)

    def choose(self, choice: str) -> dict[str, Any]:
        return {"tool_choice": {"type": "function", "name": choice} if choice in TOOLS else choice}

    def one_call_only(self) -> dict[str, Any]:
        return {"parallel_tool_calls": False}

    def as_json(self) -> dict[str, Any]:
        return {"text": {"format": {"type": "json_schema", "name": "verdict", "schema": VERDICT}}}

    def at_most(self, tokens: int) -> dict[str, Any]:
        return {"max_output_tokens": tokens}

    async def count(self) -> int:
        raise NotImplementedError


class AnthropicSdk(Sdk):
    """Messages."""

    errors: ClassVar[dict[str, Any]] = {
        "key": anthropic.AuthenticationError,
        "route": anthropic.NotFoundError,
        "large": anthropic.APIStatusError,
        "request": anthropic.BadRequestError,
        "rate": anthropic.RateLimitError,
        "overload": anthropic.InternalServerError,
        "internal": anthropic.InternalServerError,
        "upstream_timeout": anthropic.InternalServerError,
        "timeout": anthropic.APITimeoutError,
        "connection": anthropic.APIConnectionError,
    }
    full_context = "prompt is too long"

    def client(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(
            base_url=self.base, api_key=self.harness.key, max_retries=self.retries, timeout=self.timeout_s
        )

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, said: Said, outputs: list[str]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": call_id, "content": output}
            for (call_id, _, _), output in zip(said.calls, outputs, strict=True)
        ]
        self.history.append({"role": "user", "content": blocks})

    def _body(self, wishes: dict[str, Any]) -> dict[str, Any]:
        tools = [{"name": name, "description": "a tool", "input_schema": SCHEMA} for name in TOOLS]
        return {"model": MODEL, "messages": self.history, "tools": tools, "max_tokens": 500} | wishes

    async def whole(self, client: Any, wishes: dict[str, Any]) -> Any:
        return await client.messages.create(**self._body(wishes))

    async def streamed(self, client: Any, wishes: dict[str, Any]) -> Any:
        async with client.messages.stream(**self._body(wishes)) as stream:
            return await stream.get_final_message()

    def replayed(self, answer: Any) -> list[Any]:
        return [{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}]

    def told(self, answer: Any) -> Said:
        kinds = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        text = "".join(block.text for block in answer.content if block.type == "text")
        reasoning = "".join(block.thinking for block in answer.content if block.type == "thinking")
        calls = [(block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"]
        usage = answer.usage
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        return Said(text, calls, kinds[answer.stop_reason], prompt, usage.output_tokens, reasoning)

    def choose(self, choice: str) -> dict[str, Any]:
        named = {"type": "tool", "name": choice}
        return {"tool_choice": named if choice in TOOLS else {"type": {"required": "any"}.get(choice, choice)}}

    def one_call_only(self) -> dict[str, Any]:
        return {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}

    def as_json(self) -> dict[str, Any]:
        return {"output_config": {"format": {"type": "json_schema", "schema": VERDICT}}}

    def at_most(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens}

    async def count(self) -> int:
        body = self._body({})
        del body["max_tokens"]
        return (await self.client().messages.count_tokens(**body)).input_tokens

    async def ask_elsewhere(self) -> Any:
        return await self.client().messages.batches.list()


class GeminiSdk(Sdk):
    """generateContent. The SDK's own calling of functions is off."""

    errors: ClassVar[dict[str, Any]] = {
        "key": genai.errors.ClientError,
        "route": genai.errors.ClientError,
        "large": genai.errors.ClientError,
        "request": genai.errors.ClientError,
        "rate": genai.errors.ClientError,
        "overload": genai.errors.ServerError,
        "internal": genai.errors.ServerError,
        "upstream_timeout": genai.errors.ServerError,
        "timeout": Exception,  # of whichever transport is installed
        "connection": Exception,
    }
    full_context = "exceeds the maximum number of tokens"

    def client(self) -> Any:
        retry = gemini.HttpRetryOptions(attempts=self.retries + 1, initial_delay=0.2)
        options = gemini.HttpOptions(base_url=self.base, timeout=int(self.timeout_s * 1000), retry_options=retry)
        return genai.Client(api_key=self.harness.key, http_options=options).aio

    def say(self, text: str) -> None:
        self.history.append(gemini.Content(role="user", parts=[gemini.Part(text=text)]))

    def results(self, said: Said, outputs: list[str]) -> None:
        responses = [
            gemini.FunctionResponse(id=call_id, name=name, response={"output": output})
            for (call_id, name, _), output in zip(said.calls, outputs, strict=True)
        ]
        self.history.append(gemini.Content(role="user", parts=[gemini.Part(function_response=r) for r in responses]))

    def _body(self, wishes: dict[str, Any]) -> dict[str, Any]:
        declared = [gemini.FunctionDeclaration(name=name, parameters_json_schema=SCHEMA) for name in TOOLS]
        config = gemini.GenerateContentConfig(
            tools=[gemini.Tool(function_declarations=declared)],
            automatic_function_calling=gemini.AutomaticFunctionCallingConfig(disable=True),
            **wishes,
        )
        return {"model": MODEL, "contents": self.history, "config": config}

    async def whole(self, client: Any, wishes: dict[str, Any]) -> Any:
        return [await client.models.generate_content(**self._body(wishes))]

    async def streamed(self, client: Any, wishes: dict[str, Any]) -> Any:
        return [chunk async for chunk in await client.models.generate_content_stream(**self._body(wishes))]

    def replayed(self, answer: Any) -> list[Any]:
        return [gemini.Content(role="model", parts=self._parts(answer))]

    def told(self, answer: Any) -> Said:
        parts = self._parts(answer)
        text = "".join(part.text for part in parts if part.text and not part.thought)
        reasoning = "".join(part.text for part in parts if part.text and part.thought)
        calls = [(p.function_call.id, p.function_call.name, p.function_call.args) for p in parts if p.function_call]
        cut = answer[-1].candidates[0].finish_reason == gemini.FinishReason.MAX_TOKENS
        finish = "length" if cut else "tool_calls" if calls else "stop"
        usage = answer[-1].usage_metadata
        spoken = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
        return Said(text, calls, finish, usage.prompt_token_count, spoken, reasoning)

    @staticmethod
    def _parts(answer: Any) -> list[Any]:
        candidates = [chunk.candidates[0] for chunk in answer if chunk.candidates]
        return [part for one in candidates if one.content for part in one.content.parts or ()]

    def choose(self, choice: str) -> dict[str, Any]:
        mode = {"auto": "AUTO", "none": "NONE"}.get(choice, "ANY")
        names = [choice] if choice in TOOLS else None
        calling = gemini.FunctionCallingConfig(mode=mode, allowed_function_names=names)
        return {"tool_config": gemini.ToolConfig(function_calling_config=calling)}

    def one_call_only(self) -> dict[str, Any]:
        return {}

    def as_json(self) -> dict[str, Any]:
        return {"response_mime_type": "application/json", "response_json_schema": VERDICT}

    def at_most(self, tokens: int) -> dict[str, Any]:
        return {"max_output_tokens": tokens}

    async def count(self) -> int:
        return (await self.client().models.count_tokens(model=MODEL, contents=self.history)).total_tokens

    async def ask_elsewhere(self) -> Any:
        return await self.client().models.embed_content(model=MODEL, contents="x")
