"""Head dims that the CuTe chunk kernel does not have: the copies around the kernel that computes them, and what is passed on.

The copies compile here; torch does what they do, so the composition is held to the oracle without a GPU.
"""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gdn
from gdn.device import H100
from gdn.ops.delta_rule import chunk as operator
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem
from gdn.ops.delta_rule.oracle import oracle_of
from gdn.ops.delta_rule.problem import ChunkProblem, RecurrentParams, RecurrentProblem
from gdn.runtime import Choice, Prepared, explain_problem
from gdn.testing.compare import error, same_bits, token_error
from kernels_cute import chunk
from kernels_cute.chunk import head_dims
from kernels_cute.chunk.head_dims import copies as padding
from tests.compile import checks
from tests.ops.contract_kernel import WORKSPACE_BYTES, ContractKernel

HEAD_DIMS = [4, 12, 36, 60, 68, 100, 124, 132, 192, 256]
STATES: list[dict[str, Any]] = [
    {"has_initial_state": False, "has_final_state": False},
    {"has_initial_state": False, "gate_dtype": None},
    {"has_mask": True, "state_dtype": "bfloat16", "state_v_first": True},
    {"index_dtype": "int64", "has_mask": True, "has_final_indices": True, "has_checkpoints": True, "state_v_first": True},
    {"index_dtype": "int32", "state_dtype": "bfloat16", "use_gate": True, "use_beta_sigmoid": True, "gate_dtype": "bfloat16"},
    {"index_dtype": "int32", "has_mask": True, "num_q_heads": 4, "num_v_heads": 2, "cu_seqlens_dtype": "int64"},
]


def problem_of(dim: int, fields: dict[str, Any]) -> ChunkProblem:
    has_checkpoints = fields.get("has_checkpoints", False) and dim <= 128
    return chunk_problem(dtype="bfloat16", head_k_dim=dim, head_v_dim=dim, **fields | {"has_checkpoints": has_checkpoints})


def _live(problem: ChunkProblem, bounds: torch.Tensor, indices: torch.Tensor, null_slot: int) -> list[bool]:
    lengths = bounds.diff().clamp(min=0).tolist()
    if not problem.pooled:
        return [True] * len(lengths)
    return [length > 0 and slot > null_slot for length, slot in zip(lengths, indices[: len(lengths)].tolist(), strict=True)]


def torch_pad(problem: ChunkProblem, *values: Any) -> None:
    p = padding.CopyParams(*values)
    states, slots, targets = p.final_state, p.slots, p.checkpoint_slots
    dim = problem.head_k_dim
    for x, padded in ((p.q, p.q_copy), (p.k, p.k_copy), (p.v, p.v_copy)):
        if x.shape[-1] != padded.shape[-1]:
            padded.zero_()
            padded[..., :dim] = x
    if not padding.has_state_copies(problem):
        return
    for n, live in enumerate(_live(problem, p.cu_seqlens, p.state_indices, p.null_slot)):
        slots[n] = n if live else -1
        if live:
            states[n] = 0
            if problem.has_initial_state and (not problem.has_mask or bool(p.has_initial_state[n])):
                states[n, :, :dim, :dim] = p.initial_state[int(p.state_indices[n]) if problem.pooled else n]
    if problem.has_checkpoints:
        targets.copy_(len(slots) + torch.arange(targets.numel()).view_as(targets))


def torch_unpad(problem: ChunkProblem, *values: Any) -> None:
    p = padding.CopyParams(*values)
    states, final, targets = p.initial_state, p.final_state, p.checkpoint_slots
    dim = problem.head_v_dim
    if p.q.shape[-1] != p.q_copy.shape[-1]:
        assert bool((p.q[..., dim:] == 0).all())
        p.q_copy.copy_(p.q[..., :dim])
    if not problem.has_final_state:
        return
    lengths = p.cu_seqlens.diff().tolist()
    for n, live in enumerate(_live(problem, p.cu_seqlens, p.state_indices, p.null_slot)):
        if not live:
            continue
        written = p.final_state_indices if problem.has_final_indices else p.state_indices
        slot = int(written[n]) if problem.pooled else n
        if slot > p.null_slot:
            final[slot] = states[n, :, :dim, :dim]
        for column in range(targets.shape[1] if problem.has_checkpoints else 0):
            done, slot = int(p.checkpoint_offsets[n, column]), int(targets[n, column])
            if 0 < done <= lengths[n] and done % 64 == 0 and slot > p.null_slot:
                final[slot] = states[len(lengths) + n * targets.shape[1] + column, :, :dim, :dim]


class Composed(ContractKernel):
    """The chunk module with torch in the place of what it compiles."""

    def prepare(self, problem: Any, device: torch.device, backend: str | None = None) -> Prepared:
        copies = {padding.PAD: functools.partial(torch_pad, problem), padding.UNPAD: functools.partial(torch_unpad, problem)}
        self.instead = head_dims.stand_in(problem)
        present = self.copies = _copies(problem, self.instead.head_k_dim)
        compiled = SimpleNamespace(problem=problem, config=None, functions={name: copies[name] for name in present})
        launch = functools.partial(chunk.launch, compiled)
        return Prepared("cute", None, chunk.workspace_bytes(problem, None), launch, Choice("chunk", "cute"))

    def launch_with(self, functions: Any, problem: ChunkProblem | RecurrentProblem, config: Any, params: Any) -> None:
        assert functions == {} and config is None  # the copies are not among them
        self.launches += 1
        scale, null_slot = (params.scale, params.null_slot) if isinstance(params, RecurrentParams) else params[-2:]
        sizes = {"num_tokens": params[0].shape[-3], "num_sequences": params[12].shape[0] - 1}
        assert null_slot == -1 and isinstance(scale, float)
        self.launch(type(problem)(**problem.static_fields(), **sizes), params)

    def launch_recurrent(self, functions: Any, params: Any) -> None:
        self.launch_with(functions, self.instead, None, params)


