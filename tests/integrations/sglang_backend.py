"""SGLang's pools of windows, and batches of its convolutions and of whole decode steps against a float64 loop."""

from types import SimpleNamespace
from typing import Any

import torch

from gdn.integrations import _sglang_step as step
from gdn.integrations import sglang_convolution as convolution
from gdn.integrations._calls import asking
from tests.integrations.sglang_engine import HV, SLOTS, Engine, H, close, part

Tensor = torch.Tensor
WIDTH = 4
ask_prompts = asking(convolution.prompts_refusal, convolution.prompts)
ask_update = asking(convolution.update_refusal, convolution.update)


class Convolution:
    """A filter and a pool of windows [slots, D, w - 1] beside an engine's pool of states.

    strided: whether other layers' windows lie between those of two slots.
    """

    def __init__(self, engine: Engine, strided: bool = False, has_bias: bool = False) -> None:
        self.engine, self.channels = engine, (2 * H + HV) * engine.dim
        shape = (SLOTS, 2 if strided else 1, self.channels, WIDTH - 1)
        self.memory = engine.normal(*shape).to(engine.token_dtype)
        self.windows, self.before = self.memory[:, 0], self.memory.clone()
        self.weight = engine.normal(self.channels, WIDTH).to(engine.token_dtype) / 2
        self.bias = engine.normal(self.channels).to(engine.token_dtype) if has_bias else None

    def loop(self, rows: Tensor, slot: int | None) -> tuple[Tensor, Tensor]:
        """Outputs [T, D], and the windows [T, D, w - 1] after every token, of a sequence that continues a slot or nothing."""
        before = torch.zeros_like(self.before[0, 0]) if slot is None else self.before[slot, 0]
        every = torch.cat([before.double(), rows.double().T], dim=1)
        y = sum(every[:, j : j + len(rows)] * self.weight[:, j : j + 1].double() for j in range(WIDTH))
        assert isinstance(y, Tensor)
        if self.bias is not None:
            y = y + self.bias.double()[:, None]
        windows = every.unfold(1, WIDTH - 1, 1)[:, 1:].transpose(0, 1)
        return torch.nn.functional.silu(y).T, windows

    def check_pool(self, expected: dict[int, Tensor]) -> None:
        for slot, window in expected.items():
            assert torch.equal(self.windows[slot].double(), window)
        others = [slot for slot in range(SLOTS) if slot not in expected]
        assert torch.equal(self.memory[others], self.before[others]) and torch.equal(self.memory[:, 1:], self.before[:, 1:])


def check_prompts(conv: Convolution, limit: float) -> None:
    """Prompts that continue a slot, start anew or are padding; rows beyond the last one belong to nobody."""
    engine, slots, lengths, starts = conv.engine, [5, -1, 2, 8], [70, 3, 1, 2], [0, 70, 73, 74, 76]
    rows = engine.normal(80, conv.channels).to(engine.token_dtype)
    mask = torch.tensor([True, True, False, False], device=engine.device)
    given: dict[str, Any] = {
        "conv_states": conv.windows, "has_initial_state": mask, "cache_indices": engine.int32(slots),
        "query_start_loc": engine.int32(starts), "activation": "silu",
    }  # fmt: skip
    hints = {"seq_lens_cpu": lengths, "block_table": None}
    x = rows.transpose(0, 1)
    assert ask_prompts(x, conv.weight, conv.bias, **given, **hints, allow_reference=True) is None
    y = convolution.prompts(x, conv.weight, conv.bias, **given, **hints).transpose(0, 1)
    after = {}
    for n, slot in enumerate(slots):
        if slot >= 0:
            own = rows[starts[n] : starts[n + 1]]
            expected, windows = conv.loop(own, slot if mask[n] else None)
            assert close(y[starts[n] : starts[n + 1]], expected, limit)
            after[slot] = windows[-1]
    conv.check_pool(after)


def check_update(conv: Convolution, limit: float) -> None:
    engine, slots = conv.engine, [4, 0, -1, 7]
    rows = engine.normal(4, conv.channels).to(engine.token_dtype)
    given: dict[str, Any] = {"conv_state_indices": engine.int32(slots)}
    before = rows.clone()
    y = convolution.update(rows, conv.windows, conv.weight, conv.bias, "silu", **given)
    assert torch.equal(rows, before)
    found = {slot: conv.loop(rows[n : n + 1], slot) for n, slot in enumerate(slots) if slot >= 0}
    for n, slot in enumerate(slots):
        assert slot < 0 or close(y[n : n + 1], found[slot][0], limit)
    conv.check_pool({slot: windows[-1] for slot, (_, windows) in found.items()})


