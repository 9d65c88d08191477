"""What the engines say of their load, as metrics of a step: `engine/...`."""

from __future__ import annotations

from collections.abc import Callable

from prl.controller.fleet import WireFleet

NAMES = ("kv_usage", "running", "waiting")


class EngineMetrics:
    """`wanted()` is how many engines there should be."""

    def __init__(self, fleet: WireFleet, wanted: Callable[[], int]) -> None:
        self._fleet = fleet
        self._wanted = wanted
        self._tokens: dict[int, tuple[float, float, int]] = {}

    def values(self) -> dict[str, float]:
        """Mean and maximum over the serving engines, and what each of them sampled since the last call, in tokens/s."""
        gauges = self._fleet.gauges()
        found = {"engine/wanted": float(self._wanted()), "engine/serving": float(len(gauges))}
        if gauges:
            for name in NAMES:
                each = [float(getattr(gauge, name)) for gauge in gauges]
                found[f"engine/{name}/mean"] = sum(each) / len(each)
                found[f"engine/{name}/max"] = max(each)
        return found | self._rates()

    def _rates(self) -> dict[str, float]:
        former, self._tokens = self._tokens, {}
        rates = {}
        for engine in self._fleet.serving():
            connection = engine.connection
            tokens = connection.gauges.get("tokens")
            if tokens is None:
                continue
            self._tokens[engine.replica] = (connection.seen, tokens, connection.pid)
            seen, before, pid = former.get(engine.replica, (connection.seen, tokens, connection.pid))
            if connection.seen > seen and pid == connection.pid:  # another process counts from zero again
                rates[f"engine/{engine.replica}/tokens_per_s"] = (tokens - before) / (connection.seen - seen)
        return rates
