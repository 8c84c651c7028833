"""The step between vLLM's projections, on its pages and its metadata, against a float64 loop over every token."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn.integrations import _vllm_parts
from gdn.integrations._vllm_step import Step
from tests.integrations.vllm_engine import HV, WIDTH, Host, Sequence, as_module, int32, metadata_of, offsets

Tensor = torch.Tensor
LAYOUTS = [  # interleaved, dim_first
    (False, True), (True, False), *(pytest.param(both, both, marks=pytest.mark.cover) for both in (False, True)),
]  # fmt: skip
PADDING = 3  # rows and sequences behind those of a batch
CLOSE = 2e-5


class Driver:
    """Batches of a host; every result and every page is compared."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.step = Step(host.layer, conv_dim_first=host.dim_first)
        self.drafting: list[Sequence] = []  # those of the batch at hand

    def run(self, rows: list[tuple[Sequence, int]], metadata: SimpleNamespace, order: list[int] | None = None) -> list[Tensor]:
        """Makes the step of new tokens of each sequence; returns the results by sequence. order: of the rows in the batch."""
        host = self.host
        drawn = [host.rows(new) for _, new in rows]
        for (own, _), (qkvz, ba) in zip(rows, drawn, strict=True):
            own.qkvz, own.ba = torch.cat([own.qkvz, qkvz]), torch.cat([own.ba, ba])
        qkvz, ba = (torch.cat([one[part] for one in drawn]) for part in (0, 1))
        count = len(qkvz)
        order = list(range(count)) if order is None else order
        padding = host.rows(PADDING)
        given = host.projected(torch.cat([qkvz[order], padding[0]]), torch.cat([ba[order], padding[1]]))
        core = torch.full((count + PADDING, HV, host.V), torch.nan)
        metadata.num_actual_tokens = count
        self.step(*given, core, metadata)
        assert not core[count:].any()
        found = torch.empty(count, HV, host.V)
        found[order] = core[:count]
        return list(found.split([new for _, new in rows]))

    def check(self, rows: list[tuple[Sequence, int]], found: list[Tensor]) -> None:
        """Results, and the states and windows that the step left."""
        host = self.host
        windows, states = host.layer.kv_cache
        windows = windows if host.dim_first else windows.transpose(-1, -2)
        for (own, new), result in zip(rows, found, strict=True):
            expected, after, window = host.expected(own, new)
            assert (result - expected).abs().max() < CLOSE
            is_drafting = any(own is one for one in self.drafting)
            last = own.blocks[new - 1] if is_drafting else own.blocks[0]
            assert (states[last] - after[-1]).abs().max() < CLOSE
            if not is_drafting:
                assert torch.equal(windows[last, :, : WIDTH - 1], window.T.float())

    def accept(self, own: Sequence, new: int) -> None:
        """The host samples: a part of the drafts is accepted, the rest forgotten."""
        own.accepted = self.host.random.randint(1, new)
        own.qkvz, own.ba = (x[: len(x) - (new - own.accepted)] for x in (own.qkvz, own.ba))

    # --- kinds of batches -------------------------------------------------------------------------------------------------------

    def prompts(
        self, lengths: list[int], decoding: list[Sequence], resumed: list[Sequence], checkpoint: int = 0
    ) -> list[Sequence]:
        """Prompts behind decode rows; resumed sequences go on with a second part of their prompt."""
        host = self.host
        self.drafting = []
        new = [host.new() for _ in lengths[len(resumed) :]]
        own = [*resumed, *new]
        rows = [*[(one, 1) for one in decoding], *zip(own, lengths, strict=True)]
        begin = len(decoding)
        slots = int32([one.blocks[0] for one, _ in rows] + [0])
        bounds = offsets([count for _, count in rows] + [0])
        known = {
            "num_prefills": len(own), "num_prefill_tokens": sum(lengths), "num_decodes": begin, "num_decode_tokens": begin,
            "non_spec_state_indices_tensor": slots, "non_spec_query_start_loc": bounds,
            "prefill_state_indices": slots[begin:], "prefill_query_start_loc": bounds[begin:] - begin,
            "prefill_has_initial_state": torch.tensor([len(one.qkvz) > 0 for one in own] + [False]),
        }  # fmt: skip
        kept = host.free.pop() if checkpoint else 0
        if checkpoint:
            places = [checkpoint if one is own[-1] else 0 for one, _ in rows] + [0]
            known["checkpoint"] = SimpleNamespace(
                checkpoint_offsets=int32(places), state_indices=int32([kept if place else 0 for place in places])
            )
        before = len(own[-1].qkvz)
        self.check(rows, self.run(rows, metadata_of(**known)))
        if checkpoint:
            at = before + checkpoint
            partial = Sequence([], own[-1].qkvz[:at], own[-1].ba[:at])
            _, after, window = host.expected(partial, 1)
            windows = host.layer.kv_cache[0] if host.dim_first else host.layer.kv_cache[0].transpose(-1, -2)
            assert (host.layer.kv_cache[1][kept] - after[-1]).abs().max() < CLOSE
            assert torch.equal(windows[kept, :, : WIDTH - 1], window.T.float())
        return new

    def decode(self, own: list[Sequence], padded: int = 0) -> None:
        """One token each; padded: rows of a captured batch, with slot 0."""
        self.drafting = []
        slots = int32([one.blocks[0] for one in own] + [0] * (padded + 2))
        table = torch.stack([slots, slots], dim=1)  # a column of a table, whose rows are apart
        rows = [(one, 1) for one in own]
        metadata = metadata_of(num_decodes=len(own), num_decode_tokens=len(own), non_spec_state_indices_tensor=table[:, 0])
        self.check(rows, self.run(rows, metadata))

    def drafts(self, own: list[Sequence], prompts: list[int] | None = None) -> list[Sequence]:
        """Each sequence with 1 to 1 + num_spec tokens, among prompts in any order."""
        host = self.host
        counts = [host.random.randint(1, 1 + host.num_spec) for _ in own]
        new = [host.new() for _ in prompts or ()]
        known = {
            "num_spec_decodes": len(own), "spec_sequence_masks": torch.ones(len(own), dtype=torch.bool),
            "spec_state_indices_tensor": int32([one.blocks for one in own]), "spec_query_start_loc": offsets(counts),
            "num_accepted_tokens": int32([one.accepted for one in own]),
        }  # fmt: skip
        rows, order = list(zip(own, counts, strict=True)), None
        if prompts:
            rows += list(zip(new, prompts, strict=True))
            mixed = list(range(len(rows)))
            host.random.shuffle(mixed)
            starts = offsets([count for _, count in rows]).tolist()
            where = {n: list(range(starts[n], starts[n] + rows[n][1])) for n in mixed}
            order = [token for n in mixed for token in where[n]]
            of_batch = {token: place for place, token in enumerate(order)}
            drafted, others = ([n for n in mixed if (n < len(own)) == is_draft] for is_draft in (True, False))
            bounds = offsets([rows[n][1] for n in others])
            known |= {
                "num_prefills": len(new), "num_prefill_tokens": sum(prompts),
                "spec_token_indx": torch.tensor([of_batch[t] for n in drafted for t in where[n]]),
                "non_spec_token_indx": torch.tensor([of_batch[t] for n in others for t in where[n]]),
                "spec_state_indices_tensor": int32([own[n].blocks for n in drafted]),
                "spec_query_start_loc": offsets([counts[n] for n in drafted]),
                "num_accepted_tokens": int32([own[n].accepted for n in drafted]),
                "prefill_state_indices": int32([rows[n][0].blocks[0] for n in others]), "prefill_query_start_loc": bounds,
                "prefill_has_initial_state": torch.zeros(len(new), dtype=torch.bool),
            }  # fmt: skip
        self.drafting = own
        self.check(rows, self.run(rows, metadata_of(**known), order))
        for one, count in zip(own, counts, strict=True):
            self.accept(one, count)
        return new


