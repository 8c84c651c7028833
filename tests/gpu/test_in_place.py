"""Calls in place, as engines do: convolutions that write their input, and a layer's two states in the pages of one buffer.

Everything is compared bit for bit with a call whose tensors are memory of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_inputs, recurrent_inputs
from gdn.testing.compare import same_bits
from tests.gpu import cases, test_gdn_decode, test_recurrent, test_steps
from tests.gpu.chunk import FUNCTION as CHUNK
from tests.gpu.delta_rule import Arguments, backends
from tests.gpu.test_recurrent import FUNCTION as RECURRENT
from tests.gpu.twins import are_same, copy_of, outcome, twin, whole

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
CONV = [*backends("conv1d"), "reference"]
CONV_UPDATE = [*backends("conv1d_update"), "reference"]
DECODE = [*backends("gdn_decode"), "reference"]


# --- out=x -------------------------------------------------------------------------------------------------------------


def check_in_place(function: str, state: str, arguments: Arguments, backend: str) -> None:
    """Three times each: calls that are repeated may take another way through the operator."""
    operator = getattr(gdn, function)
    for _ in range(3):
        apart, given = twin(arguments), twin(arguments)
        given["out"] = given["x"]
        around = copy_of(given["x"])
        operator(**apart, backend=backend)
        assert operator(**given, backend=backend) is given["x"]
        assert same_bits(given["x"], apart["out"])
        assert same_bits(whole(given[state]), whole(apart[state]))
        around.copy_(apart["out"])
        assert same_bits(whole(given["x"]), whole(around)), "written outside of x"


ORDERS = pytest.mark.parametrize("order", ["channels", "columns", "neither"])


@pytest.mark.parametrize("backend", CONV)
@pytest.mark.parametrize("checkpoints", [0, 2])
@ORDERS
def test_prefill(order: str, checkpoints: int, backend: str, device: torch.device) -> None:
    """Sequences of one tile and of several, whose first rows need the last ones of the tile before."""
    for lengths in ((5, 1, 0, 2, 70, 3, 33, 4), (300, 2, 130, 64, 1, 257)):
        if checkpoints and len(lengths) < 8:
            continue
        arguments = test_steps.prefill(test_steps.Case(order=order, lengths=lengths), device, checkpoints=checkpoints)
        check_in_place("causal_conv1d_fn", "conv_states", arguments, backend)


@pytest.mark.parametrize("backend", CONV)
def test_prefill_of_a_long_row(backend: str, device: torch.device) -> None:
    case = test_steps.Case(lengths=(500, 300, 1), dim=8192, padding=0)
    check_in_place("causal_conv1d_fn", "conv_states", test_steps.prefill(case, device, dead=()), backend)


@pytest.mark.parametrize("backend", CONV_UPDATE)
@pytest.mark.parametrize(("spec", "tree"), [(None, False), (4, False), (4, True)], ids=["plain", "drafts", "tree"])
@ORDERS
def test_update(order: str, spec: int | None, tree: bool, backend: str, device: torch.device) -> None:
    case = test_steps.Case(lengths=test_steps.DECODE, order=order)
    check_in_place("causal_conv1d_update", "conv_state", test_steps.decode(case, device, spec, True, tree), backend)


@pytest.mark.parametrize("backend", CONV_UPDATE)
def test_update_of_one_token_each(backend: str, device: torch.device) -> None:
    arguments = test_steps.decode(test_steps.Case(lengths=(1,) * 9, padding=0), device) | {"query_start_loc": None}
    check_in_place("causal_conv1d_update", "conv_state", arguments, backend)


@pytest.mark.parametrize("backend", CONV_UPDATE)
@pytest.mark.parametrize("tokens", [1, 4])
def test_update_of_three_dimensions(tokens: int, backend: str, device: torch.device) -> None:
    """[B, dim, T], with neighbouring tokens or with neighbouring channels."""
    case = test_steps.Case(lengths=(tokens,) * 6, padding=0, strided=False)
    arguments = test_steps.decode(case, device) | {"query_start_loc": None}
    flat = arguments["x"].view(6, tokens, case.dim)
    for x in (flat.mT.contiguous(), flat.mT):
        given = arguments | {"x": x, "out": torch.full_like(x, torch.nan)}
        check_in_place("causal_conv1d_update", "conv_state", given, backend)


@pytest.mark.parametrize("backend", CONV)
def test_rows_that_are_not_aligned(backend: str, device: torch.device) -> None:
    """Kernels work on a copy of x then, and the result goes back."""
    make = test_steps.Maker(test_steps.Case(lengths=(50,), padding=0), device)
    values, filters = make.normal(50, 136), make.filter()
    x = make.framed(values, left=3, right=2)
    around = copy_of(x)
    expected = gdn.causal_conv1d_fn(values, **filters, backend=backend)
    assert gdn.causal_conv1d_fn(x, **filters, out=x, backend=backend) is x
    around.copy_(expected)
    assert same_bits(whole(x), whole(around))
    pools = [make.pool(50, 3).fill_(0.5) for _ in range(2)]
    x = make.framed(values, left=3, right=2)
    expected = gdn.causal_conv1d_update(values, pools[0], **filters, backend=backend)
    assert gdn.causal_conv1d_update(x, pools[1], **filters, out=x, backend=backend) is x
    around.copy_(expected)
    assert same_bits(whole(x), whole(around)) and same_bits(pools[0], pools[1])


# --- what overlaps in another way --------------------------------------------------------------------------------------


def shifted(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A copy of x [tokens, ...] and a tensor of its shape that begins `rows` tokens later in the same memory."""
    memory = torch.zeros(x.shape[0] + rows, *x.shape[1:], dtype=x.dtype, device=x.device)
    memory[: x.shape[0]] = x
    return memory[: x.shape[0]], memory[rows:]


