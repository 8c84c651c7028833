"""gdn.attention: which rows take which way, and errors before anything is written. test_drawn_attention.py has its results."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import gdn
import gdn.ops.attention.attention as module
from gdn.ops.attention import gathered, host_lengths, torch_attention
from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.references import reference

Arguments = dict[str, Any]
BLOCK = 4


def step(
    new: list[int], cached: list[int], *, heads: int = 4, kv_heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32,
    with_host: bool = True,
) -> Arguments:  # fmt: skip
    """Sequences on shuffled blocks, keys and values in one row; blocks that no sequence has hold NaN."""
    generator = torch.Generator().manual_seed(len(new))
    lengths = [n + c for n, c in zip(new, cached, strict=True)]
    pages = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(pages) + 3, generator=generator).int()
    tables = torch.full((len(new), max(pages) + 1), 10**6, dtype=torch.int32)
    packed = torch.full((len(order), BLOCK, kv_heads, 2 * dim), math.nan, dtype=dtype)
    start = 0
    for n, count in enumerate(pages):
        tables[n, :count] = order[start : start + count]
        start += count
        flat = torch.randn(count * BLOCK, kv_heads, 2 * dim, generator=generator).to(dtype)
        flat[lengths[n] :] = math.nan  # after the sequence's last token
        packed[tables[n, :count].long()] = flat.view(count, BLOCK, kv_heads, 2 * dim)
    q = torch.randn(sum(new) + 2, heads, dim, generator=generator).to(dtype)
    host = {"seq_lens_host": tuple(lengths), "query_lens_host": tuple(new)} if with_host else {}
    return {
        "q": q, "kv_cache": (packed[..., :dim], packed[..., dim:]), "block_tables": tables,
        "query_start_loc": torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32), **host,
    }  # fmt: skip


def oracle(arguments: Arguments, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One query and head at a time, in float64."""
    q, (k_cache, v_cache), tables = arguments["q"], arguments["kv_cache"], arguments["block_tables"]
    o, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    bounds = arguments["query_start_loc"].tolist()
    for n, length in enumerate(arguments["seq_lens"].tolist()):
        pages = tables[n, : -(-length // BLOCK)].long()
        keys, values = (cache[pages].flatten(0, 1)[:length].double() for cache in (k_cache, v_cache))
        for token in range(bounds[n], bounds[n + 1]):
            seen = length - (bounds[n + 1] - token) + 1
            for head in range(q.shape[1]):
                kv = head // (q.shape[1] // keys.shape[1])
                score = keys[:seen, kv] @ q[token, head].double() * scale
                lse[token, head] = score.logsumexp(0)
                o[token, head] = score.softmax(0) @ values[:seen, kv]
    return o, lse


STEPS = {
    "decode": ([1, 1, 1], [6, 0, 17]),
    "drafts": ([3, 1, 4], [6, 2, 17]),
    "prefill": ([12, 30], [0, 0]),
    "chunked prefill": ([12, 9], [5, 21]),
    "equal lengths": ([1, 12, 12, 12, 10, 10], [9, 4, 4, 4, 0, 0]),
    "mixed": ([1, 0, 2, 11, 0, 1, 9], [8, 3, 0, 4, 0, 7, 0]),
    "long first": ([11, 1, 1], [0, 5, 6]),
}


@pytest.mark.parametrize("name", STEPS)
def test_o_has_the_same_bits_without_the_log_sum_exp(name: str) -> None:
    arguments = step(*STEPS[name])
    assert same_bits(gdn.attention(**arguments), gdn.attention(**arguments, return_lse=True)[0])


@pytest.mark.parametrize(
    ("name", "decode_tokens", "groups"),
    [("decode", 5, []), ("drafts", 10, []), ("prefill", None, [1, 1]), ("equal lengths", 1, [3, 2]),
     ("mixed", 3, [1, 1, 1]), ("long first", None, [1, 2])],
)  # fmt: skip
def test_prefill_rows_take_torchs_attention_and_decode_rows_the_paged_kernel(
    name: str, decode_tokens: int | None, groups: list[int]
) -> None:
    arguments = step(*STEPS[name])
    if name == "long first":
        arguments["seq_lens"][1:] = 7  # equal lengths after the long one: they are computed together
        arguments["seq_lens_host"] = tuple(arguments["seq_lens"].tolist())
        arguments["block_tables"][1:] = arguments["block_tables"][2]
    paged, torchs = mock.Mock(side_effect=module.attend_checked), mock.Mock(side_effect=torch_attention.attend)
    with mock.patch.object(module, "attend_checked", paged), mock.patch.object(torch_attention, "attend", torchs):
        gdn.attention(**arguments)
    assert [call.args[0].shape[0] for call in paged.call_args_list] == ([] if decode_tokens is None else [decode_tokens])
    assert [call.args[0].shape[0] for call in torchs.call_args_list] == groups


def run_without_values(arguments: Arguments, paged: mock.Mock) -> None:
    """A call as on a device, where no value may be read. paged: in the place of the paged kernel."""
    forbidden = mock.Mock(side_effect=AssertionError("a value was read"))
    with (
        mock.patch.multiple(module, attend_checked=paged, check_values=mock.Mock()),
        mock.patch.object(host_lengths, "reads_values", lambda device: False),
        mock.patch.multiple(torch.Tensor, item=forbidden, tolist=forbidden, cpu=forbidden, __bool__=forbidden),
    ):
        gdn.attention(**arguments)


@pytest.mark.parametrize("missing", ["seq_lens_host", "query_lens_host"])
def test_without_both_lengths_all_rows_take_the_paged_kernel_and_nothing_is_read(missing: str) -> None:
    arguments = step(*STEPS["mixed"])
    del arguments[missing]
    paged = mock.Mock(return_value=(arguments["q"], arguments["q"]))
    run_without_values(arguments, paged)
    assert paged.call_count == 1 and paged.call_args.args[0] is arguments["q"]


def test_prefill_reads_no_value_on_a_device() -> None:
    arguments = step(*STEPS["mixed"])
    paged = mock.Mock(return_value=(None, torch.zeros(3, 4)))
    run_without_values(arguments, paged)
    assert paged.call_count == 1


def test_many_sequences_are_gathered_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = step([12] * 5, [4] * 5)
    want = gdn.attention(**arguments)
    monkeypatch.setattr(gathered, "_GATHERED_BYTES", 2 * (2 * 2 * 16 * 4) * 16)  # two sequences of 16 tokens
    monkeypatch.setattr(torch_attention, "_SCORE_BYTES", 4 * 4 * 16 * 5)  # five queries of one
    torchs = mock.Mock(side_effect=torch_attention.attend)
    monkeypatch.setattr(torch_attention, "attend", torchs)
    o, lse = gdn.attention(**arguments, return_lse=True)
    assert torch.allclose(o, want, atol=1e-6) and torchs.call_count == 3
    assert torch.allclose(lse.double(), oracle(arguments, 16**-0.5)[1], rtol=1e-5, atol=1e-5)


def test_the_reference_is_of_all_rows() -> None:
    arguments = step(*STEPS["mixed"])
    plain = {key: value for key, value in arguments.items() if not key.endswith("_host")}
    for mine, other in zip(
        gdn.attention(**arguments, return_lse=True, backend="reference"),
        reference.attention(**plain, return_lse=True),
        strict=True,
    ):
        assert same_bits(mine, other)


def test_batch_invariant_rows_all_take_the_paged_kernel(switch: Callable[..., env.Switches]) -> None:
    switch(GDN_BATCH_INVARIANT="1")
    assert [part.op for part in gdn.explain("attention", **step(*STEPS["mixed"])).parts] == ["sparse_attention_decode"]


@pytest.mark.parametrize("name", ["GDN_BACKEND", "GDN_BACKEND_ATTENTION"])
def test_the_reference_runs_all_rows_where_a_switch_asks_for_it(name: str, switch: Callable[..., env.Switches]) -> None:
    switch(**{name: "reference"})
    parts = gdn.explain("attention", **step(*STEPS["mixed"])).parts
    assert [(part.op, part.backend, part.decided_by) for part in parts] == [
        ("sparse_attention_decode", "reference", f"{name}=reference")
    ]


def test_explain_names_both_parts() -> None:
    answer = gdn.explain("attention", **step(*STEPS["mixed"]))
    assert [(part.op, part.backend) for part in answer.parts] == [
        ("sparse_attention_decode", "reference"), ("attention", "torch"),
    ]  # fmt: skip
    assert [part.op for part in gdn.explain("attention", **step(*STEPS["decode"])).parts] == ["sparse_attention_decode"]
    assert answer.parts[0].problem.dense and answer.parts[0].problem.num_tokens == 3


@pytest.mark.parametrize(("max_seq_len", "blocks"), [(18, 8), (32, 8), (33, 16), (77, 20), (None, 20)])
def test_the_table_is_cut_to_the_longest_sequence(max_seq_len: int | None, blocks: int) -> None:
    arguments = step(*STEPS["decode"])
    columns = 20 - arguments["block_tables"].shape[1]
    arguments["block_tables"] = torch.nn.functional.pad(arguments["block_tables"], (0, columns))
    (part,) = gdn.explain("attention", **arguments, max_seq_len=max_seq_len).parts
    assert part.problem.k == BLOCK * blocks
    assert same_bits(gdn.attention(**arguments, max_seq_len=max_seq_len), gdn.attention(**arguments))


BAD: list[tuple[Arguments, str]] = [
    ({"seq_lens_host": (9, 3)}, "seq_lens_host: expected 7 lengths, one per sequence, got 2"),
    ({"query_lens_host": (1,) * 7}, r"query_lens_host: expected the lengths on the device \[1, 0, 2"),
    ({"max_seq_len": -1}, "max_seq_len: expected an int >= 0"),
    ({"max_seq_len": 5}, r"max_seq_len: expected at least \d+, the longest of the sequences, got 5"),
    ({"max_query_len": 1}, r"max_query_len: expected at least \d+, the longest of the sequences, got 1"),
    ({"backend": "tilelang"}, "tilelang"),
    ({"backend": "fa3"}, "backend: expected 'tilelang', 'cute', 'reference' or None, got 'fa3'"),
    ({"gate": torch.zeros(26, 4, 8)}, r"gate: expected shape \[26, 4, 16\], got shape \[26, 4, 8\]"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_errors_come_before_anything_is_written(change: Arguments, message: str) -> None:
    arguments = step(*STEPS["mixed"])
    out = arguments["out"] = torch.full_like(arguments["q"], 7.0)
    with pytest.raises(ValueError, match=message):
        gdn.attention(**arguments | change)
    assert bool((out == 7).all())


@pytest.mark.parametrize("max_seq_len", [0, 5, 11])
def test_a_bound_below_the_lengths_on_the_host_is_refused_without_a_look_at_the_device(max_seq_len: int) -> None:
    """The bound cuts the block table: keys would be missing in the prefill rows, silently."""
    arguments = step(*STEPS["mixed"])
    out = arguments["out"] = torch.full_like(arguments["q"], 7.0)
    with (
        mock.patch.object(module, "check_values", mock.Mock()),
        mock.patch.object(host_lengths, "reads_values", lambda device: False),
        pytest.raises(ValueError, match=rf"max_seq_len: expected at least \d+, a sequence of seq_lens_host, got {max_seq_len}"),
    ):
        gdn.attention(**arguments, max_seq_len=max_seq_len)
    assert bool((out == 7).all())
    empty = step([0, 0], [5, 0])
    assert not gdn.attention(**empty, max_seq_len=0).any()  # nothing is read of sequences without a query
