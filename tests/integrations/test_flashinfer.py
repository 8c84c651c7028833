"""The FlashInfer adapter: signatures, values in all layouts, refusals, and the functions where FlashInfer's modules hold them."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gdn.integrations import Refused, _hosts, _signatures, flashinfer
from gdn.ops.delta_rule.oracle import oracle_delta_rule
from tests.integrations import stand_in

NAMES = {name.rpartition(".")[2]: name for name in _hosts.FLASHINFER.functions}
PREFILL = NAMES["chunk_gated_delta_rule"]
BATCH, TOKENS, DIM = 3, 2, 16


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_the_recorded_ones(name: str) -> None:
    recorded = stand_in.parameters("flashinfer", NAMES[name])
    assert _signatures.difference(recorded, _signatures.of_object(getattr(flashinfer, name))) is None


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.reshape(got.shape), rtol=1e-5, atol=1e-5)


def prefill(total: int = 80) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = torch.randn(total, 2, DIM), torch.randn(total, 2, DIM), torch.randn(total, 4, DIM)
    g, beta, state = torch.rand(total, 4), torch.rand(total, 4), torch.randn(2, 4, DIM, DIM)
    k = torch.nn.functional.normalize(k, dim=-1)
    offsets = torch.tensor([0, 66, total], dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state, "cu_seqlens": offsets}


def exact_prefill(given: dict[str, Any], **more: Any) -> Any:
    rows = {name: None if given[name] is None else given[name][None] for name in ("q", "k", "v", "g", "beta")}
    if rows["g"] is not None:
        rows["g"] = rows["g"].double().log()
    rest = {name: value for name, value in given.items() if name not in rows}
    return oracle_delta_rule(**rows, **rest, state_v_first=True, **more)


def test_prefill_by_position() -> None:
    """Positions 9 and 10 are the offsets and the norm: the other way round in gdn."""
    given = prefill()
    leading = [given[name] for name in ("q", "k", "v", "g", "beta")]
    o, state = flashinfer.chunk_gated_delta_rule(*leading, 0.3, given["initial_state"], True, given["cu_seqlens"], True)
    expected = exact_prefill(given, scale=0.3, use_qk_l2norm_in_kernel=True)
    close(o, expected.o)
    close(state, expected.state)
    alone = flashinfer.chunk_gated_delta_rule(**given, scale=0.0)
    assert isinstance(alone, torch.Tensor), "the result alone without output_final_state"
    close(alone, exact_prefill(given).o)


def test_prefill_without_decay_and_strength_and_with_a_decay_of_zero() -> None:
    given = prefill()
    bare = {**given, "g": None, "beta": None}
    close(flashinfer.chunk_gated_delta_rule(**bare), exact_prefill(bare).o)
    given["g"][5] = 0.0
    close(flashinfer.chunk_gated_delta_rule(**given), exact_prefill(given).o)


def test_prefill_writes_where_it_is_told() -> None:
    given, expected = prefill(), exact_prefill(prefill())
    output, final = torch.zeros(80, 4, DIM), torch.zeros(2, 4, DIM, DIM, dtype=torch.bfloat16)
    before = given["initial_state"].clone()
    o, state = flashinfer.chunk_gated_delta_rule(**given, output_final_state=True, output=output, output_state=final)
    assert o is output and state is final and torch.equal(given["initial_state"], before)
    close(o, expected.o)
    assert torch.equal(final, expected.state.to(torch.bfloat16))
    in_place = given["initial_state"]
    _, state = flashinfer.chunk_gated_delta_rule(**given, output_final_state=True, output_state=in_place)
    assert state is in_place
    close(in_place, expected.state)


def test_prefill_on_a_pool() -> None:
    given = prefill()
    pool, slots = torch.randn(5, 4, DIM, DIM), torch.tensor([3, 1])
    pooled = {**given, "initial_state": pool, "state_indices": slots}
    expected, before = exact_prefill(pooled), pool.clone()
    close(flashinfer.chunk_gated_delta_rule(**pooled), expected.o)
    assert torch.equal(pool, before), "without output_final_state the pool is only read"
    for output_state in (pool, pool.view(pool.shape)):
        pool.copy_(before)
        o, state = flashinfer.chunk_gated_delta_rule(**pooled, output_final_state=True, output_state=output_state)
        assert state is output_state
        close(o, expected.o)
        close(pool, expected.state)
        assert all(torch.equal(pool[slot], before[slot]) for slot in (0, 2, 4))


@pytest.mark.parametrize(("every", "lengths", "kept_as"), [(64, (192, 63, 130), "float32"), (128, (64, 256), "bfloat16")])
@pytest.mark.parametrize("is_pooled", [False, True])
def test_prefill_with_checkpoints(every: int, lengths: tuple[int, ...], kept_as: str, is_pooled: bool) -> None:
    """Rows that are not next to each other; the first and the last belong to no sequence and are left alone."""
    count, counts = len(lengths), [length // every for length in lengths]
    given = prefill(sum(lengths)) | {"initial_state": torch.randn(count, 4, DIM, DIM)}
    given["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    starts = 1 + torch.tensor([0, *counts]).cumsum(0)
    rows = sum(counts) + 2

    # The oracle stores checkpoints in its pool only: rows behind the states.
    places = torch.arange(max(counts))
    asked = {
        "checkpoint_offsets": ((1 + places) * every).expand(count, -1),
        "checkpoint_slots": torch.where(places < torch.tensor(counts)[:, None], count + starts[:-1, None] + places, -1),
    }
    wide = {**given, "initial_state": torch.cat([given["initial_state"], torch.zeros(rows, 4, DIM, DIM)]), **asked}
    expected = exact_prefill(wide, state_indices=torch.arange(count))

    for hint in (None, max(lengths)):
        form = {**given, "initial_state": given["initial_state"].clone(), "max_seqlen": hint}
        if is_pooled:
            form |= {"state_indices": torch.arange(count), "output_final_state": True, "output_state": form["initial_state"]}
        kept = torch.full((rows, 2, 4, DIM, DIM), 7.0, dtype=getattr(torch, kept_as))[:, 0]
        form |= {"state_checkpoints": kept, "checkpoint_cu_starts": starts.int(), "checkpoint_every_n_tokens": every}
        found = flashinfer.chunk_gated_delta_rule(**form)
        close(found[0] if is_pooled else found, expected.o)
        wanted = expected.state[count:].to(kept.dtype)
        torch.testing.assert_close(kept[1:-1], wanted[1:-1], rtol=1e-2 if kept_as == "bfloat16" else 1e-5, atol=1e-5)
        assert (kept[[0, -1]] == 7).all()


def test_prefill_of_prompts_too_short_for_a_checkpoint() -> None:
    given = prefill()
    kept, starts = torch.zeros(0, 4, DIM, DIM), torch.zeros(3, dtype=torch.int64)
    more = {"state_checkpoints": kept, "checkpoint_cu_starts": starts, "checkpoint_every_n_tokens": 128}
    close(flashinfer.chunk_gated_delta_rule(**given, **more), exact_prefill(given).o)


def test_prefill_ignores_hints() -> None:
    given = prefill()
    more = {"use_cp": True, "_cp_chunk_len": 64, "max_seqlen": 66, "backend": "flashinfer"}
    assert torch.equal(flashinfer.chunk_gated_delta_rule(**given), flashinfer.chunk_gated_delta_rule(**given, **more))
    with pytest.raises(ValueError, match="max_seqlen: expected at least"):  # ours gets it
        flashinfer.chunk_gated_delta_rule(**given, max_seqlen=1)


def decode(tokens: int = 1, v_first: bool = True, slots: int = BATCH) -> dict[str, Any]:
    torch.manual_seed(1)
    v_dim = 2 * DIM
    q, k = torch.randn(2, BATCH, tokens, 2, DIM).unbind()
    state = torch.randn(slots, 4, v_dim, DIM) if v_first else torch.randn(slots, 4, DIM, v_dim)
    gates = {
        "A_log": torch.randn(4),
        "a": torch.randn(BATCH, tokens, 4),
        "dt_bias": torch.randn(4),
        "b": torch.randn(BATCH, tokens, 4),
    }
    return {"q": q, "k": k, "v": torch.randn(BATCH, tokens, 4, v_dim), "state": state, **gates}


def exact_decode(given: dict[str, Any], v_first: bool = True, **more: Any) -> Any:
    rows = {name: given[name] for name in ("q", "k", "v", "A_log", "dt_bias")}
    flags = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": v_first}
    options = {"use_qk_l2norm_in_kernel": True, **more}
    return oracle_delta_rule(**rows, g=given["a"], beta=given["b"], initial_state=given["state"].clone(), **flags, **options)


@pytest.mark.parametrize(
    ("name", "v_first"), [("gated_delta_rule_decode_pretranspose", True), ("gated_delta_rule_decode", False)]
)
def test_decode_in_place_by_position(name: str, v_first: bool) -> None:
    given = decode(v_first=v_first)
    expected, output = exact_decode(given, v_first, scale=0.3, use_qk_l2norm_in_kernel=False), torch.zeros_like(given["v"])
    o, state = getattr(flashinfer, name)(*given.values(), 0.3, output, False)
    assert o is output and state is given["state"]
    close(o, expected.o)
    close(state, expected.state)


def pooled(tokens: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of the pool form with one sequence of padding, and the pool."""
    given = decode(tokens, slots=8)
    return {**given, "state": None, "initial_state": given["state"], "initial_state_indices": torch.tensor([5, -1, 2])}, given[
        "state"
    ]


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_decode_on_a_pool(tokens: int) -> None:
    given, pool = pooled(tokens)
    before, form = pool.clone(), {**given, "state": pool}
    slots = given["initial_state_indices"]
    expected = exact_decode(form, ssm_state_indices=slots)
    o, state = flashinfer.gated_delta_rule_decode_pretranspose(**given)
    assert state is pool and not o[1].any()
    close(o, expected.o)
    close(pool, expected.state)
    pool.copy_(before)
    elsewhere = torch.tensor([6, 0, -1])
    expected = exact_decode(form, ssm_state_indices=slots, final_state_indices=elsewhere)
    flashinfer.gated_delta_rule_decode_pretranspose(**given, output_state_indices=elsewhere)
    close(pool, expected.state)
    if tokens > 1:
        pool.copy_(before)
        verified, _ = flashinfer.gated_delta_rule_decode_pretranspose(**given, disable_state_update=True)
        assert torch.equal(verified, o) and torch.equal(pool, before)
        alone = {**given, "state": pool[:BATCH], "initial_state": None, "initial_state_indices": None}
        verified, _ = flashinfer.gated_delta_rule_decode_pretranspose(**alone, disable_state_update=True)
        close(verified, exact_decode(alone).o)
        assert torch.equal(pool, before)


