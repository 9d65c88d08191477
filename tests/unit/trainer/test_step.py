"""A training step: packing, order and sharing of prefixes change nothing; repeating it changes no bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from prl.errors import RunFailed
from prl.messages import TrainBatch
from prl.rows import assemble
from prl.testing.fakes import samples_of
from prl.testing.numerics import assert_parity, assert_same_bits
from prl_trainer_fsdp.corrections import NONE, correct
from prl_trainer_fsdp.rows import device_row
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, VOCAB, batches, run_config, sample, samples, state

TOLERANCE = 5e-6


def gradients(trainer: Trainer, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Of one batch, without a step."""
    trainer.learner.optimizer.zero_grad()
    (update,) = batch.updates
    for row in update.rows:
        on_device = device_row(assemble(row), CPU.device)
        logprobs, entropy = trainer.learner.model(on_device.batch)
        outputs = trainer.learner.loss(on_device.loss_inputs(logprobs, entropy, 0, update.denominators))
        outputs.loss.backward()
    return {name: p.grad.clone() for name, p in trainer.learner.parameters()}


@pytest.fixture
def trainer(model: Path, tmp_path: Path) -> Trainer:
    return Trainer(run_config(model), tmp_path, CPU)


def test_packed_gradients_equal_those_of_separate_documents(trainer: Trainer) -> None:
    made = samples(0)
    packed = gradients(trainer, batches(made, 1, row_tokens=10_000)[0])
    separate = gradients(trainer, batches(made, 1, row_tokens=max(s.header.num_tokens for s in made))[0])
    for name, gradient in separate.items():
        assert_parity(gradient, packed[name], TOLERANCE, name)


def test_the_order_of_documents_does_not_matter(trainer: Trainer) -> None:
    made = samples(1)
    straight = gradients(trainer, batches(made, 1, row_tokens=10_000)[0])
    turned = gradients(trainer, batches(made[::-1], 1, row_tokens=10_000)[0])
    for name, gradient in straight.items():
        assert_parity(gradient, turned[name], TOLERANCE, name)


def test_gradients_equal_those_of_transformers_alone(trainer: Trainer, model: Path) -> None:
    """The whole step against a naive loop over documents with the plain model."""
    from transformers import AutoModelForCausalLM

    made = samples(2)
    batch = batches(made, 1)[0]
    ours = gradients(trainer, batch)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    total = torch.zeros(())
    for row in batch.updates[0].rows:
        for one in row:
            flat = assemble([one])
            tokens = torch.tensor(flat.token_ids.astype(np.int64))
            logits = plain(input_ids=tokens[None], use_cache=False).logits[0, :-1] / one.header.temperature
            logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            ratio = logprobs - torch.tensor(flat.logprobs[1:])
            advantages, weights = torch.tensor(flat.advantages[1:]), torch.tensor(flat.rl[1:])
            moved = (logprobs.exp() - torch.tensor(flat.logprobs[1:]).exp()).detach()
            dropped = ((advantages > 0) & (moved > 0.2)) | ((advantages <= 0) & (moved < -0.2))
            loss = 1e-3 * ratio**2 - torch.where(dropped, torch.zeros(()), advantages * ratio.exp())
            total = total + (loss * weights).sum() / batch.updates[0].denominators["rl"]
    total.backward()
    for name, parameter in plain.named_parameters():
        assert_parity(parameter.grad, ours[name], TOLERANCE, name)


def test_the_first_token_of_a_document_has_no_loss(trainer: Trainer) -> None:
    """Also not where everything was sampled: nothing precedes it but another document."""
    rng = np.random.default_rng(0)
    made = [sample(rng, np.zeros(0, np.int64), 6, 0, 1.0) for _ in range(3)]
    row = assemble(made)
    on_device = device_row(row, CPU.device)
    starts = set(row.cu_seqlens[:-1].tolist())
    assert starts.isdisjoint(on_device.targets.tolist())
    assert len(on_device.targets) == row.num_tokens - 3
    inputs = on_device.loss_inputs(*trainer.learner.model(on_device.batch), 0, {"rl": 1.0})
    assert inputs.logprobs[sorted(starts)].tolist() == [0.0, 0.0, 0.0]
    assert bool((inputs.rl_weights[sorted(starts)] == 0).all())


