"""vLLM's own HTTP interface, OpenAI-compatible, behind a key.

vLLM's `--api-key` guards the routes below /v1 only. Here every route, and every path that is none, answers 401 without
the run's token, given as `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from prl.errors import EnvironmentNotFit

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_REFUSAL = json.dumps(
    {"error": {"message": "the run's token is required", "type": "unauthorized", "code": 401}}
).encode()
_HEADERS = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]


class Guard:
    """An ASGI application that lets nobody without the key reach the one behind it."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": _REFUSAL})
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: Scope) -> bool:
        given = dict(scope.get("headers") or [])
        kind, _, token = given.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if kind.lower() == b"bearer" else b""
        return any(hmac.compare_digest(one, self._key) for one in (bearer, given.get(b"x-api-key", b"")))


def bind(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and its address as a URL. Bound before the engine is built, so that a port in use is known at
    once.

    Raises:
        EnvironmentNotFit: it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise EnvironmentNotFit(
            f"HTTP cannot be served on {host}:{port} ({error.strerror}): engine.api_port = 0 takes a free port"
        ) from error
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return sock, f"http://{shown}:{sock.getsockname()[1]}"


async def application(llm: AsyncLLM, arguments: Namespace, key: str) -> Guard:
    """vLLM's application over this engine, guarded."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # before 0.30
        from vllm.entrypoints.openai.api_server import build_app, init_app_state

    tasks = await llm.get_supported_tasks()
    app = build_app(arguments, tasks, llm.model_config)
    await init_app_state(llm, app.state, arguments, tasks)
    app.state.log_stats = False  # no line of them every ten seconds: /metrics and the heartbeats have them
    return Guard(app, key)


class Serving:
    """The interface while it is served, on the running event loop."""

    def __init__(self, app: Guard, sock: socket.socket) -> None:
        import uvicorn

        class Quiet(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # signals are the role's

        self._server = Quiet(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
        self._task = asyncio.get_running_loop().create_task(self._server.serve([sock]))

    async def close(self) -> None:
        """Whoever still waits after a second is cut off."""
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                await self._task
