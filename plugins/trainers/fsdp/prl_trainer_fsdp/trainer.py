"""What the controller asks of a trainer: train a batch, publish a version, release old ones, save a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch

from prl import adapters, faults
from prl.config.schema import RunConfig
from prl.errors import RunFailed
from prl.messages import TrainBatch, TrainReport, TrainUpdate, WeightsRef
from prl.protocols import ChannelSender, Probe
from prl.rows import PackedRow, assemble
from prl_trainer_fsdp.checkpoint import Saver, load
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.learner import Learner, Update
from prl_trainer_fsdp.parallel.runtime import Runtime, share_bytes, share_in_row, start

PROBE_TOKENS = 96
"""Longest probe, so that most have something of an answer: every engine scores them after each install."""
TOLERANCES = {"float32": (1e-3, 0.0), "bfloat16": (0.15, 0.02)}
"""Mean absolute difference of log-probabilities that two correct implementations show at most: a constant, and a share
of the mean of their absolute values. Rounding is relative: SmolLM2 in bfloat16, beside float32: 0.04 on what it samples
itself (mean log-probability -2.2), 0.08 on the beginning of a prompt (-6.4), 0.11 on random tokens (-15.3), which is
0.035 + 0.005 of that value; here are three times as much for both sides. A torn tensor makes 0.6 and more."""


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
        self._probes = _first_probes(config.mismatch.probes, self.learner.model.vocab_size, config.seed)

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
        rows = [row for update in updates for row in update.rows]
        self._probes = _recent_probes(rows, self.config.mismatch.probes) or self._probes
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
        probes = []
        if self._probes:
            scores = self.learner.score(self._probes)
            probes = [Probe(tokens, scored) for tokens, scored in zip(self._probes, scores, strict=True)]
        tolerance = self.config.mismatch.probe_tolerance or _tolerance(self.learner.dtype, probes)
        tensors = self.learner.disk_tensors() if self._adapter is None else self.learner.adapter_tensors()
        answer = b""
        if self._sender is not None:
            reference = self._sender.send(version, self.incarnation, tensors, probes, tolerance, self._adapter)
            answer = msgspec.msgpack.encode(reference)
        else:
            for _ in tensors:  # takes its part in every gather
                pass
        if self.config.engine.sleep and self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()  # what the step needed beside the model is the engine's until the next one
        return msgspec.msgpack.decode(share_bytes(answer, self.runtime), type=WeightsRef)

    def release(self, versions: Sequence[int]) -> None:
        if self._sender is not None:
            self._sender.release(versions)

    def snapshot(self, step: int) -> None:
        """Copy everything that continuing after this step needs; training may go on while `checkpoint` writes it."""
        faults.point("trainer.checkpoint")
        facts = {"step": step, "version": self.version, "incarnation": self.incarnation, "probes": self._probes}
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
        self._probes = [[int(token) for token in probe] for probe in facts["probes"]]


def _tolerance(dtype: str, probes: Sequence[Probe]) -> float:
    constant, share = TOLERANCES[dtype]
    values = [abs(value) for probe in probes for value in probe.logprobs[1:]]
    return constant + share * sum(values) / max(1, len(values))


def _first_probes(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Before anything was trained: random tokens."""
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(0, vocab_size, 12)] for _ in range(count)]


def _recent_probes(rows: Sequence[PackedRow], count: int) -> list[list[int]]:
    """The first tokens of a few documents, spread over the first row that has any."""
    for row in rows:
        if row.num_tokens and count:
            chosen = np.linspace(0, row.num_documents - 1, min(count, row.num_documents)).astype(int)
            bounds = row.cu_seqlens
            documents = [row.token_ids[bounds[i] : min(bounds[i + 1], bounds[i] + PROBE_TOKENS)] for i in chosen]
            return [document.tolist() for document in documents if len(document) > 1]
    return []
