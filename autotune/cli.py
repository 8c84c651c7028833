"""`python -m autotune`: tune, choice, show."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from autotune import moved
from autotune.choice_command import choice
from autotune.console import AsJson, console
from autotune.tune_command import tune
from gdn.cli.plain import PlainErrors, print_json
from gdn.runtime import env, registry, tuned

app = typer.Typer(cls=PlainErrors, help="Find the fastest kernel configurations, and check the choice between kernels.")
moved.add_to(app)
app.command()(tune)
app.command()(choice)


@app.command()
def show(
    op: Annotated[str | None, typer.Argument(help="An operator; all if left out.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of tables; GDN_TUNED_DIR and the shipped ones if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the tuned tables."""
    console.stderr = as_json  # progress and remarks leave stdout to JSON
    op = registry.operator(op).name if op is not None else None
    if folder is not None and not folder.is_dir():
        raise ValueError(f"folder: expected a folder of tables, got {folder}")
    own = env.current().tuned_dir
    folders = [folder] if folder is not None else [*([own] if own is not None else []), tuned.SHIPPED]
    paths = [path for one in folders for path in sorted(one.glob("*/*.json")) if op in (None, path.name.split(".")[0])]
    if as_json:
        print_json([{"path": path, **tuned.read(path).plain()} for path in paths])
        return
    for path in paths:
        content = tuned.read(path)
        header = content.header
        title = f"{header.op}.{header.backend} on {header.device}, {', '.join(header.runs)}"
        shown = Table("sizes", "configuration", "time, us", "error", title=title, caption=str(path))
        for group in content.groups:
            shown.add_row(_listed(group.static), "", "", "", style="dim")
            for entry in group.entries:
                error = f"{entry.error:.1e}" if entry.error is not None else "-"
                shown.add_row(_listed(entry.sizes), _listed(entry.config), f"{entry.time_us:.1f}", error)
        console.print(shown)
    if not paths:
        console.print(f"No tuned table{f' of {op}' if op else ''} in {', '.join(map(str, folders))}.", markup=False)


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def main() -> None:
    app(prog_name="python -m autotune")
