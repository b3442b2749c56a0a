"""Each harness's share of what a run trained on, from its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Heading → (a harness's metric, what an update's share counts by; None: every update counts the same).
SHARES: dict[str, tuple[str, str | None]] = {
    "rollouts": ("rollout_share", "batch/rollouts_per_step"),
    "rows": ("row_share", "batch/samples_per_step"),
    "tokens": ("token_share", "batch/trained_tokens_per_step"),
    "loss weight": ("loss_weight_share", None),
}


def harness_shares(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Harness → heading → share over all updates. What no update recorded is left out.

    Every trained update gives the loss the same whole weight, however many tokens it holds.
    """
    shares: dict[str, dict[str, float]] = {}
    for heading, (name, size) in SHARES.items():
        sums: dict[str, float] = {}
        whole = 0.0
        for entry in metrics:
            own = {key.removesuffix(f"/{name}"): value for key, value in entry.items() if key.endswith(f"/{name}")}
            weight = entry.get(size, 0.0) if size else 1.0
            whole += weight if own else 0.0
            for harness, share in own.items():
                sums[harness] = sums.get(harness, 0.0) + weight * share
        for harness, total in sums.items():
            if whole:
                shares.setdefault(harness, {})[heading] = total / whole
    return dict(sorted(shares.items()))