def workspace_bytes(problem: Any, config: Any) -> int:
    return WORKSPACE_BYTES if isinstance(problem, ChunkProblem) else 0


@functools.cache
def _copies(problem: ChunkProblem, dim: int) -> tuple[str, ...]:
    return tuple(padding.needed(problem, dim))


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Composed:
    kernel = Composed()
    monkeypatch.setattr(operator, "prepare", kernel.prepare)
    monkeypatch.setattr(head_dims, "kernel", lambda problem: SimpleNamespace(workspace_bytes=workspace_bytes))
    monkeypatch.setattr(head_dims.chunk, "launch_with", kernel.launch_with)
    monkeypatch.setattr(head_dims.choice, "launch_with", kernel.launch_recurrent)
    return kernel


@pytest.mark.parametrize("fields", STATES)
@pytest.mark.parametrize("dim", [4, 60, 100, 132])
def test_composition(composed: Composed, dim: int, fields: dict[str, Any]) -> None:
    problem = problem_of(dim, fields)
    options: dict[str, Any] = {"null_sequences": [2], "slot_gap": 8, "null_slot": 0} if problem.pooled else {}
    arguments = chunk_inputs(problem, lengths=[3, 0, 5, 70, 128], strided=True, padded_tokens=2, **options)
    if problem.has_final_indices:
        arguments["final_state_indices"][3] = 0  # not stored
    if not problem.pooled:
        arguments["null_slot"] = 0  # names no sequence
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    expected = oracle_of(arguments)
    for _ in range(2):  # the second call by the plan of the first
        if problem.pooled:
            arguments["initial_state"].copy_(before["initial_state"])
        o, state = gdn.chunk_gated_delta_rule(**arguments)
        found = token_error(o, expected.o, expected.offsets)
        assert found.within(2**-7), found
        if not problem.pooled:
            assert (state is None) != problem.has_final_state
            if state is not None and expected.state is not None:
                assert error(state, expected.state, groups=2).within(2e-3)
            continue
        assert state is arguments["initial_state"] and expected.state is not None
        written = sorted(expected.written_slots)
        assert error(state[written], expected.state[written], groups=2).within(4e-3)
        others = [slot for slot in range(len(state)) if slot not in expected.written_slots]
        assert same_bits(state[others], before["initial_state"][others])
    assert composed.launches == 2
    inner = composed.problem
    assert isinstance(inner, RecurrentProblem) == (dim > 128)
    assert inner.head_k_dim == {4: 64, 60: 64, 100: 128, 132: 132}[dim]


def test_batch_rows_and_out(composed: Composed) -> None:
    q, k, v = (torch.randn(3, 5, 2, 60).bfloat16() for _ in range(3))
    out = torch.full((3, 5, 2, 60), torch.nan, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "use_qk_l2norm_in_kernel": True}
    expected = oracle_of(arguments)
    o, _ = gdn.chunk_gated_delta_rule(**arguments, out=out)
    assert o is out and token_error(o, expected.o, expected.offsets).within(2**-7)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_what_explain_says(dim: int) -> None:
    choice = explain_problem(problem_of(dim, {}), H100)
    assert choice.backend == "cute" and "K = V" in dict(choice.refusals)["tilelang"]
    wanted = "token by token" if dim > 128 else f"computed with head dim {64 if dim <= 64 else 128}:"
    assert any(wanted in note for note in choice.notes)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_k_dim": 62, "head_v_dim": 62}, "requires K = V, a multiple of 4 up to 256, got K=62, V=62"),
        ({"head_k_dim": 260, "head_v_dim": 260}, "requires K = V, a multiple of 4 up to 256, got K=260, V=260"),
        ({"head_k_dim": 64, "head_v_dim": 128}, "requires K = V, a multiple of 4 up to 256, got K=64, V=128"),
        ({"head_k_dim": 192, "head_v_dim": 192, "index_dtype": "int32", "has_checkpoints": True}, "up to 128 with checkpoints"),
    ],
)
def test_refusals(fields: dict[str, Any], reason: str) -> None:
    found = chunk.refusal(chunk_problem(dtype="bfloat16", **fields))
    assert found is not None and reason in found


@pytest.mark.parametrize("dim", [64, 128])
def test_the_chunk_kernels_own_head_dims_are_left_alone(dim: int) -> None:
    assert chunk.note(problem_of(dim, {})) is None


COPIED = [(problem_of(dim, fields), None) for dim, fields in zip([60, 12, 100, 124, 36], STATES, strict=False)]


@checks.compiles(lambda: checks.tasks_of("kernels_cute.chunk", COPIED))
def test_machine_code() -> None:
    checks.check("kernels_cute.chunk", "cute", COPIED)