def check_refused(operator: Callable[..., Any], arguments: Arguments, pattern: str) -> None:
    before = {name: whole(x).clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    with pytest.raises(ValueError, match=pattern):
        operator(**arguments)
    for name, kept in before.items():
        assert same_bits(whole(arguments[name]), kept), f"{name} was written"


@pytest.mark.parametrize("backend", CONV)
@pytest.mark.parametrize("form", ["rows", "columns", "order of rows", "pool", "transposed"])
@pytest.mark.parametrize("function", ["causal_conv1d_fn", "causal_conv1d_update"])
def test_convolutions_refuse_other_overlaps(function: str, form: str, backend: str, device: torch.device) -> None:
    is_update = function == "causal_conv1d_update"
    case = test_steps.Case(lengths=test_steps.DECODE, dim=64, strided=False, order="columns")
    arguments = twin((test_steps.decode if is_update else test_steps.prefill)(case, device))
    state = "conv_state" if is_update else "conv_states"
    x, pattern = arguments["x"], "^out: expected memory of its own, got elements that it shares with x"
    if form == "rows":
        arguments["x"], arguments["out"] = shifted(x, 1)
    elif form == "columns":
        wide = torch.zeros(x.shape[0], 72, dtype=x.dtype, device=device)
        arguments["x"], arguments["out"] = wide[:, :64], wide[:, 8:]
        arguments["x"].copy_(x)
    elif form == "order of rows":  # all of x, each second row first
        memory = torch.zeros(2, *x.shape, dtype=x.dtype, device=device)
        arguments["x"] = memory.view(-1, 64)[: x.shape[0]].copy_(x)
        arguments["out"] = memory.view(-1, 64)[: 2 * x.shape[0] : 2]
    elif form == "pool":
        arguments["out"] = whole(arguments[state])[: x.numel()].view(x.shape)
        pattern = "^(out|conv_states?): expected memory of its own"
    else:  # x is copied, so its memory is no place for the result
        arguments["x"] = arguments["out"] = x.t().contiguous().t()
        pattern = "^out: "
    check_refused(getattr(gdn, function), {**arguments, "backend": backend}, pattern)


@pytest.mark.parametrize("rows", [0, 1], ids=["out=v", "shifted"])
@pytest.mark.parametrize(("function", "op"), [(CHUNK, "chunk"), (RECURRENT, "recurrent")])
def test_delta_rule_refuses_memory_of_v(function: str, op: str, rows: int, device: torch.device) -> None:
    for backend in [*backends(op), "reference"]:
        if op == "chunk":
            arguments = chunk_inputs(cases.MAIN_CHUNK, device, lengths=[65, 3])
        else:
            arguments = recurrent_inputs(cases.MAIN_RECURRENT, device, lengths=[2, 1])
        v, out = shifted(arguments["v"][0], rows)
        arguments |= {"v": v[None], "out": out[None], "backend": backend}
        check_refused(getattr(gdn, function), arguments, "^out: expected memory of its own, got elements that it shares with v")


@pytest.mark.parametrize("backend", DECODE)
def test_fused_decode_refuses_overlaps(backend: str, device: torch.device) -> None:
    arguments, _ = test_gdn_decode.make(test_gdn_decode.Case(padding=0), device)
    tokens, width = arguments["out"].shape
    conv, ssm = arguments["conv_state"], arguments["ssm_state"]
    of_input = arguments | {"out": arguments["mixed_qkv"][:, 8 : 8 + width], "backend": backend}
    check_refused(gdn.fused_gdn_decode, of_input, "^out: expected memory of its own, got .*mixed_qkv")
    rows = whole(conv)[: tokens * width].view(tokens, width)
    check_refused(gdn.fused_gdn_decode, arguments | {"out": rows, "backend": backend}, "^(out|conv_state): expected memory of")
    both = whole(ssm).view(conv.dtype)[: conv.numel()].view(conv.shape[0], conv.shape[2], conv.shape[1]).mT
    check_refused(
        gdn.fused_gdn_decode,
        arguments | {"conv_state": both, "backend": backend},
        "^(conv|ssm)_state: expected memory of its own",
    )


# --- both states in the pages of one buffer ----------------------------------------------------------------------------

MARK = 0xA5
GAP = 48  # bytes after each state of a page


@dataclass
class Pages:
    """Pools as an engine's hybrid cache has them: a page holds a window and, after it, a recurrent state."""

    memory: Tensor  # uint8
    conv: Tensor  # [pages, channels, columns]
    state: Tensor  # [pages, heads, K, V] or V first


def pages_like(conv: Tensor, state: Tensor, order: str) -> Pages:
    """Marked pages for windows and states of these shapes and dtypes. order: which dim of a window is contiguous."""
    pages, channels, columns = conv.shape
    conv_bytes = -(-channels * columns * conv.element_size() // 16) * 16 + GAP
    page_bytes = conv_bytes + state[0].numel() * state.element_size() + GAP
    memory = torch.full((pages * page_bytes,), MARK, dtype=torch.uint8, device=conv.device)

    def view(dtype: torch.dtype, first: int, inner: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        size = dtype.itemsize
        return memory.view(dtype).as_strided((pages, *inner), (page_bytes // size, *strides), first // size)

    of_window = (1, channels) if order == "channels" else (columns, 1)
    _, rows, width = state.shape[1:]
    return Pages(
        memory,
        view(conv.dtype, 0, (channels, columns), of_window),
        view(state.dtype, conv_bytes, tuple(state.shape[1:]), (rows * width, width, 1)),
    )


def in_pages(conv: Tensor | None, state: Tensor | None, order: str) -> Pages:
    """The given ones in pages; of the other kind there is one that no call knows."""
    if conv is None:
        assert state is not None
        conv = torch.empty(state.shape[0], 64, 3, dtype=torch.bfloat16, device=state.device)
        pages = pages_like(conv, state, order)
        pages.state.copy_(state)
        return pages
    given = state
    if state is None:
        state = torch.empty(conv.shape[0], 2, 16, 16, dtype=torch.float32, device=conv.device)
    pages = pages_like(conv, state, order)
    pages.conv.copy_(conv)
    if given is not None:
        pages.state.copy_(given)
    return pages


def check_pages(operator: Any, arguments: Arguments, conv: str | None, state: str | None, order: str, backend: str) -> None:
    """conv, state: the names under which the operator takes the pools, which are memory of their own here."""
    before = {name: arguments[name].contiguous() for name in (conv, state) if name is not None}
    if conv is not None and order == "channels":
        before[conv] = arguments[conv].mT.contiguous().mT
    pools = (None if conv is None else before[conv], None if state is None else before[state])
    pages = in_pages(*pools, order)
    views = {name: view for name, view in ((conv, pages.conv), (state, pages.state)) if name is not None}
    start = pages.memory.clone()
    for _ in range(3):  # a repeated call may take another way through the operator
        apart = twin(arguments | before)
        pages.memory.copy_(start)
        together = twin({name: x for name, x in arguments.items() if name not in views}) | views
        expected = outcome(operator, apart, backend=backend)[0]
        found = outcome(operator, together, backend=backend)[0]
        assert same_bits(found, expected)
        wanted = in_pages(*(None if name is None else apart[name] for name in (conv, state)), order)
        assert torch.equal(pages.memory, wanted.memory), "a state differs, or bytes of nobody were written"
        assert not torch.equal(pages.memory, start)


TWO_ORDERS = pytest.mark.parametrize("order", ["channels", "columns"])


@TWO_ORDERS
@pytest.mark.parametrize("v_first", [True, False], ids=["V-first", "K-first"])
@pytest.mark.parametrize("spec", [None, 7])
@pytest.mark.parametrize("backend", DECODE)
def test_fused_decode_on_pages(backend: str, spec: int | None, v_first: bool, order: str, device: torch.device) -> None:
    case = test_gdn_decode.Case(spec=spec, v_first=v_first)
    arguments, _ = test_gdn_decode.make(case, device)
    check_pages(gdn.fused_gdn_decode, arguments, "conv_state", "ssm_state", order, backend)


@TWO_ORDERS
@pytest.mark.parametrize("backend", CONV)
def test_prefill_windows_on_pages(backend: str, order: str, device: torch.device) -> None:
    arguments = test_steps.prefill(test_steps.Case(order=order), device, checkpoints=2)
    check_pages(gdn.causal_conv1d_fn, arguments, "conv_states", None, order, backend)


@TWO_ORDERS
@pytest.mark.parametrize(("spec", "tree"), [(None, False), (4, False), (4, True)], ids=["plain", "drafts", "tree"])
@pytest.mark.parametrize("backend", CONV_UPDATE)
def test_decode_windows_on_pages(backend: str, spec: int | None, tree: bool, order: str, device: torch.device) -> None:
    case = test_steps.Case(lengths=test_steps.DECODE, order=order)
    arguments = test_steps.decode(case, device, spec, True, tree)
    check_pages(gdn.causal_conv1d_update, arguments, "conv_state", None, order, backend)


@pytest.mark.parametrize("backend", [*backends("chunk"), "reference"])
def test_chunk_on_pages(backend: str, device: torch.device) -> None:
    arguments = chunk_inputs(cases.MAIN_CHUNK, device, lengths=[65, 0, 200, 1], null_slot=0, null_sequences=[3])
    check_pages(gdn.chunk_gated_delta_rule, arguments, None, "initial_state", "channels", backend)


@pytest.mark.parametrize("backend", [*backends("recurrent"), "reference"])
@test_recurrent.LAYOUTS
def test_recurrent_on_pages(v_first: bool, backend: str, device: torch.device) -> None:
    for problem in (cases.MAIN_RECURRENT, cases.MAIN_SPECULATIVE):
        given = replace(problem, state_v_first=v_first)
        arguments = recurrent_inputs(given, device, lengths=[3, 0, 1, 2], null_slot=0, null_sequences=[2])
        check_pages(gdn.fused_recurrent_gated_delta_rule, arguments, None, "initial_state", "channels", backend)


@pytest.mark.parametrize("backend", DECODE)
def test_a_layer_on_pages(backend: str, device: torch.device) -> None:
    """The steps of a prompt and of a token, one after the other in the same pages, as an engine runs them."""
    case = test_gdn_decode.Case(lengths=(1,) * 4, offsets_dtype=None)
    arguments, _ = test_gdn_decode.make(case, device)
    (H, HV), (K, V) = case.heads, case.dims
    conv, state = arguments["conv_state"].mT.contiguous().mT.nan_to_num(0.0), arguments["ssm_state"].nan_to_num(0.0)
    pages = in_pages(conv, state, "channels")
    mark = pages.memory.clone()
    tokens = test_steps.Maker(test_steps.Case(lengths=(70, 3, 1, 64), padding=0, dim=case.channels), device)
    x, gates = tokens.tokens(), -tokens.normal(138, HV, dtype=torch.float32).abs()
    slots, offsets = arguments["state_indices"], tokens.offsets()

    def layer(windows: Tensor, states: Tensor) -> list[Tensor]:
        mixed = gdn.causal_conv1d_fn(
            x, arguments["conv_weight"], conv_states=windows, query_start_loc=offsets, cache_indices=slots, backend=backend,
            null_slot=test_gdn_decode.NULL,
        )  # fmt: skip
        q, k, v = mixed.split([H * K, H * K, HV * V], dim=1)
        o, _ = gdn.chunk_gated_delta_rule(
            q.unflatten(1, (H, K))[None], k.unflatten(1, (H, K))[None], v.unflatten(1, (HV, V))[None], gates[None],
            gates[None].exp(), initial_state=states, use_qk_l2norm_in_kernel=True, state_v_first=True, cu_seqlens=offsets,
            state_indices=slots, has_initial_state=torch.ones(4, dtype=torch.bool, device=device), backend=backend,
            null_slot=test_gdn_decode.NULL,
        )  # fmt: skip
        step = gdn.fused_gdn_decode(**arguments | {"conv_state": windows, "ssm_state": states, "out": None}, backend=backend)
        return [mixed, o, step]

    apart = (conv.clone(memory_format=torch.preserve_format), state.clone())
    assert are_same(layer(pages.conv, pages.state), layer(*apart))
    assert torch.equal(pages.memory, in_pages(*apart, "channels").memory)
    assert not torch.equal(pages.memory, mark)
