"""The steps around the recurrence on the GPU: both convolutions, split, gates and gated norm.

Every tensor that a kernel may touch lies inside a larger one full of NaN: what must not be read poisons the result, and
what must not be written is compared bit for bit. Expected outputs are float64, expected states are bits.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.compile.pairwise import pairwise
from tests.gpu import graphs
from tests.gpu.delta_rule import Arguments
from tests.gpu.framed import check_windows, frame_is_untouched, framed, on_cpu, windows
from tests.gpu.twins import check_repeats, copy_of, twin
from tests.references import reference

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}  # twice the half unit in the last place
NULL = 0


def check(actual: Tensor, exact: Tensor, rounding: float | None = None) -> None:
    assert actual.shape == exact.shape
    rtol = ROUNDING[actual.dtype] if rounding is None else rounding
    torch.testing.assert_close(actual.double().cpu(), exact.double().cpu(), rtol=rtol, atol=1e-5)


@dataclass(frozen=True)
class Case:
    """A convolution call; everything else follows from the seed."""

    lengths: tuple[int, ...] = (5, 1, 0, 2, 70, 3, 33, 4)
    dim: int = 136
    width: int = 4
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.bfloat16
    bias_dtype: torch.dtype | None = None
    activation: str | None = "silu"
    state_dtype: torch.dtype = torch.bfloat16
    order: str = "channels"  # which of a slot's dims is contiguous: channels, columns, neither
    index_dtype: torch.dtype = torch.int32
    offsets_dtype: torch.dtype = torch.int32
    strided: bool = True  # rows of x and out are slices of wider ones
    padding: int = 3  # rows after the last sequence
    extra_columns: int = 0  # of the conv state, after those that are used

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.padding


class Maker:
    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case, self.device = case, device
        self.source = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.source).to(self.case.dtype if dtype is None else dtype).to(self.device)

    def framed(self, values: Tensor, left: int = 8, right: int = 16) -> Tensor:
        """The same values as columns left .. -right of a wider tensor of NaN."""
        if not self.case.strided:
            return values.clone()
        return framed(values, left, right)

    def offsets(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.case.lengths)], dtype=self.case.offsets_dtype, device=self.device)

    def tokens(self, dead: tuple[int, ...] = ()) -> Tensor:
        """x, with NaN in the rows that belong to no live sequence."""
        x = self.normal(self.case.tokens, self.case.dim)
        starts = [0, *accumulate(self.case.lengths)]
        x[starts[-1] :] = torch.nan
        for n in dead:
            x[starts[n] : starts[n + 1]] = torch.nan
        return self.framed(x)

    def out(self) -> Tensor:
        return self.framed(self.normal(self.case.tokens, self.case.dim).fill_(torch.nan))

    def filter(self) -> Arguments:
        case = self.case
        weight = self.normal(case.dim, case.width, dtype=case.weight_dtype)
        bias = None if case.bias_dtype is None else self.normal(case.dim, dtype=case.bias_dtype)
        return {"weight": weight, "bias": bias, "activation": case.activation}

    def pool(self, slots: int, columns: int) -> Tensor:
        """[slots, dim, columns] of NaN, in a frame of NaN."""
        case = self.case
        return windows(slots, case.dim, columns + case.extra_columns, case.order, case.state_dtype, self.device)

    def slots(self, count: int, total: int) -> list[int]:
        """Different slots, none of them the null slot."""
        return (torch.randperm(total - 1, generator=self.source)[:count] + 1).tolist()


def run(function: str, state: str, arguments: Arguments, dead_rows: list[int]) -> Tensor:
    """Runs the kernel and compares outputs, states and everything around them."""
    exact = getattr(reference, function)(**on_cpu(arguments, wide=True))
    expected = on_cpu(arguments, wide=False)
    getattr(reference, function)(**expected)
    pool, out = arguments[state], arguments["out"]
    before = copy_of(pool)
    result = getattr(gdn, function)(**arguments, backend="cute")
    assert result is out
    check(out, exact)
    assert bool((out[dead_rows] == 0).all())
    frame_is_untouched(out)
    check_windows(before, pool, expected[state])
    return out


def rows_of(case: Case, sequences: tuple[int, ...]) -> list[int]:
    """Rows of these sequences, and those after the last."""
    starts = [0, *accumulate(case.lengths)]
    rows = [row for n in sequences for row in range(starts[n], starts[n + 1])]
    return rows + list(range(starts[-1], case.tokens))


AXES: dict[str, Any] = {
    "width": [4, 3, 2],
    "dtype": [torch.bfloat16, torch.float16],
    "weight_dtype": [torch.bfloat16, torch.float32],
    "bias_dtype": [None, torch.float32, torch.bfloat16],
    "activation": ["silu", None],
    "state_dtype": [torch.bfloat16, torch.float32],
    "order": ["channels", "columns", "neither"],
    "index_dtype": [torch.int32, torch.int64],
    "offsets_dtype": [torch.int32, torch.int64],
    "strided": [True, False],
    "dim": [136, 1032],
}
CASES = [Case(**row) for row in pairwise(AXES)]


def case_name(case: Case) -> str:
    def short(dtype: torch.dtype | None) -> str:
        return "none" if dtype is None else str(dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")

    kinds = (case.dtype, case.weight_dtype, case.bias_dtype, case.state_dtype, case.index_dtype, case.offsets_dtype)
    return f"w{case.width}-{case.dim}-{case.activation}-{case.order}-{'-'.join(map(short, kinds))}-{case.strided}"


# --- prefill -----------------------------------------------------------------------------------------------------------


def prefill(case: Case, device: torch.device, mask: bool = True, checkpoints: int = 0, dead: tuple[int, ...] = (3,)) -> Arguments:
    make = Maker(case, device)
    count = case.count
    total = count + count * checkpoints + 4
    slots = make.slots(count * (1 + checkpoints), total)
    pool = make.pool(total, case.width - 1)
    continued = [n % 3 != 1 for n in range(count)] if mask else [True] * count
    for n in range(count):
        if n in dead:
            slots[n] = NULL if n % 2 else -7
        elif continued[n]:  # the windows of all others are NaN, and so are the columns after the window
            window = make.normal(case.dim, case.width - 1, dtype=case.state_dtype)
            pool[slots[n], :, : case.width - 1] = window.to(case.dtype).to(case.state_dtype)
    arguments = {
        "x": make.tokens(dead), **make.filter(), "conv_states": pool, "query_start_loc": make.offsets(),
        "cache_indices": torch.tensor([*slots[:count], 999], dtype=case.index_dtype, device=device)[: count + 1],
        "has_initial_state": torch.tensor([*continued, True], device=device) if mask else None,
        "null_slot": NULL, "out": make.out(),
    }  # fmt: skip
    if checkpoints:
        targets = torch.tensor(slots[count:]).view(count, checkpoints)
        offsets = torch.tensor([[min(1 + 5 * i * (n % 3), n * 9 + 1) for i in range(checkpoints)] for n in range(count)])
        offsets[4, 0], offsets[6, 0] = 64, case.lengths[6]  # inside and at the end
        offsets[7, 0], offsets[5, 0] = case.lengths[7] + 1, 0  # beyond, and none
        targets[4, 1] = NULL
        arguments["checkpoint_offsets"] = offsets.to(torch.int32).to(device)
        arguments["checkpoint_slots"] = targets.to(case.index_dtype).to(device)
    return arguments


def run_prefill(case: Case, device: torch.device, dead: tuple[int, ...] = (3,), **options: Any) -> Tensor:
    arguments = prefill(case, device, dead=dead, **options)
    return run("causal_conv1d_fn", "conv_states", arguments, rows_of(case, dead))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_prefill(case: Case, device: torch.device) -> None:
    run_prefill(replace(case, extra_columns=case.width % 2), device)


def test_prefill_without_mask(device: torch.device) -> None:
    run_prefill(Case(), device, mask=False)


@pytest.mark.parametrize("order", ["channels", "columns"])
def test_prefill_checkpoints(order: str, device: torch.device) -> None:
    run_prefill(Case(order=order, index_dtype=torch.int64), device, checkpoints=2)


@pytest.mark.parametrize("case", CASES[1::3], ids=case_name)
def test_prefill_checkpoints_of_variants(case: Case, device: torch.device) -> None:
    run_prefill(case, device, checkpoints=2)


@pytest.mark.parametrize("order", ["channels", "columns"])
def test_prefill_checkpoints_of_float16_behind_long_tiles(order: str, device: torch.device) -> None:
    """Tiles of 32 rows, loaded four at a time as words of two values; the first ones start from windows of float32."""
    case = Case(
        lengths=(5, 1, 0, 2, 1500, 3, 1700, 4), dim=8192, dtype=torch.float16, state_dtype=torch.float32, order=order,
        index_dtype=torch.int64,
    )  # fmt: skip
    run_prefill(case, device, checkpoints=2)


def test_prefill_continues_from_a_checkpoint(device: torch.device) -> None:
    """The rest of a prompt after a checkpoint's window is the rest of the whole prompt, bit for bit."""
    case = Case(lengths=(201, 70), dim=256, padding=0, strided=False)
    make = Maker(case, device)
    x, filters = make.tokens(), make.filter()
    pool = make.pool(8, 3)
    fresh = torch.tensor([False, False], device=device)
    targets = torch.tensor([[2, 3, 4], [5, 6, 7]], device=device)
    offsets = torch.tensor([[64, 128, 192], [64, 0, 128]], device=device)
    whole_prompt = gdn.causal_conv1d_fn(
        x, **filters, conv_states=pool, query_start_loc=make.offsets(), has_initial_state=fresh, backend="cute",
        cache_indices=torch.tensor([0, 1], device=device), checkpoint_offsets=offsets, checkpoint_slots=targets,
    )  # fmt: skip
    for slot, start, end in ((2, 64, 201), (3, 128, 201), (4, 192, 201), (5, 201 + 64, 271)):
        rest = gdn.causal_conv1d_fn(
            x[start:end], **filters, conv_states=pool.clone(), cache_indices=torch.tensor([slot], device=device), backend="cute"
        )  # fmt: skip
        assert same_bits(rest, whole_prompt[start:end])
    assert bool(pool[6:].isnan().all()), "a checkpoint of no tokens, or beyond the sequence, was written"


