"""Two and four trainer processes over gloo do what one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import random_groups, save_model, weights

from pipeline.config import OFFLOADS, AlgorithmConfig, LoraConfig, TrainingConfig
from pipeline.training.checkpoint import CheckpointError, newest
from pipeline.training.export import export_checkpoint
from pipeline.training.trainer import Trainer

LAYOUTS = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import torch
from training_helpers import partition_all, random_groups, weights
from pipeline.config import AlgorithmConfig, LoraConfig, TrainingConfig
from pipeline.training import head
from pipeline.training.checkpoint import CheckpointError
from pipeline.training.trainer import Trainer
partition_all()
head.chunk_tokens = lambda vocabulary: 16
out, layouts, resume = Path(sys.argv[1]), eval(sys.argv[2]), sys.argv[3] == "resume"

def make(stage, offload, rank=None):
    settings = {{"learning_rate": 5e-4, "token_budget": 60, "lora": LoraConfig(rank=rank)}}
    training = TrainingConfig(zero_stage=stage, offload=offload, **settings)
    return Trainer({model!r}, training, AlgorithmConfig(minibatches=1), 0, 4)

def update(trainer, seed):
    return trainer.update(random_groups(seed) if trainer.rank == 0 else None)

for stage, offload, *adapters in layouts:
    place = out / (str(stage) + offload)
    trainer = make(stage, offload, *adapters)
    metrics = [update(trainer, 0)]
    trainer.save(place / "checkpoints", {{"count": 1}})
    trainer.export(place / "export")
    metrics.append(update(trainer, 1))
    trained = weights(trainer)
    if resume:
        again = make(stage, offload, *adapters)
        assert again.load(place / "checkpoints") == {{"count": 1}}
        update(again, 1)
        for name, value in weights(again).items():
            assert torch.equal(value, trained[name]), (stage, offload, name)
    if trainer.rank == 0:
        torch.save((metrics, trained), place / "result.pt")
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
    path = root / "layouts.py"
    names = {"path": [*sys.path, str(Path(__file__).parent)], "model": str(model)}
    path.write_text(LAYOUTS.format(**names))
    (root / "gradients.py").write_text(GRADIENTS.format(**names, algorithms=ALGORITHMS))
    return path


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
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return subprocess.CompletedProcess(command, processes[0].returncode, outputs[0])


EVERY_LAYOUT = [(stage, offload) for offload, stages in OFFLOADS.items() for stage in stages]
COMPARED = ("loss", "entropy", "grad_norm", "mismatch_kl", "ratio/mean", "logprob_diff_max", "batch/rows")


def plain_result(model: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What every layout has to come to: one rank, nothing partitioned, one forward a step."""
    training = TrainingConfig(learning_rate=5e-4, zero_stage=0, token_budget=10**6)
    trainer = Trainer(model, training, AlgorithmConfig(minibatches=1), 0, 4)
    return [trainer.update(random_groups(seed)) for seed in (0, 1)], weights(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layouts", "resume"),
    [(2, EVERY_LAYOUT, True), (4, [(2, "optimizer"), (3, "all")], False)],
    ids=["two ranks", "four ranks"],
)
def test_every_layout_on_many_ranks_trains_as_one_rank_does(
    script: Path, tmp_path: Path, ranks: int, layouts: list[tuple[int, str]], resume: bool
) -> None:
    """Weights, metrics, a restart, and exports: by all ranks together and by one process from their checkpoint."""
    metrics, expected = plain_result(script.parent / "model")
    arguments = [str(script), str(tmp_path), repr(layouts), "resume" if resume else "straight"]
    done = launch(arguments, tmp_path, ranks)
    assert done.returncode == 0, done.stdout[-3000:]
    for stage, offload in layouts:
        place = tmp_path / f"{stage}{offload}"
        theirs, trained = torch.load(place / "result.pt", weights_only=False)
        assert trained.keys() == expected.keys()
        for name, value in expected.items():
            assert (trained[name] - value).norm() <= 1e-5 * value.norm(), (place.name, name)
        for mine, other in zip(metrics, theirs, strict=True):
            assert mine["batch/forwards_per_step"] == 1 < other["batch/forwards_per_step"]
            assert {name: other[name] for name in COMPARED} == pytest.approx({n: mine[n] for n in COMPARED}, rel=1e-4)
        together, alone = load_file(place / "export" / "model.safetensors"), exported_by_one_process(script, place)
        assert alone.keys() == together.keys() == expected.keys(), place.name
        assert all(torch.equal(value, alone[name]) for name, value in together.items()), place.name


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


@pytest.mark.slow
def test_adapters_on_two_ranks_train_as_on_one(script: Path, tmp_path: Path) -> None:
    """Compared by how far they moved the weights: the base is the same anyway."""
    model = script.parent / "model"
    training = TrainingConfig(learning_rate=5e-4, token_budget=10**6, lora=LoraConfig(rank=4))
    trainer = Trainer(model, training, AlgorithmConfig(minibatches=1), 0, 4)
    base = weights(trainer)
    for seed in (0, 1):
        trainer.update(random_groups(seed))
    expected = weights(trainer)
    done = launch([str(script), str(tmp_path), repr([(3, "none", 4)]), "resume"], tmp_path, 2)
    assert done.returncode == 0, done.stdout[-3000:]
    _, trained = torch.load(tmp_path / "3none" / "result.pt", weights_only=False)
    moved = {name for name, value in expected.items() if not torch.equal(value, base[name])}
    assert moved == {name for name in expected if name.endswith("proj.weight")}
    for name in moved:
        assert (trained[name] - expected[name]).norm() <= 1e-2 * (expected[name] - base[name]).norm(), name
    together = load_file(tmp_path / "3none" / "export" / "model.safetensors")
    alone = exported_by_one_process(script, tmp_path / "3none")
    assert alone.keys() == together.keys() > expected.keys()
    assert all(torch.equal(value, alone[name]) for name, value in together.items())


def exported_by_one_process(script: Path, place: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's weights, as a job that evaluates it would export them."""
    trained = newest(place / "checkpoints")
    assert trained is not None
    for _ in range(2):  # the second one finds the place taken
        export_checkpoint(str(script.parent / "model"), trained, place / "again", "float32")
    assert not list(place.glob(".partial*"))
    return dict(load_file(place / "again" / "model.safetensors"))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_refused_by_one(script: Path, tmp_path: Path) -> None:
    done = launch([str(script), str(tmp_path), repr([(2, "none")]), "straight"], tmp_path, 2)
    assert done.returncode == 0, done.stdout[-3000:]
    training = TrainingConfig(zero_stage=2)
    with pytest.raises(CheckpointError, match="written with ranks=2, this run has ranks=1"):
        Trainer(script.parent / "model", training, AlgorithmConfig(), 0, 4).load(tmp_path / "2none" / "checkpoints")


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
    done = launch([str(full), str(tmp_path / "out"), "2"], tmp_path / "out", 2)
    assert "REFUSED ['0000-000001-update-000000']" in done.stdout, done.stdout[-3000:]
    assert "LOADED {'count': 3}" in done.stdout
