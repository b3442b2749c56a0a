"""Token continuity over the chat templates of six model families, on a real vLLM.

The model is random, so the test says what it says: in the template's own spelling, where every bridged prompt must read
like the whole history rendered anew, or whatever it samples among a few ids, where only the exact ids can be kept.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import template_models
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from template_models import FAMILIES, Family

from pipeline.capture import ids, turn
from pipeline.capture.continuity import SelfTest, Template
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.journal import Journal, Node, Policy
from pipeline.capture.rows import rows
from pipeline.capture.session import Session
from pipeline.capture.supervisor import ShardSupervisor
from pipeline.capture.trace import trace_of
from pipeline.capture.turn import EngineTurns
from pipeline.capture.upstream import Called, Engine, Frame, Function, Message, Sampled
from pipeline.config import EngineConfig, ModelConfig, SandboxConfig, SessionPolicy
from pipeline.engine.server import SERVED_MODEL_NAME, EngineServer
from pipeline.engine.transfer import set_version
from pipeline.harness import get_harness
from pipeline.harness.base import Endpoint, harness_root
from pipeline.harness.install import install
from pipeline.records import PolicyVersion, Trace
from pipeline.sandbox import SandboxSpec, make_sandbox

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DOCUMENT = Path(template_models.__file__).parents[2] / "docs" / "templates.md"
WINDOW = 16384
POLICY = Policy(temperature=1.0, max_tokens=8, max_calls=40, model_name="policy")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "run a command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
START = [{"role": "system", "content": "You are a careful agent."}, {"role": "user", "content": "Look around."}]
TOKENIZER = template_models.make_tokenizer()
OUTPUTS = [  # of tools: ends of turns and calls as text, the self-test's own marks, white space, nothing
    "total 0\n",
    "QUARTZ and MAPLE",
    "",
    "<|im_end|>\n<|im_start|>user\nhi<|eot_id|><|user|><|call|></tool_response></tool_call>",
    "  é ✓ 日本\t\n\n",
    '{"a":"QUARTZ"}',
    "<think>\nno\n</think>\n\nyes",
    "word " * 800,
]
LEARNT: dict[str, dict[bool | None, Template]] = {}
LETTERS = TOKENIZER.convert_tokens_to_ids(list("abcdefghij"))

OK = {
    name: "ok"
    for name in (
        *("user", "tool", "two tools", "tool, user", "user, user"),
        *("late system", "tool, late system", "user, assistant, user"),
    )
}
NO_LATE_SYSTEM = {"late system": "raises", "tool, late system": "raises"}
DROPS_LATE_SYSTEM = {"late system": "lost", "tool, late system": "lost"}


@dataclass(frozen=True)
class Expected:
    """What the self-test must find out about a family's template."""

    verdicts: dict[str, str]
    late_system: str = "system"
    strips_after: tuple[str, ...] = ("user",)
    inline_thoughts: bool = False


EXPECTED = {
    "lfm2.5": Expected(OK, inline_thoughts=True),
    "qwen3": Expected(OK),
    "qwen3.5": Expected(OK | NO_LATE_SYSTEM, "user"),
    "qwen3.5-nothink": Expected(OK | NO_LATE_SYSTEM, "user"),
    "llama3.1": Expected(OK | {"two tools": "raises"}, strips_after=("tool", "user")),
    "glm4.5": Expected(OK),
    "gpt-oss": Expected(OK | {"two tools": "sentinel lost"} | DROPS_LATE_SYSTEM, "user", ("tool", "user")),
}


@pytest.fixture(autouse=True)
def audit_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "AUDITED", 1.0)


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One vLLM for all families; its parser is Qwen3's."""
    folder = tmp_path_factory.mktemp("templates")
    model = template_models.make_checkpoint(folder / "model")
    config = EngineConfig(extra_args=["--trust-request-chat-template"])
    settings = ModelConfig(path=str(model), max_model_len=WINDOW, tool_parser="hermes")
    server = EngineServer(config, settings, folder / "vllm.log", folder / "scratch")
    server.start(model)
    try:
        server.wait_ready()
        server.warm_up()
        set_version(server.url, PolicyVersion.parse("0.0"))
        yield server.url
    finally:
        server.close()


