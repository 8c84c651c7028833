"""Replay decode in the recurrent operator on the GPU: both kernels against the reference in float64."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import error, same_bits
from tests.compile.pairwise import pairwise
from tests.gpu import graphs
from tests.gpu.delta_rule import backends, poisoned_memory
from tests.gpu.replay import Member, Scene, in_float64
from tests.gpu.test_batch_invariance import Batch

pytestmark = pytest.mark.gpu

BACKENDS = pytest.mark.parametrize("backend", backends("recurrent"))
LAYOUTS = pytest.mark.parametrize("v_first", [True, False], ids=["v_first", "k_first"])
POOLS = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
STORED = {torch.bfloat16: 3e-3, torch.float16: 4e-4}  # error of an output that is stored in 16 bits
OF_STATE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
# One token a sequence: no live entry, one, all; folds; a new slot; padding; an empty sequence; beyond 2**24 and near 2**31.
SINGLE = [
    Member(0), Member(1), Member(14), Member(15), Member(16), Member(29), Member(30), Member(7, 7), Member(40, 38),
    Member(0, is_null=True), Member(5, tokens=0), Member(2**24 + 5), Member(2**31 - 20, 2**31 - 25),
]  # fmt: skip
DRAFTS = [
    Member(0, tokens=3), Member(3, a=3, tokens=4), Member(14, tokens=2), Member(15, a=4, tokens=4), Member(16, a=3, tokens=1),
    Member(29, 3, a=2, tokens=4), Member(7, 7, a=4, tokens=4), Member(33, a=4, tokens=4), Member(9, is_null=True, tokens=2),
    Member(5, tokens=0), Member(2**31 - 20, 2**31 - 25, a=2, tokens=4),
]  # fmt: skip
OF_DRAFTS: dict[str, Any] = {"rows": 22, "has_drafts": True}


def parents_of(members: list[Member], shape: str = "random") -> list[int]:
    draw = random.Random(3)
    of = {"random": lambda i: draw.randint(-1, i - 1), "line": lambda i: i - 1, "star": lambda i: -1}[shape]
    return [of(i) for member in members for i in range(member.tokens)]


def run(scene: Scene, backend: str, device: torch.device) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    """Output, and the arguments after the call and before it."""
    arguments, before = scene.arguments(device), scene.arguments(device)
    with poisoned_memory():
        o, state = gdn.fused_recurrent_gated_delta_rule(**arguments, backend=backend)
    assert state is arguments["initial_state"]
    return o, arguments, before


def check(scene: Scene, backend: str, device: torch.device) -> torch.Tensor:
    """Compares output, appended entries and folded states with the reference, and the bits of all else with what they were."""
    o, arguments, before = run(scene, backend, device)
    wanted = in_float64(before)
    expected, _ = gdn.fused_recurrent_gated_delta_rule(**wanted, backend="reference")
    first, bounds = 0, STORED[scene.dtype] + OF_STATE[torch.float32]
    for n, member in enumerate(scene.members):
        rows = slice(first, first + member.tokens)
        first += member.tokens
        if member.is_null or member.tokens == 0:
            assert bool((o[0, rows] == 0).all())
            continue
        found = error(o[0, rows].transpose(0, 1), expected[0, rows].transpose(0, 1), groups=1)
        assert found.within(bounds), f"sequence {n}, {member}: {found}"
    assert bool((o[0, first:] == 0).all())

    pool, ring = (mask.to(device) for mask in scene.written())
    if scene.options.get("disable_state_update"):
        pool, ring = torch.zeros_like(pool), torch.zeros_like(ring)
    assert same_bits(arguments["initial_state"][~pool], before["initial_state"][~pool])
    assert same_bits(arguments["ring"][~ring], before["ring"][~ring])
    for name in ("state_tokens", "num_computed_tokens", "ssm_state_indices"):
        assert torch.equal(arguments[name], before[name])
    if bool(ring.any()):
        entries = [torch.nan_to_num(x["ring"][ring][None], nan=torch.nan, neginf=-1.0) for x in (arguments, wanted)]
        found = error(*entries, groups=1)
        assert found.within(2e-6), f"entries: {found}"
    if bool(pool.any()):
        states = [x["initial_state"][pool] for x in (arguments, wanted)]
        found = error(*states, groups=2)
        assert found.within(OF_STATE[scene.state_dtype]), f"states: {found}"
    return o


HEADS = [(16, 16, 32), (16, 16, 64), (16, 16, 48), (16, 16, 16), (8, 8, 16), (4, 4, 8), (2, 2, 4), (2, 2, 6), (32, 16, 16)]
AXES: dict[str, Any] = {
    "heads": HEADS,
    "dims": [(128, 128), (64, 64), (256, 256), (60, 100), (128, 60)],
    "form": ["one", "drafts", "tree"],
    "state_dtype": [torch.float32, torch.bfloat16],
    "v_first": [True, False],
    "dtype": [torch.bfloat16, torch.float16],
    "gates": [(True, True), (False, True), (False, False)],  # raw, norm
    "index_dtype": [torch.int32, torch.int64],
}


def scene_of(form: str, **fields: Any) -> Scene:
    if form == "one":
        return Scene(SINGLE, **fields)
    parents = parents_of(DRAFTS) if form == "tree" else None
    return Scene(DRAFTS, parents=parents, **{**OF_DRAFTS, **fields})


@BACKENDS
@pytest.mark.parametrize("row", pairwise(AXES), ids=lambda row: "-".join(str(x) for x in row.values()))
def test_variants(row: dict[str, Any], backend: str, device: torch.device) -> None:
    fields = {name: row[name] for name in ("heads", "dims", "state_dtype", "v_first", "dtype", "index_dtype")}
    is_raw, has_norm = row["gates"]
    check(scene_of(row["form"], is_raw=is_raw, has_norm=has_norm, **fields), backend, device)


@BACKENDS
@LAYOUTS
@pytest.mark.parametrize("form", ["one", "drafts", "tree"])
def test_nothing_is_written_without_an_update(form: str, v_first: bool, backend: str, device: torch.device) -> None:
    check(scene_of(form, v_first=v_first, options={"disable_state_update": True}), backend, device)


@BACKENDS
@LAYOUTS
@pytest.mark.parametrize(("fold_every", "phase"), [(1, 0), (2, 1), (15, 0), (15, 14)])
def test_every_row_and_phase(fold_every: int, phase: int, v_first: bool, backend: str, device: torch.device) -> None:
    """Positions over two turns of the ring, the least number of rows and more."""
    for rows in (fold_every + 1, fold_every + 6):
        members = [Member(p, max(0, p - 3 * fold_every - 2)) for p in range(2 * rows + 2)]
        check(Scene(members, rows=rows, fold_every=fold_every, phase=phase, v_first=v_first), backend, device)


@BACKENDS
@pytest.mark.parametrize("most", [2, 8])
@pytest.mark.parametrize("fold_every", [1, 5, 15])
def test_accepted_tokens(fold_every: int, most: int, backend: str, device: torch.device) -> None:
    """Every number of accepted tokens, more than fold_every too, with every number of new ones."""
    members = [
        Member(p, a=a, tokens=(a + p) % (most + 1)) for p in (most, 14, 15, 17, 30, 31) for a in range(1, min(most, p) + 1)
    ]
    check(Scene(members, rows=fold_every - 1 + 2 * most, fold_every=fold_every, has_drafts=True), backend, device)


@BACKENDS
@LAYOUTS
def test_counts_that_make_padding(v_first: bool, backend: str, device: torch.device) -> None:
    """As on a device, where nothing checks them: zero rows, and nothing is written."""
    scene = Scene([Member(20, a=2, tokens=3)] * 6, v_first=v_first, **OF_DRAFTS)
    arguments, before = scene.arguments(device), scene.arguments(device)
    slots = scene.slots()
    for x in (arguments, before):
        x["state_tokens"][slots[0]] = 21  # more than p
        x["num_accepted_tokens"][1:4] = torch.tensor([0, 5, -1])
        x["ssm_state_indices"][4] = x["ring"].shape[0]  # a slot of the pool without a ring
    o, _ = gdn.fused_recurrent_gated_delta_rule(**arguments, backend=backend)
    assert bool((o[0, :15] == 0).all()) and bool((o[0, 15:18] != 0).any()) and not bool(o.isnan().any())
    others = torch.ones(arguments["ring"].shape[0], dtype=torch.bool, device=device)
    others[slots[5]] = False
    assert same_bits(arguments["ring"][others], before["ring"][others])
    others = torch.cat([others, others.new_ones(arguments["initial_state"].shape[0] - others.numel())])
    assert same_bits(arguments["initial_state"][others], before["initial_state"][others])


@BACKENDS
@POOLS
@pytest.mark.parametrize("form", ["one", "drafts", "tree"])
def test_a_sequence_has_the_same_bits_in_any_batch(
    form: str, state_dtype: torch.dtype, backend: str, device: torch.device, switch: Callable[..., Any]
) -> None:
    switch(GDN_BATCH_INVARIANT="1")
    scene = scene_of(form, heads=(16, 16, 32), state_dtype=state_dtype)
    arguments, lengths = scene.arguments(device), [member.tokens for member in scene.members]
    names = ("ssm_state_indices", "num_computed_tokens", "num_accepted_tokens")
    batch = Batch(
        "fused_recurrent_gated_delta_rule", arguments, lengths, "cu_seqlens",
        tokens=("q", "k", "v", "g", "beta", *(["parent_token"] if form == "tree" else [])),
        sequences=tuple(name for name in names if name in arguments), pools=("initial_state", "ring"), slots=names[0], dim=1,
    )  # fmt: skip
    batch.check([1, 3, 5], backend)


@BACKENDS
def test_a_graph_is_replayed_with_other_positions(backend: str, device: torch.device) -> None:
    scene = Scene([replace(member, p=member.p + 1, a=1) for member in DRAFTS[:4]], **OF_DRAFTS)
    other = Scene(DRAFTS[:4], **OF_DRAFTS)
    check(other, backend, device)
    changes, pools = [graphs.tensors(other.arguments(device))], ("initial_state", "ring")
    graphs.check(gdn.fused_recurrent_gated_delta_rule, scene.arguments(device), pools, changes, device, backend=backend)


@BACKENDS
@pytest.mark.parametrize(("g", "beta"), [(0.0, 0.0), (0.0, 1.0), (-100.0, 1.0), (-float("inf"), 1.0), (-1e-30, 0.5)])
def test_gates(g: float, beta: float, backend: str, device: torch.device) -> None:
    scene = scene_of("drafts", is_raw=False)
    options = {"g": torch.full((1, sum(m.tokens for m in DRAFTS) + scene.padded, 4), g)}
    options["beta"] = torch.full_like(options["g"], beta)
    check(replace(scene, options=options), backend, device)


@BACKENDS
@POOLS
def test_a_fold_of_nothing_keeps_the_values(state_dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Entries with a correction and a log decay of 0."""
    scene = Scene([Member(15), Member(30)], state_dtype=state_dtype)
    arguments = scene.arguments(device)
    width = scene.heads[1] * scene.dims[0]
    before = arguments["initial_state"].clone()
    live = ~arguments["ring"][..., :1].isnan().expand_as(arguments["ring"][..., width:])
    arguments["ring"][..., width:][live] = 0.0
    gdn.fused_recurrent_gated_delta_rule(**arguments, backend=backend)
    for slot in scene.slots():
        assert torch.equal(arguments["initial_state"][slot], before[slot])


