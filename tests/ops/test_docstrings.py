"""Docstrings of the public operators: numpy style, every parameter by name, and examples that run."""

import doctest
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import gdn

OPERATORS = [name for name in gdn.__all__ if callable(getattr(gdn, name)) and name not in ("explain", "warmup")]
COMPATIBLE = ("fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata")  # DeepGEMM's signatures: no backend


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """Title -> text of the sections of a numpy-style docstring."""
    doc = inspect.getdoc(function)
    assert doc is not None
    parts = re.split(r"^([A-Z]\w+)\n-+\n", doc, flags=re.MULTILINE)
    assert parts[0].strip(), "a summary comes first"
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_every_parameter_is_documented_in_order(name: str) -> None:
    function = getattr(gdn, name)
    headings = re.findall(r"^(\w[\w, ]*?) : ", sections(function)["Parameters"], flags=re.MULTILINE)
    documented = [parameter for heading in headings for parameter in heading.split(", ")]
    assert documented == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", OPERATORS)
def test_results_errors_sources_and_the_backend_are_documented(name: str) -> None:
    function = getattr(gdn, name)
    found = sections(function)
    assert "TypeError, ValueError\n    " in found["Raises"]
    assert name == "get_paged_mqa_logits_metadata" or "[1]" in found["References"]
    assert ("Returns" in found) == (inspect.signature(function).return_annotation is not None)
    if name not in COMPATIBLE:
        assert '{"tilelang", "cute", "reference"}' in found["Parameters"] and "GDN_BACKEND" in found["Parameters"]


@pytest.mark.parametrize("name", [*OPERATORS, "explain", "warmup"])
def test_examples_run(name: str) -> None:
    function = getattr(gdn, name)
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(function) or "", {}, name, None, None)
    result = doctest.DocTestRunner().run(examples)
    assert result.failed == 0
    assert (result.attempted > 0) == ("Examples" in sections(function))
