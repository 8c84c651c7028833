"""The fused decode step on the GPU, against its reference in float64.

Every tensor that the kernel may touch lies inside a larger one full of NaN, and so do the slots that are nobody's: what
must not be read poisons the result, and what must not be written is compared bit for bit. Windows are copies of inputs:
they are compared bit for bit too.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.device import H100
from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.compile.pairwise import pairwise
from tests.gpu import graphs
from tests.gpu.delta_rule import Arguments
from tests.gpu.framed import StepCase, check_states, check_windows, frame_is_untouched, framed, on_cpu, states, windows
from tests.gpu.twins import check_repeats, copy_of, twin, whole
from tests.references import reference

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 2.0**-8, F16: 2.0**-10, F32: 1e-5}  # of 16 bits: twice the half unit in the last place
NULL = 0
POOLS = ("conv_state", "ssm_state")


@dataclass(frozen=True)
class Case(StepCase):
    """A call; everything else follows from the seed."""

    lengths: tuple[int, ...] = (1, 2, 0, 4, 1, 3, 8, 1)
    offsets_dtype: torch.dtype | None = torch.int32  # None = one token per sequence, no offsets
    spec: int | None = None  # drafts that the indices have columns for; None = 1-D indices
    accepted: bool = True  # with columns: num_accepted_tokens is given
    padding: int = 3  # rows after the last sequence, with offsets

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + (self.padding if self.offsets_dtype is not None else 0)

    @property
    def columns(self) -> int:
        return 1 if self.spec is None else 1 + self.spec


def make(case: Case, device: torch.device, seed: int = 0) -> tuple[Arguments, list[int]]:
    """Arguments, and the sequences that are padding: 3; where counts are given, 5 by its count and 6 by its state's slot."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=source).to(dtype).to(device)

    count, columns = case.count, case.columns
    total = count * columns + 4
    indices = (torch.randperm(total - 1, generator=source)[: count * columns] + 1).view(count, columns)
    counts = torch.tensor([1 + n % columns for n in range(count)], dtype=torch.int32)
    dead = [3] if count > 3 else []
    indices[dead] = NULL
    if columns > 1 and case.accepted and count > 6:
        counts[5], counts[6] = columns + 1, 2
        indices[6, 1] = NULL
        dead += [5, 6]
    if columns > 2 and count > 2:
        indices[1, 2] = NULL  # a state that is not kept
    conv = windows(total, case.channels, case.width - 2 + columns, case.order, case.conv_dtype, device)
    ssm = states(case, total, device)
    for n in range(count):
        column = int(counts[n]) - 1 if case.accepted else 0
        if n not in dead and case.lengths[n]:
            conv[int(indices[n, 0]), :, column : column + case.width - 1] = normal(
                case.channels, case.width - 1, dtype=case.dtype
            ).to(case.conv_dtype)
            ssm[int(indices[n, column])] = normal(*ssm.shape[1:], dtype=case.state_dtype)

    given = indices if case.spec is not None else indices[:, 0]
    spread = torch.stack([given, torch.full_like(given, 9999)], -1).to(case.index_dtype).to(device)
    starts = case.starts()
    ignored = [row for n in dead for row in range(starts[n], starts[n + 1])] + list(range(starts[-1], case.tokens))
    arguments = {
        **case.arguments(normal, ignored, F32, (4, 3)), "conv_state": conv, "ssm_state": ssm, "state_indices": spread[..., 0],
        "query_start_loc": None if case.offsets_dtype is None
        else torch.tensor(starts, dtype=case.offsets_dtype, device=device),
        "num_accepted_tokens": counts.to(device) if case.spec is not None and case.accepted else None,
        "null_slot": NULL,
    }  # fmt: skip
    return arguments, ignored


def judge(case: Case, before: Arguments, arguments: Arguments, ignored: list[int]) -> None:
    """arguments: as the kernel left them; before: the same before it ran."""
    exact, narrow = on_cpu(before, wide=True), on_cpu(before, wide=False)
    expected = reference.fused_gdn_decode(**exact)
    reference.fused_gdn_decode(**narrow)
    out = arguments["out"]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=ROUNDING[case.dtype], atol=2e-4)
    assert bool((out[ignored] == 0).all())
    frame_is_untouched(out)
    check_windows(before["conv_state"], arguments["conv_state"], narrow["conv_state"])
    check_states(before["ssm_state"], arguments["ssm_state"], exact["ssm_state"], 1e-5 if case.state_dtype == F32 else 4e-3)


