"""How the ranks of a trainer are laid out, in numbers alone; no torch.

    world = dp_replicate x dp_shard x cp,   cp varying fastest

so the ranks that share a row are neighbours, and a copy of the sharded model is a stretch of `dp_shard x cp` ranks.
`ep` divides such a stretch once more, for the experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prl.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.dp_replicate * self.shards

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.dp_shard * self.cp

    @property
    def data_ranks(self) -> int:
        """Groups of ranks with rows of their own."""
        return self.dp_replicate * self.dp_shard


ALONE = Layout()


def make(world: int, dp_replicate: int, dp_shard: int, cp: int, ep: int) -> Layout:
    """The layout of `world` ranks; `dp_shard` 0 takes all that the other two leave.

    Raises:
        ConfigError: the numbers do not multiply or divide; it names the nearest that do.
    """
    found = misfit(world, dp_replicate, dp_shard, cp, ep)
    if found is not None:
        raise ConfigError([f"trainer.{found[0]} {found[1]}"])
    return Layout(dp_replicate, world // (dp_replicate * cp), cp, ep)


def misfit(world: int, dp_replicate: int, dp_shard: int, cp: int, ep: int) -> tuple[str, str] | None:
    """The key to change and what is wrong with it, or None where everything fits."""
    fixed = dp_replicate * (dp_shard or 1) * cp

    def fits(product: int) -> bool:
        return world == product if dp_shard else world % product == 0

    if not fits(fixed):
        key, value = ("dp_shard", dp_shard) if dp_shard else ("cp", cp) if cp > 1 else ("dp_replicate", dp_replicate)
        product = f"{dp_replicate} x {dp_shard or '(all that remain)'} x {cp}"
        says = f"is {value}, but {world} processes are not dp_replicate x dp_shard x cp = {product}. Nearest that fit: "
        options = [
            *_nearest("dp_shard", dp_shard, world, lambda n: fits(dp_replicate * n * cp) if dp_shard else False),
            *_nearest("cp", cp, world, lambda n: fits(dp_replicate * (dp_shard or 1) * n)),
            *_nearest("dp_replicate", dp_replicate, world, lambda n: fits(n * (dp_shard or 1) * cp)),
            *_processes(world, fixed, exactly=dp_shard > 0),
        ]
        return key, says + ", ".join(options)
    shards = world // dp_replicate
    if shards % ep:
        says = f"is {ep}, but must divide dp_shard x cp = {shards // cp} x {cp} = {shards}. Nearest that fit: "
        return "ep", says + ", ".join(_nearest("ep", ep, shards, lambda n: shards % n == 0))
    return None


def _nearest(key: str, value: int, most: int, fits: Callable[[int], bool]) -> Iterable[str]:
    found = [n for n in range(1, most + 1) if fits(n)]
    if found:
        yield f"{key} = {min(found, key=lambda n: (abs(n - value), n))}"


def _processes(world: int, fixed: int, *, exactly: bool) -> Iterable[str]:
    wanted = [fixed] if exactly else [world // fixed * fixed, -(-world // fixed) * fixed]
    yield " or ".join(f"processes = {n}" for n in wanted if n)
