"""`gdn env`: every switch, its value, where it came from, and what it changes."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdn.runtime import env


def shown(value: Any) -> str:
    """A switch's value as it would be written in a shell."""
    if value is None:
        return "unset"
    return str(int(value)) if isinstance(value, bool) else str(value)


def env_command() -> None:
    """Print every environment switch, its value, where it came from, and what it changes."""
    switches = env.reload()
    console = Console()
    table = Table(title="Environment switches", title_justify="left", show_lines=True)
    # Names stay whole at 80 columns: that is what one copies.
    table.add_column("switch, value (where it came from)", min_width=max(map(len, env.DECLARATIONS)), overflow="fold")
    table.add_column("what it changes, what it takes")
    for name, declaration in env.DECLARATIONS.items():
        given = name in switches.given
        source = "environment" if given else "default"
        left = Text(f"{name}\n  {shown(switches.value(name))} ({source})", style="bold" if given else "")
        right = Text(declaration.effect)
        if reason := env.no_effect(name):
            right.append(f"\n{reason}", style="yellow")
        table.add_row(left, right.append(f"\ntakes {declaration.accepted}", style="dim"))
    console.print(table)
    console.print(
        "Precedence: argument > GDN_BACKEND_<OP> > VLLM_* > GDN_BACKEND > tuned table > built-in order. The first two are "
        "orders and raise where they cannot run; the others are preferences and fall through."
    )
    console.print(f"Left to the serving stack: {', '.join(sorted(env.SERVING_STACK_NAMES))}")
