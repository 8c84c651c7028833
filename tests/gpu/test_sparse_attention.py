"""Sparse attention of decode on a Hopper GPU, each backend against float64 over the same positions.

Per head, the largest error of a row is at most twice torch's on gathered rows of the same dtype. Each row of VARIANTS is one
compiled kernel per backend and split.
"""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.attention.sparse_attention import attend
from gdn.runtime import registry
from tests.gpu import graphs
from tests.gpu.attention import Inputs, Variant, exact, head_errors, make_inputs, of_torch
from tests.gpu.test_batch_invariance import Batch

pytestmark = pytest.mark.gpu

BACKENDS = tuple(registry.operator("sparse_attention_decode").modules)
F16, I64 = torch.float16, torch.int64
VARIANTS = {
    "16/2": Variant(16, 2),
    "24/2-fp16-272": Variant(24, 2, dtype=F16, block_size=272, layout="pair"),
    "8/1-64-int64": Variant(8, 1, block_size=64, index_dtype=I64, layout="packed"),
    "12/1-length": Variant(12, 1, has_topk_length=True, layout="padded"),
    "4/1-d128": Variant(4, 1, dim=128, block_size=272),
    "1/1-fp16": Variant(1, 1, dtype=F16, block_size=64, has_topk_length=True),
    "16/1-d128-int64": Variant(16, 1, dim=128, index_dtype=I64, has_topk_length=True),
    "16/2-packed-int64": Variant(16, 2, index_dtype=I64, layout="packed", block_size=64),
    "24/2-d128-padded": Variant(24, 2, dim=128, layout="padded", block_size=16, has_topk_length=True),
    "8/1-fp16-d128": Variant(8, 1, dim=128, dtype=F16),
    "64/4-padded": Variant(64, 4, layout="padded"),
    "12/4-packed": Variant(12, 4, dim=128, layout="packed", block_size=48),
    "16/2-gate": Variant(16, 2, has_gate=True),
    "12/1-fp16-gate": Variant(12, 1, dtype=F16, layout="pair", has_topk_length=True, has_gate=True),
    "64/4-d128-gate": Variant(64, 4, dim=128, index_dtype=I64, has_gate=True),
}
RAGGED = {"lengths": [700, 1, 33, 0, 259, 90, 17], "new": [1, 1, 3, 0, 8, 0, 2]}
EVERY = pytest.mark.parametrize(("backend", "variant"), [(backend, name) for backend in BACKENDS for name in VARIANTS])


def run(inputs: Inputs, backend: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """o in a NaN-poisoned out with a margin that must stay NaN, and the log-sum-exp."""
    arguments = inputs.arguments | changes
    q = arguments["q"]
    wide = torch.full((q.shape[0], q.shape[1] + 1, q.shape[2]), torch.nan, dtype=q.dtype, device="cuda")
    out = wide[:, : q.shape[1]]
    k_cache, v_cache = arguments["kv_cache"]
    o, lse = attend(
        q, k_cache, v_cache, arguments["topk_indices"], arguments["block_tables"], arguments["query_start_loc"],
        arguments["seq_lens"], arguments["topk_length"], arguments.get("scale"), 8, arguments["gate"], out, backend,
    )  # fmt: skip
    assert o is out and bool(wide[:, q.shape[1] :].isnan().all())
    return o, lse


def check(inputs: Inputs, backend: str) -> None:
    o, lse = run(inputs, backend)
    exact_o, exact_lse = exact(inputs)
    allowed = 2 * head_errors(of_torch(inputs), exact_o)
    errors = head_errors(o, exact_o)
    assert bool((errors <= allowed).all()), f"{(errors / allowed * 2).max():.2f} times torch's"
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=2e-3, rtol=1e-4)
    for first, second in zip(run(inputs, backend), (o, lse), strict=True):
        assert torch.equal(first, second)


@EVERY
@pytest.mark.parametrize("k", [300, 1, 2048])
def test_exact(backend: str, variant: str, k: int) -> None:
    check(make_inputs(VARIANTS[variant], **RAGGED, k=k), backend)


@EVERY
def test_one_sequence(backend: str, variant: str) -> None:
    """Split over the most blocks."""
    for length in (5000, 40):
        check(make_inputs(VARIANTS[variant], [length], [1], 2048), backend)


