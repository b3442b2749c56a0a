"""Recipes as data, the registry, and the installer's promises."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from pathlib import Path

import pytest

from pipeline.config import UserError
from pipeline.harness import base, get_harness, harness_names
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


RECIPE = """from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Pip
RECIPE = HarnessRecipe(name="mine", version="1", dialect="chat", packaging=Pip("mine"), argv=(), env={}{more})
"""
MISTAKES = {
    ', loopguard="x"': r"line 3: TypeError: .*'loopguard'",
    ', tool_log="("': "tool_log is no regular expression",
    ', stdin="$promt"': r"stdin has \$promt; what it may have: \$base_url, .*\$runners",
    ', shell=Action("bash", {"command": "$cmd"})': r"shell has \$cmd; what it may have: \$command$",
    ', stdin="5 $ each"': r"stdin: a dollar sign .* is written \$\$",
    ", programs=(1 / 0,)": "line 3: ZeroDivisionError",
}


@pytest.mark.parametrize("more", MISTAKES)
def test_a_mistake_in_a_recipe_is_told_in_one_line(more, tmp_path):
    place = tmp_path / "mine.py"
    place.write_text(RECIPE.replace("{more}", more))
    with pytest.raises(UserError, match=MISTAKES[more]) as told:
        base.register([str(place)])
    assert "\n" not in str(told.value)
    place.write_text(RECIPE.replace("{more}", ""))
    base.register([str(place)])
    assert get_harness("mine").version == "1"
    place.write_text(RECIPE.replace("{more}", "").replace('"chat"', '"telnet"'))
    with pytest.raises(UserError, match="dialect 'telnet' is none of chat, responses, anthropic, gemini"):
        get_harness("mine")
