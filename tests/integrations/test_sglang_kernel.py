"""SGLang's kernel object on gdn's operators: SGLang's layouts against a float64 loop, and what is left to SGLang's own object."""

from typing import Any

import pytest
import torch

from gdn.integrations import _sglang_kernel
from tests.integrations.sglang_engine import (
    HV,
    LAYOUTS,
    SLOTS,
    Engine,
    check_decode,
    check_extend,
    check_snapshots,
    check_verify,
    extend,
)
from tests.integrations.stand_in import Stream

CLOSE = 2e-5
STORED = {torch.float32: CLOSE, torch.bfloat16: 5e-3}  # states, by the dtype of the pool


def engine_of(layout: str) -> tuple[Engine, float, float]:
    """An engine of that layout, and the largest errors of results and states."""
    engine = Engine(1, **LAYOUTS[layout])
    return engine, CLOSE, STORED[engine.states.dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_decode(packed: bool, layout: str) -> None:
    check_decode(*engine_of(layout), packed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_given", [False, True])
def test_extend(is_given: bool, layout: str) -> None:
    check_extend(*engine_of(layout), is_given)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_extend_keeps_snapshots(layout: str) -> None:
    check_snapshots(*engine_of(layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_tree", [False, True])
def test_verify(is_tree: bool, layout: str) -> None:
    engine, limit, state_limit = engine_of(layout)
    check_verify(engine, 2e-2 if is_tree and layout == "bfloat16" else limit, state_limit, is_tree)


# --- what is left to the host ---------------------------------------------------------------------------------------------------


def test_float16_states_go_to_the_host() -> None:
    engine = Engine(5, dtype=torch.float16)
    rows = engine.rows(2)
    engine.host.result = ("o", None, None)
    given = engine.options([1, 2], [1, 1])
    weights = {"A_log": engine.A_log, "dt_bias": engine.dt_bias}
    q, k, v = engine.split(rows[0])
    kept = torch.zeros(2, 1, *engine.state_shape)
    more = {"intermediate_states_buffer": kept, "intermediate_state_indices": None, "retrieve_parent_token": None}
    assert engine.kernel.decode(q, k, v, rows[1], rows[2], **weights, **given) is engine.host.result
    assert (
        engine.kernel.packed_decode(*rows, scale=1.0, num_v_heads=HV, head_v_dim=engine.dim, **weights, **given)
        is engine.host.result
    )
    assert engine.kernel.extend(q, k, v, rows[1][None], rows[2][None], **given) == engine.host.result
    assert engine.kernel.target_verify(*weights.values(), q, k, v, rows[1], rows[2], **given, **more) is engine.host.result
    assert [name for name, _, _ in engine.host.calls] == ["decode", "packed_decode", "extend", "target_verify"]
    decode, verify = engine.host.calls[0], engine.host.calls[3]
    assert decode[1][0] is q and decode[2] == {**weights, **given}  # untouched
    assert verify[2]["q"] is q and verify[2]["A_log"] is engine.A_log and verify[2]["intermediate_states_buffer"] is kept
    assert engine.calls.left == {"the states are float16": 4} and engine.calls.served == 0


def test_the_hosts_states_become_the_snapshots_that_it_reads() -> None:
    """The host reads snapshots of a kernel object that keeps them, and its own object knows none."""
    engine = Engine(6, dtype=torch.float16)
    h = engine.normal(1, 2 + 1 + 3, *engine.state_shape)  # states before each chunk of 70, 30 and 150 tokens
    engine.host.result = ("o", None, h)
    snapshots = torch.zeros(4, *engine.state_shape)
    result, _ = extend(
        engine, [5, 1, 3, 2], [70, 30, 0, 150], track_state=snapshots,
        track_chunk_idx=torch.tensor([1, 0, -1, 2], dtype=torch.int32),
    )  # fmt: skip
    assert result == engine.host.result
    assert all(torch.equal(snapshots[row], h[0, place]) for row, place in {0: 1, 1: 2, 3: 5}.items())


def _options(engine: Engine) -> dict[str, Any]:
    return {"A_log": engine.A_log, "dt_bias": engine.dt_bias, **engine.options([1, 2], [1, 1])}


def test_reasons() -> None:
    engine = Engine(7)
    rows = engine.rows(2)
    q, k, v = engine.split(rows[0])
    given = engine.options([1, 2], [1, 1])
    weights = {"A_log": engine.A_log, "dt_bias": engine.dt_bias}
    engine.host.result = ("o", None, None)
    kernel, gates = engine.kernel, (rows[1][None], rows[2][None])
    kernel.extend(q, k, v, *gates, **given, inplace_update=False)
    kernel.packed_decode(*rows, scale=1.0, num_v_heads=HV, head_v_dim=engine.dim, **_options(engine), replayssm_d=rows[0])
    verify = {**given, "intermediate_state_indices": None, "cache_steps": 1}
    kept = torch.zeros(2, 1, *engine.state_shape)
    for buffer, parents in ((None, None), (kept.half(), None), (kept, torch.zeros(2, 3, dtype=torch.int32))):
        own = {**verify, "intermediate_states_buffer": buffer, "retrieve_parent_token": parents}
        kernel.target_verify(*weights.values(), q, k, v, rows[1], rows[2], **own)
    kernel.decode(q, k, v[..., :16], rows[1], rows[2], **_options(engine))
    apart = torch.zeros(SLOTS, *engine.state_shape).transpose(-1, -2)
    kernel.decode(q, k, v, rows[1], rows[2], **{**_options(engine), "ssm_states": apart})
    kernel.decode(q.clone().requires_grad_(), k, v, rows[1], rows[2], **_options(engine))
    assert list(engine.calls.left) == [
        "the states stay as they are (multi-item scoring)",
        "ReplaySSM keeps the states",
        "no buffer takes the states",
        "the states are float16",
        "the tree has parents [2, 3] of 2 tokens in 2 sequences",
        "the head dims are 32 and 16, served are equal multiples of 4 up to 256",
        f"the states have strides {apart.stride()}, served are contiguous slots at multiples of 16 bytes",
        "autograd needs gradients, which this project does not record",
    ]
    assert len(engine.host.calls) == 8 and torch.equal(engine.pool, engine.before)


def test_a_call_unlike_the_last_one_is_asked_again() -> None:
    """After calls that were served: other states, other head dims, other options, and autograd."""
    engine = Engine(9)
    rows, given, weights = engine.rows(2), _options(engine), ("A_log", "dt_bias")
    q, k, v = engine.split(rows[0])
    gates, kept = [x[None] for x in engine.gates(rows[1], rows[2])], torch.zeros(2, 1, *engine.state_shape)
    engine.host.result = ("o", None, None)
    sizes = {"scale": 1.0, "num_v_heads": HV, "head_v_dim": engine.dim}
    own = {name: value for name, value in given.items() if name not in weights}
    verify = {**given, "intermediate_states_buffer": kept, "intermediate_state_indices": engine.int32([0, 1])}

    def call(q: Any = q, v: Any = v, **changes: Any) -> None:
        packed = rows[0] if q.requires_grad is False else rows[0].clone().requires_grad_()
        engine.kernel.decode(q, k, v, rows[1], rows[2], **given | changes)
        engine.kernel.packed_decode(packed, rows[1], rows[2], **given | sizes | changes)
        engine.kernel.extend(q, k, v, *gates, **own | changes)
        engine.kernel.target_verify(q=q, k=k, v=v, a=rows[1], b=rows[2], **verify | changes)

    with torch.no_grad():
        for _ in range(2):
            call()
        call(ssm_states=engine.states.clone())  # a pool of the same form
        assert (engine.calls.served, engine.calls.left) == (12, {})
        call(ssm_states=engine.states.half())
        call(ssm_states=torch.zeros(SLOTS, *engine.state_shape).transpose(-1, -2))
        call()
        assert engine.calls.served == 16 and sum(engine.calls.left.values()) == 8
        engine.kernel.packed_decode(*rows, **given | sizes | {"head_v_dim": 16})
        engine.kernel.extend(q, k, v, *gates, **own, inplace_update=False)
        engine.kernel.target_verify(q=q, k=k, v=v, a=rows[1], b=rows[2], **verify | {"intermediate_states_buffer": kept.half()})
        assert engine.calls.served == 16 and len(engine.host.calls) == 11
    wanting = q.clone().requires_grad_()
    with torch.no_grad():
        call(q=wanting)
        assert engine.calls.served == 20
    call(q=wanting)
    assert engine.calls.served == 20 and engine.calls.left["autograd needs gradients, which this project does not record"] == 4


def test_packed_rows_unlike_the_last_ones() -> None:
    """Another number of rows, another scale and other heads, each after calls that were alike."""
    engine, fresh = Engine(11), Engine(11)
    packed, a, b = engine.rows(3)

    def call(of: Engine, rows: int, scale: float, heads: int = HV) -> Any:
        given = {name: value for name, value in of.options([*range(rows)], [1] * rows).items() if name != "query_start_loc"}
        weights = {"A_log": of.A_log, "dt_bias": of.dt_bias}
        sizes = {"scale": scale, "num_v_heads": heads, "head_v_dim": of.dim}
        of.pool.copy_(of.before)
        return of.kernel.packed_decode(packed[:rows], a[:rows], b[:rows], **weights, **given, **sizes)

    with torch.no_grad():
        for rows, scale in ((2, 1.0), (2, 1.0), (3, 1.0), (3, 0.5), (2, 0.5)):
            fresh.kernel._packing = _sglang_kernel._NO_PACKING
            assert torch.equal(call(engine, rows, scale), call(fresh, rows, scale))
        with pytest.raises(ValueError, match="got Hq=3, Hk=3, HV=2"):
            call(engine, 2, 0.5, HV - 2)
        engine.calls.active, engine.host.result = False, ("o",)
        assert call(engine, 2, 0.5) is engine.host.result


def test_packed_rows_of_a_captured_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets belong to a stream, and those that a capture makes to its graph."""
    engine, stream = Engine(12), Stream(monkeypatch, _sglang_kernel, _sglang_kernel._Packing)
    rows = engine.rows(2)

    def call() -> int:
        """How many are made."""
        before = stream.made
        with torch.no_grad():
            engine.kernel.packed_decode(*rows, scale=1.0, num_v_heads=HV, head_v_dim=engine.dim, **_options(engine))
        return stream.made - before

    assert (call(), call()) == (1, 0)
    stream.is_capturing = True
    assert call() == 0  # they are kept for ever
    stream.number = 2
    assert (call(), call()) == (1, 1)  # of this graph alone
    stream.is_capturing = False
    assert (call(), call()) == (1, 0)


def test_layouts_that_are_left() -> None:
    """Pools, buffers and snapshots that no kernel takes: the host gets the call, and nothing was written."""
    engine, large = Engine(9), Engine(9, dim=132)
    engine.host.result = large.host.result = ("o", None, None)
    rows, weights = engine.rows(2), {"A_log": engine.A_log, "dt_bias": engine.dt_bias}
    q, k, v = engine.split(rows[0])
    size = engine.states[0].numel()
    beside = torch.zeros(SLOTS * size + 1)[1:].view(SLOTS, *engine.state_shape)
    engine.kernel.decode(q, k, v, rows[1], rows[2], **{**_options(engine), "ssm_states": beside})
    given, wide = engine.options([1, 2], [1, 1]), torch.zeros(2, 1, HV, engine.dim, 2 * engine.dim)
    for kept in (wide[..., : engine.dim], torch.zeros(2 * size + 1)[1:].view(2, 1, *engine.state_shape), wide[:, :, :2]):
        more = {"intermediate_states_buffer": kept, "intermediate_state_indices": engine.int32([0, 1])}
        engine.kernel.target_verify(*weights.values(), q, k, v, rows[1], rows[2], **given, **more)
    for other, kept in ((engine, beside[:2].half()), (large, torch.zeros(2, *large.state_shape))):
        more = {"track_state": kept, "track_chunk_idx": other.int32([-1, -1])}
        before = len(other.calls.left)
        other.host.supports_track_state_snapshot = True
        tokens = other.rows(2)
        other.kernel.extend(*other.split(tokens[0]), tokens[1][None], tokens[2][None], **other.options([1, 2], [1, 1]), **more)
        assert len(other.calls.left) == before + 1 and not kept.any()
    assert list(engine.calls.left)[0] == "the states begin at no multiple of 16 bytes"
    assert [reason[:38] for reason in list(engine.calls.left)[1:4]] == ["the buffer of states has shape [2, 1, "] * 3
    assert list(engine.calls.left)[4:] == ["snapshots: the states are float16"]
    assert list(large.calls.left) == ["snapshots of head dim 132, served are up to 128"]
    assert engine.calls.served == large.calls.served == 0 and torch.equal(engine.pool, engine.before)


def test_a_result_whose_last_dimension_is_apart_is_not_written() -> None:
    engine = Engine(10)
    rows = engine.rows(3)
    given = {**engine.options([1], [3]), "output": torch.zeros(1, 3, HV, 2 * engine.dim)[..., ::2]}
    gates = (x[None] for x in engine.gates(rows[1], rows[2]))
    o, _, _ = engine.kernel.extend(*engine.split(rows[0]), *gates, **given)
    assert engine.calls.served == 1 and o.any() and not given["output"].any()


def test_strict() -> None:
    engine = Engine(8, dtype=torch.float16, strict=True)
    rows = engine.rows(2)
    with pytest.raises(RuntimeError, match="strict: decode would be left to the host: the states are float16"):
        engine.kernel.decode(*engine.split(rows[0]), rows[1], rows[2], **_options(engine))
    assert engine.host.calls == []
