"""Limits of the operating system that the bench's own processes lift for themselves, never for the proxy under test."""

from __future__ import annotations

import resource


def raise_open_files() -> None:
    """As many open sockets as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
