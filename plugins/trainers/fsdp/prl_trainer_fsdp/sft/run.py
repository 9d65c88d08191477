"""One rank of a supervised run; only the leader writes.

It has no controller: this process trains, writes metrics, status, checkpoints and summary, and at the end the model as
a Hugging Face folder into RUN_DIR/model. SIGTERM ends it after the step it is in, with a checkpoint and exit code 75;
started again, it continues from there.

Everything that can be wrong with the data and can be known before is found before the model is loaded.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import torch

from prl import faults
from prl.config.load import read_resolved
from prl.config.schema import SftConfig
from prl.errors import Preempted, PrlError
from prl.packing import model_cost
from prl.process import start_logging
from prl.rundir import RunDir
from prl.store import Checkpoints, StoreWriter, rewind
from prl_models.hf.export import export_hf
from prl_trainer_fsdp.checkpoint import Saver, check, load
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.learner import Learner
from prl_trainer_fsdp.parallel.runtime import max_over_ranks, share_bytes, share_in_row, start
from prl_trainer_fsdp.sft.feed import Feed
from prl_trainer_fsdp.sft.steps import Part

log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.5
SHOWN = ("train/", "loss/")
LARGEST_EXPONENT = 700.0
"""Of a perplexity: e^709 is the largest float."""
NOTES = 20
"""Rows left out that are told one by one; the metrics count all."""


class SftRun:
    """Raises:
    ConfigError: model, tokenizer or data are not what the configuration says.
    StoreError: the run directory cannot be written, or its checkpoint is damaged.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.config = read_resolved(run_dir.config, SftConfig)
        self._feed = Feed(self.config)
        own = cast(FsdpConfig, self.config.trainer.plugin_config())
        self.runtime = start(self.config)
        faults.install("trainer", self.runtime.rank, seed=self.config.seed)
        self._checkpoints = Checkpoints(run_dir)
        resumed, warnings = self._checkpoints.latest()
        if self.runtime.is_leader:
            rewind(run_dir, resumed.step if resumed else -1)
        self.writer = StoreWriter(run_dir, rollouts=False) if self.runtime.is_leader else None
        self._told_of = 0
        self._left_out = Counter({"bad_row": self._feed.bad_rows} if self._feed.bad_rows else {})
        self._last: dict[str, float] = {}
        self._resumed_at = resumed.step if resumed else None
        self._held_out: Part | None = None
        self._first_eval: float | None = None
        mine, ranks = self.runtime.data_rank, self.runtime.layout.data_ranks
        first = (resumed.step if resumed else 0) + 1
        ahead = self.runtime.context_rank == 0
        self._feed.start(first, mine, ranks, model_cost(self.config.model.path), ahead=ahead)
        self._event("data", renderer=self._feed.renderer, rows=self._feed.sizes, steps=self._feed.steps)
        try:
            if resumed is not None:  # another model is refused before memory is taken for this one
                check(self.config.model, own, resumed.part("trainer"))
            self.learner = Learner(self.config.model, own, self.config.loss.build(), self.runtime)
            self._saver = Saver(self.learner)
            if resumed is not None:
                self._resume(resumed.part("trainer"), resumed.step, warnings)
        except BaseException:
            self._feed.close()
            raise
        self._started = self._told = time.time()
        self._saved = self.learner.steps if resumed else -1
        self._blocked = 0.0
        self._stop = False

    def run(self) -> None:
        """Train to the last step and write the model.

        Raises:
            Preempted: asked to stop; the checkpoint is written.
            ConfigError: a row that could not be looked at before is wrong.
        """
        if self.config.data.eval_at_start and self.learner.steps == 0 and self._feed.has_eval:
            self._report(0, self._evaluate())
        while self.learner.steps < self._feed.steps:
            if self._asked_to_stop():
                self._save()
                self._complete()
                raise Preempted(
                    f"stopped after step {self.learner.steps} of {self._feed.steps}: resuming continues there"
                )
            self._one_step(self.learner.steps + 1)
        if self.config.checkpoint.at_end:
            self._save()
        self._complete()
        self._write_model()

    def stop(self, *_: object) -> None:
        self._stop = True

    def close(self, outcome: str, reason: str | None) -> None:
        self._feed.close()
        if self.writer is None:
            return
        self._status(outcome)
        self.writer.summary(
            {
                "outcome": outcome,
                "reason": reason,
                "steps": self.learner.steps,
                "resumed_at": self._resumed_at,
                "seconds": round(time.time() - self._started, 3),
                "epochs": round(self._feed.order.epoch(self.learner.steps), 6),
                "loss": self._last.get("train/loss"),
                "eval_loss_first": self._first_eval,
                "eval_loss": self._last.get("eval/loss"),
                "left_out": dict(self._left_out),
            }
        )
        self.writer.close()

    def _one_step(self, step: int) -> None:
        data, began = self.config.data, time.perf_counter()
        faults.point("trainer.step")
        part = share_in_row(lambda: self._feed.take(step), Part, self.runtime)
        rows = [row.packed() for row in part.rows]
        found = self.learner.step(rows, {"ce": float(part.trained)}, step - 1)
        values = {name: value for name, value in found.items() if name.startswith(SHOWN)}
        values["time/step"] = time.perf_counter() - began
        values["time/data"] = self._feed.waited
        values |= self._data_metrics(step, part)
        if self._feed.has_eval and (step == self._feed.steps or (data.eval_every and step % data.eval_every == 0)):
            values |= self._evaluate()
        if self._blocked:  # since the step before
            values["time/checkpoint"], self._blocked = self._blocked, 0.0
        self._report(step, values)
        if self._saver.pending and self._saver.written():
            self._complete()
        every = self.config.checkpoint.every
        if every and step % every == 0 and step < self._feed.steps:
            self._save()

    def _report(self, step: int, values: dict[str, float]) -> None:
        self._last |= values
        if self.writer is not None:
            self.writer.metrics(step, values)
            if time.time() - self._told > STATUS_EVERY_S:
                self._status("training")

    def _data_metrics(self, step: int, part: Part) -> dict[str, float]:
        """Where in the data a step is, and what it left out; also as events."""
        epoch, before = (self._feed.order.epoch(at) for at in (step, step - 1))
        if int(epoch) > int(before):
            self._event("epoch", epoch=int(epoch), step=step)
        self._left_out.update(part.left_out)
        for note in part.notes[: max(0, NOTES - self._told_of)]:
            log.warning("step %d: %s", step, note)
            self._event("row_left_out", step=step, what=note)
            self._told_of += 1
        counts = {f"data/{reason}": float(count) for reason, count in part.left_out.items()}
        return {"data/epoch": epoch, "data/examples": float(part.examples), **counts}

    def _evaluate(self) -> dict[str, float]:
        """Mean loss of a held-out trained token, and its exponential. Nothing is trained and nothing drawn."""
        began = time.perf_counter()
        if self._held_out is None:
            self._held_out = share_in_row(self._feed.evaluation, Part, self.runtime)
        part = self._held_out
        found = self.learner.evaluate([row.packed() for row in part.rows], {"ce": float(part.trained)})
        loss = found["train/loss"]
        if self._first_eval is None:
            self._first_eval = loss
        perplexity = math.exp(min(loss, LARGEST_EXPONENT))
        missing = {f"eval/{reason}": float(count) for reason, count in part.left_out.items()}
        took = time.perf_counter() - began
        return {"eval/loss": loss, "eval/perplexity": perplexity, "time/eval": took, **missing}

    def _asked_to_stop(self) -> bool:
        """Whether any rank was: all of them leave after the same step."""
        if self.runtime.world == 1:
            return self._stop
        flag = torch.tensor([float(self._stop)], device=self.runtime.device)
        return bool(max_over_ranks(flag, self.runtime)[0])

    def _save(self) -> None:
        """Take a snapshot; it is written while training goes on. The next waits for it."""
        step = self.learner.steps
        if self._saved == step:
            return
        self._complete()
        faults.point("trainer.checkpoint")
        draft = str(self._checkpoints.begin(step)).encode() if self.runtime.is_leader else b""
        path = Path(share_bytes(draft, self.runtime).decode())
        self._blocked += self._saver.begin(self._facts(step), path / "trainer")
        self._saved = step

    def _complete(self) -> None:
        """Wait for the files of a checkpoint that is being written, and write its manifest."""
        if not self._saver.pending:
            return
        files = self._saver.wait()
        if self.writer is not None:
            self.writer.flush()  # a resumed run repeats nothing before the checkpoint
            self._checkpoints.commit(self._saved, {"trainer": files}, {"incarnation": 0})
            self._checkpoints.prune(self.config.checkpoint.keep)
        self._event("checkpoint_saved", step=self._saved)

    def _facts(self, step: int) -> dict[str, Any]:
        """A step's number is the position in the data; the rest is to tell what happened before."""
        return {
            "step": step,
            "left_out": dict(self._left_out),
            "eval_loss_first": self._first_eval,
            "last": {name: value for name, value in self._last.items() if name.endswith("/loss")},
            "rows": self._feed.sizes,
        }

    def _resume(self, path: Path, step: int, warnings: list[str]) -> None:
        facts = load(self.learner, path)
        self._left_out = Counter(facts.get("left_out", {}))
        self._first_eval = facts.get("eval_loss_first")
        self._last.update(facts.get("last", {}))
        if facts.get("rows", self._feed.sizes) != self._feed.sizes:
            warnings = [*warnings, f"the data had {facts['rows']} rows, now {self._feed.sizes}: other examples follow"]
        for warning in warnings:
            log.warning("%s", warning)
        self._event("resumed", step=step, warnings=warnings)

    def _write_model(self) -> None:
        tensors = self.learner.disk_tensors()
        if not self.runtime.is_leader:
            for _ in tensors:  # takes its part in every gather
                pass
            return
        out = self.run_dir.path / "model"
        shutil.rmtree(out, ignore_errors=True)  # of a former process of this run
        export_hf(tensors, self.config.model.path, out)
        self._event("model", path=str(out))

    def _event(self, kind: str, **data: Any) -> None:
        if self.writer is not None:
            self.writer.event(kind, **data)

    def _status(self, state: str) -> None:
        assert self.writer is not None
        self._told = time.time()
        self.writer.status(
            {
                "state": state,
                "time": self._told,
                "started": self._started,
                "step": self.learner.steps,
                "steps": self._feed.steps,
                "loss": self._last.get("train/loss"),
                "step_s": self._last.get("time/step"),
                "roles": {"trainer-0": {"pid": os.getpid(), "doing": state}},
            }
        )


def main(run_dir: str) -> int:
    """Run to the end; the exit code."""
    start_logging()
    run: SftRun | None = None
    outcome, reason, code = "failed", None, 1
    try:
        run = SftRun(RunDir(run_dir))
        signal.signal(signal.SIGTERM, run.stop)
        run.run()
        outcome, code = "completed", 0
    except PrlError as error:
        log.error("%s", error)
        outcome = "stopped" if isinstance(error, Preempted) else "failed"
        reason, code = str(error), error.exit_code
    finally:
        if run is not None:
            run.close(outcome, reason)
    return code
