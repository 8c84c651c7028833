"""The commands. Each lives in its own module, which is imported when the command is called or listed."""

import importlib
import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

# Command -> (module, function, the line that `gdn --help` shows).
COMMANDS: dict[str, tuple[str, str, str]] = {
    "demo": ("gdn.cli.demo", "demo", "Run a Qwen3-Next-shaped block and check every operator."),
    "env": ("gdn.cli.env", "env_command", "Print every environment switch, its value and what it changes."),
    "explain": ("gdn.cli.explain", "explain_command", "Say which kernel and tiles an operator would run, and why."),
    "doctor": ("gdn.cli.doctor", "doctor_command", "Check that this machine has what the kernels need."),
}


class LazyGroup(TyperGroup):
    """Commands by name; a command's module is imported when the command is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, function, summary = entry
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, short_help=summary)(getattr(importlib.import_module(module), function))
        return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Gated DeltaNet and QSA-indexer kernels for Hopper.",
)


@app.callback()
def _root() -> None:
    """Holds the commands; has nothing of its own to do."""


def main() -> None:
    """The entry point: an error that the user can mend is one line, not a traceback."""
    try:
        app()
    except (ValueError, LookupError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
