"""Which rows of `gdn.attention` go to the kernel of prefill, and the Params that it gets: a stand-in kernel on the CPU holds them
against problem.py and computes from exactly those."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.core.tensors import is_aligned
from gdn.ops.attention.problem import AttentionPrefillParams, AttentionPrefillProblem, SparseDecodeParams
from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.ops.stand_in import StandIn
from tests.ops.test_attention import STEPS, Arguments, oracle, step
from tests.references import reference

INT32, INT64 = torch.int32, torch.int64
DECODE, PREFILL = "sparse_attention_decode", "attention_prefill"


class Kernels(StandIn):
    """Both kernels; `calls` has the operator and the number of rows of each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.fails_at = ""  # "prepare" or "launch" of the kernel of prefill
        self.serves = True
        self.sizes_are_of_a_launch = True  # not in a batch-invariant call, which may launch several times

    def can_run(self, problem: Any, device: torch.device, backend: str) -> bool:
        assert (problem.op, backend) == (PREFILL, "cute")
        return self.serves

    def prepare(self, problem: Any, device: Any, backend: str | None = None) -> runtime.Prepared:
        if (problem.op, self.fails_at) == (PREFILL, "prepare"):
            raise RuntimeError("no compiled kernel")
        return super().prepare(problem, device, backend)

    def launch(self, p: Any, params: Any) -> None:
        self.calls.append((p.op, params.q.shape[0]))
        if (p.op, self.fails_at) == (PREFILL, "launch"):
            raise RuntimeError("the driver refused")
        assert isinstance(params, AttentionPrefillParams if p.op == PREFILL else SparseDecodeParams)
        if isinstance(p, AttentionPrefillProblem):
            self.check(p, params)
        o, lse = reference.attention(
            params.q, (params.k_cache, params.v_cache), params.block_tables, params.query_start_loc, params.seq_lens,
            scale=params.scale, return_lse=True, gate=params.gate,
        )  # fmt: skip
        params.out.copy_(o)
        params.lse.copy_(lse)

    def check(self, p: AttentionPrefillProblem, params: AttentionPrefillParams) -> None:
        """The form of every argument."""
        q, tables = params.q, params.block_tables
        assert q.shape[1:] == (p.num_heads, p.head_dim) and q.is_contiguous() and q.data_ptr() % 16 == 0
        assert params.k_cache.shape[1:] == params.v_cache.shape[1:] == (p.block_size, p.num_kv_heads, p.head_dim)
        assert p.rows_aligned == (is_aligned(params.k_cache) and is_aligned(params.v_cache))
        assert tables.dtype == INT32 and tables.stride(1) == 1
        assert p.max_context_len % p.block_size == 0 and p.max_context_len <= tables.shape[1] * p.block_size
        if self.sizes_are_of_a_launch:
            new = params.query_start_loc.diff()
            assert p.num_tokens == len(q) and int((new > 0).sum()) <= p.num_sequences <= len(new)
            assert p.max_context_len >= int(params.seq_lens[new > 0].max())
        assert params.query_start_loc.dtype == params.seq_lens.dtype == INT32
        assert params.query_start_loc.is_contiguous() and params.seq_lens.is_contiguous()
        assert len(params.seq_lens) == len(params.query_start_loc) - 1 == len(tables) and int(params.query_start_loc[0]) == 0
        assert (params.gate is not None) == p.has_gate and (params.gate is None or is_aligned(params.gate))
        assert params.out.shape == q.shape and params.out.stride(-1) == 1 and params.out.dtype == q.dtype
        assert params.lse.shape == q.shape[:2] and params.lse.dtype == torch.float32 and params.lse.is_contiguous()
        assert p.index_dtype is None and not p.has_topk_length


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels().put(monkeypatch)
    monkeypatch.setattr(runtime, "can_run", made.can_run)
    return made


