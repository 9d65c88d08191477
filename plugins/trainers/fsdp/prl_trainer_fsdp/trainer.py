"""What the controller asks of a trainer: train a batch, publish a version, release old ones, save a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import torch

from prl import adapters, faults
from prl.config.schema import RunConfig
from prl.errors import RunFailed
from prl.messages import TrainBatch, TrainReport, TrainUpdate, WeightsRef
from prl.protocols import ChannelSender, Probe
from prl.rows import assemble
from prl_trainer_fsdp import probes
from prl_trainer_fsdp.checkpoint import Saver, load
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.learner import Learner, Update
from prl_trainer_fsdp.parallel.runtime import Runtime, share_bytes, share_in_row, start


class Trainer:
    """One rank. Every method but `release` and `checkpoint` is collective: all ranks call it in the same order.

    `weights` is the directory of the channel's sender. `version` is the policy version that this trainer holds;
    `incarnation` is the run's, given by the controller.
    """

    def __init__(self, config: RunConfig, weights: Path, runtime: Runtime | None = None) -> None:
        own = cast(FsdpConfig, config.trainer.plugin_config())
        self.config = config
        self.runtime = runtime or start(config)
        self.learner = Learner(config.model, own, config.loss.build(), self.runtime)
        self.version = 0
        self.incarnation = 0
        self._saver = Saver(self.learner)
        self._snapshot = -1
        self._blocked = 0.0
        self._sender: ChannelSender | None = None
        if self.runtime.is_leader:
            self._sender = config.channel.build().sender(weights)
        self._adapter = adapters.published(config)
        self._probes = probes.random(config.mismatch.probes, self.learner.model.vocab_size, config.seed)

    def train(self, batch: TrainBatch) -> TrainReport:
        """Train `batch.version` into the next.

        Raises:
            RunFailed: the batch is for another version, or its gradient is not finite.
        """
        started = time.perf_counter()
        faults.point("trainer.step")
        if batch.version != self.version or batch.incarnation != self.incarnation:
            raise RunFailed(
                f"the batch of step {batch.step} is for version {batch.version} of incarnation {batch.incarnation}, "
                f"but the trainer holds version {self.version} of incarnation {self.incarnation}"
            )
        sent = share_in_row(lambda: batch.updates, list[TrainUpdate], self.runtime)
        updates = [Update([assemble(row) for row in update.rows], update.denominators) for update in sent]
        metrics = self.learner.train(updates, batch.version, batch.correction)
        if self._blocked:  # since the step before
            metrics["time/checkpoint"], self._blocked = self._blocked, 0.0
        self.version += 1
        samples = (sample for update in sent for row in update.rows for sample in row)
        self._probes = probes.recent(samples, self.config.mismatch.probes) or self._probes
        return TrainReport(self.incarnation, batch.step, self.version, metrics, time.perf_counter() - started)

    def publish(self, version: int) -> WeightsRef:
        """Send the weights through the channel, or the adapters alone where the engines take them, with probe sequences
        and this trainer's log-probabilities of them.

        Raises:
            RunFailed: the trainer does not hold `version`.
        """
        faults.point("trainer.publish")
        if version != self.version:
            raise RunFailed(f"version {version} cannot be published: the trainer holds version {self.version}")
        scored = self._scored_probes()
        tolerance = self.config.mismatch.probe_tolerance or probes.tolerance(self.learner.dtype, scored)
        tensors = self.learner.disk_tensors() if self._adapter is None else self.learner.adapter_tensors()
        answer = b""
        if self._sender is not None:
            reference = self._sender.send(version, self.incarnation, tensors, scored, tolerance, self._adapter)
            answer = msgspec.msgpack.encode(reference)
        else:
            for _ in tensors:  # takes its part in every gather
                pass
        if self.config.engine.sleep and self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()  # what the step needed beside the model is the engine's until the next one
        return msgspec.msgpack.decode(share_bytes(answer, self.runtime), type=WeightsRef)

    def _scored_probes(self) -> list[Probe]:
        if not self._probes:
            return []
        scores = self.learner.score([probe.token_ids for probe in self._probes])
        return [Probe(probe.token_ids, found, probe.first) for probe, found in zip(self._probes, scores, strict=True)]

    def release(self, versions: Sequence[int]) -> None:
        if self._sender is not None:
            self._sender.release(versions)

    def snapshot(self, step: int) -> None:
        """Copy everything that continuing after this step needs; training may go on while `checkpoint` writes it."""
        faults.point("trainer.checkpoint")
        facts = {
            "step": step,
            "version": self.version,
            "incarnation": self.incarnation,
            "probes": [probe.token_ids for probe in self._probes],
            "sampled_from": [probe.first for probe in self._probes],
        }
        self._blocked += self._saver.take(facts)
        self._snapshot = step

    def checkpoint(self, step: int, path: Path) -> dict[str, str]:
        """Write the snapshot of this step into `path`, in any thread; name to sha256 of this rank's files.

        Raises:
            StoreError: the disk is full, or refuses. RunFailed: the last snapshot is not of this step.
        """
        if step != self._snapshot:
            raise RunFailed(
                f"the checkpoint of step {step} cannot be written: the last snapshot is of {self._snapshot}"
            )
        return self._saver.write(path)

    def load_checkpoint(self, path: Path) -> None:
        """Continue from a checkpoint, exactly as if the run had not stopped.

        Raises:
            StoreError: a file is missing, truncated or altered, or belongs to another model.
        """
        facts = load(self.learner, path)
        self.version = int(facts["version"])
        tokens = [[int(token) for token in probe] for probe in facts["probes"]]
        firsts = facts.get("sampled_from") or [len(probe) for probe in tokens]  # before there was such a thing: none
        self._probes = [Probe(probe, [], int(first)) for probe, first in zip(tokens, firsts, strict=True)]
