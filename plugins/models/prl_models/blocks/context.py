"""Context parallelism: several ranks compute one row together, each a part of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share every row. `style`: "ulysses" exchanges heads for tokens around attention; "ring" passes
    keys and values from rank to rank."""

    group: dist.ProcessGroup
    style: Literal["ulysses", "ring"] = "ulysses"

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)