def mtp() -> tuple[dict[str, Any], torch.Tensor]:
    given, pool = pooled(TOKENS)
    del given["state"]
    return given, pool


def test_mtp_leaves_the_pool_unless_told() -> None:
    given, pool = mtp()
    before, slots = pool.clone(), given["initial_state_indices"]
    form = {**given, "state": pool}
    expected = exact_decode(form, ssm_state_indices=slots)
    for flag in ({}, {"disable_state_update": None}, {"disable_state_update": True}):
        o, state = flashinfer.gated_delta_rule_mtp(**given, **flag)
        assert state is pool and torch.equal(pool, before)
        close(o, expected.o)
    flashinfer.gated_delta_rule_mtp(**given, disable_state_update=False)
    close(pool, expected.state)
    pool.copy_(before)
    elsewhere = torch.tensor([6, 0, -1])
    flashinfer.gated_delta_rule_mtp(**given, disable_state_update=False, output_state_indices=elsewhere)
    close(pool, exact_decode(form, ssm_state_indices=slots, final_state_indices=elsewhere).state)


def test_mtp_stores_the_state_after_each_token() -> None:
    given, pool = mtp()
    slots, written = given["initial_state_indices"], torch.tensor([[5, 6], [0, 1], [-1, 7]], dtype=torch.int32)
    read = slots[:, None].expand(-1, TOKENS)
    expected = exact_decode({**given, "state": pool}, ssm_state_indices=read, final_state_indices=written)
    o, _ = flashinfer.gated_delta_rule_mtp(**given, ssm_state_indices=written, disable_state_update=False)
    close(o, expected.o)
    close(pool, expected.state)


