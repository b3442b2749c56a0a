"""Two and four trainer processes over gloo do what one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import save_model

from pipeline.training.checkpoint import newest
from pipeline.training.export import export_checkpoint

SCRIPT = """
import json, sys
from pathlib import Path
sys.path[:0] = {path!r}
from training_helpers import random_groups
from pipeline.config import AlgorithmConfig, TrainingConfig, UserError
from pipeline.training.trainer import Trainer
out, stage, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume"
training = TrainingConfig(learning_rate=5e-4, zero_stage=stage, token_budget=60)
trainer = Trainer({model!r}, training, AlgorithmConfig(minibatches=2), 0, 4)
if resume:
    assert trainer.load(out / "checkpoints") == {{"count": 1}}
for seed in (1, 2) if resume else (0, 1, 2):
    metrics = trainer.update(random_groups(seed) if trainer.rank == 0 else None)
    if seed == 0:
        trainer.save(out / "checkpoints", {{"count": 1}})
trainer.export(out / ("resumed" if resume else "export"))
trainer.save(out / "last", {{}})
if trainer.rank == 0:
    (out / "metrics.json").write_text(json.dumps(metrics))
"""


GRADIENTS = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from training_helpers import random_groups
from pipeline.config import AlgorithmConfig, TrainingConfig
from pipeline.training.trainer import Trainer
out, budget = Path(sys.argv[1]), int(sys.argv[2])
results = {{}}
for name, settings in {algorithms!r}.items():
    training = TrainingConfig(token_budget=budget, max_grad_norm=0.0)
    trainer = Trainer({model!r}, training, AlgorithmConfig(minibatches=1, **settings), 0, 4)
    metrics = trainer.update(random_groups(0) if trainer.rank == 0 else None)
    first = [safe_get_full_optimizer_state(value, "exp_avg") for value in trainer.policy.parameters()]
    results[name] = metrics, torch.cat([moment.flatten() for moment in first]).double()
if trainer.rank == 0:
    torch.save(results, out / "gradients.pt")
"""
ALGORITHMS = {
    "ppo_clip": {},
    "gspo": {"loss": "gspo", "aggregation": "rollout_mean", "clip_high": 5.0},
    "cispo, decoupled": {"loss": "cispo", "aggregation": "token_mean", "decoupled": True, "correction_low": 0.1},
    "off-policy mask": {
        "aggregation": "constant",
        "constant_tokens": 16,
        "decoupled": True,
        "correction": "tis",
        "off_policy_bound": 1.0,
    },
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    model = save_model(root / "model")
    path = root / "train.py"
    names = {"path": [*sys.path, str(Path(__file__).parent)], "model": str(model)}
    path.write_text(SCRIPT.format(**names))
    (root / "gradients.py").write_text(GRADIENTS.format(**names, algorithms=ALGORITHMS))
    return path


def train(script: Path, out: Path, stage: int, ranks: int, resume: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the script on ``ranks`` processes; the result is rank 0's."""
    return launch([str(script), str(out), str(stage), "resume" if resume else "fresh"], out, ranks)


def launch(arguments: list[str], out: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    out.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *arguments]
    processes = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return subprocess.CompletedProcess(command, processes[0].returncode, outputs[0])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
def test_two_ranks_equal_one(script: Path, tmp_path: Path, stage: int) -> None:
    for ranks in (1, 2):
        done = train(script, tmp_path / str(ranks), stage, ranks)
        assert done.returncode == 0, done.stdout[-3000:]
    one, two = (load_file(tmp_path / name / "export" / "model.safetensors") for name in "12")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=2e-6)
    metrics = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in "12"]
    for name in ("loss", "entropy", "grad_norm", "mismatch_kl", "ratio/mean", "logprob_diff_max", "batch/rows"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-4), name
    assert metrics[1]["batch/forwards_per_step"] < metrics[0]["batch/forwards_per_step"]
    again = exported_by_one_process(script, tmp_path / "2")
    assert again.keys() == two.keys() and all(torch.equal(value, again[name]) for name, value in two.items())


@pytest.mark.slow
def test_ranks_and_accumulation_leave_loss_and_gradient_alone(script: Path, tmp_path: Path) -> None:
    """The first moment after one step is the gradient, but for a factor. One forward on one rank, many on four."""
    results = {}
    for ranks, budget in ((1, 10**6), (2, 60), (4, 20)):
        out = tmp_path / str(ranks)
        done = launch([str(script.parent / "gradients.py"), str(out), str(budget)], out, ranks)
        assert done.returncode == 0, done.stdout[-3000:]
        results[ranks] = torch.load(out / "gradients.pt", weights_only=False)
    assert results[4]["gspo"][0]["batch/forwards_per_step"] > 1
    for name, (metrics, gradient) in results[1].items():
        assert gradient.norm() > 1e-4, name
        for ranks in (2, 4):
            others, other = results[ranks][name]
            assert (other - gradient).norm() <= 1e-5 * gradient.norm(), (name, ranks)
            for key in ("loss", "grad_norm", "is_masked", "batch/off_policy_rollouts", "ratio/max"):
                assert others.get(key, 0) == pytest.approx(metrics.get(key, 0), rel=1e-5, abs=1e-6), (name, ranks, key)
    assert 0 < results[1]["off-policy mask"][0]["batch/off_policy_rollouts"] < 12


def exported_by_one_process(script: Path, out: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint's weights, as a job that evaluates it would export them."""
    trained = newest(out / "last")
    assert trained is not None
    for _ in range(2):  # the second one finds the place taken
        export_checkpoint(str(script.parent / "model"), trained, out / "again", "float32")
    assert not list(out.glob(".partial*"))
    return dict(load_file(out / "again" / "model.safetensors"))


@pytest.mark.soak
def test_two_ranks_resume_bit_equal_and_one_rank_is_refused(script: Path, tmp_path: Path) -> None:
    assert train(script, tmp_path, 2, 2).returncode == 0
    done = train(script, tmp_path, 2, 2, resume=True)
    assert done.returncode == 0, done.stdout[-3000:]
    straight, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "resumed"))
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
    refused = train(script, tmp_path, 2, 1, resume=True)
    assert refused.returncode != 0 and "written with ranks=2, this run has ranks=1" in refused.stdout


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path[:0] = {path!r}
from pipeline.config import AlgorithmConfig, TrainingConfig
from pipeline.training import checkpoint
from pipeline.training.trainer import Trainer
root = Path(sys.argv[1]) / "checkpoints"
trainer = Trainer({model!r}, TrainingConfig(zero_stage=int(sys.argv[2])), AlgorithmConfig(), 0, 4)
trainer.save(root, {{"count": 1}})
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
if trainer.rank == 1:  # writes beyond this fail in the middle of its part, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
try:
    trainer.save(root, {{"count": 2}})
except checkpoint.CheckpointError as error:
    print("REFUSED", [path.name for path in root.iterdir()])
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
trainer.save(root, {{"count": 3}})
print("LOADED", trainer.load(root))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_fails_the_checkpoint_on_every_rank(script: Path, tmp_path: Path) -> None:
    full = tmp_path / "full.py"
    model = script.parent / "model"
    full.write_text(FULL_DISK.format(path=[*sys.path, str(Path(__file__).parent)], model=str(model)))
    done = train(full, tmp_path / "out", 2, 2)
    assert "REFUSED ['0000-000001-update-000000']" in done.stdout, done.stdout[-3000:]
    assert "LOADED {'count': 3}" in done.stdout
