"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """`fail` means that runs cannot work here; `warn` that some of them will be slow or will not."""

    name: str
    level: Level
    seen: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)
