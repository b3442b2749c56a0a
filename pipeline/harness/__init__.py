"""Coding agents at pinned versions, unmodified: how each is installed, pointed at the proxy and started."""

from pipeline.harness.base import HarnessLaunch, HarnessRecipe, get_harness, harness_names

__all__ = ["HarnessLaunch", "HarnessRecipe", "get_harness", "harness_names"]