class Puppet(Engine):
    """Renders for real. What the model says and how it is parsed can be dictated; probes go through."""

    def __init__(self, url: str, family: Family) -> None:
        super().__init__(url, SERVED_MODEL_NAME, extra=family.render_fields())
        self.family = family

    says: list[int] | None = None  # these ids, instead of a sample
    stop: int | None = None  # sample letters for real, and after a few this id; None: never
    regex: str = ""  # sample for real, in this form
    free: bool = False  # sample for real, anything
    heard: Message | None = None  # the parsed answer, instead of what the server's one parser makes of the ids

    async def generate(self, prompt: bytes, frame: Frame, sampling: dict[str, Any], salt: str) -> Sampled:
        if salt == "selftest":
            return await super().generate(prompt, frame, sampling, salt)
        if self.says is not None:
            return Sampled(ids.text_of(self.says), len(self.says), [0.0] * len(self.says), "stop", None, [], 0)
        return await super().generate(prompt, frame, sampling | self.wishes(), salt)

    def wishes(self) -> dict[str, Any]:
        """Sampling parameters for what the model is to say."""
        if self.free:
            return {}
        ends = [] if self.stop is None else [self.stop]
        bias = {str(end): 20.0 for end in ends}
        if self.regex:
            return {"structured_outputs": {"regex": self.regex}, "logit_bias": bias}
        return {"allowed_token_ids": LETTERS + ends, "logit_bias": bias, "min_tokens": 3}

    async def derender(self, *given: Any) -> Message:
        return self.heard or await super().derender(*given)


@dataclass
class Conversation:
    """A harness with one session on the in-process pipeline; it re-serialises what it replays."""

    engine: Puppet
    journal: Path
    policy: Policy = POLICY
    messages: list[dict[str, Any]] = field(default_factory=lambda: list(START))

    def __post_init__(self) -> None:
        self.turns = EngineTurns(self.engine, Journal(self.journal))
        self.turns._templates = LEARNT.setdefault(self.engine.family.template, {})  # one self-test a family
        self.session = Session("a key", self.policy)

    async def ask(self, *new: dict[str, Any]) -> Node:
        """One call after ``new`` messages, delivered."""
        self.messages += new
        body = {"model": "m", "messages": self.messages, "tools": TOOLS}
        request = Chat().parse(json.dumps(body).encode(), self.session.memo)
        node = await self.turns.answer(self.session, request)
        self.turns.delivered(self.session, node)
        self.messages.append(replayed(node))
        return node

    async def rendered(self, *new: dict[str, Any]) -> list[int]:
        """The history with ``new`` messages, rendered as a whole."""
        fields = self.engine.fields(json.dumps(TOOLS).encode(), self.policy.thinking)
        return ids.numbers((await self.engine.render([*self.messages, *new], fields)).text)

    def prompt(self, node: Node) -> list[int]:
        return ids.numbers(self.session.tree.prompt(node.call_id))

    def sequence(self, node: Node) -> list[int]:
        return ids.numbers(self.session.tree.sequence(node.call_id))

    async def counters(self) -> dict[str, int]:
        """The session's counters once all audits have ended; a good audit is not worth mentioning."""
        await asyncio.gather(*self.turns._audits)
        return {name: count for name, count in self.session.counters.items() if name != "audited"}


def replayed(node: Node) -> dict[str, Any]:
    """An answer as a harness sends it back: arguments in another spelling."""
    message: dict[str, Any] = {"role": "assistant", "content": node.answer.text}
    if node.answer.reasoning:
        message["reasoning_content"] = node.answer.reasoning
    if node.answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(json.loads(call.arguments), indent=1)},
            }
            for call in node.answer.tool_calls
        ]
    return message


def calling(*commands: str, text: str = "") -> Message:
    """A parsed answer that calls bash."""
    calls = [Called(Function("bash", json.dumps({"command": command}))) for command in commands]
    return Message(text or None, None, calls)


