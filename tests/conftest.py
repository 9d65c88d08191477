"""For every test: one thread for numeric libraries, repeatable property tests, no process left behind, and no GPU asked
for where there is none."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; results must not depend on the machine

import psutil
import pytest
from hypothesis import settings

# A deadline fails on a busy machine; a database would be written beside the sources.
settings.register_profile("prl", deadline=None, database=None, derandomize=True)
settings.load_profile("prl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none, however they were chosen."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while (left := _children()) and time.monotonic() < deadline:
        time.sleep(0.1)
    described = [f"{process.pid} {process.name()}" for process in left if process.is_running()]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, f"tests left processes behind: {described}"


_OF_LIBRARIES = ("resource_tracker", "torch/_inductor/compile_worker")


def _children() -> list[psutil.Process]:
    """Living descendants of this process. Python's resource tracker and torch's compile workers live as long as it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not any(name in command for name in _OF_LIBRARIES):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
