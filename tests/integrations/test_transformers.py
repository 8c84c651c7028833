"""The adapter for Transformers on small models: values, what is left to the host and why, and putting everything back."""

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from gdn.integrations import Handle, _calls, _handle, _hosts, _kept, _records, installed
from gdn.integrations._transformers import again, cached, functions, layer, packed
from gdn.integrations.transformers import enable, warm_up
from tests.integrations import transformers_host as host
from tests.integrations.stand_in import Stream
from tests.integrations.transformers_host import assert_close, on, prompts, reasons, run, served

AUTOGRAD = "autograd needs gradients, which this project does not record"


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return host.build(request.param)


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    return host.build("qwen3_next", **host.SHORT)


def on_layers(model: Any) -> Handle:
    return on(model, "layers")


@pytest.mark.parametrize("level", ["layers", "functions"])
def test_left_padded_prompts_and_decode_steps(model: PreTrainedModel, level: str) -> None:
    ids, mask = prompts(21, 9, 2)
    longer = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
    cache = host.dynamic(model)
    wanted = run(model, ids, cache, attention_mask=mask)
    tokens = wanted[:, -1:].argmax(-1)
    wanted_next = run(model, tokens, cache, attention_mask=longer)
    with on(model, level) as handle:
        cache = host.dynamic(model)
        assert_close(run(model, ids, cache, attention_mask=mask)[mask.bool()], wanted[mask.bool()])
        assert_close(run(model, tokens, cache, attention_mask=longer), wanted_next)
        per_step = 2 if level == "layers" else 6  # two layers; convolution, rule and norm of each
        assert (served(handle), reasons(handle)) == (2 * per_step, set())
    assert torch.equal(run(model, ids, host.dynamic(model), attention_mask=mask), wanted), "disabled: the host's own code"


@pytest.mark.parametrize("level", ["layers", "functions"])
@pytest.mark.parametrize("first", [1, 2, 11])
def test_a_prefill_in_two_parts_and_one_continued_by_the_host(small: PreTrainedModel, level: str, first: int) -> None:
    ids, _ = prompts(17, 17)
    wanted = run(small, ids)
    cache = host.dynamic(small)
    with on(small, level):
        parts = [run(small, ids[:, :first], cache), run(small, ids[:, first:-1], cache)]
    parts.append(run(small, ids[:, -1:], cache))
    assert_close(torch.cat(parts, dim=1), wanted)


def test_what_the_host_replaces_between_two_calls_is_noticed(small: PreTrainedModel) -> None:
    """Tensors of the cache by others of the same form, and the filter by its data, after calls whose views are kept."""
    (linear,) = host.linear_layers(small)
    weight, ids = linear.conv1d.weight, prompts(16, 16)[0]
    original, cache, cases = weight.data, host.dynamic(small), []

    def replace(what: str) -> None:
        layer = cache.layers[0]
        if what == "filter":
            weight.data = weight.data.flip(0).contiguous()
        else:
            states = getattr(layer, what)
            states[0] = states[0].flip(1).contiguous()

    try:
        with on_layers(small) as handle:
            run(small, ids[:, :4], cache)
            for place in range(4, 10):
                run(small, ids[:, place : place + 1], cache)
            for place, what in enumerate(("conv_states", "recurrent_states", "filter"), 10):
                replace(what)
                before, filter_before = copy.deepcopy(cache), weight.data
                cases.append((before, filter_before, place, run(small, ids[:, place : place + 1], cache)))
            assert (served(handle), reasons(handle)) == (10, set())
            cache.layers[0].recurrent_states[0] = cache.layers[0].recurrent_states[0].half()
            run(small, ids[:, :1], copy.deepcopy(cache))
            assert reasons(handle) == {"the states are float16"}
        for before, filter_before, place, found in cases:
            weight.data = filter_before
            assert_close(found, run(small, ids[:, place : place + 1], before))
    finally:
        weight.data = original


def with_fused_kernels(kind: str = "qwen3_next") -> PreTrainedModel:
    """Two layers, with head dims for which the fused operators have a kernel."""
    return host.build(kind, linear_key_head_dim=32, linear_value_head_dim=32, **host.SHORT)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("length", [1, 3])