def run(case: Case, device: torch.device, seed: int = 0) -> None:
    arguments, ignored = make(case, device, seed)
    before = twin(arguments)
    assert gdn.fused_gdn_decode(**arguments, backend="cute") is arguments["out"]
    judge(case, before, arguments, ignored)


AXES: dict[str, Any] = {
    "offsets_dtype": [torch.int32, torch.int64],
    "heads": [(2, 4), (1, 1), (2, 6), (1, 4), (1, 8)],
    "dims": [(128, 128), (64, 64), (256, 256), (64, 128), (96, 160)],
    "dtype": [BF16, F16],
    "other_dtype": [BF16, F32],
    "weight_dtype": [BF16, F32],
    "bias_dtype": [None, F32, BF16],
    "width": [4, 3, 2],
    "activation": ["silu", None],
    "gate_activation": ["silu", "sigmoid"],
    "has_norm": [True, False],
    "layout": ["flat", "interleaved", "merged", "concatenated"],
    "conv_dtype": [BF16, F32],
    "order": ["channels", "columns", "neither"],
    "state_dtype": [F32, BF16],
    "v_first": [True, False],
    "index_dtype": [torch.int32, torch.int64],
    "spec": [None, 3, 7],
    "accepted": [True, False],
}


def is_served(row: dict[str, Any]) -> bool:
    """A cluster has eight blocks: two value heads of 256 x 256, one of 96 x 160."""
    most = {(256, 256): 2, (96, 160): 1}.get(row["dims"], 8)
    return bool(row["heads"][1] <= most * row["heads"][0])


CASES = [Case(**row) for row in pairwise(AXES, is_served)]


def name(case: Case) -> str:
    values = [getattr(case, field) for field in AXES]
    return "-".join(str(value).removeprefix("torch.").replace(" ", "") for value in values)


LAYOUTS = pytest.mark.parametrize("v_first", [True, False], ids=["V-first", "K-first"])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_variants(case: Case, device: torch.device) -> None:
    run(case, device)


@pytest.mark.parametrize("case", CASES[::2], ids=name)
def test_one_token_each(case: Case, device: torch.device) -> None:
    """Calls without offsets, with and without columns."""
    run(replace(case, lengths=(1,) * 9, offsets_dtype=None), device)


@LAYOUTS
def test_more_tokens_than_columns(v_first: bool, device: torch.device) -> None:
    """States without a column are not kept."""
    run(Case(lengths=(9, 1, 6, 2, 7, 8, 3), spec=2, v_first=v_first), device)


@pytest.mark.parametrize("spec", [39])
def test_more_columns_than_lanes(spec: int, device: torch.device) -> None:
    case = Case(lengths=(36, 1, 40), spec=spec)
    arguments, ignored = make(case, device)
    accepted, before = torch.tensor([38, 35, 1], dtype=torch.int32), {}
    arguments["num_accepted_tokens"] = accepted.to(device)
    for n, column in enumerate(accepted.tolist()):
        slots = arguments["state_indices"][n].tolist()
        arguments["ssm_state"][slots[column - 1]] = torch.randn(arguments["ssm_state"].shape[1:], device=device)
        arguments["conv_state"][slots[0]] = torch.randn(arguments["conv_state"].shape[1:], device=device).to(BF16)
    before = twin(arguments)
    gdn.fused_gdn_decode(**arguments, backend="cute")
    judge(case, before, arguments, ignored)


@LAYOUTS
@pytest.mark.parametrize("lengths", [(0,), (1,), (0, 0, 5), (8,), (0,) * 40 + (1,)], ids=str)
def test_few_tokens(lengths: tuple[int, ...], v_first: bool, device: torch.device) -> None:
    run(Case(lengths=lengths, spec=7 if len(lengths) < 3 else None, v_first=v_first), device)


@LAYOUTS
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_many_sequences(dims: tuple[int, int], v_first: bool, device: torch.device) -> None:
    run(Case(lengths=(1,) * 200, offsets_dtype=None, heads=(2, 4), dims=dims, v_first=v_first), device)


Configure = Callable[..., None]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Configure:
    """configure(number, sequences): the operator runs with that one of `configs`, and remembers no call."""
    operator = importlib.import_module("gdn.ops.layer_step.decode")
    module = importlib.import_module("kernels_cute.gdn_decode")

    def set_config(number: int, sequences: int | None = None) -> None:
        def prepare(problem: Any, device: torch.device, backend: str) -> runtime.Prepared:
            sizes = {} if sequences is None else {"num_sequences": sequences, "num_tokens": sequences}
            space = module.configs(replace(problem, **sizes), H100)
            return runtime.prepare(problem, device, backend, config=space[number % len(space)])

        monkeypatch.setattr(operator, "prepare", prepare)
        env.reload()  # forgets calls seen before

    return set_config


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize(
    "case", [Case(), Case(lengths=(1,) * 9, offsets_dtype=None), Case(spec=7, heads=(2, 2))], ids=["ragged", "single", "spec"]
)
def test_configurations(case: Case, number: int, configure: Configure, device: torch.device) -> None:
    configure(number)
    run(case, device)


