"""The chunk operator on the GPU, every form of its kernels, against the float64 oracle."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import CASES, chunk_inputs, chunk_problem, recurrent_inputs
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.testing.compare import same_bits
from tests.gpu import cases, chunk_forms
from tests.gpu.chunk import FUNCTION, PER_TOKEN, arguments_of, by, check
from tests.gpu.chunk_forms import (
    DEFAULTS,
    FORMS,
    FOUR_SM,
    HEAD_DIM_STATES,
    HEAD_DIMS,
    IN_SEGMENTS,
    KEY_HEAD,
    ONE_LAUNCH,
    PROBLEMS,
    WIDE,
    each,
    of_head_dim,
    take,
)
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import backends, copied, judge, run

pytestmark = pytest.mark.gpu

BACKENDS = backends("chunk")
MAIN = cases.MAIN_CHUNK
# What TileLang's kernels of segments compile: few, since they take long.
_PLAIN: dict[str, Any] = {"head_k_dim": 128, "head_v_dim": 128, "dtype": "bfloat16"}
_64: dict[str, Any] = {"head_k_dim": 64, "head_v_dim": 64}
_RAW: dict[str, Any] = {"gate_dtype": "bfloat16", "use_gate": True, "beta_dtype": "bfloat16", "use_beta_sigmoid": True}
TILELANG_SEGMENTS = [
    MAIN,
    chunk_problem(
        **_PLAIN, **_RAW, index_dtype="int64", state_dtype="bfloat16", has_final_indices=True, cu_seqlens_dtype="int64"
    ),
    chunk_problem(**_PLAIN | {"dtype": "float16"}, num_v_heads=6, has_initial_state=False),
    chunk_forms.OWN_STATES,
    chunk_problem(**_64, dtype="float16", num_q_heads=4, num_v_heads=2, gate_dtype=None, beta_dtype=None),
    chunk_problem(**_64, dtype="bfloat16", has_final_state=False, state_v_first=True),
]
VARIANTS = [
    *each([*DEFAULTS, "items-1", "items-3", "segments-2"], PROBLEMS),
    *each([*FOUR_SM, *ONE_LAUNCH], WIDE),
    *each(["key-head-1", "key-head-3", "key-head-66"], KEY_HEAD),
    *each([f"tilelang-segments-{n}" for n in (1, 2, 3, 7)], TILELANG_SEGMENTS),
]


@pytest.mark.parametrize(("form", "problem"), VARIANTS)
def test_variants(form: str, problem: ChunkProblem, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    of = take(form, force)
    arguments = arguments_of(problem, device, **of.ragged)
    if problem.has_final_indices:
        arguments["final_state_indices"][of.not_stored] = 0
    check(arguments, by(of.backend), monkeypatch)


PADDED = [(dim, HEAD_DIM_STATES[(i + shift) % 6]) for i, dim in enumerate(HEAD_DIMS) for shift in (0, 2, 3)]


@pytest.mark.parametrize(("dim", "fields"), PADDED)
def test_head_dims(dim: int, fields: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(of_head_dim(dim, **fields), device, **chunk_forms.PLAIN)
    if "final_state_indices" in arguments:
        arguments["final_state_indices"][3] = 0  # not stored
    if "state_indices" not in arguments:
        arguments["null_slot"] = 0  # names no sequence
    check(arguments, by("cute"), monkeypatch)


def test_the_cover_runs_every_state_on_both_kernels() -> None:
    """Guards the choice of variants above."""
    for is_recurrent in (False, True):
        kinds = {str(fields) for dim, fields in PADDED if (dim > 128) == is_recurrent}
        assert len(kinds) == len(HEAD_DIM_STATES)


HARD: list[tuple[str, ChunkProblem, dict[str, Any]]] = [
    *((form, MAIN, FORMS[form].ragged) for form in (*DEFAULTS, *ONE_LAUNCH)),
    *(
        (form, replace(MAIN, dtype=dtype), FORMS[form].ragged)
        for form in ("both", "segments-2")
        for dtype in ("bfloat16", "float16")
    ),
    ("key-head-3", MAIN, {"lengths": [700, 65, 300]}),
    ("tilelang-segments-2", MAIN, {"lengths": [1500, 100, 129], "padded_tokens": 70}),
]
HARD_CASES = [pytest.param(*row, case, id=f"{row[0]}-{row[1].dtype}-{case}") for row in HARD for case in CASES]
HARD_CASES += [
    pytest.param("cute", of_head_dim(dim, **HEAD_DIM_STATES[0]), chunk_forms.PLAIN, case, id=f"{dim}-{case}")
    for dim in (60, 100)
    for case in ("correlated_99", "large_norm", "zero_norm", "total_decay")
]


@pytest.mark.parametrize(("form", "problem", "options", "case"), HARD_CASES)
def test_hard_inputs(
    form: str,
    problem: ChunkProblem,
    options: dict[str, Any],
    case: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    force: Force,
) -> None:
    of = take(form, force)
    check(arguments_of(problem, device, case=case, **options), by(of.backend), monkeypatch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", ONE_LAUNCH)
def test_norms_of_all_sizes(form: str, dtype: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """Neighbouring keys up to a thousandfold apart: where the inverse is rounded, norms are at its rows and at its columns."""
    of = take(form, force)
    arguments = arguments_of(replace(MAIN, dtype=dtype), device, **of.ragged)
    sizes = torch.logspace(-1.5, 1.5, 7, device=device)[torch.arange(arguments["k"].shape[1], device=device) % 7]
    arguments["k"].mul_(sizes[None, :, None, None])
    check(arguments, by(of.backend), monkeypatch)


@pytest.mark.parametrize("form", IN_SEGMENTS)
def test_a_state_that_lasts(form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """Little decay and weak updates: what a segment starts from comes through all segments before it."""
    of = take(form, force)
    arguments = arguments_of(MAIN, device, lengths=[4096], padded_tokens=200)
    arguments["beta"].mul_(0.004)
    arguments["g"].mul_(1e-5)
    arguments["has_initial_state"].fill_(True)
    check(arguments, by(of.backend), monkeypatch)


@pytest.mark.parametrize(
    ("form", "clusters"), [("clusters", 0), ("segments-2", 0), ("items-3", 5), ("key-head-3", 5)], ids=lambda x: str(x)
)
def test_prefetch(form: str, clusters: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """Configurations that calls with many chunks a block compile."""
    of = take(form, force, prefetch=2, **({"num_persistent_clusters": clusters} if clusters else {}))
    ragged = chunk_forms.SEGMENTS if form == "clusters" else of.ragged
    check(arguments_of(MAIN, device, **ragged), by(of.backend), monkeypatch)


# --- lengths -----------------------------------------------------------------------------------------------------------

FEW = [[0], [1], [63], [0, 0, 3], [1] * 40]
TILES = [[0], [0] * 9, [1] * 40, [700, 0, 700], [3, 640]]
# Counts around the number that a block ranks by length (256); sequences of equal lengths, and the longest ones last.
MANY = [[n % 4 for n in range(count - 3)] + [65, 300, 65] for count in (255, 256, 257, 300)]
# Few chunks and many: every buffer and barrier is used for the first time, again, and more often than there are phases. More
# clusters than fit at a time.
CHUNKS = [*([64 * n - 3] for n in (1, 2, 3, 4, 5, 7, 17, 33)), [65] * 3 + [1] * 290 + [700] + [2] * 5]
SPLIT = [[0], [1], [128], [129], [1280], [0, 0, 300], [130] * 70]
IN_FOURS = [[0], [1], [64], [65], [640], [1300], [0, 0, 300], [130] * 70, [*range(1, 200, 3)]]
LENGTHS: list[tuple[str, dict[str, int], list[list[int]], tuple[int, ...]]] = [  # form, changes, lengths, padded tokens
    *((form, {}, [*FEW, [64], [65], [128], [700], *MANY], (7,)) for form in DEFAULTS),
    ("items-3", {}, [*TILES, [64] * 7], (70,)),
    ("key-head-3", {}, [*TILES, [64] * 7, [2000], [93] * 64], (70,)),
    *((form, {}, [*TILES, *CHUNKS], (70,)) for form in ONE_LAUNCH),
    *((form, {}, SPLIT, (0, 128)) for form in IN_SEGMENTS),  # the last slot may or may not be used
    *(
        (f"{name}-{n}", {}, [[1500, 64 * n, 64 * n + 1, 0, 5]], (200,))
        for name in ("segments", "tilelang-segments")
        for n in (1, 3, 16)
    ),
    ("tilelang-segments-1", {}, [[64 * 17 - 3], [64 * 33 - 3]], (70,)),
    *((form, {"stages": 2}, IN_FOURS, (0, 128)) for form in FOUR_SM),
    *((form, {"prefetch": 2}, IN_FOURS, (0, 128)) for form in FOUR_SM),
]


def brief(lengths: list[int]) -> str:
    return str(lengths) if len(lengths) < 6 else f"{len(lengths)} of {sum(lengths)}"


@pytest.mark.parametrize(
    ("form", "changes", "lengths", "padded"),
    [
        pytest.param(form, changes, lengths, padded, id=f"{form}-{changes or ''}-{brief(lengths)}")
        for form, changes, all_lengths, padded in LENGTHS
        for lengths in all_lengths
    ],
)
def test_lengths(
    form: str,
    changes: dict[str, int],
    lengths: list[int],
    padded: tuple[int, ...],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    force: Force,
) -> None:
    of = take(form, force, **changes)
    for tokens in padded:
        check(arguments_of(MAIN, device, lengths=lengths, padded_tokens=tokens), by(of.backend), monkeypatch)


@pytest.mark.parametrize("lengths", FEW, ids=brief)
@pytest.mark.parametrize("dim", [60, 132])
def test_lengths_of_head_dims(dim: int, lengths: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check(arguments_of(of_head_dim(dim, **HEAD_DIM_STATES[0]), device, lengths=lengths), by("cute"), monkeypatch)


@pytest.mark.parametrize("heads", [30, 31, 33, 34, 66])
def test_as_many_as_run_at_once_and_more(heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    """The clusters are those that the plan gives, and tokens are enough that both launches run at the same time."""
    take("full", force, max_l2_ring_groups=3)
    problem = replace(MAIN, num_q_heads=1, num_k_heads=1, num_v_heads=heads)
    check(arguments_of(problem, device, lengths=[2500], padded_tokens=200), by("cute"), monkeypatch)


# --- the arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decode_backend", backends("recurrent"))
def test_prefill_then_decode_is_one_long_prefill(
    backend: str, decode_backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = arguments_of(MAIN, device, lengths=[203], padded_tokens=0)
    whole = copied(arguments)
    pool, pieces = arguments["initial_state"], []
    for start, end in ((0, 100), (100, 200), (200, 201), (201, 203)):
        piece = {name: arguments[name][:, start:end] for name in PER_TOKEN}
        piece |= {"use_qk_l2norm_in_kernel": True, "state_v_first": True, "null_slot": 0, "initial_state": pool}
        if end - start > 2:
            o, _ = gdn.chunk_gated_delta_rule(**piece, state_indices=arguments["state_indices"], backend=backend)
        else:
            o, _ = gdn.fused_recurrent_gated_delta_rule(
                **piece, ssm_state_indices=arguments["state_indices"], backend=decode_backend
            )
        pieces.append(o)
    judge(FUNCTION, arguments, (torch.cat(pieces, dim=1), pool), whole, monkeypatch)


def test_the_decode_inputs_are_made_for_the_same_pool(device: torch.device) -> None:
    """Guards the sharing of one pool between the two operators above: same layout, same dtype."""
    chunk_pool = arguments_of(MAIN, device, **chunk_forms.PLAIN)["initial_state"]
    decode_pool = recurrent_inputs(cases.MAIN_RECURRENT, device, lengths=[1])["initial_state"]
    assert chunk_pool.shape[1:] == decode_pool.shape[1:] and chunk_pool.dtype == decode_pool.dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_beyond_31_bits(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool whose last slot starts beyond 2**31 elements."""
    arguments = arguments_of(MAIN, device, lengths=[70, 3], slot_gap=0)
    small = arguments["initial_state"]
    stride = (2**31 // (small.shape[0] - 1) + 4) // 4 * 4
    buffer = torch.empty(stride * (small.shape[0] - 1) + small[0].numel(), dtype=small.dtype, device=device)
    pool = buffer.as_strided(small.shape, (stride, *small.stride()[1:]))
    pool.copy_(small)
    last = small.shape[0] - 1
    assert last * stride >= 2**31
    arguments["state_indices"][0] = last
    pool[last] = pool[int(arguments["state_indices"][1])]
    before = dict(arguments, initial_state=pool.clone())
    results = gdn.chunk_gated_delta_rule(**{**arguments, "initial_state": pool}, backend=backend)
    close = pool.clone()
    del pool, buffer
    judge(FUNCTION, {**arguments, "initial_state": close}, (results[0], None), before, monkeypatch)


def _rows(packed: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments [B, T, ...] without cu_seqlens; the address of q is one that kernels cannot take."""
    batch: dict[str, Any] = {name: packed[name].unflatten(1, (3, 70)).squeeze(0) for name in PER_TOKEN}
    buffer = torch.empty(batch["q"].numel() + 1, dtype=torch.bfloat16, device=device)
    batch["q"] = buffer[1:].view(batch["q"].shape).copy_(batch["q"])
    return batch | {"use_qk_l2norm_in_kernel": True, "output_final_state": True}


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_rows(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = chunk_inputs(MAIN, device, lengths=[70, 70, 70])
    batch = _rows(packed, device) | {"state_v_first": True, "initial_state": packed["initial_state"]}
    batch["state_indices"], batch["has_initial_state"] = packed["state_indices"], packed["has_initial_state"]
    batch["k"] = torch.cat([batch["k"], batch["k"]], dim=1)[:, :70]
    check(batch, by(backend), monkeypatch)


@pytest.mark.parametrize("dim", [60, 100])
def test_batch_rows_of_head_dims(dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of k are 4 bytes off."""
    packed = arguments_of(of_head_dim(dim, has_initial_state=False), device, lengths=[70, 70, 70], padded_tokens=0)
    batch = _rows(packed, device) | {"initial_state": None}
    rows = torch.empty(3, 70, 2 * dim + 2, dtype=torch.bfloat16, device=device)
    batch["k"] = rows[..., : 2 * dim].unflatten(-1, (2, dim)).copy_(batch["k"])
    check(batch, by("cute"), monkeypatch)


@pytest.mark.parametrize(
    ("problem", "backend"),
    [(MAIN, backend) for backend in BACKENDS] + [(of_head_dim(dim, **HEAD_DIM_STATES[0]), "cute") for dim in (60, 132)],
    ids=[*BACKENDS, "60", "132"],
)
def test_inputs_are_left_alone(problem: ChunkProblem, backend: str, device: torch.device) -> None:
    arguments = arguments_of(problem, device, **chunk_forms.PLAIN)
    kept = {k: x.clone() for k, x in arguments.items() if isinstance(x, torch.Tensor) and k not in ("out", "initial_state")}
    run(FUNCTION, arguments, backend)
    for name, x in kept.items():
        assert same_bits(arguments[name], x), name