@pytest.mark.parametrize(("interleaved", "dim_first"), LAYOUTS)
def test_prompts_and_decode(interleaved: bool, dim_first: bool) -> None:
    driver = Driver(Host(1, num_spec=0, interleaved=interleaved, dim_first=dim_first))
    first = driver.prompts([70, 3, 1], [], [])
    driver.decode(first)
    second = driver.prompts([5, 130], first, [])
    driver.decode([*second, *first], padded=2)
    driver.prompts([9, 66], first, second)  # the second parts of two prompts


@pytest.mark.parametrize("dims", [(32, 32), (16, 32)])
@pytest.mark.parametrize(("interleaved", "dim_first"), LAYOUTS)
def test_captured_batches(interleaved: bool, dim_first: bool, dims: tuple[int, int]) -> None:
    """Padded to the size of a graph: rows of nobody have block 0, one accepted token, and the last offset again."""
    host = Host(4, num_spec=2, interleaved=interleaved, dim_first=dim_first, dims=dims)
    driver = Driver(host)
    own = driver.prompts([3, 80], [], [])
    before = [pages[0].clone() for pages in host.layer.kv_cache]
    for counts in ([1, 1], [2, 3]):
        has_drafts = max(counts) > 1
        drawn = [host.rows(count) for count in counts]
        for one, (qkvz, ba) in zip(own, drawn, strict=True):
            one.qkvz, one.ba = torch.cat([one.qkvz, qkvz]), torch.cat([one.ba, ba])
        real, padded = sum(counts), 3 * (3 if has_drafts else 1)
        extra = host.rows(padded)
        rows = [torch.cat([*(one[part] for one in drawn), extra[part]]) for part in (0, 1)]
        core = torch.full((real + padded, HV, host.V), torch.nan)
        blocks = [one.blocks for one in own] + [[0] * 3] * 3
        metadata = metadata_of(num_actual_tokens=real + padded, num_decodes=5, num_decode_tokens=5)
        metadata.non_spec_state_indices_tensor = int32([row[0] for row in blocks])
        if has_drafts:
            metadata = metadata_of(
                num_actual_tokens=real + padded, num_spec_decodes=5, spec_sequence_masks=torch.ones(5, dtype=torch.bool),
                spec_state_indices_tensor=int32(blocks), num_accepted_tokens=int32([1] * 5),
                spec_query_start_loc=int32([*offsets(counts).tolist(), real, real, real]),
            )  # fmt: skip
        driver.step(*host.projected(*rows), core, metadata)
        driver.drafting = own if has_drafts else []
        driver.check(list(zip(own, counts, strict=True)), list(core[:real].split(counts)))
        assert not core[real:].any()
        assert all(torch.equal(pages[0], kept) for pages, kept in zip(host.layer.kv_cache, before, strict=True))


