"""Output of all commands: errors as one line on stderr, and JSON on stdout."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from gdn.runtime import compiled, select

# Errors that a user can fix: a bad value, a missing file or package, a table without an entry, a machine that cannot compile.
_MENDABLE = (ValueError, OSError, ImportError, select.MissingTunedEntry, compiled.CompileError)


class PlainErrors(TyperGroup):
    """Commands whose errors are one line on stderr and exit status 2; other exceptions are faults, with a traceback."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **extra: Any) -> Any:
        """Runs a command and ends the process; without arguments, it prints the help."""
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            status = super().main(given, prog_name, standalone_mode=False, **extra)
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


def print_json(value: Any) -> None:
    """Prints a value as JSON on stdout: dataclasses as objects, paths as text, numbers that are none as null."""
    typer.echo(json.dumps(_jsonable(value), indent=1, allow_nan=False))


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
