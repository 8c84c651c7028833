"""The commands. Each has its own module, which is imported when the command is called or listed."""

import importlib
from typing import Annotated, Any

import typer

import gdn
from gdn.cli.plain import PlainErrors

# Command -> (module, function, the line that `gdn --help` shows).
COMMANDS: dict[str, tuple[str, str, str]] = {
    "demo": ("gdn.cli.demo.command", "demo", "Run a hybrid model: prefill, drafts, decode; check every operator."),
    "env": ("gdn.cli.env", "env_command", "Print every environment switch, its value and what it changes."),
    "explain": ("gdn.cli.explain", "explain_command", "Say which kernels and tiles an operator would run, and why."),
    "doctor": ("gdn.cli.doctor", "doctor_command", "Check that this machine has what the kernels need."),
    "compile": ("gdn.cli.compile", "compile_command", "Build every kernel that a model can reach into a folder, without a GPU."),
    "tune": ("gdn.cli.tune", "tune_command", "Find the fastest tiles of an operator or a model, and write the tables."),
}
# Commands of another program: it reads all of the arguments, --help too.
_HANDED_OVER = {
    "tune": {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
}


class LazyGroup(PlainErrors):
    """Commands by name; a command's module is imported when the command is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, function, summary = entry
        single = typer.Typer(add_completion=False)
        register = single.command(cmd_name, short_help=summary, context_settings=_HANDED_OVER.get(cmd_name))
        register(getattr(importlib.import_module(module), function))
        return typer.main.get_command(single)


app = typer.Typer(cls=LazyGroup, add_completion=False, help="Inference kernels and layers of hybrid models for Hopper.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gdn-kernels {gdn.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Parent of the commands; does nothing itself."""


def main() -> None:
    """The entry point."""
    app(prog_name="gdn")
