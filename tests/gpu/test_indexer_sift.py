"""Indexer top-k by lists of the scores above a sampled bound: the same bits as by whole scores, whatever the scores are.

Keys of one entry and a scale of any value make every score what the test wants: score(i, j) = weight[i] * scale[j].
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import gdn
from gdn.ops import _sift
from gdn.problems import MqaLogitsProblem
from gdn.testing.inputs_logits import make_mqa_inputs

pytestmark = pytest.mark.gpu

ROWS, KEYS, K = 2300, 20000, 1000
Tensor = torch.Tensor
Call = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, weights, starts, ends, k_scale


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are right but too small to pay: what is awkward with few query tiles is tested too."""
    monkeypatch.setattr(_sift, "LEAST_TILES", 64)


@contextmanager
def whole_scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The path without lists."""
    with monkeypatch.context() as patch:
        patch.setattr(_sift, "plan", lambda *arguments: None)
        yield


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows that each step could not answer from its lists."""
    counts: list[int] = []
    real = _sift.plan

    def plan(*arguments: Any) -> _sift.Plan | None:
        found = real(*arguments)
        assert found is not None, "these rows should have been sifted"
        launch = found.launch

        def watched(step: str, *rest: Any) -> None:
            launch(step, *rest)
            if step == "select":
                _, _, _, _, first, end, _ = rest
                counts.append(int((first < end).sum()))

        return dataclasses.replace(found, launch=watched)

    with monkeypatch.context() as patch:
        patch.setattr(_sift, "plan", plan)
        yield counts


def random_call(rows: int, keys: int, ranges: str = "causal_end", heads: int = 16, **fields: Any) -> dict[str, Any]:
    problem = MqaLogitsProblem(heads, 1, 128, "float8_e4m3fn", True, "float32", True, False, "float32", False, rows, keys, keys)
    problem = dataclasses.replace(problem, **fields)
    inputs = make_mqa_inputs(problem, "cuda", ranges="full" if ranges == "causal_end" else ranges)
    ends = inputs.cu_seqlen_ke
    if ranges == "causal_end":
        ends = (keys - rows + 1 + torch.arange(rows, device="cuda")).int()
    return {
        "q": inputs.q, "k": inputs.k, "weights": inputs.weights, "cu_seqlen_ks": inputs.cu_seqlen_ks, "cu_seqlen_ke": ends,
        "k_scale": inputs.k_scale, "relu": problem.relu,
    }  # fmt: skip


def made_call(scales: Tensor, starts: Tensor, ends: Tensor, weights: Tensor | None = None) -> dict[str, Any]:
    """Scores weight[i] * scale[j]."""
    rows, keys = starts.numel(), scales.numel()
    q, k = torch.zeros(rows, 16, 128, device="cuda"), torch.zeros(keys, 1, 128, device="cuda")
    q[:, 3, 5], k[:, 0, 5] = 1.0, 1.0
    of_heads = torch.zeros(rows, 16, device="cuda")
    of_heads[:, 3] = 1.0 if weights is None else weights
    fp8 = torch.float8_e4m3fn
    return {
        "q": q.to(fp8), "k": k.to(fp8), "weights": of_heads, "cu_seqlen_ks": starts.int(), "cu_seqlen_ke": ends.int(),
        "k_scale": scales[:, None].contiguous(),
    }  # fmt: skip


def full(rows: int = ROWS, keys: int = KEYS) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, device="cuda"), torch.full((rows,), keys, device="cuda")


def check(monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], k: int, **options: Any) -> tuple[Tensor, list[int]]:
    """Compares the two paths; the result, and the rows of each step that were made again."""
    with whole_scores(monkeypatch):
        want = gdn.indexer_topk(**call, topk=k, backend="cute", **options)
    with counted(monkeypatch) as again:
        got = gdn.indexer_topk(**call, topk=k, backend="cute", **options)
    wrong = (got != want).any(dim=1)
    assert not bool(wrong.any()), f"{int(wrong.sum())} rows differ, the first is {int(wrong.nonzero()[0])}; again: {again}"
    return got, again


