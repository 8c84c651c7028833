"""The delta rule as cases: prompts in chunks, decode steps by the token recurrence, on a pool of states.

Shapes have raw gates and the norm inside the kernel, q, k and v as slices of the convolution's output, a float32 pool with V
first and int32 slots: the call of the demo and of serving engines.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

import gdn
from autotune.cases.base import Call, Shape, Tunable, WrongResult, example, heads_of, launch_of, no_flops
from gdn.runtime import Prepared
from gdn.testing import compare, inputs, oracle


class _DeltaRuleCase:
    """Base of both forms: a pool that is updated, q, k and v as slices of the convolution's output."""

    function: str  # the public operator

    # Largest accepted relative error of a head: of outputs by their dtype, of states by the dtype they are stored in.
    output_limit: dict[str, float]
    state_limit: dict[str, float]

    def __init__(self, shape: Shape, device: torch.device, copies: int) -> None:
        self._shape, self._device, self._copies = shape, device, copies
        self._problem: Any = shape.problem

    def _inputs(self, seed: int) -> dict[str, Any]:
        """Keyword arguments of the public operator."""
        raise NotImplementedError

    def _tensors(self, arguments: dict[str, Any], prepared: Prepared) -> tuple[tuple[Any, ...], torch.Tensor]:
        """Positional tensors of a launch, and which of them is out."""
        raise NotImplementedError

    def _arguments(self, seed: int) -> dict[str, Any]:
        arguments = self._inputs(seed)
        # Engines hand over gates as rows of one projection: their heads are neighbours.
        return arguments | {name: arguments[name].contiguous() for name in ("g", "beta") if name in arguments}

    @cached_property
    def _checked(self) -> dict[str, Any]:
        return self._arguments(seed=0)

    @cached_property
    def _expected(self) -> oracle.DeltaRuleResult:
        return oracle.oracle_of(self._checked)

    @cached_property
    def _timed(self) -> list[dict[str, Any]]:
        return [self._arguments(seed=1 + copy) for copy in range(self._copies)]

    def check(self, prepared: Prepared) -> float:
        if not (self._problem.pooled and self._problem.has_final_state):
            raise ValueError(f"shape: expected a pool that is updated, got {self._problem.static_key()}")
        before = self._checked["initial_state"]
        arguments = self._checked | {"initial_state": before.clone()}
        tensors, out = self._tensors(arguments, prepared)
        launch_of(prepared, tensors)()
        expected, after = self._expected, arguments["initial_state"]
        written = sorted(expected.written_slots)
        untouched = sorted(set(range(before.shape[0])) - expected.written_slots)
        if not compare.same_bits(after[untouched], before[untouched]):
            raise WrongResult("a slot that belongs to no sequence was changed")
        assert expected.state is not None
        output = compare.token_error(out, expected.o, expected.offsets)
        state = compare.error(after[written], expected.state[written], groups=2)
        for what, found, limit in (
            ("output", output, self.output_limit[self._problem.dtype]),
            ("state", state, self.state_limit[self._problem.state_dtype]),
        ):
            if not found.l2 <= limit:  # NaN too
                raise WrongResult(f"{what} error {found.l2:.1e} at {found.where}, allowed {limit:.0e}")
        return max(output.l2, state.l2)

    def launches(self, prepared: Prepared) -> list[Call]:
        return [launch_of(prepared, self._tensors(arguments, prepared)[0]) for arguments in self._timed]

    def public_calls(self, backend: str | None) -> list[Call]:
        function: Callable[..., object] = getattr(gdn, self.function)

        def call(arguments: dict[str, Any]) -> Call:
            return lambda: function(**arguments, backend=backend)

        return [call(arguments) for arguments in self._timed]


class ChunkCase(_DeltaRuleCase):
    """Prompts. bf16 tensor-core operands reach an error of 5e-3 in the chunk form."""

    function = "chunk_gated_delta_rule"
    output_limit = {"bfloat16": 1e-2, "float16": 3e-3}
    state_limit = {"float32": 1e-2, "bfloat16": 1e-2}

    def _inputs(self, seed: int) -> dict[str, Any]:
        return inputs.chunk_inputs(self._problem, self._device, seed, lengths=self._shape.lengths, strided=True)

    def _tensors(self, arguments: dict[str, Any], prepared: Prepared) -> tuple[tuple[Any, ...], torch.Tensor]:
        workspace = torch.empty(prepared.workspace_bytes, dtype=torch.uint8, device=self._device)
        tensors = inputs.chunk_tensors(self._problem, arguments, workspace)
        return tensors, tensors.out


