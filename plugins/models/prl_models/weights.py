"""The weights of a Hugging Face folder, or of a model on the hub, read one tensor at a time.

Headers are compared with what the model has before any memory is taken for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from prl.errors import ConfigError, EnvironmentNotFit
from prl_models.conversion import Rule, parts

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATING = ("F64", "F32", "BF16", "F16")
_SHOWN = 4
"""Names of one kind of problem that a message lists."""


class Read(Protocol):
    def __call__(self, name: str) -> Tensor:
        """A whole tensor on the host, in the file's precision."""
        ...


@dataclass(frozen=True)
class WeightFiles:
    """`where`: the file of every tensor."""

    path: str
    where: Mapping[str, Path]

    @staticmethod
    def find(path: str) -> WeightFiles:
        """
        Raises:
            ConfigError: files are missing or damaged. EnvironmentNotFit: the weights are not safetensors.
        """
        folder = Path(path) if Path(path).is_dir() else _download(path)
        single, index = folder / SINGLE, folder / INDEX
        try:
            if index.is_file():
                names = json.loads(index.read_text())["weight_map"]
                return WeightFiles(path, {name: folder / file for name, file in names.items()})
            if single.is_file():
                with safe_open(single, "pt") as file:
                    return WeightFiles(path, dict.fromkeys(file.keys(), single))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise ConfigError([f"model.path = {path!r}: the weights cannot be read: {error}"]) from error
        raise EnvironmentNotFit(f"{path!r} has no {SINGLE} and no {INDEX}")

    def check(self, shapes: Mapping[str, torch.Size], rules: Sequence[Rule], ignored: Iterable[str] = ()) -> None:
        """Compare the headers with the tensors in memory, by name and shape.

        Args:
            ignored: names on disk that may be there or not.

        Raises:
            ConfigError: with everything that is missing, unexpected or of another shape.
        """
        wanted = {part.name: size for name, shape in shapes.items() for part, size in parts(name, shape, rules)}
        found = self._headers()
        missing = [name for name in wanted if name not in found]
        extra = [name for name in found if name not in wanted and name not in set(ignored)]
        problems = [
            f"model.path = {self.path!r}: {len(names)} tensors are {what}: {_some(names)}"
            for what, names in (("missing", missing), ("not part of the model that config.json describes", extra))
            if names
        ]
        for name, size in wanted.items():
            shape, kind = found.get(name, (size, "F32"))
            if shape != size:
                problems.append(
                    f"model.path = {self.path!r}: {name!r} has shape {list(shape)}, but config.json asks for "
                    f"{list(size)}"
                )
            elif kind not in _FLOATING:
                problems.append(f"model.path = {self.path!r}: {name!r} holds {kind}, not floating-point numbers")
        if problems:
            raise ConfigError(problems)

    @contextmanager
    def reading(self) -> Iterator[Read]:
        """Raises: ConfigError: a file cannot be read."""
        with ExitStack() as stack:
            open_files: dict[Path, safe_open] = {}

            def read(name: str) -> Tensor:
                file = self.where[name]
                if file not in open_files:
                    open_files[file] = stack.enter_context(safe_open(file, "pt"))
                tensor: Tensor = open_files[file].get_tensor(name)  # type: ignore[no-untyped-call]
                return tensor

            try:
                yield read
            except (OSError, SafetensorError) as error:
                raise ConfigError([f"model.path = {self.path!r}: the weights cannot be read: {error}"]) from error

    def _headers(self) -> dict[str, tuple[torch.Size, str]]:
        """Shape and kind of number of every tensor."""
        found = {}
        try:
            for file in sorted(set(self.where.values())):
                with safe_open(file, "pt") as weights:
                    for name in weights.keys():  # noqa: SIM118 (not a mapping)
                        if self.where.get(name) == file:
                            part = weights.get_slice(name)
                            found[name] = (torch.Size(part.get_shape()), str(part.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise ConfigError([f"model.path = {self.path!r}: the weights cannot be read: {error}"]) from error
        return found


def _download(name: str) -> Path:
    """The snapshot of a model on the hub, weights only."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors", INDEX]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError([f"model.path = {name!r} cannot be downloaded: {error}"]) from error


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
