"""`prl init`: write a commented configuration to start from."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from prl_cli.commands.shared import Json


class Kind(StrEnum):
    laptop = "laptop"
    gpu = "gpu"
    node = "node"


FILES = {Kind.laptop: ("prl.toml", "make_model.py"), Kind.gpu: ("prl.toml",), Kind.node: ("prl.toml",)}
"""What is written for each kind; the configuration comes from the template of the kind's name."""


def init(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="Folder to write into; it is made.")] = Path("."),
    kind: Annotated[
        Kind, typer.Option("--kind", help="Any machine, one GPU, or one node of eight GPUs.")
    ] = Kind.laptop,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    json: Json = False,
) -> None:
    """Write a commented configuration to start from.

    The one for a laptop needs neither a GPU nor a download and learns within two minutes.
    """
    from importlib.resources import files

    from prl.errors import UsageError
    from prl_cli import output

    targets = [path / name for name in FILES[kind]]
    taken = [str(target) for target in targets if target.exists()]
    if taken and not force:
        raise UsageError(f"{', '.join(taken)} exists: name another folder, or overwrite with --force")
    templates = files("prl_cli") / "templates"
    sources = [
        templates / (f"{kind}.toml" if target.suffix == ".toml" else f"{target.name}.template") for target in targets
    ]
    texts = [source.read_text(encoding="utf-8").replace("my-run", _name(path)) for source in sources]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for target, text in zip(targets, texts):
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write into {path}: {error}") from error
    if json:
        output.emit_json({"kind": kind.value, "files": [str(target) for target in targets]})
        return
    for target in targets:
        typer.echo(f"wrote {target}")
    output.say(f"next: {_next(path, kind)}")


def _name(path: Path) -> str:
    """The run is called like its folder, as far as that is a name."""
    cleaned = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "-" for letter in path.resolve().name
    )
    return cleaned.strip("-") or "first"


def _next(path: Path, kind: Kind) -> str:
    first = "" if path == Path(".") else f"cd {path} && "
    return first + (
        "python make_model.py && prl run prl.toml" if kind is Kind.laptop else "prl doctor prl.toml && prl run prl.toml"
    )
