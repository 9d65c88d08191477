"""Per-episode keys: they open one episode's conversations at a gateway, and nothing else.

A key is "<episode id>.<mac>" with the first 32 hex digits of HMAC-SHA256(run token, episode id), so a gateway checks it
without being told about the episode.
"""

from __future__ import annotations

import hashlib
import hmac

from prl.errors import EpisodeFailed


def mint(token: str, episode_id: int) -> str:
    """The key of one episode; about 2 us."""
    return f"{episode_id}.{_mac(token, episode_id)}"


def verify(token: str, key: str) -> int:
    """The episode a key opens.

    Raises:
        EpisodeFailed: the key was not minted with this run's token.
    """
    number, _, mac = key.partition(".")
    if number.isascii() and number.isdigit() and hmac.compare_digest(mac, _mac(token, int(number))):
        return int(number)
    raise EpisodeFailed("bad_key", "this key was not made by this run")


def _mac(token: str, episode_id: int) -> str:
    return hmac.digest(token.encode(), b"%d" % episode_id, hashlib.sha256).hex()[:32]
