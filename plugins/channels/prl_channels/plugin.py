"""What this distribution contributes."""

from __future__ import annotations

from prl.contribution import Contribution
from prl_channels.config import FilesystemConfig

FILESYSTEM = Contribution(
    factory="prl_channels.filesystem:build",
    config=FilesystemConfig,
    summary="safetensors and a checksummed manifest in a directory; the default, works everywhere",
)
