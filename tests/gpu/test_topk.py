"""Top-k on a Hopper GPU, each backend against the reference, index by index: the selection is exact or it is wrong.

Scores outside of the rows' ranges are NaN and +inf; out is poisoned, and so is its margin.
"""

import functools

import pytest
import torch

import gdn
from gdn import runtime
from gdn.runtime import registry
from tests.gpu import graphs
from tests.gpu.twins import check_repeats
from tests.references import reference

pytestmark = pytest.mark.gpu

BACKENDS = tuple(registry.operator("topk").modules)
DTYPES = (torch.float32, torch.bfloat16)
COUNTS = (1, 7, 512, 1024, 2048, 2051, 4096)
# Below, at and above what each default configuration holds, and around the accesses of four and words of 32.
WIDTHS = (1, 2, 3, 5, 31, 33, 127, 513, 2047, 2048, 2049, 4099, 8192, 8193, 20000, 32767, 32768, 32769, 65536, 65537, 131072)
POISON = -77


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def between_guards(values: torch.Tensor, lead: int = 5) -> torch.Tensor:
    """The values as columns lead and on of wider rows, with +inf and NaN around them."""
    rows, columns = values.shape
    whole = torch.full((rows, columns + lead + 6), torch.inf, dtype=values.dtype, device="cuda")
    whole[:, ::2] = torch.nan
    whole[:, lead : lead + columns] = values
    return whole[:, lead : lead + columns]


def check(
    logits: torch.Tensor,
    k: int,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    sorted_by: str = "index",
    backend: str = "cute",
    margin: int = 3,
) -> torch.Tensor:
    whole = torch.full((logits.shape[0], k + margin), POISON, dtype=torch.int32, device="cuda")
    got = gdn.topk_indices(logits, k, starts, ends, sorted_by=sorted_by, out=whole[:, :k], backend=backend)
    want = reference.topk_indices(logits, k, starts, ends, sorted_by=sorted_by)
    wrong = (got != want).any(dim=1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong[:8]} of {logits.shape[0]}: {got[wrong[0]].tolist()[:8]}, not {want[wrong[0]].tolist()[:8]}"
    assert bool((whole[:, k:] == POISON).all())
    return got