def test_steps_are_repeatable_to_the_bit(model: Path, tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        trainer = Trainer(run_config(model), tmp_path / name, CPU)
        reports = [trainer.train(batches(samples(step, step - 1), step)[0]) for step in (1, 2, 3)]
        runs.append((state(trainer), [report.metrics for report in reports]))
    assert runs[0][1] == runs[1][1]
    assert_same_bits(runs[0][0], runs[1][0])


def test_a_step_moves_every_parameter_and_counts_versions(trainer: Trainer) -> None:
    before = state(trainer)
    report = trainer.train(batches(samples(3), 1)[0])
    assert (report.step, report.version, trainer.version) == (1, 1, 1)
    assert all(not torch.equal(before[name], tensor) for name, tensor in state(trainer).items())


def test_rows_without_samples_are_skipped(trainer: Trainer) -> None:
    batch = batches(samples(3), 1)[0]
    batch.updates[0].rows.append([])
    assert trainer.train(batch).metrics["train/tokens"] == sum(s.header.num_tokens for s in samples_of([batch]))


def test_updates_of_a_batch_are_optimiser_steps(model: Path, tmp_path: Path) -> None:
    """One version, two optimiser steps: as two batches would have been, but that the second is drift throughout."""
    config = run_config(model, schedule="linear", decay_steps=10)
    first, second = samples(3), samples(4)
    together, apart = (Trainer(config, tmp_path / name, CPU) for name in ("together", "apart"))
    (batch,), (more,) = batches(first, 1), batches(second, 1)
    batch.updates += more.updates
    report = together.train(batch)
    assert (report.version, together.version, together.learner.steps) == (1, 1, 2)
    one = apart.train(batches(first, 1)[0]).metrics
    two = apart.train(batches(second, 2)[0]).metrics
    assert_same_bits(state(together), state(apart))
    found = report.metrics
    for name in ("train/loss", "train/grad_norm"):
        assert found[name] == pytest.approx((one[name] + two[name]) / 2), name
    assert found["train/lr"] == two["train/lr"] < one["train/lr"]
    assert found["train/tokens"] == one["train/tokens"] + two["train/tokens"]
    assert found["mismatch/tokens"] == one["mismatch/tokens"] and found["mismatch/kl"] == one["mismatch/kl"]
    assert found["drift/tokens"] == two["drift/tokens"] == sum(s.header.num_sampled for s in second)
    assert found["staleness/token_max"] == 0


def test_a_batch_for_another_version_is_refused(trainer: Trainer) -> None:
    with pytest.raises(RunFailed, match="version 4 of incarnation 0.*holds version 0"):
        trainer.train(batches(samples(0), 5)[0])


def test_a_gradient_that_is_not_finite_changes_nothing(trainer: Trainer) -> None:
    batch = batches(samples(0), 1)[0]
    broken = batch.updates[0].rows[0][0]
    broken.credit = type(broken.credit)(((broken.header.num_tokens, float("nan")),), broken.credit.rl)  # type: ignore[misc]
    before = state(trainer)
    with pytest.raises(RunFailed, match="norm nan"):
        trainer.train(batch)
    assert_same_bits(before, state(trainer))


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_without_an_embedding_is_named(trainer: Trainer, token: int) -> None:
    (batch,) = batches(samples(1), 1)
    row = assemble(batch.updates[0].rows[0])
    ids = row.token_ids.copy()
    ids[3] = token
    row = dataclasses.replace(row, token_ids=ids)
    with pytest.raises(RunFailed, match=f"a sample has token {token}, but the model has embeddings for 0 to"):
        trainer.learner.step([row], batch.updates[0].denominators, 0)


def test_mismatch_and_drift_are_told_apart(trainer: Trainer) -> None:
    """Sampler log-probabilities that are the trainer's own: no mismatch. Older tokens are drift, whatever they say."""
    trainer.version = 2
    old, new = samples(4, version=1), samples(5, version=2)
    batch = batches([*old, *new], 3, row_tokens=10_000)[0]
    metrics = trainer.train(batch).metrics
    rows = [s.header.num_sampled for s in new]
    assert metrics["mismatch/tokens"] == sum(rows)
    assert metrics["drift/tokens"] == sum(s.header.num_sampled for s in old)
    assert metrics["mismatch/kl"] > 0.01 and metrics["staleness/token_max"] == 1
    assert metrics["train/tokens"] == sum(s.header.num_tokens for s in [*old, *new])


def test_mismatch_is_zero_for_the_trainers_own_probabilities(trainer: Trainer) -> None:
    from prl_trainer_fsdp.metrics import StepMetrics

    row = device_row(assemble(samples(6)), CPU.device)
    logprobs, entropy = trainer.learner.model(row.batch)
    row.sampler_logprobs.index_copy_(0, row.targets, logprobs.detach())
    metrics = StepMetrics(CPU)
    inputs = row.loss_inputs(logprobs, entropy, 0, {"rl": 1.0})
    metrics.add_row(row, correct(inputs, NONE), trainer.learner.loss(inputs))
    found = metrics.reduce()
    assert found["mismatch/kl"] == 0 and found["mismatch/mean_exp"] == 1 and found["mismatch/p99"] < 1e-8


def test_percentile_is_exact_to_its_bin(trainer: Trainer) -> None:
    from prl_trainer_fsdp.metrics import StepMetrics

    sizes = np.random.default_rng(0).exponential(0.3, 5000)
    metrics = StepMetrics(CPU)
    metrics._add_difference("mismatch", torch.tensor(sizes), torch.ones(5000, dtype=torch.bool))
    found = metrics.reduce()
    assert found["mismatch/p99"] == pytest.approx(np.quantile(sizes, 0.99), rel=0.02)
    assert found["mismatch/mean_exp"] == pytest.approx(np.exp(sizes).mean(), rel=1e-9)
    assert found["mismatch/kl"] == pytest.approx((np.expm1(sizes) - sizes).mean(), rel=1e-9)


def test_probes_are_what_a_fresh_model_says(trainer: Trainer, tmp_path: Path) -> None:
    """Publish after a step: the manifest's probes agree with the published weights, scored by transformers alone."""
    from transformers import AutoModelForCausalLM

    from prl_models.hf import export_hf

    trainer.train(batches(samples(7), 1)[0])
    reference = trainer.publish(1)
    receiver = trainer.config.channel.build().receiver()
    received = receiver.receive(reference)
    out = export_hf(dict(received.tensors), trainer.config.model.path, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert len(received.probes) == 8 and received.tolerance == 1e-3
    for probe in received.probes:
        tokens = torch.tensor(probe.token_ids)
        assert 1 < len(tokens) <= 32 and int(tokens.max()) < VOCAB
        logprobs = plain(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        assert probe.logprobs[0] == 0
        assert_parity(logprobs, torch.tensor(probe.logprobs[1:]), 1e-5, "probe")
    trainer.release([1])
