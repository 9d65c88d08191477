"""Several processes train what one does: uneven tokens, idle ranks, gathered checkpoints, one published version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from prl.testing.numerics import assert_parity, assert_same_bits
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, run_ranks, samples, state

TOLERANCE = 5e-6


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_equal_one_process(model: Path, tmp_path: Path, ranks: int) -> None:
    single = Trainer(run_config(model, schedule="linear", decay_steps=10, weight_decay=0.1), tmp_path / "single", CPU)
    expected = []
    for step in (1, 2, 3):
        made = samples(step, step - 1) if step < 3 else samples(step, step - 1)[:1]
        expected.append(single.train(batches(made, step)[0]).metrics)
    out = tmp_path / "ranks"
    out.mkdir()
    run_ranks(Path(__file__).with_name("ranks.py"), ranks, str(model), str(out))
    weights = load_file(out / "weights.safetensors")
    for name, parameter in state(single).items():
        assert_parity(parameter, weights[name], TOLERANCE, name)
    for one, several in zip(expected, json.loads((out / "metrics.json").read_text()), strict=True):
        assert several.keys() == one.keys()
        for name, value in one.items():
            assert several[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert_same_bits(weights, load_file(out / "resumed.safetensors"))
    # A checkpoint of several ranks continues in one process.
    alone = Trainer(single.config, tmp_path / "alone", CPU)
    alone.load_checkpoint(out / "saved")
    assert alone.version == 2
    alone.train(batches(samples(3, 2)[:1], 3)[0])
    for name, parameter in state(single).items():
        assert_parity(parameter, state(alone)[name], TOLERANCE, name)