@pytest.mark.parametrize("name", ["gated_delta_rule_mtp", "gated_delta_rule_decode_pretranspose"])
@pytest.mark.parametrize("kept_as", [torch.float32, torch.bfloat16])
def test_the_state_after_each_token_goes_to_a_buffer(name: str, kept_as: torch.dtype) -> None:
    """Rows of padding, and what the buffer has more, keep what they hold; so does the pool."""
    given, pool = mtp()
    before, slots = pool.clone(), given["initial_state_indices"]
    # The oracle stores them in its pool only: in slots behind those of the states.
    targets = len(pool) + torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)
    wide = {**given, "state": torch.cat([pool, torch.zeros(BATCH * TOKENS, *pool.shape[1:])])}
    read = slots[:, None].expand(-1, TOKENS)
    expected = exact_decode(wide, ssm_state_indices=read, final_state_indices=targets)
    wanted = expected.state[len(pool) :].unflatten(0, (BATCH, TOKENS)).to(kept_as)
    buffer = torch.full((BATCH + 1, TOKENS + 1, *pool.shape[1:]), 7.0, dtype=kept_as)
    more = {} if name == "gated_delta_rule_mtp" else {"state": None}
    o, state = getattr(flashinfer, name)(**given, **more, intermediate_states_buffer=buffer, disable_state_update=True)
    close(o, expected.o)
    assert state is pool and torch.equal(pool, before)
    live = slots >= 0
    tolerance = {"rtol": 1e-2, "atol": 1e-5} if kept_as == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(buffer[:BATCH, :TOKENS][live], wanted[live], **tolerance)
    assert (buffer[:BATCH][~live] == 7).all() and (buffer[BATCH] == 7).all() and (buffer[:, TOKENS] == 7).all()
    if more:  # states of the batch itself
        alone = {**given, "state": pool[:BATCH], "initial_state": None, "initial_state_indices": None}
        expected = exact_decode(
            {**given, "state": wide["state"]},
            ssm_state_indices=torch.arange(BATCH)[:, None].expand(-1, TOKENS),
            final_state_indices=targets,
        )
        o, _ = getattr(flashinfer, name)(**alone, intermediate_states_buffer=buffer, disable_state_update=True)
        close(o, expected.o)
        wanted = expected.state[len(pool) :].unflatten(0, (BATCH, TOKENS)).to(kept_as)
        torch.testing.assert_close(buffer[:BATCH, :TOKENS], wanted, **tolerance)
        assert torch.equal(pool, before)


