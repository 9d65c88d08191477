"""`prl plugins`: what is installed. The list comes from package metadata and imports no plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from prl_cli.commands.shared import Json

if TYPE_CHECKING:
    from prl.registry import Entry

app = typer.Typer(add_completion=False, help="List, check, install and remove plugins.", rich_markup_mode=None)

Verify = Annotated[
    bool, typer.Option("--verify", help="Import each declaration too: shows its summary, or what is wrong with it.")
]


@app.callback(invoke_without_command=True)
def default(context: typer.Context, verify: Verify = False, json: Json = False) -> None:
    """List, check, install and remove plugins."""
    if context.invoked_subcommand is None:
        list_plugins(None, verify, json)


@app.command("list")
def list_plugins(
    kind: Annotated[str | None, typer.Argument(help="Only this kind, such as envs.")] = None,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """List installed plugins by kind, with the package that brings each."""
    from prl import registry
    from prl.contribution import KINDS
    from prl_cli import output

    kinds = (kind,) if kind else KINDS
    rows = [_row(entry, verify) for each in kinds for entry in registry.names(each).values()]
    if json:
        output.emit_json({"plugins": rows})
        return
    if not rows:
        output.say("no plugins are installed" if kind is None else f"no plugins of the kind {kind} are installed")
        return
    output.table([_cells(row) for row in rows], ("kind", "name", "package", "summary" if verify else ""))


@app.command("check")
def check(
    name: Annotated[str, typer.Argument(help="A plugin's name, KIND/NAME, or ./file.py:Name.")],
    kind: Annotated[
        str | None, typer.Option("--kind", help="Its kind, where several have a plugin of this name.")
    ] = None,
    json: Json = False,
) -> None:
    """Run the contract tests of a plugin's kind on it.

    Its declaration and its implementation are imported. Exit code 0 when it passes, 1 when it does not, 2 when there
    is no such plugin.
    """
    from prl_cli import output
    from prl_cli.plugincheck import check_plugin

    result = check_plugin(name, kind)
    if json:
        output.emit_json(result.as_dict())
    else:
        for step in result.steps:
            typer.secho("ok    " if step.ok else "FAIL  ", fg="green" if step.ok else "red", nl=False)
            typer.echo(f"{step.name}{': ' + step.detail if step.detail else ''}")
    if not result.ok:
        raise typer.Exit(1)


Packages = Annotated[list[str], typer.Argument(metavar="PACKAGE...", help="As pip takes them: a name, a file, a URL.")]


@app.command("install")
def install(
    packages: Packages,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Newer versions of what is installed, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be installed.")] = False,
    json: Json = False,
) -> None:
    """Install packages into prl's own environment and show the plugins they bring.

    The versions of torch, transformers and prl itself are kept: a package that cannot live with them is refused.
    """
    from prl_cli import installing

    _report("installed", installing.install(packages, upgrade=upgrade, dry_run=dry_run), json, quiet=dry_run)


@app.command("uninstall")
def uninstall(packages: Packages, json: Json = False) -> None:
    """Remove packages that provide plugins."""
    from prl_cli import installing

    _report("removed", installing.uninstall(packages), json)


def _report(what: str, plugins: list[tuple[str, str, str]], json: bool, *, quiet: bool = False) -> None:
    from prl_cli import output

    if json:
        rows = [{"kind": kind, "name": name, "package": package} for kind, name, package in plugins]
        output.emit_json({what: rows})
        return
    for kind, name, package in plugins:
        typer.echo(f"{what} {kind}/{name} ({package})")
    if not plugins and not quiet:
        output.warn(f"no plugin was {what}: `prl plugins` shows what there is")


def _row(entry: Entry, verify: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": entry.kind,
        "name": entry.name,
        "package": entry.distribution,
        "version": entry.version,
        "value": entry.value,
        "summary": "",
        "problem": f"also provided by {', '.join(entry.others)}" if entry.others else "",
    }
    if verify and not entry.others:
        from prl import registry
        from prl.errors import PluginError

        try:
            row["summary"] = registry.describe(entry.kind, entry.name).summary
        except PluginError as error:
            row["problem"] = str(error)
    return row


def _cells(row: dict[str, Any]) -> list[str]:
    note = f"BROKEN: {row['problem']}" if row["problem"] else row["summary"]
    return [row["kind"], row["name"], f"{row['package']} {row['version']}".strip(), note]
