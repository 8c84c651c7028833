"""Errors of the chunk kernels against the token recurrence in float64, next to other libraries' errors on the same inputs."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import gdn
from benchmarks import peers
from gdn.ops.delta_rule import inputs, oracle
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import registry
from gdn.testing import compare

_TOKENS = 1024
_LONG = 131072
LIMIT = 1.2  # largest accepted ratio to the best library's error


@dataclass(frozen=True)
class Error:
    """Largest relative errors (2-norm) over sequences and heads, for one implementation on one kind of inputs."""

    case: str
    who: str  # a backend of ours or a library
    is_peer: bool
    out: float
    state: float


@dataclass(frozen=True)
class Ratio:
    """Ratio of an error of this project to the smallest error of other libraries on the same inputs."""

    case: str
    who: str
    what: str  # o | state
    ratio: float

    def __str__(self) -> str:
        return f"{self.case}, {self.who}, {self.what}: {self.ratio:.2f} of the best library's"


def ratios(found: Sequence[Error]) -> list[Ratio]:
    """Ratios, the largest first; none for inputs on which no library ran."""
    told = []
    for ours in (one for one in found if not one.is_peer):
        for what, field in (("o", "out"), ("state", "state")):
            theirs = [getattr(one, field) for one in found if one.is_peer and one.case == ours.case]
            best = min((error for error in theirs if math.isfinite(error)), default=None)
            if best is not None:
                error = getattr(ours, field)
                over = error / best if math.isfinite(error) and best > 0 else math.inf
                # An exact library leaves no room, but ours may be as exact.
                told.append(Ratio(ours.case, ours.who, what, 1.0 if error == best else over))
    return sorted(told, key=lambda one: -one.ratio)


def _problem(tokens: int) -> ChunkProblem:
    return inputs.chunk_problem(
        num_q_heads=2, num_k_heads=2, num_v_heads=4, head_k_dim=128, head_v_dim=128, dtype="bfloat16", state_v_first=True,
        num_tokens=tokens, num_sequences=1,
    )  # fmt: skip


def _plain(case: inputs.Case, device: torch.device) -> dict[str, Any]:
    return inputs.chunk_inputs(_problem(_TOKENS), device, 1, case=case)


def _slow_decay(device: torch.device) -> dict[str, Any]:
    """Decay between 1e-3 and 1e-1 per token, one rate per head, over a long prompt."""
    arguments = inputs.chunk_inputs(_problem(_LONG), device, 1)
    rates = torch.logspace(-3, -1, arguments["g"].shape[-1], device=device)
    noise = torch.rand(arguments["g"].shape, dtype=torch.float32, device=device, generator=torch.Generator(device).manual_seed(2))
    return arguments | {"g": -rates * (0.5 + noise)}


CASES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    **{case: partial(_plain, case) for case in inputs.CASES},
    "beta_1": lambda device: {**(plain := _plain("random", device)), "beta": torch.ones_like(plain["beta"])},
    "slow_decay_131072": _slow_decay,
}


def measure(backend: str | None, libraries: Sequence[str], on_error: Callable[[str], None]) -> Iterator[Error]:
    """Errors of a backend's kernel (or of each) and of every library's ways with the norm inside, on every kind of inputs.

    on_error: called with a sentence for each failure.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    for case, make in CASES.items():
        arguments = make(device)
        expected = oracle.oracle_of(arguments)
        assert expected.state is not None
        for who, is_peer, call in _calls(arguments, backend, libraries, on_error):
            try:
                with torch.no_grad():
                    out, state = call()
            except Exception as failed:  # one that refuses must not hide the others
                on_error(f"{case}, {who}: {type(failed).__name__}: {failed}")
                continue
            o_error = compare.token_error(out.to(torch.bfloat16), expected.o[0], expected.offsets).l2
            yield Error(case, who, is_peer, o_error, compare.error(state, expected.state, groups=2).l2)


def _calls(
    arguments: dict[str, Any], backend: str | None, libraries: Sequence[str], on_error: Callable[[str], None]
) -> list[tuple[str, bool, peers.Call]]:
    def ours(backend: Any) -> peers.Outputs:
        out, state = gdn.chunk_gated_delta_rule(**arguments, backend=backend)
        assert state is not None
        return out[0], state

    names = [backend] if backend else registry.operator("chunk").modules
    found: list[tuple[str, bool, peers.Call]] = [(name, False, partial(ours, name)) for name in names]
    problem = _problem(arguments["q"].shape[1])
    for library in libraries:
        try:
            ways = peers.ways(library, problem, arguments)
        except ImportError as missing:
            on_error(f"{library}: {missing}")
            continue
        found += [(f"{library} {way.variant}".strip(), True, way.call) for way in ways if way.norm]
    return found
