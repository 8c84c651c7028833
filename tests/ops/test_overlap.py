"""Overlaps of strided tensors against the addresses of all their elements."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdn.core import overlap
from gdn.core.overlap import meeting, overlaps_itself, shares_element, span_bytes

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Up to four dims of any strides."""
    dims = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4))
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    return torch.empty(200, dtype=draw(st.sampled_from(DTYPES))).as_strided(shape, strides)


@st.composite
def nested(draw: Any) -> torch.Tensor:
    """A slice, in every dim, of a permuted buffer: what arguments are."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    view = torch.empty(sizes, dtype=draw(st.sampled_from(DTYPES))).permute(draw(st.permutations(range(len(sizes)))))
    for dim, size in enumerate(view.shape):
        start = draw(st.integers(0, size))
        view = view[(slice(None),) * dim + (slice(start, draw(st.integers(start, size)), draw(st.integers(1, 2))),)]
    return view


def elements(tensor: torch.Tensor) -> list[int]:
    """Bytes from the first element to each, in no order."""
    ranges = [[i * stride for i in range(size)] for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [sum(steps) * tensor.element_size() for steps in itertools.product(*ranges)]


def touched(tensor: torch.Tensor, address: int) -> set[int]:
    return {address + start + byte for start in elements(tensor) for byte in range(tensor.element_size())}


@given(tensors(), tensors(), st.integers(-160, 160))
def test_shares_element(first: torch.Tensor, second: torch.Tensor, difference: int) -> None:
    """Exact, to the byte and at any address, aligned or not."""
    expected = bool(touched(first, 4096) & touched(second, 4096 + difference))
    assert shares_element(first, second, 4096, 4096 + difference) == expected
    assert shares_element(second, first, 4096 + difference, 4096) == expected


@given(tensors())
def test_span(tensor: torch.Tensor) -> None:
    assert span_bytes(tensor) == max(touched(tensor, 0), default=-1) + 1


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.booleans()), max_size=8))
def test_meeting(given_spans: list[tuple[int, int, bool]]) -> None:
    """Every pair with a written tensor whose addresses meet, and no other; nothing meets a tensor without elements."""
    spans = [(start, start + count, is_written, number) for number, (start, count, is_written) in enumerate(given_spans)]
    pairs = itertools.permutations(spans, 2)
    assert meeting(spans) == [(a[3], b[3]) for a, b in pairs if a[2] and set(range(*a[:2])) & set(range(*b[:2]))]


@given(tensors())
def test_no_overlap_with_itself_is_missed(tensor: torch.Tensor) -> None:
    found = elements(tensor)
    assert overlaps_itself(tensor) or len(set(found)) == len(found)


@given(nested())
def test_slices_and_transposes_do_not_overlap_themselves(tensor: torch.Tensor) -> None:
    assert not overlaps_itself(tensor)


@given(nested(), st.integers(0, 3))
def test_an_expanded_dim_does(tensor: torch.Tensor, dim: int) -> None:
    wide = tensor.unsqueeze(min(dim, tensor.dim())).expand(*tensor.shape[:dim], 2, *tensor.shape[dim:])
    assert overlaps_itself(wide) == bool(tensor.numel())


def test_an_answer_that_would_take_too_long_is_yes() -> None:
    """A wrong yes is a refusal; a wrong no would cost the data."""
    dims = [7, 11, 13, 17, 19, 23, 29, 31]
    layout = [torch.empty_strided([2] * len(dims), dims, device="meta") for _ in range(2)]
    with mock.patch.object(overlap, "_MAX_WORK", 1):
        assert shares_element(layout[0], layout[1], 4096, 4097)


@pytest.mark.parametrize("expanded", [0, 1])
def test_symbolic_sizes(expanded: int) -> None:
    """A stride of 0 is known while a compiler traces; no size is compared, which would bind the graph to it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    mode = FakeTensorMode(shape_env=environment)
    rows = torch.zeros(1, 5).expand(4, 5) if expanded else torch.zeros(4, 5)
    fake = mode.from_tensor(rows, symbolic_context=context)
    assert overlaps_itself(fake) == bool(expanded)
    assert not environment.guards
