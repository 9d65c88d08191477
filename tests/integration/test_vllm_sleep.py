"""Trainer and engine on one GPU, in turns: the engine sleeps while the trainer trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from prl_engine_vllm.config import VllmConfig
from prl_engine_vllm.interpreter import REMEDY, choose

from .harness import Project, Run
from .test_vllm_lora_run import CONFIG, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(choose(VllmConfig()) is None, reason=f"no vLLM here: {REMEDY}"),
]

STEPS = 3
FREED = re.compile(r"Sleep mode freed ([\d.]+) GiB")


@pytest.mark.parametrize("adapters", [False, True])
def test_the_engine_frees_its_memory_for_every_step(tmp_path: Path, adapters: bool) -> None:
    project = Project(tmp_path / "project", make_model(tmp_path / "model"))
    path = project.folder / "lora.toml"
    text = CONFIG.format(model=project.model, steps=STEPS, marks=project.folder)
    if not adapters:
        text = text.replace("[trainer.lora]\nrank = 4\nalpha = 8.0\n", "").replace("lr = 3e-2", "lr = 1e-3")
    text = text.replace("num_gpu_blocks_override = 64\n", "")
    text = text.replace("[model]", '[model]\ndtype = "bfloat16"')
    path.write_text(text.replace("[engine]", "[engine]\nsleep = true\ngpu_memory_utilization = 0.2"))
    run = Run(project, "lora", path).complete()
    assert "is shared by engine-0 and trainer-0" in run.log("launcher-0")
    freed = [float(size) for size in FREED.findall(run.log("engine-0"))]
    assert len(freed) == STEPS and min(freed) > 5, freed
    assert [event["version"] for event in run.events("weights_installed")] == list(range(STEPS + 1))
    rows = [row for row in run.metrics() if "time/step" in row]
    assert len(rows) == STEPS and max(row["mismatch/kl"] for row in rows) < 0.01
    assert max(row["staleness/max"] for row in rows) == 0
