"""`yoke proxy --selftest`, and engines that are not ours: fields for their templates, weights without a version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_threads import engine_thread
from front_helpers import running

from pipeline.cli import main
from pipeline.engine.scripted import FakeEngine, Template

THINKING_OFF = "+proxy.render_fields.chat_template_kwargs={enable_thinking: false}"


class Deaf(FakeEngine):
    """Its template shows nothing of a conversation."""

    def _render(self, body: Any) -> tuple[Any, ...]:
        return 200, {"token_ids": [1, 2, 3], "sampling_params": {}}


def selftest(engine_url: str, *flags: str) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["proxy", "--selftest", "true", "--llm-url", engine_url, *flags])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_findings_are_printed_and_nothing_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_thread(FakeEngine(template=Template(late_system="raises"))) as engine:
        assert selftest(engine.url, THINKING_OFF) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["problem"], found["late_system"], found["verdicts"]["late system"]) == ("", "user", "raises")
    assert engine.rendered and not engine.generated
    assert {body["chat_template_kwargs"]["enable_thinking"] for body in engine.rendered} == {False}


def test_a_template_without_continuity_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_thread(Deaf()) as engine:
        assert selftest(engine.url) == 1
    assert "sentinel lost" in json.loads(capsys.readouterr().out)["problem"]


def test_an_engine_that_fails_while_it_is_tested_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_thread(FakeEngine()) as engine:
        engine._render = lambda body: (503, {"error": {"message": "busy"}})  # type: ignore[method-assign]
        assert selftest(engine.url, "--outage-s", "0.2") == 2
    said = capsys.readouterr()
    assert "busy" in said.err and said.err.count("\n") == 1


def test_text_mode_has_nothing_to_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest("http://127.0.0.1:1", "--mode", "text") == 2
    assert "proxy.mode=text" in capsys.readouterr().err


def test_an_engine_that_is_not_ours_is_served(tmp_path: Path) -> None:
    """Its weights bear no policy version, and its template wants a switch."""
    with engine_thread(FakeEngine(version="default")) as engine:
        with running(engine.url, tmp_path / "proxy", "--shards", "1", "--outage-s", "3", THINKING_OFF) as proxy:
            harness = proxy.create()
            assert harness.ask().status_code == 200
            (call,) = harness.table().to_pylist()
        assert [span["version"] for span in call["versions"]] == ["0.0"]
        assert {body["chat_template_kwargs"]["enable_thinking"] for body in engine.rendered} == {False}
