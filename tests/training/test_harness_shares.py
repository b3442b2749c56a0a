"""No harness weighs more in the loss because it forks its history or writes more."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness_shares import REPORTED, loss_shares, shaped_groups, table


@pytest.mark.parametrize("aggregation", ["group_mean", "rollout_mean"])
@pytest.mark.parametrize("seed", range(3))
def test_four_harnesses_have_a_quarter_each(aggregation: str, seed: int) -> None:
    shares = loss_shares(shaped_groups(seed), aggregation)
    assert shares == pytest.approx(dict.fromkeys(REPORTED["rows"], 25.0), abs=0.1)


def test_by_rows_or_tokens_the_one_that_forks_would_rule() -> None:
    groups = shaped_groups(0)
    assert loss_shares(groups, "row_mean")["claude-code"] == pytest.approx(100 * 8 / 11)
    for aggregation in ("token_mean", "constant"):
        assert loss_shares(groups, aggregation) == pytest.approx(REPORTED["tokens"], abs=0.1)


def test_the_table_in_the_docs_is_this_one() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "loss.md").read_text()
