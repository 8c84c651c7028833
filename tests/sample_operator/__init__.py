"""The sample operator `sample_scale`, with all that a new operator takes.

`files` has its own files at their places; EDITS change lines of the project's."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).parent / "files"
# File -> text that is there -> what it becomes.
EDITS = {
    "gdn/__init__.py": {
        "from gdn.runtime import register as _register\n": (
            "from gdn.ops.sample import OPERATORS as _SAMPLE\n"
            "from gdn.ops.sample.scale import sample_scale as sample_scale\n"
            "from gdn.runtime import register as _register\n"
        ),
        "_ATTENTION, _CONTEXT)": "_ATTENTION, _CONTEXT, _SAMPLE)",
    },
    "README.md": {
        "| a part of each sequence on": "| rows to scale | `sample_scale` |\n| a part of each sequence on",
    },
    "CHANGELOG.md": {"### Added\n": "### Added\n- `sample_scale` scales rows by a gain.\n"},
}
_COPIED = ("gdn", "autotune", "benchmarks", "kernels_tl", "kernels_cute", "tests", "docs", "examples")


def copied(place: Path) -> None:
    """Copies the project."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for name in _COPIED:
        shutil.copytree(ROOT / name, place / name, ignore=ignored)
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, place)


def add(place: Path) -> None:
    """Adds the sample operator to a copy of the project."""
    shutil.copytree(FILES, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in EDITS.items():
        text = (place / name).read_text(encoding="utf-8")
        for old, new in edits.items():
            if text.count(old) < 1:
                raise ValueError(f"{name}: expected {old!r}, which the sample operator's edit replaces")
            text = text.replace(old, new, 1)
        (place / name).write_text(text, encoding="utf-8")


def contents(place: Path) -> dict[str, bytes]:
    """File of the project -> its bytes."""
    folders = [path for name in _COPIED for path in (place / name).rglob("*")]
    files = [path for path in (*folders, *place.glob("*.*")) if path.is_file()]
    hidden = {path for path in files if any(part[0] == "." or part == "__pycache__" for part in path.relative_to(place).parts)}
    return {str(path.relative_to(place)): path.read_bytes() for path in files if path not in hidden}
