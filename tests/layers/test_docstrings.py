"""Docstrings of the layers: every argument of a class, and of its documented methods, by name."""

import doctest
import inspect
import re
from typing import Any

import pytest

from gdn import layers

CLASSES = sorted(name for name, value in vars(layers).items() if inspect.isclass(value))


def documented(doc: str, *titles: str) -> set[str]:
    """Names in the sections of these titles of a numpy-style docstring."""
    parts = re.split(r"^([A-Z]\w+)\n-+\n", inspect.cleandoc(doc), flags=re.MULTILINE)
    text = "\n".join(body for title, body in zip(parts[1::2], parts[2::2], strict=True) if title in titles)
    entries = re.findall(r"^(\w[\w., ]*?)(?: : .*)?$", text, flags=re.MULTILINE)
    return {name for entry in entries for name in entry.split(", ")}


def arguments(function: Any) -> set[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds} - {"self", "cls"}


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_is_documented(name: str) -> None:
    made = getattr(layers, name)
    assert arguments(made) <= documented(made.__doc__, "Parameters", "Attributes")
    for method in [one for key, one in vars(made).items() if inspect.isfunction(one) and not key.startswith("_")]:
        assert method.__doc__, method
        if "Parameters\n" in method.__doc__:
            assert arguments(method) <= documented(method.__doc__, "Parameters"), method


def test_examples_run() -> None:
    """Examples of a class are in its docstring."""
    examples = [
        doctest.DocTestParser().get_doctest(getattr(layers, name).__doc__ or "", {}, name, None, None) for name in CLASSES
    ]
    results = [doctest.DocTestRunner().run(one) for one in examples if one.examples]
    assert results and all(result.failed == 0 for result in results)
