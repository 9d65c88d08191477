"""Looking again until a deadline: a network file system shows names, sizes and contents late (NFS caches)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from prl.errors import WeightsError

T = TypeVar("T")

FIRST_RETRY_S = 0.02
"""Pause before the first second look; it doubles each time."""


class NotYetError(Exception):
    """Not what was announced, which a network file system may still put right."""


def patiently(look: Callable[[], T], deadline: float) -> T:
    """What `look` returns once it does not raise `NotYetError` any more.

    Raises:
        WeightsError: the deadline has passed, with the text of the last `NotYetError`.
    """
    pause = FIRST_RETRY_S
    while True:
        try:
            return look()
        except NotYetError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WeightsError(str(error)) from error
        time.sleep(min(pause, left))
        pause *= 2
