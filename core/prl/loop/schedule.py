"""The two rules behind the staleness guarantee. Pure functions.

Symbols: P groups make a batch, K is `max_staleness`, b batches have been formed (batch b trains version b-1 into b), v
is the oldest version an engine may sample with. A group admitted now may hold tokens of version v, and a sample trained
at step s has staleness (s-1) - min(version), so its last possible step, its *deadline*, is v + K + 1.

Admission (`room`): with n groups outstanding (in flight or ready), trained first come first served, the next one's
step is b + 1 + floor(n / P). That is within its deadline iff n < (K + 1 + v - b) * P.

Selection (`select`): the invariant "for every d, at most (d - b) * P outstanding groups have a deadline <= d" holds
after every admission (deadlines never decrease), and a batch is formed only if it still holds afterwards. So every
group can be trained in time, and a batch waits for a straggler only when going on without it would mean dropping it:
nothing is starved by faster work, and drops are left to what nobody could foresee.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Deadlined(Protocol):
    @property
    def id(self) -> int: ...

    @property
    def deadline(self) -> int: ...


def deadline(min_version: int, max_staleness: int) -> int:
    """Last step that may train tokens of `min_version`."""
    return min_version + max_staleness + 1


def room(outstanding: int, batches: int, steps: int, version: int, groups_per_step: int, max_staleness: int) -> int:
    """How many more groups may be admitted: within staleness, and never more than the remaining steps can use."""
    horizon = min(max_staleness + 1 + version - batches, steps - batches)
    return horizon * groups_per_step - outstanding


def select(
    ready: Iterable[Deadlined], in_flight: Iterable[Deadlined], step: int, groups_per_step: int
) -> tuple[list[int], list[int]]:
    """Choose the groups of batch `step`.

    Returns:
        (ids of the batch in training order, []) when one may be formed now;
        ([], ids of in-flight groups it has to wait for) when only stragglers are missing;
        ([], []) when fewer than `groups_per_step` groups are ready.
    """
    by_deadline = sorted(ready, key=lambda group: (group.deadline, group.id))
    if len(by_deadline) < groups_per_step:
        return [], []
    chosen, rest = by_deadline[:groups_per_step], by_deadline[groups_per_step:]
    flying = sorted(in_flight, key=lambda group: (group.deadline, group.id))
    overdue = _first_violation(sorted([g.deadline for g in rest] + [g.deadline for g in flying]), step, groups_per_step)
    late = [] if overdue is None else [group.id for group in flying if group.deadline <= overdue]
    # Without a straggler to wait for (a resume with another K or P), waiting would never end.
    return ([], late) if late else (sorted(group.id for group in chosen), [])


def _first_violation(deadlines: Sequence[int], step: int, groups_per_step: int) -> int | None:
    """The first deadline that could not be met if batch `step` were formed without these groups (ascending)."""
    for position, due in enumerate(deadlines):
        if position + 1 > (due - step) * groups_per_step and (
            position + 1 == len(deadlines) or deadlines[position + 1] != due
        ):
            return due
    return None