class RecurrentCase(_DeltaRuleCase):
    """Decode steps, with drafts or without."""

    function = "fused_recurrent_gated_delta_rule"
    output_limit = {"bfloat16": 4e-3, "float16": 6e-4}
    state_limit = {"float32": 1e-4, "bfloat16": 4e-3}

    def _inputs(self, seed: int) -> dict[str, Any]:
        return inputs.recurrent_inputs(self._problem, self._device, seed, lengths=self._shape.lengths, strided=True)

    def _tensors(self, arguments: dict[str, Any], prepared: Prepared) -> tuple[tuple[Any, ...], torch.Tensor]:
        tensors = inputs.recurrent_tensors(self._problem, arguments)
        return tensors, tensors.out


# --- shapes ------------------------------------------------------------------------------------------------------------


_RAGGED = (37, 4000, 511, 2048, 7, 6001, 1200, 2580)


def _prompts(heads: tuple[int, int], lengths: Sequence[int], label: str, head_dim: int = 128) -> Shape:
    model = heads_of(*heads) | {"head_k_dim": head_dim, "head_v_dim": head_dim}
    problem = example("chunk", model, num_tokens=sum(lengths), num_sequences=len(lengths))
    return Shape(f"{heads[0]}/{heads[1]} {label}", problem, lengths=tuple(lengths))


def _published(head_dim: int, heads: int, lengths: Sequence[int], label: str) -> Shape:
    """A shape of the table on which FLA is usually compared: as many key heads as value heads."""
    return replace(_prompts((heads, heads), lengths, "", head_dim), name=f"published {label} x {heads} x {head_dim}")


def _padded(batch: int, tokens: int, heads: int, head_dim: int) -> Shape:
    return _published(head_dim, heads, [tokens] * batch, f"{batch} x {tokens}")


def _packed(lengths: Sequence[int], heads: int, head_dim: int, label: str = "") -> Shape:
    return _published(head_dim, heads, lengths, f"packed {len(lengths)}, {sum(lengths)}{label}")


def _decode_steps(heads: tuple[int, int], batch: int, state_dtype: str = "float32", drafts: int = 0) -> Shape:
    tokens = 1 + drafts
    problem = example(
        "recurrent", heads_of(*heads), state_dtype=state_dtype, write_every_token=drafts > 0, has_accepted=drafts > 0,
        num_tokens=batch * tokens, num_sequences=batch,
    )  # fmt: skip
    steps = f", {tokens} tokens each" if drafts else ""
    kind = {"float32": "f32", "bfloat16": "bf16"}[state_dtype]
    return Shape(f"{heads[0]}/{heads[1]} batch {batch} {kind}{steps}", problem, lengths=(tokens,) * batch)


def _problem(shape: Shape) -> Any:
    return shape.problem


def _few_heads(shape: Shape, lengths: tuple[int, ...]) -> Shape:
    problem: Any = shape.problem
    sizes = {"num_tokens": sum(lengths), "num_sequences": len(lengths)}
    return replace(shape, lengths=lengths, problem=replace(problem, num_q_heads=2, num_k_heads=2, num_v_heads=4, **sizes))


chunk = Tunable(
    ChunkCase,
    shapes=(
        _prompts((16, 32), [1024], "1024"),
        _prompts((16, 32), [4096], "4096"),
        _prompts((16, 32), [8192], "8192"),
        _prompts((16, 32), [32768], "32768"),
        _prompts((16, 32), [1024] * 8, "8 x 1024"),
        _prompts((16, 32), _RAGGED, "ragged 16384"),
        _prompts((4, 8), [8192], "8192"),
        _prompts((4, 8), [32768], "32768"),
        _prompts((4, 8), [4096] * 4, "4 x 4096"),
        _prompts((4, 8), (12000, 100, 3000, 1000), "ragged 16100"),
        _prompts((2, 4), [32768], "32768"),
        _prompts((16, 64), [8192], "8192"),
    ),
    # A long prompt of many heads, calls too short to matter alone, and the table of 27 shapes that others publish.
    measured_only=(
        _prompts((16, 64), [32768], "32768"),
        *(_prompts((16, 32), [tokens], f"short {tokens}") for tokens in (1, 16, 64, 128, 256, 512)),
        *(_prompts((16, 32), [tokens] * 64, f"short 64 x {tokens}") for tokens in (16, 64, 128)),
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
    peer_arguments=lambda shape, device, seed: inputs.chunk_inputs(_problem(shape), device, seed, lengths=shape.lengths),
)  # fmt: skip

recurrent = Tunable(
    RecurrentCase,
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
    useful_flops=no_flops,
    small=lambda shape: _few_heads(shape, shape.lengths[:3]),
    peer_arguments=lambda shape, device, seed: inputs.recurrent_inputs(_problem(shape), device, seed, lengths=shape.lengths),
)
