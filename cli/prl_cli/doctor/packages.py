"""What the installed packages can do, as the probe tells it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from prl_cli.doctor.finding import Finding

PROBE_TIMEOUT_S = 180.0
GB = 1 << 30


def probe(timeout: float = PROBE_TIMEOUT_S) -> tuple[list[dict[str, Any]], str]:
    """What the probe told, and why it ended early ("" when it did not)."""
    command = [sys.executable, "-m", "prl_cli.doctor.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        out, why = done.stdout, f"exit code {done.returncode}"
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why += f": {lines[-1]}" if lines else ""
    except subprocess.TimeoutExpired as expired:
        out = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        why = f"no answer within {timeout:g} s"
    told = []
    for line in out.splitlines():
        try:
            told.append(json.loads(line))
        except ValueError:
            continue  # a library that prints while it is imported
    ended = any(isinstance(fact, dict) and fact.get("topic") == "end" for fact in told)
    return [fact for fact in told if isinstance(fact, dict)], "" if ended else why


def check_packages(told: list[dict[str, Any]], broke: str) -> Iterator[Finding]:
    for fact in told:
        if fact.get("topic") == "torch":
            yield torch(fact)
            yield gpus(fact, nvidia_smi=shutil.which("nvidia-smi") is not None)
        elif fact.get("topic") == "library":
            yield library(fact)
    yield plugins([fact for fact in told if fact.get("topic") == "plugin"])
    for fact in told:
        if fact.get("topic") == "plugin" and fact["problem"]:
            yield plugin_problem(fact)
    if broke:
        last = told[-1] if told else {}
        where = f"after {last.get('name', last.get('topic'))}" if last else "at once"
        yield Finding(
            "imports", "fail", f"importing the libraries broke off {where}: {broke}", "reinstall the library named last"
        )
    yield from requirements()


def torch(fact: dict[str, Any]) -> Finding:
    if "error" in fact:
        return Finding(
            "torch", "fail", fact["error"], "pip install torch (https://pytorch.org tells the build for your GPU)"
        )
    return Finding("torch", "ok", f"{fact['version']}, {fact['threads']} CPU threads")


def gpus(fact: dict[str, Any], *, nvidia_smi: bool) -> Finding:
    """A GPU is used where there is one and never needed; one that torch cannot use is worth a warning."""
    found = fact.get("gpus", [])
    if found:
        parts = [
            f"{gpu['name']}: {gpu['error']}"
            if "error" in gpu
            else f"{gpu['name']} ({gpu['free'] / GB:.0f} of {gpu['total'] / GB:.0f} GiB free)"
            for gpu in found
        ]
        seen = f"{len(found)} with CUDA {fact.get('cuda_build')}: {', '.join(parts)}"
        if any("error" in gpu for gpu in found):
            return Finding("gpu", "warn", seen, "nvidia-smi may tell what is wrong with it")
        busy = [gpu["name"] for gpu in found if gpu["free"] < 0.5 * gpu["total"]]
        if busy:
            return Finding(
                "gpu", "warn", seen, "more than half of a GPU is taken: nvidia-smi lists the processes that hold it"
            )
        return Finding("gpu", "ok", seen)
    if nvidia_smi and not fact.get("cuda_build"):
        remedy = "install a CUDA build of torch (https://pytorch.org)"
        return Finding("gpu", "warn", "an NVIDIA driver is installed, but this torch is a CPU build", remedy)
    if nvidia_smi:
        remedy = "compare the driver in nvidia-smi with the CUDA version that torch was built for"
        return Finding("gpu", "warn", f"torch for CUDA {fact['cuda_build']} finds no GPU", remedy)
    return Finding("gpu", "ok", "none: everything runs on the CPU")


def library(fact: dict[str, Any]) -> Finding:
    name = fact["name"]
    if "error" in fact:
        return Finding(name, "fail", fact["error"], f"pip install {name}")
    return Finding(name, "ok", fact["version"])


def plugins(told: list[dict[str, Any]]) -> Finding:
    kinds = {fact["kind"] for fact in told if not fact["problem"]}
    missing = sorted({"engines", "trainers", "envs", "launchers", "losses", "algorithms", "channels"} - kinds)
    good = sum(1 for fact in told if not fact["problem"])
    if missing:
        return Finding(
            "plugins",
            "fail",
            f"{good} usable; none of the kinds {', '.join(missing)}",
            "pip install -r requirements.txt",
        )
    return Finding("plugins", "ok", f"{good} usable")


def plugin_problem(fact: dict[str, Any]) -> Finding:
    """Only a warning: it stops nothing but the runs that use it."""
    return Finding(
        f"plugin {fact['kind']}/{fact['name']}",
        "warn",
        fact["problem"],
        f"reinstall or remove {fact['package']}; it is an error only where it is used",
    )


def requirements() -> Iterator[Finding]:
    """Whether what our packages require is installed in the versions they require."""
    from importlib.metadata import PackageNotFoundError, distributions, version

    try:
        from packaging.requirements import Requirement
    except ImportError:
        return
    wrong = []
    for dist in distributions():
        if not (dist.metadata["Name"] or "").lower().startswith("prl-"):
            continue
        for text in dist.requires or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                installed = version(requirement.name)
            except PackageNotFoundError:
                wrong.append(f"{requirement.name} is missing (for {dist.metadata['Name']})")
                continue
            if not requirement.specifier.contains(installed, prereleases=True):
                wrong.append(f"{requirement.name} {installed}, {dist.metadata['Name']} needs {requirement.specifier}")
    if wrong:
        yield Finding("requirements", "fail", "; ".join(sorted(set(wrong))), "pip install -r requirements.txt")
    else:
        yield Finding("requirements", "ok", "every package has what it requires")
