"""Every knob, as one dataclass a config group.

Defaults live in conf/; these types reject unknown keys and wrong types.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

THOUGHTS = ("fork", "keep")
LOSSES = ("ppo_clip", "gspo", "cispo")
AGGREGATIONS = ("group_mean", "rollout_mean", "token_mean", "constant")
CORRECTIONS = ("importance", "tis", "mask")
CORRECTION_UNITS = ("token", "rollout")
OFFLOADS = {"none": (0, 1, 2, 3), "optimizer": (1, 2, 3), "all": (3,)}  # training.offload → ZeRO stages that can
SFT_ROWS = ("conversation", "turn")
HOME_VARIABLE = "YOKE_HOME"


class UserError(Exception):
    """A mistake that the person at the terminal can mend: shown as one line, exit code 2, no traceback."""


def yoke_home() -> Path:
    """Where what is installed once lies, for all runs of a user: $YOKE_HOME, else ~/.cache/yoke."""
    return Path(os.environ.get(HOME_VARIABLE) or "~/.cache/yoke").expanduser().absolute()


@dataclass
class ClusterConfig:
    """Where the job runs: this machine through submitit's local executor, or Slurm."""

    name: str = "local"  # local | slurm (submit a job) | allocation (inside an sbatch job of one's own)
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None  # a node has two tasks: trainer and engine
    mem_gb: float | None = None  # a node; null = the partition's default
    timeout_min: int = 120
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    sbatch: dict[str, Any] = field(default_factory=dict)  # more sbatch options, long names without the dashes
    srun: list[str] = field(default_factory=list)  # more options of srun
    setup: list[str] = field(default_factory=list)  # shell lines before srun: module load …
    signal_s: int = 120  # warning before the time limit or a preemption: long enough for an update and a checkpoint
    max_attempts: int = 3  # local: a crashed attempt is started again from the last checkpoint this often
    max_requeues: int = 20  # Slurm: starts of one job beyond the first, whatever ended them
    storage_wait_s: float = 600.0  # a full disk or a file system that is away is waited for this long
    host: str | None = None  # name or address under which other nodes reach this one; null = its host name
    interface: str | None = None  # network interface of the gradients (GLOO_ and NCCL_SOCKET_IFNAME); null = theirs


@dataclass
class ModelConfig:
    """The policy. ``path`` is a Hugging Face checkpoint directory or hub id."""

    path: str = MISSING
    max_model_len: int = 4096
    dtype: str = "float32"
    tool_parser: str = "hermes"


@dataclass
class EngineConfig:
    """vLLM and the shards in front of it."""

    port: int = 0  # 0: a free one
    start_timeout_s: float = 300.0
    request_timeout_s: float = 300.0
    sync_timeout_s: float = 120.0
    kv_cache_gib: float = 1.0
    max_num_seqs: int = 32
    single_process: bool = True  # CPU: one process with one OpenMP thread halves the cost of a rollout
    omp_threads: int = 1
    weight_transfer: str = "auto"  # file | gloo | nccl; auto = nccl on GPU, file on CPU
    extra_args: list[str] = field(default_factory=list)
    shards: int = 2
    max_restarts: int = 5
    cores: list[int] = field(default_factory=list)  # CPU: node i's vLLM runs on core cores[i % len]; [] = anywhere