def test_prefill_a_checkpoint_in_the_sequences_own_slot(device: torch.device) -> None:
    arguments = prefill(Case(), device, checkpoints=2)
    arguments["checkpoint_slots"][4, 0] = arguments["cache_indices"][4]
    run("causal_conv1d_fn", "conv_states", arguments, rows_of(Case(), (3,)))


@pytest.mark.parametrize("lengths", [(0,), (1,), (2,), (3,), (4,), (31,), (32,), (33,), (129,), (0, 0, 1), (2, 0, 0)], ids=str)
def test_prefill_few_tokens(lengths: tuple[int, ...], device: torch.device) -> None:
    """Sequences shorter than the window, of whole tiles, and one token more or less."""
    case = Case(lengths=lengths, padding=0 if sum(lengths) else 2)
    run_prefill(case, device, dead=(), mask=False)
    run_prefill(case, device, dead=())


def test_prefill_every_short_sequence(device: torch.device) -> None:
    """More sequences than one step of the search can tell apart, most of them shorter than the window."""
    case = Case(lengths=tuple((7 * n) % 5 for n in range(1100)), dim=8)
    run_prefill(case, device, dead=tuple(range(3, 1100, 50)))


def test_prefill_only_padding(device: torch.device) -> None:
    run_prefill(Case(lengths=(4, 9), padding=40), device, dead=(0, 1))


