"""The tables of a configuration. A docstring under each field is what `prl config explain` prints.

A plugin's table holds the core's own keys (`use`, and a few named here) and, beside them, the keys of the plugin's
schema: `[engine] use = "vllm", replicas = 2, gpu_memory_utilization = 0.9`. `plugin_config` returns the latter,
validated; `prl.config.load` checks them when the file is read.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from prl.config.data import SftDataTable as SftDataTable
from prl.config.tables import PluginTable as PluginTable
from prl.config.tables import Table as Table
from prl.contribution import wrong
from prl.faults import Fault

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


class ModelTable(Table):
    """The model that is trained."""

    path: str
    """A local folder in the Hugging Face format, or a name on a model hub."""
    impl: Literal["auto", "custom", "hf"] = "auto"
    """"hf" runs transformers' own code; "custom" a model plugin; "auto" prefers a plugin that knows the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward pass in trainer and engine."""


class LoopTable(Table):
    """How much is generated, how old it may be when it is trained on, and when to give up."""

    steps: int = Field(100, ge=0)
    """Steps. Step s trains policy version s-1 into version s, with `trainer.updates_per_batch` optimiser steps."""
    groups_per_step: int = Field(32, ge=1)
    """Tasks that make up one batch."""
    group_size: int = Field(8, ge=1)
    """Episodes of every task; their rewards are compared with one another."""
    max_staleness: int = Field(4, ge=0)
    """K: no token older than K versions is ever trained. 0 is the synchronous algorithm, exactly repeatable on CPU."""
    straggler: Literal["wait", "drop"] = "wait"
    """A group that would become too stale while others overtake it: hold the batch for it, or drop and redraw it."""
    max_redraws: int = Field(2, ge=0)
    """How often a task whose group was dropped is drawn again."""
    max_attempts: int = Field(3, ge=1)
    """How often one episode is tried when its failure is not its own (a crashed worker, a lost engine)."""
    episode_timeout_s: float = Field(600, gt=0)
    """Deadline of one episode."""
    max_failure_share: float = Field(0.5, gt=0, le=1)
    """Stop loudly when more than this share of the last `failure_window` episodes failed."""
    failure_window: int = Field(256, ge=1)
    """Over how many of the latest episodes that share is taken."""
    max_empty_batches: int = Field(10, ge=1)
    """Stop loudly after so many batches in a row in which no sample carried any signal."""
    max_concurrency: Literal["auto"] | int = "auto"
    """Episodes in flight at once. "auto" follows the engines: more while their caches have room, fewer when they fill,
    preempt or queue; 0 leaves it to staleness alone, as "auto" does where engines say nothing of their caches and where
    `max_staleness` is 0."""
    step_timeout_s: float = Field(3600, gt=0)
    """Deadline of one training step, one publish, one checkpoint."""
    stuck_after_s: float = Field(300, gt=0)
    """Report the chain of waits when nothing has moved for so long."""
    silent_after_s: float = Field(60, gt=0)
    """An environment worker or engine without a sign of life for so long is blocked: it is killed and started again."""

    @field_validator("max_concurrency", mode="before")
    @classmethod
    def _auto_or_a_number(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise ValueError(f'must be "auto" or an integer of at least 0, not {value!r}')


_RESHAPES = (
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "ignore_eos",
)
"""What engines offer beside temperature. Each makes the sampled distribution another one than the trained."""


class SamplingTable(Table):
    """How training rollouts are sampled."""

    max_tokens: int = Field(128, ge=1)
    """Tokens of one turn at most."""
    temperature: float = Field(1.0, ge=0.01, allow_inf_nan=False)
    """Divides the logits before sampling; 1 is the model's own distribution. Trained at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Must be 1: training needs the whole distribution."""
    top_k: int = Field(0, ge=0)
    """Must be 0, which is off: training needs the whole distribution."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_that_reshapes(cls, data: Any) -> Any:
        for key in _RESHAPES if isinstance(data, dict) else ():
            if key in data:
                raise wrong(
                    key,
                    "training needs the distribution that the model computes: this changes it after the model, so the "
                    "engine's log-probabilities would not be those that the trainer computes again. Leave it out",
                )
        return data

    @model_validator(mode="after")
    def _whole_distribution(self) -> SamplingTable:
        if self.top_p != 1.0 or self.top_k != 0:
            raise wrong(
                "top_p" if self.top_p != 1.0 else "top_k",
                "training needs top_p = 1 and top_k = 0: a truncated distribution makes every importance ratio wrong "
                "by the probability that was cut off",
            )
        return self


class EnvTable(PluginTable):
    """An environment: where tasks and rewards come from."""

    kind = "envs"
    name: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    """How it is called in metrics and logs; the plugin's name, or the class in a file, when empty. Must be unique."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Share of training tasks drawn from it."""

    @property
    def label(self) -> str:
        return self.name or self.use.rpartition(":")[2]


class EngineTable(PluginTable):
    """The inference servers."""

    kind = "engines"
    use: str = "embedded"
    """The inference server: an installed engine, or "./file.py:Name"."""
    replicas: int = Field(1, ge=1)
    """Servers, each with the whole model."""
    threads: int = Field(0, ge=0)
    """CPU threads of each replica; 0 leaves it to the numeric library."""
    sleep: bool = False
    """Free its GPU's memory while the trainer trains, where both share it. Needs `loop.max_staleness = 0`."""
    adapters: Literal["auto", "merged"] = "auto"
    """How low-rank adapters reach it: as adapters, where it takes them, or "merged" into whole weights."""
    install_timeout_s: float = Field(600, gt=0)
    """How long a replica may take to install a version. One that takes longer is killed and started again, while the
    others go on."""
    drain_timeout_s: float = Field(120, ge=0)
    """How long a replica that is no longer wanted may take for its requests; the rest is tried again elsewhere."""


class TrainerTable(PluginTable):
    """The trainer."""

    kind = "trainers"
    use: str = "fsdp"
    """What computes gradients: an installed trainer, or "./file.py:Name"."""
    processes: int = Field(1, ge=1)
    """Ranks, each a process of its own."""
    row_tokens: int = Field(8192, ge=16)
    """Tokens of one packed micro-batch at most; no sample may be longer."""
    threads: int = Field(0, ge=0)
    """CPU threads of each rank; 0 leaves it to the numeric library."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimiser steps over the groups of one batch, each on a share of them; a step of the run is all of them."""


class AlgorithmTable(PluginTable):
    """Credit assignment: from the rewards of a group to the advantages of its tokens."""

    kind = "algorithms"
    use: str = "grpo"
    """Credit assignment: an installed algorithm, or "./file.py:Name"."""


class LossTable(PluginTable):
    """The loss per token."""

    kind = "losses"
    use: str = "dppo"
    """The loss per token: an installed loss, or "./file.py:Name"."""


class ChannelTable(PluginTable):
    """How weights travel from the trainer to the engines."""

    kind = "channels"
    use: str = "filesystem"
    """How new weights reach the engines: an installed channel, or "./file.py:Name"."""


class LauncherTable(PluginTable):
    """How the processes of the run are started."""

    kind = "launchers"
    use: str = "local"
    """What starts the processes: an installed launcher, or "./file.py:Name"."""


class MonitorTable(PluginTable):
    """Another place that receives the run's metrics."""

    kind = "monitors"


class EvalTable(Table):
    """Evaluation on held-out tasks, beside training."""

    every: int = Field(0, ge=0)
    """Evaluate after every so many steps while training goes on; 0 only at the start and the end."""
    tasks: int = Field(256, ge=0)
    """Held-out tasks of each environment; 0 switches evaluation off."""
    samples: int = Field(1, ge=1)
    """Episodes of each task."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    at_start: bool = True
    """Evaluate before the first step: where the run began."""
    at_end: bool = True
    """Evaluate after the last step."""
    metric: str = "reward"
    """What `eval_first` and `eval_last` in summary.json report: "reward" or a metric an environment returns."""
    timeout_s: float = Field(1800, gt=0)
    """An environment's evaluation that takes longer ends with the episodes it has."""


class CheckpointTable(Table):
    """When the run is saved."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 only at the end and on request."""
    keep: int = Field(2, ge=1)
    """Complete checkpoints kept."""
    at_end: bool = True
    """Also when the run ends, however it was stopped."""


class StoreTable(Table):
    """What the run directory keeps of the rollouts."""

    rollouts: Literal["all", "none"] = "all"
    """Whether rollouts are written to the run directory."""
    every: int = Field(1, ge=1)
    """Keep the rollouts of every n-th step."""
    queue: int = Field(20_000, ge=100)
    """Records that may wait for the disk before the loop does."""


class MismatchTable(Table):
    """Trainer and engine must compute the same probabilities. Checked on tokens of the trainer's own version."""

    probes: int = Field(8, ge=0)
    """Sequences that every engine must reproduce after installing weights, of what was sampled last; 0 switches the
    gate off. More give a more exact `mismatch/probe_kl`, and answers that wait longer for them."""
    probe_tolerance: float = Field(0.0, ge=0)
    """Mean absolute difference of log-probabilities allowed; 0 chooses 1e-3 for float32, and for bfloat16
    0.15 and a fiftieth of the mean absolute log-probability, since rounding is relative."""
    max_kl: float = Field(0.0, ge=0)
    """Limit of the mismatch KL (k3 estimator) of one step; 0 chooses 1e-3 for float32 and 0.015 for bfloat16."""
    action: Literal["warn", "pause", "stop", "correct"] = "pause"
    """What happens past the limit. With "correct" `correction` comes into force only then, from the next step on."""
    correction: Literal["none", "truncate", "mask_tokens", "mask_sequences"] = "none"
    """What is done with r = p_trainer / p_engine of a trained token: nothing; its weight is multiplied by min(1, C/r),
    truncated importance sampling; it is left out unless 1/C <= r <= C; its document, unless the geometric mean is."""
    clip: float = Field(0.0, ge=0)
    """C of the correction, above 1; 0 chooses 2 for tokens and 1.05 for sequences."""

    @model_validator(mode="after")
    def _clip_is_a_band(self) -> MismatchTable:
        if 0 < self.clip <= 1:
            raise wrong("clip", f"is {self.clip:g}: a ratio of 1 needs room on both sides, so it must be above 1, or 0")
        if self.action == "correct" and self.correction == "none":
            raise wrong("correction", 'must name one, such as "truncate", for action = "correct" to put in force')
        return self

    @property
    def band(self) -> float:
        """`clip`, or the default of the correction."""
        return self.clip or (1.05 if self.correction == "mask_sequences" else 2.0)


class RunConfig(Table):
    """One reinforcement-learning run."""

    name: str = Field("run", pattern=_NAME)
    """The run directory is `runs_dir`/`name`."""
    runs_dir: str = "runs"
    """Where run directories are made."""
    seed: int = Field(0, ge=0)
    """Of everything random: tasks, sampling, the order of batches."""
    model: ModelTable
    loop: LoopTable = LoopTable()
    sampling: SamplingTable = SamplingTable()
    envs: list[EnvTable] = []
    """Environments: at least one, but for `prl serve`."""
    algorithm: AlgorithmTable = AlgorithmTable()
    loss: LossTable = LossTable()
    engine: EngineTable = EngineTable()
    trainer: TrainerTable = TrainerTable()
    channel: ChannelTable = ChannelTable()
    launcher: LauncherTable = LauncherTable()
    monitors: list[MonitorTable] = []
    eval: EvalTable = EvalTable()
    checkpoint: CheckpointTable = CheckpointTable()
    store: StoreTable = StoreTable()
    mismatch: MismatchTable = MismatchTable()
    faults: list[Fault] = []
    """Failures to inject, for tests."""

    @model_validator(mode="after")
    def _unique_environments(self) -> RunConfig:
        labels = [env.label for env in self.envs]
        for index, label in enumerate(labels):
            if label in labels[:index]:
                raise wrong(f"envs.{index}", f"two environments are called {label!r}: give one of them another `name`")
        return self


class ServeConfig(Table):
    """The inference side alone. It reads a run's configuration, too: other tables may be there and are not read."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field("serve", pattern=_NAME)
    """The run directory is `runs_dir`/`name`."""
    runs_dir: str = "runs"
    """Where run directories are made."""
    seed: int = Field(0, ge=0)
    """Of sampling, where a request has no seed of its own."""
    model: ModelTable
    engine: EngineTable = EngineTable(use="vllm")
    launcher: LauncherTable = LauncherTable()
    faults: list[Fault] = []
    """Failures to inject, for tests."""

    def run_config(self) -> RunConfig:
        """A run without steps and environments, which is how engines read it."""
        read = {key: getattr(self, key) for key in type(self).model_fields}
        return RunConfig(**read, loop=LoopTable(steps=0), sampling=SamplingTable(max_tokens=1))


class SftConfig(Table):
    """One supervised run: the same trainer and model, the loss `ce`."""

    name: str = Field("sft", pattern=_NAME)
    """The run directory is `runs_dir`/`name`."""
    runs_dir: str = "runs"
    """Where run directories are made."""
    seed: int = Field(0, ge=0)
    """Of everything random: tasks, sampling, the order of batches."""
    model: ModelTable
    data: SftDataTable
    loss: LossTable = LossTable(use="ce")
    trainer: TrainerTable = TrainerTable()
    launcher: LauncherTable = LauncherTable()
    checkpoint: CheckpointTable = CheckpointTable()
