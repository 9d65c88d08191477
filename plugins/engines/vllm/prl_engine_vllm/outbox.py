"""What goes to vLLM's engine core: requests and aborts, one after another in the order in which they were made."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Outbox:
    """`wanted(id)` says whether a request that was added is still to be sent; `on_error` is told what went wrong."""

    def __init__(self, llm: AsyncLLM, wanted: Callable[[str], bool], on_error: Callable[[Exception], None]) -> None:
        self._llm = llm
        self._wanted = wanted
        self._on_error = on_error
        self._commands: deque[Any] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, request: Any) -> None:
        """A vLLM `EngineCoreRequest`."""
        self._put(request)

    def abort(self, ids: Sequence[str]) -> None:
        if ids:
            self._put(list(ids))

    def _put(self, command: Any) -> None:
        self._commands.append(command)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        core = self._llm.engine_core
        try:
            while self._commands:
                command = self._commands.popleft()
                if isinstance(command, list):
                    await core.abort_requests_async(command)
                elif self._wanted(command.request_id):
                    await core.add_request_async(command)
        except Exception as error:
            self._on_error(error)
        finally:
            self._task = None
