"""One model for the whole directory: making it costs more than most tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .helpers import save_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))
