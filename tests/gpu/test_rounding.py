"""Stochastic rounding of a bfloat16 pool on the GPU: the noise of `gdn.reference.rounding`, bit for bit.

What is rounded differs from the reference's value in its last float32 bits, which now and then moves a sum with the noise
over the edge: an element in some thousands may be the neighbour.
"""

from typing import Any

import pytest
import torch

import gdn
from gdn import reference
from gdn.testing.compare import same_bits
from gdn.testing.inputs import recurrent_inputs, recurrent_problem
from tests.gpu import cases, test_gdn_decode
from tests.gpu.test_gdn_decode import BF16, NULL, Case, copy_of

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
SEEDS = [0, -1, 2**40 + 12345]


def check(pool: Tensor, before: Tensor, expected: Tensor, nearest: Tensor) -> None:
    """expected, nearest: the reference's pools with and without the noise."""
    pool, before = pool.cpu(), before.cpu()
    written = [slot for slot in range(len(pool)) if not same_bits(nearest[slot], before[slot])]
    assert written
    for slot in range(len(pool)):
        if slot not in written:
            assert same_bits(pool[slot], before[slot])
    found, wanted, other = (x[written].contiguous().view(torch.int16).int() for x in (pool, expected, nearest))
    assert float((wanted != other).float().mean()) > 0.2, "the noise does nothing"
    assert int((found - wanted).abs().max()) <= 1
    assert float((found != wanted).float().mean()) < 2e-3


def wide(value: Any, pool: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.cpu().clone()
    return value.double() if value.is_floating_point() and not pool else value


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("every_token", [True, False])
@pytest.mark.parametrize("dim", [128, 64])
def test_recurrent(seed: int, v_first: bool, every_token: bool, dim: int, device: torch.device) -> None:
    row = cases.MAIN | {"state_v_first": v_first, "state_dtype": "bfloat16", "head_k_dim": dim, "head_v_dim": dim}
    problem = recurrent_problem(**row, write_every_token=every_token, has_accepted=every_token)
    options: dict[str, Any] = {"lengths": [1, 0, 4, 3, 2, 1], "slot_gap": 24, "null_sequences": [3], "null_slot": NULL}
    arguments = recurrent_inputs(problem, device, **options)
    arguments["rounding_seed"] = torch.tensor([seed], device=device)
    before = arguments["initial_state"].clone()
    pools = []
    for given in (arguments, arguments | {"rounding_seed": None}):
        copies = {name: wide(value, name == "initial_state") for name, value in given.items()}
        reference.fused_recurrent_gated_delta_rule(**copies)
        pools.append(copies["initial_state"])
    gdn.fused_recurrent_gated_delta_rule(**arguments, backend="cute")
    check(arguments["initial_state"], before, *pools)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(state_dtype=BF16),
        Case(state_dtype=BF16, spec=7, v_first=False),
        Case(state_dtype=BF16, lengths=(1,) * 9, offsets_dtype=None, heads=(1, 3), dims=(64, 128)),
    ],
    ids=["ragged", "spec", "single"],
)
def test_decode(case: Case, seed: int, device: torch.device) -> None:
    arguments, _ = test_gdn_decode.make(case, device)
    arguments["rounding_seed"] = torch.tensor([seed], device=device)
    before = copy_of(arguments["ssm_state"])
    pools = []
    for given in (arguments, arguments | {"rounding_seed": None}):
        copies = {name: wide(value, name == "ssm_state") for name, value in given.items()}
        reference.fused_gdn_decode(**copies)
        pools.append(copies["ssm_state"])
    gdn.fused_gdn_decode(**arguments, backend="cute")
    check(arguments["ssm_state"], before, *pools)


def test_a_replayed_graph_reads_the_seed(device: torch.device) -> None:
    arguments, _ = test_gdn_decode.make(Case(state_dtype=BF16, lengths=(1,) * 5, offsets_dtype=None), device)
    seed = torch.tensor([5], device=device)
    fresh, found = copy_of(arguments["ssm_state"]), []
    gdn.fused_gdn_decode(**arguments, rounding_seed=seed, backend="cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gdn.fused_gdn_decode(**arguments, rounding_seed=seed, backend="cute")
    windows = copy_of(arguments["conv_state"])
    for value in (5, 6, 5):
        seed.fill_(value)
        arguments["ssm_state"].copy_(fresh)
        arguments["conv_state"].copy_(windows)
        graph.replay()
        found.append(arguments["ssm_state"].clone())
    assert same_bits(found[0], found[2]) and not same_bits(found[0], found[1])