@EVERY
def test_all_positions(backend: str, variant: str) -> None:
    inputs = make_inputs(VARIANTS[variant], **RAGGED, k=16, dense=True)
    check(Inputs(inputs.arguments | {"topk_length": None}, inputs.positions), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sequences", [1, 16, 40, 64, 133, 300])
def test_every_split(backend: str, sequences: int) -> None:
    lengths = [50 + 37 * n % 600 for n in range(sequences)]
    check(make_inputs(VARIANTS["16/2"], lengths, [1] * sequences, 512), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_position_are_zero(backend: str) -> None:
    inputs = make_inputs(VARIANTS["16/2"], [90, 7], [2, 1], 64)
    inputs.arguments["topk_indices"].fill_(-1)
    o, lse = run(inputs, backend)
    assert bool((o == 0).all()) and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("sequences", [1, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_is_torchs_glu(backend: str, sequences: int) -> None:
    """The gate of the same attention, at the limits of sigmoid too; o may take the place next to it."""
    inputs = make_inputs(VARIANTS["16/2-gate"], [300] * sequences, [1] * sequences, 256)
    indices = inputs.arguments["topk_indices"]
    indices[0] = -1
    indices[0, 1] = inputs.positions[0][0]  # one position
    gate = inputs.arguments["gate"]
    plain, lse = run(inputs, backend, gate=None)
    gate[:, 0], gate[:, 1], gate[:, 2] = torch.nan, torch.inf, -torch.inf
    o, gated_lse = run(inputs, backend)
    want, empty = torch.nn.functional.glu(torch.cat([plain, gate], dim=-1)), lse[:, 0] == -torch.inf
    want[empty] = 0  # whatever the gate is
    torch.testing.assert_close(o, want, equal_nan=True)
    assert bool(empty.any()) and not bool(empty.all())
    assert bool(o[~empty, 0].isnan().all()) and not o[:, 2].any()
    assert torch.equal(o[:, 1], plain[:, 1]) and torch.equal(lse, gated_lse)
    heads = torch.full((*o.shape[:2], 512), torch.nan, dtype=o.dtype, device="cuda")
    heads[..., 256:] = gate
    gdn.sparse_attention(**inputs.arguments | {"gate": heads[..., 256:]}, out=heads[..., :256], max_query_len=8, backend=backend)
    assert torch.equal(heads[:, 1:, :256], o[:, 1:]) and torch.equal(heads[:, 1:, 256:], gate[:, 1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_reads_new_lengths_and_positions(backend: str, device: torch.device) -> None:
    first = make_inputs(VARIANTS["16/2"], [300, 260, 33], [1, 1, 1], 256)
    second = make_inputs(VARIANTS["16/2"], [290, 41, 304], [1, 0, 2], 256, seed=2)
    for inputs in (first, second):
        check(inputs, backend)
    changes = [graphs.tensors(inputs.arguments) for inputs in (second, first)]
    options = {"return_lse": True, "max_query_len": 8, "backend": backend}
    graphs.check(gdn.sparse_attention, first.arguments, (), changes, device, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale(backend: str) -> None:
    inputs = make_inputs(VARIANTS["16/2"], [300], [1], 256)
    for scale in (0.0, 1.0, -0.25):
        scaled = Inputs(inputs.arguments | {"scale": scale}, inputs.positions)
        o, lse = run(scaled, backend)
        exact_o, exact_lse = exact(scaled)
        assert float(head_errors(o, exact_o).max()) < 8e-3
        torch.testing.assert_close(lse.double(), exact_lse.double(), atol=5e-3, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_not_aligned_take_the_reference(backend: str) -> None:
    odd = torch.zeros(9, 16, 2, 257, dtype=torch.bfloat16, device="cuda")[..., :256]
    inputs = make_inputs(VARIANTS["16/2"], [33], [1], 16)
    arguments = inputs.arguments | {"kv_cache": (odd, odd.clone())}
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        gdn.sparse_attention(**arguments, backend=backend)


@pytest.mark.parametrize("variant", ["16/2", "16/2-gate"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_has_the_same_bits_in_any_batch(backend: str, dense: bool, variant: str, switch: Any) -> None:
    switch(GDN_BATCH_INVARIANT="1")
    lengths = [40 + 61 * n % 900 for n in range(40)]
    inputs = make_inputs(VARIANTS[variant], lengths, [1] * 40, 512, dense=dense)

    def attention(backend: str, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return run(Inputs(arguments, []), backend)

    tokens = tuple(name for name in ("q", "topk_indices", "gate") if inputs.arguments[name] is not None)
    batch = Batch(
        attention, inputs.arguments, [1] * 40, "query_start_loc", tokens=tokens, sequences=("block_tables", "seq_lens"), results=2
    )
    batch.check([7, 39, 0, 12], backend)