def check(arguments: Arguments, **options: Any) -> None:
    out = torch.full_like(arguments["q"], torch.nan)
    o, lse = gdn.attention(**arguments, out=out, return_lse=True, **options)
    want, want_lse = oracle(arguments, 16**-0.5)
    assert o is out and torch.allclose(o.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.allclose(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "with_host", "expected"),
    [
        ("decode", True, [(DECODE, 5)]),
        ("decode", False, [(DECODE, 5)]),
        ("prefill", True, [(PREFILL, 44)]),
        ("prefill", False, [(PREFILL, 44)]),
        ("mixed", True, [(DECODE, 3), (PREFILL, 23)]),
        ("mixed", False, [(DECODE, 26)]),  # 26 rows of 7 sequences
        ("long first", True, [(PREFILL, 15)]),
        ("equal lengths", True, [(DECODE, 1), (PREFILL, 58)]),
        ("equal lengths", False, [(PREFILL, 59)]),
    ],
)
def test_rows_go_to_the_kernel_of_their_length(name: str, with_host: bool, expected: Any, kernels: Kernels) -> None:
    check(step(*STEPS[name], with_host=with_host))
    assert kernels.calls == expected


def test_the_largest_number_of_new_tokens_decides_where_lengths_are_not_known(kernels: Kernels) -> None:
    arguments = step(*STEPS["mixed"], with_host=False)
    for longest, op in ((11, PREFILL), (None, DECODE)):
        check(arguments, max_query_len=longest)
        assert kernels.calls.pop() == (op, 26) and not kernels.calls


def test_a_bound_of_decode_comes_before_lengths(kernels: Kernels) -> None:
    check(step(*STEPS["drafts"]), max_query_len=4, max_seq_len=32)
    assert kernels.calls == [(DECODE, 10)]


@pytest.mark.parametrize("with_host", [True, False])
def test_batch_invariant_sequences_go_by_their_own_length(
    with_host: bool, kernels: Kernels, switch: Callable[..., env.Switches]
) -> None:
    switch(GDN_BATCH_INVARIANT="1")
    kernels.sizes_are_of_a_launch = False
    check(step(*STEPS["mixed"], with_host=with_host))
    own = [(DECODE, 3), (PREFILL, 11), (DECODE, 1), (PREFILL, 11)]
    assert kernels.calls == (own if with_host else [(DECODE, 26)])
    kernels.calls.clear()
    check(step(*STEPS["prefill"], with_host=False), max_query_len=30)
    assert kernels.calls == [(DECODE, 44)]  # the bound is of the batch


def test_strides_dtypes_and_gates(kernels: Kernels) -> None:
    arguments = step(*STEPS["mixed"])
    want, want_lse = gdn.attention(**arguments, return_lse=True)
    for change in (
        {"q": torch.nn.functional.pad(arguments["q"], (0, 0, 0, 1))[:, :-1]},
        {"q": torch.cat([torch.zeros(1), arguments["q"].flatten()])[1:].view(arguments["q"].shape)},
        {"query_start_loc": arguments["query_start_loc"].long(), "seq_lens": arguments["seq_lens"].long()},
        {"query_start_loc": arguments["query_start_loc"].repeat_interleave(2)[::2]},
        {"block_tables": torch.nn.functional.pad(arguments["block_tables"], (0, 3))[:, :-3]},
        {"max_seq_len": 15},
    ):
        o, lse = gdn.attention(**arguments | change, return_lse=True)
        assert same_bits(o, want) and same_bits(lse, want_lse)
    out = torch.full((want.shape[0], want.shape[1] + 1, 19), 7.0)[:, 1:, 2:18]
    assert gdn.attention(**arguments, out=out) is out and torch.equal(out, want)
    gate = torch.randn(want.shape[0], want.shape[1], 33)[..., 1:17]
    gated = gdn.attention(**arguments, gate=gate)
    torch.testing.assert_close(gated, want * gate.sigmoid())
    assert kernels.problems[-1].has_gate and {op for op, _ in kernels.calls} == {DECODE, PREFILL}


def test_an_expanded_gate_and_table(kernels: Kernels) -> None:
    arguments = step([12, 12], [4, 4])
    arguments["block_tables"] = arguments["block_tables"][:1].expand(2, -1)  # both read one sequence's pages
    want = gdn.attention(**arguments)
    gate = torch.randn(1, 4, 16).expand(26, 4, 16)
    torch.testing.assert_close(gdn.attention(**arguments, gate=gate), want * gate.sigmoid())
    assert torch.allclose(want.double(), oracle(arguments, 0.25)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["no blocks", "no table", "no sequences", "no tokens"])
