"""Problems of the fused steps of a Gated DeltaNet layer, from what the operators see of it: sizes, dtypes and layouts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gdn.ops.delta_rule.problem import FoldStatesProblem, ring_choice
from gdn.ops.layer_step.problem import GdnDecodeProblem, GdnPrefillProblem
from gdn.served import sizes
from gdn.served.sizes import Group


@dataclass(frozen=True)
class GdnLayer:
    """A layer as its calls of `fused_gdn_decode` and `fused_gdn_prefill` show it. Sizes are of one rank; dtypes are names.

    Parameters
    ----------
    num_k_heads, num_v_heads, head_k_dim, head_v_dim, conv_width : int
        H, HV, K, V, and the taps of the convolution.
    layout : {"flat", "interleaved", "merged", "concatenated"}
        Order of the projections. Prefill takes concatenated rows as views, that is flat.
    activation, gate_activation : {"silu", "swish"} or None, {"silu", "swish", "sigmoid"}
        After the convolution, and of the output gate.
    dtype : str
        Of the projected rows, of the filter, and where `conv_dtype` is None of the windows.
    state_dtype, conv_dtype : str, str or None
        Of the pools.
    A_log_dtype, dt_bias_dtype, norm_dtype, bias_dtype : str, str, str or None, str or None
        Of the parameters; None = no norm and no gate, no bias.
    channels_contiguous, state_v_first : bool
        Layouts of the pools.
    num_spec : int
        Most drafts of a sequence. They have slots of two dimensions, offsets and counts of accepted tokens.
    has_offsets : bool
        Whether decode rows without drafts have offsets too, as padded batches do.
    masks, checkpoints : tuple of bool
        Whether prompts come with `has_initial_state` and with checkpoints in the pools: the cases that occur.
    index_dtype : str
        Of slots and offsets.
    replay : bool
        Whether decode is by replay, with the ring of `gdn.ring_shape`. Drafts then have one slot.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int = 4
    layout: str = "flat"
    activation: str | None = "silu"
    gate_activation: str = "silu"
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    conv_dtype: str | None = None
    A_log_dtype: str = "float32"
    dt_bias_dtype: str = "float32"
    norm_dtype: str | None = "bfloat16"
    bias_dtype: str | None = None
    channels_contiguous: bool = True
    state_v_first: bool = True
    num_spec: int = 0
    has_offsets: bool = False
    masks: tuple[bool, ...] = (True,)
    checkpoints: tuple[bool, ...] = (False,)
    index_dtype: str = "int32"
    replay: bool = False

    @property
    def ring(self) -> dict[str, Any]:
        """Fields of a decode problem about its ring; none without replay."""
        if not self.replay:
            return {}
        rows, fold_every = ring_choice(1 + self.num_spec, self.state_dtype)
        return {"ring_rows": rows, "fold_every": fold_every}

    def decode(self) -> Iterator[Group]:
        """Steps of one token of each sequence, and of drafts."""
        is_concatenated = self.layout == "concatenated"
        shared: dict[str, Any] = {
            **self._fields(self.layout),
            "b_dtype": None if is_concatenated else self.dtype, "concatenated": is_concatenated, "has_rounding": False,
            "num_tokens": 1, "num_sequences": 1, **self.ring,
        }  # fmt: skip
        for offsets in dict.fromkeys((None, self.index_dtype if self.has_offsets else None)):
            yield sizes.steps(GdnDecodeProblem(**shared, cu_seqlens_dtype=offsets, has_columns=False, has_accepted=False))
        if self.num_spec:
            offsets_dtype, has_columns = self.index_dtype, not self.replay
            drafts = GdnDecodeProblem(**shared, cu_seqlens_dtype=offsets_dtype, has_columns=has_columns, has_accepted=True)
            yield sizes.steps(drafts, 1 + self.num_spec)

    def prefill(self) -> Iterator[Group]:
        """Steps of prompts, new ones and such as continue."""
        layout = "flat" if self.layout == "concatenated" else self.layout
        shared: dict[str, Any] = {
            **self._fields(layout), "b_dtype": self.dtype, "cu_seqlens_dtype": self.index_dtype, "num_tokens": 1,
            "num_sequences": 1,
        }  # fmt: skip
        for has_mask in self.masks:
            for has_checkpoints in self.checkpoints:
                yield sizes.prompts(GdnPrefillProblem(**shared, has_mask=has_mask, has_checkpoints=has_checkpoints))

    def _fields(self, layout: str) -> dict[str, Any]:
        """Fields that both problems have. layout: of the call's tensors."""
        own = self.dtype if layout == "flat" else None
        return {
            **{name: getattr(self, name) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")},
            "width": self.conv_width, "dtype": self.dtype, "a_dtype": own,
            "z_dtype": own if self.norm_dtype is not None else None, "weight_dtype": self.dtype, "bias_dtype": self.bias_dtype,
            "norm_dtype": self.norm_dtype, "conv_dtype": self.conv_dtype or self.dtype,
            "conv_channels_contiguous": self.channels_contiguous, "state_dtype": self.state_dtype,
            "state_v_first": self.state_v_first, "index_dtype": self.index_dtype, "interleaved": layout == "interleaved",
            "merged": layout == "merged", "A_log_dtype": self.A_log_dtype, "dt_bias_dtype": self.dt_bias_dtype,
            "silu": self.activation is not None, "gate_sigmoid": self.gate_activation == "sigmoid",
        }  # fmt: skip


def problems(layer: GdnLayer) -> list[Group]:
    """Each call's problem at all of its sizes."""
    return [*layer.decode(), *layer.prefill()]


def by_replay(layer: GdnLayer) -> list[Group]:
    """Of a layer of vLLM that decodes by replay: decode steps with a ring, and the folds before prompts.

    None for head dims that the fused step does not serve.
    """
    K, V = layer.head_k_dim, layer.head_v_dim
    if K % 32 or V % 32 or max(K, V) > 256:
        return []
    layer = replace(layer, replay=True)
    return [*layer.decode(), fold(layer, 1, has_accepted=layer.num_spec > 0)]


def fold(layer: GdnLayer, num_layers: int, has_accepted: bool) -> Group:
    """States of as many layers that prompts continue, after decode by replay."""
    problem = FoldStatesProblem(
        num_k_heads=layer.num_k_heads, num_state_heads=layer.num_v_heads, head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim, state_dtype=layer.state_dtype, state_v_first=layer.state_v_first, **layer.ring,
        index_dtype=layer.index_dtype, has_accepted=has_accepted, has_final_indices=False, has_rounding=False,
        num_layers=num_layers, num_sequences=1,
    )  # fmt: skip
    return sizes.steps(problem)
