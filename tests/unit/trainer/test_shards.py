"""What two ranks train is what one process trains: every optimiser, adapters, recomputation, what lies on the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from prl.testing.numerics import assert_parity
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, run_config, run_ranks
from .shards import result, train

TOLERANCE = 5e-6
SMALL = {"lr": 1e-3, "weight_decay": 0.1}
LORA = {"lora": {"rank": 3}, "eps": 1e-5}
"""With AdamW's own 1e-8 the first steps of B, whose gradients begin near zero, follow the sign of their noise."""
CASES: dict[str, dict[str, Any]] = {
    "adamw": SMALL,
    "muon": {**SMALL, "optimizer": "muon"},
    "sgd": {**SMALL, "optimizer": "sgd"},
    "host": {**SMALL, "offload_optimizer": True, "offload_activations": True, "recompute": "selective"},
    "muon-host": {**SMALL, "optimizer": "muon", "offload_optimizer": True},
    "muon-replicas": {**SMALL, "optimizer": "muon", "dp_replicate": 2},
    "lora": {**SMALL, **LORA},
    "lora-context": {**SMALL, **LORA, "cp": 2, "offload_activations": True, "recompute": "selective"},
    "lora-hf": {**SMALL, **LORA, "impl": "hf", "recompute": "full"},
    "lora-muon": {**SMALL, **LORA, "optimizer": "muon", "offload_activations": True},
    "lora-half": {**SMALL, **LORA, "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards")
    run_ranks(Path(__file__).with_name("shards.py"), 2, str(model), str(out), json.dumps(CASES))
    return out


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(model: Path, ranks: Path, tmp_path: Path, name: str) -> None:
    keys = {key: value for key, value in CASES[name].items() if key not in ("cp", "dp_replicate")}
    alone = Trainer(run_config(model, **keys), tmp_path, CPU)
    train(alone, 1, 0, range(1, 6))
    expected, found = result(alone), load_file(ranks / f"{name}.safetensors")
    assert expected.keys() == found.keys()
    half = CASES[name].get("dtype") == "bfloat16"
    for key, value in expected.items():
        if half and not key.startswith("disk."):
            continue  # AdamW follows the sign of gradients, and those near zero are bfloat16's noise
        assert_parity(value.float(), found[key].float(), 0.02 if half else TOLERANCE, key)
