"""Problems of a served model: every operator's calls, with the dtypes, layouts and flags of a serving engine, and their sizes.

The Gated DeltaNet part is the public operators themselves, called on small CPU tensors inside `explaining`: what they would ask
for. The indexer and attention are the examples (`gdn.examples`). Sizes are grids: the compiled part of a configuration takes few
values, which change at a few sizes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gdn import examples
from gdn.models import ModelShape
from gdn.ops.decode import fused_gdn_decode
from gdn.ops.prefill import fused_gdn_prefill
from gdn.problems import ChunkProblem, Conv1dProblem, GdnPrefillProblem, Problem
from gdn.runtime import explaining

_STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PROMPTS = tuple(count for power in range(4, 18) for count in (1 << power, 3 << power - 1))  # tokens of a step
_OF_PROMPTS = (ChunkProblem, Conv1dProblem, GdnPrefillProblem)
_TOKENS_OF_DRAFTS = (1, 2, 4, 8)  # of a sequence
_MOST_PREFILLS = 128  # sequences of a prefill step
_LENGTHS = (1024, 4096, 16384, 32768, 131072)  # of a context
_ROWS = (1, 8, 64, 512, 1024, 4096, 16384)


def shape_of(name: str, config: Any) -> ModelShape:
    """Shapes of a `gdn.layers` configuration, as it is: whole, or one rank's."""
    return ModelShape(
        name, config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim, config.linear_conv_kernel_dim, config.index_n_heads, config.index_head_dim,
        config.index_topk, config.index_rotary_dim, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
    )  # fmt: skip


def of_config(config: Any, *, num_spec: int = 0, state_dtypes: tuple[str, ...] = ("float32",)) -> list[Problem]:
    """The problems of a rank of a model. config: a `gdn.layers.HybridConfig`, of the rank; the rest as for `problems`."""
    shape = shape_of("served", config)
    if not config.num_linear_layers:
        shape = replace(shape, num_v_heads=0)
    if not config.num_full_layers:
        shape = replace(shape, num_heads=0, index_topk=0)
    layout, gate, ratio = config.projection_layout, config.gdn_gate_activation, config.index_ratio
    groups = problems(
        shape, layout=layout, gate=gate, num_spec=num_spec, index_ratio=ratio, state_dtypes=state_dtypes,
        is_plain=config.residual == "plain",
    )  # fmt: skip
    return [problem for group in groups for problem in group]


def of_calls(calls: Iterable[Callable[[], object]]) -> list[Problem]:
    """The problems of calls of operators, which are made inside `explaining`, at all sizes: tensors of any size will do."""
    with explaining() as asked:
        for call in calls:
            call()
    static = {(type(problem), problem.static_key()): problem for _, problem in asked.answers if problem is not None}
    return [sized for problem in static.values() for sized in _at_sizes(problem)]


def _at_sizes(problem: Any) -> Iterator[Problem]:
    for count in SEQUENCES:
        sizes = PROMPTS if isinstance(problem, _OF_PROMPTS) else [count * each for each in _TOKENS_OF_DRAFTS]
        yield from (replace(problem, num_tokens=tokens, num_sequences=count) for tokens in sizes if count <= tokens)


def problems(
    model: ModelShape, *, layout: str = "flat", gate: str = "silu", num_spec: int = 0, index_ratio: int = 1,
    state_dtypes: tuple[str, ...] = ("float32",), is_plain: bool = True,
) -> list[tuple[Problem, ...]]:  # fmt: skip
    """Each call's problem at all of its sizes.

    model: the shapes of one rank. layout, gate: order of the projections, and the activation of the output gate. num_spec: most
    drafts of a sequence. index_ratio: tokens of a key of the indexer. state_dtypes: of the recurrent states.
    is_plain: whether the residual stream is one, with zero-centred norms.
    """
    found: list[tuple[Problem, ...]] = []
    if model.num_v_heads:
        for state in state_dtypes:
            for order in dict.fromkeys(("concatenated", layout)):
                found += _decode(model, order, gate, num_spec, _STATES[state])
                found += _prefill(model, order, gate, _STATES[state])
    if model.index_topk:
        found += _indexer(model, num_spec, index_ratio)
    if model.num_heads:
        dense = examples.attention(model)
        found.append(tuple(replace(dense, num_tokens=n, num_sequences=n, k=k) for n in SEQUENCES for k in _LENGTHS))
    if not is_plain:
        return found
    added = examples.add_rms_norm(model)
    found.append(tuple(replace(added, num_tokens=count) for count in (*SEQUENCES, *PROMPTS)))
    return found


def _decode(model: ModelShape, layout: str, gate: str, num_spec: int, state: torch.dtype) -> Iterator[tuple[Problem, ...]]:
    """One token of each sequence; padded rows, which have offsets; drafts."""
    for dt_bias in (torch.float32, torch.bfloat16):
        call = _Layer(model, layout, gate, state, dt_bias, columns=1 + num_spec)
        kinds: list[dict[str, Any]] = [{}, {"query_start_loc": _ints(0, 1)}]
        if num_spec:
            kinds.append({"query_start_loc": _ints(0, 1), "num_accepted_tokens": _ints(1)})
        for kind in kinds:
            slots = torch.ones(1, 1 + num_spec, dtype=torch.int32) if "num_accepted_tokens" in kind else _ints(1)
            problem = call.asked(fused_gdn_decode, "conv_state", slots, **kind)
            tokens = (1, 1 + num_spec) if "num_accepted_tokens" in kind else (1,)
            yield tuple(replace(problem, num_tokens=n * each, num_sequences=n) for n in SEQUENCES for each in tokens)


