"""Evaluation: the sixth loop. It never starves the other five and never enters the ledger.

Consumes: a schedule (every n steps), requests from the control socket. Waits for: a due step. Unblocked by: the train
loop. Produces: `eval/...` metrics. With `max_staleness = 0` it runs between two steps instead, so that a run stays
repeatable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from prl.config.schema import RunConfig
from prl.loop.episodes import request, stream, tried
from prl.loop.state import LoopState
from prl.messages import EpisodeRequest
from prl.types import Outcome, Task

log = logging.getLogger(__name__)

FIRST_EPISODE_ID = 1 << 48
"""Evaluation episodes are numbered from here, far from training's."""


def is_scheduled(config: RunConfig, step: int) -> bool:
    """Whether this step is evaluated while training goes on."""
    table = config.eval
    return table.every > 0 and table.tasks > 0 and 0 < step < config.loop.steps and step % table.every == 0


def is_evaluated_on_resume(config: RunConfig, step: int) -> bool:
    """Whether a run that continues from the checkpoint of `step` evaluates that step, because a checkpoint is written
    before the evaluation of its step, or because it was the last one."""
    at_end = config.eval.at_end and config.eval.tasks > 0 and step == config.loop.steps
    return is_scheduled(config, step) or at_end


class Evaluator:
    """`resumed` is the step of the checkpoint that the run continues from."""

    def __init__(self, state: LoopState, resumed: int = 0) -> None:
        self._state = state
        self._tasks: dict[str, Sequence[Task]] = {}
        self._next_id = FIRST_EPISODE_ID
        self._due: list[int] = []
        self.first: float | None = None
        self.last: float | None = None
        self.warnings: list[str] = []
        self.on_step(resumed)

    def on_step(self, step: int) -> None:
        """Note that a step is done; evaluate if it is one of the scheduled ones and not the last."""
        if is_scheduled(self._state.config, step) and not self._synchronous:
            self._due.append(step)

    def due_before_generation(self, version: int) -> bool:
        return self._synchronous and is_scheduled(self._state.config, version)

    async def run(self) -> None:
        state = self._state
        while not state.done:
            if self._due or state.evaluate_requested:
                self._due.clear()
                state.evaluate_requested = False
                await self.evaluate(state.version)
            else:
                with state.waits.on("evaluate", "train", "no evaluation is due"):
                    await state.signal.wait()

    async def evaluate(self, step: int) -> None:
        """Run the held-out tasks of every environment and report the means, past `eval.timeout_s` of what there is.
        When the run is asked to stop it ends at once and reports nothing."""
        state = self._state
        table = state.config.eval
        if not table.tasks:
            return
        started = asyncio.get_running_loop().time()
        values: dict[str, float] = {}
        for env in state.config.envs:
            with state.waits.on("evaluate", "engine", f"evaluation of {env.label} at step {step}", table.timeout_s):
                values.update(await self._evaluate_env(env.label, step))
        if state.stopping:
            state.sink.event("evaluation_given_up", step=step)
            return
        values["eval/seconds"] = asyncio.get_running_loop().time() - started
        scores = [
            values[f"eval/{env.label}/{table.metric}"]
            for env in state.config.envs
            if f"eval/{env.label}/{table.metric}" in values
        ]
        self._check_metric(values)
        if scores:
            self.last = sum(scores) / len(scores)
            self.first = self.last if self.first is None else self.first
            values["eval/score"] = self.last
        state.sink.metrics(step, values)
        state.progress = asyncio.get_running_loop().time()

    def _check_metric(self, values: dict[str, float]) -> None:
        """Say once of each environment that it does not return `eval.metric`: it would be missed without a word."""
        metric = self._state.config.eval.metric
        for env in self._state.config.envs:
            prefix = f"eval/{env.label}/"
            names = [name.removeprefix(prefix) for name in values if name.startswith(prefix)]
            returned = [name for name in names if name not in ("episodes", "failed", "unfinished")]
            if not returned or metric in returned:
                continue
            text = f"{env.label} returns no {metric!r}, which is eval.metric, so it has no score; it returns "
            text += ", ".join(returned)
            if text not in self.warnings:
                self.warnings.append(text)
                log.warning("%s", text)

    @property
    def _synchronous(self) -> bool:
        return self._state.config.loop.max_staleness == 0

    async def _evaluate_env(self, label: str, step: int) -> dict[str, float]:
        state = self._state
        table = state.config.eval
        if label not in self._tasks:
            self._tasks[label] = await state.roles.runner.tasks(label, "eval", 0, table.tasks)
        tasks = [(index, task) for index, task in enumerate(self._tasks[label]) for _ in range(table.samples)]
        jobs = [
            asyncio.create_task(self._episode(label, task, index, number % table.samples))
            for number, (index, task) in enumerate(tasks)
        ]
        if not jobs:
            return {}
        done = await self._wait(jobs, table.timeout_s)
        if state.stopping:
            return {}
        # In the order of the tasks, not of `done`: a sum of floats depends on its order.
        results = [(task, job.result()) for (_, task), job in zip(tasks, jobs, strict=True) if job in done]
        finished = [(task, outcome) for task, outcome in results if outcome is not None]
        state.sink.evaluated(step, label, finished)
        outcomes = [outcome for _, outcome in finished]
        values = _means(label, outcomes)
        values[f"eval/{label}/episodes"] = len(outcomes)
        values[f"eval/{label}/failed"] = len(done) - len(outcomes)
        if late := len(jobs) - len(done):
            values[f"eval/{label}/unfinished"] = late
            state.sink.event("evaluation_partial", env=label, finished=len(done), unfinished=late)
        return values

    async def _wait(self, jobs: Sequence[asyncio.Task[Outcome | None]], timeout: float) -> set[asyncio.Task[Any]]:
        """Wait for all, but not past `timeout` seconds or a stop: those that are done. The others are cancelled."""
        finished = asyncio.create_task(asyncio.wait(jobs, timeout=timeout))
        stopped = asyncio.create_task(self._stop_asked())
        try:
            await asyncio.wait({finished, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return {job for job in jobs if job.done()}
        finally:
            for task in (finished, stopped, *jobs):
                task.cancel()

    async def _stop_asked(self) -> None:
        while not self._state.stopping:
            await self._state.signal.wait()

    async def _episode(self, env: str, task: Task, index: int, sample: int) -> Outcome | None:
        """Its outcome; None when it failed by its own fault, or however often it was tried."""
        result = await tried(self._state, lambda attempt: self._request(env, task, index, sample, attempt))
        return result if isinstance(result, Outcome) else None

    def _request(self, env: str, task: Task, index: int, sample: int, attempt: int) -> EpisodeRequest:
        state = self._state
        episode_id = self._next_id
        self._next_id += 1
        seed = stream(state.config.seed, "eval", index, sample)
        temperature = state.config.eval.temperature
        return request(state, episode_id, env, task, seed=seed, temperature=temperature, kind="eval", attempt=attempt)


def _means(label: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        for rollout in outcome.rollouts:
            if rollout.reward is not None:
                values.setdefault("reward", []).append(rollout.reward)
        for name, value in outcome.metrics.items():
            values.setdefault(name, []).append(value)
    return {f"eval/{label}/{name}": sum(numbers) / len(numbers) for name, numbers in values.items()}
