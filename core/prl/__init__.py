"""prl: asynchronous reinforcement learning for language models, a small core with plugins."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prl.contribution import Contribution, PluginConfig
    from prl.protocols import Agent, Context, Env
    from prl.store.reader import open_run
    from prl.types import Episode, Message, Reward, Rollout, Task, Turn

_HOMES = {
    "Agent": "prl.protocols",
    "Context": "prl.protocols",
    "Contribution": "prl.contribution",
    "Env": "prl.protocols",
    "Episode": "prl.types",
    "Message": "prl.types",
    "PluginConfig": "prl.contribution",
    "Reward": "prl.types",
    "Rollout": "prl.types",
    "Task": "prl.types",
    "Turn": "prl.types",
    "open_run": "prl.store.reader",
}

__all__ = [
    "Agent",
    "Context",
    "Contribution",
    "Env",
    "Episode",
    "Message",
    "PluginConfig",
    "Reward",
    "Rollout",
    "Task",
    "Turn",
    "open_run",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import prl` itself costs nothing."""
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'prl' has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)
