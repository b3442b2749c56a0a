"""Groups and ledgers come back as written, whole or not at all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import UserError
from pipeline.records import ROLLOUT_SCHEMA, Outcome, PolicyVersion, RolloutRecord, Row, Verdict
from pipeline.report.store import append_jsonl, publish, read_figures, read_group, read_jsonl, write_group, write_json


def make_row(length: int, seed: int) -> Row:
    rng = np.random.default_rng(seed)
    return Row(
        input_ids=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
        loss_mask=rng.random(length) < 0.5,
        logprobs=rng.standard_normal(length).astype(np.float32),
    )


def make_rollout(index: int, lengths: list[int], reward: float | None = 1.05) -> RolloutRecord:
    return RolloutRecord(
        rollout_id=f"r{index}",
        group_id="g/ü",
        index=index,
        task_id="t",
        harness="pi",
        outcome=Outcome.SOLVED if reward else Outcome.INFRASTRUCTURE,
        verdict=Verdict(reward, None if reward is None else 1.0, 3, "ok"),
        rows=tuple(make_row(length, index * 100 + place) for place, length in enumerate(lengths)),
        version=PolicyVersion(1, 2),
        newest_version=PolicyVersion(2, 3),
        calls=4,
        malformed=1,
        undelivered=0,
        prompt_tokens=2**33,
        sampled_tokens=50,
        wall_s=1.25,
        info={"note": "naïve", "list": [1, 2]},
    )


def assert_same(left: RolloutRecord, right: RolloutRecord) -> None:
    def plain(record: RolloutRecord) -> dict[str, object]:
        return {name: value for name, value in vars(record).items() if name != "rows"}

    assert plain(left) == plain(right)
    assert len(left.rows) == len(right.rows)
    for mine, other in zip(left.rows, right.rows, strict=True):
        for name in ("input_ids", "loss_mask", "logprobs"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
            assert getattr(mine, name).dtype == getattr(other, name).dtype


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4))
def test_a_group_comes_back_exactly(tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("groups") / "g.parquet"
    written = [make_rollout(index, lengths, None if index % 3 == 2 else 1.05) for index, lengths in enumerate(shapes)]
    write_group(path, written)
    read = read_group(path)
    assert len(read) == len(written)
    for mine, other in zip(written, read, strict=True):
        assert_same(mine, other)


def test_the_file_has_the_published_schema(tmp_path: Path) -> None:
    write_group(tmp_path / "g.parquet", [make_rollout(0, [5, 2])])
    assert pq.read_schema(tmp_path / "g.parquet").equals(ROLLOUT_SCHEMA)
    assert len(pq.read_table(tmp_path / "g.parquet").to_pylist()[0]["rows"][0]["input_ids"]) == 5


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "value.json"
    write_json(path, {"a": 1})

    def full_disk(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        publish(path, full_disk)
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert os.listdir(path.parent) == ["value.json"]


def test_a_file_that_is_no_group_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 torn")
    for name in ("bad.parquet", "missing.parquet"):
        with pytest.raises(UserError, match=name):
            read_group(tmp_path / name)


def test_a_ledger_keeps_its_order(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger.jsonl"
    assert read_jsonl(path) == []
    for number in range(3):
        append_jsonl(path, {"n": number})
    assert read_jsonl(path) == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_line_torn_anywhere_costs_that_line_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "ledger.jsonl"
    append_jsonl(path, {"n": 0})
    append_jsonl(path, {"n": 1, "x": "yz"})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = [{"n": 0}, {"n": 1, "x": "yz"}] if cut == 1 else [{"n": 0}]
    assert read_jsonl(path) == kept
    append_jsonl(path, {"n": 2})
    assert read_jsonl(path) == [*kept, {"n": 2}]


def test_damage_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"n": 0}\n{"n": \n{"n": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        read_jsonl(path)


def test_numbers_that_json_lacks_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_jsonl(tmp_path / "ledger.jsonl", {"n": float("nan")})
    assert not (tmp_path / "ledger.jsonl").exists()


def test_figures_are_the_same_without_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "g.parquet"
    write_group(path, [make_rollout(0, [5, 7]), make_rollout(1, [], None)])
    whole = read_group(path)
    assert [replace(record, rows=()) for record in whole] == list(read_figures(path))
    path.write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"g\.parquet"):
        read_figures(path)
