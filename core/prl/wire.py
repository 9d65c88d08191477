"""ZeroMQ between roles: typed calls in both directions over one connection.

A `Server` binds (ROUTER) and sees every connection as a `Peer`; a `Client` connects (DEALER) and has one,
`peer`. Both answer calls with handlers and both may call: the controller calls a trainer that connected to it.

Frames of a message: [run token, envelopes], or [run token, envelopes, payload] for one large payload, which is neither
copied here nor on arrival. The token is checked on every message, so there is no session to hijack and nothing to renew
after a reconnect. An `Envelope` carries the schema version, so that a newer peer is refused by name. Payloads are
msgpack of the `Method`'s types; nothing is ever unpickled.

Everything that is sent to one peer in one tick of the loop travels as one message, and sockets are read through their
file descriptor and drained: `zmq.asyncio` costs about 100 us a message here, one zmq message per envelope cost 9 us for
the socket calls of both ends alone, this 1 us.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.utils.monitor

from prl import faults, remote, sockets
from prl.errors import PrlError, WireError
from prl.messages import Method
from prl.types import SCHEMA_VERSION

log = logging.getLogger(__name__)

Q = TypeVar("Q")
R = TypeVar("R")

CALL, REPLY, ERROR, NOTIFY = range(4)

LARGE = 65536  # bytes from which a payload travels in a frame of its own
TOGETHER = 32  # envelopes in one message at most: the peer works on the first while the next are made
_MORE = int(zmq.SNDMORE) | int(zmq.NOBLOCK)  # plain ints: pyzmq's enums cost 5 us a message
_LAST = int(zmq.NOBLOCK)


class Envelope(msgspec.Struct, array_like=True):
    schema: int
    kind: int
    id: int
    method: str
    payload: bytes


Payload = bytes | memoryview
Handler = Callable[["Peer", Any], Any]
Handlers = Mapping[Method[Any, Any], Handler]

_encode = msgspec.msgpack.Encoder().encode
_decode_envelopes = msgspec.msgpack.Decoder(list[Envelope]).decode


class Peer:
    """The other end of a connection."""

    def __init__(self, endpoint: _Endpoint, route: bytes | None) -> None:
        self._endpoint = endpoint
        self._route = route
        self._pending: dict[int, tuple[asyncio.Future[Payload], asyncio.TimerHandle | None]] = {}
        self._outbox: list[Envelope] = []
        self.closed = False
        self.name = "peer"

    async def call(self, method: Method[Q, R], request: Q, *, timeout: float | None) -> R:
        """Send a request and wait for its reply, at most `timeout` seconds.

        Raises:
            WireError: the peer is gone, did not answer in time, or answered what is not a reply to this.
            EpisodeFailed, WeightsError, RunFailed: what the other side's handler raised.
        """
        if self.closed:
            raise WireError(f"{method.name}: {self.name} is gone")
        loop = asyncio.get_running_loop()
        call_id = next(self._endpoint.ids)
        future: asyncio.Future[Payload] = loop.create_future()
        timer = loop.call_later(timeout, self._expire, call_id, method.name, timeout) if timeout is not None else None
        self._pending[call_id] = (future, timer)
        try:
            self._endpoint.send(self, CALL, call_id, method.name, _encode(request))
            return method.decode_reply.decode(await future)
        except msgspec.DecodeError as error:
            raise WireError(f"{method.name}: {self.name} gave a malformed answer: {error}") from error
        finally:
            self._pending.pop(call_id, None)
            if timer is not None:
                timer.cancel()

    def notify(self, method: Method[Q, Any], request: Q) -> None:
        """Send a request that wants no reply."""
        if not self.closed:
            self._endpoint.send(self, NOTIFY, 0, method.name, _encode(request))

    def fail(self, why: str) -> None:
        """The connection is lost: every call that waits on it ends now, with `why`."""
        self.closed = True
        for future, timer in list(self._pending.values()):
            if timer is not None:
                timer.cancel()
            if not future.done():
                future.set_exception(WireError(f"{self.name}: {why}"))

    def fail_call(self, call_id: int, why: str) -> None:
        """End one call that waits."""
        pending = self._pending.get(call_id)
        if pending is not None and not pending[0].done():
            pending[0].set_exception(WireError(why))

    def _expire(self, call_id: int, method: str, timeout: float) -> None:
        self.fail_call(call_id, f"{method}: {self.name} did not answer within {timeout:g} s")

    def _resolve(self, envelope: Envelope, payload: Payload) -> None:
        pending = self._pending.get(envelope.id)
        if pending is None or pending[0].done():
            return
        if envelope.kind == REPLY:
            pending[0].set_result(payload)
        else:
            pending[0].set_exception(remote.unpack(payload, self.name, envelope.method))


class _Endpoint:
    """What Server and Client share: one socket on the running loop, its handlers and its tasks."""

    def __init__(self, socket_type: int, token: str, handlers: Handlers) -> None:
        self.ids = itertools.count(1)
        self._token = token.encode()
        self._handlers = {method.name: (method, handler) for method, handler in handlers.items()}
        self._socket: zmq.Socket[bytes] = sockets.context().socket(socket_type)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.LINGER, sockets.LINGER_MS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._drain_scheduled = False
        self._closed = False
        self._refused = 0

    def _attach(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._schedule_drain()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ValueError, AttributeError):
            self._loop.remove_reader(self._fd)
        for task in list(self._tasks):
            task.cancel()
        self._socket.close()

    def send(self, peer: Peer, kind: int, call_id: int, method: str, payload: bytes) -> None:
        """Send at the end of this tick of the loop, together with whatever else goes to this peer."""
        if self._closed:
            raise WireError(f"{method}: this end is closed")
        if faults.drops("wire.send", method):
            return
        if len(payload) >= LARGE:
            self._flush(peer)
            self._transmit(peer, [Envelope(SCHEMA_VERSION, kind, call_id, method, b"")], payload)
            return
        outbox = peer._outbox
        outbox.append(Envelope(SCHEMA_VERSION, kind, call_id, method, payload))
        if len(outbox) == 1:
            self._loop.call_soon(self._flush, peer)
        elif len(outbox) >= TOGETHER:
            self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        if peer._outbox and not self._closed:
            envelopes, peer._outbox = peer._outbox, []
            self._transmit(peer, envelopes, None)

    def _transmit(self, peer: Peer, envelopes: list[Envelope], payload: bytes | None) -> None:
        frames = [self._token, _encode(envelopes)] if payload is None else [self._token, _encode(envelopes), payload]
        try:
            if peer._route is not None:
                self._socket.send(peer._route, _MORE)
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE)
            self._socket.send(frames[-1], _LAST, copy=payload is None)
        except zmq.ZMQError as error:
            peer.fail(f"cannot be reached ({error})")
        # Sending may consume the edge that announces incoming messages, so look once more.
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
        if self._closed:
            return
        handled = 0
        while handled < 512:  # then let other work run: about 10 ms of messages
            try:
                frames = [self._socket.recv(_LAST, copy=False)]
                while frames[-1].more:
                    frames.append(self._socket.recv(_LAST, copy=False))
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                log.warning("receive failed: %s", error)
                return
            handled += self._receive(frames)
        self._schedule_drain()

    def _receive(self, frames: list[zmq.Frame]) -> int:
        """Handle one message. Returns how many envelopes it held, at least 1."""
        raise NotImplementedError

    def _authentic(self, frames: list[zmq.Frame]) -> bool:
        return len(frames) in (2, 3) and hmac.compare_digest(frames[0].bytes, self._token)

    def _accept(self, peer: Peer, frames: list[zmq.Frame]) -> int:
        if not self._authentic(frames):
            self._note_refusal("without the run's token")
            return 1
        try:
            envelopes = _decode_envelopes(frames[1].buffer)
        except msgspec.DecodeError as error:
            self._note_refusal(f"that is malformed: {error}")
            return 1
        for envelope in envelopes:
            if envelope.schema > SCHEMA_VERSION:
                self._refuse(peer, envelope)
                continue
            payload = frames[2].buffer if len(frames) == 3 else envelope.payload
            if envelope.kind in (REPLY, ERROR):
                peer._resolve(envelope, payload)
            elif not self._closed:  # a handler of an earlier envelope may have closed it
                self._dispatch(peer, envelope, payload)
        return max(1, len(envelopes))

    def _refuse(self, peer: Peer, envelope: Envelope) -> None:
        """A newer peer: its call is answered with the reason, its answer ends the call that waits for it."""
        text = f"schema {envelope.schema} is newer than this side's {SCHEMA_VERSION}: install the same prl on both"
        self._note_refusal(f"{envelope.method!r}: {text}")
        if envelope.kind in (REPLY, ERROR):
            peer.fail_call(envelope.id, f"{envelope.method}: {text}")
        else:
            self._answer_error(peer, envelope, WireError(text))

    def _note_refusal(self, what: str) -> None:
        """The 1st, 2nd, 4th, 8th, ... : whoever sends a flood of them must not fill the disk."""
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:
            log.warning("refused a message %s (%d refused so far)", what, self._refused)

    def _dispatch(self, peer: Peer, envelope: Envelope, payload: Payload) -> None:
        entry = self._handlers.get(envelope.method)
        if entry is None:
            self._answer_error(peer, envelope, WireError(f"no handler for {envelope.method!r}"))
            return
        method, handler = entry
        try:
            result = handler(peer, method.decode_request.decode(payload))
            reply = b"" if isinstance(result, Awaitable) else _encode(result)
        except Exception as error:
            self._answer_error(peer, envelope, error)
            return
        if isinstance(result, Awaitable):
            task = self._loop.create_task(self._finish(peer, envelope, result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif envelope.kind == CALL and not self._closed:
            self.send(peer, REPLY, envelope.id, envelope.method, reply)

    async def _finish(self, peer: Peer, envelope: Envelope, result: Awaitable[Any]) -> None:
        try:
            payload = _encode(await result)
        except Exception as error:
            self._answer_error(peer, envelope, error)
            return
        if envelope.kind == CALL and not self._closed:
            self.send(peer, REPLY, envelope.id, envelope.method, payload)

    def _answer_error(self, peer: Peer, envelope: Envelope, error: Exception) -> None:
        if not isinstance(error, PrlError):
            log.exception("%s failed", envelope.method, exc_info=error)
        if envelope.kind == CALL and not self._closed:
            self.send(peer, ERROR, envelope.id, envelope.method, remote.pack(error))


class Server(_Endpoint):
    """Binds, and answers every peer. `on_peer(peer)` is called when one speaks for the first time."""

    def __init__(self, token: str, handlers: Handlers, *, on_peer: Callable[[Peer], None] | None = None) -> None:
        super().__init__(zmq.ROUTER, token, handlers)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._on_peer = on_peer
        self.peers: dict[bytes, Peer] = {}

    def start(self, address: str = "tcp://127.0.0.1:0") -> str:
        """Bind and return the address with its real port. Loopback unless told otherwise."""
        self._socket.bind(address)
        self._attach()
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def drop(self, peer: Peer, why: str) -> None:
        """Forget a peer that is known to be gone; its pending calls fail with `why`."""
        if peer._route is not None:
            self.peers.pop(peer._route, None)
        peer.fail(why)

    def close(self) -> None:
        for peer in list(self.peers.values()):
            self._flush(peer)
            peer.fail("this end is closed")
        super().close()

    def _receive(self, frames: list[zmq.Frame]) -> int:
        route, *rest = frames
        peer = self.peers.get(route.bytes)
        if peer is None:
            peer = Peer(self, route.bytes)
            if self._authentic(rest):
                self.peers[route.bytes] = peer
                if self._on_peer is not None:
                    self._on_peer(peer)
        return self._accept(peer, rest)


class Client(_Endpoint):
    """Connects to one server. `on_lost` is called once when the connection breaks; calls in flight fail at once."""

    def __init__(
        self,
        address: str,
        token: str,
        handlers: Handlers | None = None,
        *,
        name: str = "server",
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(zmq.DEALER, token, handlers or {})
        self.peer = Peer(self, None)
        self.peer.name = name
        self._on_lost = on_lost
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._attach()
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._monitor_fd, self._watch)
        self._watch()  # reading its events once arms the descriptor

    async def call(self, method: Method[Q, R], request: Q, *, timeout: float | None) -> R:
        return await self.peer.call(method, request, timeout=timeout)

    def notify(self, method: Method[Q, Any], request: Q) -> None:
        self.peer.notify(method, request)

    def close(self) -> None:
        if self._closed:
            return
        with contextlib.suppress(ValueError):
            self._loop.remove_reader(self._monitor_fd)
        self._flush(self.peer)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self.peer.fail("this end is closed")
        super().close()

    def _receive(self, frames: list[zmq.Frame]) -> int:
        return self._accept(self.peer, frames)

    def _watch(self) -> None:
        while not self._closed and int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if not self.peer.closed:
                self.peer.fail("the connection is lost")
                if self._on_lost is not None:
                    self._on_lost()