@pytest.mark.parametrize(("interleaved", "dim_first"), LAYOUTS)
def test_checkpoints(interleaved: bool, dim_first: bool) -> None:
    driver = Driver(Host(2, num_spec=0, interleaved=interleaved, dim_first=dim_first))
    first = driver.prompts([150], [], [], checkpoint=64)
    second = driver.prompts([20, 200], first, [], checkpoint=128)
    driver.decode([*first, *second])
    driver.prompts([90], [], second[1:], checkpoint=64)


@pytest.mark.parametrize("num_spec", [2, 3])
@pytest.mark.parametrize(("interleaved", "dim_first"), LAYOUTS)
def test_drafts(interleaved: bool, dim_first: bool, num_spec: int) -> None:
    driver = Driver(Host(3, num_spec=num_spec, interleaved=interleaved, dim_first=dim_first))
    own = driver.prompts([12, 65, 1], [], [])
    driver.drafts(own)
    driver.drafts(own)
    own += driver.drafts(own, prompts=[40, 1])
    for one in own[-2:]:
        one.accepted = 1
    driver.drafts(own)


@pytest.mark.parametrize(
    ("dims", "interleaved", "dim_first"),
    [
        ((16, 32), True, False),
        pytest.param((20, 20), True, True, marks=pytest.mark.cover),
        pytest.param((32, 64), False, True, marks=pytest.mark.cover),
    ],
)
def test_head_dims_of_the_step_operators(dims: tuple[int, int], interleaved: bool, dim_first: bool) -> None:
    """Head dims without a fused kernel: values wider than keys, and multiples of 4."""
    driver = Driver(Host(6, num_spec=2, interleaved=interleaved, dim_first=dim_first, dims=dims))
    own = driver.prompts([5, 66, 1], [], [], checkpoint=0)
    driver.decode(own, padded=2)
    own += driver.prompts([4, 70], own[:2], own[2:], checkpoint=64)  # behind rows that decode; one goes on with its prompt
    for one in own:
        one.accepted = 1
    driver.drafts(own)
    driver.drafts(own, prompts=[3, 1])


def test_pages_that_are_laid_out_anew() -> None:
    """Windows [blocks, columns, channels] give way to others in the same memory, whose `id` is that of the first ones."""
    host = Host(5, num_spec=0, interleaved=True, dim_first=False)
    driver = Driver(host)
    driver.prompts([3], [], [])
    windows, states = host.layer.kv_cache
    shape, seen, memory = windows.shape, id(windows), torch.empty(0).set_(host.pages)
    strides = (windows.stride(0), 1, shape[1])  # the channels first in memory
    host.layer.kv_cache = windows = None
    found = [memory.as_strided(shape, strides)]
    while id(found[-1]) != seen and len(found) < 50:
        found.append(memory.as_strided(shape, strides))
    host.layer.kv_cache = (found[-1], states)
    driver.prompts([5, 66], [], [])


def test_which_operators_run() -> None:
    """The fused operator wherever it has a kernel, each for itself."""
    for dims, decode, prefill in (
        ((32, 32), True, True), ((128, 128), True, True), ((64, 128), True, False), ((256, 256), True, False),
        ((40, 40), False, True), ((20, 20), False, False), ((128, 512), False, False),
    ):  # fmt: skip
        assert (_vllm_parts.fuses_decode(*dims), _vllm_parts.fuses_prefill(*dims)) == (decode, prefill), dims


