"""GDN_BATCH_INVARIANT=1 with the shipped tables: a sequence has the same bits alone, among three, among forty, and anywhere.

The shapes are those of the tables. What a batch holds is compared sequence by sequence: its rows of the result, and its state.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from gdn.ops.indexer.inputs import MqaInputs, make_mqa_inputs, make_paged_inputs
from gdn.testing.compare import same_bits
from tests.gpu import test_gdn_decode, test_mqa_logits, test_paged_mqa_logits, test_steps
from tests.gpu.chunk import FUNCTION as CHUNK
from tests.gpu.delta_rule import Arguments, backends
from tests.gpu.test_recurrent import FUNCTION as RECURRENT
from tests.gpu.twins import are_same, copy_of

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
FORTY = 40
RAW: dict[str, Any] = {
    "head_k_dim": 128, "head_v_dim": 128, "dtype": "bfloat16", "state_v_first": True, "index_dtype": "int32",
    "gate_dtype": "bfloat16", "use_gate": True, "beta_dtype": "bfloat16", "use_beta_sigmoid": True,
}  # fmt: skip
HEADS = pytest.mark.parametrize("heads", [(16, 32), (4, 8)], ids=["16/32", "4/8"])


@pytest.fixture(autouse=True)
def invariant(switch: Callable[..., Any]) -> Iterator[None]:
    switch(GDN_BATCH_INVARIANT="1")
    yield


def of_heads(heads: tuple[int, int]) -> dict[str, Any]:
    return RAW | {"num_q_heads": heads[0], "num_k_heads": heads[0], "num_v_heads": heads[1]}


def batches(watched: Sequence[int], count: int = FORTY) -> list[list[int]]:
    """Numbers of sequences: of all forty the watched ones alone, among three at each place, and all of them in two orders."""
    found = [[n] for n in watched]
    others = [n for n in range(count) if n not in watched]
    for place, n in enumerate(watched):
        three = [others[place], others[-1 - place]]
        three.insert(place % 3, n)
        found.append(three)
    everything = list(range(count))
    return [*found, everything[::-1], everything[count // 3 :] + everything[: count // 3]]


class Batch:
    """Sequences with their tokens one after the other, and a call of any of them.

    tokens: arguments with a row per token, in dimension `dim` or the last one; sequences: arguments with a row per sequence;
    pools: written, in the slots of sequences; results: how many of them have a row per token.
    """

    def __init__(
        self, function: str | Callable[..., Any], arguments: Arguments, lengths: Sequence[int], offsets: str | None, *,
        tokens: tuple[str, ...], sequences: tuple[str, ...], pools: tuple[str, ...] = (), slots: str = "", dim: int = 0,
        results: int = 1,
    ) -> None:  # fmt: skip
        self.function = getattr(gdn, function) if isinstance(function, str) else function
        self.arguments, self.offsets, self.pools, self.dim = arguments, offsets, pools, dim
        self.starts, self.lengths = [0, *accumulate(lengths)], list(lengths)
        self.tokens, self.sequences, self.slots, self.results = tokens, sequences, slots, results

    def rows(self, n: int) -> list[int]:
        return list(range(self.starts[n], self.starts[n + 1]))

    def run(self, members: Sequence[int], backend: str) -> dict[int, list[Tensor]]:
        """Contents that each member has after the call: its rows, and its slots of the pools."""
        device = self.arguments[self.sequences[0]].device
        rows = torch.tensor([row for n in members for row in self.rows(n)], device=device)
        order = torch.tensor(members, device=device)
        given = self.arguments | {name: copy_of(self.arguments[name]) for name in self.pools}
        per_token = {name: self.arguments[name] for name in self.tokens}
        given |= {name: x.index_select(min(self.dim, x.dim() - 1), rows) for name, x in per_token.items()}
        given |= {name: self.arguments[name][order] for name in self.sequences}
        bounds = [0, *accumulate(self.lengths[n] for n in members)]
        if self.offsets is not None:
            given[self.offsets] = torch.tensor(bounds, dtype=torch.int32, device=device)
        found = self.function(**given, backend=backend)
        results = found[: self.results] if isinstance(found, tuple) else (found,)
        return {
            n: [x.narrow(self.dim, bounds[i], self.lengths[n]) for x in results]
            + [given[pool][given[self.slots][i].flatten().long()] for pool in self.pools]
            for i, n in enumerate(members)
        }

    def check_alone(self, watched: Sequence[int], backend: str) -> None:
        """Without GDN_BATCH_INVARIANT: of a batch that takes the same form as one sequence."""
        expected = self.run(range(len(self.lengths)), backend)
        for n in watched:
            assert are_same(self.run([n], backend)[n], expected[n]), f"sequence {n} of {self.lengths[n]} tokens"

    def check(self, watched: Sequence[int], backend: str) -> None:
        expected = self.run(range(len(self.lengths)), backend)
        for members in batches(watched, len(self.lengths)):
            found = self.run(members, backend)
            for n in members:
                for one, other in zip(found[n], expected[n], strict=True):
                    where = f"sequence {n} of {self.lengths[n]} tokens, in {len(members)} at {members.index(n)}"
                    assert same_bits(one, other), where


def check_delta_rule(function: str, arguments: Arguments, lengths: Sequence[int], watched: Sequence[int], backend: str) -> None:
    slots = "state_indices" if function == CHUNK else "ssm_state_indices"
    per_sequence = [name for name in (slots, "has_initial_state", "num_accepted_tokens") if name in arguments]
    batch = Batch(
        function, arguments, lengths, "cu_seqlens", tokens=("q", "k", "v", "g", "beta"), sequences=tuple(per_sequence),
        pools=("initial_state",), slots=slots, dim=1,
    )  # fmt: skip
    batch.check(watched, backend)


@HEADS
@pytest.mark.parametrize("backend", [*backends("chunk"), "reference"])
def test_chunk(backend: str, heads: tuple[int, int], device: torch.device) -> None:
    lengths = [1 + 37 * n % 190 for n in range(FORTY)]
    watched = {3: 1, 11: 64, 12: 100, 29: 5000}
    for n, length in watched.items():
        lengths[n] = length
    arguments = chunk_inputs(chunk_problem(**of_heads(heads), has_mask=True), device, lengths=lengths)
    arguments["has_initial_state"][list(watched)] = True
    check_delta_rule(CHUNK, arguments, lengths, list(watched), backend)


@HEADS
@pytest.mark.parametrize("backend", [*backends("recurrent"), "reference"])
def test_recurrent(backend: str, heads: tuple[int, int], device: torch.device) -> None:
    """One token each, as the tables have it, and ragged."""
    for lengths in ([1] * FORTY, [1 + n % 4 for n in range(FORTY)]):
        arguments = recurrent_inputs(recurrent_problem(**of_heads(heads)), device, lengths=lengths)
        check_delta_rule(RECURRENT, arguments, lengths, [0, 17, 39, 22], backend)


@pytest.mark.parametrize("backend", [*backends("recurrent"), "reference"])
def test_recurrent_drafts(backend: str, device: torch.device) -> None:
    problem = recurrent_problem(**of_heads((16, 32)), write_every_token=True, has_accepted=True)
    lengths = [4] * FORTY
    arguments = recurrent_inputs(problem, device, lengths=lengths, num_columns=4)
    check_delta_rule(RECURRENT, arguments, lengths, [0, 17, 39, 22], backend)


def decode_case(**changes: Any) -> test_gdn_decode.Case:
    """The layer of the tables; dt_bias is float32 in them."""
    return test_gdn_decode.Case(lengths=(1,) * FORTY, heads=(16, 32), padding=0, **changes)


@pytest.mark.parametrize("layout", ["flat", "merged", "concatenated"])
@pytest.mark.parametrize("backend", [*backends("gdn_decode"), "reference"])
def test_fused_decode(backend: str, layout: str, device: torch.device) -> None:
    case = decode_case(offsets_dtype=None, layout=layout)
    arguments, _ = test_gdn_decode.make(case, device)
    arguments |= {"dt_bias": arguments["dt_bias"].float(), "out": None}
    rows = tuple(name for name in ("mixed_qkv", "z", "b", "a") if arguments[name] is not None)
    batch = Batch(
        "fused_gdn_decode", arguments, case.lengths, None, tokens=rows, sequences=("state_indices",),
        pools=test_gdn_decode.POOLS, slots="state_indices", dim=0,
    )  # fmt: skip
    batch.check([0, 17, 39, 22], backend)


@pytest.mark.parametrize("backend", [*backends("conv1d"), "reference"])
def test_prefill_convolution(backend: str, device: torch.device) -> None:
    lengths = [1 + 37 * n % 90 for n in range(FORTY)]
    watched = {2: 1, 11: 64, 12: 100, 29: 1500}
    for n, length in watched.items():
        lengths[n] = length
    case = test_steps.Case(lengths=tuple(lengths), dim=8192, padding=0, strided=False)
    arguments = test_steps.prefill(case, device, dead=()) | {"out": None}
    arguments["cache_indices"] = arguments["cache_indices"][:FORTY]
    arguments["has_initial_state"] = arguments["has_initial_state"][:FORTY]
    batch = Batch(
        "causal_conv1d_fn", arguments, lengths, "query_start_loc", tokens=("x",),
        sequences=("cache_indices", "has_initial_state"), pools=("conv_states",), slots="cache_indices", dim=0,
    )  # fmt: skip
    batch.check(list(watched), backend)


@pytest.mark.parametrize("backend", [*backends("conv1d_update"), "reference"])
def test_decode_convolution(backend: str, device: torch.device) -> None:
    lengths = (1,) * FORTY
    case = test_steps.Case(lengths=lengths, dim=8192, padding=0, strided=False)
    arguments = test_steps.decode(case, device) | {"query_start_loc": None, "out": None}
    batch = Batch(
        "causal_conv1d_update", arguments, lengths, None, tokens=("x",), sequences=("conv_state_indices",),
        pools=("conv_state",), slots="conv_state_indices", dim=0,
    )  # fmt: skip
    batch.check([0, 17, 39, 22], backend)


# --- the indexer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [*test_mqa_logits.BACKENDS, "reference"])
@pytest.mark.parametrize("variant", ["h64-fp8", "h16-bf16"])
def test_ragged_logits(variant: str, backend: str, device: torch.device) -> None:
    """Every sequence has rows and keys of its own; among others both begin elsewhere."""
    sizes = [(1 + 13 * n % 60, 60 + 29 * n % 300) for n in range(FORTY)]
    watched = {3: (1, 100), 11: (64, 64), 12: (100, 700), 29: (300, 1000)}
    for n, size in watched.items():
        sizes[n] = size
    of_each = [
        make_mqa_inputs(test_mqa_logits.problem_of(variant, rows, keys), device, seed=n, ranges="causal", poison=False)
        for n, (rows, keys) in enumerate(sizes)
    ]

    def run(members: Sequence[int]) -> dict[int, Tensor]:
        first = [0, *accumulate(sizes[n][1] for n in members)]

        def joined(name: str) -> Tensor | None:
            parts = [getattr(of_each[n], name) for n in members]
            if parts[0] is None:
                return None
            if name.startswith("cu_seqlen"):
                parts = [part + start for part, start in zip(parts, first, strict=False)]
            bits = [part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in parts]
            return torch.cat(bits).view(parts[0].dtype)

        inputs = MqaInputs(**{field.name: joined(field.name) for field in dataclasses.fields(MqaInputs)})
        problem = test_mqa_logits.problem_of(variant, inputs.q.shape[0], inputs.k.shape[0])
        found = test_mqa_logits.run(problem, inputs, backend)
        rows = [0, *accumulate(sizes[n][0] for n in members)]
        return {n: found[rows[i] : rows[i + 1], first[i] : first[i + 1]] for i, n in enumerate(members)}

    expected = run(range(FORTY))
    for members in batches(list(watched)):
        found = run(members)
        for n in members:
            assert same_bits(found[n], expected[n]), f"sequence {n} of {sizes[n]}, in {len(members)} at {members.index(n)}"


@pytest.mark.parametrize("backend", [*test_paged_mqa_logits.BACKENDS, "reference"])
@pytest.mark.parametrize("variant", ["h64-fp8-p64", "h16-bf16-p544", "h16-fp8-p16-n4"])
def test_paged_logits(variant: str, backend: str, device: torch.device) -> None:
    longest = 5000
    lengths = [(1 + 237 * n) % 1900 for n in range(FORTY)]
    watched = {3: 1, 11: 64, 12: 100, 29: longest}
    for n, length in watched.items():
        lengths[n] = length
    problem = test_paged_mqa_logits.problem_of(variant, FORTY, longest)
    inputs = make_paged_inputs(problem, device, lengths=lengths)
    drafts = problem.next_n

    def run(members: Sequence[int]) -> dict[int, Tensor]:
        order = torch.tensor(members, device=device)
        assert inputs.weights is not None
        here = dataclasses.replace(
            inputs,
            q=inputs.q.view(torch.uint8)[order].view(inputs.q.dtype),
            weights=inputs.weights.view(FORTY, drafts, -1)[order].flatten(0, 1),
            context_lens=inputs.context_lens[order],
            block_tables=inputs.block_tables[order],
        )
        found = test_paged_mqa_logits.run(test_paged_mqa_logits.problem_of(variant, len(members), longest), here, backend)
        return {n: found[i * drafts : (i + 1) * drafts] for i, n in enumerate(members)}

    expected = run(range(FORTY))
    for members in batches(list(watched)):
        found = run(members)
        for n in members:
            assert same_bits(found[n], expected[n]), f"sequence {n} of {lengths[n]}, in {len(members)} at {members.index(n)}"


@pytest.mark.parametrize("backend", [*backends("topk"), "reference"])
def test_topk(backend: str, device: torch.device) -> None:
    """Rows with crowds of equal scores, of which the first ones are taken."""
    source = torch.Generator(device).manual_seed(7)
    scores = torch.randn(FORTY, 5000, device=device, generator=source).mul(40).round()
    starts = torch.arange(FORTY, dtype=torch.int32, device=device) * 3
    ends = (starts + torch.tensor([1, 100, 700, 4000], device=device).repeat(FORTY // 4)).int()

    def run(members: Sequence[int]) -> dict[int, Tensor]:
        order = torch.tensor(members, device=device)
        found = gdn.topk_indices(scores[order], 512, starts[order], ends[order], backend=backend)
        return {n: found[i] for i, n in enumerate(members)}

    expected = run(range(FORTY))
    for members in batches([0, 1, 2, 3]):
        assert all(torch.equal(row, expected[n]) for n, row in run(members).items())


def test_the_tiles_are_the_same_for_every_batch(device: torch.device) -> None:
    """Tiles are compared as explain gives them for the chunk operator, for which the tables hold the most sizes."""
    found = set()
    for lengths in ([1], [5000], [70] * 3, [64] * FORTY, [5000, *[100] * 39]):
        arguments = chunk_inputs(chunk_problem(**of_heads((16, 32)), has_mask=True), device, lengths=lengths)
        for backend in backends("chunk"):
            found.add((backend, gdn.explain(CHUNK, **arguments, backend=backend).config))
    assert len(found) == len(backends("chunk"))