@dataclass
class SessionPolicy:
    """What every call of a session is sampled with, whatever the harness asks for, and how much there may be of it.

    A limit of 0 is none. Calls beyond a budget get a last message, and later the dialect's error.
    """

    temperature: float = 1.0
    max_tokens: int = 512  # per call
    max_calls: int = 40
    max_session_tokens: int = 0  # prompts and samples of all calls together
    max_wall_s: float = 0.0  # from the session's start
    max_concurrent: int = 0  # calls at once; more get the dialect's "too many requests"
    ttl_s: float = 0.0  # `yoke proxy` closes a session that was idle for so long
    thoughts: str = "fork"  # fork | keep: what follows where the chat template strips earlier thoughts
    thinking: bool | None = None  # the template's switch for thoughts; null = its default
    continuity: bool = True  # false renders every history anew

    def __post_init__(self) -> None:
        """Raises UserError for a value that cannot work."""
        if self.thoughts not in THOUGHTS:
            raise UserError(f"thoughts={self.thoughts}: one of {', '.join(THOUGHTS)}")
        for name in ("temperature", "max_calls", "max_session_tokens", "max_wall_s", "max_concurrent", "ttl_s"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: must not be negative")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens={self.max_tokens}: must be at least 1")


@dataclass
class HarnessConfig:
    """Limits for one rollout, whichever harness runs it."""

    timeout_s: float = 120.0
    retries: int = 2  # for infrastructure failures only
    home: str | None = None  # where harnesses are installed; null = $YOKE_HOME/harnesses, or ~/.cache/yoke/harnesses
    recipes: list[str] = field(default_factory=list)  # more harnesses: path/to/file.py or package.module
    sampling: SessionPolicy = field(default_factory=SessionPolicy)


@dataclass
class MixConfig:
    """Which harnesses train, and how often each comes round."""

    harnesses: list[str] = MISSING
    weights: dict[str, float] = field(default_factory=dict)  # 1 where none is given
    set_aside_after: int = 3  # groups in a row that failed by a harness's own infrastructure; 0 = never
    readmit: list[str] = field(default_factory=list)  # harnesses that an earlier attempt set aside, to try again


@dataclass
class CurriculumConfig:
    """Tasks by how hard they have been (docs/curriculum.md)."""

    enabled: bool = False
    prior: float = 4.0  # rollouts with one half of them solved, which every task starts with
    floor: float = 0.1  # least weight of a task; the largest is 1


def check_curriculum(curriculum: CurriculumConfig) -> None:
    """Raises UserError for a number that cannot work."""
    if not 0 < curriculum.floor <= 1:
        raise UserError(f"curriculum.floor={curriculum.floor} must lie in (0, 1]: at 0 a task could never come again")
    if not 0 < curriculum.prior < math.inf:
        raise UserError(f"curriculum.prior={curriculum.prior} must be above 0")


@dataclass
class GatesConfig:
    """What is looked for in the files of a task set: each is error, warning or off."""

    duplicate: str = "error"  # two tasks of a split with the same instruction and environment
    same_id: str = "error"  # a task of both splits, by its id
    same_instruction: str = "error"
    same_source: str = "warning"
    leak: str = "error"  # what environment/ tells of the solution, the tests or the answer
    source_keys: list[str] = field(default_factory=lambda: ["source", "kaggle_dataset_name"])  # of task.toml's metadata
    allow: list[str] = field(default_factory=list)  # TASK:FILE below environment/, patterns: leaks that are none


@dataclass
class TasksConfig:
    """Training and held-out tasks (docs/tasks.md): Harbor directories, or ones that Yoke makes."""

    kind: str = "generated"  # generated | harbor | smoldata | humaneval
    train: str | None = None  # directory of task directories (harbor); or of the hub, OWNER/NAME@COMMIT (smoldata)
    test: str | None = None
    train_names: str | None = None  # file that names the tasks to take; null = all
    test_names: str | None = None
    source: str | None = None  # humaneval: HumanEval.jsonl.gz; null = the installed package's
    test_share: float = 0.25  # humaneval: share of the tasks that is held out
    levels: list[str] = field(default_factory=list)  # only tasks that their authors call so; [] = all
    train_size: int = 256  # the first so many; 0 = all (but for generated ones)
    test_size: int = 100
    seed: int = 0
    host_env: list[str] = field(default_factory=list)  # variables of the host that verifiers may ask for in vain
    check: bool = True  # oracle → 1 and nop → 0 on every task before the run
    gates: GatesConfig = field(default_factory=GatesConfig)
    builder: str = "auto"  # of `yoke tasks build`: auto | podman | docker | buildah | apptainer
    build_jobs: int = 2  # environments built at once
    build_timeout_s: float = 3600.0  # of one environment


