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
    from prl.config.schema import RunConfig


def check_setup(config: RunConfig, told: list[dict[str, Any]]) -> Iterator[Finding]:
    yield model(config)
    yield devices(config, next((fact for fact in told if fact.get("topic") == "torch"), {}))
    yield from server(config)
    problems = {(f["kind"], f["name"]): f["problem"] for f in told if f.get("topic") == "plugin" and f["problem"]}
    for kind, name in (("engines", config.engine.use), ("trainers", config.trainer.use)):
        if (kind, name) in problems:
            yield Finding(f"{kind} of the run", "fail", problems[kind, name], "reinstall its package, or use another")


def model(config: RunConfig) -> Finding:
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


def server(config: RunConfig) -> Iterator[Finding]:
    """An engine that needs what is not beside prl may say what it found, as its plugin's `installed()`."""
    try:
        installed = getattr(config.engine.build(), "installed", None)
        if installed is not None:
            yield Finding("engine", "ok", installed())
    except EnvironmentNotFit as error:
        yield Finding("engine", "fail", f"{config.engine.use} cannot run here", str(error))


def devices(config: RunConfig, torch: dict[str, Any]) -> Finding:
    """Engine replicas and trainer ranks against GPUs, or their threads against cores."""
    wanted = config.engine.replicas + config.trainer.processes
    gpus = len(torch.get("gpus", []))
    if gpus:
        seen = f"{config.engine.replicas} engines and {config.trainer.processes} trainer processes on {gpus} GPUs"
        if wanted > gpus:
            return Finding("devices", "warn", seen, "they will share GPUs: lower engine.replicas or trainer.processes")
        return Finding("devices", "ok", seen)
    available = cores()
    threads = config.engine.replicas * (config.engine.threads or available)
    threads += config.trainer.processes * (config.trainer.threads or available)
    seen = f"{threads} compute threads on {available} cores"
    if threads > available:
        half = max(1, available // 2)
        return Finding("devices", "warn", seen, f"set engine.threads = {half} and trainer.threads = {half}")
    return Finding("devices", "ok", seen)
