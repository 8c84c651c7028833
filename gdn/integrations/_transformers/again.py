"""A Gated DeltaNet layer's call that is like one before: what `layer.refusal` let pass then is compared, and not asked again."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, is_autocast_enabled, is_grad_enabled
from torch.compiler import is_compiling
from torch.cuda import is_current_stream_capturing

from gdn.integrations import _indices as indices
from gdn.integrations._calls import Calls
from gdn.integrations._kept import UNALIGNED
from gdn.integrations._transformers.layer import Facts
from gdn.integrations._transformers.packed import Boundaries
from gdn.runtime.guards import Guard, view_of
from gdn.runtime.streams import raw_stream


@dataclass(frozen=True, slots=True)
class Form:
    """What follows from the form of the tokens and from the stream. With slots: a field of a tuple takes several times as long.

    guard: of the call that it was made for. rows, strides: of the tokens as rows; None where they are not contiguous, or the
    fused operators have no kernel. result, result_strides, elements: of the tokens, as of the result. gpu: its index, None on
    the CPU. recurring: index tensors of the operator.
    """

    guard: Guard | None
    has_previous: bool
    gpu: int | None
    stream: int | None
    rows: tuple[int, int] | None = None
    strides: tuple[int, int] = (0, 1)
    result: tuple[int, int, int] = (0, 0, 0)
    result_strides: tuple[int, int, int] = (0, 0, 1)
    elements: int = 0
    is_decode: bool = False
    recurring: Any = None

    @staticmethod
    def of(facts: Facts, guard: Guard, hidden_states: Tensor, has_previous: bool) -> "Form":
        """Of a call that the guard lets pass, on this stream."""
        batch, length, hidden = hidden_states.shape
        device, is_decode = hidden_states.device, length == 1 and has_previous
        stream = None if device.index is None else raw_stream(device.index)
        if not (facts.fuses_steps if is_decode else facts.fuses_prompts) or not hidden_states.is_contiguous():
            return Form(guard, has_previous, device.index, stream)
        recurring = indices.rows(batch, device) if is_decode else indices.prompts(batch, length, has_previous, device)
        return Form(
            guard, has_previous, device.index, stream, (batch * length, hidden), (hidden, 1), (batch, length, hidden),
            (length * hidden, hidden, 1), batch * length * hidden, is_decode, recurring,
        )  # fmt: skip


class Again:
    """Of one layer: `layer.step` of a call without packed sequences and without a mask that is like one that was served.

    Everything that the refusal reads is compared: the forms of tensors, and the rest once more.
    """

    __slots__ = ("_boundaries", "_calls", "_facts", "_form")

    def __init__(self, facts: Facts, calls: Calls, boundaries: Boundaries) -> None:
        self._facts, self._calls, self._boundaries = facts, calls, boundaries
        self._form = Form(None, False, None, None)

    def call(self, layer: Any, hidden_states: Tensor, cache: Any) -> Tensor | None:
        """The result; None if the call differs, and then nothing was done. One function, since each further one takes as long as
        two of the comparisons; and a method with a name, since `__call__` takes three times as long."""
        facts, calls, boundaries = self._facts, self._calls, self._boundaries
        if cache is None or is_compiling() or not calls.active:
            return None
        mode = boundaries.mode
        if mode is None and (boundaries.current is not None or is_grad_enabled()):
            return None
        try:
            made = cache.layers[facts.layer_idx]
            windows, pool, has_previous = made.conv_states[0], made.recurrent_states[0], made.has_previous_state[0]
            if not made.is_conv_states_initialized[0] or not made.is_recurrent_states_initialized[0] or made.record_past:
                return None
            if pool.data_ptr() & UNALIGNED:
                return None
        except (AttributeError, IndexError):  # a layer of another kind, or none
            return None
        own = layer.__dict__  # a lookup through nn.Module takes several times as long
        parts, parameters = own["_modules"], own["_parameters"]
        convolution, norm = parts["conv1d"].__dict__, parts["norm"].__dict__
        if "_hf_hook" in convolution or "_hf_hook" in norm:
            return None
        filters, gains = convolution["_parameters"], norm["_parameters"]
        try:
            weight, A_log, dt_bias, gain, bias = (
                filters["weight"], parameters["A_log"], parameters["dt_bias"], gains["weight"], filters["bias"]
            )  # fmt: skip
        except KeyError:  # pruned or parametrized since
            return None
        views, of_windows, of_weight, (windows_at, weight_at), guard = facts.views.record
        if windows is not of_windows() or weight is not of_weight():
            return None
        if windows.data_ptr() != windows_at or weight.data_ptr() != weight_at:
            return None
        if not guard(windows, weight, hidden_states, pool):
            return None
        form = self._form
        gpu = form.gpu
        is_here = form.guard is guard and form.has_previous is has_previous
        # Its index tensors are those of a stream. While a graph is captured only those of decode serve: they are never dropped.
        # What a capture makes belongs to the graph, and is not kept.
        if is_here and gpu is not None:
            if mode is not None and mode.gpu == gpu:
                is_here = form.stream == mode.stream and (form.is_decode or not mode.is_capturing)
            else:
                is_here = form.stream == raw_stream(gpu) and (form.is_decode or not is_current_stream_capturing())
        if not is_here:
            form = Form.of(facts, guard, hidden_states, has_previous)
            if form.gpu is None or not is_current_stream_capturing():
                self._form = form
        rows = form.rows
        if rows is None:
            return None
        # Without an argument it reports CUDA's state, in a fifth of the time that the name of a device takes.
        if mode is None and (is_autocast_enabled("cpu") if form.gpu is None else is_autocast_enabled()):
            return None

        calls.served += 1
        tokens = view_of(hidden_states, rows, form.strides)
        if facts.is_interleaved:
            qkv, b = parts["in_proj_qkvz"](tokens), parts["in_proj_ba"](tokens)
            z = a = None
        else:
            qkv, z = parts["in_proj_qkv"](tokens), parts["in_proj_z"](tokens).view(-1, *facts.heads)
            b, a = parts["in_proj_b"](tokens), parts["in_proj_a"](tokens)
        windows, weight = views
        if form.is_decode:
            core = facts.decode(qkv, z, b, a, windows, weight, A_log, dt_bias, gain, pool, form.recurring, bias)
        else:
            slots, offsets, flags = form.recurring
            core = facts.prefill(qkv, z, b, a, windows, weight, A_log, dt_bias, gain, pool, slots, offsets, flags, bias)
            made.has_previous_state[0] = True
        result: Tensor = parts["out_proj"](core)
        if result.numel() == form.elements and result.is_contiguous():
            return view_of(result, form.result, form.result_strides)
        return result.view(*form.result[:2], -1)