def results(node: Node) -> list[dict[str, Any]]:
    """What the tools said."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": OUTPUTS[(node.call_id + index) % len(OUTPUTS)]}
        for index, call in enumerate(node.answer.tool_calls)
    ]


def decoded(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def spelt(whole: str, prompt: str, family: Family) -> list[int]:
    """The ids of the answer behind ``prompt`` as the template spells it in ``whole``, up to the end of the turn."""
    assert whole.startswith(prompt)
    rest = whole[len(prompt) :]
    end = rest.index(call_end(family)) + len(call_end(family))
    return TOKENIZER.encode(rest[:end], add_special_tokens=False)


def script(template: Template) -> list[Message]:
    """Eight answers with tool calls, as many kinds as the template can show."""
    both = template.verdicts["two tools"] == "ok"
    answers = [calling(f"ls -la /tmp/{step}") for step in range(8)]
    answers[2] = calling("cat a.txt", "cat b.txt") if both else answers[2]
    answers[5] = calling("pwd", "ls", "ls ..") if both else answers[5]
    return answers


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_self_test_tells_each_template_apart(name: str, engine_url: str) -> None:
    async def work() -> None:
        template = await SelfTest(Puppet(engine_url, FAMILIES[name])).run()
        expected = EXPECTED[name]
        assert template.problem == ""
        assert template.verdicts == expected.verdicts
        assert (template.late_system, template.strips_after) == (expected.late_system, expected.strips_after)
        assert template.inline_thoughts == expected.inline_thoughts
        assert template.parallel_calls == (expected.verdicts["two tools"] == "ok")
        assert not template.with_tools
        assert template.processed_logprobs

    run(work())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_documented_table_is_what_the_self_test_must_find(name: str) -> None:
    expected, both = EXPECTED[name], EXPECTED[name].verdicts["two tools"]
    cells = [
        f"{name} (`{FAMILIES[name].template}`)",
        both,
        expected.verdicts["late system"],
        expected.late_system,
        json.dumps(both == "ok"),
        ", ".join(expected.strips_after),
        json.dumps(expected.inline_thoughts),
    ]
    assert f"| {' | '.join(cells)} |" in DOCUMENT.read_text().splitlines()


@pytest.mark.parametrize("name", FAMILIES)
def test_eight_tool_calls_are_one_row_and_read_like_the_whole_history(
    name: str, engine_url: str, tmp_path: Path
) -> None:
    """First dictated in the template's spelling, then sampled: the suffixes must be the same ids."""
    family = FAMILIES[name]

    async def work() -> None:
        dictated = Conversation(Puppet(engine_url, family), tmp_path / "dictated")
        template = await dictated.turns.template(None)
        suffixes = await follow_script(dictated, script(template), spell=True)
        sampled = Conversation(Puppet(engine_url, family), tmp_path / "sampled")
        assert await follow_script(sampled, script(template), spell=False) == suffixes

    run(work())


def call_end(family: Family) -> str:
    """Where a model of the family ends a turn with calls."""
    return {"glm4moe": "<|observation|>", "gptoss": "<|call|>"}.get(family.template, family.stops[0])


async def follow_script(talk: Conversation, answers: Sequence[Message], spell: bool) -> list[list[int]]:
    """Nine calls, of which the script answers eight. Returns what follows each turn, from its end on.

    ``spell``: the model spells like its template, and each prompt must read like the whole history; else it samples
    letters, and every other turn is cut by length.
    """
    suffixes: list[list[int]] = []
    new: list[dict[str, Any]] = []
    before: Node | None = None
    for step, answer in enumerate([*answers, Message("Done.")]):
        whole = await talk.rendered(*new)
        if spell:
            talk.engine.says = await spelling(talk, whole, new, answer)
        talk.engine.heard, ends = answer, spell or step % 2 == 0
        talk.engine.stop = TOKENIZER.convert_tokens_to_ids(call_end(talk.engine.family)) if ends else None
        node = await talk.ask(*new)
        assert node.ended == ends
        prompt = talk.prompt(node)
        if spell:
            assert decoded(prompt) == decoded(whole)
        if before is not None:
            sequence = talk.sequence(before)
            assert node.parent == before.call_id
            assert prompt[: len(sequence)] == sequence
            suffix = [sequence[-1], *prompt[len(sequence) :]] if before.ended else prompt[len(sequence) :]
            assert whole[-len(suffix) :] == suffix
            suffixes.append(suffix)
        before, new = node, results(node)
    assert await talk.counters() == {}
    assert talk.session.counters["audited"] == len(answers)
    assert len(rows(trace_of(talk.session))) == 1
    return suffixes


async def spelling(
    talk: Conversation, whole: Sequence[int], new: Sequence[dict[str, Any]], answer: Message
) -> list[int]:
    """``answer`` to the history with ``new``, as the template spells it once its results follow."""
    if not answer.tool_calls:
        return TOKENIZER.encode(f"{answer.content}{talk.engine.family.stops[0]}", add_special_tokens=False)
    calls = [
        {"id": f"c{index}", "type": "function", "function": msgspec.to_builtins(call.function)}
        for index, call in enumerate(answer.tool_calls)
    ]
    after = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
    message = {"role": "assistant", "content": answer.content, "tool_calls": calls}
    return spelt(decoded(await talk.rendered(*new, message, *after)), decoded(whole), talk.engine.family)


