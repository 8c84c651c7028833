"""`fold_states` and `accept_draft_tree` on the GPU, next to the reference; all else keeps its bits."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import error, same_bits
from tests.compile.pairwise import pairwise
from tests.gpu.delta_rule import backends, poisoned_memory
from tests.gpu.replay_slots import NULL_SLOT, Fold, Trees
from tests.gpu.twins import twin

pytestmark = pytest.mark.gpu

FOLDS: dict[str, Any] = {
    "heads": [(2, 4), (16, 32), (4, 4), (2, 6)],
    "dims": [(128, 128), (64, 64), (256, 256), (60, 100), (128, 60)],
    "state_dtype": [torch.float32, torch.bfloat16],
    "v_first": [True, False],
    "ring": [(22, 15), (16, 15), (39, 24), (2, 1), (8, 4)],  # rows, fold_every
    "layers": [3, None, 1],
    "has_accepted": [True, False],
    "has_final": [False, True],
    "has_rounding": [False, True],
    "index_dtype": [torch.int32, torch.int64],
}
OF_STATE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def check(scene: Fold, backend: str, device: torch.device) -> None:
    arguments = scene.arguments(device)
    before, exact = twin(arguments), twin(arguments)
    exact |= {name: exact[name].double() for name in ("ssm_state", "ring")} | {"rounding_seed": None}
    with poisoned_memory():
        gdn.fold_states(**arguments, backend=backend)
    gdn.fold_states(**exact, backend="reference")
    assert torch.equal(arguments["state_tokens"], exact["state_tokens"]) and same_bits(arguments["ring"], before["ring"])
    pools = [x["ssm_state"] if scene.layers is not None else x["ssm_state"][None] for x in (arguments, before, exact)]
    found, old, expected = (x.flatten(0, 1) for x in pools)
    is_written = torch.tensor([not same_bits(a, b.double()) for a, b in zip(expected, old.double(), strict=True)])
    assert bool(is_written.any()) and same_bits(found[~is_written], old[~is_written])
    limit = OF_STATE[scene.state_dtype] * (2 if scene.has_rounding else 1)
    difference = error(found[is_written], expected[is_written], groups=2)
    assert difference.within(limit), difference


@pytest.mark.parametrize("backend", backends("fold_states"))
@pytest.mark.parametrize("row", pairwise(FOLDS), ids=lambda row: "-".join(str(x) for x in row.values()))
def test_folds(row: dict[str, Any], backend: str, device: torch.device) -> None:
    fields = {name: value for name, value in row.items() if name != "ring"}
    if row["state_dtype"] == torch.float32:
        fields["has_rounding"] = False
    rows, fold_every = row["ring"]
    check(Fold(**fields, rows=rows, fold_every=fold_every), backend, device)


@pytest.mark.parametrize("backend", backends("fold_states"))
@pytest.mark.parametrize("sequences", [1, 130, 300])
def test_folds_of_many(sequences: int, backend: str, device: torch.device) -> None:
    """More sequences than a block lists at once."""
    check(Fold(sequences=max(sequences, 5), dims=(64, 64), layers=1, seed=sequences), backend, device)


@pytest.mark.parametrize("backend", backends("fold_states"))
@pytest.mark.parametrize("v_first", [True, False])
def test_noise_is_the_references_bit_for_bit(v_first: bool, backend: str, device: torch.device) -> None:
    """Where every sum is exact but for one rounding: of all entries, the last alone has a key, with one value in it."""
    scene = Fold(state_dtype=torch.bfloat16, has_rounding=True, v_first=v_first)
    arguments = scene.arguments(device)
    ring, (key_heads, _), (K, _) = arguments["ring"], scene.heads, scene.dims
    ring.mul_(0.0)  # NaN stays
    for slot, p in zip(arguments["state_indices"].tolist(), arguments["num_computed_tokens"].tolist(), strict=True):
        if NULL_SLOT < slot < ring.shape[1] and p > int(arguments["state_tokens"][slot]):
            entry = ring[:, slot, (p - 1) % scene.rows]
            entry[:, 3 : key_heads * K : K] = 1.0
            entry[:, key_heads * K : -8] = torch.linspace(-3, 3, entry.shape[1] - 8 - key_heads * K, device=device)
            entry[:, -8 - scene.heads[1] :] = 0.0  # decays, and what lies behind them
    exact, nearest = twin(arguments), twin(arguments)
    gdn.fold_states(**arguments, backend=backend)
    gdn.fold_states(**exact, backend="reference")
    gdn.fold_states(**nearest | {"rounding_seed": None}, backend="reference")
    assert same_bits(arguments["ssm_state"], exact["ssm_state"]) and not same_bits(exact["ssm_state"], nearest["ssm_state"])


@pytest.mark.parametrize("backend", backends("fold_states"))
def test_a_second_fold_finds_nothing(backend: str, device: torch.device) -> None:
    arguments = Fold().arguments(device)
    gdn.fold_states(**arguments, backend=backend)
    after = twin(arguments)
    gdn.fold_states(**arguments, backend=backend)
    assert all(same_bits(arguments[name], after[name]) for name in ("ssm_state", "state_tokens"))


TREES: dict[str, Any] = {
    "layers": [3, None, 1],
    "rows": [22, 8, 39],
    "width": [200, 6176],
    # Channels, dtype, and whether they are contiguous: more than a block moves at once, and others than whole accesses.
    "windows": [
        None,
        (256, torch.bfloat16, True),
        (256, torch.float32, False),
        (104, torch.float16, True),
        (10280, torch.bfloat16, True),
        (1604, torch.bfloat16, True),
        (8192, torch.float32, True),
        (2568, torch.bfloat16, False),
    ],
    "conv_width": [4, 3, 2],
    "index_dtype": [torch.int32, torch.int64],
    "offsets_dtype": [torch.int32, torch.int64],
    "seed": [0, 1, 2, 3],
}


@pytest.mark.parametrize("backend", backends("accept_draft_tree"))
@pytest.mark.parametrize("row", pairwise(TREES), ids=lambda row: "-".join(str(x) for x in row.values()))
def test_paths(row: dict[str, Any], backend: str, device: torch.device) -> None:
    dim, dtype, is_contiguous = row["windows"] or (None, torch.bfloat16, True)
    fields = {name: value for name, value in row.items() if name != "windows"}
    scene = Trees(**fields, dim=dim, conv_dtype=dtype, channels_contiguous=is_contiguous)
    arguments = scene.arguments(device)
    exact = twin(arguments)
    gdn.accept_draft_tree(**arguments, backend=backend)
    gdn.accept_draft_tree(**exact, backend="reference")
    for name in ("ring", "num_accepted_tokens", *(("conv_state",) if dim is not None else ())):
        assert same_bits(arguments[name], exact[name]), name


@pytest.mark.parametrize("backend", backends("accept_draft_tree"))
@pytest.mark.parametrize(("nodes", "furthest"), [(8, 8), (8, 2), (32, 3), (32, 1)])
def test_large_trees(nodes: int, furthest: int, backend: str, device: torch.device) -> None:
    """Paths of up to 32 nodes. furthest: most nodes between a node and its parent, counted with the parent; 1 is a chain."""
    count = 40
    arguments = replace(Trees(), lengths=(nodes,) * count, rows=2 * nodes).arguments(device)
    draw = random.Random(nodes + furthest)
    parents = [i - draw.randint(1, min(furthest, i + 1)) for _ in range(count) for i in range(nodes)]
    arguments["parent_token"] = torch.tensor(parents, dtype=torch.int32, device=device)
    exact = twin(arguments)
    gdn.accept_draft_tree(**arguments, backend=backend)
    gdn.accept_draft_tree(**exact, backend="reference")
    assert all(same_bits(arguments[name], exact[name]) for name in ("ring", "conv_state", "num_accepted_tokens"))


def test_the_scenes_have_padding(device: torch.device) -> None:
    assert int((Fold().arguments(device)["state_indices"] == NULL_SLOT).sum()) == 1
    assert int((Trees().arguments(device)["state_indices"] == NULL_SLOT).sum()) == 1
