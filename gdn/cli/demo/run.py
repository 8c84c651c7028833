"""One run of the demo: build a model, check its operators' calls, measure its phases, compare it with the reference model."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist

from gdn.cli.demo.calls import Checker, Row, intercepting
from gdn.cli.demo.drafts import ngram_drafts, random_drafts, with_wrong
from gdn.cli.demo.engine import Engine, EngineSizes, Generated
from gdn.cli.demo.ranks import divided, told_by_all
from gdn.cli.demo.reference import Deviation, Trace, deviations
from gdn.cli.demo.replay import SequenceBytes, StepTimes, sequence_bytes, step_times
from gdn.cli.demo.routes import Routes
from gdn.layers import HybridConfig, HybridModel
from gdn.layers.loading import SafetensorsFolder, load
from gdn.layers.random_weights import RandomTensors
from gdn.testing.timing import Limits

PHASES = ("prefill", "verify", "decode")
VERIFIED = 2  # speculative steps
CHECKED_STEPS = 2  # decode steps whose calls are checked on a GPU; on a CPU all are
TIMED_STEPS = 30  # at most, of those that are timed with replay and without: two periods of the folds
BLOCK_SIZE = 64  # tokens of a cache block


@dataclass(frozen=True)
class Plan:
    """Parameters of a run of the demo.

    Attributes
    ----------
    name : str
        Name of the model.
    config : HybridConfig
        Configuration of the layers that run, all ranks together.
    lengths : tuple of int
        Tokens of the prompts.
    steps, drafts : int
        Decode steps, and drafts of a speculative step.
    device : torch.device
    tensor_parallel, seed : int
        Ranks, of which the first runs alone, or all run in a group; seed of weights, prompts and drafts.
    context_parallel : int
        Ranks that part the rows of prompts, each with all tensor-parallel ones.
    checkpoint : Path, optional
        Folder of the weights; None = random.
    eager : bool
        Whether steps of fixed shape run without captured graphs.
    replay : bool, optional
        Whether decode is by replay; None = as ``GDN_REPLAY`` says.
    batch : int
        Sequences of the steps that are timed with replay and without; 0 = none are.
    """

    name: str
    config: HybridConfig
    lengths: tuple[int, ...]
    steps: int
    drafts: int
    device: torch.device
    tensor_parallel: int = 1
    seed: int = 0
    checkpoint: Path | None = None
    eager: bool = False
    context_parallel: int = 1
    replay: bool | None = None
    batch: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights: on a CPU float32, in which the model agrees with its reference to the last digits."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def checked_steps(self) -> int:
        """Decode steps whose calls are checked."""
        return CHECKED_STEPS if self.device.type == "cuda" else self.steps

    @property
    def sizes(self) -> EngineSizes:
        """Capacity of the engine: all prompts with everything that is generated."""
        longest = max(self.lengths) + max(self.steps, self.checked_steps) + VERIFIED * (1 + self.drafts) + 1
        return EngineSizes(len(self.lengths), longest, BLOCK_SIZE, num_spec=self.drafts)


@dataclass(frozen=True)
class Speed:
    """Throughput of one phase: its tokens, steps and wall time, the device's work included."""

    phase: str
    tokens: int
    steps: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Memory:
    """Bytes of the weights and of the caches, those of the caches that a token and a sequence take, and the device's peak."""

    weights: int
    caches: int
    per_token: float
    per_sequence: int
    peak: int | None  # None on the CPU


@dataclass(frozen=True)
class Report:
    """Findings of the demo."""

    rows: list[Row]
    speeds: list[Speed]
    memory: Memory
    deviations: list[Deviation]
    captured: bool  # whether the measured steps of fixed shape were CUDA graphs
    tokens: list[list[int]]  # prompts with what was generated
    others: tuple[int, ...] = ()  # wrong calls and phases of the other ranks
    has_replay: bool = False  # whether decode was by replay
    sequences: tuple[SequenceBytes, ...] = ()  # of a sequence with replay and without
    steps: tuple[StepTimes, ...] = ()  # with replay and without

    @property
    def wrong(self) -> int:
        return sum(not row.passed for row in self.rows) + sum(not one.passed for one in self.deviations)

    @property
    def passed(self) -> bool:
        return not self.wrong and not any(self.others)


class _Placed(TypedDict):
    device: torch.device
    dtype: torch.dtype


def make_model(plan: Plan, group: dist.ProcessGroup | None = None) -> HybridModel:
    """The model of this rank of a group, or of the first rank alone, with random weights or those of the checkpoint."""
    config, placed = plan.config, _Placed(device=plan.device, dtype=plan.dtype)
    if group is None:
        model = HybridModel(config.per_rank(plan.tensor_parallel), **placed)
    else:
        tp_group, cp_group = divided(group, plan.tensor_parallel, plan.context_parallel)
        model = HybridModel(config, tp_group=tp_group, cp_group=cp_group, **placed)
    tensors = RandomTensors(config, plan.seed, **placed) if plan.checkpoint is None else SafetensorsFolder(plan.checkpoint)
    load(model, tensors, config, model.tensor_parallel.rank, plan.tensor_parallel, only_first_layers=True)
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()  # whole tensors, of which a rank takes its share
    return model