@dataclass
class SandboxConfig:
    """Isolation and limits of everything that an agent or a verifier starts."""

    kind: str = "auto"  # auto | bubblewrap | apptainer | process
    image: str = ""  # of apptainer: a .sif file, an address (docker://…), "task"; "" = this machine's
    pull_timeout_s: float = 1800.0  # for fetching the image, once
    memory_mb: int = 4096
    processes: int = 256
    open_files: int = 4096
    file_mb: int = 256
    tmp_mb: int = 256
    workspace_mb: int = 2048
    workspace_files: int = 100_000
    disk_free_mb: int = 256


@dataclass
class RewardConfig:
    """``fn`` names a function outcome -> float | None, as ``package.module:function``."""

    fn: str = "pipeline.stages.advantage:default_reward"
    malformed_is_call: bool = True
    malformed_penalty: float = 0.0  # taken off a graded rollout's reward for each malformed call


@dataclass
class AlgorithmConfig:
    """Groups, advantage, loss and flow control."""

    group_size: int = 8
    groups_per_update: int = 6
    loss: str = "ppo_clip"  # ppo_clip | gspo | cispo
    aggregation: str = "group_mean"  # group_mean | rollout_mean | token_mean | constant
    constant_tokens: int = 512  # divisor of aggregation=constant: tokens of a full-length rollout
    clip_low: float = 0.2
    clip_high: float = 0.2
    decoupled: bool = False  # clip on π/π_prox, correct by π_prox/μ: one more forward an update
    correction: str = "mask"  # importance | tis | mask
    correction_unit: str = "token"  # token | rollout
    correction_low: float = 0.5
    correction_high: float = 5.0
    off_policy_bound: float = 0.0
    minibatches: int = 3
    normalize_std: bool = False
    overlong_tokens: int = 0  # sampled tokens of a rollout beyond which its reward loses 1; 0 = no such term
    overlong_cache: int = 0  # the loss grows linearly over the last so many of them
    max_staleness: int = 2
    stale_wait_s: float = 60.0
    max_outstanding_rollouts: int = 96
    refill_factor: float = 1.0  # zero-contrast groups are replaced by at most this many times the groups of an update
    max_rerolls: int = 2


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Refuse, with a UserError, a name or a number of the loss that cannot work."""
    for knob, known in {
        "loss": LOSSES,
        "aggregation": AGGREGATIONS,
        "correction": CORRECTIONS,
        "correction_unit": CORRECTION_UNITS,
    }.items():
        if (value := getattr(algorithm, knob)) not in known:
            raise UserError(f"algorithm.{knob}={value} is not known; choose one of {', '.join(known)}")
    a = algorithm
    for wrong, text in (
        (not 0 < a.clip_low < 1, f"algorithm.clip_low={a.clip_low} must lie in (0, 1)"),
        (not 0 < a.clip_high < math.inf, f"algorithm.clip_high={a.clip_high} must be above 0"),
        (a.minibatches < 1, f"algorithm.minibatches={a.minibatches} must be at least 1"),
        (a.constant_tokens < 1, f"algorithm.constant_tokens={a.constant_tokens} must be at least 1"),
        (
            not 0 <= a.correction_low < 1 < a.correction_high,
            f"algorithm.correction_low={a.correction_low} and algorithm.correction_high={a.correction_high} must lie "
            "on the two sides of 1: a token of the same policy has the ratio 1",
        ),
        (not 0 <= a.off_policy_bound < math.inf, f"algorithm.off_policy_bound={a.off_policy_bound} is below 0"),
        (
            a.off_policy_bound > 0 and not a.decoupled,
            f"algorithm.off_policy_bound={a.off_policy_bound} works with algorithm.decoupled=true only",
        ),
        (
            not 0 <= a.overlong_cache <= a.overlong_tokens,
            f"algorithm.overlong_cache={a.overlong_cache} must lie between 0 and "
            f"algorithm.overlong_tokens={a.overlong_tokens}",
        ),
    ):
        if wrong:
            raise UserError(text)


@dataclass
class LoraConfig:
    """Low-rank adapters (docs/lora.md): they are trained, the model itself stays as it is."""

    rank: int | None = None  # null = no adapters, every weight is trained
    alpha: float = 32.0  # an adapter's product is multiplied by alpha / rank
    targets: list[str] = field(default_factory=list)  # names of linear layers; [] = all but the output head


@dataclass
class TrainingConfig:
    """How many updates, optimiser, DeepSpeed and checkpoints."""

    updates: int = 24
    learning_rate: float = 2e-4
    decay_fraction: float = 0.33  # the last third of the updates decays linearly to min_lr_ratio
    min_lr_ratio: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    zero_stage: int = 1  # 0 | 1 | 2 | 3: what the ranks share instead of each having it whole (docs/training.md)
    offload: str = "none"  # kept in CPU memory: none | optimizer | all (the parameters too; zero_stage=3)
    token_budget: int = 8192  # tokens of one forward, padding included (docs/packing.md)
    threads: int = 1
    checkpoint_every: int = 4
    keep_checkpoints: int = 2
    keep_every: int = 0  # exports of each so-many-th update stay for evaluation, whatever keep_exports says; 0 = none
    gradient_checkpointing: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)


def check_training(training: TrainingConfig) -> None:
    """Refuse, with a UserError, numbers and combinations that cannot work."""
    stages = OFFLOADS.get(training.offload)
    if stages is None:
        raise UserError(f"training.offload={training.offload} is not known; choose one of {', '.join(OFFLOADS)}")
    if training.zero_stage not in OFFLOADS["none"]:
        raise UserError(f"training.zero_stage={training.zero_stage} is not known; choose 0, 1, 2 or 3")
    if training.zero_stage not in stages:
        raise UserError(
            f"training.offload={training.offload} works with training.zero_stage={' or '.join(map(str, stages))}, "
            f"not {training.zero_stage}: DeepSpeed would leave everything where it is"
        )
    if not 0 <= training.decay_fraction <= 1 or not 0 <= training.min_lr_ratio <= 1:
        raise UserError("training.decay_fraction and training.min_lr_ratio must lie in [0, 1]")
    if training.token_budget < 1 or training.threads < 1:
        raise UserError("training.token_budget and training.threads must be at least 1")
    if training.lora.rank is not None and (training.lora.rank < 1 or training.lora.alpha <= 0):
        raise UserError("training.lora.rank must be at least 1 (or null: no adapters) and training.lora.alpha above 0")
    if training.keep_every < 0 or training.keep_every % max(1, training.checkpoint_every):
        raise UserError(
            f"training.keep_every={training.keep_every} must be a multiple of "
            f"training.checkpoint_every={training.checkpoint_every}: there are no other weights to keep"
        )
    if training.max_grad_norm < 0:
        raise UserError(f"training.max_grad_norm={training.max_grad_norm:g} must be 0 (never clip) or more")


@dataclass
class EvaluationConfig:
    """The held-out tasks: before, after, and with checkpoints on the way."""

    rollouts_per_task: int = 2
    retries: int = 2
    before: bool = True
    after: bool = True
    every: int = 0  # every k-th checkpoint is exported and evaluated, on Slurm by jobs of their own; 0 = none
    small_tasks: int = 0  # held-out tasks of these evaluations on the way, evenly drawn; 0 = all
    replicas: int = 0  # vLLM servers of `yoke evaluate` on a node; 0 = one a GPU, or one
    keep_exports: int = 4  # exports that stay on disk, besides those that wait for their evaluation; 0 = all
    max_jobs: int = 16  # with as many evaluation jobs waiting, a run submits no more
    cluster: dict[str, Any] = field(default_factory=dict)  # settings of `cluster` that evaluation jobs have differently


@dataclass
class StorageConfig:
    """What of a run stays on disk (docs/storage.md)."""

    rollouts: int | None = None  # tokens of the groups of at least the last so many updates stay; null = all
    quota_gb: float | None = None  # of the run directory; null = none


@dataclass
class LoggingConfig:
    """Where metrics go besides the run directory."""

    wandb: str = "offline"  # offline | online | disabled
    project: str = "yoke"
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    progress: bool = True


@dataclass
class CollectConfig:
    """The teacher whose rollouts `yoke collect` records, and which of them are kept."""

    teacher_url: str | None = None  # base URL of any Chat Completions API; null = the scripted teacher
    teacher_model: str = "teacher"
    api_key_env: str = "YOKE_UPSTREAM_KEY"  # the environment variable that holds its key, if it takes one
    tasks: int = 24  # the first ones of the training split, in each harness of the mix; 0 = all
    attempts: int = 1  # of one task in one harness, at most
    keep: int = 0  # with so many kept rollouts of a task in a harness, no further attempt; 0 = no such end
    min_reward: float = 1.0  # of the verifier, 0 to 1
    lazy: float = 0.5  # scripted: share of tasks answered without acting
    verify: float = 0.15  # scripted: chance of each further needless look


@dataclass
class SftConfig:
    """`yoke sft`: what is learnt from, as which rows, and for how long. Optimiser and DeepSpeed: `training`."""

    data: str | None = None  # recordings: a folder or a file (.parquet, .jsonl); null = collect/ in run_dir
    rows: str = "conversation"  # conversation | turn
    reasoning: bool = True  # the teacher's thoughts are learnt too
    max_length: int | None = None  # rows with more tokens are left out; null = model.max_model_len
    epochs: float = 2.0
    learning_rate: float = 1.0e-5
    warmup_ratio: float = 0.03  # of the steps; after it the rate falls linearly to 0
    batch_rows: int = 16  # of one optimizer step, on all ranks together
    micro_rows: int = 1  # of one forward
    checkpoint_every: int = 50  # steps
    ranks: int = 0  # processes on this node; 0 = one a GPU, or one


def check_sft(sft: SftConfig, ranks: int) -> None:
    """Refuse, with a UserError, a name or a number of `yoke sft` that cannot work."""
    if sft.rows not in SFT_ROWS:
        raise UserError(f"sft.rows={sft.rows} is not known; choose one of {', '.join(SFT_ROWS)}")
    if sft.max_length is not None and sft.max_length < 1:
        raise UserError(f"sft.max_length={sft.max_length} must be at least 1")
    at_once = sft.micro_rows * ranks
    if sft.micro_rows < 1 or sft.batch_rows < 1 or sft.batch_rows % at_once:
        raise UserError(
            f"sft.batch_rows={sft.batch_rows} must be a multiple of sft.micro_rows={sft.micro_rows} × {ranks} ranks"
        )
    if not 0 < sft.epochs < math.inf or not 0 < sft.learning_rate < math.inf or not 0 <= sft.warmup_ratio <= 1:
        raise UserError("sft.epochs and sft.learning_rate must be above 0, sft.warmup_ratio in [0, 1]")
    if sft.checkpoint_every < 1:
        raise UserError(f"sft.checkpoint_every={sft.checkpoint_every} must be at least 1")


@dataclass
class WarmStartConfig:
    """The quick start's model from nothing: three phases, and the held-out probabilities at which it stops."""

    threads: int = 2
    copy_steps: int = 300  # at most
    bridge_steps: int = 40
    full_steps: int = 160  # at most
    copied: float = 0.97
    stop_act: list[float] = field(default_factory=lambda: [0.43, 0.55])
    stop_word: float = 0.80
    stop_form: float = 0.95


