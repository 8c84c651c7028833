"""`gdn tune`: the tuner's `tune`, found by name; it is a package of its own, next to gdn."""

import importlib
import importlib.util
from pathlib import Path

import typer

from gdn.runtime import source

_TUNER = "autotune"


def tuner_folder() -> Path:
    """Folder of the tuner that was installed with gdn.

    Raises
    ------
    ImportError
        Where it is missing, or where Python finds another package of its name first.
    """
    own = source.ROOT / _TUNER
    if not (own / "__init__.py").is_file():
        raise ImportError(f"The tuner is not installed: expected the package {_TUNER} next to gdn, in {source.ROOT}")
    try:
        spec = importlib.util.find_spec(_TUNER)
    except ValueError:  # a module of this name that something else put into sys.modules
        spec = None
    places = [] if spec is None else [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or ())
    found = Path(places[0]) if places else None
    if found is None:
        raise ImportError(f"The tuner cannot be imported: {own.parent} is not on Python's path")
    if not found.is_file() or not found.samefile(own / "__init__.py"):
        mend = "start from another folder, or take that one off Python's path"
        raise ImportError(f"The tuner is {own}, but Python finds another package of the name {_TUNER} first: {found} ({mend})")
    return own


def tune_command(context: typer.Context) -> None:
    """Runs `tune` of the tuner with the same arguments, and ends the process with its status."""
    tuner_folder()
    importlib.import_module(f"{_TUNER}.cli").app(["tune", *context.args], prog_name="gdn")
