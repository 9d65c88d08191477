"""Trainer and engine in processes of their own, either of which is killed: whole versions or none, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prl import faults, registry
from prl.errors import WeightsError
from prl.messages import WeightsRef
from prl.testing.numerics import assert_same_bits

from .peer import version_of

PEER = Path(__file__).parent / "peer.py"
SETTINGS: dict[str, Any] = {"encoding": "delta", "shard_bytes": 30_000, "visibility_s": 0.05}


class Trainer:
    """The process, and what it has sent."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def reference(self) -> WeightsRef:
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.readline(), type=WeightsRef)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def trainer(
    kind: str, directory: Path, first: int, last: int, incarnation: int = 0, fault: dict[str, Any] | None = None
) -> Iterator[Trainer]:
    command = [sys.executable, str(PEER), kind, json.dumps(SETTINGS), str(directory)]
    command += [str(first), str(last), str(incarnation)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if fault is not None:
        environment[faults.VARIABLE] = json.dumps([{"role": "trainer", "action": "kill", **fault}])
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, encoding="utf-8"
    )
    try:
        yield Trainer(process)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def receiver(kind: str) -> Any:
    return registry.build("channels", kind, SETTINGS).receiver()


def test_memory_of_a_trainer_is_read_by_another_process_and_goes_with_it(tmp_path: Path) -> None:
    with trainer("shm", tmp_path, 0, 2) as peer:
        reader = receiver("shm")
        references = [peer.reference() for _ in range(3)]
        for number, reference in enumerate(references):
            assert_same_bits(version_of(number), reader.receive(reference).tensors, f"version {number}")
        held = reader.receive(references[2])
        peer.tell("release 1")
        assert peer.process.stdout is not None and peer.process.stdout.readline() == "released\n"
        with pytest.raises(WeightsError, match="released"):
            reader.receive(references[1])
        assert_same_bits(version_of(2), receiver("shm").receive(references[2]).tensors, "version 2, from nothing")
        peer.kill()
        assert_same_bits(version_of(2), held.tensors, "version 2 is still mapped")
        with pytest.raises(WeightsError, match=f"process {peer.process.pid}, which has ended: they have to be sent"):
            receiver("shm").receive(references[2])
    assert not [name for name in os.listdir("/dev/shm") if "prl" in name]
    with trainer("shm", tmp_path, 3, 3, 1) as peer:
        assert_same_bits(version_of(3), reader.receive(peer.reference()).tensors, "the successor's")


POINTS = [("channel.segment", 4), ("channel.segment", 6), ("channel.send", 2), ("channel.commit", 2)]
KILLS = [(kind, *point) for kind in ("filesystem", "shm") for point in POINTS]
QUICK = {("filesystem", "channel.segment", 6), ("shm", "channel.commit", 2)}
"""Each starts two processes that import torch: the others are for `make test-slow`."""


@pytest.mark.parametrize(
    ("kind", "point", "at"),
    [pytest.param(*kill, marks=() if kill in QUICK else (pytest.mark.slow,)) for kill in KILLS],
)
def test_a_trainer_killed_at_any_point_leaves_whole_versions(tmp_path: Path, kind: str, point: str, at: int) -> None:
    """Version 1 is complete, version 2 is in the making when it dies; another trainer comes after it."""
    reader = receiver(kind)
    with trainer(kind, tmp_path, 1, 2, fault={"point": point, "at": at}) as peer:
        first = peer.reference()
        if kind == "filesystem":
            assert_same_bits(version_of(1), reader.receive(first).tensors, "version 1")
        assert peer.process.wait(30) < 0, "it was killed"
    second = WeightsRef(2, 0, first.location.replace("000001", "000002"))
    with pytest.raises(WeightsError, match="manifest"):
        reader.receive(second)
    if kind == "filesystem":
        assert_same_bits(version_of(1), receiver(kind).receive(first).tensors, "version 1, later")
    else:
        with pytest.raises(WeightsError, match="has ended"):
            receiver(kind).receive(first)
    with trainer(kind, tmp_path, 2, 3, 1) as peer:
        for number in (2, 3):
            assert_same_bits(version_of(number), reader.receive(peer.reference()).tensors, f"version {number}")
        peer.tell("release 2")
        assert peer.process.stdout is not None and peer.process.stdout.readline() == "released\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v_000002", "v_000003"]


def test_an_engine_that_dies_while_it_reads_disturbs_nobody(tmp_path: Path) -> None:
    script = (
        "import sys, os, signal, msgspec\n"
        "from prl import registry\n"
        "from prl.messages import WeightsRef\n"
        "from prl_channels.transports import memory\n"
        "memory.mapped = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"reader = registry.build('channels', 'shm', {SETTINGS!r}).receiver()\n"
        "reader.receive(msgspec.json.decode(sys.argv[1], type=WeightsRef))\n"
    )
    with trainer("shm", tmp_path, 0, 0) as peer:
        reference = peer.reference()
        command = [sys.executable, "-c", script, msgspec.json.encode(reference).decode()]
        assert subprocess.run(command, timeout=60, check=False).returncode < 0
        assert_same_bits(version_of(0), receiver("shm").receive(reference).tensors, "version 0")
        peer.tell("send 1")
        assert_same_bits(version_of(1), receiver("shm").receive(peer.reference()).tensors, "version 1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": "another"}, r"process \d+ on another host.*filesystem"),
        ({"namespace": "pid:[1]"}, r"process \d+ in another container.*filesystem"),
        ({"started": "1"}, r"process \d+, which has ended"),
        ({"pid": "x"}, "names no process"),
    ],
)
def test_memory_that_cannot_be_seen_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str
) -> None:
    channel = registry.build("channels", "shm", SETTINGS)
    sender = channel.sender(tmp_path)
    monkeypatch.setattr(sender._outlet, "_origin", {**sender._outlet.origin(), **change})
    reference = sender.send(0, 0, version_of(0).items(), [], 0.0)
    with pytest.raises(WeightsError, match=message):
        channel.receiver().receive(reference)


def test_sealed_memory_cannot_be_changed(tmp_path: Path) -> None:
    channel = registry.build("channels", "shm", SETTINGS)
    sender = channel.sender(tmp_path)
    sender.send(0, 0, version_of(0).items(), [], 0.0)
    for descriptor in sender._outlet._held:
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(OSError):
            os.ftruncate(descriptor, 0)