def _prefill(model: ModelShape, layout: str, gate: str, state: torch.dtype) -> Iterator[tuple[Problem, ...]]:
    """Prompts that continue states or start anew, with and without checkpoints."""
    order = "flat" if layout == "concatenated" else layout  # whose parts are views of the wide rows
    for dt_bias in (torch.float32, torch.bfloat16):
        call = _Layer(model, order, gate, state, dt_bias)
        mask = {"query_start_loc": _ints(0, 1), "has_initial_state": torch.ones(1, dtype=torch.bool)}
        checkpoints = {
            "checkpoint_offsets": torch.zeros(1, 1, dtype=torch.int32),
            "checkpoint_slots": torch.zeros(1, 1, dtype=torch.int32),
        }
        for more in ({}, checkpoints):
            problem = call.asked(fused_gdn_prefill, "conv_states", _ints(1), **mask, **more)
            sizes = [(n, count) for n in SEQUENCES for count in PROMPTS if n <= min(count, _MOST_PREFILLS)]
            yield tuple(replace(problem, num_tokens=count, num_sequences=n) for n, count in sizes)


class _Layer:
    """Tensors of one token of a layer, as an engine passes them."""

    def __init__(
        self, model: ModelShape, layout: str, gate: str, state: torch.dtype, dt_bias: torch.dtype, columns: int = 1
    ) -> None:
        H, HV, K, V = model.num_k_heads, model.num_v_heads, model.head_k_dim, model.head_v_dim
        self.dims = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
        self.options = {"gate_activation": gate, "projection_layout": layout, "state_v_first": True, "null_slot": 0}
        dim, values = model.conv_dim, HV * V
        self.projections: tuple[Tensor | None, ...]
        if layout == "concatenated":
            self.projections = (_rows(-(-(dim + values + 2 * HV) // 8) * 8), None, None, None)
        elif layout == "interleaved":
            self.projections = (_rows(dim + values), None, _rows(2 * HV), None)
        else:
            wide = _rows(dim + values)
            self.projections = (wide[:, :dim], wide[:, dim:].view(1, HV, V), _rows(HV), _rows(HV))
        windows = torch.zeros(2, model.conv_width - 1 + columns - 1, dim, dtype=torch.bfloat16).mT
        norm = torch.zeros(V, dtype=torch.bfloat16)
        weight = torch.zeros(dim, model.conv_width, dtype=torch.bfloat16)
        self.tensors = (windows, weight, torch.zeros(HV), torch.zeros(HV, dtype=dt_bias), norm)
        self.states = torch.zeros(2, HV, V, K, dtype=state)

    def asked(self, function: Any, windows: str, slots: Tensor, **more: Any) -> Any:
        """The problem of a call."""
        with explaining() as asked:
            function(*self.projections, *self.tensors, self.states, slots, **self.dims, **self.options, **more)
        return asked.answers[-1][1]


def _rows(width: int) -> Tensor:
    return torch.zeros(1, width, dtype=torch.bfloat16)


def _ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _indexer(model: ModelShape, num_spec: int, ratio: int) -> Iterator[tuple[Problem, ...]]:
    """The indexer in bfloat16 and FP8, the selection, and attention over it."""
    tokens = (*SEQUENCES, *PROMPTS)
    for fp8 in (False, True):
        steps: list[Any] = [examples.write_indexer_cache(model, fp8), examples.prepare_indexer(model, fp8)]
        if ratio > 1:
            steps.append(replace(examples.compress_indexer_keys(model, fp8), ratio=ratio))
        yield from (tuple(replace(one, num_tokens=count) for count in tokens) for one in steps)
        gather = examples.gather_indexer_cache(model, fp8)
        yield tuple(replace(gather, num_rows=rows, num_sequences=n) for rows in _LENGTHS for n in (1, 4, 16))
        scores = replace(examples.mqa_logits(model, fp8), clean=False)
        yield tuple(replace(scores, num_queries=q, num_keys=k, num_columns=k) for q in _ROWS for k in _LENGTHS)
        paged = replace(examples.paged_mqa_logits(model, fp8), clean=False)
        for drafts in range(1, 2 + num_spec):
            yield tuple(replace(paged, next_n=drafts, batch=n, max_context_len=length) for n in SEQUENCES for length in _LENGTHS)
    selection = examples.topk(model)
    for starts in (selection.starts_dtype, None):
        one = replace(selection, starts_dtype=starts)
        if ratio > 1:
            one = replace(one, k=one.k // ratio, ratio=ratio, position_dtype="int64")
        yield tuple(replace(one, num_rows=rows, num_columns=length) for rows in _ROWS for length in _LENGTHS)
    decode, prefill = examples.sparse_attention_decode(model), examples.sparse_attention_prefill(model)
    yield tuple(replace(decode, num_tokens=n * each, num_sequences=n) for n in SEQUENCES for each in range(1, 2 + num_spec))
    yield tuple(replace(prefill, num_tokens=rows, max_context_len=length) for rows in _ROWS for length in _LENGTHS)
