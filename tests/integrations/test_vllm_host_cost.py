"""What the adapter of vLLM costs the host beyond the call of the fused operator, in units of a slice of a tensor.

A slice takes 0.5 to 0.7 us where engines run; the adapter may add 5 us a layer and step.
"""

import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn.integrations._vllm_pages import Page, page_of
from gdn.integrations._vllm_replay_step import step_of
from gdn.integrations._vllm_rows import Rows
from tests.integrations import vllm_engine

H, HV, K, ROWS = 16, 32, 128, 16
CHANNELS = (2 * H + HV) * K
ATTEMPTS = 4  # other processes may take the CPU meanwhile


def layer_of(interleaved: bool, page: Page | None = None) -> Any:
    """A module with parameters, as the host's layer is."""
    layer = vllm_engine.layer((H, HV), (K, K), interleaved=interleaved, dtype=torch.float32)
    shape = (HV, K, K) if page is None else page.shapes[1]
    layer.kv_cache = (torch.zeros(2, 3, CHANNELS), torch.zeros(2, *shape))
    return vllm_engine.as_module(layer)


def best(run: Callable[[], object]) -> float:
    return min(timeit.repeat(run, number=20, repeat=60)) / 20


def slices(interleaved: bool, metadata: Any, page: Page | None = None) -> float:
    """Host time of a step beyond that of its call of the operator, over that of a slice."""
    step = step_of(layer_of(interleaved, page), conv_dim_first=False, page=page)
    rows = [torch.zeros(ROWS, columns) for columns in (CHANNELS + HV * K, 2 * HV)]
    core = torch.zeros(ROWS, HV, K)
    calls: list[Any] = []
    step._decode = lambda *given, **named: calls.append((given, named))  # type: ignore[assignment,return-value]
    step(*rows, core, metadata)
    ((given, named),) = calls
    operator: Any = lambda *given, **named: None  # noqa: E731
    step._decode = operator
    with torch.inference_mode():
        added = best(lambda: step(*rows, core, metadata)) - best(lambda: operator(*given, **named))
        return added / best(lambda: core[:3])


@pytest.mark.parametrize(("interleaved", "most"), [(True, 7), (False, 13)])
@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("replays", [False, True])
def test_the_step_adds_little_to_its_call(interleaved: bool, most: int, has_drafts: bool, replays: bool) -> None:
    metadata = SimpleNamespace(
        num_actual_tokens=ROWS, num_prefills=0, num_decodes=0 if has_drafts else ROWS, num_decode_tokens=ROWS,
        spec_sequence_masks=has_drafts or None, non_spec_state_indices_tensor=torch.zeros(ROWS, dtype=torch.int32),
        spec_state_indices_tensor=None, spec_query_start_loc=None, num_accepted_tokens=None,
    )  # fmt: skip
    page = None
    if replays:
        page = page_of(H, ((3, CHANNELS), (HV, K, K)), torch.float32, num_spec=0)
        slots = metadata.non_spec_state_indices_tensor
        metadata.gdn_replay, most = Rows(slots, slots, None), most + 3  # its views, and more arguments
    found = [slices(interleaved, metadata, page)]
    while found[-1] > most and len(found) < ATTEMPTS:
        found.append(slices(interleaved, metadata, page))
    assert min(found) <= most, found
