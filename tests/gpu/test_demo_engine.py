"""The demo's engine on a GPU: captured steps give what eager steps give, wait for nothing and allocate nothing."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gdn.cli.demo.engine import Engine, EngineSizes, Stream
from gdn.cli.demo.graphs import FixedStep
from gdn.layers import StepMetadata
from tests.gpu.small_models import FORMS, small_model
from tests.gpu.waits import no_waits

pytestmark = pytest.mark.gpu

PROMPTS = (1, 300, 64, 3, 129)
# Sums over other shapes of products are rounded in another order, and a bfloat16 rounding that differs is carried on.
TOLERANCE = 5e-2  # of the largest logit
# Counters of torch's allocator: bytes in use, and calls of the driver for new memory.
LIVE_BYTES, DEVICE_ALLOCATIONS = "allocated_bytes.all.current", "num_device_alloc"


def make_engine(device: torch.device, form: str, **changes: Any) -> Engine:
    model = small_model(form, device)
    use_graphs = changes.pop("use_graphs", True)
    sizes: dict[str, Any] = {"max_num_sequences": 6, "max_seq_len": 512, "block_size": 64}
    return Engine(model, EngineSizes(**{**sizes, **changes}), use_graphs=use_graphs)


def tokens_of(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(512) for _ in range(length)] for length in lengths]


@contextmanager
def recording(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """Logits of all steps."""
    found: list[torch.Tensor] = []

    def record(streams: list[Stream], rows: list[int], logits: torch.Tensor) -> None:
        found.append(logits.clone())

    engine.on_logits = record
    yield found
    engine.on_logits = None


@pytest.mark.parametrize("num_spec", [0, 3])
@pytest.mark.parametrize("form", FORMS)
def test_captured_decode_gives_what_eager_decode_gives(device: torch.device, form: str, num_spec: int) -> None:
    runs = []
    for use_graphs in (False, True):
        engine = make_engine(device, form, use_graphs=use_graphs, num_spec=num_spec)
        engine.prefill(tokens_of(PROMPTS, 0))
        with recording(engine) as logits:
            engine.decode(16, forced=tokens_of((16,) * len(PROMPTS), 1))
        runs.append(torch.stack(logits).float())
    eager, captured = runs
    assert float((captured - eager).abs().max() / eager.abs().max()) <= TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_captured_verification_gives_what_decode_gives(device: torch.device, form: str) -> None:
    """Logits after right drafts are those of steps of one token."""
    plain = make_engine(device, form)
    plain.prefill(tokens_of(PROMPTS, 0))
    with recording(plain) as logits:
        plain.decode(4)
    steps = torch.stack(logits).transpose(0, 1).float()  # [streams, steps, vocab]
    drafts = [stream.tokens[-4:-1] for stream in plain.streams]
    engine = make_engine(device, form, num_spec=3)
    engine.prefill(tokens_of(PROMPTS, 0))
    with recording(engine) as logits:
        engine.verify(drafts)
    found = logits[0].float().view_as(steps)
    assert float((found - steps).abs().max() / steps.abs().max()) <= TOLERANCE


@pytest.mark.parametrize("num_spec", [0, 3])
@pytest.mark.parametrize("form", FORMS)
def test_decode_waits_for_nothing(device: torch.device, form: str, num_spec: int) -> None:
    """The forward of a captured step does not wait, nor that of an eager one, nor the making of their metadata."""
    for use_graphs in (True, False):
        engine = make_engine(device, form, use_graphs=use_graphs, num_spec=num_spec)
        engine.prefill(tokens_of(PROMPTS, 0))
        engine.decode(2)  # kernels are compiled, graphs captured
        seen = 0

        def check(streams: list[Stream], rows: list[int], logits: torch.Tensor) -> None:
            nonlocal seen
            seen += 1
            if seen == 1:
                torch.cuda.set_sync_debug_mode("error")
            elif seen == 4:
                torch.cuda.set_sync_debug_mode("default")

        engine.on_logits = check  # the three steps after the first
        try:
            engine.decode(5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert seen == 5


def counted(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[dict[str, int]]:
    """A list that gets, for every run of a step of fixed shape, what the allocator's counters rose by in it."""
    found: list[dict[str, int]] = []
    run = FixedStep._run

    def told(fixed: FixedStep, step: StepMetadata) -> None:
        before = torch.cuda.memory_stats(device)
        run(fixed, step)
        after = torch.cuda.memory_stats(device)
        found.append({name: after[name] - before[name] for name in (LIVE_BYTES, DEVICE_ALLOCATIONS)})

    monkeypatch.setattr(FixedStep, "_run", told)
    return found


@pytest.mark.parametrize("num_spec", [0, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_captured_step_allocates_nothing(
    device: torch.device, form: str, num_spec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay cannot allocate, but its step can: it finds what it needs in the memory of the step before, and neither a run nor
    the capture leaves anything but its logits, which take the place of the old ones."""
    engine = make_engine(device, form, num_spec=num_spec)
    engine._fixed.get(4, 1 + num_spec)  # compiles the kernels, and makes cuBLAS's workspace of the stream of captures
    runs = counted(monkeypatch, device)
    fixed = engine._fixed.get(6, 1 + num_spec)
    assert fixed._graph is not None
    _, again, captured = runs  # the first one finds a new stream, without memory
    assert again == {LIVE_BYTES: 0, DEVICE_ALLOCATIONS: 0}
    assert captured[LIVE_BYTES] == 0
    torch.cuda.synchronize()
    with no_waits():
        fixed._graph.replay()


@pytest.mark.parametrize("form", FORMS)
def test_filled_freed_and_refilled_gives_the_same_bits(device: torch.device, form: str) -> None:
    lengths = (63, 64, 127, 130, 190, 300)
    blocks = sum(-(-(length + 2) // 64) for length in lengths)
    engine = make_engine(device, form, num_blocks=blocks, num_spec=1)
    runs = []
    for _ in range(2):
        with recording(engine) as logits:
            engine.prefill(tokens_of(lengths, 2))
            engine.decode(2)
        left = engine.allocator
        assert (left.num_free_blocks, left.num_free_state_slots, left.num_free_sequences) == (0, 0, 0)
        runs.append(logits)
        engine.finish()
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
