"""Runs in a process of its own, `python -m prl_cli.doctor.probe`, and says on standard output what it could import.

One JSON object a line, as soon as it is known: what was found before a crash is not lost. Modules are imported by
name, because the command line itself never depends on them.
"""

from __future__ import annotations

import importlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def tell(topic: str, **facts: Any) -> None:
    print(json.dumps({"topic": topic, **facts}), flush=True)


def torch() -> None:
    try:
        module = importlib.import_module("torch")
    except Exception as error:
        tell("torch", error=f"{type(error).__name__}: {error}")
        return
    facts: dict[str, Any] = {
        "version": module.__version__,
        "cuda_build": module.version.cuda,
        "threads": module.get_num_threads(),
        "cuda": bool(module.cuda.is_available()),
        "gpus": [],
    }
    if facts["cuda"]:
        for index in range(module.cuda.device_count()):
            try:
                free, total = module.cuda.mem_get_info(index)
                facts["gpus"].append({"name": module.cuda.get_device_name(index), "free": free, "total": total})
            except Exception as error:
                facts["gpus"].append({"name": f"GPU {index}", "error": f"{type(error).__name__}: {error}"})
    tell("torch", **facts)


def library(name: str) -> None:
    try:
        importlib.import_module(name)
        tell("library", name=name, version=version(name))
    except PackageNotFoundError:
        tell("library", name=name, version="unknown")
    except Exception as error:
        tell("library", name=name, error=f"{type(error).__name__}: {error}")


def plugins() -> None:
    """Every declaration; of engines and trainers also the implementation."""
    from prl import registry
    from prl.contribution import KINDS

    for kind in KINDS:
        for listed in registry.listing(kind):
            problem = listed.problem
            if not problem and listed.contribution is not None and kind in ("engines", "trainers"):
                try:
                    listed.contribution.load_factory()
                except Exception as error:
                    problem = f"its implementation cannot be imported: {type(error).__name__}: {error}"
            entry = listed.entry
            tell("plugin", kind=kind, name=entry.name, package=entry.distribution, problem=problem)


if __name__ == "__main__":
    torch()
    library("transformers")
    library("safetensors")
    plugins()
    tell("end")