BUFFERS: dict[str, dict[str, Any]] = {
    "a buffer of intermediate states beside an update": {
        "intermediate_states_buffer": torch.zeros(BATCH, TOKENS, 4, 32, DIM), "disable_state_update": False,
    },
    "a buffer of intermediate states for one token": {name: torch.zeros(BATCH, 1, 2, DIM) for name in "qk"}
    | {"v": torch.zeros(BATCH, 1, 4, 32), "intermediate_states_buffer": torch.zeros(BATCH, TOKENS, 4, 32, DIM)},
    r"a buffer of intermediate states with shape \[2, 2, 4, 32, 16\]": {
        "intermediate_states_buffer": torch.zeros(BATCH - 1, TOKENS, 4, 32, DIM), "disable_state_update": True,
    },
    "the buffer of intermediate states is not contiguous": {
        "intermediate_states_buffer": torch.zeros(BATCH, 2 * TOKENS, 4, 32, DIM)[:, ::2], "disable_state_update": True,
    },
    "the states are float64": {
        "intermediate_states_buffer": torch.zeros(BATCH, TOKENS, 4, 32, DIM).double(), "disable_state_update": True,
    },
}  # fmt: skip
ROWS = {
    "the tokens are on meta": {"q": torch.empty(BATCH, TOKENS, 2, DIM, device="meta")},
    "autograd needs gradients": {"A_log": torch.zeros(4, requires_grad=True)},
    "q, k and v differ in dtype": {"v": torch.zeros(BATCH, TOKENS, 4, 32, dtype=torch.bfloat16)},
    "head dim 260 has no kernel": {"v": torch.zeros(BATCH, TOKENS, 4, 260)},
    "2 query, 2 key and 3 value heads": {"v": torch.zeros(BATCH, TOKENS, 3, 32)},
    "output differs in dtype": {"output": torch.zeros(BATCH, TOKENS, 4, 32, dtype=torch.bfloat16)},
    "output's last dimension is not contiguous": {"output": torch.zeros(BATCH, TOKENS, 4, 64)[..., ::2]},
}
POOLS = {
    "the states are float16": torch.zeros(8, 4, 32, DIM, dtype=torch.float16),
    "states of 5 dimensions": torch.zeros(8, 4, 2, 16, DIM),
    "the states of a slot are not contiguous": torch.zeros(8, 4, DIM, 32).transpose(-1, -2),
    "the states of several slots share memory": torch.zeros(1, 4, 32, DIM).expand(8, -1, -1, -1),
    "the stride of slots is not a multiple of 16 bytes": torch.zeros(8, 4 * 32 * DIM + 1)[:, 1:].unflatten(1, (4, 32, DIM)),
    "the states begin at no multiple of 16 bytes": torch.zeros(8 * 4 * 32 * DIM + 1)[1:].view(8, 4, 32, DIM),
}
DECODES: dict[str, dict[str, dict[str, Any]]] = {
    "gated_delta_rule_decode_pretranspose": {
        **ROWS,
        **{reason: {"initial_state": pool} for reason, pool in POOLS.items()},
        **BUFFERS,
        "initial_state and initial_state_indices": {"initial_state_indices": None},
        "no state": {"initial_state": None, "initial_state_indices": None},
        "output_state_indices without initial_state": {
            "state": torch.zeros(BATCH, 4, 32, DIM), "initial_state": None, "initial_state_indices": None,
            "output_state_indices": torch.zeros(BATCH, dtype=torch.int32),
        },
        "disable_state_update of one token": {name: torch.zeros(BATCH, 1, 2, DIM) for name in "qk"}
        | {"v": torch.zeros(BATCH, 1, 4, 32), "disable_state_update": True},
        "backend 'cake_gdn' is named": {"backend": "cake_gdn"},
    },
    "gated_delta_rule_decode": {
        **ROWS,
        **{reason: {"state": pool} for reason, pool in POOLS.items()},
        "more than one token": {},
        "backend 'cake_gdn' is named": {"backend": "cake_gdn"},
    },
    "gated_delta_rule_mtp": {
        **ROWS,
        **{reason: {"initial_state": pool} for reason, pool in POOLS.items()},
        **BUFFERS,
        "ReplaySSM": {"cache_replayssm": True},
        "ssm_state_indices without": {"ssm_state_indices": torch.zeros(BATCH, TOKENS, dtype=torch.int32)},
        "both ssm_state_indices and": {
            "ssm_state_indices": torch.zeros(BATCH, TOKENS, dtype=torch.int32), "disable_state_update": False,
            "output_state_indices": torch.zeros(BATCH, dtype=torch.int32),
        },
    },
}  # fmt: skip