@dataclass
class ProxyConfig:
    """The capture proxy by itself (`yoke proxy`)."""

    llm_url: str | None = None
    model: str | None = None  # null = ask the upstream
    mode: str = "engine"  # engine | text
    host: str = "127.0.0.1"
    port: int = 18701  # of the session API
    shards: int = 2
    dir: str | None = None  # null = runs/proxy-PORT
    admin_key: str | None = None
    request_timeout_s: float = 600.0
    outage_s: float = 60.0
    read_s: float = 60.0
    drain_s: float = 30.0
    render_fields: dict[str, Any] = field(default_factory=dict)  # sent with every render and derender
    selftest: bool = False
    sampling: SessionPolicy = field(default_factory=SessionPolicy)


@dataclass
class PreflightConfig:
    """The checks before a run (docs/preflight.md)."""

    skip: list[str] = field(default_factory=list)  # names of checks that are not made
    tasks: int = 8  # `yoke preflight`: so many tasks of each split are checked; 0 = all, as `yoke train` does


@dataclass
class SimulateConfig:
    """`yoke simulate`: how long things take, and what goes wrong."""

    nodes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])
    per_node: bool = True  # groups_per_update and max_outstanding_rollouts are for one node, and grow with the nodes
    updates: int = 8  # the first ones of the run
    rollout_s: float = 60.0  # median
    spread: float = 0.8  # standard deviation of the logarithm
    slower: dict[str, float] = field(default_factory=dict)  # harness: how many times as long its rollouts take
    update_s: float = 40.0
    sync_s: float = 2.0
    checkpoint_s: float = 10.0
    start_s: float = 60.0
    call_s: float = 0.002
    no_contrast: float = 0.3
    ungraded: float = 0.01
    sync_failures: float = 0.0  # share of the pushes into one engine
    lost_calls: float = 0.0  # share of the calls to the coordinator that bring or take a group
    engine_loss_h: float = 0.0  # between two losses of one node's engine; 0 = never
    engine_back_s: float = 300.0
    interruption_h: float = 0.0  # between two of the whole job; 0 = never
    warned: float = 0.5
    requeue_s: float = 120.0


