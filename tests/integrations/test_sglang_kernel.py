"""SGLang's kernel object on gdn's operators: SGLang's layouts against a float64 loop, and what is left to SGLang's own object."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from gdn.integrations._calls import Calls
from gdn.integrations._sglang_kernel import Serving, kernel_class
from tests.integrations.fake_sglang import HostKernel, LinearAttnKernelBase

Tensor = torch.Tensor
H, HV, K, V, SLOTS = 2, 4, 32, 32, 9
CHANNELS = 2 * H * K + HV * V
CLOSE = 2e-5


class Engine:
    """A layer's parameters, its pool, and our kernel object with the host's own behind it."""

    def __init__(self, seed: int, *, strided: bool = False, dtype: torch.dtype = torch.float32, strict: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.A_log, self.dt_bias = self.normal(HV) / 2 - 2, self.normal(HV)
        pool = self.normal(SLOTS, 2 if strided else 1, HV, V, K).to(dtype)  # page-major: another layer's state lies between
        self.states, self.pool = pool[:, 0], pool
        self.before = pool.clone()
        self.calls, self.host = Calls(allow_reference=True), HostKernel()
        self.kernel = kernel_class(LinearAttnKernelBase)(self.host, Serving(self.calls, strict))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def rows(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Packed rows after the convolution, and raw gates a and b."""
        return self.normal(tokens, CHANNELS), self.normal(tokens, HV), self.normal(tokens, HV)

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay and write strength, as the host makes them for prompts."""
        return -self.A_log.exp() * functional.softplus(a + self.dt_bias), b.sigmoid()

    def options(self, slots: list[int], lengths: list[int]) -> dict[str, Any]:
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        return {"ssm_states": self.states, "cache_indices": torch.tensor(slots, dtype=torch.int32), "query_start_loc": offsets}

    def loop(self, rows: tuple[Tensor, Tensor, Tensor], slot: int, parents: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Outputs [T, HV, V], and the states [1 + T, HV, V, K] before the first and after every token, of one sequence."""
        packed, a, b = (x.double() for x in rows)
        q, k, v = (x[0] for x in split(packed))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(HV // H, dim=1) for x in (q, k))
        g, beta = (x.double() for x in self.gates(a, b))
        states, outputs = [self.before[slot, 0].double()], []
        for t in range(len(packed)):
            state = states[t if parents is None else parents[t] + 1] * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - (state @ k[t][:, :, None])[..., 0])
            states.append(state + u[:, :, None] * k[t][:, None, :])
            outputs.append((states[-1] @ q[t][:, :, None])[..., 0] * K**-0.5)
        return torch.stack(outputs) if outputs else torch.zeros(0, HV, V), torch.stack(states)

    def check_pool(self, expected: dict[int, Tensor], close: float = CLOSE) -> None:
        """The slots of `expected` hold its states; every other byte of the pool is as it was."""
        for slot, state in expected.items():
            assert (self.states[slot] - state).abs().max() < close
        others = [slot for slot in range(SLOTS) if slot not in expected]
        assert torch.equal(self.pool[others], self.before[others]) and torch.equal(self.pool[:, 1:], self.before[:, 1:])
        assert self.host.calls == [] and self.calls.served > 0