K_FIRST_CASES = [
    replace(case, state_dtype=dtype, v_first=False, dims=dims)
    for case in (Case(), Case(lengths=(1,) * 9, offsets_dtype=None), Case(spec=7, heads=(2, 2)))
    for dtype in (F32, BF16)
    for dims in ((128, 128), (64, 64), (256, 256), (64, 128))
]


@pytest.mark.parametrize("sequences", [1, 512], ids=["few", "many"])
@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("case", K_FIRST_CASES, ids=name)
def test_configurations_k_first(case: Case, number: int, sequences: int, configure: Configure, device: torch.device) -> None:
    configure(number, sequences)
    run(case, device)


@LAYOUTS
def test_repeats(v_first: bool, device: torch.device) -> None:
    for case in (
        Case(v_first=v_first), Case(spec=7, v_first=v_first), Case(spec=7, v_first=v_first, state_dtype=BF16),
        Case(lengths=(1,) * 60, offsets_dtype=None, heads=(8, 16), v_first=v_first),
    ):  # fmt: skip
        check_repeats(gdn.fused_gdn_decode, make(case, device)[0], backend="cute")


@LAYOUTS
@pytest.mark.parametrize("has_out", [True, False])
@pytest.mark.parametrize("spec", [None, 7])
def test_graph_with_changing_contents(spec: int | None, has_out: bool, v_first: bool, device: torch.device) -> None:
    """Captured once; offsets, slots and counts change between replays."""
    first = Case(spec=spec, v_first=v_first)
    second, nothing = replace(first, lengths=(0, 8, 1, 1, 3, 1, 2, 4)), replace(first, lengths=(0,) * 8, padding=first.tokens)
    arguments, changes = make(first, device)[0], []
    for seed, case in enumerate((second, first, nothing, second)):
        run(case, device, seed)
        changes.append(graphs.tensors(make(case, device, seed)[0]))
    if not has_out:
        for given in (arguments, *changes):
            del given["out"]
    graphs.check(gdn.fused_gdn_decode, arguments, POOLS, changes, device, backend="cute")


