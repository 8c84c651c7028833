"""An empty batch of every public operator has empty results: no error, nothing written, zero in rows of padding.

Calls are drawn, and every dimension that may be empty is emptied (`tests.ops.emptied`). The only ones that are refused are listed
here, and named in the error.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn import runtime
from gdn.device import H100
from gdn.runtime import registry
from tests import described
from tests.compile.variants.base import example
from tests.ops.emptied import FORMS, Emptied
from tests.ops.spoiling.call import Call
from tests.ops.spoiling.calls import OPERATORS, good_call
from tests.ops.spoiling.memory import Snapshot

Tensor = torch.Tensor
SEEDS, KERNEL_SEEDS = 6, 4

REFUSED = {
    ("paged_mqa_logits", "no drafts"): "q",
    ("fp8_paged_mqa_logits", "no drafts"): "q",
    ("paged_indexer_topk", "no drafts"): "q",
    ("compress_indexer_keys", "no slots"): "ring",
}

RESULTS = {name: one.results for name, one in described.every().items()}
# Rows that belong to no sequence, no slot and no page may hold anything.
WITHOUT_WORK = ("no sequences", "no slots", "no pages", "no blocks", "no choice")
PADDING = ("q", "k", "v", "g", "beta", "gate", "x", "mixed_qkv", "z", "b", "a")


def listed(found: Any) -> list[Any]:
    return [] if found is None else list(found) if isinstance(found, tuple) else [found]


def wanted_shape(emptied: Emptied, form: str, dims: str, good: Tensor) -> list[int]:
    """The shape of a result whose good call had the result `good`."""
    call = emptied.call
    names = [name.rstrip("+") for name in (call.dims[dims] if dims in call.dims else dims.split())]
    empty = set(emptied.names)
    if call.operator == "gather_indexer_cache" and call.arguments.get("num_rows") is None:
        empty.add("gathered")
    if call.operator == "fp8_paged_mqa_logits" and call.arguments.get("max_context_len") is None and form == "no blocks":
        empty.add("columns")  # as many as the block tables address
    sizes = [0 if name in empty else size for name, size in zip(names, good.shape, strict=False)]
    sizes += list(good.shape[len(names) :])
    if form == "no choice" and names[-1] == "expanded":
        sizes[-1] = call.arguments["ratio"] - 1
    return sizes


def check_state(call: Call, found: Tensor) -> None:
    """States of sequences without a token: those that they started from."""
    states, mask = call.get("initial_state"), call.get("has_initial_state")
    want = torch.zeros_like(found)
    if states is not None and states.shape[0] == found.shape[0]:
        want = states.to(found.dtype).clone()
        if mask is not None:
            want[~mask[: want.shape[0]]] = 0
    assert torch.equal(found, want)


def check_results(emptied: Emptied, form: str, found: Sequence[Any], good: Sequence[Any], given: Call) -> None:
    call, results = emptied.call, RESULTS[emptied.call.operator]
    assert len(found) == len(good) <= len(results)
    for own, other, (dims, spare) in zip(found, good, results, strict=False):
        if other is None:
            assert own is None
            continue
        place = next((path for path, x in given.tensors().items() if x is other), None)
        if place is not None:  # a result that is an argument stays one
            assert own is call.get(place)
        assert own.dtype == other.dtype
        if place not in (None, "out"):
            continue
        assert list(own.shape) == wanted_shape(emptied, form, dims, other), form
        if spare == "the states":
            if form != "no slots":
                check_state(call, own)
        elif spare == "identity":
            assert torch.equal(own, torch.eye(own.shape[-1], dtype=own.dtype).expand(own.shape))
        elif spare is not None:
            assert bool((own == spare).all())
        elif call.arguments.get("clean_logits") and "columns" in dims:
            assert bool((own == -math.inf).all())


def spoil_padding(call: Call) -> None:
    for name in PADDING:
        x = call.get(name)
        if isinstance(x, Tensor) and x.is_floating_point():
            x.fill_(math.nan)


def check(operator: str, seed: int, form: str, given: Call, wanted: Sequence[Any], kernels: "Kernels | None" = None) -> bool:
    """One form of one call; False where the call has no such form. given, wanted: the good call, and its results."""
    emptied = FORMS[form](good_call(operator, seed))
    if emptied is None:
        return False
    call = emptied.call
    if form in WITHOUT_WORK and RESULTS[operator] and RESULTS[operator][0][1] == 0.0:
        spoil_padding(call)
    snapshot = Snapshot(call.tensors().values())
    if (operator, form) in REFUSED:
        with pytest.raises(ValueError, match=f"^{REFUSED[operator, form]}: expected .*, got "):
            call.run()
        assert snapshot.is_kept()
        return True
    found = listed(call.run())
    if kernels is None or not kernels.launches:
        check_results(emptied, form, found, wanted, given)
    if isinstance(call.get("out"), Tensor):
        snapshot.is_kept_but(call.get("out"), torch.ones_like(call.get("out"), dtype=torch.bool))
    assert snapshot.is_kept(), "something was written"
    return True


def check_forms(operator: str, seed: int, given: Call, wanted: Sequence[Any], kernels: "Kernels | None" = None) -> set[str]:
    """The forms that the call of a seed has."""
    seen = set()
    for form in FORMS:
        try:
            if kernels is not None:
                kernels.launches = 0
            if check(operator, seed, form, given, wanted, kernels):
                seen.add(form)
        except Exception as error:
            error.add_note(f"{operator}, {form}, seed {seed}")
            raise
    return seen


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_empty_batch_has_empty_results(operator: str) -> None:
    seen: set[str] = set()
    for seed in range(SEEDS):
        given = good_call(operator, seed)
        seen |= check_forms(operator, seed, given, listed(given.run()))
    assert seen & {"no tokens", "no sequences"}


class Kernels:
    """Takes the place of runtime.prepare: chooses the tiles of a kernel as on an H100, and launches nothing."""

    def __init__(self) -> None:
        self.prepare_really = runtime.prepare
        self.launches = 0
        self.chosen: set[str] = set()

    def prepare(self, problem: Any, device: torch.device, backend: str | None = None, **options: Any) -> runtime.Prepared:
        wide = replace(example(problem.op), **problem.sizes())  # the drawn calls are too narrow for some kernels
        for name, candidate in runtime.candidates(problem.op).items():
            if backend == "reference" or candidate.module.refusal(wide) is not None:
                continue
            config = candidate.module.default_config(wide, H100)
            self.chosen.add(problem.op)
            size = candidate.module.workspace_bytes(wide, config)
            return runtime.Prepared(name, config, size, self.launch, runtime.Choice(problem.op, name))
        return self.prepare_really(problem, device, backend, **options)

    def launch(self, _: Any) -> None:
        self.launches += 1


@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_get_no_empty_batch(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's part of the kernels: tiles are chosen for nothing, and where nothing is launched the results are right."""
    calls = [good_call(operator, seed) for seed in range(KERNEL_SEEDS)]
    wanted = [listed(call.run()) for call in calls]
    kernels = Kernels()
    monkeypatch.setattr(runtime, "prepare", kernels.prepare)
    for seed, (given, results) in enumerate(zip(calls, wanted, strict=True)):
        check_forms(operator, seed, given, results, kernels)
    operators = registry.operators(operator)
    assert kernels.chosen or not any(one.modules or one.composed_of for one in operators)
