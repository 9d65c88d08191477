"""A supervised run: `python -m prl_trainer_fsdp.sft RUN_DIR`, which may be one of several ranks.

It has no controller: this process reads the examples, trains, writes metrics, status, checkpoints and summary, and at
the end the model as a Hugging Face folder into RUN_DIR/model. SIGTERM ends it after the step it is in, with a
checkpoint and exit code 75; started again, it continues from there.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
from typing import Any, cast

import torch

from prl import faults
from prl.config.load import read_resolved
from prl.config.schema import SftConfig
from prl.errors import ConfigError, Preempted, PrlError
from prl.packing import pack
from prl.process import start_logging
from prl.rows import PackedRow
from prl.rundir import RunDir
from prl.store import Checkpoints, StoreWriter, rewind
from prl_models.hf.export import export_hf
from prl_trainer_fsdp import checkpoint
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.learner import Learner
from prl_trainer_fsdp.parallel import max_over_ranks, start
from prl_trainer_fsdp.sft_data import Dataset, Example, order, packed_row

log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.5
SHOWN = ("train/", "loss/")


class SftRun:
    """One rank of a supervised run; only the leader writes.

    Raises:
        ConfigError: model, tokenizer or data are not what the configuration says.
        StoreError: the run directory cannot be written, or its checkpoint is damaged.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.config = read_resolved(run_dir.config, SftConfig)
        own = cast(FsdpConfig, self.config.trainer.plugin_config())
        self.runtime = start(own.device, self.config.trainer.threads)
        faults.install("trainer", self.runtime.rank, seed=self.config.seed)
        self._checkpoints = Checkpoints(run_dir)
        resumed, warnings = self._checkpoints.latest()
        if self.runtime.is_leader:
            rewind(run_dir, resumed.step if resumed else -1)
        self.writer = StoreWriter(run_dir, rollouts=False) if self.runtime.is_leader else None
        tokenizer = load_tokenizer(self.config.model.path)
        row_tokens = self.config.trainer.row_tokens
        self._train = Dataset(self.config.data.train, tokenizer, row_tokens)
        self._eval = Dataset(self.config.data.eval, tokenizer, row_tokens) if self.config.data.eval else None
        self.learner = Learner(self.config.model, own, self.config.loss.build(), self.runtime)
        if resumed is not None:
            checkpoint.load(self.learner, resumed.part("trainer"))
            self._event("resumed", step=resumed.step, warnings=warnings)
        self._started = self._told = time.time()
        self._saved = self.learner.steps if resumed else -1
        self._last: dict[str, float] = {}
        self._stop = False

    def run(self) -> None:
        """Train to the last step and write the model.

        Raises:
            Preempted: asked to stop; the checkpoint is written.
        """
        data = self.config.data
        while self.learner.steps < data.steps:
            if self._asked_to_stop():
                self._save()
                raise Preempted(f"stopped after step {self.learner.steps} of {data.steps}: resuming continues there")
            self._one_step(self.learner.steps + 1)
        if self.config.checkpoint.at_end:
            self._save()
        self._write_model()

    def stop(self, *_: object) -> None:
        self._stop = True

    def close(self, outcome: str, reason: str | None) -> None:
        if self.writer is None:
            return
        self._status(outcome)
        self.writer.summary(
            {
                "outcome": outcome,
                "reason": reason,
                "steps": self.learner.steps,
                "seconds": round(time.time() - self._started, 3),
                "loss": self._last.get("train/loss"),
                "eval_loss": self._last.get("eval/loss"),
            }
        )
        self.writer.close()

    def _one_step(self, step: int) -> None:
        data, began = self.config.data, time.perf_counter()
        faults.point("trainer.step")
        chosen = order(len(self._train), step, data.batch_size, self.config.seed, data.shuffle)
        rows, trained = self._rows(self._train.examples(chosen))
        found = self.learner.step(rows, {"ce": float(trained)}, step - 1)
        values = {name: value for name, value in found.items() if name.startswith(SHOWN)}
        values["time/step"] = time.perf_counter() - began
        if self._eval is not None and (step == data.steps or (data.eval_every and step % data.eval_every == 0)):
            values |= self._evaluate(self._eval)
        self._last |= values
        if self.writer is not None:
            self.writer.metrics(step, values)
            if time.time() - self._told > STATUS_EVERY_S:
                self._status("training")
        every = self.config.checkpoint.every
        if every and step % every == 0 and step < data.steps:
            self._save()

    def _rows(self, examples: list[Example]) -> tuple[list[PackedRow], int]:
        """This rank's rows, and the trained tokens of all ranks."""
        lengths = [len(example.token_ids) for example in examples]
        mine = pack(lengths, self.config.trainer.row_tokens, self.runtime.world)[self.runtime.rank]
        rows = [packed_row([examples[index] for index in row]) for row in mine]
        return rows, sum(example.num_trained for example in examples)

    def _evaluate(self, dataset: Dataset) -> dict[str, float]:
        """Mean loss of a held-out token."""
        rows, trained = self._rows(dataset.examples(range(len(dataset))))
        return {"eval/loss": self.learner.evaluate(rows, {"ce": float(trained)})["train/loss"]}

    def _asked_to_stop(self) -> bool:
        """Whether any rank was: all of them leave after the same step."""
        if self.runtime.world == 1:
            return self._stop
        flag = torch.tensor([float(self._stop)], device=self.runtime.device)
        return bool(max_over_ranks(flag, self.runtime)[0])

    def _save(self) -> None:
        step = self.learner.steps
        if self._saved == step:
            return
        faults.point("trainer.checkpoint")
        path = self._checkpoints.begin(step) if self.runtime.is_leader else self.run_dir.checkpoint(step)
        files = checkpoint.save(self.learner, {"step": step}, path / "trainer")
        if self.runtime.is_leader:
            self._checkpoints.commit(step, {"trainer": files}, {"incarnation": 0})
            self._checkpoints.prune(self.config.checkpoint.keep)
        self._saved = step
        self._event("checkpoint_saved", step=step)

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
                "steps": self.config.data.steps,
                "loss": self._last.get("train/loss"),
                "step_s": self._last.get("time/step"),
                "roles": {"trainer-0": {"pid": os.getpid(), "doing": state}},
            }
        )


def load_tokenizer(path: str) -> Any:
    """Raises: ConfigError: there is none in the model's folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path = {path!r} has no tokenizer that can be loaded: {error}"]) from error


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