def test_prefill_without_pool_or_offsets(device: torch.device) -> None:
    make = Maker(Case(lengths=(77,), padding=0), device)
    x, filters = make.tokens(), make.filter()
    y = gdn.causal_conv1d_fn(x, **filters, backend="cute")
    check(y, reference.causal_conv1d_fn(x.cpu().double(), filters["weight"].cpu().double()))
    offsets = torch.tensor([0, 40, 40, 77], dtype=torch.int32, device=device)
    y = gdn.causal_conv1d_fn(x, **filters, query_start_loc=offsets, backend="cute")
    check(y, reference.causal_conv1d_fn(x.cpu().double(), filters["weight"].cpu().double(), query_start_loc=offsets.cpu()))


def test_prefill_slots_by_number(device: torch.device) -> None:
    """The slot of a sequence without cache_indices is its number, and null_slot makes none of them padding."""
    arguments = prefill(Case(), device, mask=False, dead=())
    pool = arguments["conv_states"]
    order = arguments["cache_indices"][:-1].long()
    pool[: Case().count] = pool[order].clone()
    arguments |= {"cache_indices": None, "null_slot": 3}
    run("causal_conv1d_fn", "conv_states", arguments, rows_of(Case(), ()))


def test_prefill_unaligned_rows(device: torch.device) -> None:
    """Copies where a row does not start at 16 bytes, and where tokens are neighbours in memory."""
    make = Maker(Case(lengths=(50,), padding=0), device)
    values, filters = make.normal(50, 136), make.filter()
    exact = reference.causal_conv1d_fn(values.cpu().double(), filters["weight"].cpu().double())
    odd, out = make.framed(values, left=3, right=2), make.framed(values, left=5, right=1).fill_(torch.nan)
    for x in (odd, values.t().contiguous().t()):
        assert gdn.causal_conv1d_fn(x, **filters, out=out, backend="cute") is out
        check(out, exact)
        frame_is_untouched(out)


