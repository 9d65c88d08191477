"""What a run does right now: a live panel on a terminal, plain lines elsewhere. Both go to standard error.

Everything is read from status.json, which the controller replaces about twice a second, and from the end of
metrics.jsonl; the launcher's `on_tick` drives it, so there is no thread of ours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prl.rundir import RunDir
from prl_cli import output, runs
from prl_cli.tail import JsonLines

if TYPE_CHECKING:
    from prl.plan import LaunchState

LINE_EVERY_S = 2.0
QUIET_LINE_EVERY_S = 30.0
"""A run in which nothing changes still says so, but seldom."""


class Progress:
    """A context: the display is gone when it is left, so that what follows is printed below it."""

    def __init__(self, run: RunDir, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self.cause = ""
        """What the launcher itself said about a failure, on standard error."""
        self._warned: set[str] = set()
        self._view: _Live | _Lines | None = None
        if not quiet:
            self._view = _Live(run, clock) if _is_terminal() else _Lines(run, clock)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def on_tick(self, state: LaunchState) -> None:
        """Called by the launcher about four times a second, the last time with phase "ended"."""
        self.cause = state.cause or self.cause
        self._warn()
        if self._view is None:
            return
        self._view.update(state)
        if state.phase == "ended":
            self._close()

    def _warn(self) -> None:
        """Tell once what the controller could not use of the state that it continues from."""
        for text in runs.read_json(self._run.status).get("warnings") or ():
            if text not in self._warned:
                self._warned.add(text)
                output.warn(str(text))

    def _close(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None


def _is_terminal() -> bool:
    return sys.stderr.isatty()


class _Lines:
    """One line when the step or the state has changed, at most every two seconds."""

    def __init__(self, run: RunDir, clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock
        self._shown: tuple[object, ...] = ()
        self._at = float("-inf")
        output.say(f"run directory {run.path}")

    def update(self, state: LaunchState) -> None:
        status = runs.read_json(self._run.status)
        now = self._clock()
        key = (condition(status), status.get("step"), state.phase == "stopping")
        wait = LINE_EVERY_S if key != self._shown else QUIET_LINE_EVERY_S
        if (
            not status
            or (now - self._at < wait and state.phase != "ended")
            or (state.phase == "ended" and key == self._shown)
        ):
            return
        self._shown, self._at = key, now
        output.say(plain_line(status, state))

    def close(self) -> None:
        pass


def plain_line(status: dict[str, Any], state: LaunchState) -> str:
    """The state of a run on one line, such as a log would want it."""
    parts = [f"step {status.get('step', 0)}/{status.get('steps', '?')}"]
    if state.phase == "stopping":
        parts.append("ending")
    elif condition(status) not in ("running", "training", ""):
        parts.append(condition(status))
    for key, name in (("reward", "reward"), ("loss", "loss"), ("eval_last", "eval")):
        if status.get(key) is not None:
            parts.append(f"{name} {output.number(status[key])}")
    if status.get("tokens_per_s"):
        parts.append(f"{output.number(float(status['tokens_per_s']), 0)} tokens/s")
    if status.get("staleness_mean") is not None and status.get("step"):
        text = f"staleness {output.number(status['staleness_mean'], 1)}"
        parts.append(text + f" (max {output.number(status.get('staleness_max'))})")
    parts.extend(_busy(status) if status.get("step") else [])
    if status.get("waiting_for"):
        parts.append(f"waits for {waited_for(status)}")
    if engines(status):
        parts.append(engines(status))
    restarts = sum(process.restarts for process in state.processes)
    if restarts:
        parts.append(f"{restarts} restarts")
    return "  ".join(parts)


def engines(status: dict[str, Any]) -> str:
    """How many engines serve and how many are wanted; "" where that goes without saying."""
    counts = status.get("engines") or {}
    wanted, serving = counts.get("wanted", 1), counts.get("serving", 1)
    if status.get("waits") is None or (wanted == 1 and serving == 1):
        return ""
    return f"{serving} engines" if wanted == serving else f"{serving} of {wanted} engines"


def condition(status: dict[str, Any]) -> str:
    """The state of a run in one word."""
    return "paused" if status.get("paused") and status.get("state") == "running" else str(status.get("state") or "")


def waited_for(status: dict[str, Any]) -> str:
    return str(status.get("waiting_for") or "").removeprefix("waiting for ")


def _busy(status: dict[str, Any]) -> list[str]:
    return [
        f"{name} {status[f'{name}_busy']:.0%}"
        for name in ("engine", "trainer")
        if isinstance(status.get(f"{name}_busy"), int | float)
    ]


class _Live:
    """A panel of a few lines, redrawn twice a second. What anything else prints appears above it."""

    def __init__(self, run: RunDir, clock: Callable[[], float]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._run = run
        self._clock = clock
        self._started = clock()
        self._metrics = JsonLines(run.metrics)
        self._rewards: list[float] = []
        self._at = float("-inf")
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        self._live.start()

    def update(self, state: LaunchState) -> None:
        now = self._clock()
        if now - self._at < 0.45 and state.phase != "ended":
            return
        self._at = now
        for record in self._metrics.new():
            value = record.get("reward", record.get("reward/mean"))
            if isinstance(value, int | float):
                self._rewards.append(float(value))
        status = runs.read_json(self._run.status)
        self._live.update(self._render(status, state, now - self._started), refresh=True)

    def _render(self, status: dict[str, Any], state: LaunchState, seconds: float) -> Any:
        from rich.markup import escape
        from rich.table import Table

        phase = condition(status) or "starting" if state.phase == "running" else state.phase
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        step, steps = status.get("step", 0), status.get("steps", 0)
        grid.add_row(
            self._run.name,
            f"[bold]{phase}[/]  {_bar(step, steps)}  step {step}/{steps or '?'}  {output.duration(seconds)}",
        )
        if status.get("reward") is not None:
            line = f"[bold]{output.number(status['reward'])}[/]  {sparkline(self._rewards)}"
            if status.get("eval_last") is not None:
                line += f"  evaluation [bold]{output.number(status['eval_last'])}[/]"
            grid.add_row("reward", line)
        if status.get("loss") is not None:
            grid.add_row("loss", output.number(status["loss"]))
        details = _details(status)
        if details:
            grid.add_row("pace", details)
        waiting = waited_for(status) if status else "the roles to start"
        if waiting:
            grid.add_row("waits for", escape(waiting))
        down = [f"{p.role}-{p.replica} {p.state}" for p in state.processes if p.state == "restarting"]
        if down:
            grid.add_row("processes", ", ".join(down))
        hints = {"running": "Ctrl-C: checkpoint and end; twice: end at once", "stopping": "ending; Ctrl-C ends at once"}
        if state.phase in hints:
            grid.add_row("", f"[dim]{hints[state.phase]}[/]")
        return grid

    def close(self) -> None:
        self._live.stop()


def _details(status: dict[str, Any]) -> str:
    parts = []
    if status.get("tokens_per_s"):
        parts.append(f"{output.number(float(status['tokens_per_s']), 0)} tokens/s")
    if status.get("staleness_mean") is not None:
        parts.append(
            f"staleness {output.number(status['staleness_mean'], 1)} (max {output.number(status.get('staleness_max'))})"
        )
    parts.extend(f"{text} busy" for text in _busy(status))
    parts.extend([engines(status)] if engines(status) else [])
    return ", ".join(parts)


def _bar(step: object, steps: object, width: int = 20) -> str:
    if not isinstance(step, int) or not isinstance(steps, int) or steps <= 0:
        return "\u2500" * width
    full = min(width, round(width * step / steps))
    return "\u2501" * full + "\u2500" * (width - full)


def sparkline(values: list[float], width: int = 40) -> str:
    """The course of a number in one line of eight heights; more values than columns are averaged."""
    if not values:
        return ""
    if len(values) > width:
        bounds = [round(column * len(values) / width) for column in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(chr(0x2581 + min(7, int(8 * (value - low) / span))) for value in values)
