"""Commands that cost nothing until they are invoked.

A group holds a stub for every command of its table, so that help, completion and "did you mean" know the names. When
one is resolved, its module is imported and the real command takes the stub's place. Commands of other packages come
from an entry-point group: their names are metadata, their code is imported when invoked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from prl_cli import failure


@dataclass(frozen=True)
class LazyCommand:
    """Where a command lives ("package.module:attribute", a function or a `typer.Typer`) and its line in the help."""

    target: str
    summary: str


class LazyGroup(TyperGroup):
    """A group whose commands are imported one by one. Errors that prl raises on purpose end here."""

    table: ClassVar[dict[str, LazyCommand]] = {}
    entry_points: ClassVar[str] = ""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._markup: Any = self.rich_markup_mode
        self._foreign: dict[str, Any] | None = None
        for name, command in self.table.items():
            self.commands[name] = self._stub(name, command.summary)

    def invoke(self, ctx: Any) -> Any:
        with failure.reported():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_foreign()
        return [*self.table, *sorted(set(self.commands) - set(self.table))]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        with failure.reported():
            if name in self.table:
                self.commands[name] = self._command(name, _load(self.table[name].target))
            elif name:
                self._add_foreign()
                if self._foreign and name in self._foreign:
                    self.commands[name] = self._command(name, _load_foreign(name))
        return super().resolve_command(ctx, args)

    def _add_foreign(self) -> None:
        """List the commands of other packages from their metadata; one cannot take the name of ours."""
        if self._foreign is not None or not self.entry_points:
            return
        from importlib.metadata import entry_points

        self._foreign = {point.name: point for point in entry_points(group=self.entry_points)}
        for name, point in self._foreign.items():
            if name not in self.table:
                origin = f"From {point.dist.name} {point.dist.version}." if point.dist else "From another package."
                self.commands.setdefault(name, self._stub(name, origin))

    def _stub(self, name: str, summary: str) -> Any:
        def stub() -> None: ...

        stub.__doc__ = summary
        return self._command(name, stub)

    def _command(self, name: str, target: Any) -> Any:
        """The command object of a function or an application, under the name it has here."""
        if isinstance(target, typer.Typer):
            command = typer.main.get_command(target)
        else:
            app = typer.Typer(add_completion=False, rich_markup_mode=self.rich_markup_mode)
            app.command()(target)
            command = typer.main.get_command(app)
        command.name = name
        return command


def _load(target: str) -> Callable[..., Any] | typer.Typer:
    module, _, attribute = target.partition(":")
    loaded: Callable[..., Any] | typer.Typer = getattr(importlib.import_module(module), attribute)
    return loaded


def _load_foreign(name: str) -> Any:
    """The application of another package's command: its contribution's factory returns it."""
    from prl import registry

    return registry.build("commands", name, {})
