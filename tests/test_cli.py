"""Words after `yoke`: what they may be, and that each mistake in them is one line that helps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.cli import compose_config
from pipeline.config import UserError


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("cluster.node=2", "there is no setting cluster.node; perhaps cluster.nodes"),
        ("+cluster.node=2", "there is no setting cluster.node; perhaps cluster.nodes"),
        ("timeout_min=3", "there is no setting timeout_min; perhaps cluster.timeout_min"),
        ("++training.x=3", "there is no setting training.x ("),
        ("zebra={a: 1}", "there is no setting zebra ("),
        ("+experiment=smok", "there is no experiment/smok; one of: ablation_loss, four_harness, four_harness_parity, "),
        ("cluster=slrm", "there is no cluster/slrm; one of: allocation, local, slurm"),
        ("cluster.srun=[--mpi=none]", "quote words with signs in them"),
        ("run_dir=", "run_dir= is empty"),
    ],
)
def test_a_wrong_word_is_told_in_one_line(word: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        compose_config([word])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_table_takes_new_names_and_keeps_old_ones() -> None:
    config = compose_config(["cluster=slurm", "cluster.sbatch={exclude: n1, mail-type: FAIL}", "mix.weights={pi: 2}"])
    assert config.cluster.sbatch == {"exclude": "n1", "mail-type": "FAIL"}
    assert config.mix.weights == {"pi": 2.0}
    assert (
        compose_config(["training={updates: 3}"]).training.checkpoint_every
        == compose_config([]).training.checkpoint_every
    )
    assert compose_config(["evaluation.cluster={partition: short}"]).evaluation.cluster == {"partition": "short"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defaults: [config, _self_]\ncluster:\n account: a\n  qos: b\n", "is no YAML"),
        ("cluster:\n  account: me\n", "must begin as conf/local.example.yaml does"),
        ("", "must begin as conf/local.example.yaml does"),
    ],
)
def test_a_wrong_site_file_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.setattr(cli, "CONFIG_DIR", tmp_path)
    (tmp_path / "local.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        compose_config([])
    assert said in str(refused.value) and str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_reader_may_leave() -> None:
    """`yoke … | head`: no words about it, and the exit code of a broken pipe."""
    child = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stderr
    child.stdout.close()
    assert (child.stderr.read(), child.wait(timeout=60)) == ("", 141)
    child.stderr.close()
