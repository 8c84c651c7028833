"""Errors of replay decode: one wrong argument at a time, named, before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.described.plain import call as plain_call
from tests.ops.test_decode_launch import Kernel as DecodeKernel

Tensor = torch.Tensor
Arguments = dict[str, Any]
ROWS, FOLD_EVERY, SLOTS = 8, 3, 6  # three tokens a call
H, HV, K, V = 2, 4, 8, 4  # as plain calls have them
WIDTH = -(-(H * K + HV * (V + 1)) // 4) * 4


def ring_of(slots: int = SLOTS, rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return -torch.rand(slots, rows, width, generator=torch.Generator().manual_seed(0))


def replay(count: int) -> Arguments:
    return {
        "ring": ring_of(), "state_tokens": torch.full((SLOTS,), 2, dtype=torch.int32),
        "num_computed_tokens": torch.full((count,), 4, dtype=torch.int32), "fold_every": FOLD_EVERY, "fold_phase": 1,
        "num_accepted_tokens": torch.ones(count, dtype=torch.int32),
    }  # fmt: skip


def recurrent() -> Arguments:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 4, H, K, generator=generator).unbind()
    return {
        "q": q, "k": k, "v": torch.randn(1, 4, HV, V, generator=generator), "cu_seqlens": torch.tensor([0, 1, 4]),
        "initial_state": torch.randn(SLOTS, HV, K, V, generator=generator), "ssm_state_indices": torch.tensor([3, 1]),
        **replay(2),
    }  # fmt: skip


def fused() -> Arguments:
    given, generator = plain_call("fused_gdn_decode", 4, torch.bfloat16), torch.Generator().manual_seed(2)
    pool = torch.randn(SLOTS, *given["ssm_state"].shape[1:], generator=generator)
    windows = torch.randn(SLOTS, given["conv_state"].shape[1], 5, generator=generator)
    given |= {"ssm_state": pool, "conv_state": windows.bfloat16(), "state_indices": torch.tensor([3, 1]), **replay(2)}
    return given | {"query_start_loc": torch.tensor([0, 1, 4], dtype=torch.int32)}


def fold() -> Arguments:
    given = replay(2)
    state = torch.randn(SLOTS, HV, K, V)
    return given | {"ssm_state": state, "state_indices": torch.tensor([3, 1]), "num_k_heads": H}


CALLS: dict[str, Callable[[], Arguments]] = {
    "fused_recurrent_gated_delta_rule": recurrent, "fused_gdn_decode": fused, "fold_states": fold,
}  # fmt: skip
INDICES = dict.fromkeys(CALLS, "state_indices") | {"fused_recurrent_gated_delta_rule": "ssm_state_indices"}
POOL = dict.fromkeys(CALLS, "ssm_state") | {"fused_recurrent_gated_delta_rule": "initial_state"}
DECODE = ("fused_recurrent_gated_delta_rule", "fused_gdn_decode")


def refused(name: str, given: Arguments, error: type[Exception], argument: str) -> None:
    """The call raises an error that names the argument, and writes nothing."""
    tensors = {key: x for key, x in given.items() if isinstance(x, Tensor) and not x.is_meta}
    before = {key: x.clone() for key, x in tensors.items()}
    with pytest.raises(error, match=rf"^{argument}: expected .+, got "):
        getattr(gdn, name)(**given)
    assert all(same_bits(x, before[key]) for key, x in tensors.items())


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_are_good(name: str) -> None:
    getattr(gdn, name)(**CALLS[name]())


@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("argument", ["state_tokens", "num_computed_tokens", "fold_every"])
def test_a_ring_and_its_integers_come_together(name: str, argument: str) -> None:
    given = CALLS[name]()
    refused(name, given | {argument: None}, ValueError, argument)
    others = dict.fromkeys(("ring", "state_tokens", "num_computed_tokens", "fold_every", "num_accepted_tokens"))
    refused(name, given | others | {"fold_phase": 0, argument: given[argument]}, ValueError, argument)
    refused(name, given | others, ValueError, "fold_phase")


@pytest.mark.parametrize("name", CALLS)
def test_bad_rings(name: str) -> None:
    given = CALLS[name]()
    columns_apart = ring_of(width=2 * WIDTH)[:, :, ::2]  # whose rows start at multiples of 16 bytes
    for error, ring in ((TypeError, ring_of().bfloat16()), (ValueError, ring_of(slots=SLOTS + 1)), (ValueError, columns_apart)):
        refused(name, given | {"ring": ring}, error, "ring")


@pytest.mark.parametrize("name", DECODE)
def test_what_a_ring_does_not_go_with(name: str) -> None:
    given, indices = CALLS[name](), INDICES[name]
    refused(name, given | {indices: given[indices][:, None]}, ValueError, indices)
    kept = torch.zeros(2, 3, *given[POOL[name]].shape[1:])
    more = {"intermediate_states": kept, "intermediate_indices": torch.tensor([0, 1])}
    refused(name, given | more, ValueError, "intermediate_states")
    if name == "fused_gdn_decode":
        parents = torch.full((4,), -1, dtype=torch.int32)
        refused(name, given | {"parent_token": parents}, ValueError, "parent_token")
    else:
        refused(name, given | {"final_state_indices": torch.tensor([4, 5])}, ValueError, "final_state_indices")
        refused(
            name,
            given | {"ssm_state_indices": None, "initial_state": given["initial_state"][:2]},
            ValueError,
            "ssm_state_indices",
        )
        refused(name, given | {"inplace_final_state": False}, ValueError, "inplace_final_state")
        refused(name, given | {"initial_state": None}, ValueError, "initial_state")


def test_lengths_that_the_host_knows() -> None:
    """Without offsets: T is a shape. Those in offsets are values, see below."""
    given = recurrent()
    del given["cu_seqlens"]
    rows = {"q": torch.randn(2, 4, H, K), "k": torch.randn(2, 4, H, K), "v": torch.randn(2, 4, HV, V)}
    refused("fused_recurrent_gated_delta_rule", given | rows, ValueError, "ring")
    fewer = {key: x[:, :3].contiguous() for key, x in rows.items()}
    gdn.fused_recurrent_gated_delta_rule(**given | fewer)
    refused("fused_recurrent_gated_delta_rule", given | fewer | {"num_accepted_tokens": None}, ValueError, "num_accepted_tokens")


@pytest.mark.parametrize("name", CALLS)
def test_values_on_the_cpu(name: str) -> None:
    """What is padding for a kernel is an error on the CPU."""
    indices = INDICES[name]
    given = CALLS[name]() | {"ring": ring_of(slots=3)}
    if name == "fold_states":
        refused(name, given, ValueError, "num_computed_tokens")  # more tokens than in a state without a ring
        gdn.fold_states(**given | {"num_computed_tokens": torch.tensor([2, 4])})
    else:
        refused(name, given, ValueError, indices)
        offsets = "cu_seqlens" if name == DECODE[0] else "query_start_loc"
        refused(name, CALLS[name]() | {offsets: torch.tensor([0, 0, 4])}, ValueError, "ring")
        refused(name, CALLS[name]() | {"num_accepted_tokens": None}, ValueError, "ring")
    refused(name, CALLS[name]() | {indices: torch.tensor([1, 1])}, ValueError, indices)


def test_windows_bound_the_tokens_of_the_fused_step() -> None:
    given = fused()
    given["conv_state"] = given["conv_state"][:, :, :3]
    refused("fused_gdn_decode", given, ValueError, "ring")


@pytest.mark.parametrize("name", CALLS)
def test_ring_and_pool_share_no_element(name: str) -> None:
    """They may be views of one buffer of pages."""
    given = CALLS[name]()
    pool = given[POOL[name]]
    size, entries = pool[0].numel(), ROWS * WIDTH
    for place, error in ((size, False), (size - 4, True)):
        pages = torch.rand(SLOTS, size + entries)
        entry_rows = pages[:, place : place + entries].unflatten(1, (ROWS, WIDTH))
        views = {POOL[name]: pages[:, :size].view(pool.shape), "ring": entry_rows}
        if error:
            refused(name, given | views, ValueError, f"({POOL[name]}|ring)")
        else:
            views["ring"].neg_()
            getattr(gdn, name)(**given | views)


def test_bad_accepted_trees() -> None:
    given = {
        "ring": ring_of(), "conv_state": torch.zeros(SLOTS, 4, 5), "state_indices": torch.tensor([3, 1]),
        "parent_token": torch.tensor([-1, -1, 0, 1], dtype=torch.int32),
        "accepted_nodes": torch.tensor([0, 2], dtype=torch.int32), "num_computed_tokens": torch.tensor([4, 4]),
        "num_accepted_tokens": torch.ones(2, dtype=torch.int32), "query_start_loc": torch.tensor([0, 1, 4]), "conv_width": 4,
    }  # fmt: skip
    gdn.accept_draft_tree(**given)
    int32, name = torch.int32, "accept_draft_tree"
    for nodes in ([0, 3], [1, 0], [0, -1]):
        refused(name, given | {"accepted_nodes": torch.tensor(nodes, dtype=int32)}, ValueError, "accepted_nodes")
    refused(name, given | {"conv_state": torch.zeros(SLOTS, 4, 4)}, ValueError, "query_start_loc")
    refused(name, given | {"conv_state": torch.zeros(SLOTS - 1, 4, 5)}, ValueError, "conv_state")
    refused(name, given | {"conv_width": 1}, ValueError, "conv_width")


@pytest.mark.parametrize("backend", ["cute", "tilelang"])
def test_kernels_serve_a_ring(backend: str) -> None:
    from gdn.device import H100
    from gdn.ops.delta_rule.problem import RecurrentProblem
    from gdn.ops.layer_step.problem import GdnDecodeProblem
    from gdn.runtime import candidates
    from tests.compile.variants.base import example

    for op, kind in (("recurrent", RecurrentProblem), ("gdn_decode", GdnDecodeProblem)):
        candidate = candidates(op).get(backend)
        if candidate is None:
            continue
        problem = example(op)
        assert isinstance(problem, kind) and candidate.module.refusal(problem) is None
        with_ring = type(problem)(**{**vars(problem), "ring_rows": 16, "fold_every": 15})
        assert candidate.module.refusal(with_ring) is None
        assert candidate.module.default_config(with_ring, H100) in candidate.module.configs(with_ring, H100)


def test_a_repeated_call_launches_with_the_new_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of an earlier call: same results as the ordinary path, with other positions and another ring."""
    kernel = DecodeKernel().put(monkeypatch)
    for dtype in (torch.int32, torch.int64):
        outputs = []
        for _ in range(2):
            for p in (4, 6):
                given = fused()
                given["num_computed_tokens"] = torch.full((2,), p, dtype=dtype)
                outputs.append((gdn.fused_gdn_decode(**given), given["ring"]))
        assert all(same_bits(x, y) for x, y in zip(outputs[0] + outputs[1], outputs[2] + outputs[3], strict=True))
        assert not same_bits(outputs[0][1], outputs[1][1])
    assert kernel.prepared == 2 and kernel.launches == 8
