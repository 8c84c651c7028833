"""GDN_BATCH_INVARIANT=1 on the reference: a sequence's result has the same bits whatever else is in the batch.

What the kernels choose under it, with the shipped tables: tests/compile/test_tables.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule import inputs
from gdn.ops.indexer import inputs as inputs_logits
from gdn.ops.indexer.problem import MqaLogitsProblem, PagedMqaLogitsProblem
from gdn.runtime import env

Switch = Callable[..., env.Switches]


def _alone(arguments: dict[str, Any], sequence: int) -> dict[str, Any]:
    """The arguments of one sequence of a packed batch."""
    start, end = arguments["cu_seqlens"].tolist()[sequence : sequence + 2]
    tokens = {name: arguments[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
    own = {"cu_seqlens": torch.tensor([0, end - start], dtype=torch.int32)}
    return {**arguments, **tokens, **own, "initial_state": arguments["initial_state"][sequence : sequence + 1]}


def _delta_rule(lengths: Sequence[int], dtype: str, chunk: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    fields = {"num_tokens": sum(lengths), "num_sequences": len(lengths), "head_k_dim": 64, "head_v_dim": 64, "dtype": dtype}
    if chunk:
        return gdn.chunk_gated_delta_rule, inputs.chunk_inputs(inputs.chunk_problem(**fields), lengths=lengths)
    return gdn.fused_recurrent_gated_delta_rule, inputs.recurrent_inputs(inputs.recurrent_problem(**fields), lengths=lengths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [True, False], ids=["chunk", "recurrent"])
def test_delta_rule(chunk: bool, dtype: str, switch: Switch) -> None:
    switch(GDN_BATCH_INVARIANT="1")
    lengths = (200, 1, 65, 7, 130)
    function, arguments = _delta_rule(lengths, dtype, chunk)
    out, state = function(**arguments)
    offsets = arguments["cu_seqlens"].tolist()
    for sequence in range(len(lengths)):
        own_out, own_state = function(**_alone(arguments, sequence))
        assert torch.equal(own_out, out[:, offsets[sequence] : offsets[sequence + 1]])
        assert torch.equal(own_state, state[sequence : sequence + 1])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_ragged_logits_and_their_selection(dtype: str, out_dtype: str, switch: Switch) -> None:
    switch(GDN_BATCH_INVARIANT="1")
    fp8 = dtype != "bfloat16"
    sizes = {"num_queries": 37, "num_keys": 300, "num_columns": 300}
    problem = MqaLogitsProblem(8, 1, 64, dtype, fp8, "float32", True, True, out_dtype, False, **sizes)
    made = inputs_logits.make_mqa_inputs(problem, poison=False)

    def logits(rows: slice) -> torch.Tensor:
        ranges = (made.cu_seqlen_ks[rows], made.cu_seqlen_ke[rows])
        dtype_ = getattr(torch, out_dtype)
        return gdn.mqa_logits(made.q[rows], made.k, made.weights[rows], *ranges, k_scale=made.k_scale, out_dtype=dtype_)

    def selected(rows: slice) -> torch.Tensor:
        return gdn.topk_indices(logits(rows), 32, made.cu_seqlen_ks[rows], made.cu_seqlen_ke[rows])

    all_logits, all_selected = logits(slice(None)), selected(slice(None))
    for rows in (slice(0, 1), slice(5, 9), slice(3, 30), slice(36, 37)):
        assert torch.equal(logits(rows), all_logits[rows])
        assert torch.equal(selected(rows), all_selected[rows])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_paged_logits(dtype: str, switch: Switch) -> None:
    switch(GDN_BATCH_INVARIANT="1")
    fp8, next_n, longest = dtype != "bfloat16", 2, 200
    sizes = {"batch": 5, "max_context_len": longest}
    problem = PagedMqaLogitsProblem(8, 1, 64, dtype, fp8, "float32", True, True, "float32", 16, next_n, False, **sizes)
    made = inputs_logits.make_paged_inputs(problem, lengths=[200, 3, 64, 150, 17])

    def logits(first: int, count: int) -> torch.Tensor:
        own = slice(first, first + count)
        weights = made.weights[first * next_n : (first + count) * next_n]
        return gdn.paged_mqa_logits(made.q[own], made.cache, weights, made.context_lens[own], made.block_tables[own], longest)

    everything = logits(0, 5)
    for sequence in range(5):
        assert torch.equal(logits(sequence, 1), everything[sequence * next_n : (sequence + 1) * next_n])
