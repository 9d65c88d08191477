"""Settings of the channels."""

from __future__ import annotations

from pydantic import Field

from prl.contribution import PluginConfig


class FilesystemConfig(PluginConfig):
    shard_bytes: int = Field(2_000_000_000, ge=1)
    """A file holds at most so many bytes of tensors, or one tensor that is larger. The sender keeps one file's worth
    in memory."""
    fsync: bool = False
    """Force every file to disk before it becomes visible. Weights that a crash of the host destroys are sent again
    from the checkpoint, so that only a network file system that shows names before contents is a reason."""
    visibility_s: float = Field(2.0, ge=0)
    """How long a receiver waits for files that the sender has finished but that it cannot see yet (NFS caches), or
    that are not yet what the manifest says."""
    threads: int = Field(4, ge=1)
    """Files whose checksums are computed at once; no more than there are files."""