def test_prefill_feeds_strided_views_of_many_tiles(device: torch.device) -> None:
    """A row as wide as a model's, and every tile of a long prompt with its neighbours' rows."""
    case = Case(lengths=(1000, 700, 348), dim=8192, padding=0)
    run_prefill(case, device, dead=())


def test_prefill_repeats(device: torch.device) -> None:
    case = Case(lengths=(3, 2, 500, 1, 900, 40, 33, 64), dim=2048)
    check_repeats(gdn.causal_conv1d_fn, prefill(case, device, checkpoints=2), backend="cute")


def test_prefill_pool_beyond_32_bits(device: torch.device) -> None:
    dim, step = 64, 2**31 + 64
    memory = torch.empty(step + 3 * dim, dtype=torch.bfloat16, device=device)
    pool = torch.as_strided(memory, (2, dim, 3), (step, 1, dim))
    make = Maker(Case(dim=dim, lengths=(20,), padding=0), device)
    pool[1] = make.normal(dim, 3)
    arguments = {"x": make.tokens(), **make.filter()}
    expected = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    small = pool[1:].cpu().clone()
    exact = reference.causal_conv1d_fn(**expected, conv_states=small)
    y = gdn.causal_conv1d_fn(
        **arguments, conv_states=pool, cache_indices=torch.tensor([1], device=device), backend="cute"
    )  # fmt: skip
    check(y, exact, 2.0**-7)
    assert same_bits(pool[1].cpu(), small[0])


# --- decode ------------------------------------------------------------------------------------------------------------


def decode(case: Case, device: torch.device, spec: int | None = None, accepted: bool = True, tree: bool = False) -> Arguments:
    """spec: drafts that the indices have columns for; None = 1-D indices. Sequences 3 and, by its count, 5 are padding."""
    make = Maker(case, device)
    count, window = case.count, case.width - 1
    columns = 1 if spec is None else 1 + spec
    total = count * columns + 4
    indices = torch.tensor(make.slots(count * columns, total)).view(count, columns)
    pool = make.pool(total, window + (0 if spec is None or tree else spec))
    counts = torch.tensor([1 + n % columns for n in range(count)], dtype=torch.int32)
    counts[5] = columns + 1 if count > 5 and columns > 1 else counts[5]
    for n in range(count):
        column = int(counts[n]) - 1 if accepted else 0
        if n == 3:
            indices[n] = NULL
        elif column < columns:
            history = make.normal(case.dim, window).to(case.state_dtype)
            if tree:
                pool[int(indices[n, column]), :, :window] = history
            else:
                pool[int(indices[n, 0]), :, column : column + window] = history
    if tree and columns > 2:
        indices[0, 1] = NULL  # a node whose window is not kept
    given = indices if spec is not None else indices[:, 0]
    spread = torch.stack([given, torch.full_like(given, 999)], -1).to(case.index_dtype).to(device)
    dead = dead_of(case, spec is not None and accepted)
    arguments = {
        "x": make.tokens(dead), **make.filter(), "conv_state": pool, "query_start_loc": make.offsets(),
        "conv_state_indices": spread[..., 0], "null_slot": NULL, "out": make.out(),
        "num_accepted_tokens": counts.to(device) if accepted and spec is not None else None,
    }  # fmt: skip
    if tree:
        parents = []
        for n, length in enumerate(case.lengths):
            parents += [-1 if i == 0 or (i + n) % 4 == 3 else (i * 5 + n) % i for i in range(length)]
        arguments["parent_token"] = torch.tensor(parents + [0] * case.padding, dtype=torch.int32, device=device)
    return arguments


def dead_of(case: Case, accepted: bool) -> tuple[int, ...]:
    return (3, 5) if accepted and case.count > 5 else (3,)


DECODE = (1, 4, 0, 2, 3, 1, 5, 2, 1)