DRAFTS = 5


def windows_of_drafts(conv: Convolution, rows: int, overlap: bool) -> Tensor:
    """Where the host keeps the windows after every draft [rows, T, D, w - 1], filled with sevens."""
    shape = (rows, DRAFTS, conv.channels, WIDTH - 1)
    options = {"dtype": conv.windows.dtype, "device": conv.engine.device}
    if not overlap:
        return torch.full(shape, 7.0, **options)
    buffer = torch.full((rows, conv.channels, DRAFTS + WIDTH - 2), 7.0, **options)
    return buffer.as_strided(shape, (buffer.stride(0), 1, buffer.stride(1), 1))


def check_drafts(conv: Convolution, limit: float, overlap: bool) -> None:
    """The window after every draft goes to a row of the host's; rows of padding, which share one, are left alone."""
    engine, slots, kept = conv.engine, [6, -1, 3, -1], [2, 4, 0, 4, 4]
    rows = engine.normal(4 * DRAFTS, conv.channels).to(engine.token_dtype)
    windows, x = windows_of_drafts(conv, 5, overlap), rows.view(4, DRAFTS, -1).transpose(1, 2)
    given: dict[str, Any] = {
        "conv_state_indices": engine.int32(slots), "intermediate_conv_window": windows,
        "intermediate_state_indices": engine.int32(kept),
    }  # fmt: skip
    assert ask_update(x, conv.windows, conv.weight, conv.bias, "silu", **given, allow_reference=True) is None
    y = convolution.update(x, conv.windows, conv.weight, conv.bias, "silu", **given)
    assert y.shape == x.shape
    flat, last = y.transpose(1, 2).view(len(rows), -1), {}  # a view, as the host makes it
    for n, slot in enumerate(slots):
        if slot >= 0:
            expected, after = conv.loop(rows[n * DRAFTS : (n + 1) * DRAFTS], slot)
            assert close(flat[n * DRAFTS : (n + 1) * DRAFTS], expected, limit)
            assert torch.equal(windows[kept[n]].double(), after)
            last[slot] = after[-1]
    assert (windows[[1, 3]] == 7).all()
    conv.check_pool({} if overlap else last)  # the host's own kernel leaves the last one in the pool, until it commits another


class Layer(SimpleNamespace):
    """The host's layer is a module: there are weak references to it."""


def layer_of(conv: Convolution, **changes: Any) -> Any:
    """The host's layer of an engine."""
    engine = conv.engine
    sizes = {"num_q_heads": H, "num_k_heads": H, "num_v_heads": HV, "head_q_dim": engine.dim, "head_k_dim": engine.dim}
    rest = {"head_v_dim": engine.dim, "v_dim": HV * engine.dim, "conv_weights": conv.weight, "bias": conv.bias, "layer_id": 3}
    return Layer(**sizes | rest | {"activation": "silu", "A_log": engine.A_log, "dt_bias": engine.dt_bias} | changes)


def cache_of(conv: Convolution) -> Any:
    return SimpleNamespace(conv=[conv.windows], temporal=conv.engine.states, replayssm_d=None)


def check_step(conv: Convolution, limit: float, state_limit: float, is_pair: bool) -> None:
    """One token a row; the last two rows are padding, as in a captured graph."""
    engine, slots, heads = conv.engine, [4, 0, 7], HV * conv.engine.dim
    qkvz = engine.normal(5, conv.channels + heads).to(engine.token_dtype)
    ba = engine.normal(5, 2 * HV).to(engine.token_dtype)
    b, a = ba.split(HV, dim=1)
    layer, cache, every = layer_of(conv), cache_of(conv), engine.int32([*slots, -1, -1, -1])
    form = (qkvz, ba) if is_pair else qkvz[:, : conv.channels].contiguous()
    assert step.refusal(layer, cache, form, allow_reference=True) is None
    result = step.step(layer, cache, form, a if not is_pair else ba, b if not is_pair else ba, every)
    o, z = result if is_pair else (result, None)
    assert o.shape == (1, 5, HV, engine.dim) and not o[0, 3:].any()
    assert z is None or torch.equal(z, qkvz[:, conv.channels :].view(5, HV, -1))
    windows, states = {}, {}
    for n, slot in enumerate(slots):
        rows, after = conv.loop(qkvz[n : n + 1, : conv.channels], slot)
        expected, state = engine.loop(part((rows, a[n : n + 1], b[n : n + 1]), 0, 1), slot)
        assert close(o[0, n : n + 1], expected, limit)
        windows[slot], states[slot] = after[-1], state[-1]
    conv.check_pool(windows)
    engine.calls.serves(None)
    engine.check_pool(states, state_limit)
