"""An engine of no model that has an HTTP interface, as a plugin in a file: `prl serve` is tried on it."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prl import role
from prl.config.schema import RunConfig
from prl.contribution import PluginConfig
from prl.plan import Role


class ApiEngine:
    class Config(PluginConfig):
        api_port: int = 0
        fails: bool = False

    def __init__(self, config: Config) -> None:
        self.config = config

    def role(self, config: RunConfig) -> Role:
        command = (sys.executable, __file__, "{run_dir}", "{replica}")
        return Role("engine", command, replicas=config.engine.replicas, restart="on_failure")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == f"Bearer {self.server.key}"
        answer = {"data": [{"id": "tiny", "path": self.server.model}]} if allowed else {"error": "no key"}
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments: object) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True
    key = ""
    model = ""


async def serve(process: role.RoleProcess) -> None:
    table = process.config.engine.own
    if table["fails"]:
        raise ValueError("this engine cannot load the model")
    server = Server(("127.0.0.1", table["api_port"] + process.replica if table["api_port"] else 0), Handler)
    server.key, server.model = process.token, process.config.model.path
    threading.Thread(target=server.serve_forever, daemon=True).start()
    await process.register({}, info={"api": f"http://127.0.0.1:{server.server_port}/v1", "model": "tiny"})
    await process.until_stopped()
    server.shutdown()


if __name__ == "__main__":
    role.main("engine", serve, sys.argv[1], int(sys.argv[2]))
