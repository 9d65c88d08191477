"""Engines pull what they lack from the trainer's process: a request over TCP, the bytes over a carrier of their own.

The trainer listens; every engine process opens one connection, keeps it, and asks for the segments of a version by
their places. Both sides then move the bytes with a carrier (NCCL; in tests TCP itself), which is of this pair of
processes alone, so that engines may come, go and die without anybody else noticing. Whoever waits does so until a
deadline; then the pair's carrier is given up and the next request begins with a new connection.

    engine -> trainer   {"nonce", "places"}           once per request
    trainer -> engine   {"carrier", "error"}          "carrier": what the first request of a pair needs to make one

The nonce stands in the manifests, which only this user may read: whoever cannot read the run directory gets no weights.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from prl import faults
from prl.errors import WeightsError
from prl_channels.checksum import checksum
from prl_channels.config import NcclConfig
from prl_channels.encoding.full import Encoded
from prl_channels.manifest import Manifest, Segment

log = logging.getLogger(__name__)

Message = TypeVar("Message", bound=msgspec.Struct)

LONGEST_MESSAGE = 16 << 20
SERVER_POLL_S = 0.2


class Carrier(Protocol):
    """Moves bytes between two processes; made anew for every connection."""

    def send(self, tensors: Sequence[Tensor], deadline: float) -> None:
        """Returns when they have left. `deadline` is in `time.monotonic()` seconds.

        Raises:
            WeightsError: the other side did not take them, or is gone.
        """
        ...

    def receive(self, tensors: Sequence[Tensor], deadline: float) -> None:
        """Fill tensors of the sizes that were sent, in that order."""
        ...

    def close(self) -> None: ...


class Carriers(Protocol):
    """How a pair of processes gets a carrier."""

    def offer(self) -> str:
        """What the engine's side must be told, made by the trainer's side."""
        ...

    def make(self, offer: str, rank: int, connection: socket.socket, deadline: float) -> Carrier:
        """Called by both sides at once: rank 0 is the trainer's."""
        ...


class Request(msgspec.Struct):
    nonce: str
    places: list[str]


class Answer(msgspec.Struct):
    carrier: str = ""
    error: str = ""


