"""What a group costs the shared file system, counted: nothing for each call, nothing that grows with attempts."""

from __future__ import annotations

import pytest

from bench.file_operations import GROUP, per_group

# Of Python's audit events on the run directory: one file for each rollout and one for the group, each written once and
# renamed, the rollouts' removed at the end; the group's file read once; two lines of the ledger; a look at the fence
# before each file is published.
FILES = GROUP + 1
EXPECTED = {"open": FILES + 3, "os.rename": FILES, "os.remove": GROUP, "os.listdir": FILES}


@pytest.mark.slow
@pytest.mark.parametrize("attempts", [1, 10])
def test_operations_of_a_group(attempts: int) -> None:
    counted = per_group(attempts)
    assert set(counted) <= set(EXPECTED), "no other kind of operation"
    beyond = {name: value for name, value in counted.items() if value > EXPECTED[name]}
    assert not beyond, f"more than {EXPECTED}"
    assert counted["os.rename"] == FILES, "every rollout and every group is published"
