"""Shape, Case and Tunable: how the tuner and the benchmark see an operator; the cases whose inputs follow from a seed."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from gdn.core.call import operator_named
from gdn.core.check import dtype_name
from gdn.models import QWEN3_NEXT_80B
from gdn.problem import Problem
from gdn.runtime import Prepared, registry
from gdn.testing import compare
from gdn.testing.params import params_of as params_of

Call = Callable[[], object]
Tensor = torch.Tensor

# Largest accepted relative error of a row or head, by the dtype of the output: about two roundings of it.
ROUNDINGS = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 1e-5}
# Largest share of values that may differ from the reference's: a norm's sum in another order rounds a few of them the other
# way, and with them the scales that follow from them.
_DIFFERING = 2e-3


class WrongResult(Exception):
    """A candidate ran and its result is not the reference's."""


@dataclass(frozen=True)
class Shape:
    """A problem under a name, with what the problem's sizes leave open."""

    name: str
    problem: Problem
    lengths: tuple[int, ...] = ()  # tokens of each sequence, for operators on packed sequences
    ranges: str = "causal"  # ranges of keys, as gdn.ops.indexer.inputs names them (mqa_logits)
    positions: str = "random"  # selected positions (sparse attention): random, runs of 4, or 90 % kept from query to query

    @property
    def op(self) -> str:
        return self.problem.op


def heads_of(num_k_heads: int, num_v_heads: int) -> dict[str, Any]:
    """Changes to QWEN3_NEXT_80B for `example`."""
    return {"num_k_heads": num_k_heads, "num_v_heads": num_v_heads}


def example(op: str, model: dict[str, Any] | None = None, fp8: bool = True, **changes: Any) -> Any:
    """The operator's problem on QWEN3_NEXT_80B with other model fields, then with other problem fields."""
    problem: Any = registry.operator(op).example(replace(QWEN3_NEXT_80B, **(model or {})), fp8=fp8)
    return replace(problem, **changes)


def resized(shape: Shape, lengths: Sequence[int] = (), **fields: Any) -> Shape:
    """The shape with other lengths, the sizes that follow from them, and other fields of its problem."""
    problem: Any = shape.problem
    follow = {"num_tokens": sum(lengths), "num_rows": sum(lengths), "num_sequences": len(lengths)} if lengths else {}
    sizes = {name: size for name, size in follow.items() if name in problem.sizes()}
    return replace(shape, lengths=tuple(lengths), problem=replace(problem, **sizes | fields))


def packed(op: str, name: str, lengths: Sequence[int], model: dict[str, Any] | None = None, **fields: Any) -> Shape:
    """A shape of packed sequences. name: "{}" in it becomes the number of sequences and their length."""
    tokens = f"{len(lengths)} x {lengths[0]}" if len(lengths) > 1 else str(lengths[0])
    return resized(Shape(name.format(tokens), example(op, model)), lengths, **fields)


def decode_steps(op: str, heads: tuple[int, int], batch: int, drafts: int = 0, **fields: Any) -> Shape:
    """One token of each sequence, or 1 + drafts."""
    kind = {"float32": " f32", "bfloat16": " bf16"}.get(fields.get("state_dtype", ""), "")
    steps = f", {1 + drafts} tokens each" if drafts else ""
    name = f"{heads[0]}/{heads[1]} batch {batch}{kind}{steps}{', a tree' if fields.get('has_parent') else ''}"
    return packed(op, name, (1 + drafts,) * batch, heads_of(*heads), **fields)


class Case(Protocol):
    def check(self, prepared: Prepared) -> float:
        """Error of the kernel's result against the exact answer; WrongResult where it is too large."""

    def launches(self, prepared: Prepared) -> list[Call]:
        """Launches of the kernel alone, one per set of inputs."""

    def public_calls(self, backend: str | None) -> list[Call]:
        """Calls of the public operator, one per set of inputs."""


def no_flops(shape: Shape) -> int:
    """Zero, for operators without tensor-core work: their floor is the bytes that they move."""
    return 0


@dataclass(frozen=True)
class Tunable:
    """An operator for the tuner and the benchmark."""

    case: Callable[[Shape, torch.device, int], Case]  # makes the case of a shape; int: sets of inputs to time
    shapes: tuple[Shape, ...]  # tuned, and rows of the measured tables
    tuned_only: tuple[Shape, ...] = ()  # measured by name alone: they would make the tables long
    shown: tuple[Shape, ...] = ()  # rows of the measured tables that are not tuned
    measured_only: tuple[Shape, ...] = ()  # measured by name alone, and never tuned
    useful_flops: Callable[[Shape], int] = lambda shape: shape.problem.flops()  # operations that the call asks for
    small: Callable[[Shape], Shape] = lambda shape: shape  # a shape of the same code path at sizes for a CPU
    lengths: Callable[[Any], tuple[int, ...]] | None = None  # of a problem; None: its tokens, spread evenly
    peer_arguments: Callable[[Shape, torch.device, int], dict[str, Any]] | None = None  # for benchmarks.peers; int: seed