def run(
    plan: Plan,
    limits: Limits | None,
    on_row: Callable[[Row], None] = lambda row: None,
    group: dist.ProcessGroup | None = None,
) -> Report:
    """Runs the demo.

    limits: measured rates of the GPU; None = no call is timed. on_row: called after every checked call. group: all ranks, which
    run the same plan.
    """
    draw = random.Random(plan.seed)
    prompts = [random_drafts(draw, plan.config.vocab_size, length) for length in plan.lengths]
    engine = Engine(make_model(plan, group), plan.sizes, use_graphs=False, replay=plan.replay)
    checker = Checker(limits, on_row=on_row)
    known = _checked(engine, checker, prompts, draw, plan.checked_steps)
    is_cuda = plan.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(plan.device)
    captured = is_cuda and not plan.eager and can_capture(checker.rows)
    engine.use_graphs = captured or not (is_cuda or plan.eager)  # on a CPU batches of fixed shape, which are not captured
    routes = Routes(engine.model, sum(plan.lengths) + len(plan.lengths) * (1 + plan.drafts))
    trace = Trace(routes)
    engine.on_logits = trace.record
    speeds = _measured(engine, trace, prompts, known, plan.steps)
    engine.on_logits = None
    tokens = [stream.tokens for stream in engine.streams]
    engine.finish()
    caches, weights = engine.caches, sum(one.nbytes for one in engine.model.parameters())
    peak = torch.cuda.max_memory_allocated(plan.device) if is_cuda else None
    memory = Memory(weights, caches.nbytes, caches.bytes_per_token, caches.bytes_per_sequence, peak)
    engine.drop_graphs()
    routes.stop()
    report = Report(
        checker.rows, speeds, memory, deviations(trace, engine), captured, tokens,
        has_replay=caches.gdn.has_replay, sequences=tuple(sequence_bytes(engine.model.config, plan.drafts, plan.dtype)),
        steps=_side_by_side(plan, engine, captured),
    )  # fmt: skip
    if group is None:
        return report
    wrong = told_by_all(report.wrong, group)
    return replace(report, others=tuple(wrong[: group.rank()] + wrong[group.rank() + 1 :]))


def _side_by_side(plan: Plan, engine: Engine, captured: bool) -> tuple[StepTimes, ...]:
    """Times of steps with replay and without, where the plan asks for them. Of ranks that part prompts, none."""
    if not plan.batch or plan.context_parallel > 1 or not plan.config.num_linear_layers:
        return ()
    steps = min(plan.steps, TIMED_STEPS)
    return tuple(step_times(engine.model, plan.batch, plan.drafts, steps, use_graphs=captured, seed=plan.seed))


def can_capture(rows: Sequence[Row]) -> bool:
    """Whether the steps of these calls can be graphs: the reference reads offsets on the host, which a graph cannot."""
    return not any("reference" in row.backend for row in rows if row.phase != "prefill")


def _checked(
    engine: Engine, checker: Checker, prompts: Sequence[Sequence[int]], draw: random.Random, steps: int
) -> list[list[int]]:
    """Runs every phase step by step and call by call, each call checked; returns the tokens of the streams."""
    most, vocab_size = engine.sizes.num_spec, engine.model.config.vocab_size
    with intercepting(checker):
        checker.phase = "prefill"
        engine.prefill(prompts)
        checker.phase = "decode"
        engine.decode(steps)
        checker.phase = "verify"
        for _ in range(VERIFIED):
            engine.verify([random_drafts(draw, vocab_size, most - n % 2) for n in range(len(prompts))])
    tokens = [stream.tokens for stream in engine.streams]
    engine.finish()
    return tokens


def _measured(engine: Engine, trace: Trace, prompts: Sequence[Sequence[int]], known: list[list[int]], steps: int) -> list[Speed]:
    """Runs every phase at full speed: batches of fixed shape, captured as graphs where there is a GPU.

    known: tokens that the streams have generated before. The first speculative step proposes these, with a wrong one at another
    place in each stream; the next ones what followed the last tokens earlier.
    """
    most, vocab_size = engine.sizes.num_spec, engine.model.config.vocab_size
    trace.phase = "prefill"
    speeds = [_speed("prefill", [engine.prefill(prompts)])]
    trace.phase = "verify"
    verified = []
    for turn in range(VERIFIED):
        drafts = []
        for n, (stream, tokens) in enumerate(zip(engine.streams, known, strict=True)):
            own = ngram_drafts(stream.tokens, most)
            if turn == 0:
                own = tokens[len(stream.tokens) : len(stream.tokens) + most]
                own = with_wrong(own, n % (most + 1), vocab_size)
            drafts.append(own)
        verified.append(engine.verify(drafts))
        trace.keep([len(new) for new in verified[-1].tokens])
    speeds.append(_speed("verify", verified))
    trace.phase = "decode"
    decoded = engine.decode(steps)
    return [*speeds, Speed("decode", decoded.num_tokens, steps, decoded.seconds)]


def _speed(phase: str, found: list[Generated]) -> Speed:
    return Speed(phase, sum(one.num_tokens for one in found), len(found), sum(one.seconds for one in found))
