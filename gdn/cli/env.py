"""`gdn env`: every switch with its value, origin and effect."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdn.cli.plain import AsJson, print_json
from gdn.runtime import env

PRECEDENCE = "argument > GDN_BACKEND_<OP> > VLLM_* > GDN_BACKEND > tuned table > built-in order"


def shown(value: Any) -> str:
    """A switch's value as it would be written in a shell."""
    if value is None:
        return "unset"
    return str(int(value)) if isinstance(value, bool) else str(value)


def env_command(as_json: AsJson = False) -> None:
    """Print every environment switch, its value, where it came from, and what it changes."""
    switches = env.reload()
    if as_json:
        print_json(report(switches))
        return
    console = Console()
    table = Table(title="Environment switches", title_justify="left", show_lines=True)
    # Names must not wrap at 80 columns, so that they can be copied.
    table.add_column("switch, value (origin)", min_width=max(map(len, env.DECLARATIONS)), overflow="fold")
    table.add_column("effect, valid values")
    for switch in report(switches)["switches"]:
        style = "bold" if switch["source"] == "environment" else ""
        left = Text(f"{switch['name']}\n  {shown(switch['value'])} ({switch['source']})", style=style)
        right = Text(switch["effect"])
        if switch["no_effect"]:
            right.append(f"\n{switch['no_effect']}", style="yellow")
        table.add_row(left, right.append(f"\nvalid: {switch['takes']}", style="dim"))
    console.print(table)
    console.print(
        f"Precedence: {PRECEDENCE}. The first two raise where their backend cannot run; the others are preferences, and the next "
        "backend runs."
    )
    console.print(f"Read by the serving stack only: {', '.join(sorted(env.SERVING_STACK_NAMES))}")


def report(switches: env.Switches) -> dict[str, Any]:
    """Every switch with its value, source and effect, as data."""
    listed = [
        {
            "name": name, "value": switches.value(name), "default": declaration.default,
            "source": "environment" if name in switches.given else "default", "effect": declaration.effect,
            "no_effect": env.no_effect(name),  # reason why it has no effect yet
            "takes": declaration.accepted,
        }
        for name, declaration in env.DECLARATIONS.items()
    ]  # fmt: skip
    return {"switches": listed, "precedence": PRECEDENCE, "left_to_the_serving_stack": sorted(env.SERVING_STACK_NAMES)}