def adversarial(columns: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """One row each: [rows, columns]."""
    source = generator(columns + k)

    def normal() -> torch.Tensor:
        return torch.randn(columns, device="cuda", generator=source)

    def share(probability: float) -> torch.Tensor:
        return torch.rand(columns, device="cuda", generator=source) < probability

    places = torch.arange(columns, device="cuda")
    few = torch.zeros(columns, device="cuda")  # all zero but k - 1
    few[torch.randperm(columns, device="cuda", generator=source)[: min(k - 1, columns)]] = 0.5
    few_high = few + torch.where(few > 0, normal().abs(), 0.0)
    rows = [
        torch.full((columns,), 3.25, device="cuda"),
        torch.zeros(columns, device="cuda"),
        torch.where(share(0.5), 0.0, -0.0),
        few,
        torch.where((few_high == 0) & share(0.5), -0.0, few_high),
        1 + torch.rand(columns, device="cuda", generator=source) * 1e-4,  # one coarse bin
        1 + torch.randint(0, 3, (columns,), device="cuda", generator=source) * 1.2e-7,  # neighbouring floats, in crowds
        columns - places.float(),  # descending
        places.float(),
        torch.where(places % 2 == 0, torch.inf, -torch.inf),
        torch.where(share(0.999), -torch.inf, normal()),
        torch.full((columns,), torch.nan, device="cuda"),
        torch.where(share(0.3), torch.nan, torch.where(share(0.3), -normal().abs() * torch.nan, normal())),
        torch.full((columns,), torch.inf, device="cuda"),
        normal().relu() * torch.where(share(0.5), -0.0, 1.0),  # half of them zeros of both signs
        -normal().abs() * 1e-39,  # subnormal
        normal() * 3e38,  # up to infinity
        normal(),
        normal() + (places > 0.9 * columns) * 5.0,  # what is selected is in one place
        torch.exp(20 * normal()),  # of all magnitudes
        torch.where(share(0.27), 1e20 * torch.exp(9 * normal()), normal()),  # some of them far above the others
        *(normal().abs() * torch.where(places // 8 % 8 == piece, 1.0, -1.0) for piece in (0, 3)),  # few pieces hold it all
        *(normal().abs() * torch.where(places // 8 % 8 == places // 64 * 3 % 8, one, -one) for one in (1.0, -1.0)),
    ]
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sorted_by", ["index", "score"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1000, 2048, 7001, 32768, 65536, 131072])
def test_adversarial_rows(device, columns, dtype, sorted_by, backend):
    times = 7 if columns in (7001, 32768) else 1  # more rows than SMs have other tiles
    for k in (1, 7, 512, 2048, 2051, 4096):
        check(between_guards(adversarial(columns, k, dtype).repeat(times, 1)), k, sorted_by=sorted_by, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", WIDTHS)
def test_widths_and_counts(device, columns, dtype, backend):
    values = torch.randn(9, columns, device="cuda", generator=generator(columns)).to(dtype)
    for k in sorted({*COUNTS, columns, columns + 1} & set(range(1, 4097))):
        for lead in (0, 1, 2, 3):
            check(between_guards(values, lead), k, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_short_list(device, dtype, monkeypatch):
    """A list of 4096 has no room for what passes a sampled bound where k is nearly as much, and none at all for a larger k."""
    module = runtime.candidates("topk")["cute"].module
    config = module.Config(512, 4 if dtype == torch.float32 else 8, 4, 4096, 32768)
    monkeypatch.setattr(runtime, "prepare", functools.partial(runtime.prepare, config=config))
    source = generator(7)
    for k in (2560, 2690, 3900, 4096, 4097, 6000):
        normal = torch.randn(300, 20000, device="cuda", generator=source)
        normal[100:103] = 1.5
        normal[200:250] = normal[200:250].relu()
        values = between_guards(torch.cat([adversarial(20000, k, dtype), normal.to(dtype)]), lead=3)
        check(values, k)
        if k <= 4096:
            check(values, k, sorted_by="score")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_million_columns(device, dtype, backend):
    values = torch.randn(5, 2**20, device="cuda", generator=generator(0)).to(dtype)
    values[1] = 1.0
    values[2] = values[2].relu()
    values[3, :-7] = 0.0
    values[4] = torch.arange(2**20, device="cuda").flip(0)
    for k in (1, 2048, 4096):
        for sorted_by in ("index", "score"):
            check(values, k, sorted_by=sorted_by, backend=backend)
    check(values[:, 1:1000001], 2051, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "columns"), [(65536, 1), (65536, 300), (20000, 4000), (4096, 32768), (1, 131072)])
def test_many_rows(device, rows, columns, backend):
    values = torch.randn(rows, columns, device="cuda", generator=generator(1)).relu_()
    check(values, 64, backend=backend)
    check(values, 2048, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sorted_by", ["index", "score"])
@pytest.mark.parametrize("bounds", [("int32", "int32"), ("int64", "int64"), (None, "int32"), ("int64", None)])
@pytest.mark.parametrize("columns", [900, 32768])
def test_ranges_of_any_value(device, columns, bounds, sorted_by, backend):
    source = generator(columns)
    rows = 300
    values = torch.randn(rows, columns, device="cuda", generator=source)
    made = []
    for dtype in bounds:
        if dtype is None:
            made.append(None)
            continue
        bound = torch.randint(-columns // 4, columns + columns // 4, (rows,), device="cuda", generator=source)
        limits = torch.iinfo(getattr(torch, dtype))
        bound[:4] = torch.tensor([limits.min, limits.max, 0, columns])
        made.append(bound.to(getattr(torch, dtype))[:, None].expand(rows, 2)[:, 1])
    starts, ends = made
    if starts is not None and ends is not None:
        ends[4:8] = starts[4:8] + torch.tensor([0, 1, 5, 600], device="cuda", dtype=ends.dtype)
    first = torch.zeros(rows, device="cuda") if starts is None else starts
    last = torch.full((rows,), columns, device="cuda") if ends is None else ends
    places = torch.arange(columns, device="cuda")
    outside = (places < first[:, None]) | (places >= last[:, None])
    values[outside] = torch.inf
    values[outside & (places % 2 == 0)] = torch.nan
    for k in (7, 512, 2048):
        check(between_guards(values), k, starts, ends, sorted_by, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_ranges(device, backend):
    """Prefill: row i of packed sequences sees what is before it, from its sequence's start."""
    rows = 2048
    values = torch.randn(rows, 8192, device="cuda", generator=generator(3))
    starts = (torch.arange(rows, device="cuda") // 500 * 1500).int()
    ends = starts + 1000 + torch.arange(rows, device="cuda").int() % 500 * 3
    check(values, 2048, starts, ends, backend=backend)
    check(values, 512, starts, ends, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sorted_by", ["index", "score"])
def test_repeats_are_bitwise_equal(device, sorted_by, backend):
    values = torch.cat([adversarial(32768, 2048, torch.float32), torch.randn(300, 32768, device="cuda", generator=generator(4))])
    check_repeats(gdn.topk_indices, {"logits": values}, k=2048, sorted_by=sorted_by, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_replay_with_changed_ranges(device, backend):
    rows, columns, k = 64, 65536, 2048

    def drawn(seed: int) -> dict[str, torch.Tensor]:
        options = {"device": device, "generator": generator(seed)}
        starts = torch.randint(0, columns // 2, (rows,), dtype=torch.int32, **options)
        ends = torch.randint(0, columns, (rows,), dtype=torch.int32, **options)
        ends[:3] = 0
        return {"logits": torch.randn(rows, columns, **options), "row_starts": starts, "row_ends": ends}

    changes = [drawn(seed) for seed in range(4)]
    for change in changes:
        check(change["logits"], k, change["row_starts"], change["row_ends"], backend=backend)
    arguments = drawn(5) | {"out": torch.empty(rows, k, dtype=torch.int32, device=device)}
    graphs.check(gdn.topk_indices, arguments, (), changes, device, k=k, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_strides_beyond_two_gigabytes(device, backend):
    whole = torch.zeros(3, 2**30, dtype=torch.bfloat16, device="cuda")  # the last row starts 4 GiB in
    values = whole[:, -5000:-1000]
    values.normal_(generator=generator(6))
    check(values, 100, backend=backend)
