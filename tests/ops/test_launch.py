"""What operators launch for drawn calls: a stand-in for the kernel holds every argument to the contract of its Params, and
computes with the reference from exactly those, so that the call equals the reference.

A swapped, missing or wrongly converted argument fails the contract or gives another result.
"""

import inspect
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.problem import Problem
from gdn.runtime import registry
from gdn.testing.compare import same_bits
from tests.ops import (
    test_attention_launch,
    test_attention_prefill_launch,
    test_decode_launch,
    test_logits_launch,
    test_norm_launch,
    test_prefill_launch,
)
from tests.ops.contract_kernel import ContractKernel
from tests.ops.indexer_kernels import KERNELS, IndexerKernels
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.calls import OPERATORS
from tests.ops.spoiling.memory import shifted, side_by_side, storage_bytes
from tests.ops.stand_in import StandIn
from tests.references import reference

Tensor = torch.Tensor
STAND_INS: dict[str, type[StandIn]] = {
    **dict.fromkeys(("chunk", "recurrent"), ContractKernel),
    "gdn_decode": test_decode_launch.Kernel, "gdn_prefill": test_prefill_launch.Kernel, "add_rms_norm": test_norm_launch.Kernel,
    **dict.fromkeys((kernel.__name__ for kernel in KERNELS), IndexerKernels),
    **dict.fromkeys(("mqa_logits", "paged_mqa_logits", "topk"), test_logits_launch.Kernels),
    **dict.fromkeys(("sparse_attention_prefill", "sparse_attention_decode"), test_attention_launch.Kernels),
    "attention_prefill": test_attention_prefill_launch.Kernels,
}  # fmt: skip
PARTS = {name: {part for one in registry.operators(name) for part in one.composed_of or (one.name,)} for name in OPERATORS}
NAMES = [name for name, parts in PARTS.items() if parts <= STAND_INS.keys() and hasattr(reference, name)]
DENSE = {"mqa_logits", "paged_mqa_logits", "sparse_attention_decode", "attention_prefill"}  # kernels read q without gaps
DEALT = ("gated_delta_rule", "attention")  # launched in parts, each with offsets of its own
WITHOUT_GAPS = {"initial_state"}  # copied where slots have gaps and are not written in place
TOKENS = ("q", "k", "v", "g", "beta")
SEEDS = 30
# Arguments that makers of calls leave out.
MORE: dict[str, Any] = {"scale": 0.3, "eps": 0.1, "max_query_len": 16, "sorted_by": "score"}


class Kernels(StandIn):
    """All stand-ins, each for its operators."""

    def __init__(self) -> None:
        super().__init__()
        self.made = {kind: kind() for kind in STAND_INS.values()}
        self.launched: list[tuple[Problem, Any]] = []

    def launch(self, problem: Any, params: Any) -> None:
        self.launched.append((problem, params))
        self.made[STAND_INS[problem.op]].launch(problem, params)

    def prepare(self, problem: Problem, device: torch.device, backend: str | None = None) -> runtime.Prepared:
        self.workspace_bytes = self.made[STAND_INS[problem.op]].workspace_bytes
        return super().prepare(problem, device, backend)


class Drawn(Draw):
    """Draws small sizes and those that kernels take, and rows at odd addresses too. values: seed of the numbers."""

    def __init__(self, seed: int, values: int) -> None:
        super().__init__(seed)
        self.generator.manual_seed(values)
        self.is_served, self.is_dense = self.maybe(), False

    def size(self, *options: int, served: int) -> int:
        return served if self.is_served else super().size(*options, served=served)

    def rows(self, tensor: Tensor, lead: int) -> Tensor:
        return shifted(tensor) if self.maybe(0.2) else super().rows(tensor, lead)


