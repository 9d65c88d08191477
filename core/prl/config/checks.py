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
from prl.model_config import model_context


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


def check_start(config: Table) -> list[Problem]:
    """What takes a while to find out, so that only a command that is about to start something asks.

    Raises:
        EnvironmentNotFit: what would have to be asked is not here.
    """
    run = config.run_config() if isinstance(config, ServeConfig) else config
    return list(_engine_would_start(run)) if isinstance(run, RunConfig) else []


def _engine_would_start(config: RunConfig) -> Iterator[Problem]:
    """An engine's schema may say it, as `problems(config)`, with the dotted keys of the whole configuration."""
    problems = getattr(config.engine.plugin_config(), "problems", None)
    if problems is not None:
        for key, message in problems(config):
            yield Problem(key, message)


def _model_exists(config: RunConfig | SftConfig | ServeConfig) -> Iterator[Problem]:
    yield from _model_folder(config.model)


def _model_folder(model: ModelTable) -> Iterator[Problem]:
    """A path that is plainly meant as a folder must be one with a model in it; anything else may be a hub's name."""
    path = Path(model.path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            yield Problem("model.path", f"{path} holds no config.json, so it is no model in the Hugging Face format")
    elif model.path.startswith((".", "/", "~")) or len(path.parts) > 2:
        yield Problem("model.path", f"there is no folder {path}. {_remedy(path)}")


def _remedy(path: Path) -> str:
    where = "" if path.is_absolute() else f"It was looked for in {Path.cwd()}. "
    return f"{where}Make or download the model first, or give a name on the hub, owner/name"


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


def _trainer_takes_the_model(config: RunConfig | SftConfig) -> Iterator[Problem]:
    """A trainer's schema may check, as `model_problems(path, impl)`, whether it can train this model as it says."""
    problems = getattr(config.trainer.plugin_config(), "model_problems", None)
    if problems is not None:
        for key, message in problems(config.model.path, config.model.impl):
            yield Problem(f"trainer.{key}", message)


def _data_has_its_columns(config: SftConfig) -> Iterator[Problem]:
    """A trainer's schema may look, as `data_problems(data)`, at the files of a supervised run that are there."""
    problems = getattr(config.trainer.plugin_config(), "data_problems", None)
    if problems is not None and not any(_data_exists(config)):
        for key, message in problems(config.data):
            yield Problem(f"data.{key}", message)


def _engine_takes_the_sequences(config: RunConfig) -> Iterator[Problem]:
    """An engine's schema may say, as `context`, its key for the longest sequence and how long that is, 0 for as long as
    the model allows."""
    key, wanted = getattr(config.engine.plugin_config(), "context", ("", 0))
    allowed = model_context(config.model.path)
    if wanted and allowed and wanted > allowed:
        yield Problem(
            f"engine.{key}",
            f"is {wanted}, but {config.model.path} knows positions up to {allowed} (max_position_embeddings of its "
            f"config.json): beyond, its answers are noise. Use at most {allowed}",
        )
    context = wanted or allowed
    if context and config.sampling.max_tokens >= context:
        source = f"engine.{key} = {wanted}" if wanted else f"the {allowed} positions that {config.model.path} knows"
        yield Problem(
            "sampling.max_tokens",
            f"is {config.sampling.max_tokens}, which leaves no room for a prompt within {source}: lower it"
            + (f", or raise engine.{key}" if wanted and not 0 < allowed <= wanted else ""),
        )


def _samples_fit_into_rows(config: RunConfig) -> Iterator[Problem]:
    if config.sampling.max_tokens >= config.trainer.row_tokens:
        yield Problem(
            "sampling.max_tokens",
            f"is {config.sampling.max_tokens}, but no sample, prompt included, may be longer than trainer.row_tokens = "
            f"{config.trainer.row_tokens}: answers of full length would fail as too_long. Lower it, or raise that",
        )


def _quantised_engine_is_watched(config: RunConfig) -> Iterator[Problem]:
    """An engine's schema may say, as `quantized`, to what it quantises the weights that it receives."""
    kind = getattr(config.engine.plugin_config(), "quantized", "")
    table = config.mismatch
    if kind and not table.probes:
        yield Problem(
            "mismatch.probes",
            f"is 0 and the engine quantises to {kind}: nothing checks what it made of the weights it received",
            severity="warning",
        )
    if kind and table.action == "warn" and table.correction == "none":
        yield Problem(
            "mismatch.action",
            f'is "warn" and the engine quantises to {kind}: nothing is done about tokens to which it gives other '
            'probabilities. Set mismatch.correction, such as "truncate"',
            severity="warning",
        )


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


def _sleep_disturbs_nobody(config: RunConfig) -> Iterator[Problem]:
    """An engine's schema may say, as `can_sleep`, that it can free its GPU's memory and take it again."""
    if not config.engine.sleep:
        return
    if config.loop.max_staleness:
        yield Problem(
            "engine.sleep",
            f"is true, but with loop.max_staleness = {config.loop.max_staleness} answers are sampled while the trainer "
            "trains, which a sleeping engine cannot do. Set loop.max_staleness = 0, or share the GPU's memory between "
            "both instead, with a smaller engine.gpu_memory_utilization",
        )
    if not getattr(config.engine.plugin_config(), "can_sleep", False):
        yield Problem("engine.sleep", f"is true, but {config.engine.use} cannot free its memory while it runs")


def _channel_joins_gpus(config: RunConfig) -> Iterator[Problem]:
    """A channel's schema may say, as `gpus`, that it goes from GPU to GPU, and the schemas of trainer and engine, as
    `device`, that they use none. Whether this machine has GPUs is the launcher's to say."""
    if getattr(config.channel.plugin_config(), "gpus", "optional") == "optional":
        return
    for side, table in (("trainer", config.trainer), ("engine", config.engine)):
        if getattr(table.plugin_config(), "device", "") == "cpu":
            yield Problem(
                "channel.use",
                f'is "{config.channel.use}", which carries weights from GPU to GPU, and {side}.device is '
                '"cpu": use channel "shm" or "filesystem"',
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
    _trainer_takes_the_model,
    _engine_takes_the_sequences,
    _samples_fit_into_rows,
    _quantised_engine_is_watched,
    _every_update_has_a_group,
    _enough_samples_for_every_rank,
    _concurrency_lets_a_group_run,
    _sleep_disturbs_nobody,
    _channel_joins_gpus,
    _exact_repetition,
    _evaluation_happens,
)
_SFT_RULES: tuple[Callable[[SftConfig], Iterator[Problem]], ...] = (
    _model_exists,
    _trainer_agrees,
    _trainer_takes_the_model,
    _data_exists,
    _data_has_its_columns,
    _updates_are_steps,
)
_SERVE_RULES: tuple[Callable[[ServeConfig], Iterator[Problem]], ...] = (
    _model_exists,
    _engine_has_an_api,
)