def test_calls_that_are_alike_have_the_hosts_values(kind: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once they are no longer asked; with a cache that starts anew, and with the filter in another place."""
    model = with_fused_kernels(kind)
    (linear,) = host.linear_layers(model)
    hidden, name, asked = torch.randn(12, 2, length, 64), host.cache_name(linear), []
    original, refusal = linear.conv1d.weight.data, layer.refusal

    def walk() -> tuple[torch.Tensor, Any]:
        cache, found = host.dynamic(model), []
        linear.conv1d.weight.data = original
        with torch.inference_mode():
            for number, tokens in enumerate(hidden):
                if number == 8:
                    cache.layers[0].has_previous_state[0] = False
                if number == 10:
                    linear.conv1d.weight.data = original.flip(0).clone()
                found.append(linear(tokens, **{name: cache}))
        return torch.stack(found), cache.layers[0]

    wanted, states = walk()
    monkeypatch.setattr(layer, "refusal", lambda *given: asked.append(1) or refusal(*given))
    with on_layers(model) as handle:
        found, ours = walk()
        assert served(handle) == 12 and len(asked) < 12
    assert_close(found, wanted)
    assert_close(ours.recurrent_states[0], states.recurrent_states[0])
    assert_close(ours.conv_states[0][..., 1:], states.conv_states[0][..., 1:])


@pytest.mark.parametrize("length", [1, 3])
def test_index_tensors_of_a_captured_call_stay_with_its_graph(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a capture are not kept for another, nor for an eager call; those of prompts are made anew in each."""
    small = with_fused_kernels()
    (linear,) = host.linear_layers(small)
    hidden, cache, stream = torch.randn(2, length, 64), host.dynamic(small), Stream(monkeypatch, again, again.Form)

    def call() -> int:
        """How many forms are made."""
        before = stream.made
        with torch.inference_mode():
            linear(hidden, **{host.cache_name(linear): cache})
        return stream.made - before

    with on_layers(small):
        for _ in range(6):
            call()
        assert call() == 0  # of this stream
        stream.is_capturing = True
        assert call() == (0 if length == 1 else 1)  # of decode they are kept for ever
        stream.number = 2
        assert (call(), call()) == (1, 1)  # of another graph each
        stream.is_capturing = False
        assert (call(), call()) == (1, 0)


def test_a_call_like_those_before_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever is no longer like them is: modes of torch, the cache's flags, boundaries, a mask, keywords, the batch."""
    small = with_fused_kernels()
    (linear,) = host.linear_layers(small)
    name, hidden, cache, asked = host.cache_name(linear), torch.randn(1, 1, 64), host.dynamic(small), []
    refusal = layer.refusal
    monkeypatch.setattr(layer, "refusal", lambda *given: asked.append(refusal(*given)) or asked[-1])

    def why(tokens: torch.Tensor = hidden, **given: Any) -> Any:
        """The layer's answer, or None where it was not asked."""
        asked.clear()
        with torch.set_grad_enabled(bool(given.pop("grad", False))):
            linear(tokens, **{name: copy.deepcopy(cache) if given.pop("another", False) else cache}, **given)
        return asked[0] if asked else "not asked"

    with on_layers(small) as handle:
        for _ in range(6):
            why(use_cache=True, output_router_logits=False)
        assert why() == why(use_cache=True) == "not asked" and served(handle) == 8
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert why() == "autocast is on"
        assert why(attention_mask=torch.ones(1, 1)) is why(another_keyword=1) is why(another=True) is None
        assert why(torch.randn(1, 3, 64)) is why(torch.randn(1, 64, 1).mT) is None
        with contextlib.suppress(RuntimeError):  # of the host
            why(torch.randn(2, 1, 64))
        assert asked == ["the cache's windows have another shape"]
        for part in (linear.conv1d, linear.norm):
            part._hf_hook = None
            assert why() == "weights of the layer are loaded by a hook (offloading)"
            del part._hf_hook
        cache.layers[0].is_recurrent_states_initialized[0] = False
        assert why() is None  # the host makes them
        for _ in range(6):
            why()
        assert why() == "not asked"
        cache.layers[0].record_past = True
        assert why() == "the cache records past inputs"
        cache.layers[0].record_past = False
        assert why(grad=True) == AUTOGRAD
        handle.disable()
        assert why() == "not asked"  # the host's own forward


def test_modes_are_asked_once_a_call_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are forgotten after it, whether it ended or failed; with gradients, autocast or packed rows each layer asks."""
    small, found = with_fused_kernels(), []
    (linear,) = host.linear_layers(small)
    decode = prompts(1)[0]

    def look(*_: Any) -> None:
        cells = [cell.cell_contents for cell in linear.forward.__func__.__closure__]
        (own,) = (one._boundaries for one in cells if isinstance(one, again.Again))
        found.append(own)
        modes.append(own.mode)

    modes: list[packed.Mode | None] = []
    with on_layers(small) as handle:
        hook = linear.register_forward_pre_hook(look)
        cache = host.dynamic(small)
        for _ in range(3):
            with torch.no_grad():
                small(decode, past_key_values=cache, use_cache=True)
        assert modes == 3 * [packed.Mode(None, None, False)] and found[0].mode is None and served(handle) == 3
        counted = served(handle)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            small(decode, past_key_values=cache, use_cache=True)
        small(decode, past_key_values=cache, use_cache=True)
        assert modes[3:] == [None, None] and served(handle) == counted
        with torch.no_grad():
            small(prompts(4)[0], position_ids=torch.tensor([[0, 1, 0, 1]]), use_cache=False)
        assert modes[5:] == [None]  # its sequences are packed
        hook.remove()
        monkeypatch.setattr(linear.out_proj, "forward", lambda *_: 1 / 0)
        with torch.no_grad(), pytest.raises(ZeroDivisionError):
            small(decode, past_key_values=cache, use_cache=True)
        assert found[0].mode is None


@pytest.mark.parametrize(("kind", "dims"), [("qwen3_next", (20, 20)), ("qwen3_5", (20, 20)), ("qwen3_next", (16, 24))])
def test_head_dims_without_a_fused_kernel(kind: str, dims: tuple[int, int]) -> None:
    """By an operator a step. Kernels serve equal dims alone."""
    model = host.build(kind, linear_key_head_dim=dims[0], linear_value_head_dim=dims[1], **host.SHORT)
    ids, mask = prompts(70, 9)

    def logits() -> torch.Tensor:
        cache = host.dynamic(model)
        first = run(model, ids, cache, attention_mask=mask)[mask.bool()]
        steps = [run(model, ids[:, place : place + 1].clamp(min=1), cache) for place in range(3)]
        return torch.cat([first, torch.cat(steps).flatten(0, 1), run(model, ids[:, :5].clamp(min=1), cache).flatten(0, 1)])

    wanted = logits()
    with on_layers(model) as handle:
        assert_close(logits(), wanted)
        assert (served(handle), reasons(handle)) == (5, set())


def test_a_static_cache_used_twice(small: PreTrainedModel) -> None:
    ids, _ = prompts(12, 12)
    wanted = run(small, ids)
    cache = host.static(small)
    with on_layers(small):
        for _ in range(2):
            assert_close(torch.cat([run(small, ids[:, :11], cache), run(small, ids[:, 11:], cache)], dim=1), wanted)
            with torch.inference_mode():
                cache.reset()


@pytest.mark.parametrize("lengths", [(5, 1, 9), (3, 64, 1)])
@pytest.mark.parametrize("with_offsets", [True, False])
def test_packed_rows_are_the_sequences_alone(small: PreTrainedModel, lengths: tuple[int, ...], with_offsets: bool) -> None:
    ids, positions, offsets, alone = host.packed(small, lengths)
    more = {"cu_seq_lens_q": offsets} if with_offsets else {}
    with on_layers(small) as handle:
        assert_close(run(small, ids, position_ids=positions, **more), alone)
        assert_close(run(small, ids), run(small, ids, position_ids=torch.arange(ids.shape[1])[None]))
        (text,) = [one for one in handle.report().points if "position_ids" in one.path]
        assert text.served == (not with_offsets), "calls whose boundaries were derived"


def test_packed_rows_of_a_batch_by_positions_alone(small: PreTrainedModel) -> None:
    ids, _ = prompts(12, 12)
    positions = torch.stack([torch.arange(12) % 5, torch.arange(12)])
    alone = torch.cat([run(small, one) for one in ids[:1].split((5, 5, 2), dim=1)], dim=1)
    with on_layers(small):
        found = run(small, ids, position_ids=positions)
    assert_close(found, torch.cat([alone, run(small, ids[1:])]))


@pytest.mark.parametrize("how", ["its call", "a module around it", "its forward"])
def test_positions_that_restart_are_refused_by_name_where_a_layer_is_compiled_by_itself(small: PreTrainedModel, how: str) -> None:
    """The compiled layer cannot be told the boundaries: it would mix the sequences without a word."""
    ids, _ = prompts(12)
    positions, layers = torch.arange(12)[None] % 5, small.model.layers
    first = layers[0]
    with on_layers(small):
        try:
            if how == "its call":
                first.compile(backend="eager")
            elif how == "a module around it":
                layers[0] = torch.compile(first, backend="eager")
            else:
                first.forward = torch.compile(first.forward, backend="eager")
            with pytest.raises(ValueError, match="position_ids: .*whose layers are compiled by themselves .pass cu_seq_lens_q"):
                run(small, ids, position_ids=positions)
        finally:
            layers[0], first._compiled_call_impl = first, None
            vars(first).pop("forward", None)
        run(small, ids, position_ids=positions)


@pytest.mark.parametrize("made", [True, False])
def test_positions_that_restart_are_refused_by_name_with_a_cache(small: PreTrainedModel, made: bool) -> None:
    ids, mask = prompts(12)
    positions = torch.arange(12)[None] % 6
    with on_layers(small):
        with pytest.raises(ValueError, match="position_ids: expected rows that do not restart.*use_cache=False"):
            run(small, ids, host.dynamic(small) if made else None, use_cache=True, position_ids=positions)
        run(small, ids, use_cache=True, position_ids=positions, attention_mask=mask)  # a mask says what belongs together
        run(small, ids, use_cache=True, position_ids=torch.arange(12)[None] + 3)


def test_a_call_with_gradients_is_the_hosts(small: PreTrainedModel) -> None:
    ids, _ = prompts(7)
    wanted = small(ids, use_cache=False).logits
    with on_layers(small) as handle:
        found = small(ids, use_cache=False).logits
        assert torch.equal(found, wanted) and found.requires_grad
        small(ids, use_cache=True, position_ids=torch.arange(7)[None] % 3)  # left to the host as a whole
        assert (served(handle), reasons(handle)) == (0, {AUTOGRAD})


def test_a_cache_that_records_the_past_is_the_hosts(small: PreTrainedModel) -> None:
    ids, _ = prompts(9)

    def both() -> torch.Tensor:
        cache = host.dynamic(small)
        cache.layers[0].record_past = True
        return torch.cat([run(small, ids[:, :6], cache), run(small, ids[:, 6:], cache)], dim=1)

    wanted = both()
    with on_layers(small) as handle:
        assert torch.equal(both(), wanted)
        assert (served(handle), reasons(handle)) == (0, {"the cache records past inputs"})


def test_another_name_of_the_cache(small: PreTrainedModel) -> None:
    (linear,) = host.linear_layers(small)
    hidden = torch.randn(1, 4, 64)
    name = host.cache_name(linear)
    with on_layers(small) as handle, torch.inference_mode():
        for wrong in {"cache", "past_key_values"} - {name}:
            with pytest.raises(TypeError, match=f"{wrong}: expected the cache under the name '{name}'"):
                linear(hidden, **{wrong: host.dynamic(small)})
        cache = host.dynamic(small)
        found = linear(hidden, **{name: cache})
        assert cache.layers[0].has_previous_state[0] and served(handle) == 1
        assert torch.equal(linear(hidden, None, None), found)
        if name == "cache":
            with pytest.warns(FutureWarning, match="cache_params"):
                assert_close(linear(hidden, cache_params=host.dynamic(small)), found)
            assert reasons(handle) == {"the cache has its old name"}


def _refusal(
    small: Any, hidden: torch.Tensor | None = None, cache: Any = None, boundaries: Any = None, **packed: Any
) -> str | None:
    (linear,) = host.linear_layers(small)
    hidden = torch.randn(1, 4, 64) if hidden is None else hidden
    with torch.inference_mode():
        return layer.refusal(layer.Facts.of(linear), linear, hidden, cache, packed, boundaries, allow_reference=True)


def test_every_other_reason_of_a_layer(small: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    (linear,) = host.linear_layers(small)
    offsets, one = torch.tensor([0, 2, 4]), host.dynamic(small)
    run(small, torch.ones(1, 4, dtype=torch.int64), one)
    assert _refusal(small) is None and _refusal(small, cache=one) is None and _refusal(small, cu_seq_lens_q=offsets) is None
    assert _refusal(small, torch.randn(0, 4, 64)) == _refusal(small, torch.randn(1, 0, 64)) == "no tokens"
    assert _refusal(small, torch.randn(2, 4, 64), cu_seq_lens_q=offsets) == "cu_seq_lens_q with more than one row"
    assert _refusal(small, seq_idx=offsets) == "packed sequences by seq_idx without cu_seq_lens_q"
    packed = "packed sequences with a cache"
    assert _refusal(small, cache=one, cu_seq_lens_q=offsets) == _refusal(small, cache=one, boundaries=offsets) == packed
    assert layer.refusal(layer.Facts.of(linear), linear, torch.randn(1, 4, 64), None, {}, None) == "the tokens are on cpu"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _refusal(small) == "autocast is on"
    assert _refusal(small, torch.randn(2, 4, 64), one) == "the cache's windows have another shape"
    one.layers[0].is_conv_states_initialized[0] = False
    assert _refusal(small, torch.randn(2, 4, 64), one) == "the cache's states have another shape"
    kept = one.layers[0].recurrent_states[0]
    one.layers[0].recurrent_states[0] = kept.mT.contiguous().mT
    assert _refusal(small, cache=one) == "the cache's states are not contiguous"
    one.layers[0].recurrent_states[0] = kept
    one.layers[0].recurrent_states[0] = one.layers[0].recurrent_states[0].half()
    assert _refusal(small, cache=one) == "the states are float16"
    one.layers[0].recurrent_states[0] = one.layers[0].recurrent_states[0].to("meta")
    assert _refusal(small, cache=one) == "the cache is on another device"
    one.layers[0].is_conv_states_initialized[0] = True
    one.layers[0].conv_states[0] = one.layers[0].conv_states[0].to("meta")
    assert _refusal(small, cache=one) == "the cache is on another device"
    one.layers[0] = one.layers[1]
    assert _refusal(small, cache=one) == "the cache has no linear-attention layer of this index"
    one.layers.clear()
    assert _refusal(small, cache=one) == "the cache has no linear-attention layer of this index"
    monkeypatch.setattr(linear.norm, "activation", "gelu")
    assert _refusal(small) == "the gate's activation is gelu"
    monkeypatch.setattr(linear, "activation", "relu")
    assert _refusal(small) == "the activation is relu"
    monkeypatch.undo()
    monkeypatch.setattr(linear.conv1d, "_hf_hook", object(), raising=False)
    assert _refusal(small) == "weights of the layer are loaded by a hook (offloading)"


def test_head_dims_without_a_kernel_are_the_hosts_on_a_gpu(small: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    (linear,) = host.linear_layers(small)
    for dim, fused in ((20, (False, False)), (16, (True, False)), (256, (False, True)), (128, (True, True))):
        for name in ("head_k_dim", "head_v_dim"):
            monkeypatch.setattr(linear, name, dim)
        facts = layer.Facts.of(linear)
        assert (facts.reason, facts.reason_on_gpu) == (None, None)
        assert (facts.fuses_prompts, facts.fuses_steps) == fused
    few = {"num_k_heads": 1, "num_v_heads": 1, "head_k_dim": 4, "head_v_dim": 4}  # 12 channels
    for changes in ({"head_v_dim": 64}, {"conv_kernel_size": 5}, {"head_k_dim": 260, "head_v_dim": 260}, few):
        with monkeypatch.context() as one:
            for name, value in changes.items():
                one.setattr(linear, name, value)
            reason = layer.Facts.of(linear).reason_on_gpu
            assert reason is not None and reason.startswith("the operators have no kernel for ")
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(1, 4, 64, dtype=torch.bfloat16, device="cuda")
    for is_sm90, expected in ((True, None), (False, "the GPU is not SM90")):
        monkeypatch.setattr(_calls, "_is_sm90", lambda index, is_sm90=is_sm90: is_sm90)
        with torch.inference_mode():
            assert layer.refusal(facts, linear, hidden, None, {}, None) == expected
            assert layer.refusal(facts, linear, hidden.float(), None, {}, None) == (
                expected or "the tokens are float32, which has no kernel"
            )


def test_every_reason_of_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_chunk, ask_recurrent, ask_conv, ask_update, ask_norm = (
        _calls.asking(getattr(functions, f"{name}_refusal"), getattr(functions, name))
        for name in ("chunk", "recurrent", "conv", "update", "norm")
    )
    q, v, g = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 4, 16), torch.zeros(1, 6, 4)
    state, offsets, cpu = torch.zeros(1, 4, 16, 16), torch.tensor([0, 2, 6]), {"allow_reference": True}
    rule = (q, q, v, g, g)
    assert ask_chunk(*rule, cu_seqlens=offsets, **cpu) is None
    assert ask_chunk(*rule) == ask_recurrent(*rule) == "the tokens are on cpu"
    two = tuple(torch.cat([one, one]) for one in rule)
    assert ask_chunk(*two, cu_seqlens=offsets, **cpu) == "cu_seqlens with more than one row"
    packed = {
        ask_chunk(*rule, cu_seqlens=offsets, **one, **cpu) for one in ({"initial_state": state}, {"output_final_state": True})
    }
    assert packed == {"packed sequences with a cache"}
    assert ask_chunk(*rule, initial_state=state.half(), **cpu) == "the states are float16"
    assert ask_chunk(*(one[:0] for one in rule), **cpu) == "no tokens"
    assert ask_recurrent(*rule, cu_seqlens=offsets, **cpu) == "packed sequences of one token"
    assert ask_recurrent(*rule, initial_state=state.requires_grad_(), **cpu) == AUTOGRAD
    with monkeypatch.context() as one, FakeTensorMode():
        one.setattr(_calls, "_is_sm90", lambda index: True)
        wide, narrow, gate = (torch.empty(1, 6, *dims, dtype=torch.bfloat16, device="cuda") for dims in ((4, 64), (4, 32), (4,)))
        assert ask_chunk(narrow, narrow, wide, gate, gate) == "no kernel for K=32, V=64"
        assert ask_chunk(wide, wide, wide, gate, gate) is None
        odd = torch.empty(1, 6, 4, 62, dtype=torch.bfloat16, device="cuda")
        assert ask_chunk(odd, odd, odd, gate, gate) == "no kernel for K=62, V=62"
        rows, window, taps = (
            torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in ((2, 12, 1), (2, 12, 4), (12, 4))
        )
        for ask, given in ((ask_conv, (rows,)), (ask_update, (rows, window))):
            assert ask(*given, taps) == "no kernel for 12 channels and a filter of 4"
    half, state = q.half(), state.detach()
    assert ask_chunk(half, q, v, g, g, **cpu) == "query, key and value differ in dtype"
    assert ask_chunk(q, q, v[:, :, :3], g, g, **cpu) == "3 value heads are no multiple of 2 key heads"
    for strange in (state.expand(2, -1, -1, -1), state.mT, torch.zeros(state.numel() + 1)[1:].view_as(state)):
        reason = ask_recurrent(*rule, initial_state=strange, output_final_state=True, **cpu)
        assert reason is not None and reason.startswith("the states have strides")
        assert ask_recurrent(*rule, initial_state=strange, **cpu) is None  # it is only read
    o, last = functions.chunk(*rule, output_final_state=None, use_qk_l2norm_in_kernel=None)  # type: ignore[arg-type]
    assert o.shape == v.shape and last is None  # as models hand on `use_cache`
    x, weight, window = torch.randn(2, 8, 5), torch.randn(8, 4), torch.randn(2, 8, 4)
    assert ask_conv(x, weight, activation="gelu", **cpu) == "the activation is gelu"
    assert ask_conv(x, weight, seq_idx=offsets, **cpu) == "packed sequences by seq_idx without cu_seq_lens_q"
    assert ask_conv(x, weight, cu_seq_lens_q=offsets, **cpu) == "cu_seq_lens_q with more than one row"
    assert ask_conv(x[:0], weight, **cpu) == ask_update(x[:0], window, weight, **cpu) == "no tokens"
    assert ask_conv(x, weight) == ask_update(x, window, weight) == "the tokens are on cpu"
    assert ask_update(x, window, weight, None, "gelu", **cpu) == "the activation is gelu"
    shared = window[:1].expand(2, -1, -1)
    assert ask_update(x, shared, weight, **cpu) == "the windows of several rows share memory"
    assert ask_conv(x, weight[:, :1], **cpu) == "no kernel for 8 channels and a filter of 1"
    assert ask_update(x, window[..., 1:], weight, **cpu) == "the window has another number of columns than the filter"
    norm = host.linear_layers(host.build("qwen4_exp", output_gate_type="sigmoid"))[0].norm
    monkeypatch.setattr(norm, "activation", "gelu")
    assert ask_norm(norm, v, v, **cpu) == "the gate's activation is gelu"


def test_functions_by_themselves() -> None:
    """Against the host's own: other forms than its layers use."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, window, weight, bias = draw(2, 8, 3), draw(2, 8, 4), draw(8, 4), draw(8)
    q, k, v, g, beta = draw(2, 5, 4, 16), draw(2, 5, 4, 16), draw(2, 5, 4, 16), -draw(2, 5, 4).abs(), draw(2, 5, 4).sigmoid()
    state = draw(2, 4, 16, 16)
    rule = {"g": g, "beta": beta, "initial_state": state, "use_qk_l2norm_in_kernel": True}

    def results() -> list[torch.Tensor]:
        kept = window.clone()
        found = [modeling.causal_conv1d_update(x, kept, weight, bias, "silu"), kept[..., 1:]]
        found.append(modeling.causal_conv1d_fn(x, weight, bias))
        found.append(modeling.torch_recurrent_gated_delta_rule(q, k, v, **rule)[0])
        assert modeling.torch_recurrent_gated_delta_rule(q, k, v, **rule)[1] is None
        return [*found, *modeling.torch_chunk_gated_delta_rule(q, k, v, output_final_state=True, **rule)]

    wanted, before = results(), state.clone()
    with on(None, "functions") as handle:
        for found, one in zip(results(), wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)
        assert served(handle) == 5 and torch.equal(state, before)
        _, after = modeling.torch_recurrent_gated_delta_rule(q, k, v, output_final_state=True, **rule)
        assert after.data_ptr() == state.data_ptr(), "in place, as the host's cache wants it"


def test_enable_twice_disable_and_foreign_patches(small: PreTrainedModel) -> None:
    (linear,) = host.linear_layers(small)
    ids, _ = prompts(5)
    with on_layers(small) as handle:
        assert on_layers(small) is handle
        with pytest.raises(ValueError, match="enable: expected the options of the enabled handle"):
            enable(small, allow_reference=True)
        assert "forward" in vars(linear)
    assert "forward" not in vars(linear) and not small.model._forward_pre_hooks and not small.model._forward_hooks
    handle.disable()
    handle = on_layers(small)
    ours = linear.forward
    linear.forward = foreign = lambda *args, **kwargs: ours(*args, **kwargs)
    handle.disable()
    assert linear.forward is foreign
    assert handle.report().points[0].why == "patched since by someone else, left alone"
    wanted = run(small, ids)
    with pytest.raises(RuntimeError, match="strict: .*linear_attn: someone else replaced its forward"):
        on_layers(small)
    with enable(small, allow_reference=True) as handle:
        assert linear.forward is foreign and handle.report().points[0].why == "someone else replaced its forward"
    del linear.forward
    assert torch.equal(run(small, ids), wanted)


def test_copies_of_an_enabled_model_are_enabled_by_themselves() -> None:
    model, (ids, _) = host.build("qwen3_next", **host.SHORT), prompts(9)
    wanted = run(model, ids)
    with on_layers(model) as handle:
        other = copy.deepcopy(model)
        (linear,) = host.linear_layers(other)
        with on_layers(other) as of_copy:
            assert_close(run(other, ids), wanted)
            assert (served(handle), served(of_copy)) == (0, 1)
            assert len(other.model._forward_pre_hooks) == len(other.model._forward_hooks) == 1
        assert "forward" not in vars(linear) and torch.equal(run(other, ids), wanted)
        assert not other.model._forward_pre_hooks and not other.model._forward_hooks
        assert_close(run(model, ids), wanted)
        with enable(model.model, allow_reference=True) as part:  # its layers are those of the model
            assert part.report().points[0].why == "it is enabled already"
        assert served(handle) == 1


@pytest.mark.parametrize("which", ["filter", "gain", "decay"])
def test_weights_that_are_no_parameters_of_the_layer(which: str) -> None:
    """Also from one call to the next."""
    model = with_fused_kernels()
    (linear,) = host.linear_layers(model)
    owner, name = {"filter": (linear.conv1d, "weight"), "gain": (linear.norm, "weight"), "decay": (linear, "A_log")}[which]
    cache, (ids, _) = host.dynamic(model), prompts(12)
    for place in range(10):
        run(model, ids[:, place : place + 1], cache)
    wanted = run(model, ids[:, 10:11], copy.deepcopy(cache))
    cache = host.dynamic(model)
    with on_layers(model) as handle:
        for place in range(10):
            run(model, ids[:, place : place + 1], cache)
        assert (served(handle), reasons(handle)) == (10, set())
        parametrize.register_parametrization(owner, name, torch.nn.Identity())
        assert_close(run(model, ids[:, 10:11], cache), wanted)
        assert reasons(handle) == {"weights of the layer are no parameters of it (pruned, parametrized or flattened)"}


def test_layers_that_are_not_the_hosts_are_left_alone(small: PreTrainedModel) -> None:
    (linear,) = host.linear_layers(small)
    host_class, norm = type(linear), linear.norm

    class Own(host_class):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    try:
        linear.__class__ = Own
        with enable(small, allow_reference=True) as handle:
            assert handle.report().points[0].why == "Own has a forward of its own"
        linear.__class__ = host_class
        linear.norm = torch.nn.Identity()
        with enable(small, allow_reference=True) as handle:
            assert handle.report().points[0].why == "its norm is a Identity"
    finally:
        linear.__class__, linear.norm = host_class, norm


def test_a_handle_does_not_keep_its_model() -> None:
    model = host.build("qwen3_next", num_hidden_layers=1, layer_types=["linear_attention"])
    handle, gone = on_layers(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and handle not in _handle._enabled.values()
    assert handle._forget is not None and not handle._forget.alive
    handle.disable()
    assert {one.why for one in handle.report().points if "position_ids" not in one.path} == {"the model is gone"}


def test_warm_up_makes_every_form_of_call_once(small: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def bound(function: Any, **options: Any) -> Any:
        original = _kept.bound(function, **options)

        def counted(*tensors: torch.Tensor) -> Any:
            calls.append((function.__name__, tensors[0].shape[0]))
            return original(*tensors)

        return counted

    monkeypatch.setattr(layer, "bound", bound)
    assert warm_up(small, batch_sizes=(1, 2), prompt_lengths=(3,)) == 1
    assert calls == [
        (name, batch * (1 if "decode" in name else 3))
        for batch in (1, 2)
        for name in ("fused_gdn_prefill", "fused_gdn_prefill", "fused_gdn_decode", "fused_gdn_prefill")
    ]
    assert warm_up(host.build("qwen3_5", num_hidden_layers=1, layer_types=["linear_attention"])) == 1
    with pytest.raises(ValueError, match="prompt_lengths: expected sizes of at least 1, got 0"):
        warm_up(small, prompt_lengths=(0,))
    with pytest.raises(ValueError, match="model: expected one with Gated DeltaNet layers of qwen3_next, .*got Linear"):
        warm_up(torch.nn.Linear(2, 2))


def test_bad_arguments(small: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="model: expected a module or None, got str"):
        enable("qwen3_next")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="level: expected one of layers, functions, got 'layer'"):
        enable(small, "layer")
    with pytest.raises(ValueError, match="level: expected 'layers' with a model, got 'functions'"):
        enable(small, "functions")
    with pytest.raises(ValueError, match="level: expected 'functions' without a model, got 'layers'"):
        enable(level="layers")
    with pytest.raises(ValueError, match="model: expected one with Gated DeltaNet layers of qwen3_next, .*got Linear"):
        enable(torch.nn.Linear(2, 2))


def test_another_gpu_touches_nothing(small: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_capabilities", lambda: [(10, 0)])
    with enable(small) as handle:
        assert "forward" not in vars(host.linear_layers(small)[0])
        assert {one.why for one in handle.report().points} == {"this machine has no SM90 GPU"}


def test_recorded_signatures_are_those_of_the_installed_version() -> None:
    found = installed.find(_hosts.TRANSFORMERS)
    assert found.tested, f"record version {found.version}"
    assert {name: one for name, one in found.names.items() if one is not None and (one.refusal or one.warning)} == {}
    for entries in _records.load("transformers").values():
        for name in _hosts.TRANSFORMERS.functions:
            if name.endswith("GatedDeltaNet.forward"):
                parameters = [one[0] for one in entries[name]["parameters"]]
                assert parameters[:4] in (["self", "hidden_states", one, "attention_mask"] for one in ("cache", "cache_params"))


def test_states_of_a_call_have_no_column_more_than_the_operator_needs() -> None:
    shapes = cached.Shapes((8, 4), (2, 16, 16))
    states = cached.states_of_call(3, torch.zeros(1, 8, dtype=torch.bfloat16), shapes)
    assert (states.windows.shape, states.windows.dtype, states.has_previous) == ((3, 8, 3), torch.bfloat16, False)
    assert (states.states.shape, states.states.dtype) == ((3, 2, 16, 16), torch.float32)
