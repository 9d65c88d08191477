"""`prl config`: what a configuration says, what its keys mean, whether it is right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prl_cli.commands.shared import Configs, Json, Sets, Supervised

if TYPE_CHECKING:
    from prl.config.load import LoadedConfig

app = typer.Typer(
    add_completion=False, help="Show, explain or check a configuration.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def group() -> None:
    """Show, explain or check a configuration."""


@app.command("show")
def show(
    configs: Configs,
    sets: Sets = None,
    supervised: Supervised = False,
    changed: Annotated[bool, typer.Option("--changed", help="Only values that are not a default.")] = False,
    json: Json = False,
) -> None:
    """Print every value of the merged configuration, and where it comes from."""
    from prl_cli import output

    loaded = _load(configs, sets, supervised)
    values = loaded.config.model_dump(mode="json")
    origins = {key: str(origin) for key, origin in loaded.origins.items()}
    if json:
        output.emit_json({"config": values, "origins": origins})
        return
    rows = [
        (key, "=", value, f"# {origins[key]}" if key in origins else "")
        for key, value in _flat(values)
        if key in origins or not changed
    ]
    output.table(rows)


@app.command("explain")
def explain(
    key: Annotated[
        str, typer.Argument(metavar="[KEY]", help="A table or a key, such as loop, loop.steps or envs.jsonl.")
    ] = "",
    configs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[CONFIG...]", help="Also show the value there, and the keys of the plugins it uses."),
    ] = None,
    sets: Sets = None,
    supervised: Supervised = False,
    json: Json = False,
) -> None:
    """Say what a key means, its type and its default.

    The keys of a plugin's table depend on the plugin: without a configuration, on the default one. Any other is named
    as in envs.jsonl.
    """
    from prl.config.explain import explain as explained
    from prl.config.schema import RunConfig, SftConfig
    from prl_cli import output

    loaded = _load(configs, sets, supervised) if configs else None
    text = explained(key, loaded, SftConfig if supervised else RunConfig)
    if json:
        output.emit_json({"key": key, "text": text})
    else:
        typer.echo(text, nl=False)


@app.command("check")
def check(configs: Configs, sets: Sets = None, supervised: Supervised = False, json: Json = False) -> None:
    """Check a configuration without starting anything: all problems at once, exit code 2 if there are any, 3 if this
    machine lacks what it needs."""
    from prl import planning
    from prl.errors import ConfigError
    from prl_cli import launching, output

    try:
        loaded = _load(configs, sets, supervised, start=True)
    except ConfigError as error:
        if not json:
            raise
        output.emit_json({"ok": False, "problems": error.problems})
        raise typer.Exit(error.exit_code) from error
    config = loaded.config
    launching.fit(config.launcher.build(), planning.build_plan(config, launching.run_dir(config)))
    if json:
        output.emit_json({"ok": True, "problems": [], "warnings": loaded.warnings, "name": loaded.config.name})
    else:
        typer.echo(f"{', '.join(map(str, configs))}: ok")


def _load(configs: list[Path], sets: list[str] | None, supervised: bool, *, start: bool = False) -> LoadedConfig[Any]:
    from prl_cli.loading import load

    return load(configs, sets, supervised=supervised, start=start)


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys with their values in TOML's spelling."""
    import json

    if isinstance(value, dict) and value:
        return [row for key, item in value.items() for row in _flat(item, f"{prefix}.{key}" if prefix else key)]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [row for index, item in enumerate(value) for row in _flat(item, f"{prefix}.{index}")]
    return [(prefix, json.dumps(value))]
