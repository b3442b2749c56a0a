"""Others' traces: which forms are read, what is left out and counted, and that `yoke sft` makes rows of the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.stages import sft
from pipeline.stages.credentials import CredentialFilter
from pipeline.stages.import_traces import import_traces
from pipeline.stages.recording import read_rollouts

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}}}
ASK = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Write tin into a.txt."}]


def called(command: str, **call: Any) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function, **call}]}


def conversation(command: str = "echo tin > a.txt", **row: Any) -> dict[str, Any]:
    """As the reference publishes them: messages and tools."""
    result = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    messages = [*ASK, called(command, id="c1"), result, {"role": "assistant", "content": "Done."}]
    return {"messages": messages, "tools": [TOOL], **row}


def written(place: Path, *rows: dict[str, Any]) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.suffix == ".jsonl":
        place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), place)
    return place


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return compose_config([f"run_dir={tmp_path / 'run'}", "logging.wandb=disabled", "logging.progress=false"])


def taken(config: Config, source: Path, label: str = "theirs", **environment: str) -> tuple[Path, dict[str, int]]:
    """The file that an import made, and its counts."""
    import_traces(config, source, str(source), label, CredentialFilter(environment))
    out = Path(config.run_dir) / "collect" / f"imported-{label}.parquet"
    counts: dict[str, int] = json.loads(out.with_suffix(".json").read_text())["counts"]
    return out, counts


def variants() -> dict[str, dict[str, Any]]:
    """One and the same conversation in each of the forms."""
    plain = conversation()
    messages = plain["messages"]
    decoded = json.loads(json.dumps(messages))
    decoded[2]["tool_calls"][0]["function"]["arguments"] = {"command": "echo tin > a.txt"}
    unnumbered = json.loads(json.dumps(messages))
    del unnumbered[2]["tool_calls"][0]["id"], unnumbered[3]["tool_call_id"]
    short = json.loads(json.dumps(messages))
    short[2]["tool_calls"] = [{"id": "c1", **short[2]["tool_calls"][0]["function"]}]
    return {
        "lists": plain,
        "JSON text": {"messages": json.dumps(messages), "tools": json.dumps([TOOL])},
        "decoded arguments": {"messages": decoded, "tools": [TOOL]},
        "prompt and completion": {"prompt": messages[:2], "completion": messages[2:], "tools": [TOOL]},
        "no ids": {"messages": unnumbered, "tools": [TOOL]},
        "calls without function, bare tools": {"messages": short, "tools": [TOOL["function"]]},
    }


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", list(variants()))
def test_every_form_becomes_the_same_turns(config: Config, tmp_path: Path, form: str, suffix: str) -> None:
    out, counts = taken(config, written(tmp_path / f"data/train.{suffix}", variants()[form]))
    ((first, last),) = read_rollouts(out)
    assert counts == {"kept": 1}
    assert first.tools == [TOOL]
    assert [message["role"] for message in last.messages] == ["system", "user", "assistant", "tool"]
    (call,) = first.answer["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "bash",
        {"command": "echo tin > a.txt"},
    )
    assert last.messages[3]["tool_call_id"] == call["id"], "a result belongs to its call"
    assert last.answer["content"] == "Done."


def test_what_is_left_out_is_counted_with_the_reason(config: Config, tmp_path: Path) -> None:
    broken = conversation()
    broken["messages"][2] = called("x") | {"tool_calls": [{"function": {"name": "bash", "arguments": "{"}}]}
    rows = [
        conversation(),
        conversation(),
        conversation("echo 2", reward=0.0),
        conversation("echo 3", reward=1.0),
        conversation("export KEY=AKIAABCDEFGHIJKLMNOP"),
        conversation("echo my-secret-value"),
        {"messages": ASK, "tools": [TOOL]},
        {"messages": [*ASK, {"role": "function", "content": "x"}, {"role": "assistant", "content": "y"}]},
        {"text": "nothing of the kind"},
        broken,
    ]
    out, counts = taken(config, written(tmp_path / "t.jsonl", *rows), MY_TOKEN="my-secret-value")
    assert counts == {
        "kept": 2,
        "the same as another": 1,
        "below collect.min_reward=1": 1,
        "held a credential (AWS access key)": 1,
        "held a credential (value of $MY_TOKEN)": 1,
        "no answer to learn from": 1,
        "a message of the role 'function'": 1,
        "neither messages nor prompt and completion": 1,
        "not in Chat Completions form": 1,
    }
    assert sum(1 for _ in read_rollouts(out)) == 2
    kept = out.read_bytes() + out.with_suffix(".json").read_bytes()
    assert b"my-secret" not in kept and b"AKIA" not in kept


def test_thoughts_have_one_name(config: Config, tmp_path: Path) -> None:
    row = conversation()
    row["messages"][2]["reasoning_content"] = "Hm."
    row["messages"][4]["thinking"] = "Well."
    ((first, last),) = read_rollouts(taken(config, written(tmp_path / "t.jsonl", row))[0])
    assert (first.answer["reasoning"], last.answer["reasoning"]) == ("Hm.", "Well.")


def test_again_is_nothing_and_other_traces_need_another_label(config: Config, tmp_path: Path) -> None:
    source = written(tmp_path / "data" / "a.jsonl", conversation())
    out, _ = taken(config, source.parent)
    before = out.stat().st_mtime_ns
    assert "is there already" in import_traces(config, source.parent, "x", "theirs", CredentialFilter({}))
    assert out.stat().st_mtime_ns == before
    written(source, conversation("echo other"))
    with pytest.raises(UserError, match="made of other traces"):
        import_traces(config, source.parent, "x", "theirs", CredentialFilter({}))
    taken(replace(config, fresh=True), source.parent)
    ((first, _),) = read_rollouts(out)
    assert "other" in json.dumps(first.answer)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "x"}], "nothing to learn from in .*1 left out: neither messages"),
        ([[1]], "cannot be read behind row 0: no JSON object"),
        ([conversation() | {"rollout": "r", "answer": {"role": "assistant"}}], "is a recording .* already"),
    ],
)
def test_what_cannot_be_used_leaves_nothing_behind(config: Config, tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        taken(config, written(tmp_path / "t.jsonl", *rows))
    assert not [path for path in Path(config.run_dir).rglob("*") if path.is_file()]


def test_a_torn_file_is_told_with_its_row(config: Config, tmp_path: Path) -> None:
    source = written(tmp_path / "t.jsonl", conversation())
    source.write_text(source.read_text() + '{"messages": [')
    with pytest.raises(UserError, match="behind row 1"):
        taken(config, source)
    (tmp_path / "p.parquet").write_text("no parquet")
    with pytest.raises(UserError, match=r"p\.parquet cannot be read"):
        taken(config, tmp_path / "p.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no .parquet or .jsonl file"):
        taken(config, tmp_path / "empty")


def test_sft_makes_rows_of_an_import(config: Config, tmp_path: Path) -> None:
    taken(config, written(tmp_path / "t.jsonl", conversation(), conversation("cat a.txt")))
    counts = sft.make_rows(config, tmp_path / "sft")
    assert (counts["turns"], counts["rows"]) == (4, 2), dict(counts)
    assert counts["learnt tokens"] > 0