def test_nothing_goes_to_the_kernel_where_there_is_nothing(change: str, kernels: Kernels) -> None:
    arguments = step([12, 9], [0, 0], with_host=False) | {"max_query_len": 12}
    if change == "no blocks":
        arguments["kv_cache"] = tuple(cache[:0] for cache in arguments["kv_cache"])
        arguments["query_start_loc"], arguments["seq_lens"] = torch.zeros(3, dtype=INT32), torch.zeros(2, dtype=INT32)
    elif change == "no table":
        arguments["block_tables"] = arguments["block_tables"][:, :0]
        arguments["query_start_loc"], arguments["seq_lens"] = torch.zeros(3, dtype=INT32), torch.zeros(2, dtype=INT32)
    elif change == "no sequences":
        arguments |= {"block_tables": arguments["block_tables"][:0], "seq_lens": torch.zeros(0, dtype=INT32)}
        arguments["query_start_loc"] = torch.zeros(1, dtype=INT32)
    else:
        arguments |= {"q": arguments["q"][:0], "query_start_loc": torch.zeros(3, dtype=INT32)}
    o, lse = gdn.attention(**arguments, return_lse=True)
    assert not o.any() and bool((lse == -torch.inf).all()) and kernels.calls == []


@pytest.mark.parametrize("backend", ["tilelang", "cute", None])
def test_a_backend_without_the_kernel_takes_torchs_attention(backend: Any, kernels: Kernels) -> None:
    arguments = step(*STEPS["mixed"])
    kernels.serves = False
    check(arguments, backend=backend)
    assert kernels.calls == [(DECODE, 3)]
    kernels.serves = True
    check(arguments, backend=backend)
    assert kernels.calls[1:] == ([(DECODE, 3)] if backend == "tilelang" else [(DECODE, 3), (PREFILL, 23)])


def wide(arguments: Arguments, columns: int) -> Arguments:
    """The same call with wider block tables."""
    missing = columns - arguments["block_tables"].shape[1]
    return arguments | {"block_tables": torch.nn.functional.pad(arguments["block_tables"], (0, missing))}


def sizes_of(arguments: Arguments, kernels: Kernels, **options: Any) -> tuple[int, int, int]:
    """Tokens, sequences and context of the problem that the kernel of prefill is chosen for."""
    check(arguments, **options)
    (problem,) = (one for one in kernels.problems if one.op == PREFILL)
    kernels.problems.clear()
    return problem.num_tokens, problem.num_sequences, problem.max_context_len


def test_the_kernel_is_chosen_for_what_the_host_knows(kernels: Kernels) -> None:
    """Rows of prefill with padding, sequences with new tokens, and a power of two of blocks: of the lengths, of the bound, of the
    tables."""
    arguments = wide(step(*STEPS["mixed"]), 20)  # of prefill: 11, 0, 1 and 9 new tokens, at most 15 in all
    assert sizes_of(arguments, kernels) == sizes_of(arguments, kernels, max_seq_len=30) == (23, 3, 16)
    unknown = wide(step(*STEPS["mixed"], with_host=False), 20)
    assert sizes_of(unknown, kernels, max_query_len=11) == (26, 7, 80)
    assert sizes_of(unknown, kernels, max_query_len=11, max_seq_len=30) == (26, 7, 32)
    # A sequence without new tokens may have any length; tables need no power of two of blocks.
    idle = wide(step([12, 0], [50, 70]), 20)
    assert sizes_of(idle, kernels) == (14, 1, 64)
    assert sizes_of(step([12], [5]), kernels) == (14, 1, 24)


def test_a_few_queries_on_a_long_context(kernels: Kernels) -> None:
    check(step([12], [3000]))
    check(step([1, 12], [2500, 3000]))
    assert kernels.calls == [(PREFILL, 14), (DECODE, 1), (PREFILL, 14)]


@pytest.mark.parametrize("name", ["prefill", "mixed"])
def test_nothing_is_written_where_the_kernel_is_missing(name: str, kernels: Kernels) -> None:
    """With GDN_COMPILE=off: before the rows of decode, too."""
    kernels.fails_at = "prepare"
    arguments = step(*STEPS[name])
    out = torch.full_like(arguments["q"], 7.0)
    with pytest.raises(RuntimeError, match="no compiled kernel"):
        gdn.attention(**arguments, out=out)
    assert bool((out == 7).all()) and kernels.calls == []


