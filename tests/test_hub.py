"""Names of the hub: where a revision goes, and what is said when there is no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from pipeline.config import UserError
from pipeline.hub import cached_file, fetch, local_model, model_file, split, weight_shapes

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds one commit of one model, on a machine without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "models--org--name" / "snapshots" / COMMIT
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    return tmp_path


def test_a_name_may_have_a_revision() -> None:
    assert split("org/name@abc") == ("org/name", "abc")
    assert split("org/name") == ("org/name", None) == split("org/name@")


def test_a_cached_commit_is_found_by_its_revision_only(cache: Path) -> None:
    found = cached_file(f"org/name@{COMMIT}", "config.json")
    assert found is not None and found.parent.name == COMMIT
    assert cached_file("org/name", "config.json") is None, "no main is there"
    assert cached_file(f"org/name@{COMMIT}", "tokenizer.json") is None
    assert cached_file("not a name", "config.json") is None
    assert local_model(f"org/name@{COMMIT}") == found.parent == model_file(f"org/name@{COMMIT}", "config.json").parent


def test_what_the_hub_does_not_give_is_one_line_that_says_what_to_do(cache: Path) -> None:
    with pytest.raises(UserError) as refused:
        local_model("org/other@main")
    said = str(refused.value)
    assert said.startswith("model.path=org/other@main is no directory here") and "\n" not in said
    assert said.endswith("(hf download org/other --revision main), or give a local directory")
    with pytest.raises(UserError, match="neither a directory here nor a name of the hub"):
        fetch("a/b/c", "traces=a/b/c", data_set=True)
    with pytest.raises(UserError, match="--revision v1 --repo-type dataset"):
        fetch("org/data@v1", "traces=org/data@v1", data_set=True)


def test_shapes_are_read_from_every_shard(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    assert weight_shapes(str(tmp_path)) == {}
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_shapes(str(tmp_path)) == {"a": [2, 3], "b": [4]}
