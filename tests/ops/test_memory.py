"""Memory that arguments share, with stand-ins for kernels: what is accepted, what is refused, and that no plan serves it."""

from typing import Any

import pytest
import torch

import gdn
from gdn.core import call as _call
from gdn.core import memo
from gdn.runtime import guards
from gdn.testing.compare import same_bits
from tests.described.plain import call as plain_call
from tests.ops.contract_kernel import ContractKernel
from tests.ops.spoiling.memory import side_by_side
from tests.ops.test_decode_launch import Kernel

BF16, INT32 = torch.bfloat16, torch.int32
TOKENS, HEADS, DIM = 5, 2, 16
Arguments = dict[str, Any]
OPERATORS = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ContractKernel:
    return ContractKernel().put(monkeypatch)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def arguments(name: str, seed: int = 0) -> Arguments:
    indices = {"chunk_gated_delta_rule": "state_indices", "fused_recurrent_gated_delta_rule": "ssm_state_indices"}[name]
    q, k, v = (normal(1, TOKENS, HEADS, DIM, seed=3 * seed + i) for i in range(3))
    pool = torch.zeros(4, HEADS, DIM, DIM)
    return {"q": q, "k": k, "v": v, "initial_state": pool, indices: torch.tensor([2]), "use_qk_l2norm_in_kernel": True}


def one_row_on(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy, and a tensor that starts with its second row."""
    rows = torch.cat([tensor, tensor[:, :1]], dim=1)
    return rows[:, :-1], rows[:, 1:]


def last_row(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy, and a tensor that starts with its last row."""
    rows = torch.cat([tensor, tensor[:, 1:]], dim=1)
    return rows[:, :TOKENS], rows[:, TOKENS - 1 :]


def whole(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    copy = tensor.clone()
    return copy, copy


@pytest.mark.parametrize("share", [whole, one_row_on, last_row])
@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("name", OPERATORS)
def test_out_over_an_input(kernel: ContractKernel, name: str, argument: str, share: Any) -> None:
    function, good = getattr(gdn, name), arguments(name)
    function(**good, out=torch.empty_like(good["v"]))
    given, out = share(good[argument])
    before, pool = out.clone(), good["initial_state"].clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^out: expected memory of its own, got elements that it shares with {argument}"):
            function(**good | {argument: given, "out": out})
    assert kernel.launches == 1 and same_bits(out, before) and same_bits(good["initial_state"], pool)


@pytest.mark.parametrize("name", OPERATORS)
def test_out_in_a_pool(kernel: ContractKernel, name: str) -> None:
    good = arguments(name)
    out = good["initial_state"].view(BF16).flatten()[: TOKENS * HEADS * DIM].view(1, TOKENS, HEADS, DIM)
    with pytest.raises(ValueError, match="out: expected memory of its own, got elements that it shares with initial_state"):
        getattr(gdn, name)(**good, out=out)
    assert kernel.launches == 0


@pytest.mark.parametrize("name", OPERATORS)
def test_out_between_the_rows_of_an_input(kernel: ContractKernel, name: str) -> None:
    """A row of q, a row of out, and so on; and K and V of a token next to each other: memory of their own."""
    function, good = getattr(gdn, name), arguments(name)
    expected, _ = function(**good | {"initial_state": good["initial_state"].clone()})
    q, out = side_by_side(good["q"], torch.empty_like(good["v"]), lead=2)
    k, v = side_by_side(good["k"], good["v"], lead=2)
    for _ in range(2):
        good["initial_state"].zero_()
        found, _ = function(**good | {"q": q, "k": k, "v": v, "out": out})
        assert found is out and same_bits(out, expected)
    assert kernel.launches == 3


@pytest.mark.parametrize("guard", ["torch", "python"])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_plan_serves_no_overlap(kernel: ContractKernel, name: str, guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good calls at several addresses, then one of the same layout whose out shares one row with q; then a good one."""
    if guard == "python":
        monkeypatch.setattr(guards, "maker", lambda: guards.in_python)
    function, good = getattr(gdn, name), arguments(name)
    buffer = torch.zeros(1, 4 * TOKENS, HEADS, DIM, dtype=BF16)

    def call(q_at: int, out_at: int) -> None:
        function(**good | {"q": buffer[:, q_at : q_at + TOKENS], "out": buffer[:, out_at : out_at + TOKENS]})

    for q_at, out_at in ((0, TOKENS), (TOKENS, 0), (0, 2 * TOKENS)):
        call(q_at, out_at)
    for q_at, out_at in ((0, TOKENS - 1), (TOKENS, 1), (3, 3)):
        with pytest.raises(ValueError, match="^out: .*shares with q"):
            call(q_at, out_at)
    call(2 * TOKENS, 0)
    assert kernel.launches == 4


def test_states_and_windows_of_one_page_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools as engines keep them: a slot's window and its state next to each other. An overlap of the two is refused."""
    stand_in = Kernel().put(monkeypatch)
    good = plain_call("fused_gdn_decode", 4, torch.bfloat16)
    apart = good | {name: good[name].clone() for name in ("conv_state", "ssm_state")}
    expected = gdn.fused_gdn_decode(**apart)
    windows, states = side_by_side(good["conv_state"].mT.contiguous(), good["ssm_state"], lead=1)
    page = good | {"conv_state": windows.mT, "ssm_state": states}
    assert same_bits(gdn.fused_gdn_decode(**page), expected)
    assert same_bits(page["ssm_state"], apart["ssm_state"]) and same_bits(page["conv_state"], apart["conv_state"])
    before = stand_in.launches
    shared = windows.untyped_storage()
    start = (states.data_ptr() - windows.data_ptr()) // 2 - windows[0].numel() // 2
    inside = torch.empty(0, dtype=BF16).set_(shared, windows.storage_offset() + start, windows.shape, windows.stride())
    with pytest.raises(ValueError, match="^(conv_state|ssm_state): expected memory of its own"):
        gdn.fused_gdn_decode(**page | {"conv_state": inside.mT})
    assert stand_in.launches == before


def test_the_exact_question_is_asked_once(kernel: ContractKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question a layout and difference of addresses: a repeated call costs a lookup, also where memory is interleaved."""
    asked: list[int] = []

    def counted(*layout: Any) -> bool:
        asked.append(layout[3] - layout[2])
        return exact(*layout)

    exact = memo.shares_element
    monkeypatch.setattr(memo, "shares_element", counted)
    name = OPERATORS[0]
    good = arguments(name)
    buffers = [side_by_side(good["q"], torch.empty_like(good["v"]), lead=2) for _ in range(3)]
    function = getattr(gdn, name)
    for q, out in buffers[:2] * 2:  # the first teaches, the second asks
        function(**good | {"q": q, "out": out})
    assert len(asked) == 1
    for q, out in buffers * 2:
        function(**good | {"q": q, "out": out})
    assert len(asked) == 1 and kernel.launches == 10


def test_what_lies_apart_is_not_asked_about(kernel: ContractKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> bool:
        raise AssertionError("the addresses alone say that nothing is shared")

    name = OPERATORS[0]
    good = arguments(name)
    getattr(gdn, name)(**good, out=torch.empty_like(good["v"]))
    monkeypatch.setattr(memo, "shares_element", forbidden)
    monkeypatch.setattr(_call, "check_memory", forbidden)
    kept = [torch.empty_like(good["v"]) for _ in range(3)]
    for out in kept * 2:
        getattr(gdn, name)(**good, out=out)
    assert kernel.launches == 7