CHECKPOINTS = {
    "checkpoint_every_n_tokens": 64, "state_checkpoints": torch.zeros(2, 4, DIM, DIM),
    "checkpoint_cu_starts": torch.zeros(3, dtype=torch.int32),
}  # fmt: skip
PREFILLS: dict[str, dict[str, Any]] = {
    "the tokens are on meta": {"q": torch.empty(80, 2, DIM, device="meta")},
    "autograd needs gradients": {"g": torch.ones(80, 4, requires_grad=True)},
    "q, k and v differ in dtype": {"v": torch.zeros(80, 4, DIM, dtype=torch.bfloat16)},
    "head dim 260 has no kernel": {"v": torch.zeros(80, 4, 260)},
    "key and value head dims differ": {"v": torch.zeros(80, 4, 32)},
    "4 query, 2 key and 4 value heads": {"q": torch.zeros(80, 4, DIM)},
    "output differs in dtype": {"output": torch.zeros(80, 4, DIM, dtype=torch.bfloat16)},
    "output's last dimension is not contiguous": {"output": torch.zeros(80, 4, 2 * DIM)[..., ::2]},
    "cu_seqlens is not int32 or int64": {"cu_seqlens": None},
    "checkpoints without checkpoint_every_n_tokens": {"state_checkpoints": torch.zeros(2, 4, DIM, DIM)},
    "checkpoints every 32 tokens": {"checkpoint_every_n_tokens": 32},
    "checkpoint_every_n_tokens without": {"checkpoint_every_n_tokens": 64, "state_checkpoints": torch.zeros(2, 4, DIM, DIM)},
    "checkpoint_cu_starts is not int32 or int64": {**CHECKPOINTS, "checkpoint_cu_starts": torch.zeros(3)},
    "checkpoint_cu_starts is not int32 or int64 of one": {**CHECKPOINTS, "checkpoint_cu_starts": torch.zeros(2).int()},
    "checkpoints of head dim 132": {name: torch.zeros(80, 4, 132) for name in "qkv"}
    | {"g": None, "beta": None, "initial_state": None, **CHECKPOINTS},
    "the states are float64": {**CHECKPOINTS, "state_checkpoints": torch.zeros(2, 4, DIM, DIM).double()},
    "output_state without output_final_state": {"output_state": torch.zeros(2, 4, DIM, DIM)},
    "the states are float8_e4m3fn": {"initial_state": torch.zeros(2, 4, DIM, DIM).to(torch.float8_e4m3fn)},
    "the states are float16": {"output_state": torch.zeros(2, 4, DIM, DIM).half(), "output_final_state": True},
    "state_indices without initial_state": {"state_indices": torch.zeros(2, dtype=torch.int32), "initial_state": None},
    "an output_state pool other than initial_state": {
        "state_indices": torch.zeros(2, dtype=torch.int32), "output_final_state": True,
        "output_state": torch.zeros(2, 4, DIM, DIM),
    },
    "the states of a slot are not contiguous": {
        "state_indices": torch.zeros(2, dtype=torch.int32), "initial_state": torch.zeros(2, 4, DIM, DIM).transpose(-1, -2),
    },
    "backend 'cudnn' is named": {"backend": "cudnn"},
}  # fmt: skip


