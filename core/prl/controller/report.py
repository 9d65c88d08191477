"""What a run says of itself: status.json twice a second, summary.json at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prl.config.schema import RunConfig
from prl.controller.hub import Hub
from prl.errors import RunFailed, StoreError
from prl.loop.state import LoopState
from prl.loop.supervisor import Loop
from prl.store.sink import RunSink
from prl.store.writer import StoreWriter

if TYPE_CHECKING:
    from prl.controller.control import Control

log = logging.getLogger(__name__)

PERIOD_S = 0.5


class Report:
    """`begin` is called when the loop starts: its wall time and the roles' busy time count from there.

    `warnings` are shown to whoever started the run: what could not be used of the state that it continues from.
    """

    def __init__(
        self,
        config: RunConfig,
        store: StoreWriter,
        sink: RunSink,
        hub: Hub,
        control: Control,
        warnings: Sequence[str] = (),
        start_step: int = 0,
    ) -> None:
        self._config = config
        self._store = store
        self._sink = sink
        self._hub = hub
        self._control = control
        self._warnings = list(warnings)
        self._start_step = start_step
        self._state: LoopState | None = None
        self._loop: Loop | None = None
        self._started = time.time()
        self._mark = time.monotonic()
        self._busy: dict[str, float] = {}
        self._tokens: tuple[float, int] = (self._mark, 0)

    def begin(self, state: LoopState, loop: Loop) -> None:
        self._state, self._loop = state, loop
        self._mark = time.monotonic()
        self._busy = {c.label: c.busy for c in self._hub.connections.values()}
        self._tokens = (self._mark, state.tokens_generated)

    async def tick(self) -> None:
        while True:
            name = "starting" if self._state is None else "paused" if self._state.paused else "running"
            try:
                self._store.status(self._status(name))
            except StoreError as error:  # the loop's next report meets the same full disk, and ends the run
                log.error("%s", error)
                return
            await asyncio.sleep(PERIOD_S)

    def end(self, outcome: str, error: Exception | None) -> None:
        """Write the last status and, if the loop had begun, the summary."""
        document = self._status(outcome)
        if error is not None:
            document["failed_reason"] = str(error) or type(error).__name__
            document["log"] = (error.log if isinstance(error, RunFailed) else None) or "logs/controller-0.log"
        self._store.status(document)
        if self._state is not None and self._loop is not None:
            self._store.summary(self._summary(self._state, self._loop, outcome, document.get("failed_reason")))

    def _status(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = {
            "state": name,
            "time": time.time(),
            "started": self._started,
            "steps": self._config.loop.steps,
            "step": self._start_step,
            "waiting_for": self._control.starting,
            "warnings": self._warnings,
            "roles": {
                c.label: {"pid": c.pid, "doing": c.doing, "info": c.info} for c in self._hub.connections.values()
            },
        }
        document["engines"] = self._control.scaler.counts()
        state, last = self._state, self._sink.last
        if state is None:
            return document
        now = time.monotonic()
        since, tokens = self._tokens
        rate = (state.tokens_generated - tokens) / max(1e-6, now - since)
        if now - since > 5:
            self._tokens = (now, state.tokens_generated)
        document.update(
            step=state.version,
            version=state.version,
            paused=bool(state.paused),
            reward=last.get("reward/mean"),
            tokens_per_s=rate,
            staleness_mean=state.staleness_sum / max(1, state.staleness_count),
            staleness_max=state.staleness_max,
            waiting_for=self._bottleneck(state),
            waits=state.waits.describe(),
            engine_busy=self._busy_share("engine"),
            trainer_busy=self._busy_share("trainer"),
            eval_last=self._loop.evaluator.last if self._loop else None,
            step_s=last.get("time/step"),
            ledger=state.ledger.counts(),
        )
        if self._loop is not None:
            document["warnings"] = [*self._warnings, *self._loop.evaluator.warnings]
        return document

    def _bottleneck(self, state: LoopState) -> str:
        """One phrase: whom training, or else saving or generation, waits for."""
        for waiter in ("evaluate", "train", "save", "generate"):
            wait = state.waits.of(waiter)
            if wait is not None and wait.owner in ("engine", "trainer", "control", "batch", "publish", "save"):
                return f"{wait.owner}: {wait.reason}"
        return ""

    def _busy_share(self, role: str) -> float:
        """Share of the time since `begin` that the replicas of a role did useful work."""
        connections = self._hub.of(role)
        elapsed = time.monotonic() - self._mark
        if not connections or elapsed <= 0:
            return 0.0
        worked = sum(c.busy - self._busy.get(c.label, 0.0) for c in connections)
        return round(min(1.0, worked / elapsed / len(connections)), 4)

    def _summary(self, state: LoopState, loop: Loop, outcome: str, reason: str | None) -> dict[str, Any]:
        return {
            "outcome": outcome,
            "reason": reason,
            "steps": state.version,
            "resumed_at": self._start_step or None,
            "seconds": round(time.monotonic() - self._mark, 3),
            "eval_first": loop.evaluator.first,
            "eval_last": loop.evaluator.last,
            "tokens_trained": state.tokens_trained,
            "tokens_generated": state.tokens_generated,
            "rollouts": state.ledger.counts(),
            "staleness": {
                "mean": state.staleness_sum / max(1, state.staleness_count),
                "max": state.staleness_max,
            },
            "engine_busy": self._busy_share("engine"),
            "trainer_busy": self._busy_share("trainer"),
        }
