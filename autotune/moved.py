"""Commands of the tuner that are `python -m benchmarks SUBJECT` now: for one release their old names say so."""

import typer

SUBJECTS = {"bench": "ops", **{name: name for name in ("layers", "ranks", "context", "accuracy", "selection")}}
_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_to(app: typer.Typer) -> None:
    """Adds the old names as hidden commands that take any arguments, --help too."""
    for name in SUBJECTS:
        app.command(name, hidden=True, add_help_option=False, context_settings=_ANY_ARGUMENTS)(_refuse)


def _refuse(context: typer.Context) -> None:
    old = str(context.info_name)
    raise ValueError(f"`python -m autotune {old}` is now `python -m benchmarks {SUBJECTS[old]}`, in a checkout of the project")
