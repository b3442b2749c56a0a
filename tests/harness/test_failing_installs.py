"""What an install that cannot work leaves and says."""

from __future__ import annotations

import dataclasses
import shutil
from types import SimpleNamespace

from pipeline.harness import get_harness
from pipeline.harness.install import install


class _OtherVersion:
    """An installer whose lock is an older one's."""

    package = "mine"

    def install(self, prefix, version, lock):
        (prefix / "there").write_text("0.9")

    def version(self, prefix):
        return "0.9" if (prefix / "there").exists() else None

    def missing(self):
        return None


def test_a_lock_of_another_version_puts_nothing_into_place(tmp_path, monkeypatch):
    recipe = dataclasses.replace(get_harness("pi"), packaging=_OtherVersion(), warm_up=False)
    monkeypatch.setattr("pipeline.harness.install.get_harness", lambda name: recipe)
    assert f"gave 0.9, not mine {recipe.version}" in install(["pi"], tmp_path)["pi"]
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_cannot_be_written_is_a_reason_not_a_crash(tmp_path):
    (tmp_path / "file").touch()
    failures = install(["pi", "codex"], tmp_path / "file" / "harnesses")
    assert all("Not a directory" in failures[name] for name in ("pi", "codex"))


def test_a_full_disk_is_told_whatever_the_installer_says(tmp_path, monkeypatch):
    recipe = dataclasses.replace(get_harness("pi"), packaging=_OtherVersion(), warm_up=False)
    monkeypatch.setattr("pipeline.harness.install.get_harness", lambda name: recipe)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert install(["pi"], tmp_path)["pi"] == f"no space is left in {tmp_path}"
    assert list(tmp_path.iterdir()) == []