@BACKENDS
@LAYOUTS
def test_a_nan_stays_in_its_sequence(v_first: bool, backend: str, device: torch.device) -> None:
    scene = Scene([Member(20, a=2, tokens=3)] * 3, v_first=v_first, **OF_DRAFTS)
    arguments = scene.arguments(device)
    arguments["ring"][scene.slots()[1]] = torch.nan
    o, _ = gdn.fused_recurrent_gated_delta_rule(**arguments, backend=backend)
    assert bool(o[0, 3:6].isnan().all()) and not bool(o[0, :3].isnan().any()) and not bool(o[0, 6:].isnan().any())


@BACKENDS
@LAYOUTS
def test_a_chain_as_a_tree(v_first: bool, backend: str, device: torch.device) -> None:
    line = Scene(DRAFTS, v_first=v_first, **OF_DRAFTS)
    tree = replace(line, parents=parents_of(DRAFTS, "line"))
    (o, one, _), (other, two, _) = (run(scene, backend, device) for scene in (line, tree))
    found = error(other, o, groups=1)
    assert found.within(STORED[line.dtype]), found
    written = line.written()[1].to(device)
    assert error(two["ring"][written], one["ring"][written], groups=0).within(1e-6)


@BACKENDS
@LAYOUTS
@pytest.mark.parametrize("shape", ["random", "star"])
def test_trees_of_eight(shape: str, v_first: bool, backend: str, device: torch.device) -> None:
    members = [Member(p, a=1 + p % 8, tokens=8 - p % 3) for p in (8, 23, 24, 25, 40, 63)]
    fields: dict[str, Any] = {"rows": 39, "fold_every": 24, "phase": 5, "has_drafts": True, "v_first": v_first}
    check(Scene(members, parents=parents_of(members, shape), **fields), backend, device)


