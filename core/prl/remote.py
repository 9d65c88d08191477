"""Exceptions on the wire: what a handler raised here is raised at whoever called it."""

from __future__ import annotations

import msgspec

from prl.errors import EpisodeFailed, PrlError, RunFailed, WeightsError, WireError


class RemoteError(msgspec.Struct):
    """An exception on its way back: its class name, message, and an episode failure's own fields."""

    kind: str
    message: str
    reason: str = ""
    retryable: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RemoteError).decode
_DELIBERATE: dict[str, type[PrlError]] = {"WeightsError": WeightsError, "RunFailed": RunFailed}


def pack(error: Exception) -> bytes:
    return _encode(_to_remote(error))


def unpack(payload: bytes | memoryview, peer: str, method: str) -> PrlError:
    """The error to raise here. One that cannot be read is a `WireError` too."""
    try:
        return _from_remote(_decode(payload), peer, method)
    except msgspec.DecodeError as error:
        return WireError(f"{method} at {peer}: an error that cannot be read: {error}")


def _to_remote(error: Exception) -> RemoteError:
    if isinstance(error, EpisodeFailed):
        return RemoteError("EpisodeFailed", str(error), error.reason, error.retryable)
    text = str(error) if isinstance(error, PrlError) else f"{type(error).__name__}: {error}"
    return RemoteError(type(error).__name__, text)


def _from_remote(error: RemoteError, peer: str, method: str) -> PrlError:
    if error.kind == "EpisodeFailed":
        return EpisodeFailed(error.reason, error.message, retryable=error.retryable)
    return _DELIBERATE.get(error.kind, WireError)(f"{method} at {peer}: {error.message}")