def run_decode(case: Case, device: torch.device, spec: int | None = None, accepted: bool = True, tree: bool = False) -> None:
    arguments = decode(case, device, spec, accepted, tree)
    dead = dead_of(case, accepted and spec is not None)
    run("causal_conv1d_update", "conv_state", arguments, rows_of(case, dead))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_decode(case: Case, device: torch.device) -> None:
    run_decode(replace(case, lengths=DECODE, extra_columns=case.width % 2), device)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_decode_speculative(case: Case, device: torch.device) -> None:
    run_decode(replace(case, lengths=DECODE), device, spec=4)


@pytest.mark.parametrize("case", CASES[::2], ids=case_name)
def test_decode_tree(case: Case, device: torch.device) -> None:
    run_decode(replace(case, lengths=DECODE), device, spec=4, tree=True)


def test_decode_tree_equals_its_paths(device: torch.device) -> None:
    """Every node of a tree gives what its path gives as a line of tokens; so does the step after an accepted node."""
    dim, parents = 256, [-1, 0, 0, 1, 2, 4]
    case = Case(lengths=(len(parents),), dim=dim, padding=0, strided=False)
    make = Maker(case, device)
    x, filters = make.tokens(), make.filter()
    start, following = make.normal(dim, 3), make.normal(1, dim)
    pool = make.pool(9, 3)
    pool[2] = start
    columns = torch.tensor([[1, 2, 3, 4, 5, 6]], device=device)
    tree = gdn.causal_conv1d_update(
        x, pool, **filters, conv_state_indices=columns, query_start_loc=make.offsets(), backend="cute",
        num_accepted_tokens=torch.tensor([2], dtype=torch.int32, device=device),
        parent_token=torch.tensor(parents, dtype=torch.int32, device=device),
    )  # fmt: skip
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        own = start[None].clone()
        line = [gdn.causal_conv1d_update(x[i : i + 1], own, **filters, backend="cute") for i in path]
        assert same_bits(tree[node : node + 1], line[-1])
        assert same_bits(pool[node + 1], own[0])
        after = gdn.causal_conv1d_update(following, own, **filters, backend="cute")
        found = gdn.causal_conv1d_update(
            following, pool.clone(), **filters, conv_state_indices=columns, backend="cute",
            num_accepted_tokens=torch.tensor([node + 1], dtype=torch.int32, device=device),
            parent_token=torch.tensor([-1], dtype=torch.int32, device=device),
        )  # fmt: skip
        assert same_bits(found, after)
    assert bool(pool[[0, 7, 8]].isnan().all()), "a slot of no node was written"


def test_decode_columns_without_accepted(device: torch.device) -> None:
    run_decode(Case(lengths=DECODE), device, spec=4, accepted=False)
    run_decode(Case(lengths=DECODE), device, spec=4, accepted=False, tree=True)


def test_decode_more_tokens_than_columns(device: torch.device) -> None:
    """Columns that do not fit into the slot are not kept."""
    run_decode(Case(lengths=(9, 1, 6, 2, 7, 8, 3)), device, spec=2)
    run_decode(Case(lengths=(9, 1, 6, 2, 7, 8, 3)), device, spec=2, tree=True)


def test_decode_one_token_each(device: torch.device) -> None:
    """[B, dim], without offsets, and slots by number."""
    case = Case(lengths=(1,) * 9, padding=0)
    arguments = decode(case, device) | {"query_start_loc": None}
    run("causal_conv1d_update", "conv_state", arguments, [3])
    arguments = decode(case, device) | {"query_start_loc": None, "conv_state_indices": None, "null_slot": 2}
    make = Maker(case, device, seed=1)
    arguments["x"][3] = make.normal(case.dim)
    arguments["conv_state"][:9] = make.normal(9, case.dim, 3)
    run("causal_conv1d_update", "conv_state", arguments, [])


@pytest.mark.parametrize("tokens", [1, 4])
def test_decode_three_dimensions(tokens: int, device: torch.device) -> None:
    """[B, dim, T], contiguous or with neighbouring channels; the result and out have that shape too."""
    case = Case(lengths=(tokens,) * 6, padding=0, strided=False)
    arguments = decode(case, device) | {"query_start_loc": None}
    flat = arguments["x"].view(6, tokens, case.dim)
    for x in (flat.mT.contiguous(), flat.mT):
        given = arguments | {"x": x, "conv_state": copy_of(arguments["conv_state"]), "out": torch.full_like(x, torch.nan)}
        run("causal_conv1d_update", "conv_state", given, [3])
        given = arguments | {"x": x, "conv_state": copy_of(arguments["conv_state"]), "out": None}
        again = gdn.causal_conv1d_update(**given, backend="cute")
        assert again.shape == x.shape and again.is_contiguous()


