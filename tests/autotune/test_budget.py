"""Budgets of time."""

import pytest
from typer.testing import CliRunner

from autotune import budget, cli


@pytest.mark.parametrize(
    ("text", "seconds"), [("8m", 480), ("90s", 90), ("1h30m", 5400), ("1h5s", 3605), ("2h", 7200), ("1h1m1s", 3661), ("900", 900)]
)
def test_a_budget_is_read_and_written(text: str, seconds: float) -> None:
    assert budget.seconds(text) == seconds
    assert budget.seconds(budget.written(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "0m", "0", "m", "8 m", "-8m", "8min", "30m1h", "1.5h", "1h30", "\u0663m", "\u00b2"])
def test_what_is_no_budget_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="budget: expected a time such as 8m, 90s or 1h30m, got"):
        budget.seconds(text)


@pytest.mark.parametrize("command", [["tune", "chunk"], ["choice"]])
def test_the_commands_refuse_it_in_one_line(command: list[str]) -> None:
    done = CliRunner().invoke(cli.app, [*command, "--budget", "soon"])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.splitlines() == ["error: budget: expected a time such as 8m, 90s or 1h30m, got 'soon'"]
