"""The bench itself at its smallest: real processes, a few sessions, every id right."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.rig import Load
from bench.run import Bench
from bench.table import table, verdicts


@pytest.mark.slow
def test_twenty_sessions(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "figures.jsonl")
    load = {"n": 20, "turns": 3, "ramp": 0.2, "kb_end": 60}
    for adapter in ("direct", "yoke"):
        options = load | {"rows": adapter == "yoke"}
        row = bench.run(adapter, Load("closed", options, latency_s=(0.02, 0.1), rest_s=0.5, cap_s=60))
        assert row is not None
        assert (row["sessions"], row["turns"], row["lost"]) == (20, 60, {})
        assert row["wrong"] == 0, row["trace"]
        assert row["trace"]["right_sessions"] == 20
        assert row["trace"]["continuity_breaks"] == 0
        assert row["trace"]["ids_checked"] > 60 * 5_000
        assert row["engine"]["generated"] >= 60
    assert "| closed | yoke | 20 |" in table(bench.rows)
    assert "holds: closed: 0 lost, 0 wrong" in verdicts(bench.rows)
