"""Settings that nobody installed anything for, and how one check of the table ends with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from pipeline.cli import compose_config
from pipeline.config import Config
from pipeline.launch.preflight_check import Grounds, Result, examine
from pipeline.launch.preflight_table import CHECKS


@cache
def composed(*words: str) -> Config:
    """What `yoke train WORDS` runs with. Takes half a second, so each is made once."""
    return compose_config(words)


def settings(*words: str, run_dir: Path = Path("/nowhere/run")) -> Config:
    """The quick start's, with ``key=value`` words over them."""
    own = OmegaConf.from_dotlist([f"run_dir={run_dir}", *words])
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(composed("+experiment=quickstart")), own))
    assert isinstance(config, Config)
    return config


def outcome(name: str, grounds: Grounds) -> Result:
    """What one check says."""
    (result,) = examine([check for check in CHECKS if check.name == name], grounds)
    return result


def assert_refused(result: Result, said: str) -> None:
    assert (result.result, said in result.said) == ("failed", True), result
    assert result.cure
