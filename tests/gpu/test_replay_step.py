"""Replay decode in the fused step on the GPU, against its reference in float64: outputs, windows, entries, folded states."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import error, same_bits
from tests.compile.pairwise import pairwise
from tests.gpu.delta_rule import poisoned_memory
from tests.gpu.framed import frame_is_untouched, on_cpu
from tests.gpu.replay import Member
from tests.gpu.replay_step import Step
from tests.gpu.test_batch_invariance import Batch
from tests.gpu.test_gdn_decode import AXES as STEP_AXES
from tests.gpu.test_gdn_decode import BF16, F32, LAYOUTS, NULL, ROUNDING, Case
from tests.gpu.twins import check_repeats, copy_of, twin, whole
from tests.references import reference

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
OF_STATE = {F32: 4e-6, BF16: 4e-3}
OF_ENTRY = 4e-6  # of keys and corrections, in float32 from the convolution on
# One token a sequence: no live entry, one, all; folds; a new slot; padding; an empty sequence; beyond 2**24 and near 2**31.
SINGLE = [
    Member(0), Member(1), Member(14), Member(0, is_null=True), Member(15), Member(16), Member(29), Member(30), Member(7, 7),
    Member(40, 38), Member(5, tokens=0), Member(2**24 + 5), Member(2**31 - 20, 2**31 - 25),
]  # fmt: skip
DRAFTS = [
    Member(0, tokens=3), Member(3, a=3, tokens=4), Member(14, tokens=2), Member(9, is_null=True, tokens=2),
    Member(15, a=4, tokens=4), Member(16, a=3, tokens=1), Member(29, 3, a=2, tokens=4), Member(7, 7, a=4, tokens=4),
    Member(33, a=4, tokens=4), Member(5, tokens=0), Member(2**31 - 20, 2**31 - 25, a=2, tokens=4),
]  # fmt: skip
LONG = [
    Member(p, a=1 + p % 8, tokens=8 - p % 3, is_null=n == 3) for n, p in enumerate((8, 23, 24, 9, 25, 40, 63))
]  # fmt: skip
EIGHT: dict[str, Any] = {"rows": 39, "fold_every": 24, "phase": 5, "has_drafts": True}
FORMS: dict[str, dict[str, Any]] = {
    "one": {"members": [member for member in SINGLE if member.tokens], "has_offsets": False},
    "ragged": {"members": SINGLE},
    "drafts": {"members": DRAFTS, "rows": 22, "has_drafts": True},
    "eight": {"members": LONG, **EIGHT},
}


def check(step: Step, device: torch.device) -> Tensor:
    """Compares all that a call writes with the reference, and the bits of all else with what they were; returns the output."""
    arguments, ignored = step.arguments(device)
    before = twin(arguments)
    with poisoned_memory():
        assert gdn.fused_gdn_decode(**arguments, backend="cute") is arguments["out"]
    exact, narrow = on_cpu(before, wide=True), on_cpu(before, wide=False)
    expected = reference.fused_gdn_decode(**exact)
    reference.fused_gdn_decode(**narrow)
    out, case = arguments["out"], step.sized
    torch.testing.assert_close(out.double().cpu(), expected, rtol=ROUNDING[case.dtype], atol=2e-4)
    assert bool((out[ignored] == 0).all())
    frame_is_untouched(out)

    frame = copy_of(before["conv_state"])
    frame.copy_(narrow["conv_state"].to(frame.device))
    assert same_bits(whole(frame), whole(arguments["conv_state"])), "a window is not what it should be"
    for name in ("state_tokens", "num_computed_tokens", "state_indices"):
        assert torch.equal(arguments[name], before[name])

    ring, slots = arguments["ring"], arguments["state_indices"].tolist()
    folded, mask = step.written(slots, ring.shape)
    assert same_bits(ring[~mask], before["ring"][~mask]), "an entry was written that is none of the call's"
    row = 0
    for n, member in enumerate(step.members):
        for i in range(member.tokens if slots[n] != NULL else 0):
            place = (slots[n], (member.p + i) % step.rows)
            row = case.heads[0] * case.dims[0]
            end = row + case.heads[1] * case.dims[1]
            for part in (slice(0, row), slice(row, end), slice(end, end + case.heads[1])):
                found = error(ring[place][part].cpu(), exact["ring"][place][part], groups=0)
                assert found.within(OF_ENTRY), f"sequence {n}, {member}, token {i}, elements {part}: {found}"
    pool = arguments["ssm_state"]
    for slot in folded:
        found = error(pool[slot].cpu(), exact["ssm_state"][slot], groups=1)
        assert found.within(OF_STATE[case.state_dtype]), f"slot {slot}: {found}"
    rest = copy_of(pool)
    rest[folded] = before["ssm_state"][folded]
    assert same_bits(whole(rest), whole(before["ssm_state"])), "a state was written that does not fold"
    return out


AXES = {name: STEP_AXES[name] for name in STEP_AXES if name not in ("spec", "accepted", "order", "dims")} | {
    "form": list(FORMS),
    "order": ["channels", "columns"],
    "dims": [(128, 128), (64, 64), (256, 256), (64, 128), (96, 160)],
}


def is_served(row: dict[str, Any]) -> bool:
    """A cluster has eight blocks; with drafts a block has at most 64 columns, V first of whole lines of K."""
    has_drafts = row["form"] in ("drafts", "eight")
    most = {(256, 256): 1, (96, 160): 0 if has_drafts and row["v_first"] else 1}.get(row["dims"], 8)
    if has_drafts and row["dims"][1] == 128:
        most = 4
    return bool(row["heads"][1] <= most * row["heads"][0])


@pytest.mark.parametrize("row", pairwise(AXES, is_served), ids=lambda row: "-".join(str(x) for x in row.values()))
def test_variants(row: dict[str, Any], device: torch.device) -> None:
    fields = dict(row)
    check(Step(case=Case(**{k: v for k, v in fields.items() if k != "form"}), **FORMS[row["form"]]), device)


@LAYOUTS
@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, state_dtype: torch.dtype, v_first: bool, device: torch.device) -> None:
    check(Step(case=Case(heads=(16, 32), state_dtype=state_dtype, v_first=v_first), **FORMS[form]), device)


@LAYOUTS
@pytest.mark.parametrize(("fold_every", "phase"), [(1, 0), (2, 1), (15, 0), (15, 14)])
def test_every_row_and_phase(fold_every: int, phase: int, v_first: bool, device: torch.device) -> None:
    """Positions over two turns of the ring, the least number of rows and more."""
    case = Case(heads=(1, 2), dims=(64, 64), v_first=v_first)
    for rows in (fold_every + 1, fold_every + 6):
        members = [Member(p, max(0, p - 3 * fold_every - 2)) for p in range(2 * rows + 2)]
        members.insert(3, Member(0, is_null=True))
        check(Step(members, case, rows, fold_every, phase), device)


@LAYOUTS
@pytest.mark.parametrize("most", [2, 4, 8])
@pytest.mark.parametrize("fold_every", [1, 5, 15])
def test_accepted_tokens(fold_every: int, most: int, v_first: bool, device: torch.device) -> None:
    """Every number of accepted tokens, more than fold_every too, with every number of new ones."""
    members = [
        Member(p, a=a, tokens=(a + p) % (most + 1)) for p in (most, 14, 15, 17, 30, 31) for a in range(1, min(most, p) + 1)
    ]
    members.insert(3, Member(9, is_null=True, tokens=2))
    case = Case(heads=(1, 2), dims=(64, 64), v_first=v_first)
    check(Step(members, case, fold_every - 1 + 2 * most, fold_every, has_drafts=True), device)


@LAYOUTS
@pytest.mark.parametrize("has_drafts", [False, True], ids=["one token", "drafts"])
@pytest.mark.parametrize("batch", [10, 200])
def test_counts_that_make_padding(v_first: bool, has_drafts: bool, batch: int, device: torch.device) -> None:
    """As on a device, where nothing checks them: zero rows, and nothing is written. Of few sequences and of many, two kernels."""
    members = [Member(20, a=2, tokens=3) if has_drafts else Member(20)] * batch
    members[3] = Member(0, is_null=True)
    step = Step(members, Case(v_first=v_first), rows=22 if has_drafts else 16, has_drafts=has_drafts)
    arguments, _ = step.arguments(device)
    slots = arguments["state_indices"].tolist()
    arguments["state_tokens"][slots[0]] = 21  # more than p
    arguments["state_tokens"][slots[8]] = -1
    arguments["state_tokens"][slots[9]] = 2**31 - 1
    padding = [0, 3, 5, 6, 8, 9]
    if has_drafts:
        padding += [1, 2, 4]
        arguments["num_accepted_tokens"][[1, 2, 4]] = torch.tensor([0, 5, -1], dtype=torch.int32, device=device)
    arguments["state_indices"][5] = arguments["ring"].shape[0]  # a slot of the pool without a ring
    arguments["num_computed_tokens"][6] = -3
    before = twin(arguments)
    out = gdn.fused_gdn_decode(**arguments, backend="cute")
    live = torch.zeros(out.shape[0], dtype=torch.bool, device=device)
    served = [n for n in range(batch) if n not in padding]
    for n in served:
        live[step.sized.starts()[n] : step.sized.starts()[n + 1]] = True
    assert bool((out[~live] == 0).all()) and bool((out[live] != 0).any(-1).all()) and not bool(out.isnan().any())
    for name in ("ring", "ssm_state", "conv_state"):
        others = sorted(set(range(arguments[name].shape[0])) - {slots[n] for n in served})
        assert same_bits(arguments[name][others], before[name][others]), name


@LAYOUTS
@pytest.mark.parametrize("form", ["ragged", "drafts"])
def test_a_sequence_has_the_same_bits_in_any_batch(form: str, v_first: bool, device: torch.device) -> None:
    step = Step(case=Case(heads=(2, 4), v_first=v_first), **FORMS[form])
    arguments = step.arguments(device)[0] | {"out": None}
    names = ("state_indices", "num_computed_tokens", "num_accepted_tokens")
    batch = Batch(
        "fused_gdn_decode", arguments, step.sized.lengths, "query_start_loc", tokens=("mixed_qkv", "z", "b", "a"),
        sequences=tuple(name for name in names if arguments.get(name) is not None), slots="state_indices",
        pools=("ring", "ssm_state", "conv_state"),
    )  # fmt: skip
    batch.check_alone([1, 4, 6], "cute")


@LAYOUTS
@pytest.mark.parametrize("form", ["one", "drafts"])
def test_stochastic_rounding(form: str, v_first: bool, device: torch.device) -> None:
    """Either neighbour of the reference's state in float64, another one with another seed, and nothing else of the call."""
    found = []
    for seed in (1, 2**40 + 7):
        step = Step(case=Case(heads=(16, 32), state_dtype=BF16, v_first=v_first), rounding_seed=seed, **FORMS[form])
        arguments, _ = step.arguments(device)
        exact = on_cpu(arguments, wide=True) | {"rounding_seed": None}
        out = gdn.fused_gdn_decode(**arguments, backend="cute").clone()
        reference.fused_gdn_decode(**exact)
        slots, shape = arguments["state_indices"].tolist(), arguments["ring"].shape
        folded, _ = step.written(slots, shape)
        state, wanted = arguments["ssm_state"][folded].double().cpu(), exact["ssm_state"][folded]
        unit = 2.0**-7 * wanted.abs() + 1e-5 * wanted.abs().max()
        assert bool(((state - wanted).abs() <= unit).all())
        assert abs(float(((state - wanted) / unit).mean())) < 0.01
        found.append((out, state))
    assert same_bits(found[0][0], found[1][0]) and not torch.equal(found[0][1], found[1][1])


