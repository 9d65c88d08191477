"""Engines that pull: the protocol of the channel nccl, with TCP in NCCL's place. Everything but NCCL itself."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from prl import faults
from prl.errors import WeightsError
from prl.faults import Fault
from prl.messages import WeightsRef
from prl.testing.numerics import assert_same_bits
from prl_channels.config import NcclConfig
from prl_channels.receiver import Receiver
from prl_channels.sender import Sender
from prl_channels.transports import pull

from .peer import version_of

CPU = torch.device("cpu")


class TcpCarrier:
    """Bytes over the connection itself. `broken` ends it in the midst of a transfer."""

    def __init__(self, connection: socket.socket, broken: bool = False) -> None:
        self._connection = connection
        self._broken = broken

    def send(self, tensors: Sequence[Tensor], deadline: float) -> None:
        self._connection.settimeout(max(0.01, deadline - time.monotonic()))
        for tensor in tensors:
            self._connection.sendall(memoryview(tensor.numpy()))

    def receive(self, tensors: Sequence[Tensor], deadline: float) -> None:
        self._connection.settimeout(max(0.01, deadline - time.monotonic()))
        for index, tensor in enumerate(tensors):
            content = pull.receive_bytes(self._connection, tensor.numel())
            tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            if self._broken and index == 0:
                raise WeightsError("this engine dies")

    def close(self) -> None:
        self._connection.close()


class TcpCarriers:
    def __init__(self, broken: bool = False) -> None:
        self.made = 0
        self._broken = broken

    def offer(self) -> str:
        return "tcp"

    def make(self, offer: str, rank: int, connection: socket.socket, deadline: float) -> TcpCarrier:
        assert offer == "tcp"
        self.made += 1
        return TcpCarrier(connection, self._broken and rank == 1)


class Ends:
    """One sender, and as many receivers as a test wants."""

    def __init__(self, directory: Path, encoding: str = "full", timeout_s: float = 5.0) -> None:
        settings = {"encoding": encoding, "timeout_s": timeout_s, "visibility_s": 0.05, "shard_bytes": 30_000}
        self.config = NcclConfig.model_validate(settings)
        self.carriers = TcpCarriers()
        self.outlet = pull.PullOutlet("pull", self.config, self.carriers, CPU)
        self.sender = Sender(directory, self.config, self.outlet)

    def send(self, number: int) -> WeightsRef:
        return self.sender.send(number, 0, version_of(number).items(), [], 0.0)

    def receiver(self, broken: bool = False) -> Receiver:
        return Receiver(self.config, pull.PullInlet(self.config, TcpCarriers(broken), CPU))


@pytest.fixture(params=["full", "delta"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path / "weights", request.param)
    yield made
    made.sender.close()


def test_engines_pull_version_after_version_over_one_connection(ends: Ends) -> None:
    readers = [ends.receiver(), ends.receiver()]
    for number in range(4):
        reference = ends.send(number)
        for reader in readers:
            assert_same_bits(version_of(number), reader.receive(reference).tensors, f"version {number}")
        if number:
            ends.sender.release([number - 1])
    assert ends.carriers.made == 2
    late = ends.receiver()
    assert_same_bits(version_of(3), late.receive(reference).tensors, "version 3, from nothing")


def test_one_that_dies_in_the_midst_disturbs_nobody(ends: Ends) -> None:
    reference = ends.send(0)
    with pytest.raises(WeightsError, match="this engine dies"):
        ends.receiver(broken=True).receive(reference)
    reader = ends.receiver()
    assert_same_bits(version_of(0), reader.receive(reference).tensors, "version 0")
    assert_same_bits(version_of(1), reader.receive(ends.send(1)).tensors, "version 1")


def test_a_trainer_that_is_gone_is_named_at_once(ends: Ends) -> None:
    reference = ends.send(0)
    ends.sender.close()
    time.sleep(2 * pull.SERVER_POLL_S)
    began = time.monotonic()
    with pytest.raises(WeightsError, match=r"the trainer at 127\.0\.0\.1:\d+ does not send its weights"):
        ends.receiver().receive(reference)
    assert time.monotonic() - began < 2


def test_a_transfer_that_fails_is_tried_again_with_a_new_connection(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    reference = ends.send(0)
    reader = ends.receiver()
    faults.install("trainer", plan=[Fault(role="trainer", point="channel.carry", action="error", at=1)])
    try:
        with pytest.raises(WeightsError, match="it closed the connection"):
            reader.receive(reference)
        assert_same_bits(version_of(0), reader.receive(reference).tensors, "version 0")
    finally:
        faults.install("trainer", plan=[])
        ends.sender.close()


def test_a_trainer_that_has_no_descriptor_free_for_a_moment_serves_afterwards(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failed = socket.socket.accept, threading.Event()

    def exhausted(listening: socket.socket) -> tuple[socket.socket, Any]:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    assert failed.wait(5)
    assert_same_bits(version_of(0), ends.receiver().receive(ends.send(0)).tensors, "version 0")


def test_a_silent_trainer_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname()[:2])
        puller = pull.Puller(TcpCarriers(), 0.2)
        began = time.monotonic()
        with pytest.raises(WeightsError, match="timed out"):
            puller.pull(address, "x", ["pull:1"], list)
        assert 0.1 < time.monotonic() - began < 2


def test_without_the_nonce_there_are_no_weights(tmp_path: Path) -> None:
    ends = Ends(tmp_path / "weights")
    ends.send(0)
    assert (tmp_path / "weights").stat().st_mode & 0o077 == 0
    address = ends.outlet.origin()["address"]
    with pytest.raises(WeightsError, match="it closed the connection"):
        pull.Puller(TcpCarriers(), 2.0).pull(address, "0" * 32, ["pull:1"], list)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=2) as connection:
        connection.sendall(b"\xff\xff\xff\xff")
        assert connection.recv(1) == b""
    ends.sender.close()


def test_what_was_released_is_refused_by_name(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.send(0)
    place = next(iter(ends.outlet._held))
    ends.send(1)
    ends.sender.release([0])
    origin = ends.outlet.origin()
    with pytest.raises(WeightsError, match="the version was released"):
        pull.Puller(TcpCarriers(), 2.0).pull(origin["address"], origin["nonce"], [place], list)
    ends.sender.close()


def test_closing_ends_the_thread_that_listens(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    ends = Ends(tmp_path)
    listening = set(threading.enumerate()) - before
    assert listening
    ends.sender.close()
    for thread in listening:
        thread.join(2)
        assert not thread.is_alive()


def test_messages_have_a_limit() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((1 << 30).to_bytes(4, "little"))
        with pytest.raises(WeightsError, match="at most"):
            pull.receive_message(ours, pull.Request)
        theirs.sendall((2).to_bytes(4, "little") + msgspec.json.encode([]))
        with pytest.raises(WeightsError, match="not a request"):
            pull.receive_message(ours, pull.Request)
