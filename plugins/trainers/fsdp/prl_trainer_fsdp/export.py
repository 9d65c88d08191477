"""A checkpoint as a Hugging Face folder, for `prl export`: one process, on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from prl.config.schema import ModelTable
from prl.errors import StoreError
from prl.rundir import RunDir
from prl_models.hf.export import export_hf
from prl_models.options import ModelOptions
from prl_models.provider import load_model
from prl_trainer_fsdp.checkpoint import MODEL, check_same_model, read_facts, verify
from prl_trainer_fsdp.learner import disk_tensors


def export(run_dir: RunDir, step: int, table: ModelTable, out: Path) -> None:
    """Write the weights of a checkpoint in the dtype the run computed with. All else comes from the original model.

    Raises:
        StoreError: the checkpoint is damaged or of another model, or `out` cannot be written.
    """
    model = load_model(table.path, table.impl, ModelOptions())
    load_weights(model, run_dir.checkpoint(step) / "trainer")
    export_hf(disk_tensors(model, table.dtype, lambda tensor: tensor), table.path, out)


def load_weights(model: nn.Module, path: Path) -> None:
    """Put a checkpoint's parameters into a whole model; the file's checksum is compared first."""
    expected = read_facts(path)["files"][MODEL]
    verify(path / MODEL, expected["bytes"], expected["sha256"])
    parameters = {name.removeprefix("hf."): parameter for name, parameter in model.named_parameters()}
    try:
        with safe_open(path / MODEL, "pt") as weights, torch.no_grad():
            check_same_model(weights, parameters, path / MODEL)
            for name, parameter in parameters.items():
                parameter.copy_(weights.get_tensor(name))
    except SafetensorError as error:
        raise StoreError(f"the checkpoint {path} cannot be read: {error}") from error
