"""What this distribution contributes."""

from __future__ import annotations

from prl.contribution import Contribution
from prl_launchers.config import LocalConfig

LOCAL = Contribution(
    factory="prl_launchers.local:LocalLauncher",
    config=LocalConfig,
    summary="Every role as a supervised process of this machine",
)
