"""The trainer's part of a checkpoint: safetensors and JSON, nothing that runs code when it is read.

    model.safetensors       float32 parameters by their names in transformers
    optimizer.safetensors   the optimiser's state: of AdamW "exp_avg.NAME", "exp_avg_sq.NAME", "step.NAME"
    trainer.json            steps, version, random state, and size and sha256 of the two above; written last

Sharded tensors are gathered on every rank and written by the leader; every rank reads the whole and keeps its part, so
the number of ranks may change between saving and loading.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prl.errors import StoreError
from prl.store.files import atomic_write, sha256_file
from prl.types import SCHEMA_VERSION
from prl_trainer_fsdp.learner import Learner
from prl_trainer_fsdp.parallel import gather, scatter_like

MODEL, OPTIMIZER, FACTS = "model.safetensors", "optimizer.safetensors", "trainer.json"


def save(learner: Learner, facts: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Write everything that continuing needs. Collective.

    Returns:
        File name to sha256 on the leader, nothing on other ranks.

    Raises:
        StoreError: a file cannot be written.
    """
    weights = {name: _host(parameter) for name, parameter in learner.parameters()}
    moments = {name: _host(value) for name, value in learner.optimizer.named_state()}
    if not learner.runtime.is_leader:
        return {}
    try:
        path.mkdir(parents=True, exist_ok=True)
        sizes = {file: _write(path / file, tensors) for file, tensors in ((MODEL, weights), (OPTIMIZER, moments))}
        written = {
            "schema": SCHEMA_VERSION,
            **facts,
            "optimizer_steps": learner.steps,
            "random": torch.get_rng_state().numpy().tobytes().hex(),
            "files": {file: {"bytes": size, "sha256": digest} for file, (size, digest) in sizes.items()},
        }
        data = json.dumps(written, indent=1).encode()
        atomic_write(path / FACTS, data)
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"the checkpoint cannot be written to {path}: {error}; free space there, then continue with --resume"
        ) from error
    return {**{file: digest for file, (_, digest) in sizes.items()}, FACTS: hashlib.sha256(data).hexdigest()}


def load(learner: Learner, path: Path) -> dict[str, Any]:
    """Put a checkpoint into the learner; returns the facts given to `save`.

    Raises:
        StoreError: a file is missing, truncated or altered, or belongs to another model. Nothing was changed then.
    """
    facts = read_facts(path)
    for file, expected in facts["files"].items():
        verify(path / file, expected["bytes"], expected["sha256"])
    parameters = dict(learner.parameters())
    try:
        with safe_open(path / MODEL, "pt") as weights, safe_open(path / OPTIMIZER, "pt") as moments:
            check_same_model(weights, parameters, path / MODEL)
            for name, parameter in parameters.items():
                with torch.no_grad():
                    parameter.copy_(scatter_like(weights.get_tensor(name), parameter))
            state = learner.optimizer.named_state()
            learner.optimizer.load_state({name: scatter_like(moments.get_tensor(name), value) for name, value in state})
    except SafetensorError as error:
        raise StoreError(f"the checkpoint {path} cannot be read: {error}") from error
    learner.steps = int(facts["optimizer_steps"])
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(facts["random"]), dtype=torch.uint8))
    return facts


def verify(file: Path, size: int, digest: str) -> None:
    """Raises: StoreError: the file is not there, or not the bytes that were written."""
    try:
        actual = file.stat().st_size
    except OSError as error:
        raise StoreError(f"the checkpoint file {file} is missing: {error}") from error
    if actual != size:
        what = "truncated" if actual < size else "longer than it was"
        raise StoreError(f"{file} is {what}: {actual} bytes instead of {size}. Resume from an older checkpoint")
    if sha256_file(file) != digest:
        raise StoreError(f"{file} was altered: its sha256 is not {digest}. Resume from an older checkpoint")


def check_same_model(weights: Any, parameters: Mapping[str, Tensor], file: Path) -> None:
    saved, wanted = set(weights.keys()), set(parameters)
    if saved != wanted:
        name = sorted(saved ^ wanted)[0]
        side = "the checkpoint lacks" if name in wanted else "the model does not have"
        raise StoreError(f"{file} belongs to another model: {side} {name!r}")
    for name, parameter in parameters.items():
        shape = tuple(weights.get_slice(name).get_shape())
        if shape != tuple(parameter.shape):
            raise StoreError(
                f"{file} belongs to another model: {name!r} is {shape} there, {tuple(parameter.shape)} here"
            )


def read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads((path / FACTS).read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} holds no checkpoint of a trainer: {FACTS} cannot be read ({error})") from error
    if facts["schema"] > SCHEMA_VERSION:
        raise StoreError(f"{path / FACTS} has schema {facts['schema']}, this version reads up to {SCHEMA_VERSION}")
    return dict(facts)


def _host(tensor: Tensor) -> Tensor:
    return gather(tensor.detach()).cpu().contiguous()


def _write(file: Path, tensors: dict[str, Tensor]) -> tuple[int, str]:
    """Size and sha256 of what was written."""
    save_file(tensors, file)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return file.stat().st_size, sha256_file(file)