def test_a_failed_launch_is_raised_and_the_next_call_is_right(kernels: Kernels) -> None:
    kernels.fails_at = "launch"
    with pytest.raises(RuntimeError, match="the driver refused"):
        gdn.attention(**step(*STEPS["mixed"]))
    kernels.fails_at = ""
    check(step(*STEPS["mixed"]))


def on_h100(new: list[int], cached: list[int], **host: Any) -> Arguments:
    """A call that the kernel serves, for `gdn.explain`: no memory for its contexts."""
    lengths, shape = [n + c for n, c in zip(new, cached, strict=True)], (1, 16, 2, 256)
    return {
        "q": torch.zeros(sum(new), 16, 256, dtype=torch.bfloat16),
        "kv_cache": tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)),
        "block_tables": torch.zeros(len(new), 8192, dtype=INT32),  # of 131072 positions
        "query_start_loc": torch.tensor([0, *new]).cumsum(0).int(), "seq_lens": torch.tensor(lengths, dtype=INT32),
    } | (host or {"query_lens_host": tuple(new), "seq_lens_host": tuple(lengths)})  # fmt: skip


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdn.device import H100
    from gdn.runtime import devices

    monkeypatch.setattr(devices, "describe", lambda device: (H100, "H100"))


def splits_of(arguments: Arguments) -> list[int]:
    """Blocks of a cluster, of each part that the kernel of prefill has."""
    return [part.config.splits for part in gdn.explain("attention", **arguments).parts if part.op == PREFILL]


@pytest.mark.usefixtures("h100")
def test_few_queries_on_a_long_context_are_dealt_to_several_blocks() -> None:
    for new, cached, splits in (
        ([8192], [0], 1), ([1024], [0], 1), ([512], [30000], 2), ([544], [30000], 1), ([256], [32512], 2), ([150], [32000], 4),
        ([64], [32704], 8), ([16], [32752], 8), ([16], [3000], 8), ([16], [1500], 8), ([16], [900], 4),
        ([16], [400], 2), ([16], [200], 1),
        ([64, 64, 64], [100, 32000, 0], 4), ([1, 1, 64], [9000, 90000, 32000], 8), ([64] * 8, [32000] * 8, 2),
        ([64] * 20, [32000] * 20, 1), ([0, 0, 64], [10**5, 10**5, 900], 4),
    ):  # fmt: skip
        assert splits_of(on_h100(new, cached)) == [splits], (new, cached)
    for host, splits in (({}, 8), ({"max_seq_len": 4096}, 8), ({"max_seq_len": 1024}, 4)):
        assert splits_of(on_h100([64], [960], max_query_len=64, **host)) == [splits]


@pytest.mark.usefixtures("h100")
def test_a_batch_invariant_call_deals_every_tile_to_as_many_blocks(switch: Callable[..., env.Switches]) -> None:
    switch(GDN_BATCH_INVARIANT="1")
    for new, cached in (([16], [131056]), ([64], [32704]), ([256], [32512]), ([8192], [0]), ([64, 9] * 40, [32000, 0] * 40)):
        assert splits_of(on_h100(new, cached)) == [1]
        assert splits_of(on_h100([*new, 1, 16], [*cached, 5, 70000])) == [1]


@pytest.mark.usefixtures("h100")
def test_the_switch_of_the_operator(switch: Callable[..., env.Switches]) -> None:
    """The reference of the kernel of prefill is torch's attention."""
    arguments = step([12, 30], [0, 0], heads=8, kv_heads=1, dim=128, dtype=torch.bfloat16)
    arguments["kv_cache"] = tuple(torch.zeros(16, 16, 1, 128, dtype=torch.bfloat16) for _ in range(2))
    arguments["block_tables"] = torch.zeros(2, 4, dtype=INT32)
    (part,) = gdn.explain("attention", **arguments).parts
    assert (part.op, part.backend) == (PREFILL, "cute")
    switch(GDN_BACKEND_ATTENTION_PREFILL="reference")
    assert [(part.op, part.backend) for part in gdn.explain("attention", **arguments).parts] == [
        (PREFILL, "reference"), ("attention", "torch"),
    ]  # fmt: skip
    switch(GDN_BACKEND_ATTENTION_PREFILL="auto", GDN_BACKEND_ATTENTION="cute")
    (part,) = gdn.explain("attention", **arguments).parts
    assert (part.op, part.backend, part.decided_by) == (PREFILL, "cute", "GDN_BACKEND_ATTENTION=cute")
