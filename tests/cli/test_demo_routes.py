"""The demo judges rows in which a rounding selects other experts apart, and records the experts of the right rows."""

import dataclasses
import math

import pytest
import torch

from gdn.cli.demo import run as demo_run
from gdn.cli.demo.engine import Engine, EngineSizes
from gdn.cli.demo.reference import Deviation, RowErrors, Spread, Trace, _judged, _Rows, levelled
from gdn.cli.demo.routes import Routes, recording, reroutings
from gdn.layers import HybridModel, MoE
from gdn.layers.named import NAMED, first_layers
from gdn.layers.random_weights import fill_randomly

TINY = dataclasses.replace(first_layers(NAMED["tiny"], 2), layer_types=("linear_attention", "full_attention"))
SAME, OTHER = 0.02, 0.06  # errors of rows with float32's experts, and with others


def rows(run: list[int], reference: list[int], factor: float = 1.0) -> _Rows:
    """Rows with errors of both kinds, spread by a tenth; run, reference: layers with other experts."""

    def errors(layers: list[int], scale: float) -> torch.Tensor:
        return torch.tensor([scale * (OTHER if n else SAME) * (0.9 + 0.05 * (place % 5)) for place, n in enumerate(layers)])

    counts = [torch.tensor(one) for one in (run, reference)]
    return _Rows(errors(run, factor), errors(reference, 1.0), *counts, torch.ones(len(run), dtype=torch.bool))


def mixed(others: int, count: int = 56) -> list[int]:
    return [1] * others + [0] * (count - others)


@pytest.mark.parametrize("own", [0, 14, 27, 29, 42])
@pytest.mark.parametrize("reference", [14, 27, 29, 42])
def test_the_share_of_rerouted_rows_does_not_decide_the_median(own: int, reference: int) -> None:
    """On either side of a half the median of all errors is three times as large; the levelled one is not."""
    found = rows(mixed(own), mixed(reference))
    plain = float(found.error.median() / found.same_dtype.median())
    (one,) = _judged({"decode": [found]})
    assert (plain > 2) == (own > 28 > reference)
    assert one.error.median / one.same_dtype.median == pytest.approx(1.0, abs=0.12) and one.passed
    assert one.same_dtype.median == pytest.approx(SAME, rel=0.11)


@pytest.mark.parametrize("others", [0, 20, 28, 40, 56])
def test_the_reference_holds_against_itself_and_larger_errors_do_not(others: int) -> None:
    for factor, passes in ((1.0, True), (1.4, True), (2.7, False), (math.nan, False)):
        (one,) = _judged({"decode": [rows(mixed(others), mixed(others), factor)]})
        assert one.passed == passes, (factor, one)


def test_one_row_that_is_far_off_is_wrong() -> None:
    found = rows(mixed(20), mixed(20))
    found.error[3] = 5 * OTHER
    (one,) = _judged({"decode": [found]})
    assert not one.passed and one.error.median <= one.limit.median


def test_without_rows_of_both_kinds_nothing_is_scaled() -> None:
    errors, none, some = torch.tensor([0.1, 0.2]), torch.tensor([False, False]), torch.tensor([True, False])
    assert torch.equal(levelled(errors, some, errors, none), errors)
    assert torch.equal(levelled(errors, some, errors, ~none), errors)
    assert torch.equal(levelled(errors, some, torch.zeros(2), some), errors)
    scaled = levelled(errors, some, torch.tensor([0.4, 0.1]), some)
    assert scaled.tolist() == pytest.approx([0.1 / 4, 0.2])
    assert torch.equal(levelled(errors, some, torch.tensor([0.1, 0.4]), some), errors)  # never enlarged


@pytest.mark.parametrize(
    ("own", "reference", "passes"), [(0, 0, True), (9, 0, True), (10, 0, False), (20, 10, True), (56, 5, False)]
)
def test_rows_are_rerouted_as_often_as_in_the_reference(own: int, reference: int, passes: bool) -> None:
    """Twice as many, and what chance explains."""
    spread = Spread(0.0, 0.0)
    listed = tuple(RowErrors(0.0, 0.0, *pair) for pair in zip(mixed(own), mixed(reference), strict=True))
    found = Deviation("decode", 56, spread, spread, spread, 1.0, (), listed)
    assert found.rerouted == (own, reference) and found.reroutes_as_often == found.passed == passes


def make_engine(**changes: int) -> Engine:
    model = HybridModel(TINY, dtype=torch.float32)
    fill_randomly(model)
    return Engine(model, EngineSizes(4, 100, 64, **changes), use_graphs=True)


def test_the_experts_of_the_right_rows_are_recorded() -> None:
    """A ragged prefill, drafts of different lengths and padded decode: the experts are those of one pass over the tokens."""
    engine = make_engine(num_spec=2)
    routes = Routes(engine.model, 200)
    trace = Trace(routes)
    engine.on_logits = trace.record
    engine.prefill([[5] * 37, [7, 8, 9], [3]])
    done = engine.verify([[1], [2, 3], []])
    trace.keep([len(new) for new in done.tokens])
    engine.decode(2)
    routes.stop()
    streams = list(engine.streams)
    engine.on_logits = None
    engine.finish()
    found: dict[int, list[torch.Tensor]] = {}
    for one in [one for step in trace.steps for one in step]:
        assert one.experts.shape == (len(one.logits), TINY.num_hidden_layers, TINY.num_experts_per_tok)
        found.setdefault(streams.index(one.stream), []).append(one.experts)
    sequences = [stream.tokens[:-1] for stream in streams]
    with recording(engine.model, 200) as whole:
        engine.score(sequences, [0, 0, 0])
        stop = 0
        for n, tokens in enumerate(sequences):
            stop += len(tokens)
            wanted = whole.of(range(stop - len(tokens) + streams[n].num_prompt_tokens - 1, stop))
            assert torch.equal(torch.cat(found[n]), wanted)
            assert not reroutings(wanted, wanted).any()
    assert len({tuple(row.flatten().tolist()) for rows in found.values() for part in rows for row in part}) > 5
    changed = wanted.clone()
    changed[0, 1, 0] += 1
    assert reroutings(changed, wanted).tolist() == [1] + [0] * (len(wanted) - 1)


def test_recording_ends() -> None:
    engine = make_engine()
    with recording(engine.model, 10):
        assert "forward" in vars(engine.model)
    assert "forward" not in vars(engine.model)
    assert not any("route" in vars(module) for module in engine.model.modules() if isinstance(module, MoE))


def test_a_run_in_float32_reroutes_nothing_and_lists_its_rows() -> None:
    plan = demo_run.Plan("small", TINY, (37, 70, 2), steps=2, drafts=2, device=torch.device("cpu"))
    found = demo_run.run(plan, None)
    assert found.passed
    for one in found.deviations:
        assert len(one.rows) == one.positions and one.rerouted == (0, 0)
        assert one.error.largest == max(row.error for row in one.rows)