@pytest.mark.parametrize(
    ("rows", "keys", "k", "ranges"),
    [
        (2300, 20000, 1000, "causal_end"), (4096, 32768, 2048, "causal_end"), (2200, 16391, 2047, "full"),
        (2500, 40000, 512, "random"), (3000, 33000, 2051, "causal_end"), (2200, 100000, 2048, "causal_end"),
        (4000, 20000, 1, "causal_end"),
    ],
)  # fmt: skip
def test_random_rows(rows: int, keys: int, k: int, ranges: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, again = check(monkeypatch, random_call(rows, keys, ranges), k)
    if ranges != "random":
        assert sum(again) <= rows // 500, again


@pytest.mark.parametrize("ranges", ["hard", "sequences", "causal"])
def test_ranges_of_all_kinds(ranges: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, random_call(2400, 17000, ranges), 800)


@pytest.mark.parametrize(("heads", "rows"), [(8, 4800), (32, 1150)])
def test_other_heads(heads: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, again = check(monkeypatch, random_call(rows, KEYS, heads=heads), K)
    assert sum(again) <= rows // 500, again


@pytest.mark.parametrize(
    "fields", [{"relu": False}, {"has_k_scale": False, "weights_dtype": None}, {"weights_dtype": "bfloat16"}], ids=str
)
def test_other_forms(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, random_call(2300, KEYS, **fields), K)


def sampled_keys(keys: int) -> Tensor:
    sample = torch.arange(-(-keys // 16), device="cuda")
    return (16 * sample + ((5 * sample + sample // 16 * 3) & 15)).clamp(max=keys - 1)


def noise(keys: int = KEYS, seed: int = 0) -> Tensor:
    return torch.randn(keys, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def few_large(at: Tensor) -> Tensor:
    scales = noise()
    scales[at] += 100.0
    return scales


def tied(values: int) -> Tensor:
    return (noise() * values).round() / values


def poisoned(value: float, every: int) -> Tensor:
    scales = noise()
    scales[::every] = value
    return scales


def infinite() -> Tensor:
    scales = torch.full((KEYS,), torch.inf, device="cuda")
    scales[1::2] = -torch.inf
    return scales


def zeros_but(count: int) -> Tensor:
    scales = torch.zeros(KEYS, device="cuda")
    scales[torch.randperm(KEYS, device="cuda")[:count]] = 1.0
    scales[3::7] *= -1.0  # negative zeros too
    return scales


ROW = torch.arange(KEYS)
# name -> scales, and whether every row has to be made again (None: whatever happens)
CRAFTED: dict[str, tuple[Callable[[], Tensor], bool | None]] = {
    "normal": (noise, False),
    "all equal": (lambda: torch.ones(KEYS, device="cuda"), True),
    "all zero": (lambda: torch.zeros(KEYS, device="cuda"), True),
    "zero but k - 1": (lambda: zeros_but(K - 1), None),
    "zero but k": (lambda: zeros_but(K), None),
    "zero but 2 k": (lambda: zeros_but(2 * K), None),
    "ascending": (lambda: ROW.cuda().float(), None),
    "descending": (lambda: -ROW.cuda().float(), None),
    "one coarse bin": (lambda: 1.0 + noise() * 1e-6, None),
    "32 values": (lambda: tied(8), None),
    "large on the sample only": (lambda: few_large(sampled_keys(KEYS)), True),
    "large off the sample only": (lambda: few_large((sampled_keys(KEYS) + 1).clamp(max=KEYS - 1)), None),
    "large in one warp's keys": (lambda: noise() + 10.0 * (ROW % 64 < 16).cuda(), None),
    "large at the end": (lambda: noise() + 10.0 * (ROW > KEYS - 3000).cuda(), None),
    "large at the front": (lambda: noise() + 10.0 * (ROW < 3000).cuda(), None),
    "large among 3000 in the middle": (lambda: noise() + 10.0 * ((ROW > 9000) & (ROW < 12000)).cuda(), None),
    "alternating infinities": (infinite, True),
    "some infinite": (lambda: poisoned(torch.inf, 40), None),
    "some NaN": (lambda: poisoned(torch.nan, 3), None),
    "mostly NaN": (lambda: torch.where(ROW.cuda() % 30 == 0, noise(), torch.nan), False),
    "all NaN": (lambda: torch.full((KEYS,), torch.nan, device="cuda"), False),
    "mostly -inf": (lambda: torch.where(ROW.cuda() % 11 == 0, noise(), -torch.inf), None),
    "all -inf": (lambda: torch.full((KEYS,), -torch.inf, device="cuda"), False),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, everywhere = CRAFTED[name]
    scales = make()
    starts, ends = full()
    _, again = check(monkeypatch, made_call(scales, starts, ends), K)
    if everywhere:
        assert sum(again) == ROWS
    elif everywhere is False:
        assert sum(again) < ROWS // 100
    # The order turned round in every third row, ranges of all lengths, some of at most K keys and some empty.
    weights = torch.ones(ROWS, device="cuda")
    weights[::3] = -0.5
    generator = torch.Generator("cuda").manual_seed(1)
    starts = torch.randint(0, KEYS // 4, (ROWS,), device="cuda", generator=generator)
    ends = starts + torch.randint(0, KEYS, (ROWS,), device="cuda", generator=generator)
    ends[5::50] = starts[5::50] + K
    ends[6::50] = starts[6::50] + K + 1
    ends[7::50] = starts[7::50] - 3
    check(monkeypatch, made_call(scales, starts, ends, weights), K)


def test_rows_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    room = _sift.room_for(K)
    assert room is not None
    call = random_call(6500, KEYS)
    _, again = check(monkeypatch, call, K, workspace_bytes=2200 * 4 * room.row_words)
    assert len(again) == 3
    ties = made_call(tied(8), *full(6500), None)
    check(monkeypatch, ties, K, workspace_bytes=2200 * 4 * room.row_words)


def test_few_long_rows_have_no_list_for_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four rows of 2048 see anything, so that dozens of blocks share each of them."""
    call = random_call(2048, 60000, "full")
    call["cu_seqlen_ke"] = torch.where(torch.arange(2048, device="cuda") % 1024 < 32, 60000, 5).int()
    _, again = check(monkeypatch, call, K)
    assert sum(again) == 64


def test_strided_and_wide_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(2300, KEYS)
    call["weights"] = torch.randn(2300, 40, device="cuda")[:, 7:23]
    call["k"] = call["k"].repeat(1, 2, 1)[:, :1]
    call["k_scale"] = call["k_scale"].repeat(1, 3)[:, 0]
    starts, ends = call["cu_seqlen_ks"].long().clone(), call["cu_seqlen_ke"].long().clone()
    starts[::5], ends[::7], ends[3::9] = -(2**40), 2**40, -7
    out = torch.full((2300, K + 5), -77, dtype=torch.int32, device="cuda")
    got, _ = check(monkeypatch, call | {"cu_seqlen_ks": starts, "cu_seqlen_ke": ends}, K)
    view = out[:, 3 : 3 + K]
    assert gdn.indexer_topk(**call | {"cu_seqlen_ks": starts, "cu_seqlen_ke": ends}, topk=K, out=view, backend="cute") is view
    assert torch.equal(view, got) and bool((out[:, :3] == -77).all()) and bool((out[:, 3 + K :] == -77).all())


def test_graph_with_other_ranges_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(2300, KEYS)
    out = torch.empty(2300, K, dtype=torch.int32, device="cuda")
    gdn.indexer_topk(**call, topk=K, out=out, backend="cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gdn.indexer_topk(**call, topk=K, out=out, backend="cute")
    generator = torch.Generator("cuda").manual_seed(2)
    for scales in (call["k_scale"].clone(), torch.ones(KEYS, 1, device="cuda"), noise()[:, None], infinite()[:, None]):
        starts = torch.randint(0, 3000, (2300,), device="cuda", generator=generator)
        call["cu_seqlen_ks"].copy_(starts)
        call["cu_seqlen_ke"].copy_(starts + torch.randint(0, KEYS, (2300,), device="cuda", generator=generator))
        call["k_scale"].copy_(scales)
        out.fill_(-7)
        graph.replay()
        with whole_scores(monkeypatch):
            want = gdn.indexer_topk(**call, topk=K, backend="cute")
        assert torch.equal(out, want)


def test_same_bits_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(4096, 32768)
    want, _ = check(monkeypatch, call, 2048)
    for _ in range(20):
        assert torch.equal(gdn.indexer_topk(**call, topk=2048, backend="cute"), want)
