"""The delta rule as cases: prompts in chunks, decode steps by the token recurrence, on a pool of states.

Shapes have raw gates and the norm inside the kernel, q, k and v as slices of the convolution's output, a float32 pool with V
first and int32 slots: the call of the demo and of serving engines.

The operators around replay decode as cases: pools of all layers whose slots have no order.

`fold_states` is timed as it writes a checkpoint while decoding: the source keeps its entries, so that a call can be repeated.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch

from gdn.core import tunable as base
from gdn.core.tunable import Maker, Shape, StepCase, Tensor, Tunable, Work, heads_of, packed, params_of, resized
from gdn.ops.delta_rule import inputs, oracle, reference
from gdn.ops.delta_rule.problem import (
    AcceptDraftTreeParams,
    AcceptDraftTreeProblem,
    FoldStatesParams,
    FoldStatesProblem,
    ring_choice,
)
from gdn.ops.delta_rule.replay import ring_shape
from gdn.runtime import Prepared
from gdn.testing import compare

# Largest accepted relative error of a head: of outputs by their dtype, of states by the dtype they are stored in. bf16
# tensor-core operands reach an error of 5e-3 in the chunk form.
_OUTPUT_LIMIT = {"chunk": {"bfloat16": 1e-2, "float16": 3e-3}, "recurrent": base.ROUNDINGS}
_STATE_LIMIT = {"chunk": {"float32": 1e-2, "bfloat16": 1e-2}, "recurrent": {"float32": 1e-4, "bfloat16": 4e-3}}


class DeltaRuleCase(base.SeededCase):
    """Prompts or decode steps on a pool that is updated. make, params: functions of gdn.ops.delta_rule.inputs."""

    def __init__(
        self, function: str, make: Callable[..., dict[str, Any]], params: Callable[..., Any], shape: base.Shape,
        device: torch.device, copies: int,
    ) -> None:  # fmt: skip
        super().__init__(shape, device, copies)
        self._function, self._make, self._params = function, make, params

    def _work(self, seed: int) -> base.Work:
        arguments = self._make(self._problem, self._device, seed, lengths=self._shape.lengths, strided=True)
        # Engines hand over gates as rows of one projection: their heads are neighbours.
        arguments |= {name: arguments[name].contiguous() for name in ("g", "beta") if name in arguments}
        return base.Work(self._function, arguments, self._params(self._problem, arguments))

    def public_calls(self, backend: str | None) -> list[base.Call]:
        calls: list[Callable[..., object]] = [*super().public_calls(backend)]
        longest = getattr(self._problem, "longest", 0)
        return [partial(call, max_seqlen=longest) if longest else call for call in calls]

    @cached_property
    def _expected(self) -> oracle.DeltaRuleResult:
        return oracle.oracle_of(self._work(seed=0).arguments)

    def check(self, prepared: Prepared) -> float:
        problem, expected = self._problem, self._expected
        if problem.pooled and not problem.has_final_state:
            raise ValueError(f"shape: expected a pool that is updated, got {problem.static_key()}")
        work = self._work(seed=0)
        before = work.arguments["initial_state"].clone() if problem.pooled else None
        work.launch(prepared)()
        limit, state = _STATE_LIMIT[problem.op][problem.state_dtype], 0.0
        if problem.has_final_state:
            assert expected.state is not None
            after = work.params.final_state if before is None else work.arguments["initial_state"]
            if before is not None:
                state = base.state_error(after, before, expected.state, expected.written_slots, limit)
            else:
                state = base.limited("state", compare.error(after, expected.state, groups=2), limit)
        output = compare.token_error(work.params.out, expected.o, expected.offsets)
        return max(state, base.limited("output", output, _OUTPUT_LIMIT[problem.op][problem.dtype]))


class SummaryCase(base.SeededCase):
    """Summaries of the segments of a part, judged by the states that they make of random ones: P may be next to nothing."""

    def _work(self, seed: int) -> base.Work:
        arguments = inputs.summary_inputs(self._problem, self._device, seed, lengths=self._shape.lengths, strided=True)
        arguments |= {name: arguments[name].contiguous() for name in ("g", "beta") if name in arguments}
        params = inputs.summary_tensors(self._problem, arguments)
        return base.Work("chunk_summary", arguments, params, (params.h, params.P))

    @cached_property
    def _expected(self) -> tuple[torch.Tensor, ...]:
        given = self._work(seed=0).arguments
        wide: dict[str, Any] = {}
        for name, x in given.items():
            wide[name] = x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        return reference.chunk_summary(**wide)

    def check(self, prepared: Prepared) -> float:
        work = self._work(seed=0)
        work.launch(prepared)()
        exact, found = (
            compare.after_summary(h, P, self._problem.state_v_first) for h, P in (self._expected, (work.params.h, work.params.P))
        )
        return base.limited("state", compare.error(found, exact, groups=2), _STATE_LIMIT["chunk"]["float32"])


_RAGGED = (37, 4000, 511, 2048, 7, 6001, 1200, 2580)


def _prompts(heads: tuple[int, int], lengths: Sequence[int], label: str = "{}", head_dim: int = 128) -> base.Shape:
    model = base.heads_of(*heads) | {"head_k_dim": head_dim, "head_v_dim": head_dim}
    return base.packed("chunk", f"{heads[0]}/{heads[1]} {label}", lengths, model)


def _published(head_dim: int, heads: int, lengths: Sequence[int], label: str) -> base.Shape:
    """A shape of the table on which FLA is usually compared: as many key heads as value heads."""
    return replace(_prompts((heads, heads), lengths, "", head_dim), name=f"published {label} x {heads} x {head_dim}")


def _padded(batch: int, tokens: int, heads: int, head_dim: int) -> base.Shape:
    return _published(head_dim, heads, [tokens] * batch, f"{batch} x {tokens}")


def _packed(lengths: Sequence[int], heads: int, head_dim: int, label: str = "") -> base.Shape:
    return _published(head_dim, heads, lengths, f"packed {len(lengths)}, {sum(lengths)}{label}")


def _decode_steps(heads: tuple[int, int], batch: int, state_dtype: str = "float32", drafts: int = 0) -> base.Shape:
    flags = {"state_dtype": state_dtype, "write_every_token": drafts > 0, "has_accepted": drafts > 0}
    return base.decode_steps("recurrent", heads, batch, drafts, **flags)


def _few_heads(shape: base.Shape, lengths: tuple[int, ...]) -> base.Shape:
    return base.resized(shape, lengths, num_q_heads=2, num_k_heads=2, num_v_heads=4)


def _peer_arguments(make: Callable[..., dict[str, Any]], shape: base.Shape, device: torch.device, seed: int) -> dict[str, Any]:
    return make(shape.problem, device, seed, lengths=shape.lengths)


# Chunked prefill as engines fill it: all SMs are busy. The default is right for all of them, so they are not tuned.
_SATURATED = (
    _prompts((16, 32), [8192] * 8, "saturated {}"), _prompts((16, 32), [2048] * 32, "saturated {}"),
    _prompts((16, 64), [8192] * 4, "saturated {}"), _prompts((4, 8), [2048] * 32, "saturated {}"),
    _prompts((8, 32), [93] * 128, "saturated {}"), _prompts((16, 32), [128] * 64, "saturated {}"),
    _prompts((16, 32), [1024] * 8, "saturated {}"),
)  # fmt: skip

chunk = base.Tunable(
    partial(DeltaRuleCase, "chunk_gated_delta_rule", inputs.chunk_inputs, inputs.chunk_tensors),
    shapes=(
        *(_prompts((16, 32), [tokens]) for tokens in (1024, 4096, 8192, 32768)),
        _prompts((16, 32), [1024] * 8), _prompts((16, 32), _RAGGED, "ragged 16384"),
        _prompts((4, 8), [8192]), _prompts((4, 8), [32768]), _prompts((4, 8), [4096] * 4),
        _prompts((4, 8), (12000, 100, 3000, 1000), "ragged 16100"),
        _prompts((2, 4), [32768]), _prompts((16, 64), [8192]),
    ),
    shown=_SATURATED,
    # A long prompt of many heads, calls too short to matter alone, and the table of 27 shapes that others publish.
    measured_only=(
        _prompts((16, 64), [32768]),
        *(_prompts((16, 32), [tokens], "short {}") for tokens in (1, 16, 64, 128, 256, 512)),
        *(_prompts((16, 32), [tokens] * 64, "short {}") for tokens in (16, 64, 128)),
        _padded(1, 63, 1, 64), _padded(2, 500, 3, 60), _padded(2, 1000, 3, 64), _padded(3, 1024, 4, 100),
        _padded(4, 1024, 4, 128), _padded(2, 1500, 4, 128), _padded(4, 2048, 8, 64), _padded(8, 512, 8, 64),
        _padded(16, 512, 8, 64), _padded(32, 256, 8, 64), _padded(64, 128, 8, 64), _padded(8, 512, 8, 128),
        _padded(16, 256, 8, 128), _padded(32, 128, 8, 128), _padded(64, 64, 8, 128),
        _packed((15,), 4, 60), _packed((256, 244, 500), 4, 64), _packed((333, 333, 334), 4, 64, " even"),
        _packed((15, 85, 200, 900, 800), 4, 100), _packed((8192,), 4, 60), _packed((512,) * 8, 4, 64),
        _packed((512,) * 16, 4, 64), _packed((256,) * 32, 4, 64), _packed((128,) * 64, 4, 64), _packed((128,) * 32, 4, 128),
        _packed((104,) * 64, 4, 128), _packed((36,) * 128, 4, 64),
    ),
    small=lambda shape: _few_heads(shape, (70, 5)),
    peer_arguments=partial(_peer_arguments, inputs.chunk_inputs),
)  # fmt: skip

chunk_summary = base.Tunable(
    SummaryCase,
    shapes=tuple(
        base.packed("chunk_summary", f"{heads[0]}/{heads[1]} {{}}", lengths, base.heads_of(*heads))
        for heads, lengths in (((16, 32), [8192] * 2), ((16, 32), [32768] * 2), ((4, 8), [8192] * 8))
    ),
    small=lambda shape: base.resized(shape, (70, 5), num_k_heads=2, num_v_heads=4, num_state_heads=4),
)

recurrent = base.Tunable(
    partial(DeltaRuleCase, "fused_recurrent_gated_delta_rule", inputs.recurrent_inputs, inputs.recurrent_tensors),
    shapes=(
        *(_decode_steps((16, 32), batch) for batch in (1, 8, 32, 128, 512)),
        *(_decode_steps((16, 32), batch, "bfloat16") for batch in (128, 512)),
        *(_decode_steps((4, 8), batch) for batch in (1, 128)),
        *(_decode_steps((16, 32), batch, drafts=3) for batch in (32, 128)),
    ),
    tuned_only=(
        *(_decode_steps((16, 32), batch, "bfloat16") for batch in (1, 8, 32)),
        *(_decode_steps((4, 8), batch) for batch in (8, 32, 512)),
        *(_decode_steps((4, 8), batch, "bfloat16") for batch in (1, 8, 32, 128, 512)),
        _decode_steps((16, 32), 8, drafts=3),
        *(_decode_steps((16, 32), batch, "bfloat16", drafts=3) for batch in (32, 128)),
        _decode_steps((4, 8), 32, drafts=3),
    ),
    useful_flops=base.no_flops,
    small=lambda shape: _few_heads(shape, shape.lengths[:3]),
    peer_arguments=partial(_peer_arguments, inputs.recurrent_inputs),
)


_WRITTEN = 1000  # tokens that every state was written with
_NODES = 4  # of a draft tree, the first of them a root


def ring_of(make: Maker, layers: int, slots: int, rows: int, width: int) -> Tensor:
    """Entries whose values are all below 0, decays among them, so that every entry counts."""
    ring = make.normal(layers, slots, rows, width, dtype="float32")
    return ring.abs_().mul_(-0.1)


def _fold(make: Maker, problem: FoldStatesProblem, lengths: Sequence[int]) -> Work:
    """lengths: tokens of each sequence since its state was written."""
    if problem.has_accepted or problem.has_rounding or not problem.has_final_indices:
        raise ValueError(f"problem: expected other slots to write, no accepted counts and no noise, got {problem.static_key()}")
    count, heads, K, V = len(lengths), problem.num_state_heads, problem.head_k_dim, problem.head_v_dim
    slots = 2 * count + 3
    order = make.order(2 * count, slots, problem.index_dtype)
    inner = (V, K) if problem.state_v_first else (K, V)
    _, width, _ = ring_shape(problem.num_k_heads, heads, K, V)
    arguments = {
        "ssm_state": make.normal(problem.num_layers, slots, heads, *inner, dtype=problem.state_dtype),
        "state_indices": order[:count], "ring": ring_of(make, problem.num_layers, slots, problem.ring_rows, width),
        "state_tokens": make.integers([_WRITTEN] * slots, "int32"),
        "num_computed_tokens": make.integers([_WRITTEN + length for length in lengths], "int32"),
        "num_k_heads": problem.num_k_heads, "fold_every": problem.fold_every, "fold_phase": 0,
        "final_state_indices": order[count:], "state_v_first": problem.state_v_first,
    }  # fmt: skip
    params = params_of(FoldStatesParams, arguments, null_slot=-1)
    return Work("fold_states", arguments, params, updated=("ssm_state", "state_tokens"))


class FoldCase(StepCase):
    """The states of all layers are compared as slots of one pool."""

    def _error(self, name: str, output: Tensor, exact: Tensor, before: Tensor | None) -> float:
        if before is not None:
            output, exact, before = (x.flatten(0, 1) for x in (output, exact, before))
        return super()._error(name, output, exact, before)


def _accept(make: Maker, problem: AcceptDraftTreeProblem, lengths: Sequence[int]) -> Work:
    """lengths: nodes of each tree. The parent of node i is (i + 1) // 2 - 1: node 0 has the children 1 and 2."""
    count, layers = len(lengths), problem.num_layers
    slots = count + 3
    arguments: dict[str, Any] = {
        "ring": ring_of(make, layers, slots, problem.ring_rows, problem.ring_width), "conv_state": None,
        "state_indices": make.order(count, slots, problem.index_dtype),
        "parent_token": make.integers([(i + 1) // 2 - 1 for length in lengths for i in range(length)], "int32"),
        "accepted_nodes": make.integers([length - 1 - n % 2 for n, length in enumerate(lengths)], "int32"),
        "num_computed_tokens": make.integers([_WRITTEN + n for n in range(count)], "int32"),
        "num_accepted_tokens": make.integers([1] * count, "int32"),
        "query_start_loc": make.integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype), "conv_width": problem.conv_width,
    }  # fmt: skip
    updated: tuple[str, ...] = ("ring", "num_accepted_tokens")
    if problem.conv_dim is not None:
        if not problem.conv_channels_contiguous:
            raise ValueError(f"problem: expected windows with channels together, got {problem.static_key()}")
        columns = problem.conv_width - 2 + max(lengths)
        arguments["conv_state"] = make.normal(layers, slots, columns, problem.conv_dim, dtype=problem.conv_dtype).mT
        updated = (*updated, "conv_state")
    params = params_of(AcceptDraftTreeParams, arguments, cu_seqlens=arguments["query_start_loc"], null_slot=-1)
    return Work("accept_draft_tree", arguments, params, updated=updated)


def _since_written(problem: Any) -> tuple[int, ...]:
    """Tokens of each sequence since its state was written, spread evenly over the period of the folds."""
    return tuple(1 + n * problem.fold_every // problem.num_sequences for n in range(problem.num_sequences))


def _folds(heads: tuple[int, int], batch: int, layers: int, state_dtype: str = "float32") -> Shape:
    rows, fold_every = ring_choice(1, state_dtype)
    name = f"{heads[0]}/{heads[1]} batch {batch}, {layers} layers{' bf16' if state_dtype == 'bfloat16' else ''}"
    fields: dict[str, Any] = {"state_dtype": state_dtype, "ring_rows": rows, "fold_every": fold_every, "num_layers": layers}
    shape = packed("fold_states", name, (1,) * batch, heads_of(*heads), has_final_indices=True, **fields)
    return replace(shape, lengths=_since_written(shape.problem))


_FEW: dict[str, Any] = {"num_layers": 2, "num_k_heads": 2, "num_state_heads": 4, "head_k_dim": 16, "head_v_dim": 16}

fold_states = Tunable(
    partial(FoldCase, _fold, verdict="close", copied=("state_tokens",), states=("ssm_state",)),
    shapes=(
        *(_folds((16, 32), batch, 36) for batch in (1, 8)), _folds((16, 32), 128, 1), _folds((4, 8), 8, 36),
        _folds((16, 32), 8, 36, "bfloat16"),
    ),
    small=lambda shape: resized(shape, shape.lengths[-2:], **_FEW),
    lengths=_since_written,
)  # fmt: skip

accept_draft_tree = Tunable(
    partial(StepCase, _accept, verdict="bits"),
    shapes=tuple(
        packed("accept_draft_tree", f"16/32 batch {batch}, 36 layers", (_NODES,) * batch, num_layers=36) for batch in (1, 8, 128)
    ),
    small=lambda shape: resized(shape, shape.lengths[:3], num_layers=2, ring_width=20, conv_dim=8),
)