def launch_of(prepared: Prepared, params: tuple[Any, ...]) -> Call:
    launch = prepared.launch
    if launch is None:
        raise TypeError("prepared: expected a kernel, got the reference")
    return lambda: launch(params)


@dataclass(frozen=True)
class Work:
    """One set of inputs, for the public operator and for a launch."""

    function: str  # the public operator, and its reference
    arguments: dict[str, Any]
    params: Any  # the operator's Params; its workspace, if it has one, is allocated for each launch
    outputs: tuple[Tensor | None, ...] = ()  # fields of `params` that are written and returned
    updated: tuple[str, ...] = ()  # names of the arguments that are updated in place

    def launch(self, prepared: Prepared) -> Call:
        params = self.params
        if prepared.workspace_bytes and "workspace" in params._fields:
            workspace = torch.empty(prepared.workspace_bytes, dtype=torch.uint8, device=params.out.device)
            params = params._replace(workspace=workspace)
        return launch_of(prepared, params)


class SeededCase:
    """Case whose inputs follow from a seed. The inputs of seed 0 are checked, the others are timed."""

    def __init__(self, shape: Shape, device: torch.device, copies: int) -> None:
        self._shape, self._device, self._copies = shape, device, copies
        self._problem: Any = shape.problem

    def _work(self, seed: int) -> Work:
        raise NotImplementedError

    @cached_property
    def _timed(self) -> list[Work]:
        return [self._work(seed=1 + copy) for copy in range(self._copies)]

    def launches(self, prepared: Prepared) -> list[Call]:
        return [work.launch(prepared) for work in self._timed]

    def public_calls(self, backend: str | None) -> list[Call]:
        public = importlib.import_module("gdn")  # by name, since that package imports what this module does
        return [partial(getattr(public, work.function), **work.arguments, backend=backend) for work in self._timed]


def limited(what: str, found: compare.Error, limit: float) -> float:
    """A relative error; WrongResult where it is beyond its limit."""
    if not found.l2 <= limit:  # NaN too
        raise WrongResult(f"{what} error {found.l2:.1e} at {found.where}, allowed {limit:.0e}")
    return found.l2


def state_error(after: Tensor, before: Tensor, exact: Tensor, written: Iterable[int], limit: float) -> float:
    """Error of the slots that a call writes; WrongResult where it is beyond the limit, or another slot has changed."""
    slots = sorted(written)
    others = sorted(set(range(len(before))) - set(slots))
    if not compare.same_bits(after[others], before[others]):
        raise WrongResult("a slot that belongs to no sequence was changed")
    return limited("state", compare.error(after[slots], exact[slots], groups=2), limit)


