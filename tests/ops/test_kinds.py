"""Kinds of arguments from annotations; the words of `backend` are written once."""

import inspect
from typing import Any, Literal, get_args, get_type_hints

import pytest
import torch

import gdn
import gdn.distributed
from gdn.core import kinds
from gdn.runtime import registry

NAMES = sorted({name for operator in registry.OPERATORS.values() for name in operator.functions})
FUNCTIONS = [
    *(getattr(gdn, name) for name in NAMES if not name.startswith("fp8_")),  # vLLM's signatures, without a backend
    gdn.distributed.chunk_gated_delta_rule,
    gdn.distributed.causal_conv1d_fn,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_every_backend_is_one_of_three_words(function: Any) -> None:
    assert get_type_hints(function)["backend"] == registry.Backend | None
    documented = "{" + ", ".join(f'"{word}"' for word in get_args(registry.Backend)) + "}, optional"
    is_repeated = function.__module__.startswith("gdn.distributed")  # whose docstrings refer to the operators'
    assert is_repeated or f"backend : {documented}" in inspect.getdoc(function)


def test_schemas_take_words_as_text() -> None:
    assert "str? backend=None" in str(torch.ops.gdn.topk_indices.default._schema)


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (registry.Backend | None, kinds.Kind(str, True)),
        (Literal["a", "b"], kinds.Kind(str, False)),
        (Literal[1, 2] | None, kinds.Kind(int, True)),
        (float | None, kinds.Kind(float, True)),
        (torch.Tensor, kinds.Kind(torch.Tensor, False)),
    ],
)
def test_a_kind(annotation: Any, kind: kinds.Kind) -> None:
    assert kinds.kind_of(annotation) == kind


@pytest.mark.parametrize("annotation", [int | str, list, Literal["a"] | int])
def test_no_kind(annotation: Any) -> None:
    with pytest.raises(TypeError, match="expected an annotation of one kind"):
        kinds.kind_of(annotation)


def test_another_word_is_refused_by_name() -> None:
    backend: Any = "triton"
    with pytest.raises(ValueError, match="backend: expected 'tilelang', 'cute', 'reference' or None, got 'triton'"):
        gdn.topk_indices(torch.zeros(2, 9), 2, backend=backend)
