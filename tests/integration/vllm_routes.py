"""Under vLLM's interpreter: ask every route of vLLM's application without the key, and with a wrong one.

Prints {"routes": how many, "answered": [[path, method, status], ...]} for every answer that is not 401.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # also those that administrate

from prl_engine_vllm import arguments
from prl_engine_vllm.http import Guard


async def ask(app: Any, path: str, method: str, headers: list[tuple[bytes, bytes]]) -> int:
    found = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        found.append(message.get("status", 0))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)
    return int(found[0])


async def main() -> None:
    from vllm.entrypoints.launchers.app import build_app

    namespace = arguments.parse({"model": sys.argv[1]})
    app = build_app(namespace, ("generate",), None)
    guarded = Guard(app, "right")
    wrong = [(b"authorization", b"Bearer wrong")]
    bad, count = [], 0
    for route in [*app.routes, *(type("Route", (), {"path": p, "methods": None}) for p in ("/", "/nowhere", "//v1"))]:
        for method in sorted(getattr(route, "methods", None) or {"GET", "POST"}):
            count += 1
            for headers in ([], wrong, [(b"x-api-key", b"")]):
                status = await ask(guarded, route.path, method, headers)
                if status != 401:
                    bad.append([route.path, method, status])
    known = await ask(guarded, "/version", "GET", [(b"authorization", b"Bearer right")])
    print("\n" + json.dumps({"routes": count, "answered": bad, "with_key": known}))


asyncio.run(main())