class Maker:
    """Inputs from a seed: the same tensors for the same seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: str | None) -> Tensor:
        if dtype is None:
            raise ValueError("problem: expected every tensor that the case has, got one of no dtype")
        drawn = torch.randn(*shape, dtype=torch.float32, device=self.device, generator=self.generator)
        return drawn.to(getattr(torch, dtype))

    def poisoned(self, *shape: int, dtype: str) -> Tensor:
        """NaN, so that an element that is never written shows."""
        if dtype == "float8_e4m3fn":
            return torch.full(shape, 0x7F, dtype=torch.uint8, device=self.device).view(torch.float8_e4m3fn)
        return torch.full(shape, torch.nan, dtype=getattr(torch, dtype), device=self.device)

    def integers(self, values: Any, dtype: str | None) -> Tensor:
        return torch.as_tensor(values, dtype=getattr(torch, str(dtype)), device=self.device)

    def order(self, count: int, of: int, dtype: str | None) -> Tensor:
        """Different numbers below `of`, in random order."""
        return self.integers(torch.randperm(of, device=self.device, generator=self.generator)[:count], dtype)


class StepCase(SeededCase):
    """Case of an operator whose inputs `make` makes.

    verdict: "bits" (copies and integers: the reference's bits), "close" (the reference in float64, within the roundings of the
    output's dtype, or within `limit`) or "rounded" (the reference's bits, but for a few values that round the other way). What
    the operator updates in place without computing, named in `copied`, is compared bit for bit. Pools of states, named in
    `states` where they are updated, are compared head by head, and bit for bit in the slots that the reference leaves alone.

    by_rounding: with "close", a row of an output beyond the limit is accepted within twice the error that the reference in the
    call's own dtypes has in that row.
    """

    def __init__(
        self, make: Callable[[Maker, Any, Sequence[int]], Work], shape: Shape, device: torch.device, copies: int, *, verdict: str,
        copied: tuple[str, ...] = (), states: tuple[str, ...] = (), limit: float | None = None, by_rounding: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(shape, device, copies)
        self._make, self._verdict, self._copied, self._states = make, verdict, copied, states
        self._limit, self._by_rounding = limit, by_rounding

    def _work(self, seed: int) -> Work:
        return self._make(Maker(self._device, seed), self._problem, self._shape.lengths)

    @cached_property
    def _expected(self) -> list[Tensor]:
        return self._reference(in_float64=self._verdict == "close")

    _rounded = cached_property[list[Tensor]](lambda self: self._reference(in_float64=False))

    def _reference(self, in_float64: bool) -> list[Tensor]:
        """Results of the reference on the inputs of seed 0: outputs, then what it updates."""
        work = self._work(seed=0)
        arguments = dict(work.arguments)
        for name, value in work.arguments.items() if in_float64 else ():
            if name == "out":
                arguments[name] = None  # the reference allocates it, in float64
            elif isinstance(value, Tensor) and value.is_floating_point() and name not in work.updated:
                arguments[name] = value.double()
        found = operator_named(work.function).reference(**arguments)
        returned = found if isinstance(found, tuple) else () if found is None else (found,)
        expected = [made for made, output in zip(returned, work.outputs, strict=False) if output is not None]
        return expected + [arguments[name] for name in work.updated]

    def check(self, prepared: Prepared) -> float:
        expected = self._expected
        work = self._work(seed=0)  # a new set: a launch updates pools, caches and rings
        before = {name: work.arguments[name].clone() for name in self._states if name in work.updated}
        work.launch(prepared)()
        found = {f"output {n}": output for n, output in enumerate(work.outputs) if output is not None}
        found |= {name: work.arguments[name] for name in work.updated}
        both = zip(found.items(), expected, strict=True)
        return max(self._error(name, output, exact.reshape(output.shape), before.get(name)) for (name, output), exact in both)

    def _error(self, name: str, output: Tensor, exact: Tensor, before: Tensor | None) -> float:
        """before: content of a pool of states before the call."""
        if compare.same_bits(output, exact):
            return 0.0
        if self._verdict == "bits" or name in self._copied:
            count = int((output.double() != exact.double()).sum())
            raise WrongResult(f"{name} is not the reference's: {count} of {output.numel()} values differ")
        if self._verdict == "close":
            limit = self._limit or ROUNDINGS[dtype_name(output.dtype)]
            if before is None and self._by_rounding:
                return _rows_limited(name, output, exact, self._rounded[0].reshape(output.shape), limit)
            if before is None:
                return limited(name, compare.error(output, exact, groups=1), limit)
            written = [slot for slot in range(len(before)) if not compare.same_bits(exact[slot], before[slot])]
            return state_error(output, before, exact, written, limit)
        share = _differing(output, exact)
        if not share <= _DIFFERING:
            raise WrongResult(f"{name}: {share:.1e} of it is not the reference's, allowed {_DIFFERING:.0e}")
        return share


def _rows_limited(what: str, output: Tensor, exact: Tensor, rounded: Tensor, limit: float) -> float:
    """The largest relative error of a row; WrongResult where it is beyond the limit and beyond twice the error of `rounded`."""
    found, accepted = (compare.row_errors(x, exact, groups=1) for x in (output, rounded))
    accepted = (2 * accepted).clamp(min=limit)
    if not bool((found <= accepted).all()):
        row = int((found / accepted).argmax())
        raise WrongResult(f"{what} error {float(found[row]):.1e} at row {row}, allowed {float(accepted[row]):.0e}")
    return float(found.max())


def _differing(output: Tensor, exact: Tensor) -> float:
    """Share of values that differ; 1 where one differs by more than a rounding in the other direction explains."""
    if output.dtype == torch.uint8:  # bytes of values and of scales
        return float((output != exact).double().mean())
    got, want = output.double(), exact.double()
    # A scale, and all of its row's values with it, may follow from a 16-bit value that was rounded the other way.
    step, least = (2.0**-3, 2.0**-8) if output.dtype == torch.float8_e4m3fn else (2.0**-7, 1e-3)
    wild = ~((got - want).abs() <= step * 1.01 * want.abs() + least)  # NaN too
    tolerance = 1e-6 * want.abs() if output.dtype == torch.float32 else 0.0
    return 1.0 if bool(wild.any()) else float(((got - want).abs() > tolerance).double().mean())
