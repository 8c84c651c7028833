"""The timing of context-parallel prefill runs on gloo processes, and its table compares with one rank."""

from dataclasses import replace

import pytest

from benchmarks import context
from gdn.layers.named import NAMED


@pytest.mark.cover
def test_every_form_runs_on_two_processes() -> None:
    forms = tuple(replace(form, tokens=256) for form in context.FORMS)
    job = context.Job(config=NAMED["tiny"], forms=forms, device_type="cpu")
    found = {size: context.measure(size, job) for size in (1, 2)}
    assert all(len(times) == len(forms) and min(times) > 0 for times in found.values())


def test_rows_compare_with_one_rank() -> None:
    rows = context.rows({1: [200.0, 100.0, 90.0], 2: [150.0, 80.0, 45.0]})
    assert [(row.ranks, row.faster, row.must, row.passed) for row in rows] == [
        (1, 1.0, None, True), (2, 200 / 150, 1.15, True), (1, 1.0, None, True), (2, 1.25, 1.7, False), (1, 1.0, None, True),
        (2, 2.0, 1.7, True),
    ]  # fmt: skip
