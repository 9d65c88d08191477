"""Where a run keeps its files. Paths only: `prl.store` reads and writes them."""

from __future__ import annotations

from pathlib import Path


class RunDir:
    """The layout of `runs/<name>/`. Creating one touches nothing on disk."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, role: str, replica: int) -> Path:
        return self.logs / f"{role}-{replica}.log"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def socket(self) -> Path:
        """A file that holds the controller's address, "tcp://127.0.0.1:PORT": a Unix socket's path may have
        at most 107 characters, fewer than many run directories have."""
        return self.control / "socket"

    @property
    def token(self) -> Path:
        """Mode 0600, the only secret here."""
        return self.control / "token"