REFUSALS = DECODES | {"chunk_gated_delta_rule": PREFILLS}


@pytest.mark.parametrize(("name", "reason"), [(name, reason) for name, reasons in REFUSALS.items() for reason in reasons])
def test_refused_calls(name: str, reason: str) -> None:
    given: dict[str, Any] = {
        "gated_delta_rule_decode_pretranspose": lambda: pooled(TOKENS)[0],
        "gated_delta_rule_decode": lambda: decode(1 if reason in POOLS else TOKENS, v_first=False),
        "gated_delta_rule_mtp": lambda: mtp()[0],
        "chunk_gated_delta_rule": prefill,
    }[name]()
    with pytest.raises(Refused, match=f"^{name}: {reason}"):
        getattr(flashinfer, name)(**{**given, **REFUSALS[name][reason]})


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stand_in.install(monkeypatch, _hosts.FLASHINFER, f"flashinfer.chunk_gated_delta_rule={PREFILL}")
    yield sys.modules["flashinfer"]


def test_enabled_functions_serve_or_leave_calls(host: Any) -> None:
    originals = {name: getattr(sys.modules[place.rpartition(".")[0]], name) for name, place in NAMES.items()}
    with flashinfer.enable(strict=True, allow_reference=True) as handle:
        given = prefill()
        expected = exact_prefill(given)
        for function in (host.chunk_gated_delta_rule, host.gdn_prefill.chunk_gated_delta_rule):
            close(function(**given), expected.o)
        named = host.gdn_prefill.chunk_gated_delta_rule(**given, backend="flashinfer")
        assert named[0] == stand_in.HOST and named[2]["backend"] == "flashinfer" and named[2]["q"] is given["q"]
        held, pool = mtp()
        close(
            host.gdn_decode.gated_delta_rule_mtp(**held)[0],
            exact_decode({**held, "state": pool}, ssm_state_indices=held["initial_state_indices"]).o,
        )
        assert host.gdn_decode.gated_delta_rule_mtp(**held, cache_replayssm=True)[0] == stand_in.HOST
        given = decode(v_first=False)
        assert host.gdn_decode.gated_delta_rule_decode(**given)[1] is given["state"]
        counts = {one.path.rpartition(".")[2]: (one.served, dict(one.left)) for one in handle.report().points}
    assert counts == {
        "chunk_gated_delta_rule": (2, {"backend 'flashinfer' is named": 1}),
        "gated_delta_rule_decode_pretranspose": (0, {}),
        "gated_delta_rule_decode": (1, {}),
        "gated_delta_rule_mtp": (1, {"ReplaySSM": 1}),
    }
    assert host.chunk_gated_delta_rule is originals["chunk_gated_delta_rule"]
    assert all(getattr(sys.modules[place.rpartition(".")[0]], name) is originals[name] for name, place in NAMES.items())


def test_calls_that_name_the_host_s_kernels_are_taken_where_asked(host: Any) -> None:
    with flashinfer.enable(take_named_backend=True, allow_reference=True):
        given = prefill()
        close(host.chunk_gated_delta_rule(**given, backend="flashinfer"), exact_prefill(given).o)
        assert host.chunk_gated_delta_rule(**given, backend="cake_gdn")[0] == stand_in.HOST


def test_a_new_default_leaves_the_function_alone(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stand_in.parameters("flashinfer", NAMES["gated_delta_rule_mtp"])
    changed = [[*one[:2], "False"] if one[0] == "disable_state_update" else one for one in source]
    monkeypatch.setattr(stand_in, "parameters", lambda host, name: changed)
    monkeypatch.setattr(host.gdn_decode, "gated_delta_rule_mtp", stand_in.function("flashinfer", NAMES["gated_delta_rule_mtp"]))
    with flashinfer.enable(allow_reference=True) as handle:
        last = handle.report().points[-1]
        assert not last.replaced and "expected parameter disable_state_update=None, got disable_state_update=False" in str(
            last.why
        )
