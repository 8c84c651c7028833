"""The reference model of the demo: the same weights in float32, all operators on the reference, one pass over the sequences."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from gdn.cli.demo.calls import on_reference
from gdn.cli.demo.engine import Engine, Stream
from gdn.cli.demo.routes import Routes, recording, reroutings
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
        self.top_k = moe.top_k

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices [tokens, top_k] of the experts of each token."""
        (moe,) = self._moe
        probabilities = torch.softmax(linear(hidden_states, moe.router.float()), dim=-1)
        weights, experts = probabilities.topk(moe.top_k, dim=-1)
        if moe.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        (moe,) = self._moe
        weights, experts = self.route(hidden_states)
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
    """Logits that an engine reported: of which phase and stream, the position of the first row, and the experts of the rows."""

    phase: str
    stream: Stream
    first: int
    logits: Tensor  # [rows, vocab]
    experts: Tensor  # [rows, layers, k]


class Trace:
    """Logits of an engine's steps.

    Parameters
    ----------
    routes : Routes
        Of the engine's model.

    Attributes
    ----------
    phase : str
        Name of the phase that runs, set by the caller.
    steps : list of list of Logged
        Records of each step and stream.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self.phase = ""
        self.steps: list[list[Logged]] = []

    def record(self, streams: list[Stream], rows: list[int], logits: Tensor) -> None:
        """Handler of `Engine.on_logits`, which is called before the streams take their new tokens."""
        # A prompt has one row, that of its last token.
        first = [max(stream.num_computed, stream.num_prompt_tokens - 1) for stream in streams]
        places: list[int] = []  # of these rows among the tokens of the step
        stop = 0
        for stream, start, count in zip(streams, first, rows, strict=True):
            stop += start - stream.num_computed + count
            places += range(stop - count, stop)
        experts = self._routes.of(places).split(rows)
        parts = zip(streams, first, logits.clone().split(rows), experts, strict=True)
        self.steps.append([Logged(self.phase, *part) for part in parts])

    def keep(self, counts: list[int]) -> None:
        """Drops the rows of rejected drafts of the last step: those after the accepted tokens of each stream."""
        step = self.steps[-1]
        self.steps[-1] = [
            one._replace(logits=one.logits[:count], experts=one.experts[:count]) for one, count in zip(step, counts, strict=True)
        ]


@dataclass(frozen=True)
class Spread:
    """Errors of rows of logits: the largest, and the median of the levelled ones (`levelled`), which no single row decides."""

    largest: float
    median: float


class RowErrors(NamedTuple):
    """One row: relative errors of the model that ran and of the reference in the same dtype, and in how many layers each
    selects other experts than float32."""

    error: float
    same_dtype: float
    rerouted: int
    same_rerouted: int


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
    rows : tuple of RowErrors
        The rows by themselves, step by step.
    """

    phase: str
    positions: int
    error: Spread
    same_dtype: Spread
    limit: Spread
    agreeing: float
    steps: tuple[tuple[float, float], ...] = ()
    rows: tuple[RowErrors, ...] = ()

    @property
    def rerouted(self) -> tuple[int, int]:
        """Rows with other experts than float32's in some layer, of both models."""
        return sum(row.rerouted > 0 for row in self.rows), sum(row.same_rerouted > 0 for row in self.rows)

    @property
    def reroutes_as_often(self) -> bool:
        """Whether there are at most `RATIO` times as many such rows as in the reference, but for chance: three deviations."""
        own, same = self.rerouted
        return own - RATIO * same <= 3 * math.sqrt(own + RATIO**2 * same)

    @property
    def passed(self) -> bool:
        is_near = self.error.largest <= self.limit.largest and self.error.median <= self.limit.median  # NaN fails
        return is_near and self.reroutes_as_often


def levelled(errors: Tensor, is_rerouted: Tensor, reference: Tensor, is_reference_rerouted: Tensor) -> Tensor:
    """Errors of rows as if all had the experts that float32 selects.

    Rows in which a rounding selected another expert are several times as far off as the others, in any implementation. Where
    about half of the rows are such, the median of all is that of one kind or of the other, by chance. So the errors of rerouted
    rows are scaled by the ratio of the medians of the two kinds in the reference, of which both kinds then have one median.

    Parameters
    ----------
    errors, is_rerouted : Tensor [rows]
        Errors, and whether the row has other experts than float32's.
    reference, is_reference_rerouted : Tensor [reference rows]
        The same of the reference in the same dtype. Without rows of both kinds nothing is scaled.
    """
    same, other = reference[~is_reference_rerouted], reference[is_reference_rerouted]
    if not same.numel() or not other.numel() or not float(other.median()):
        return errors
    return torch.where(is_rerouted, errors * min(1.0, float(same.median() / other.median())), errors)


