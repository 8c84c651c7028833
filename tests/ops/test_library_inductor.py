"""torch.compile with inductor on the CPU, which holds results to the strides that shapes without memory promise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from tests.ops.library_calls import BY_TOKENS, as_tuple, check_same, compiled

Arguments = dict[str, Any]
TOKENS = 6


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same values, the first dim innermost in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def quantize() -> Arguments:
    return {"x": transposed(BY_TOKENS["quantize_fp8"](TOKENS)["x"])}


def prepare(has_cache: bool) -> Arguments:
    arguments = BY_TOKENS["prepare_indexer"](TOKENS)
    arguments |= {name: transposed(arguments[name]) for name in ("q", "k", "weights")}
    if not has_cache:
        arguments |= dict.fromkeys(("k", "k_norm", "cache", "slot_mapping", "v", "v_cache"))
    return arguments


CALLS: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "quantize": ("quantize_fp8", quantize),
    "prepare": ("prepare_indexer", lambda: prepare(True)),
    "prepare without a cache": ("prepare_indexer", lambda: prepare(False)),
    "a pool": ("causal_conv1d_update", lambda: BY_TOKENS["causal_conv1d_update"](TOKENS)),
}


@pytest.mark.parametrize(
    "form", ["quantize", *(pytest.param(form, marks=pytest.mark.cover) for form in CALLS if form != "quantize")]
)
def test_inductor(form: str) -> None:
    name, make = CALLS[form]

    def step(**given: Any) -> tuple[Any, ...]:
        """Work to fuse on either side of the operator."""
        first = next(name for name in ("q", "x") if name in given)
        given[first] = given[first] * 2
        found = getattr(gdn, name)(**given)
        return tuple(None if x is None else x.float() + 1 for x in as_tuple(found))

    plain, given = make(), make()
    expected = step(**plain)
    check_same(compiled(step, "inductor")(**given), given, expected, plain)
