"""The lifecycle of a run, for packages that want to watch it: entry points of group `prl.hooks`, modules of hooks.

    from prl.hooks import hookimpl

    @hookimpl
    def prl_step_finished(run, step, metrics): ...      # take the arguments you need, by these names

Checks run before the start and may refuse. Observers run on a thread of their own, behind a bounded queue: they cannot
hold up, change or end a run, and one that raises is reported once and not called again. No hook may change a batch, a
loss or a configuration: what a run computes is what its TOML says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from prl.config.compose import Problem
    from prl.config.schema import Table

PROJECT = "prl"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class RunInfo:
    """Which run an observer is told about. All that it has written is in `directory`."""

    name: str
    directory: Path
    config: Table


@hookspec
def prl_check_config(config: Table) -> Iterable[str | Problem] | None:
    """Report what is wrong with a configuration. Any problem of severity "error", and any text, refuses the run."""


@hookspec
def prl_run_started(run: RunInfo, resumed_from: int | None) -> None:
    """Before the first step; `resumed_from` is the step of the checkpoint that the run continues."""


@hookspec
def prl_step_finished(run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
    """After each optimiser step, with what is also a line of metrics.jsonl."""


@hookspec
def prl_eval_finished(run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
    """After each evaluation."""


@hookspec
def prl_weights_published(run: RunInfo, version: int, seconds: float, num_bytes: int) -> None:
    """After every engine has installed and verified a policy version."""


@hookspec
def prl_probes_scored(run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
    """After the version that this step made was installed: how well the engines reproduce the trainer's probabilities,
    with what is also a line of metrics.jsonl. Later steps may have finished before."""


@hookspec
def prl_checkpoint_saved(run: RunInfo, step: int, path: Path) -> None:
    """After a checkpoint's manifest was written, which makes it one."""


@hookspec
def prl_role_lost(run: RunInfo, role: str, replica: int, reason: str) -> None:
    """A process of the run ended while it was needed; it may be started again."""


@hookspec
def prl_run_finished(run: RunInfo, outcome: str) -> None:
    """The last call: "completed", "stopped" or "failed"."""
