"""Output of all commands: errors as one line on stderr, JSON on stdout, tables."""

import functools
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import pydantic_core
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from gdn.runtime import compiled, select

# Errors that a user can fix: a bad value, a missing file or package, a table without an entry, a machine that cannot compile.
_MENDABLE = (ValueError, OSError, ImportError, select.MissingTunedEntry, compiled.CompileError)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class PlainErrors(TyperGroup):
    """Commands whose errors are one line on stderr and exit status 2; other exceptions are faults, with a traceback."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **extra: Any) -> Any:
        """Runs a command and ends the process; without arguments, it prints the help."""
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        _end(functools.partial(super().main, given, prog_name, standalone_mode=False, **extra))


def run_alone(function: Callable[..., None], prog_name: str) -> None:
    """Runs a function as the only command of a program, with the errors of `PlainErrors`, and ends the process."""
    app = typer.Typer(add_completion=False)
    app.command()(function)
    _end(functools.partial(typer.main.get_command(app).main, sys.argv[1:], prog_name, standalone_mode=False))


def _end(run: Callable[[], Any]) -> NoReturn:
    """Runs a command and ends the process with its status."""
    try:
        status = run()
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        fail(message)
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)


def _message(error: Exception) -> str | None:
    """An error in words, or None where it is a fault of the program."""
    format_message = getattr(error, "format_message", None)  # a wrong call, in typer's words
    if callable(format_message):
        return str(format_message())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, _MENDABLE) else None


def fail(message: str) -> None:
    """Prints an error as one line on stderr."""
    typer.secho(f"error: {' '.join(message.split())}", err=True, fg=typer.colors.RED)


def warn(message: str) -> None:
    """Prints a warning on stderr, within the terminal's width."""
    typer.secho(wrapped(f"warning: {message}", Console(stderr=True).width), err=True, fg=typer.colors.YELLOW)


def wrapped(line: str, width: int) -> str:
    """The line within a width; what follows the first row is indented further. Words stay whole, so that they can be copied."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def print_json(value: Any) -> None:
    """Prints a value as JSON on stdout: dataclasses as objects, paths as text, numbers that are none as null."""
    plain = json.loads(pydantic_core.to_json(value, inf_nan_mode="null"))
    typer.echo(json.dumps(plain, indent=1, allow_nan=False))


def table(first: str, *headings: str, left: tuple[str, ...] = (), caption: str | None = None) -> Table:
    """A table of one line a row: the first column may fold, the others are numbers, but for those named in `left`."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    made.add_column(first, overflow="fold")
    for heading in headings:
        made.add_column(heading, no_wrap=True, justify="left" if heading in left else "right")
    return made


def section(made: Table, title: str) -> None:
    """Begins the rows under a title."""
    made.add_section()
    made.add_row(f"[bold]{title}[/]")
