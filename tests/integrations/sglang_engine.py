"""SGLang around one Gated DeltaNet layer: its pools and batches, each checked against a float64 loop on the kernel object."""

from typing import Any

import torch
from torch.nn import functional

from gdn.integrations._calls import Calls
from gdn.integrations._sglang_kernel import Serving, kernel_class
from tests.integrations.fake_sglang import HostKernel, LinearAttnKernelBase

Tensor = torch.Tensor
H, HV, SLOTS = 2, 4, 9
LAYOUTS: dict[str, dict[str, Any]] = {
    "pool": {},
    "page-major": {"strided": True},
    "bfloat16": {"dtype": torch.bfloat16},
}


class Engine:
    """A layer's parameters, its pool, and our kernel object with the host's own behind it.

    Parameters
    ----------
    strided : bool
        Whether the slots of the pool are apart.
    dtype : dtype
        Of the states; tokens are float32 on the CPU, bfloat16 on a GPU.
    dim : int
        Of the heads.
    """

    def __init__(
        self,
        seed: int,
        *,
        strided: bool = False,
        dtype: torch.dtype = torch.float32,
        strict: bool = False,
        dim: int = 32,
        device: str = "cpu",
    ) -> None:
        self.generator, self.dim, self.device = torch.Generator().manual_seed(seed), dim, device
        self.token_dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.state_shape = (HV, dim, dim)
        self.A_log, self.dt_bias = self.normal(HV) / 2 - 2, self.normal(HV)
        layers = 2 if strided else 1  # page-major: another layer's state lies between
        pool = self.normal(SLOTS, layers, *self.state_shape).to(dtype)
        self.states, self.pool = pool[:, 0], pool
        self.before = pool.clone()
        self.calls, self.host = Calls(allow_reference=True), HostKernel()
        self.kernel = kernel_class(LinearAttnKernelBase)(self.host, Serving(self.calls, strict))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def rows(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Packed rows after the convolution, and raw gates a and b."""
        widths = ((2 * H + HV) * self.dim, HV, HV)
        packed, a, b = (self.normal(tokens, width).to(self.token_dtype) for width in widths)
        return packed, a, b

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [1, tokens, heads, dim] of packed rows: strided, as the host hands them over."""
        q, k, v = packed.split((H * self.dim, H * self.dim, HV * self.dim), dim=1)
        return q.view(1, -1, H, self.dim), k.view(1, -1, H, self.dim), v.view(1, -1, HV, self.dim)

    def int32(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay and write strength, as the host makes them for prompts."""
        return -self.A_log.exp() * functional.softplus(a.float() + self.dt_bias), b.float().sigmoid()

    def options(self, slots: list[int], lengths: list[int]) -> dict[str, Any]:
        offsets = self.int32([0, *lengths]).cumsum(0).int()
        return {"ssm_states": self.states, "cache_indices": self.int32(slots), "query_start_loc": offsets}

    def loop(self, rows: tuple[Tensor, Tensor, Tensor], slot: int, parents: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Outputs [T, HV, V], and the states [1 + T, HV, V, K] before the first and after every token, of one sequence."""
        packed, a, b = (x.double() for x in rows)
        q, k, v = (x[0] for x in self.split(packed))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(HV // H, dim=1) for x in (q, k))
        g, beta = (x.double() for x in self.gates(a, b))
        states, outputs = [self.before[slot, 0].double()], []
        for t in range(len(packed)):
            state = states[t if parents is None else parents[t] + 1] * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - (state @ k[t][:, :, None])[..., 0])
            states.append(state + u[:, :, None] * k[t][:, None, :])
            outputs.append((states[-1] @ q[t][:, :, None])[..., 0] * self.dim**-0.5)
        return torch.stack(outputs), torch.stack(states)

    def check_pool(self, expected: dict[int, Tensor], limit: float) -> None:
        """The slots of `expected` hold its states; every other byte of the pool is as it was."""
        for slot, state in expected.items():
            assert close(self.states[slot], state, limit)
        others = [slot for slot in range(SLOTS) if slot not in expected]
        assert torch.equal(self.pool[others], self.before[others]) and torch.equal(self.pool[:, 1:], self.before[:, 1:])
        assert self.host.calls == [] and self.calls.served > 0


def part(rows: tuple[Tensor, Tensor, Tensor], first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
    return rows[0][first:last], rows[1][first:last], rows[2][first:last]


def close(found: Tensor, expected: Tensor, limit: float) -> bool:
    """Whether the largest error is below `limit` of the largest value, or of 1."""
    assert found.shape == expected.shape
    return bool((found - expected).abs().max() < limit * max(1.0, float(expected.abs().max())))


def check_decode(engine: Engine, limit: float, state_limit: float, packed: bool) -> None:
    """Rows beyond the real ones are padding, as in a captured graph: slot -1, and no token in the offsets."""
    slots = [4, 0, 7]
    rows = engine.rows(5)
    given = engine.options([*slots, -1, -1], [1, 1, 1, 0, 0])
    weights = {"A_log": engine.A_log, "dt_bias": engine.dt_bias}
    if packed:
        del given["query_start_loc"]
        replay = dict.fromkeys(("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_write_pos", "replayssm_force_flush"))
        o = engine.kernel.packed_decode(
            *rows, scale=engine.dim**-0.5, num_v_heads=HV, head_v_dim=engine.dim, **weights, **given, **replay
        )
    else:
        o = engine.kernel.decode(*engine.split(rows[0]), rows[1], rows[2], **weights, **given)
    assert o.shape == (1, 5, HV, engine.dim) and not o[0, 3:].any()
    expected = [engine.loop(part(rows, n, n + 1), slot) for n, slot in enumerate(slots)]
    assert close(o[0, :3], torch.cat([one for one, _ in expected]), limit)
    engine.check_pool({slot: states[-1] for slot, (_, states) in zip(slots, expected, strict=True)}, state_limit)


def extend(engine: Engine, slots: list[int], lengths: list[int], **more: Any) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    rows = engine.rows(sum(lengths))
    g, beta = engine.gates(rows[1], rows[2])
    result = engine.kernel.extend(
        *engine.split(rows[0]), g[None], beta[None], **engine.options(slots, lengths), state_checkpoint_cu_starts=None,
        num_state_checkpoints=0, state_checkpoint_every_n_tokens=None, layer_id=3, extend_prefix_lens=None, **more,
    )  # fmt: skip
    return result, rows


def check_extend(engine: Engine, limit: float, state_limit: float, is_given: bool) -> None:
    slots, lengths = [5, -1, 2, 8], [70, 3, 1, 130]
    own = torch.full((1, 300, HV, engine.dim), torch.nan, dtype=engine.token_dtype, device=engine.device)[:, : sum(lengths)]
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
        assert close(found, expected, limit)
    engine.check_pool(after, state_limit)


def check_snapshots(engine: Engine, limit: float, state_limit: float) -> None:
    """-1: none, 0: the state before the call, n: that after n chunks of 64 tokens; in float32 whatever the pool is."""
    slots, lengths, chunks = [5, 1, 2, 8, -1], [70, 30, 1, 150, 5], [1, 0, -1, 2, -1]
    snapshots = torch.full((len(slots), *engine.state_shape), torch.nan, device=engine.device)
    (o, _, h), rows = extend(engine, slots, lengths, track_state=snapshots, track_chunk_idx=engine.int32(chunks))
    assert h is None
    starts = [0, 70, 100, 101, 251, 256]
    after = {}
    for n, (slot, chunk) in enumerate(zip(slots, chunks, strict=True)):
        if slot < 0:
            continue
        expected, states = engine.loop(part(rows, starts[n], starts[n + 1]), slot)
        after[slot] = states[-1]
        assert close(o[0, starts[n] : starts[n + 1]], expected, limit)
        if chunk == 0:
            assert torch.equal(snapshots[n], engine.before[slot, 0].float())
        elif chunk > 0:
            assert close(snapshots[n], states[chunk * 64], state_limit)
    engine.check_pool(after, state_limit)


TREE = [-1, 0, 0, 1, 2]


def check_verify(engine: Engine, limit: float, state_limit: float, is_tree: bool) -> None:
    """The pool stays; the state after draft i of a sequence goes to its row of the buffer; rows of padding share one."""
    slots, kept_rows, drafts = [6, 3], [2, 0], len(TREE)
    tokens = 4 * drafts
    rows = engine.rows(tokens)
    kept = torch.full((6, drafts, *engine.state_shape), 7.0, dtype=engine.states.dtype, device=engine.device)
    given = engine.options([*slots, -1, -1], [drafts, drafts, drafts, 0])  # padding with and without tokens
    undefined = 99  # the host leaves the first token's parent, and those of padding, as they were
    parents = engine.int32([[undefined, *TREE[1:]]] * 2 + [[undefined] * drafts] * 2)
    o = engine.kernel.target_verify(
        A_log=engine.A_log, dt_bias=engine.dt_bias, **dict(zip("qkv", engine.split(rows[0]), strict=True)), a=rows[1], b=rows[2],
        intermediate_states_buffer=kept, cache_steps=drafts, stable_rows=False,
        intermediate_state_indices=engine.int32([*kept_rows, 5, 5, 5, 5]),
        retrieve_parent_token=parents if is_tree else None, **given,
    )  # fmt: skip
    assert o.shape == (1, tokens, HV, engine.dim) and not o[0, 2 * drafts :].any()
    assert (parents[:, 0] == undefined).all()
    for n, (slot, row) in enumerate(zip(slots, kept_rows, strict=True)):
        expected, states = engine.loop(part(rows, n * drafts, (n + 1) * drafts), slot, TREE if is_tree else None)
        assert close(o[0, n * drafts : (n + 1) * drafts], expected, limit)
        assert close(kept[row], states[1:], state_limit)
    assert (kept[[1, 3, 4, 5]] == 7).all()
    engine.check_pool({}, state_limit)