@LAYOUTS
def test_a_nan_stays_in_its_sequence(v_first: bool, device: torch.device) -> None:
    members = [Member(20, a=2, tokens=3)] * 3
    step = Step(members, Case(padding=0, v_first=v_first), rows=22, has_drafts=True)
    arguments, _ = step.arguments(device)
    arguments["ring"][int(arguments["state_indices"][1])] = torch.nan
    out = gdn.fused_gdn_decode(**arguments, backend="cute")
    assert bool(out[3:6].isnan().all()) and not bool(out[:3].isnan().any()) and not bool(out[6:].isnan().any())


@LAYOUTS
@pytest.mark.parametrize("form", ["one", "drafts", "eight"])
def test_repeats(form: str, v_first: bool, device: torch.device) -> None:
    step = Step(case=Case(heads=(8, 16), v_first=v_first), **FORMS[form])
    check_repeats(gdn.fused_gdn_decode, step.arguments(device)[0], backend="cute")


def test_longer_than_a_batch_of_tokens(device: torch.device) -> None:
    """V first, tokens are computed several at once: sequences of all lengths up to four batches and a rest."""
    members = [Member(40 + n, a=1 + n % 9, tokens=n) for n in range(1, 18)]
    members.insert(3, Member(9, is_null=True, tokens=2))
    case = Case(heads=(1, 2), dims=(64, 64))
    check(Step(members, case, rows=31 + 34, fold_every=32, has_drafts=True), device)
    check(Step(members, replace(case, v_first=False), rows=31 + 34, fold_every=32, has_drafts=True), device)


STREAMED = {name: AXES[name] for name in AXES if name not in ("dims", "v_first")} | {
    "heads": [(16, 16), (16, 32), (16, 48), (16, 64)], "form": ["one", "ragged", "drafts"],
}  # fmt: skip


@pytest.mark.parametrize("row", pairwise(STREAMED), ids=lambda row: "-".join(str(x) for x in row.values()))
def test_variants_that_stream_states(row: dict[str, Any], device: torch.device) -> None:
    """Items for all SMs, some of which have two: the default streams states through shared memory."""
    fields = {name: value for name, value in row.items() if name != "form"}
    check(Step(case=Case(dims=(128, 128), v_first=True, **fields), **FORMS[row["form"]]), device)