@BACKENDS
@LAYOUTS
@pytest.mark.parametrize("form", ["one", "drafts", "tree"])
def test_stochastic_rounding(form: str, v_first: bool, backend: str, device: torch.device) -> None:
    """Either neighbour of the reference's state in float64, another one with another seed, and nothing else of the call."""
    found = []
    for seed in (1, 2**40 + 7):
        options = {"rounding_seed": torch.tensor([seed])}
        scene = scene_of(form, state_dtype=torch.bfloat16, v_first=v_first, options=options)
        o, arguments, before = run(scene, backend, device)
        wanted = in_float64(before)
        gdn.fused_recurrent_gated_delta_rule(**wanted, backend="reference")
        pool = scene.written()[0].to(device)
        state, exact = arguments["initial_state"][pool].double(), wanted["initial_state"][pool]
        step = 2.0**-7 * exact.abs() + 1e-5 * exact.abs().max()
        assert bool(((state - exact).abs() <= step).all())
        assert abs(float(((state - exact) / step).mean())) < 0.01
        found.append((o, state))
    assert same_bits(found[0][0], found[1][0]) and not torch.equal(found[0][1], found[1][1])


@BACKENDS
def test_the_noise_is_the_references(backend: str, device: torch.device) -> None:
    """Where entries are 0 the folded state is exact before it is rounded: the noise is the same, bit for bit."""
    options = {"rounding_seed": torch.tensor([77])}
    scene = Scene([Member(15)], state_dtype=torch.bfloat16, options=options)
    results = []
    for which in (backend, "reference"):
        arguments = scene.arguments(device)
        arguments["ring"][scene.slots()[0], :15] = 0.0
        decays = scene.heads[1] * scene.dims[0] + scene.state_heads * scene.dims[1]
        arguments["ring"][scene.slots()[0], 14, decays : decays + scene.state_heads] = -1.0
        gdn.fused_recurrent_gated_delta_rule(**arguments, backend=which)
        results.append(arguments["initial_state"][scene.slots()[0]])
    assert float((results[0] != results[1]).float().mean()) < 1e-3  # exp(-1) may differ in its last bit
