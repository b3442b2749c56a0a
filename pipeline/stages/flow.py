"""Group flow control: leases, credits, staleness, refill, and the one way in which every scheduled group ends.

No IO, no clock of its own.
"""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pipeline.config import AlgorithmConfig
from pipeline.records import GroupSpec, PolicyVersion, RolloutRecord, TrainGroup
from pipeline.stages.difficulty import Counted, Seen, count, seen_in
from pipeline.stages.schedule import Schedule


class Ending(enum.StrEnum):
    """How a scheduled group ended."""

    TRAINED = "trained"
    SKIPPED = "skipped"
    ABANDONED = "abandoned"


@dataclass
class FlowState:
    """What a checkpoint keeps: groups that ended, how far the schedule was handed out, how many updates were made."""

    update: int = 0
    version_n: int = 0
    next_index: int = 0
    ended: dict[str, list[str]] = field(default_factory=dict)  # group id → [ending, reason]
    lineage: list[list[int]] = field(default_factory=list)  # [attempt, version_n at which it began], oldest first
    failing: dict[str, int] = field(default_factory=dict)  # harness → groups that failed by it, one after the other
    set_aside: dict[str, str] = field(default_factory=dict)  # harness that gets no more groups → why
    difficulty: Counted = field(default_factory=dict)  # of the groups that ended after they came back

    def to_json(self) -> dict[str, Any]:
        """A copy that later changes do not reach: whatever is put into these containers is never changed itself."""
        return {item.name: copy.copy(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FlowState:
        return cls(**{item.name: data[item.name] for item in fields(cls) if item.name in data})


def is_ancestor(version: PolicyVersion, lineage: Sequence[Sequence[int]]) -> bool:
    """Whether the weights of ``version`` led to the present ones.

    They did not if the attempt that made them crashed later on and the run went on from an older checkpoint.
    """
    ends = [begun for _, begun in lineage[1:]] + [None]
    for (attempt, begun), end in zip(lineage, ends, strict=True):
        if attempt == version.attempt:
            return begun <= version.n and (end is None or version.n <= end)
    return False


def is_usable(record: RolloutRecord, keep_from: int, lineage: Sequence[Sequence[int]]) -> bool:
    """Whether a rollout of an earlier attempt is fresh enough, and of weights that led to the present ones."""
    fresh = record.version.n >= keep_from
    return fresh and all(is_ancestor(version, lineage) for version in (record.version, record.newest_version))


@dataclass(frozen=True)
class Lease:
    """A group that an engine rank is rolling out. ``floor``: no call of it can be older than this version."""

    lease_id: int
    spec: GroupSpec
    engine: str
    floor: PolicyVersion


def oldest_version(group: TrainGroup) -> PolicyVersion:
    """The oldest version that sampled a token of the group, in whatever attempt."""
    return min((record.version for record in group.rollouts), key=lambda version: version.n)


@dataclass(frozen=True)
class ReadyGroup:
    """A closed group with contrast, waiting for its update."""

    group: TrainGroup
    version: PolicyVersion
    spec: GroupSpec


class GroupFlow:
    """Owns every group from the schedule to its end. The caller serialises the calls."""

    def __init__(
        self,
        schedule: Schedule,
        algorithm: AlgorithmConfig,
        updates: int,
        state: FlowState,
        attempt: int,
        set_aside_after: int = 0,
    ) -> None:
        """``updates``: after which the run ends. ``set_aside_after``: see `judge_harness`; 0 = never."""
        self.schedule, self.algorithm, self.updates, self.state = schedule, algorithm, updates, state
        self.set_aside_after = set_aside_after
        self.version = PolicyVersion(attempt, state.version_n)
        state.lineage.append([attempt, state.version_n])
        self.leases: dict[str, Lease] = {}
        self.ready: list[ReadyGroup] = []
        self.pending: deque[GroupSpec] = deque(self._unfinished())
        self.rerolls: dict[str, int] = {}
        self.skipped_since_update = 0
        self.dropped_stale = 0
        self.passed_over: list[GroupSpec] = []  # abandoned unseen; whoever keeps the ledger empties it
        self._lease_count = 0
        self._updating = False  # a batch was taken whose update is not done
        self._stale_since: float | None = None

    def _unfinished(self) -> list[GroupSpec]:
        indices = range(self.state.next_index)
        return [spec for spec in map(self.schedule.group, indices) if spec.group_id not in self.state.ended]

    # --- credits and leases

    @property
    def outstanding_rollouts(self) -> int:
        """Rollouts that were handed out or wait for their update."""
        return (len(self.leases) + len(self.ready)) * self.schedule.group_size

    def lease(self, engine: str, serves: PolicyVersion) -> Lease | None:
        """The next group for ``engine``, which now serves ``serves``.

        None while no credit is left, the remaining updates need no more groups, every harness is set aside, or a
        curriculum has not drawn any further.
        """
        algorithm = self.algorithm
        if self.stranded:
            return None
        updates_left = self.updates - self.state.update - self._updating
        wanted = updates_left * algorithm.groups_per_update
        if len(self.leases) + len(self.ready) >= wanted:
            return None
        if self.outstanding_rollouts + algorithm.group_size > algorithm.max_outstanding_rollouts:
            return None
        spec = self._next_spec()
        if spec is None:
            return None
        self._lease_count += 1
        lease = Lease(self._lease_count, spec, engine, serves)
        self.leases[spec.group_id] = lease
        return lease

    def _next_spec(self) -> GroupSpec | None:
        """The next group that has not ended; those of a harness that is set aside end here."""
        while self.pending or self.state.next_index < self.schedule.horizon:
            spec = self.pending.popleft() if self.pending else self._scheduled()
            if spec.group_id in self.state.ended:
                continue
            if spec.harness not in self.state.set_aside:
                return spec
            self.state.ended[spec.group_id] = [Ending.ABANDONED.value, self._aside(spec.harness)]
            self.passed_over.append(spec)
        return None

    def _scheduled(self) -> GroupSpec:
        self.state.next_index += 1
        return self.schedule.group(self.state.next_index - 1)

    def release_engine(self, engine: str) -> None:
        """An engine rank is gone: its groups go back to the head of the queue."""
        for lease in [lease for lease in self.leases.values() if lease.engine == engine]:
            self._give_back(lease)

    def _give_back(self, lease: Lease) -> None:
        del self.leases[lease.spec.group_id]
        self.pending.appendleft(lease.spec)

    @property
    def out(self) -> list[tuple[str, int, str]]:
        """(group, number of the lease, engine) of every group that is being rolled out."""
        return [(group_id, lease.lease_id, lease.engine) for group_id, lease in self.leases.items()]

    def give_back(self, group_id: str) -> None:
        """Nobody rolls this group out any more: it is the next one."""
        self._give_back(self.leases[group_id])

    def holds(self, group_id: str, lease_id: int) -> bool:
        """False for a group that was dropped or given to another engine meanwhile: its result must be ignored."""
        lease = self.leases.get(group_id)
        return lease is not None and lease.lease_id == lease_id

    # --- how a lease ends

    def admit(self, group: TrainGroup, version: PolicyVersion) -> None:
        """A closed group with contrast waits for the next update."""
        lease = self.leases.pop(group.group_id)
        self.ready.append(ReadyGroup(group, version, lease.spec))

    def skip(self, group_id: str, reason: str, records: Sequence[RolloutRecord] = ()) -> None:
        """A closed group that can teach nothing (no contrast); another one is scheduled in its place."""
        lease = self.leases.pop(group_id)
        self.skipped_since_update += 1
        self._note_difficulty(lease.spec, seen_in(records, contrast=False))
        self.state.ended[group_id] = [Ending.SKIPPED.value, reason]

    def fail(self, group_id: str, reason: str) -> bool:
        """Too few graded rollouts: roll again, or abandon after ``max_rerolls`` or with its harness.

        Returns True when it will be rolled again.
        """
        lease = self.leases[group_id]
        self.rerolls[group_id] = self.rerolls.get(group_id, 0) + 1
        if lease.spec.harness in self.state.set_aside:
            reason = f"{self._aside(lease.spec.harness)}; {reason}"
        elif self.rerolls[group_id] <= self.algorithm.max_rerolls:
            self._give_back(lease)
            return True
        del self.leases[group_id]
        self.state.ended[group_id] = [Ending.ABANDONED.value, reason]
        self._note_difficulty(lease.spec, Seen(abandoned=1))
        return False

    def _note_difficulty(self, spec: GroupSpec, seen: Seen) -> None:
        count(self.state.difficulty, spec.harness, spec.task.task_id, seen)

    # --- harnesses that keep failing

    def judge_harness(self, harness: str, failed: bool, reason: str) -> bool:
        """A group of ``harness`` closed; it ``failed`` when the harness's own infrastructure left too few graded.

        After ``set_aside_after`` such groups in a row the harness is set aside: groups of it that are out may still
        come in, all others are abandoned as their turn comes, and the schedule goes on with the remaining harnesses.
        Returns whether it was set aside just now.
        """
        count = self.state.failing[harness] = self.state.failing.get(harness, 0) + 1 if failed else 0
        if not self.set_aside_after or count < self.set_aside_after or harness in self.state.set_aside:
            return False
        self.state.set_aside[harness] = f"{count} groups in a row failed, up to update {self.state.update}: {reason}"
        return True

    def readmit(self, harnesses: Sequence[str]) -> list[str]:
        """Give groups again to those that were set aside. Returns which of them were."""
        known = [harness for harness in harnesses if self.state.set_aside.pop(harness, None) is not None]
        self.state.failing.update(dict.fromkeys(known, 0))
        return known

    @property
    def stranded(self) -> bool:
        """Every harness of the schedule is set aside: nothing more can be handed out."""
        return all(harness in self.state.set_aside for harness in self.schedule.harnesses)

    def _aside(self, harness: str) -> str:
        return f"harness set aside: {harness}"

    # --- the update

    def take_batch(self, now: float) -> list[ReadyGroup] | None:
        """The groups of the next update, oldest first; None while it has to wait. May be empty when refills are
        exhausted.

        ``now`` is any clock in seconds. Groups in flight that the step would make too stale are waited for at most
        ``stale_wait_s``, then dropped whole and scheduled again.
        """
        self._drop_too_old()
        if len(self.ready) < self._required():
            return None
        expiring = [lease for lease in self.leases.values() if self._expires(lease.floor)]
        if expiring and not self._waited_long_enough(now):
            return None
        self._stale_since = None
        for lease in expiring:
            self.dropped_stale += 1
            self._give_back(lease)
        self._updating = True
        return self._pick()

    def _drop_too_old(self) -> None:
        """Ready groups beyond the bound (kept from an earlier attempt, or late) are scheduled again."""
        for ready in [r for r in self.ready if r.version.n < self.version.n - self.algorithm.max_staleness]:
            self.ready.remove(ready)
            self.dropped_stale += 1
            self.pending.appendleft(ready.spec)

    def _required(self) -> int:
        """``groups_per_update`` less those whose refills are used up."""
        algorithm = self.algorithm
        refills = int(algorithm.refill_factor * algorithm.groups_per_update)
        return max(0, algorithm.groups_per_update - max(0, self.skipped_since_update - refills))

    def _expires(self, version: PolicyVersion) -> bool:
        return version.n < self.version.n + 1 - self.algorithm.max_staleness

    def _waited_long_enough(self, now: float) -> bool:
        if self._stale_since is None:
            self._stale_since = now
        return now - self._stale_since >= self.algorithm.stale_wait_s

    def _pick(self) -> list[ReadyGroup]:
        self.ready.sort(key=lambda ready: (ready.version.n, ready.group.group_id))
        count = max(self.algorithm.groups_per_update, sum(self._expires(ready.version) for ready in self.ready))
        batch, self.ready = self.ready[:count], self.ready[count:]
        return batch

    def too_old(self, batch: Sequence[ReadyGroup]) -> list[ReadyGroup]:
        """The groups whose own rollouts, whatever was said of them, are beyond the bound."""
        oldest = self.version.n - self.algorithm.max_staleness
        return [ready for ready in batch if oldest_version(ready.group).n < oldest]

    def refuse(self, batch: Sequence[ReadyGroup], refused: Sequence[ReadyGroup]) -> None:
        """``batch`` is not trained: the refused ones are scheduled again, the others wait as before."""
        self._updating = False
        for ready in batch:
            if ready in refused:
                self.dropped_stale += 1
                self.pending.appendleft(ready.spec)
            else:
                self.ready.append(ready)

    def staleness(self, batch: list[ReadyGroup]) -> list[int]:
        """Updates between the weights that sampled each group and the weights that it trains."""
        return [self.version.n - ready.version.n for ready in batch]

    def finish_update(self, batch: list[ReadyGroup]) -> PolicyVersion:
        """The update of ``batch`` is done: its groups have ended, and the next policy version begins.

        Returns that version.
        """
        for ready in batch:
            self.state.ended[ready.group.group_id] = [Ending.TRAINED.value, f"update {self.state.update}"]
            self._note_difficulty(ready.spec, seen_in(ready.group.rollouts, contrast=True))
        self._updating = False
        self.state.update += 1
        self.state.version_n += 1
        self.skipped_since_update = 0
        self.version = PolicyVersion(self.version.attempt, self.state.version_n)
        return self.version

    def close_books(self) -> None:
        """The last update is done: whatever was handed out beyond it is abandoned."""
        for group_id in [
            *self.leases,
            *(ready.group.group_id for ready in self.ready),
            *(s.group_id for s in self.pending),
        ]:
            self.state.ended[group_id] = [Ending.ABANDONED.value, "the run was over"]
        self.leases.clear()
        self.ready.clear()
        self.pending.clear()
