"""How full the engine is, from the statistics that come with every step."""

from __future__ import annotations

import time
from typing import Any

from prl_engine_vllm.flights import Flight

PREEMPTED = 3
"""vLLM's `EngineCoreEventType`, an IntEnum."""


class Gauges:
    """Sums over the data-parallel ranks; `kv_usage` is the fullest one's."""

    def __init__(self, config: Any) -> None:
        self.tokens = 0
        self.preemptions = 0
        self.queued = 0
        """Requests that the engine core has not been given."""
        self.moved = time.monotonic()
        """When the engine last did something."""
        self.busy = 0.0
        """Seconds during which it had something to do."""
        self._config = config
        self._ranks: dict[int, tuple[int, int, float]] = {}
        self._last = 0.0

    def take(self, outputs: Any) -> None:
        """The outputs of one step of one rank."""
        now = time.monotonic()
        stats = outputs.scheduler_stats
        if stats is not None:
            waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            self._ranks[outputs.engine_index] = (stats.num_running_reqs, waiting, stats.kv_cache_usage)
        if self._last:
            self.busy += now - self._last
        self._last = self.moved = now

    def idle(self) -> None:
        """Nothing of ours is in flight; no step will tell."""
        self._ranks.clear()
        self._last = 0.0

    def count_preemptions(self, events: list[Any], flight: Flight) -> None:
        for event in events:
            if event.type != PREEMPTED:
                continue
            if flight.recomputed:
                flight.recomputed = False
            else:
                self.preemptions += 1

    @property
    def capacity(self) -> int:
        """Tokens that the cache of all ranks holds; 0 where vLLM does not say."""
        cache = self._config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    def values(self) -> dict[str, float]:
        """Under the names of `prl.engine.backend.Backend.gauges`."""
        running = sum(rank[0] for rank in self._ranks.values())
        waiting = sum(rank[1] for rank in self._ranks.values())
        return {
            "tokens": float(self.tokens),
            "running": float(running),
            "waiting": float(waiting + self.queued),
            "kv_usage": max((rank[2] for rank in self._ranks.values()), default=0.0),
            "preemptions": float(self.preemptions),
            "capacity": float(self.capacity),
        }
