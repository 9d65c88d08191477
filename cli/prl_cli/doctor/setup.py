"""Whether a configuration fits this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.errors import EnvironmentNotFit
from prl_cli.doctor.finding import Finding
from prl_cli.doctor.machine import cores

if TYPE_CHECKING:
    from prl.config.schema import EngineTable, RunConfig, SftConfig


def check_setup(config: RunConfig | SftConfig, told: list[dict[str, Any]]) -> Iterator[Finding]:
    yield model(config)
    yield devices(config, next((fact for fact in told if fact.get("topic") == "torch"), {}))
    engine = getattr(config, "engine", None)
    if engine is not None:
        yield from server(engine)
    problems = {(f["kind"], f["name"]): f["problem"] for f in told if f.get("topic") == "plugin" and f["problem"]}
    for table in (engine, config.trainer):
        if table is None:
            continue
        kind, name = table.kind, table.use
        if (kind, name) in problems:
            yield Finding(f"{kind} of the run", "fail", problems[kind, name], "reinstall its package, or use another")


def model(config: RunConfig | SftConfig) -> Finding:
    """A folder must be there and whole; a name on a hub is looked for in the local cache only."""
    path = Path(config.model.path).expanduser()
    if path.is_dir():
        missing = [name for name in ("config.json", "tokenizer_config.json") if not (path / name).is_file()]
        if not any(path.glob("*.safetensors")):
            missing.append("*.safetensors")
        if missing:
            return Finding(
                "model", "fail", f"{path} lacks {', '.join(missing)}", "save it again in the Hugging Face format"
            )
        return Finding("model", "ok", str(path))
    if config.model.path.startswith((".", "/", "~")) or config.model.path.count("/") != 1:
        return Finding("model", "fail", f"there is no folder {path}", "set model.path to a folder, or a name on a hub")
    cached = hub_cache() / f"models--{config.model.path.replace('/', '--')}"
    if cached.is_dir():
        return Finding("model", "ok", f"{config.model.path}, in the cache {cached}")
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "TRUE"):
        return Finding(
            "model", "fail", f"{config.model.path} is not in the cache and HF_HUB_OFFLINE is set", "download it first"
        )
    return Finding("model", "ok", f"{config.model.path}, to be downloaded from the hub when the run starts")


def hub_cache() -> Path:
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(home).expanduser() / "hub"


def server(engine: EngineTable) -> Iterator[Finding]:
    """An engine that needs what is not beside prl may say what it found, as its plugin's `installed()`."""
    try:
        installed = getattr(engine.build(), "installed", None)
        if installed is not None:
            yield Finding("engine", "ok", installed())
    except EnvironmentNotFit as error:
        yield Finding("engine", "fail", f"{engine.use} cannot run here", str(error))


def devices(config: RunConfig | SftConfig, torch: dict[str, Any]) -> Finding:
    """Engine replicas and trainer ranks against GPUs, or their threads against cores."""
    trainer, engine = config.trainer, getattr(config, "engine", None)
    replicas = engine.replicas if engine is not None else 0
    gpus = len(torch.get("gpus", []))
    if gpus:
        engines = f"{replicas} engines and " if replicas else ""
        seen = f"{engines}{trainer.processes} trainer processes on {gpus} GPUs"
        if replicas + trainer.processes > gpus:
            fewer = "lower engine.replicas or trainer.processes" if replicas else "lower trainer.processes"
            return Finding("devices", "warn", seen, f"they will share GPUs: {fewer}")
        return Finding("devices", "ok", seen)
    available = cores()
    threads = trainer.processes * (trainer.threads or available)
    if engine is not None:
        threads += replicas * (engine.threads or available)
    seen = f"{threads} compute threads on {available} cores"
    if threads > available:
        half = max(1, available // (2 if replicas else trainer.processes))
        engines = f"engine.threads = {half} and " if replicas else ""
        return Finding("devices", "warn", seen, f"set {engines}trainer.threads = {half}")
    return Finding("devices", "ok", seen)
