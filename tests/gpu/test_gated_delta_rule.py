"""gdn.gated_delta_rule on a Hopper GPU: the rows of each form have the bits of that form alone, without a sync, in graphs."""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.crossing import RECURRENT_TOKENS
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem
from gdn.runtime import registry
from tests.gpu import graphs
from tests.gpu.waits import no_waits

pytestmark = pytest.mark.gpu

BACKENDS = tuple(registry.operator("chunk").modules)
SIZES = {"num_q_heads": 4, "num_k_heads": 4, "num_v_heads": 8, "head_k_dim": 128, "head_v_dim": 128, "index_dtype": "int32"}
STEPS = [[1, 3, 1, 200, 70], [1, 1, 1], [130, 1, 2], [RECURRENT_TOKENS, 0, RECURRENT_TOKENS + 1]]


def step(lengths: list[int], **fields: Any) -> dict[str, Any]:
    problem = chunk_problem(**SIZES | {"dtype": "bfloat16", "use_qk_l2norm": True} | fields)
    return chunk_inputs(problem, "cuda", 3, lengths=lengths) | {"lengths_host": tuple(lengths)}


def parts(arguments: dict[str, Any], lengths: list[int], backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the pool after each form has computed its rows alone."""
    lead = next((n for n, length in enumerate(lengths) if length > RECURRENT_TOKENS), len(lengths))
    tokens = sum(lengths[:lead])
    pool = arguments["initial_state"].clone()
    common = {k: v for k, v in arguments.items() if k not in ("lengths_host", "state_indices", "cu_seqlens", "initial_state")}
    per_token = ("q", "k", "v", "g", "beta")
    o = []
    for part, rows, name in ((slice(tokens), slice(lead), "ssm_"), (slice(tokens, None), slice(lead, None), "")):
        if (lead if name else len(lengths) - lead) == 0:
            continue
        own = {key: value[:, part] if key in per_token and value is not None else value for key, value in common.items()}
        bounds = arguments["cu_seqlens"]
        own["cu_seqlens"] = bounds[: lead + 1] if name else bounds[lead:] - tokens
        own[name + "state_indices"] = arguments["state_indices"][rows]
        function = gdn.fused_recurrent_gated_delta_rule if name else gdn.chunk_gated_delta_rule
        o.append(function(**own, initial_state=pool, backend=backend)[0])
    return torch.cat(o, dim=1), pool


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", STEPS, ids=str)
def test_rows_have_the_bits_of_their_form(lengths: list[int], backend: str) -> None:
    arguments = step(lengths)
    want, want_pool = parts(arguments, lengths, backend)
    arguments["initial_state"] = arguments["initial_state"].clone()
    o, pool = gdn.gated_delta_rule(**arguments, backend=backend)
    assert torch.equal(o, want) and torch.equal(pool.nan_to_num(7.0), want_pool.nan_to_num(7.0))


@pytest.mark.parametrize("lengths", STEPS, ids=str)
def test_fresh_rows_start_from_zero(lengths: list[int]) -> None:
    """Results are those of the chunk form for all rows, up to the rounding of bfloat16; slots of fresh rows hold NaN before."""
    arguments = step(lengths, has_mask=True)
    plain = {key: value for key, value in arguments.items() if key != "lengths_host"}
    want, want_pool = gdn.chunk_gated_delta_rule(**plain | {"initial_state": arguments["initial_state"].clone()})
    o, pool = gdn.gated_delta_rule(**arguments)
    torch.testing.assert_close(o, want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(pool, want_pool, atol=2e-2, rtol=2e-2, equal_nan=True)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("with_host", [False, True])
def test_no_call_waits_for_the_device(has_mask: bool, with_host: bool) -> None:
    arguments = step(STEPS[0], has_mask=has_mask)
    if not with_host:
        del arguments["lengths_host"]
    gdn.gated_delta_rule(**arguments)  # compiles
    torch.cuda.synchronize()
    with no_waits():
        gdn.gated_delta_rule(**arguments)


def test_a_graph_repeats_the_step(device: torch.device) -> None:
    graphs.check(gdn.gated_delta_rule, step(STEPS[0]), ("initial_state",), [{}, {}], device)
