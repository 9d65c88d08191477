"""The filesystem channel: weights as files in a directory that trainer and engines both see.

`Sender` and `Receiver` are its two halves; `manifest` is what they agree on. Only the process that needs one loads it.
"""

from __future__ import annotations

from pathlib import Path

from prl.protocols import ChannelPlugin, ChannelReceiver, ChannelSender
from prl_channels.config import FilesystemConfig


class FilesystemChannel:
    def __init__(self, config: FilesystemConfig) -> None:
        self.config = config

    def sender(self, directory: Path) -> ChannelSender:
        from prl_channels.sender import Sender

        return Sender(directory, self.config)

    def receiver(self) -> ChannelReceiver:
        from prl_channels.receiver import Receiver

        return Receiver(self.config)


def build(config: FilesystemConfig) -> ChannelPlugin:
    return FilesystemChannel(config)