@pytest.mark.parametrize("thoughts", ["fork", "keep"])
@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_fork_where_the_template_strips_them_or_are_kept(
    name: str, thoughts: str, engine_url: str, tmp_path: Path
) -> None:
    strips = EXPECTED[name].strips_after if thoughts == "fork" else ()

    async def work() -> None:
        policy = msgspec.structs.replace(POLICY, thoughts=thoughts)
        talk = Conversation(Puppet(engine_url, FAMILIES[name]), tmp_path / "journal", policy)
        talk.engine.stop = TOKENIZER.convert_tokens_to_ids(call_end(FAMILIES[name]))
        talk.engine.heard = Message(None, "a thought", calling("ls").tool_calls)
        first = await talk.ask()
        talk.engine.heard, talk.engine.stop = Message("Done."), None
        await follows(talk, first, results(first), forks="tool" in strips)
        last = talk.session.tree.nodes[-1]
        forks = "user" in strips and "tool" not in strips
        await follows(talk, last, [{"role": "user", "content": "Go on."}], forks)
        assert await talk.counters() == ({"fork_thoughts": 1} if strips else {})
        assert len(rows(trace_of(talk.session))) == (2 if strips else 1)

    run(work())


async def follows(talk: Conversation, before: Node, new: list[dict[str, Any]], forks: bool) -> None:
    """Ask with ``new`` messages: a fork is the whole history rendered anew, else the ids of ``before`` go on."""
    whole = await talk.rendered(*new)
    node = await talk.ask(*new)
    assert node.parent == (None if forks else before.call_id)
    assert (talk.prompt(node) == whole) == forks


@pytest.mark.parametrize("name", FAMILIES)
def test_a_late_system_message_and_another_task_stay_in_the_row(name: str, engine_url: str, tmp_path: Path) -> None:
    """gpt-oss ends its last word with an id that never stands in a history, so there the new task is a fork."""

    async def work() -> None:
        talk = Conversation(Puppet(engine_url, FAMILIES[name]), tmp_path / "journal")
        talk.engine.stop = TOKENIZER.convert_tokens_to_ids(call_end(FAMILIES[name]))
        talk.engine.heard = calling("ls")
        first = await talk.ask()
        note = {"role": "system", "content": "The disk is nearly full."}
        talk.engine.heard = Message("Done.")
        talk.engine.stop = TOKENIZER.convert_tokens_to_ids(FAMILIES[name].stops[0])
        second = await talk.ask(*results(first), note)
        assert second.parent == first.call_id
        assert "The disk is nearly full." in decoded(talk.prompt(second))
        third = await talk.ask({"role": "user", "content": "Now the next task."})
        replaced = name == "gpt-oss"
        assert third.parent == (None if replaced else second.call_id)
        sequence = talk.sequence(second)
        kept = sequence[:-1] if replaced else sequence
        assert talk.prompt(third)[: len(kept)] == kept
        assert await talk.counters() == ({"fork_turn_end": 1} if replaced else {})

    run(work())


def spelling_of(tool: str, arguments: str) -> str:
    """A regular expression for a call in a spelling that neither the template nor a harness would choose."""
    return rf'<tool_call>\n\{{"name":  "{tool}", "arguments": \{{ {arguments} \}} \}}\n</tool_call>'


def test_calls_that_the_engine_samples_and_parses_stay_one_row(engine_url: str, tmp_path: Path) -> None:
    """Nothing dictated but the form; rendered anew, the model's own spelling is lost at every turn."""
    rows_of = {}

    async def work(continuity: bool) -> None:
        policy = msgspec.structs.replace(POLICY, max_tokens=100, continuity=continuity)
        talk = Conversation(Puppet(engine_url, FAMILIES["qwen3"]), tmp_path / f"journal{continuity}", policy)
        talk.engine.regex, talk.engine.stop = spelling_of("bash", '"command":"ls [a-j]{6}"'), TOKENIZER.eos_token_id
        new: list[dict[str, Any]] = []
        for _ in range(8):
            node = await talk.ask(*new)
            assert [call.name for call in node.answer.tool_calls] == ["bash"]
            new = results(node)
        talk.engine.regex = "Done"
        assert (await talk.ask(*new)).answer.text == "Done"
        rows_of[continuity] = len(rows(trace_of(talk.session)))

    for continuity in (True, False):
        run(work(continuity))
    assert rows_of == {True: 1, False: 9}