REPLACED: dict[str, Callable[[Any], object]] = {
    "pools of the same shape": lambda layer: setattr(layer, "kv_cache", tuple(map(_moved, layer.kv_cache))),
    "filter": lambda layer: _replace(layer.conv1d, "weight", layer.conv1d.weight.flip(0).contiguous()),
    "the filter's data": lambda layer: setattr(layer.conv1d.weight, "data", layer.conv1d.weight.data.flip(0).contiguous()),
    "a filter of two dimensions": lambda layer: setattr(layer.conv1d.weight, "data", layer.conv1d.weight.data[:, 0]),
    "convolution": lambda layer: _replace(layer, "conv1d", _doubled(layer.conv1d, bias=None)),
    "norm": lambda layer: _replace(layer, "norm", _doubled(layer.norm, activation=layer.norm.activation)),
    "decay": lambda layer: _replace(layer, "A_log", layer.A_log + 1),
    "the decay's data": lambda layer: setattr(layer.A_log, "data", layer.A_log.data + 1),
}


def _doubled(part: Any, **others: Any) -> SimpleNamespace:
    return SimpleNamespace(weight=part.weight * 2, **others)


def _replace(owner: Any, name: str, value: Any) -> None:
    """As a module has it, if the owner is one."""
    held = SimpleNamespace(**{name: value})
    setattr(owner, name, getattr(as_module(held) if isinstance(owner, torch.nn.Module) else held, name))


def _moved(pages: Tensor) -> Tensor:
    """The same pages in other memory, with the same strides."""
    memory = torch.zeros(pages.untyped_storage().nbytes(), dtype=torch.uint8).view(pages.dtype)
    return memory.as_strided(pages.shape, pages.stride(), pages.storage_offset()).copy_(pages)


@pytest.mark.parametrize("is_module", [False, True])
@pytest.mark.parametrize("what", REPLACED)
def test_what_the_host_replaces_between_two_steps_is_noticed(what: str, is_module: bool) -> None:
    """A step that has run does what a new one does; layers keep their parameters as modules do, or as plain attributes."""
    host = Host(8, num_spec=0, interleaved=False, dim_first=False)
    layer: Any = as_module(host.layer) if is_module else host.layer
    slots = int32([3, 5])
    metadata = metadata_of(num_actual_tokens=2, num_decodes=2, num_decode_tokens=2, non_spec_state_indices_tensor=slots)
    for pages in layer.kv_cache:
        pages[3], pages[5] = 1, 2

    def run(step: Step) -> Tensor:
        core = torch.zeros(2, HV, host.V)
        step(*host.projected(rows[0], rows[1]), core, metadata)
        return core

    with torch.no_grad():
        rows, step = host.rows(2), Step(layer, conv_dim_first=False)
        before = run(step)
        REPLACED[what](layer)
        old = [pages.clone() for pages in layer.kv_cache]
        expected = run(Step(layer, conv_dim_first=False))
        after = [pages.clone() for pages in layer.kv_cache]
        for pages, values in zip(layer.kv_cache, old, strict=True):
            pages.copy_(values)
        assert torch.equal(run(step), expected) and not torch.equal(expected, before)
        for found, wanted in zip(layer.kv_cache, after, strict=True):
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def test_where_the_host_cuts_the_gates_is_its_own_matter() -> None:
    """A layer whose gates are not the halves of what their projection returns: replicated ones, of which a rank takes its own."""
    host = Host(9, num_spec=0, interleaved=False, dim_first=False)
    plain = Step(host.layer, conv_dim_first=False)
    cut = SimpleNamespace(**vars(host.layer))
    cut.split_ba = lambda ba: tuple(half[:, 1 : 1 + HV] for half in ba.chunk(2, dim=-1))
    slots = int32([3, 5])
    metadata = metadata_of(num_actual_tokens=2, num_decodes=2, num_decode_tokens=2, non_spec_state_indices_tensor=slots)
    qkvz, ba = host.rows(2)
    wide = torch.full((2, 2, HV + 3), 9.0)
    wide[:, :, 1 : 1 + HV] = ba.view(2, 2, HV)
    found = []
    for step, gates in ((plain, ba), (Step(cut, conv_dim_first=False), wide.flatten(1))):
        for _ in range(2):
            for pages in host.layer.kv_cache:
                pages[3], pages[5] = 1, 2
            core = torch.zeros(2, HV, host.V)
            step(*host.projected(qkvz, gates), core, metadata)
            found.append(core)
    assert all(torch.equal(one, found[0]) for one in found)
    with pytest.raises(ValueError, match=r"b: expected shape \[2, 8\], got shape \[2, 14\]"):  # not of the width before
        plain(*host.projected(qkvz, wide.flatten(1)), core, metadata)