@LAYOUTS
def test_decode_after_decode_equals_verification(v_first: bool, device: torch.device) -> None:
    """Four tokens in one call, or one call each: the same window, and the same state within rounding."""
    case = Case(lengths=(4,), padding=0, v_first=v_first)
    arguments, _ = make(case, device)
    single = twin(arguments)
    gdn.fused_gdn_decode(**arguments, backend="cute")
    for row in range(4):
        rows = {key: single[key][row : row + 1] for key in ("mixed_qkv", "z", "b", "a", "out")}
        gdn.fused_gdn_decode(**{**single, **rows, "query_start_loc": None}, backend="cute")
    assert same_bits(single["conv_state"], arguments["conv_state"])
    torch.testing.assert_close(single["out"], arguments["out"], rtol=2.0**-7, atol=1e-4)
    torch.testing.assert_close(single["ssm_state"], arguments["ssm_state"], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_separate_operators(device: torch.device) -> None:
    """The result is that of the operators one after the other, within the roundings between them."""
    case = Case(lengths=(1,) * 6, offsets_dtype=None)
    arguments, ignored = make(case, device)
    (H, HV), (K, V) = case.heads, case.dims
    pools = {key: copy_of(arguments[key]) for key in POOLS}
    fused = gdn.fused_gdn_decode(**arguments, backend="cute")
    x = gdn.causal_conv1d_update(
        arguments["mixed_qkv"], pools["conv_state"], arguments["conv_weight"], conv_state_indices=arguments["state_indices"],
        null_slot=NULL,
    )  # fmt: skip
    q, k, v = x.split([H * K, H * K, HV * V], dim=1)
    o, _ = gdn.fused_recurrent_gated_delta_rule(
        q.unflatten(1, (H, K))[None], k.unflatten(1, (H, K))[None], v.unflatten(1, (HV, V))[None], arguments["a"][None],
        arguments["b"][None], initial_state=pools["ssm_state"], use_qk_l2norm_in_kernel=True, state_v_first=True,
        cu_seqlens=torch.arange(7, device=device), ssm_state_indices=arguments["state_indices"], use_gate_in_kernel=True,
        A_log=arguments["A_log"], dt_bias=arguments["dt_bias"], use_beta_sigmoid_in_kernel=True, null_slot=NULL,
    )  # fmt: skip
    parts = gdn.rms_norm_gated(o[0], arguments["z"], arguments["norm_weight"]).flatten(1)
    parts[ignored] = 0
    assert same_bits(pools["conv_state"], arguments["conv_state"])
    torch.testing.assert_close(fused, parts, rtol=0.05, atol=0.05)
    torch.testing.assert_close(pools["ssm_state"], arguments["ssm_state"], rtol=0.02, atol=0.05, equal_nan=True)


@LAYOUTS
def test_pools_beyond_32_bits(v_first: bool, device: torch.device) -> None:
    case = Case(lengths=(1, 2), heads=(1, 1), padding=0, v_first=v_first)
    arguments, ignored = make(case, device)
    small = {key: copy_of(arguments[key]) for key in POOLS}
    slots = arguments["state_indices"].tolist()
    for key in POOLS:
        pool, step = arguments[key], 2**31 + 64
        memory = torch.empty(step + pool[0].numel() * 2, dtype=pool.dtype, device=device)
        strides = (1, case.channels) if key == "conv_state" else (pool.stride(1), pool.stride(2), pool.stride(3))
        big = torch.as_strided(memory, (2, *pool.shape[1:]), (step, *strides))
        for n, slot in enumerate(slots):
            big[n] = pool[slot]
        arguments[key] = big
    arguments["state_indices"] = torch.tensor([0, 1], dtype=torch.int32, device=device)
    arguments["null_slot"] = -1
    before = {**arguments, **small, "state_indices": torch.tensor(slots, dtype=torch.int32), "null_slot": NULL, "out": None}
    exact = on_cpu(before, wide=True)
    expected = reference.fused_gdn_decode(**exact)
    gdn.fused_gdn_decode(**arguments, backend="cute")
    torch.testing.assert_close(arguments["out"].double().cpu(), expected, rtol=2.0**-8, atol=2e-4)
    for n, slot in enumerate(slots):
        torch.testing.assert_close(arguments["ssm_state"][n].double().cpu(), exact["ssm_state"][slot], rtol=1e-5, atol=1e-5)
        assert same_bits(arguments["conv_state"][n].cpu().double(), exact["conv_state"][slot])
    assert ignored == []


def test_unaligned_rows(device: torch.device) -> None:
    """Copied where a row does not start at 16 bytes; out may lie anywhere."""
    case = Case(lengths=(1,) * 5, offsets_dtype=None)
    arguments, ignored = make(case, device)
    before = twin(arguments)
    arguments["mixed_qkv"] = framed(arguments["mixed_qkv"], 3, 2)
    arguments["out"] = framed(arguments["out"], 5, 1)
    gdn.fused_gdn_decode(**arguments, backend="cute")
    judge(case, before, arguments, ignored)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"head_k_dim": 127}, r"^mixed_qkv: expected shape"),
        ({"state_v_first": True, "ssm_state": None}, r"^ssm_state: expected a torch.Tensor, got NoneType"),
        ({"num_accepted_tokens": torch.ones(8, dtype=torch.int32)}, r"^num_accepted_tokens: expected .* on cuda"),
        ({"rounding_seed": torch.ones(1, dtype=torch.int64)}, r"^rounding_seed: expected .* on cuda"),
        ({"norm_weight": torch.ones(128)}, r"^norm_weight: expected .* on cuda"),
        ({"null_slot": -3}, r"^null_slot: expected an int >= -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_calls_touch_nothing(changes: Arguments, pattern: str, device: torch.device) -> None:
    arguments, _ = make(Case(spec=7), device)
    before = {key: copy_of(arguments[key]) for key in ("out", *POOLS)}
    with pytest.raises((TypeError, ValueError), match=pattern):
        gdn.fused_gdn_decode(**{**arguments, **changes}, backend="cute")
    assert all(same_bits(whole(before[key]), whole(arguments[key])) for key in before)


def test_refused_head_dims(device: torch.device) -> None:
    arguments, _ = make(Case(lengths=(1,) * 5, offsets_dtype=None, dims=(40, 40)), device)
    with pytest.raises(ValueError, match=r"cute.*requires head dims that are multiples of 32"):
        gdn.fused_gdn_decode(**arguments, backend="cute")