class Server:
    """The trainer's side. `held` are the segments by place; it is read by the threads that serve."""

    def __init__(self, host: str, carriers: Carriers, held: Mapping[str, Tensor], timeout_s: float) -> None:
        self.nonce = secrets.token_hex(16)
        self._carriers = carriers
        self._held = held
        self._timeout = timeout_s
        self._closed = threading.Event()
        self._socket = socket.create_server((host, 0))
        self._socket.settimeout(SERVER_POLL_S)
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        threading.Thread(target=self._accept, name="weights", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _accept(self) -> None:
        with self._socket:
            while not self._closed.is_set():
                try:
                    connection, _ = self._socket.accept()
                    threading.Thread(target=self._serve, args=(connection,), name="weights", daemon=True).start()
                except TimeoutError:
                    continue
                except (OSError, RuntimeError) as error:  # no descriptor or thread is left: that passes
                    log.warning("an engine that asks for weights has to ask again: %s", error)
                    self._closed.wait(SERVER_POLL_S)

    def _serve(self, connection: socket.socket) -> None:
        """One engine, until it leaves."""
        carrier: Carrier | None = None
        try:
            with connection:
                connection.settimeout(self._timeout)
                request = receive_message(connection, Request)
                while hmac.compare_digest(request.nonce.encode(), self.nonce.encode()):
                    carrier = self._answer(connection, request, carrier)
                    connection.settimeout(None)  # until the next version
                    request = receive_message(connection, Request)
                    connection.settimeout(self._timeout)
                log.warning("a process that does not know the run's secret asked for weights")
        except EOFError:
            pass
        except Exception as error:
            log.warning("an engine did not get its weights: %s: %s", type(error).__name__, error)
        finally:
            if carrier is not None:
                carrier.close()

    def _answer(self, connection: socket.socket, request: Request, carrier: Carrier | None) -> Carrier | None:
        deadline = time.monotonic() + self._timeout
        tensors = [self._held.get(place) for place in request.places]
        if any(tensor is None for tensor in tensors):
            send_message(connection, Answer(error="the version was released"))
            return carrier
        offer = "" if carrier is not None else self._carriers.offer()
        send_message(connection, Answer(offer))
        if carrier is None:
            carrier = self._carriers.make(offer, 0, connection, deadline)
        faults.point("channel.carry")
        carrier.send([tensor for tensor in tensors if tensor is not None], deadline)
        return carrier


class Puller:
    """The engine's side: one connection to one trainer's process, made when it is first needed."""

    def __init__(self, carriers: Carriers, timeout_s: float) -> None:
        self._carriers = carriers
        self._timeout = timeout_s
        self._peer = ("", "")
        self._connection: socket.socket | None = None
        self._carrier: Carrier | None = None

    def pull(
        self, address: str, nonce: str, places: Sequence[str], room: Callable[[], Sequence[Tensor]]
    ) -> Sequence[Tensor]:
        """The bytes at `places`, in the tensors that `room` makes for them.

        Raises:
            WeightsError: the trainer is gone or did not answer in time, or has released them.
        """
        try:
            if self._peer != (address, nonce):
                self.close()
                self._peer = (address, nonce)
            return self._pull(nonce, places, room)
        except (OSError, EOFError) as error:
            self.close()
            why = str(error) or "it closed the connection"
            raise WeightsError(f"the trainer at {address} does not send its weights: {why}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
        if self._connection is not None:
            self._connection.close()
        self._carrier, self._connection, self._peer = None, None, ("", "")

    def _pull(self, nonce: str, places: Sequence[str], room: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        deadline = time.monotonic() + self._timeout
        if self._connection is None:
            host, _, port = self._peer[0].rpartition(":")
            self._connection = socket.create_connection((host, int(port)), timeout=self._timeout)
        send_message(self._connection, Request(nonce, list(places)))
        answer = receive_message(self._connection, Answer)
        if answer.error:
            raise WeightsError(f"the trainer at {self._peer[0]} does not send its weights: {answer.error}")
        if self._carrier is None:
            self._carrier = self._carriers.make(answer.carrier, 1, self._connection, deadline)
        tensors = room()
        self._carrier.receive(tensors, deadline)
        return tensors


class PullOutlet:
    """The transport `name`: keeps segments on `device`, where carriers take them from, and serves those who pull."""

    def __init__(self, name: str, config: NcclConfig, carriers: Carriers, device: torch.device) -> None:
        self.name = name
        self.device: torch.device | None = device
        self._held: dict[str, Tensor] = {}
        self._count = 0
        self._server = Server(config.host, carriers, self._held, config.timeout_s)

    def origin(self) -> dict[str, str]:
        return {"address": self._server.address, "nonce": self._server.nonce}

    def put(self, draft: Path, index: int, encoded: Encoded) -> Segment:
        content = torch.cat(list(encoded.pieces)) if len(encoded.pieces) != 1 else encoded.pieces[0].clone()
        self._count += 1
        segment = Segment(f"{self.name}:{self._count}", content.numel(), checksum(content))
        self._held[segment.place] = content
        return segment

    def settle(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def drop(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._held.pop(segment.place, None)

    def close(self) -> None:
        self._server.close()
        self._held.clear()


class PullInlet:
    """`device` is where the bytes are to be."""

    def __init__(self, config: NcclConfig, carriers: Carriers, device: torch.device) -> None:
        self._device = device
        self._puller = Puller(carriers, config.timeout_s)

    def get(self, directory: Path, manifest: Manifest, deadline: float) -> Sequence[Tensor | None]:
        segments = [part.segment for part in manifest.parts if part.segment is not None]
        if not segments:
            return [None] * len(manifest.parts)

        def room() -> Sequence[Tensor]:
            return [torch.empty(segment.bytes, dtype=torch.uint8, device=self._device) for segment in segments]

        origin = manifest.origin
        places = [segment.place for segment in segments]
        pulled = self._puller.pull(origin.get("address", ""), origin.get("nonce", ""), places, room)
        for segment, content in zip(segments, pulled, strict=True):
            found = checksum(content)
            if found != segment.checksum:
                raise WeightsError(
                    f"version {manifest.version}: what came over {manifest.transport} is not what was sent: its "
                    f"checksum is {found}, the manifest says {segment.checksum}"
                )
        contents = iter(pulled)
        return [None if part.segment is None else next(contents) for part in manifest.parts]


def send_message(connection: socket.socket, message: msgspec.Struct) -> None:
    content = msgspec.json.encode(message)
    connection.sendall(len(content).to_bytes(4, "little") + content)


def receive_message(connection: socket.socket, kind: type[Message]) -> Message:
    """Raises:
    EOFError: the other side has closed the connection. WeightsError: it speaks another language.
    """
    size = int.from_bytes(receive_bytes(connection, 4), "little")
    if size > LONGEST_MESSAGE:
        raise WeightsError(f"a message of {size} bytes, at most {LONGEST_MESSAGE} are expected")
    try:
        return msgspec.json.decode(receive_bytes(connection, size), type=kind)
    except msgspec.DecodeError as error:
        raise WeightsError(f"not a request for weights: {error}") from error


def receive_bytes(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    left = memoryview(content)
    while left:
        read = connection.recv_into(left)
        if not read:
            raise EOFError
        left = left[read:]
    return bytes(content)
