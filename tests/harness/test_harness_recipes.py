"""Recipes as data, the registry, and the installer's promises."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from pathlib import Path

import pytest

from pipeline.config import UserError
from pipeline.harness import get_harness, harness_names
from pipeline.harness.base import BUILT_IN, Endpoint

ROOT = Path("/somewhere/harnesses")


def test_unknown_harness_lists_the_known_ones():
    with pytest.raises(UserError, match=r"unknown harness 'pie'; known: claude-code, .*, qwen-code"):
        get_harness("pie")


def test_another_packages_recipe_is_found(monkeypatch):
    entry = importlib.metadata.EntryPoint("mine", "pipeline.harness.pi:RECIPE", "yoke.harnesses")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == "yoke.harnesses" else [])
    assert "mine" in harness_names()
    assert get_harness("mine").name == "pi"


@pytest.mark.parametrize("name", BUILT_IN)
def test_words_of_a_launch_arrive_untouched(name):
    prompt = "Say \"$prompt\" & $key; '$$'\n{}"
    launch = get_harness(name).launch(Endpoint("http://127.0.0.1:8000", 'k"ey', 'a/"model'), prompt, ROOT)
    assert prompt in (*launch.argv, launch.stdin)
    assert not any('k"ey' in word for word in launch.argv)
    for path, text in launch.home_files.items():
        {".json": json.loads, ".toml": tomllib.loads}[Path(path).suffix](text)
    place = get_harness(name).installed_as
    assert launch.mounts[0] == (ROOT / place, f"/opt/harness/{place}", False)
    assert not any(str(ROOT) in word for word in (*launch.argv, *launch.env.values()))
