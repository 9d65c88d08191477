"""Channels whose weights never leave the GPU, between two processes. `make test-gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from prl import registry
from prl.errors import WeightsError
from prl.messages import WeightsRef
from prl.testing.numerics import assert_same_bits
from prl_channels.checksum import checksum

from .peer import version_of

PEER = Path(__file__).parent / "peer.py"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@contextmanager
def trainer(kind: str, settings: dict[str, Any], directory: Path, last: int) -> Iterator[subprocess.Popen[str]]:
    """A process that sends versions 0 to `last` from the first GPU, then does as it is told."""
    command = [sys.executable, str(PEER), kind, json.dumps(settings), str(directory), "0", str(last), "0", "cuda:0"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def reference(process: subprocess.Popen[str]) -> WeightsRef:
    assert process.stdout is not None
    return msgspec.json.decode(process.stdout.readline(), type=WeightsRef)


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def exchange(kind: str, encoding: str, directory: Path, device: int) -> None:
    settings = {"encoding": encoding, "shard_bytes": 30_000, "visibility_s": 0.05}
    torch.cuda.set_device(device)
    try:
        reader = registry.build("channels", kind, settings).receiver()
        with trainer(kind, settings, directory, 3) as process:
            references = [reference(process) for _ in range(4)]
            for number, ref in enumerate(references):
                got = reader.receive(ref).tensors
                assert all(tensor.device.index == device for tensor in got.values())
                assert_same_bits(version_of(number), {n: t.cpu() for n, t in got.items()}, f"version {number}")
            tell(process, "release 2")
            assert process.stdout is not None and process.stdout.readline() == "released\n"
            with pytest.raises(WeightsError):
                reader.receive(references[2])
            tell(process, "send 4")
            got = reader.receive(reference(process)).tensors
            assert_same_bits(version_of(4), {n: t.cpu() for n, t in got.items()}, "version 4")
            del got
        with pytest.raises(WeightsError):
            registry.build("channels", kind, settings).receiver().receive(references[3])
    finally:
        torch.cuda.set_device(0)


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_an_engine_opens_the_memory_of_the_trainers_gpu(tmp_path: Path, encoding: str) -> None:
    exchange("cuda_ipc", encoding, tmp_path, 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("encoding", ["full", "delta"])
@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
def test_an_engine_on_another_gpu_gets_them_too(tmp_path: Path, kind: str, encoding: str) -> None:
    exchange(kind, encoding, tmp_path, 1)


def test_checksums_are_those_of_the_host() -> None:
    for size in (0, 1, 7, 8, 4096, 1_000_003):
        content = torch.randint(0, 256, (size,), dtype=torch.uint8)
        assert checksum(content.cuda()) == checksum(content), size
