"""The kind `prl.models`: a provider makes a `PackedModel` of a folder, and knows the names its weights have on disk.

A plugin named after a model type ("qwen3") takes the models of that type when `model.impl` is "auto" or "custom";
"hf" takes any that transformers can run without a state along the row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from prl.errors import ConfigError, EnvironmentNotFit, PluginError, PluginMissing
from prl_models.batch import PackedBatch
from prl_models.options import Kernels, KernelUnfit, ModelOptions

log = logging.getLogger(__name__)

Place = Callable[[Tensor, Tensor], Tensor]
"""This rank's part of a whole tensor, placed as another tensor is."""
Gather = Callable[[Tensor], Tensor]
"""Makes a whole tensor of a sharded one; the identity where nothing is sharded."""


class PackedModel(Protocol):
    """A causal language model over packed documents; an `nn.Module` with float32 parameters after loading.

    `vocab_size` bounds token ids. `blocks` are the repeated layers, the units of sharding and recomputation. `casts`:
    it converts float32 weights to the precision of the forward pass where it uses them, so that one process needs no
    second copy. `kernels` are those it took.
    """

    vocab_size: int
    casts: bool
    kernels: Kernels

    @property
    def blocks(self) -> list[nn.Module]: ...

    def __call__(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities f32[N] and entropies f32[N] of `batch.targets`, both differentiable."""
        ...

    def fill(self, place: Place) -> None:
        """After `ModelOptions.deferred` and sharding: read every parameter that is still without a value from the
        folder, one at a time; `place(whole, like)` makes this rank's part. Nothing to do for a model that is loaded."""
        ...

    def stored(self) -> AbstractContextManager[Callable[[str], Tensor]]:
        """Of a model that was built on `meta` and not filled: reads the value that the folder has for a parameter or
        buffer of a name, whole, on the host.

        Raises:
            ConfigError: the folder does not hold this model.
        """
        ...

    def disk_tensors(self, gather: Gather) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) as in a Hugging Face folder, tied weights once, each tensor gathered when it is reached."""
        ...


class ModelProvider(Protocol):
    def load(self, path: str, options: ModelOptions) -> PackedModel:
        """A model from a folder in the Hugging Face format, or a name on a hub, with float32 parameters.

        Raises:
            EnvironmentNotFit: this provider cannot pack documents for this model.
        """
        ...


def load_model(path: str, impl: str, options: ModelOptions) -> PackedModel:
    """Load with the provider that `impl` ("auto", "custom", "hf") means for this model. With "auto" a family that
    refuses the model leaves it to "hf".

    Raises:
        ConfigError: no such folder, or no plugin for the model where `impl` is "custom".
        EnvironmentNotFit: the provider cannot take the model.
    """
    name, reason = choose(path, impl)
    try:
        model = _provider(name).load(path, options)
    except EnvironmentNotFit as error:
        if impl != "auto" or name == "hf" or isinstance(error, KernelUnfit):
            raise
        name, reason = "hf", f"the {name} implementation refuses the model: {error}"
        model = _provider(name).load(path, options)
    code = "transformers' own code" if name == "hf" else f"own {name} implementation"
    log.info("model: %s, because %s", code, reason)
    return model


def choose(path: str, impl: str) -> tuple[str, str]:
    """The name of a provider, and why it was chosen.

    Raises:
        ConfigError: no such folder, or no plugin for the model where `impl` is "custom".
    """
    if impl == "hf":
        return "hf", 'model.impl = "hf"'
    from prl import registry

    kind = model_type(path)
    try:
        registry.describe("models", kind)
    except PluginMissing as error:
        if impl == "custom":
            raise ConfigError([f'model.impl = "custom", but no plugin knows {kind!r} ({path}): {error}']) from error
        return "hf", f"no plugin knows {kind!r}"
    except PluginError as error:
        if impl == "custom":
            raise ConfigError(
                [f'model.impl = "custom", but the plugin for {kind!r} cannot be used: {error}']
            ) from error
        return "hf", f"the plugin for {kind!r} cannot be used: {error}"
    return kind, f"model_type is {kind!r}"


def _provider(name: str) -> ModelProvider:
    from prl import registry

    provider: ModelProvider = registry.build("models", name, {})
    return provider


def model_type(path: str) -> str:
    """The `model_type` of a folder's config.json, or of a model on the hub."""
    return str(read_config(path).get("model_type", ""))


def read_config(path: str) -> dict[str, Any]:
    """Raises: ConfigError: a local folder without a readable config.json."""
    folder = Path(path)
    if folder.is_dir():
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError([f"model.path: {folder / 'config.json'} cannot be read ({error})"]) from error
        return dict(config)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError([f"model.path: there is no folder {path!r}"])
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(path).to_dict())
