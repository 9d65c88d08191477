"""Environment variables that vLLM reads, as this engine wants them where the user has not said."""

from __future__ import annotations

import os

from prl_engine_vllm.config import VllmConfig

DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_COLOR": "0",
    "NO_COLOR": "1",
}
FORBIDDEN = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_API_KEY": "",
}
"""Whatever the shell says: no pickle, no administration over HTTP, no other key."""


def apply(own: VllmConfig) -> None:
    """Before vLLM is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.update(own.env)
    for name, value in FORBIDDEN.items():
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value
