"""Recipes as data, the registry, and the installer's promises."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import tomllib
from pathlib import Path

import pytest

from pipeline.config import UserError
from pipeline.harness import get_harness, harness_names
from pipeline.harness.base import BUILT_IN, Endpoint, locks_of
from pipeline.harness.install import install, installed
from pipeline.harness.packages import Npm

ROOT = Path("/somewhere/harnesses")
NPM = [name for name in BUILT_IN if isinstance(get_harness(name).packaging, Npm)]


def test_unknown_harness_lists_the_known_ones():
    with pytest.raises(UserError, match=r"unknown harness 'pie'; known: claude-code, .*, qwen-code"):
        get_harness("pie")


def test_another_packages_recipe_is_found(monkeypatch):
    entry = importlib.metadata.EntryPoint("mine", "pipeline.harness.pi:RECIPE", "yoke.harnesses")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == "yoke.harnesses" else [])
    assert "mine" in harness_names()
    assert get_harness("mine").name == "pi"


@pytest.mark.parametrize("name", NPM)
def test_lock_pins_the_recipes_version_by_hash(name):
    recipe = get_harness(name)
    lock = json.loads((locks_of(name) / "package-lock.json").read_text())
    assert lock["packages"][f"node_modules/{recipe.packaging.package}"]["version"] == recipe.version
    packages = [package for place, package in lock["packages"].items() if place]
    assert all("integrity" in package for package in packages if not package.get("inBundle"))
    assert not any("resolved" in package for package in packages)


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


def test_other_version_is_not_installed(tmp_path):
    recipe = get_harness("pi")
    package = tmp_path / "pi" / "node_modules" / recipe.packaging.package / "package.json"
    package.parent.mkdir(parents=True)
    assert not installed("pi", tmp_path)
    (tmp_path / "pi" / "installed.json").write_text(json.dumps({"version": recipe.version}))
    package.write_text(json.dumps({"version": recipe.version}))
    assert installed("pi", tmp_path)
    package.write_text(json.dumps({"version": "0.0.1"}))
    assert not installed("pi", tmp_path)


@pytest.mark.slow
def test_two_installs_at_once_and_one_over_an_older(tmp_path):
    (tmp_path / "claude-code").mkdir()
    (tmp_path / "claude-code" / "left-over").touch()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(install, [(["claude-code"], tmp_path)] * 2)
    assert installed("claude-code", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["claude-code"]
    assert not (tmp_path / "claude-code" / "left-over").exists()


@pytest.mark.slow
def test_npm_failure_is_told_in_its_words(tmp_path, monkeypatch):
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    failures = install(["claude-code"], tmp_path / "root")
    assert "npm failed" in failures["claude-code"]
    assert not installed("claude-code", tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []
