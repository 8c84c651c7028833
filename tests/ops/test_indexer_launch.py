"""Arguments that the indexer's steps hand to a kernel, held against their Params by stand-in kernels on the CPU. A call like an
earlier one takes the short way to the same result."""

from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.testing.compare import same_bits
from tests.described.plain import call as plain_call
from tests.ops.indexer_kernels import IndexerKernels
from tests.ops.stand_in import StandIn

Arguments = dict[str, Any]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return IndexerKernels().put(monkeypatch)


def compress() -> Arguments:
    return plain_call("compress_indexer_keys", 5, torch.bfloat16, is_served=True)


def test_what_must_have_a_row_says_so() -> None:
    prepare = plain_call("prepare_indexer", 5, torch.bfloat16, is_served=True)
    for function, arguments in ((gdn.prepare_indexer, prepare), (gdn.compress_indexer_keys, compress())):
        before = arguments["cache"].clone()
        with pytest.raises(ValueError, match=r"cos_sin: expected shape \[max_positions >= 1, 32\]"):
            function(**arguments | {"cos_sin": torch.zeros(0, 32)})
        assert same_bits(arguments["cache"], before)
    with pytest.raises(ValueError, match="ring: expected at least one sequence"):
        gdn.compress_indexer_keys(**(given := compress()) | {"ring": given["ring"][:0]})
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets that never decrease"):
        given = plain_call("gather_indexer_cache", 5, torch.bfloat16) | {"num_rows": None}
        gdn.gather_indexer_cache(**given | {"cu_seqlens": torch.tensor([0, 0, -3])})


def test_a_ring_off_its_alignment_says_so(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = compress()
    ring = torch.nn.functional.pad(arguments["ring"], (3, 0))[..., 3:].zero_()
    caught: list[Any] = []

    def reference_for(problem: Any, device: torch.device, backend: str | None = None) -> runtime.Prepared:
        caught.append(problem)
        return runtime.Prepared("reference", None, 0, None, runtime.Choice(problem.op, "reference"))

    monkeypatch.setattr(runtime, "prepare", reference_for)
    gdn.compress_indexer_keys(**arguments | {"ring": ring})
    assert not caught[0].ring_aligned and bool((ring != 0).any())


def test_gather_reads_the_number_of_rows(stand_in: StandIn) -> None:
    for _ in range(2):
        given = plain_call("gather_indexer_cache", 5, torch.bfloat16, is_served=True) | {"num_rows": None}
        k, _ = gdn.gather_indexer_cache(**given)
        assert k.shape[0] == given["cu_seqlens"][-1]
    assert len(stand_in.problems) == 2  # sized by what was read: no call is like another
