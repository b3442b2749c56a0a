"""Tool calls from the trace and from the harness's own log: what must agree, and what is only recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from stage_helpers import call, chain, recipe, trace

from pipeline.harness.base import Action
from pipeline.records import Call
from pipeline.stages import tool_calls
from pipeline.stages.tool_calls import ToolCalls, count_tool_calls, matches

EXPRESSION = r'"type":"tool_use"'


def counted(calls: Sequence[Call], logged: int | None = None) -> ToolCalls:
    return count_tool_calls(trace(calls), recipe(), logged)


def numbers(calls: Sequence[Call]) -> tuple[int, int, int]:
    found = counted(calls)
    return found.certain, found.counted, found.possible


def test_an_ordinary_rollout_leaves_no_room() -> None:
    calls = chain(1, 2, 1, 0)
    assert numbers(calls) == (4, 4, 4)
    assert [counted(calls, logged).differs for logged in (3, 4, 5)] == [True, False, True]
    assert counted(calls).differs is None, "no log, nothing to compare"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        pytest.param(chain(1, 1), (1, 2, 2), id="the last call may have ended the run"),
        pytest.param(chain(1, 1, delivered=False), (1, 1, 2), id="an answer that was cut off may have been begun"),
        pytest.param([*chain(1, 1, 0), call(3, 1, 1)], (2, 3, 3), id="an answer that was thrown away"),
        pytest.param(
            [call(0, None, 1, malformed=True), call(1, 0, 1), call(2, 1)], (1, 2, 2), id="a malformed call"
        ),
        pytest.param(
            [call(0, None, 1), call(1, None, 2), call(2, 0), call(3, 1)], (1, 3, 3), id="a sub-agent or a new history"
        ),
        pytest.param([call(0, None, 1), call(1, 0, 2, foreign=True), call(2, 0)], (1, 1, 1), id="the agent's own curl"),
        pytest.param([], (0, 0, 0), id="nothing"),
    ],
)  # fmt: skip
def test_what_a_log_may_leave_out_is_not_certain(calls: list[Call], expected: tuple[int, int, int]) -> None:
    certain, count, possible = numbers(calls)
    assert (certain, count, possible) == expected
    allowed = [logged for logged in range(8) if counted(calls, logged).differs is False]
    assert allowed == list(range(certain, possible + 1))


def test_of_a_harness_that_takes_text_the_log_counts() -> None:
    text = recipe(shell=Action(text='{"commands": ["$command"]}'))
    found = count_tool_calls(trace(chain(0, 0, 0)), text, 7)
    assert (found.counted, found.differs) == (7, None)
    assert count_tool_calls(trace(chain(0, 0)), text, None).counted == 0


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


def test_the_whole_output_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_calls, "WINDOW", 64)
    line = b'{"type":"tool_use","name":"bash","input":{"note":"a \\"type\\":\\"tool_use\\" in a string"}}\n'
    filler = b'{"type":"text","text":"' + b"x" * 150 + b'"}\n'
    path = write(tmp_path / "output", *([line, filler, line, line] * 50), line.strip())
    assert matches(path, EXPRESSION) == 151
    for length in range(30):  # wherever a window ends
        assert matches(write(tmp_path / "shifted", b"y" * length + b"\n", line * 20), EXPRESSION) == 20


def test_memory_stays_bounded(tmp_path: Path) -> None:
    import tracemalloc

    path = write(tmp_path / "output", (b"x" * 1023 + b"\n") * 20_000, b'{"type":"tool_use"}\n')
    tracemalloc.start()
    assert matches(path, EXPRESSION) == 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20, "20 MB were searched"
    tracemalloc.stop()


def test_output_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    assert matches(tmp_path / "none", EXPRESSION) == 0
    assert matches(write(tmp_path / "empty"), EXPRESSION) == 0
    assert matches(write(tmp_path / "bytes", b"\xff\x00" * 100, b'"type":"tool_use"'), EXPRESSION) == 1