class Aligned(Drawn):
    """Draws what kernels read where it is: rows that begin at multiples of 16 bytes, and indices without gaps."""

    def __init__(self, seed: int, values: int) -> None:
        super().__init__(seed, values)
        self.is_served = True

    def rows(self, tensor: Tensor, lead: int) -> Tensor:
        rows: Any = side_by_side(tensor, lead=lead, extra=self.pick(0, 16, 64))
        return tensor if self.is_dense else rows

    def indices(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        return super().indices(values, dtype).contiguous()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setattr(runtime, "can_run", lambda *_: True)
    return Kernels().put(monkeypatch)


def listed(found: Any) -> list[Any]:
    return [] if found is None else list(found) if isinstance(found, tuple) else [found]


def made(name: str, kind: type[Drawn], seed: int, values: int) -> Call:
    draw = kind(seed, values)
    draw.is_dense = not PARTS[name].isdisjoint(DENSE)
    call = OPERATORS[name](draw)
    accepted = inspect.signature(getattr(gdn, name)).parameters
    missing = [key for key in MORE if key in accepted and key not in call.arguments]
    return call.changed(**{key: MORE[key] for key in missing if seed % 2})


def copied(call: Call, launched: list[tuple[Problem, Any]]) -> set[str]:
    """Arguments that a kernel gets unchanged, but somewhere else; or tokens as a view, which costs host time in every call."""
    found = set()
    for _, params in launched:
        for name, given in call.tensors().items():
            x = getattr(params, name, None)
            if not isinstance(x, Tensor) or (x.dtype, x.shape) != (given.dtype, given.shape):
                continue
            if x.data_ptr() != given.data_ptr() or (name in TOKENS and x is not given):
                found.add(name)
    return found


def agree(x: Tensor, y: Tensor) -> bool:
    """Whether results are the same. Sums of products round otherwise where rows lie otherwise in memory: float32 in its last
    digits, and to another 16-bit number seldom."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or (x.shape, x.dtype) != (y.shape, y.dtype):
        return same_bits(x, y)
    others = int(((x != y) & ~(x.isnan() & y.isnan())).sum())
    rtol = max(torch.finfo(x.dtype).eps, 1e-5)
    is_close = torch.allclose(x.double(), y.double(), rtol=rtol, atol=1e-5, equal_nan=True)
    return is_close and (x.dtype == torch.float32 or others <= 1 + x.numel() // 64)


def check(call: Call, other: Call) -> None:
    """Of two equal calls, the first one launches and the other one is the reference."""
    known = inspect.signature(getattr(reference, call.operator)).parameters
    found = listed(call.run())
    wanted = listed(getattr(reference, call.operator)(**{key: x for key, x in other.arguments.items() if key in known}))
    for one, two in zip(found, wanted, strict=True):
        assert (one is None) == (two is None)
        assert one is None or agree(one, two)
        # A result that is an argument is this argument.
        places = [[path for path, x in each.tensors().items() if x is result] for each, result in ((call, one), (other, two))]
        assert places[0] == places[1]
    for (path, x), y in zip(call.tensors().items(), other.tensors().values(), strict=True):
        assert agree(storage_bytes(x).view(x.dtype), storage_bytes(y).view(y.dtype)), path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [Drawn, Aligned])
def test_a_drawn_call_and_its_repetition(kind: type[Drawn], name: str, kernels: Kernels) -> None:
    """The repeated call has other values in other memory. Where no argument needs a copy, it comes to no choice of a kernel."""
    launches = 0
    for seed in range(SEEDS):
        for values in range(2):
            before = kernels.prepared
            kernels.launched.clear()
            call = made(name, kind, seed, values)
            check(call, made(name, kind, seed, values))
            launches += len(kernels.launched)
            reads_a_size = name == "gather_indexer_cache" and call.arguments.get("num_rows") is None
            if kind is Drawn or reads_a_size or not kernels.launched or not all(x.numel() for x in call.tensors().values()):
                continue
            moved = copied(call, kernels.launched)
            assert name in DEALT or moved <= WITHOUT_GAPS, seed
            assert kernels.prepared == before or not values or moved & WITHOUT_GAPS, seed
    assert launches >= SEEDS // 2