def test_decode_continues_prefill(device: torch.device) -> None:
    """A prompt cut anywhere, the rest token by token, is the whole prompt."""
    case = Case(lengths=(12,), padding=0, strided=False)
    make = Maker(case, device)
    x, filters = make.tokens(), make.filter()
    expected = gdn.causal_conv1d_fn(x, **filters, backend="cute")
    for cut in range(1, 12):
        pool = make.pool(1, 3)
        rows = [
            gdn.causal_conv1d_fn(
                x[:cut], **filters, conv_states=pool, backend="cute",
                has_initial_state=torch.tensor([False], device=device),
            )
        ]  # fmt: skip
        rows += [gdn.causal_conv1d_update(x[t : t + 1], pool, **filters, backend="cute") for t in range(cut, 12)]
        assert same_bits(torch.cat(rows), expected)


def test_graph_with_changing_contents(device: torch.device) -> None:
    """Captured once; offsets, slots, masks and counts change between replays."""
    prompts = {(40, 2, 22, 0): (1,), (3, 50, 0, 9): (0,)}  # and the sequences that are padding, in 70 rows
    drafts = {(4, 1, 3, 0, 2, 3): (3, 5), (1, 0, 5, 2, 1, 3): (3, 5)}  # in 15 rows
    for function, state, rows, steps in (
        ("causal_conv1d_fn", "conv_states", 70, prompts), ("causal_conv1d_update", "conv_state", 15, drafts)
    ):  # fmt: skip
        made = []
        for lengths, dead in steps.items():
            case = Case(lengths=lengths, padding=rows - sum(lengths), dim=256)
            made.append(prefill(case, device, dead=dead) if steps is prompts else decode(case, device, spec=4))
            run(function, state, twin(made[-1]), rows_of(case, dead))
        changes = [graphs.tensors(given) for given in (made[1], made[0])]
        graphs.check(getattr(gdn, function), made[0], (state,), changes, device, backend="cute")