@dataclass
class StageConfig:
    """For a stage that is run by itself."""

    groups: int = 2  # rollout: how many groups of the schedule
    checkpoint: str = "newest"  # evaluate: newest | all | base | a checkpoint's name, or the number of its update
    harnesses: list[str] | None = None  # evaluate: some of the mix, or others; null = the mix
    label: str | None = None  # evaluate: name of the evaluation; null = the checkpoint's name, or the API's model's
    tasks: int = 0  # evaluate: only so many of the held-out tasks, evenly drawn; 0 = all, or as many as it began with
    api_url: str | None = None  # evaluate: base URL of any Chat Completions API, instead of a checkpoint
    api_model: str | None = None  # the model's name there
    api_key_env: str | None = None  # the environment variable with its key; null = YOKE_UPSTREAM_KEY, if it is set


@dataclass
class SweepConfig:
    """Where `yoke train -m` puts the runs of a sweep: ``root``/sweep-``name``."""

    name: str | None = None  # null = from the swept keys and the settings, so that the same command goes on
    root: str = "runs"


@dataclass
class Config:
    """The composed configuration of a run."""

    run_dir: str = MISSING
    seed: int = 0
    concurrency: int = 4  # rollouts at once on a node
    fresh: bool = False
    dry_run: bool = False  # Slurm: print the plan and the batch script, submit nothing
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    experiment: Any = None


def check_replicas(config: Config) -> None:
    """Refuse, with a UserError, more engines than rollouts at once."""
    if config.evaluation.replicas > config.concurrency:
        raise UserError(
            f"evaluation.replicas={config.evaluation.replicas} share concurrency={config.concurrency} rollouts at "
            "once: give concurrency at least as many"
        )