def split(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [1, tokens, heads, dim] of packed rows: strided, as the host hands them over."""
    q, k, v = packed.split((H * K, H * K, HV * V), dim=1)
    return q.view(1, -1, H, K), k.view(1, -1, H, K), v.view(1, -1, HV, V)


def part(rows: tuple[Tensor, Tensor, Tensor], first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
    return rows[0][first:last], rows[1][first:last], rows[2][first:last]


def close(found: Tensor, expected: Tensor, limit: float = CLOSE) -> bool:
    assert found.shape == expected.shape
    return bool((found - expected).abs().max() < limit) if found.numel() else True


LAYOUTS = {
    "pool": {},
    "page-major": {"strided": True},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_decode(packed: bool, layout: str) -> None:
    """Rows beyond the real ones are padding, as in a captured graph: slot -1, and no token in the offsets."""
    engine = Engine(1, **LAYOUTS[layout])  # type: ignore[arg-type]
    slots = [4, 0, 7]
    rows = engine.rows(5)
    given = engine.options([*slots, -1, -1], [1, 1, 1, 0, 0])
    weights = {"A_log": engine.A_log, "dt_bias": engine.dt_bias}
    if packed:
        del given["query_start_loc"]
        replay = dict.fromkeys(("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_write_pos", "replayssm_force_flush"))
        o = engine.kernel.packed_decode(*rows, scale=K**-0.5, num_v_heads=HV, head_v_dim=V, **weights, **given, **replay)
    else:
        o = engine.kernel.decode(*split(rows[0]), rows[1], rows[2], **weights, **given)
    assert o.shape == (1, 5, HV, V) and not o[0, 3:].any()
    expected = [engine.loop(part(rows, n, n + 1), slot) for n, slot in enumerate(slots)]
    assert close(o[0, :3], torch.cat([one for one, _ in expected]))
    engine.check_pool(
        {slot: states[-1] for slot, (_, states) in zip(slots, expected, strict=True)}, 2e-2 if layout == "bfloat16" else CLOSE
    )


def extend(engine: Engine, slots: list[int], lengths: list[int], **more: Any) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    rows = engine.rows(sum(lengths))
    g, beta = engine.gates(rows[1], rows[2])
    result = engine.kernel.extend(
        *split(rows[0]), g[None], beta[None], **engine.options(slots, lengths), state_checkpoint_cu_starts=None,
        num_state_checkpoints=0, state_checkpoint_every_n_tokens=None, layer_id=3, extend_prefix_lens=None, **more,
    )  # fmt: skip
    return result, rows


@pytest.mark.parametrize("layout", ["pool", "page-major"])
@pytest.mark.parametrize("is_given", [False, True])
def test_extend(layout: str, is_given: bool) -> None:
    engine = Engine(2, **LAYOUTS[layout])  # type: ignore[arg-type]
    slots, lengths = [5, -1, 2, 8], [70, 3, 1, 130]
    own = torch.full((1, 300, HV, V), torch.nan)[:, : sum(lengths)]
    (o, last, h), rows = extend(engine, slots, lengths, output=own if is_given else None)
    assert last is None and h is None and (o.data_ptr() == own.data_ptr()) == is_given
    starts = [0, 70, 73, 74, 204]
    after = {}
    for n, slot in enumerate(slots):
        found = o[0, starts[n] : starts[n + 1]]
        if slot < 0:
            assert not found.any()
            continue
        expected, states = engine.loop(part(rows, starts[n], starts[n + 1]), slot)
        after[slot] = states[-1]
        assert close(found, expected)
    engine.check_pool(after)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_extend_keeps_snapshots(layout: str) -> None:
    """-1: none, 0: the state before the call, n: that after n chunks of 64 tokens; in float32 whatever the pool is."""
    engine = Engine(3, **LAYOUTS[layout])  # type: ignore[arg-type]
    slots, lengths, chunks = [5, 1, 2, 8, -1], [70, 30, 1, 150, 5], [1, 0, -1, 2, -1]
    snapshots = torch.full((len(slots), HV, V, K), torch.nan)
    (o, _, h), rows = extend(
        engine, slots, lengths, track_state=snapshots, track_chunk_idx=torch.tensor(chunks, dtype=torch.int32)
    )
    assert h is None
    starts = [0, 70, 100, 101, 251, 256]
    after = {}
    for n, (slot, chunk) in enumerate(zip(slots, chunks, strict=True)):
        if slot < 0:
            continue
        expected, states = engine.loop(part(rows, starts[n], starts[n + 1]), slot)
        after[slot] = states[-1]
        assert close(o[0, starts[n] : starts[n + 1]], expected)
        if chunk == 0:
            assert torch.equal(snapshots[n], engine.before[slot, 0].float())
        elif chunk > 0:
            assert close(snapshots[n], states[chunk * 64])
    engine.check_pool(after, 2e-2 if layout == "bfloat16" else CLOSE)


TREE = [-1, 0, 0, 1, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_tree", [False, True])
def test_verify(is_tree: bool, layout: str) -> None:
    """The pool stays; the state after draft i of a sequence goes to its row of the buffer; rows of padding share one."""
    engine = Engine(4, **LAYOUTS[layout])  # type: ignore[arg-type]
    slots, kept_rows, drafts = [6, 3], [2, 0], len(TREE)
    tokens = 4 * drafts
    rows = engine.rows(tokens)
    kept = torch.full((6, drafts, HV, V, K), 7.0)
    given = engine.options([*slots, -1, -1], [drafts, drafts, 0, 0])
    undefined = 99  # the host leaves the first token's parent, and those of padding, as they were
    parents = torch.tensor([[undefined, *TREE[1:]]] * 2 + [[undefined] * drafts] * 2, dtype=torch.int32)
    o = engine.kernel.target_verify(
        A_log=engine.A_log, dt_bias=engine.dt_bias, **dict(zip("qkv", split(rows[0]), strict=True)), a=rows[1], b=rows[2],
        intermediate_states_buffer=kept, cache_steps=drafts, stable_rows=False,
        intermediate_state_indices=torch.tensor([*kept_rows, 5, 5, 5, 5], dtype=torch.int32),
        retrieve_parent_token=parents if is_tree else None, **given,
    )  # fmt: skip
    assert o.shape == (1, tokens, HV, V) and not o[0, 2 * drafts :].any()
    assert (parents[:, 0] == undefined).all()
    for n, (slot, row) in enumerate(zip(slots, kept_rows, strict=True)):
        expected, states = engine.loop(part(rows, n * drafts, (n + 1) * drafts), slot, TREE if is_tree else None)
        assert close(o[0, n * drafts : (n + 1) * drafts], expected)
        assert close(kept[row], states[1:])
    assert (kept[[1, 3, 4, 5]] == 7).all()
    engine.check_pool({})


# --- what is left to the host ---------------------------------------------------------------------------------------------------


def test_float16_states_go_to_the_host() -> None:
    engine = Engine(5, dtype=torch.float16)
    rows = engine.rows(2)
    engine.host.result = ("o", None, None)
    given = engine.options([1, 2], [1, 1])
    weights = {"A_log": engine.A_log, "dt_bias": engine.dt_bias}
    q, k, v = split(rows[0])
    kept = torch.zeros(2, 1, HV, V, K)
    more = {"intermediate_states_buffer": kept, "intermediate_state_indices": None, "retrieve_parent_token": None}
    assert engine.kernel.decode(q, k, v, rows[1], rows[2], **weights, **given) is engine.host.result
    assert engine.kernel.packed_decode(*rows, scale=1.0, num_v_heads=HV, head_v_dim=V, **weights, **given) is engine.host.result
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
    h = engine.normal(1, 2 + 1 + 3, HV, V, K)  # states before each chunk of 70, 30 and 150 tokens
    engine.host.result = ("o", None, h)
    snapshots = torch.zeros(4, HV, V, K)
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
    q, k, v = split(rows[0])
    given = engine.options([1, 2], [1, 1])
    weights = {"A_log": engine.A_log, "dt_bias": engine.dt_bias}
    engine.host.result = ("o", None, None)
    kernel, gates = engine.kernel, (rows[1][None], rows[2][None])
    kernel.extend(q, k, v, *gates, **given, inplace_update=False)
    kernel.packed_decode(*rows, scale=1.0, num_v_heads=HV, head_v_dim=V, **_options(engine), replayssm_d=rows[0])
    verify = {**given, "intermediate_state_indices": None, "cache_steps": 1}
    kept = torch.zeros(2, 1, HV, V, K)
    for buffer, parents in ((None, None), (kept.half(), None), (kept, torch.zeros(2, 3, dtype=torch.int32))):
        own = {**verify, "intermediate_states_buffer": buffer, "retrieve_parent_token": parents}
        kernel.target_verify(*weights.values(), q, k, v, rows[1], rows[2], **own)
    kernel.decode(q, k, v[..., :16], rows[1], rows[2], **_options(engine))
    apart = torch.zeros(SLOTS, HV, K, V).transpose(-1, -2)
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


def test_strict() -> None:
    engine = Engine(8, dtype=torch.float16, strict=True)
    rows = engine.rows(2)
    with pytest.raises(RuntimeError, match="strict: decode would be left to the host: the states are float16"):
        engine.kernel.decode(*split(rows[0]), rows[1], rows[2], **_options(engine))
    assert engine.host.calls == []