# --- split, gates, norm ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "dims"), [((16, 32), (128, 128)), ((2, 2), (64, 64)), ((2, 6), (60, 100)), ((1, 8), (256, 64))], ids=str
)
@pytest.mark.parametrize("length", [0, 1, 7, 300])
def test_split(length: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    make = Maker(Case(dtype=dtype), device)
    qkvz = make.framed(make.normal(length, 2 * heads[0] * dims[0] + 2 * heads[1] * dims[1]))
    ba = make.framed(make.normal(length, 2 * heads[1]), left=1, right=2)
    found = gdn.fused_qkvzba_split_reshape_cat(qkvz, ba, *heads, *dims, backend="cute")
    expected = reference.fused_qkvzba_split_reshape_cat(qkvz.cpu(), ba.cpu(), *heads, *dims)
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous() and same_bits(one.cpu(), other)


@pytest.mark.parametrize("heads", [32, 6, 1])
@pytest.mark.parametrize("length", [0, 1, 9, 5000])
def test_gating(length: int, heads: int, device: torch.device) -> None:
    make = Maker(Case(), device)
    a, b = (make.framed(make.normal(length, heads) * 8, left=heads, right=3) for _ in range(2))
    if length:
        a[0, 0], a[-1, -1], b[0, 0], b[-1, -1] = -60.0, 60.0, -80.0, 80.0
    for A_log, dt_bias, more in (
        (make.normal(heads, dtype=torch.float32), make.normal(heads, dtype=torch.float32), ()),
        (make.normal(heads), make.normal(2 * heads, dtype=torch.float32)[::2], (0.5, 3.0)),
    ):
        g, beta = gdn.fused_gdn_gating(A_log, a, b, dt_bias, *more, backend="cute")
        exact = reference.fused_gdn_gating(*(x.cpu().double() for x in (A_log, a, b, dt_bias)), *more)
        for one, other in ((g, exact[0]), (beta, exact[1])):
            assert one.dtype == torch.float32 and one.is_contiguous()
            torch.testing.assert_close(one.cpu().double(), other, rtol=4e-6, atol=1e-37)
    wide = gdn.fused_gdn_gating(A_log, a[None].float(), b[None].float(), dt_bias)
    assert wide[0].shape == wide[1].shape == (1, length, heads)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dim", [128, 64, 256, 100, 60, 512])
def test_rms_norm_gated(dim: int, activation: str, device: torch.device) -> None:
    make = Maker(Case(), device)
    for length, heads in ((1, 1), (3, 4), (700, 6)):
        for dtype, z_dtype, weight_dtype in (
            (torch.bfloat16, torch.bfloat16, torch.float32),
            (torch.float16, torch.float32, torch.bfloat16),
        ):
            x = make.normal(length, heads, dim, dtype=dtype)
            z = make.normal(length, heads * dim, dtype=z_dtype)
            weight = make.normal(dim, dtype=weight_dtype)
            x[0, 0] = 0.0
            exact = reference.rms_norm_gated(
                x.cpu().double(), z.view(x.shape).cpu().double(), weight.cpu().double(), 1e-5, activation
            )
            wide, odd = make.framed(z), make.framed(z, left=1, right=2)
            for gate in (part.unflatten(1, (heads, dim)) for part in (z, wide, odd)):
                for rows in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
                    y = gdn.rms_norm_gated(rows, gate, weight, 1e-5, activation, backend="cute")
                    assert y.is_contiguous() and y.dtype == dtype
                    check(y, exact)
    flat = gdn.rms_norm_gated(x[:, 0], gate[:, 0], weight, 1e-5, activation)
    check(flat, exact[:, 0])


@pytest.mark.parametrize("zero_centred", [True, False])
@pytest.mark.parametrize("dim", [2048, 4096, 40, 8, 5120, 16384])
def test_add_rms_norm(dim: int, zero_centred: bool, device: torch.device) -> None:
    make = Maker(Case(), device)
    for length in (1, 3, 33, 4500):
        for dtype, weight_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
            x, residual = make.normal(length, dim, dtype=dtype), make.normal(length, dim, dtype=dtype)
            weight = make.normal(dim, dtype=weight_dtype)
            x[0], residual[0] = 0.0, 0.0
            total = (x.float() + residual.float()).to(dtype)
            wide = total.cpu().double()
            exact = reference.add_rms_norm(wide, None, weight.cpu().double(), 1e-5, zero_centred=zero_centred)[0]
            for rows in (x, make.framed(x), make.framed(x, left=1, right=2)):
                normed, found = gdn.add_rms_norm(rows, residual, weight, 1e-5, zero_centred=zero_centred, backend="cute")
                assert normed.is_contiguous() and found.is_contiguous() and normed.dtype == found.dtype == dtype
                assert torch.equal(found, total)
                check(normed, exact)
            for rows in (total, make.framed(total)):  # the norm alone: the same bits
                again, same = gdn.add_rms_norm(rows, None, weight, 1e-5, zero_centred=zero_centred, backend="cute")
                assert torch.equal(again, normed) and same is rows


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [2048, 5120, 40])
def test_add_rms_norm_with_a_layer_scale(dim: int, scale_dtype: torch.dtype, device: torch.device) -> None:
    make = Maker(Case(), device)
    weight, scale = make.normal(dim), make.normal(dim, dtype=scale_dtype)
    for length in (1, 33, 4500):
        for dtype in (torch.bfloat16, torch.float16):
            x, residual = make.normal(length, dim, dtype=dtype), make.normal(length, dim, dtype=dtype)
            normed, found = gdn.add_rms_norm(make.framed(x), residual, weight, 1e-5, layer_scale=scale, backend="cute")
            check(found, residual.cpu().double() + x.cpu().double() * (1 + scale.cpu().double()))
            check(normed, reference.add_rms_norm(found.cpu().double(), None, weight.cpu().double(), 1e-5)[0])


@pytest.mark.parametrize("dim", [2048, 5120])
def test_rows_of_add_rms_norm_do_not_depend_on_the_batch(dim: int, device: torch.device) -> None:
    make = Maker(Case(), device)
    x, residual, weight = make.normal(9000, dim), make.normal(9000, dim), make.normal(dim)
    whole = gdn.add_rms_norm(x, residual, weight, backend="cute")
    for part in (slice(0, 1), slice(8999, 9000), slice(17, 50), slice(1000, 3500)):
        for one, other in zip(gdn.add_rms_norm(x[part], residual[part], weight, backend="cute"), whole, strict=True):
            assert torch.equal(one, other[part])
