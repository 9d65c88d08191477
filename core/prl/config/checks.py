"""Rules that concern more than one table, or the files that a configuration names.

The schema knows each key alone; what follows knows them together. `check` is run on every configuration before
anything starts. An error refuses the run, a warning is shown. A new rule is a function of the configuration that yields
problems, added to `_RUN_RULES`, `_SFT_RULES` or `_SERVE_RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from prl.config.compose import Problem
from prl.config.schema import ModelTable, RunConfig, ServeConfig, SftConfig, Table


def check(config: Table) -> list[Problem]:
    """Every problem of a configuration whose tables are valid one by one."""
    if isinstance(config, RunConfig):
        return [problem for rule in _RUN_RULES for problem in rule(config)]
    if isinstance(config, ServeConfig):
        return [problem for rule in _SERVE_RULES for problem in rule(config)]
    if isinstance(config, SftConfig):
        return [problem for rule in _SFT_RULES for problem in rule(config)]
    return []


def _there_is_an_environment(config: RunConfig) -> Iterator[Problem]:
    if not config.envs:
        yield Problem("envs", "needs at least 1 environment: [[envs]] with use = ...")


def _model_exists(config: RunConfig | SftConfig | ServeConfig) -> Iterator[Problem]:
    yield from _model_folder(config.model)


def _model_folder(model: ModelTable) -> Iterator[Problem]:
    """A path that is plainly meant as a folder must be one with a model in it; anything else may be a hub's name."""
    path = Path(model.path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            yield Problem("model.path", f"{path} holds no config.json, so it is no model in the Hugging Face format")
    elif model.path.startswith((".", "/", "~")) or len(path.parts) > 2:
        yield Problem("model.path", f"there is no folder {path}")


def _groups_can_be_compared(config: RunConfig) -> Iterator[Problem]:
    """An algorithm's schema may state how many scored episodes its baseline needs, as a class variable."""
    least = getattr(config.algorithm.plugin_config(), "min_members", 1)
    if config.loop.group_size < least:
        yield Problem(
            "loop.group_size",
            f"is {config.loop.group_size}, but {config.algorithm.use} compares at least {least} episodes of a task",
        )


def _trainer_agrees(config: RunConfig | SftConfig) -> Iterator[Problem]:
    """A trainer's schema may check, as `problems(processes)`, whether it can use so many processes."""
    problems = getattr(config.trainer.plugin_config(), "problems", None)
    if problems is not None:
        for key, message in problems(config.trainer.processes):
            yield Problem(f"trainer.{key}", message)


def _enough_samples_for_every_rank(config: RunConfig) -> Iterator[Problem]:
    """A trainer's schema may say, as `cp`, how many of its processes share the same samples."""
    samples = config.loop.groups_per_step * config.loop.group_size // config.trainer.updates_per_batch
    if samples < config.trainer.processes // getattr(config.trainer.plugin_config(), "cp", 1):
        yield Problem(
            "trainer.processes",
            f"is {config.trainer.processes}, but an optimiser step has {samples} episodes (loop.groups_per_step x "
            "loop.group_size / trainer.updates_per_batch), so some ranks would have nothing to do",
        )


def _every_update_has_a_group(config: RunConfig) -> Iterator[Problem]:
    updates, groups = config.trainer.updates_per_batch, config.loop.groups_per_step
    if updates > groups:
        yield Problem(
            "trainer.updates_per_batch",
            f"is {updates}, but a batch has {groups} groups (loop.groups_per_step), and each goes into one update",
        )


def _updates_are_steps(config: SftConfig) -> Iterator[Problem]:
    if config.trainer.updates_per_batch > 1:
        yield Problem(
            "trainer.updates_per_batch",
            f"is {config.trainer.updates_per_batch}, but a supervised step is one update of data.batch_size examples",
        )


def _concurrency_lets_a_group_run(config: RunConfig) -> Iterator[Problem]:
    limit, size = config.loop.max_concurrency, config.loop.group_size
    if limit != "auto" and 0 < limit < size:
        yield Problem(
            "loop.max_concurrency",
            f"is {limit}, fewer than the {size} episodes of one group, which then run one after another",
            severity="warning",
        )


def _exact_repetition(config: RunConfig) -> Iterator[Problem]:
    """An engine's schema may say, as `repeatable`, whether its results depend on what is computed beside them."""
    if config.loop.max_staleness == 0 and not getattr(config.engine.plugin_config(), "repeatable", True):
        yield Problem(
            "engine",
            f"with these settings {config.engine.use} samples otherwise each time, so this synchronous run does not "
            "repeat bit for bit",
            severity="warning",
        )


def _evaluation_happens(config: RunConfig) -> Iterator[Problem]:
    if config.eval.every and not config.eval.tasks:
        yield Problem("eval.every", "has no effect while eval.tasks is 0", severity="warning")


def _engine_has_an_api(config: ServeConfig) -> Iterator[Problem]:
    """An engine's schema says it by having the key `api_port`."""
    if "api_port" not in type(config.engine.plugin_config()).model_fields:
        yield Problem(
            "engine.use",
            f"{config.engine.use!r} answers the other roles of a run alone, it has no HTTP interface: serve with an "
            'engine that has one, such as "vllm" (--engine vllm)',
        )


def _data_exists(config: SftConfig) -> Iterator[Problem]:
    """A path that is plainly meant as one of this machine must be there; anything else may be a hub's name."""
    for key in ("train", "eval"):
        for index, source in enumerate(getattr(config.data, key)):
            path = Path(source.path).expanduser()
            meant = source.path.startswith((".", "/", "~")) or len(path.parts) > 2 or path.suffix in _DATA_FILES
            if not path.exists() and (meant or source.format in ("jsonl", "parquet")):
                yield Problem(f"data.{key}.{index}.path", f"there is no file {source.path}")


_DATA_FILES = (".jsonl", ".json", ".ndjson", ".parquet")


_RUN_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _there_is_an_environment,
    _model_exists,
    _groups_can_be_compared,
    _trainer_agrees,
    _every_update_has_a_group,
    _enough_samples_for_every_rank,
    _concurrency_lets_a_group_run,
    _exact_repetition,
    _evaluation_happens,
)
_SFT_RULES: tuple[Callable[[SftConfig], Iterator[Problem]], ...] = (
    _model_exists,
    _trainer_agrees,
    _data_exists,
    _updates_are_steps,
)
_SERVE_RULES: tuple[Callable[[ServeConfig], Iterator[Problem]], ...] = (
    _model_exists,
    _engine_has_an_api,
)
