"""The ZeroMQ context of this process: one for all its sockets."""

from __future__ import annotations

import zmq

LINGER_MS = 200
"""How long what was sent may still take to leave after its socket, or the process, has closed."""

_context: zmq.Context[zmq.Socket[bytes]] | None = None


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """Made when it is first needed; it lives until `let_go`."""
    global _context
    if _context is None:
        _context = zmq.Context()
    return _context


def let_go() -> None:
    """Before a process exits: wait until what was sent has left it, `LINGER_MS` at most. Nothing is open afterwards."""
    global _context
    if _context is not None:
        former, _context = _context, None
        former.destroy(linger=LINGER_MS)
