"""out=x of both convolutions: equal to the call out of place, on the reference and on a kernel that writes as it reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.problem import Problem
from gdn.testing.compare import same_bits
from tests.ops.stand_in import StandIn
from tests.references import reference

BF16, INT32 = torch.bfloat16, torch.int32
DIM, WIDTH = 16, 4
Arguments = dict[str, Any]


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


class Kernels(StandIn):
    """In place, the two forms that read rows again must have got a temporary."""

    def __init__(self) -> None:
        super().__init__()
        self.in_place = 0

    def launch(self, problem: Problem, params: Any) -> None:
        {"conv1d": self.prefill, "conv1d_update": self.update}[problem.op](problem, *params)

    def prefill(
        self, p: Any, x: Any, weight: Any, bias: Any, states: Any, offsets: Any, indices: Any, mask: Any,
        checkpoint_offsets: Any, checkpoint_slots: Any, checkpoint_windows: Any, out: Any, null_slot: Any,
    ) -> None:  # fmt: skip
        assert not overlap(x, out), "a block would read rows that another has written"
        out.copy_(reference.causal_conv1d_fn(
            x, weight, bias, conv_states=states, query_start_loc=offsets, cache_indices=indices,
            has_initial_state=None if mask is None else mask.bool(), activation="silu" if p.silu else None,
            null_slot=null_slot,
        ))  # fmt: skip

    def update(
        self, p: Any, x: Any, weight: Any, bias: Any, states: Any, indices: Any, accepted: Any, offsets: Any, parents: Any,
        out: Any, null_slot: Any,
    ) -> None:  # fmt: skip
        options = {"activation": "silu" if p.silu else None, "null_slot": null_slot}
        assert parents is None or not overlap(x, out), "a node would read an ancestor that is overwritten"
        self.in_place += overlap(x, out)
        if offsets is None:  # row by row, each read before it is written
            for row in range(x.shape[0]):
                one = slice(row, row + 1)
                out[one] = reference.causal_conv1d_update(
                    x[one], states, weight, bias, conv_state_indices=indices[one], **options
                )
            return
        out.copy_(reference.causal_conv1d_update(
            x, states, weight, bias, conv_state_indices=indices, num_accepted_tokens=accepted, query_start_loc=offsets,
            parent_token=parents, **options,
        ))  # fmt: skip


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


def prefill() -> Arguments:
    return {
        "x": normal(9, DIM), "weight": normal(DIM, WIDTH), "bias": normal(DIM), "conv_states": normal(5, DIM, WIDTH - 1),
        "query_start_loc": torch.tensor([0, 2, 2, 8]), "cache_indices": torch.tensor([3, 1, 2]),
    }  # fmt: skip


def step(x: torch.Tensor, **more: Any) -> Arguments:
    return {"x": x, "weight": normal(DIM, WIDTH), "conv_state": normal(9, DIM, WIDTH + 2), **more}


def tree() -> Arguments:
    return step(
        normal(4, DIM), query_start_loc=torch.tensor([0, 3, 4]), conv_state_indices=torch.tensor([[1, 2, 3], [4, 5, 6]]),
        parent_token=torch.tensor([-1, 0, 0, -1], dtype=INT32), num_accepted_tokens=torch.tensor([2, 1]),
    )  # fmt: skip


FORMS: dict[str, tuple[str, Callable[[], Arguments], bool]] = {  # the operator, a call, whether the kernel writes x itself
    "prefill": ("causal_conv1d_fn", prefill, False),
    "step": ("causal_conv1d_update", lambda: step(normal(3, DIM), conv_state_indices=torch.tensor([4, 1, 7])), True),
    "a wider buffer": (
        "causal_conv1d_update", lambda: step(normal(3, 2 * DIM)[:, :DIM], conv_state_indices=torch.tensor([4, 1, 7])), True,
    ),
    "several tokens": (
        "causal_conv1d_update",
        lambda: step(normal(2, DIM, 3), conv_state_indices=torch.tensor([4, 1])),
        False,
    ),
    "packed drafts": (
        "causal_conv1d_update",
        lambda: step(
            normal(4, DIM), query_start_loc=torch.tensor([0, 3, 4]), conv_state_indices=torch.tensor([[1, 1, 1], [4, 4, 4]]),
            num_accepted_tokens=torch.tensor([2, 1]),
        ),
        True,
    ),
    "draft tree": ("causal_conv1d_update", tree, False),
}  # fmt: skip


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_in_place(form: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name, make, writes_x = FORMS[form]
    kernels = Kernels()
    if has_kernel:
        kernels.put(monkeypatch)
    pool = "conv_states" if name == "causal_conv1d_fn" else "conv_state"
    apart, in_place = make(), make()
    apart["x"] = apart["x"].clone()
    expected = getattr(reference, name)(**apart)
    found = getattr(gdn, name)(**in_place, out=in_place["x"])
    assert found is in_place["x"] and same_bits(found, expected) and same_bits(in_place[pool], apart[pool])
    assert (kernels.launches, kernels.in_place) == ((1, int(writes_x)) if has_kernel else (0, 0))


@pytest.mark.parametrize("form", ["prefill", "step", "draft tree"])
def test_an_equal_view_is_x_too(form: str) -> None:
    name, make, _ = FORMS[form]
    apart, in_place = make(), make()
    expected = getattr(reference, name)(**apart)
    out = in_place["x"].view_as(in_place["x"])
    assert getattr(gdn, name)(**in_place, out=out) is out
    assert same_bits(in_place["x"], expected)


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("form", ["prefill", "step"])
def test_another_part_of_x_is_refused(form: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name, make, _ = FORMS[form]
    kernels = Kernels()
    if has_kernel:
        kernels.put(monkeypatch)
    arguments = make()
    rows = torch.cat([arguments["x"], arguments["x"][:1]])
    before = rows.clone()
    with pytest.raises(ValueError, match="^out: expected memory of its own, got elements that it shares with x"):
        getattr(gdn, name)(**arguments | {"x": rows[:-1], "out": rows[1:]})
    assert kernels.launches == 0 and same_bits(rows, before)
