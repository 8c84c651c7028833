"""No call reads a value back to the host, and each makes one exchange: on fake tensors, which have no values."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import gdn.distributed
from gdn.distributed import chunk, composition, conv
from gdn.distributed import group as groups
from tests.layers.test_decode_launches import Launches


@pytest.fixture(params=[0, 1, 2])
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A rank of three, which exchange nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=3)
    yield dist.group.WORLD
    dist.destroy_process_group()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("final_rank", [-1, None])
@pytest.mark.parametrize("segments", [False, True])
def test_operators(group: Any, count: int, final_rank: int | None, segments: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if segments:
        monkeypatch.setattr(composition, "LEAST_SEGMENT", 10)
    for module in (chunk, conv, groups):
        monkeypatch.setattr(module, "reads_values", lambda device: False)  # as on a GPU
    with FakeTensorMode(), torch.no_grad():
        pool, slots = empty(8, 4, 64, 64, dtype=torch.float32), empty(count, dtype=torch.int32)
        offsets, mask = empty(count + 1, dtype=torch.int32), empty(count, dtype=torch.bool)
        sequences: dict[str, Any] = {"has_initial_state": mask, "group": group, "final_rank": final_rank}
        is_last_alone = group.rank() == 2 and final_rank == -1
        with Launches() as launches:
            o, state = gdn.distributed.chunk_gated_delta_rule(
                empty(1, 90, 2, 64), empty(1, 90, 2, 64), empty(1, 90, 4, 64), empty(1, 90, 4), empty(1, 90, 4),
                cu_seqlens=offsets, initial_state=pool, state_indices=slots, output_final_state=True, state_v_first=True,
                **sequences,
            )  # fmt: skip
        assert o.shape == (1, 90, 4, 64) and (state is pool) == (final_rank is None or group.rank() == 2)
        assert sum("allgather" in name for name in launches.names) == 1
        assert sum("chunk_gated_delta_rule" in name for name in launches.names) == 1
        summaries = sum("chunk_summary" in name for name in launches.names)
        assert summaries == (0 if is_last_alone and not segments else 1)
        with Launches() as launches:
            y = gdn.distributed.causal_conv1d_fn(
                empty(90, 64),
                empty(64, 4),
                conv_states=empty(8, 64, 3),
                cache_indices=slots,
                query_start_loc=offsets,
                **sequences,
            )
        assert y.shape == (90, 64) and sum("allgather" in name for name in launches.names) == 1
        with pytest.raises(DataDependentOutputException):  # what a read would give
            offsets[0].item()