def test_greedy_samples_equal_those_of_the_plain_api(engine_url: str, tmp_path: Path) -> None:
    """At the root those of chat completions, after a bridge those of completions for the same ids."""

    async def work() -> None:
        policy = msgspec.structs.replace(POLICY, temperature=0.0, max_tokens=24)
        talk = Conversation(Puppet(engine_url, FAMILIES["qwen3"]), tmp_path / "journal", policy)
        talk.engine.heard, talk.engine.free = calling("ls"), True
        root = await talk.ask()
        follow = await talk.ask(*results(root))
        assert follow.parent == root.call_id
        wanted = {"model": SERVED_MODEL_NAME, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
        chat = {"messages": START, "tools": TOOLS, "logprobs": True, **FAMILIES["qwen3"].render_fields()}
        async with httpx.AsyncClient(base_url=engine_url, timeout=60, trust_env=False) as http:
            plain = (await http.post("/v1/chat/completions", json=wanted | chat)).json()
            assert plain["prompt_token_ids"] == talk.prompt(root)
            choice = plain["choices"][0]
            agree(root, choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]])
            exact = {"prompt": talk.prompt(follow), "logprobs": 0}
            choice = (await http.post("/v1/completions", json=wanted | exact)).json()["choices"][0]
            agree(follow, choice["token_ids"], choice["logprobs"]["token_logprobs"])

    run(work())


def agree(node: Node, tokens: list[int], logprobs: list[float]) -> None:
    assert ids.numbers(node.sampled) == tokens
    np.testing.assert_allclose(np.frombuffer(node.logprobs, np.float32), logprobs, atol=1e-5)


class Insisting:
    """Stands before an engine and makes it sample eight calls of a tool, then a last word; the rest passes through."""

    def __init__(self, engine_url: str, call: str) -> None:
        self._http = httpx.AsyncClient(base_url=engine_url, timeout=60, trust_env=False)
        self._wishes = [call] * 8
        app = Starlette(routes=[Route("/{path:path}", self._forward, methods=["GET", "POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its URL."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task = asyncio.create_task(self._server._serve([listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                self._server.should_exit = self._server.force_exit = True
                await asyncio.wait_for(task, 10)
                await self._http.aclose()

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        if request.url.path.endswith("/generate"):
            body = self._insist(json.loads(body))
        reply = await self._http.request(request.method, request.url.path, content=body, headers=JSON)
        return Response(reply.content, reply.status_code, media_type="application/json")

    def _insist(self, body: dict[str, Any]) -> bytes:
        if body["cache_salt"] != "selftest":
            regex = self._wishes.pop() if self._wishes else "Done"
            wishes = {"structured_outputs": {"regex": regex}, "logit_bias": {str(TOKENIZER.eos_token_id): 20.0}}
            body["sampling_params"] |= wishes
        return json.dumps(body).encode()


JSON = {"content-type": "application/json"}
HARNESS_CALLS = {
    "pi": spelling_of("bash", '"command":"echo [a-j]{6}"'),
    "claude-code-bare": spelling_of("Bash", '"description":"say it",  "command":"echo [a-j]{6}"'),
}


@pytest.mark.parametrize("name", HARNESS_CALLS)
def test_eight_calls_of_a_real_harness_are_one_row(name: str, engine_url: str, tmp_path: Path) -> None:
    """The harness re-serialises what the model spelt; the trace must not notice."""
    install([name], harness_root())
    (tmp_path / "workspace").mkdir()
    log = tmp_path / "log"

    async def work() -> None:
        async with Insisting(engine_url, HARNESS_CALLS[name]).serving() as url:
            supervisor = ShardSupervisor(url, 1, tmp_path / "journals", SERVED_MODEL_NAME)
            await supervisor.start()
            try:
                trace = await run_harness(name, supervisor, tmp_path / "workspace", log)
            finally:
                await supervisor.stop()
        assert [(call.parent, call.tool_calls) for call in trace.calls] == [
            (call_id - 1 if call_id else None, 1 if call_id < 8 else 0) for call_id in range(9)
        ], log.read_text()[-2000:]
        assert {call.delivered for call in trace.calls} == {True}
        assert not [counter for counter in trace.counters if counter != "audited"]
        (row,) = rows(trace)
        assert row.trained_tokens == sum(len(call.sampled_ids) for call in trace.calls)

    run(work())


async def run_harness(name: str, supervisor: ShardSupervisor, workspace: Path, log: Path) -> Trace:
    """One session of an unmodified harness in a sandbox."""
    launch = get_harness(name).launch(
        Endpoint("http://127.0.0.1:8000", "key-1", "policy"), "Say some words.", harness_root()
    )
    spec = SandboxSpec(**vars(launch), workspace=workspace, listen_port=8000, stdout=log, timeout_s=60)
    process = await make_sandbox(SandboxConfig()).launch(spec)
    await supervisor.open_session("key-1", SessionPolicy(max_tokens=100), process.listener)
    process.go()
    await process.wait()
    return await supervisor.close_session("key-1")