def deviations(trace: Trace, engine: Engine) -> list[Deviation]:
    """The phases' errors against the model in float32, and against the same dtype, over the tokens that the engine generated.

    engine: freed of its streams; it runs the pass in the same dtype.
    """
    logged = [one for step in trace.steps for one in step]
    streams = list(dict.fromkeys(one.stream for one in logged))
    sequences = [stream.tokens[:-1] for stream in streams]
    starts = [stream.num_prompt_tokens - 1 for stream in streams]
    with on_reference():
        same = _scored(engine, sequences, starts)
        sizes = replace(engine.sizes, num_spec=0)
        wide = Engine(in_float32(engine.model), sizes, use_graphs=False, null_slot=engine.caches.gdn.null_slot)
        exact = _scored(wide, sequences, starts)
    rows: dict[str, list[_Rows]] = {}
    for step in trace.steps:
        places = [streams.index(one.stream) for one in step]
        at = [slice(one.first - starts[n], one.first - starts[n] + len(one.logits)) for n, one in zip(places, step, strict=True)]
        parts = [
            (_Pass(one.logits, one.experts), same[n].part(rows_of), exact[n].part(rows_of))
            for n, one, rows_of in zip(places, step, at, strict=True)
        ]
        rows.setdefault(step[0].phase, []).append(_rows(*map(_joined, zip(*parts, strict=True))))
    return _judged(rows)


class _Pass(NamedTuple):
    """Rows of a pass: logits [rows, vocab], and the experts of each [rows, layers, k]."""

    logits: Tensor
    experts: Tensor

    def part(self, rows: slice) -> "_Pass":
        return _Pass(self.logits[rows], self.experts[rows])


def _joined(parts: Sequence[_Pass]) -> _Pass:
    return _Pass(*map(torch.cat, zip(*parts, strict=True)))


def _scored(engine: Engine, sequences: list[list[int]], starts: list[int]) -> list[_Pass]:
    """The rows of each sequence from its start on, from one pass."""
    lengths = [len(tokens) for tokens in sequences]
    with recording(engine.model, sum(lengths), MoE, ExpertByExpert) as routes:
        logits = engine.score(sequences, starts)
        stop, found = 0, []
        for length, start, one in zip(lengths, starts, logits, strict=True):
            found.append(_Pass(one, routes.of(range(stop + start, stop + length))))
            stop += length
    return found


class _Rows(NamedTuple):
    """Rows of a step [rows]: relative errors of both models, layers with other experts than float32's, and whether the most
    likely token is the expected one."""

    error: Tensor
    same_dtype: Tensor
    rerouted: Tensor
    same_rerouted: Tensor
    agrees: Tensor


def _rows(got: _Pass, other: _Pass, expected: _Pass) -> _Rows:
    wide = expected.logits.double()
    error, same_dtype = ((one.logits.double() - wide).norm(dim=1) / wide.norm(dim=1) for one in (got, other))
    rerouted, same_rerouted = (reroutings(one.experts, expected.experts) for one in (got, other))
    return _Rows(error, same_dtype, rerouted, same_rerouted, got.logits.argmax(dim=1) == expected.logits.argmax(dim=1))


def _judged(phases: dict[str, list[_Rows]]) -> list[Deviation]:
    """A deviation of each phase.

    The reference's errors in all phases count: where a rounding selects another expert or position, an error is many times the
    others, and a phase of a few positions has such a one or has none. So do those in the phase itself, whose positions may be
    harder than the others.
    """
    joined = {phase: _Rows(*map(torch.cat, zip(*steps, strict=True))) for phase, steps in phases.items()}
    reference = torch.cat([one.same_dtype for one in joined.values()])
    is_rerouted = torch.cat([one.same_rerouted for one in joined.values()]) > 0

    def spread(errors: Tensor, rerouted: Tensor) -> Spread:
        return Spread(float(errors.max()), float(levelled(errors, rerouted > 0, reference, is_rerouted).median()))

    pooled, found = spread(reference, is_rerouted), []
    for phase, one in joined.items():
        own = spread(one.same_dtype, one.same_rerouted)
        limit = Spread(max(_LEAST, RATIO * pooled.largest), max(_LEAST, RATIO * pooled.median, RATIO * own.median))
        means = tuple((float(step.error.mean()), float(step.same_dtype.mean())) for step in phases[phase])
        listed = zip(*(values.tolist() for values in one[:4]), strict=True)
        found.append(
            Deviation(
                phase,
                len(one.error),
                spread(one.error, one.rerouted),
                own,
                limit,
                float(one.agrees.double().mean()),
                means,
                tuple(RowErrors(*row) for row in listed),
            )  # fmt: skip
        )
    return found
