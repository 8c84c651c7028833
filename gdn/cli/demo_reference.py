"""The reference model of the demo: the same weights in float32, all operators on the reference, one pass over the sequences."""

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from gdn.cli.demo_calls import on_reference
from gdn.cli.demo_engine import Engine, Stream
from gdn.layers import HybridModel, MoE

RATIO = 2.0  # largest accepted error, as a multiple of the error of the same model in the same dtype on the reference
_LEAST = 2e-5  # errors up to this are accepted whatever the other is: roundings of float32 in another order


class ExpertByExpert(nn.Module):
    """A mixture of experts in float32, one expert after another on the tokens that chose it.

    It reads the original's weights where they are and holds one expert of them in float32 at a time.
    """

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self._moe = (moe,)  # no submodule: a conversion of the model leaves it as it is

    def forward(self, hidden_states: Tensor) -> Tensor:
        (moe,) = self._moe
        probabilities = torch.softmax(linear(hidden_states, moe.router.float()), dim=-1)
        weights, experts = probabilities.topk(moe.top_k, dim=-1)
        if moe.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        gate = torch.sigmoid(linear(hidden_states, moe.shared_expert_gate.float()))
        result = gate * _mlp(hidden_states, moe.shared_expert.gate_up_proj, moe.shared_expert.down_proj)
        for expert in experts.unique().tolist():
            tokens, column = (experts == expert).nonzero(as_tuple=True)
            found = _mlp(hidden_states[tokens], moe.gate_up_proj[expert], moe.down_proj[expert])
            result[tokens] += weights[tokens, column, None] * found
        return moe.tensor_parallel.sum(result)


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = linear(x, gate_up.float()).chunk(2, dim=-1)
    return linear(silu(gate) * up, down.float())


def in_float32(model: HybridModel) -> HybridModel:
    """A copy of a model in float32, its experts still those of the original."""
    experts = {id(module): ExpertByExpert(module) for module in model.modules() if isinstance(module, MoE)}
    made: HybridModel = copy.deepcopy(model, experts)
    return made.float()


class Logged(NamedTuple):
    """Logits that an engine reported: of which phase and stream, and the position of the first row."""

    phase: str
    stream: Stream
    first: int
    logits: Tensor  # [rows, vocab]


class Trace:
    """Logits of an engine's steps.

    Attributes
    ----------
    phase : str
        Name of the phase that runs, set by the caller.
    steps : list of list of Logged
        Records of each step and stream.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.steps: list[list[Logged]] = []

    def record(self, streams: list[Stream], rows: list[int], logits: Tensor) -> None:
        """Handler of `Engine.on_logits`, which is called before the streams take their new tokens."""
        # A prompt has one row, that of its last token.
        first = [max(stream.num_computed, stream.num_prompt_tokens - 1) for stream in streams]
        parts = zip(streams, first, logits.clone().split(rows), strict=True)
        self.steps.append([Logged(self.phase, *part) for part in parts])

    def keep(self, counts: list[int]) -> None:
        """Drops the rows of rejected drafts of the last step: those after the accepted tokens of each stream."""
        step = self.steps[-1]
        self.steps[-1] = [one._replace(logits=one.logits[:count]) for one, count in zip(step, counts, strict=True)]


@dataclass(frozen=True)
class Spread:
    """Errors of rows of logits: the largest, and the median, which no single row decides."""

    largest: float
    median: float

    @classmethod
    def of(cls, errors: Tensor) -> "Spread":
        return cls(float(errors.max()), float(errors.median()))


@dataclass(frozen=True)
class Deviation:
    """Errors of the logits of one phase, against the reference model in float32; each a share of the norm of a row.

    Attributes
    ----------
    phase : str
    positions : int
        Compared rows of logits.
    error, same_dtype, limit : Spread
        Errors of the model that ran; of the same model on the reference in the same dtype; largest accepted of the first.
    agreeing : float
        Share of the rows whose most likely token is that of float32.
    steps : tuple of (float, float)
        Mean errors of each step's rows, of both models: whether they grow.
    """

    phase: str
    positions: int
    error: Spread
    same_dtype: Spread
    limit: Spread
    agreeing: float
    steps: tuple[tuple[float, float], ...] = ()

    @property
    def passed(self) -> bool:
        return self.error.largest <= self.limit.largest and self.error.median <= self.limit.median  # NaN fails


def deviations(trace: Trace, engine: Engine) -> list[Deviation]:
    """The phases' errors against the model in float32, and against the same dtype, over the tokens that the engine generated.

    engine: freed of its streams; it runs the pass in the same dtype.
    """
    logged = [one for step in trace.steps for one in step]
    streams = list(dict.fromkeys(one.stream for one in logged))
    sequences = [stream.tokens[:-1] for stream in streams]
    starts = [stream.num_prompt_tokens - 1 for stream in streams]
    with on_reference():
        same = engine.score(sequences, starts)
        sizes = replace(engine.sizes, num_spec=0)
        wide = Engine(in_float32(engine.model), sizes, use_graphs=False, null_slot=engine.caches.gdn.null_slot)
        exact = wide.score(sequences, starts)
    rows: dict[str, list[_Rows]] = {}
    for step in trace.steps:
        places = [streams.index(one.stream) for one in step]
        at = [slice(one.first - starts[n], one.first - starts[n] + len(one.logits)) for n, one in zip(places, step, strict=True)]
        parts = [(one.logits, same[n][part], exact[n][part]) for n, one, part in zip(places, step, at, strict=True)]
        rows.setdefault(step[0].phase, []).append(_rows(*map(torch.cat, zip(*parts, strict=True))))
    # The reference's errors in all phases count: where a rounding selects another expert or position, an error is many times the
    # others, and a phase of a few positions has such a one or has none. So do those in the phase itself, whose positions may be
    # harder than the others.
    errors = {phase: torch.cat([step.same_dtype for step in steps]) for phase, steps in rows.items()}
    pooled, own = Spread.of(torch.cat(list(errors.values()))), {phase: Spread.of(one) for phase, one in errors.items()}
    limits = {
        phase: Spread(max(_LEAST, RATIO * pooled.largest), max(_LEAST, RATIO * pooled.median, RATIO * one.median))
        for phase, one in own.items()
    }
    return [_deviation(phase, steps, limits[phase]) for phase, steps in rows.items()]


class _Rows(NamedTuple):
    """Relative errors of the rows of a step [rows], of both models, and whether the most likely token is the expected one."""

    error: Tensor
    same_dtype: Tensor
    agrees: Tensor


def _rows(got: Tensor, other: Tensor, expected: Tensor) -> _Rows:
    wide = expected.double()
    error, same_dtype = ((one.double() - wide).norm(dim=1) / wide.norm(dim=1) for one in (got, other))
    return _Rows(error, same_dtype, got.argmax(dim=1) == expected.argmax(dim=1))


def _deviation(phase: str, steps: list[_Rows], limit: Spread) -> Deviation:
    error, same_dtype, agrees = map(torch.cat, zip(*steps, strict=True))
    means = tuple((float(step.error.mean()), float(step.same_dtype.mean())) for step in steps)
    agreeing = float(agrees.double().mean())
    return Deviation(phase, len(error), Spread.of(error), Spread.of(same_dtype), limit, agreeing, means)
