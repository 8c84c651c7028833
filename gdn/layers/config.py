"""Configuration of a hybrid model: what its layers are, and the sizes of one tensor-parallel rank."""

from dataclasses import dataclass, replace
from typing import Any

from gdn.layers.host_arrays import at_least, one_of, positive, refuse
from gdn.layers.transformers_fields import read_fields

LAYER_TYPES = ("linear_attention", "full_attention")
# Numbers that every model has, and those that are 0 where a model has no such part.
_COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "max_position_embeddings", "index_head_dim", "index_ratio", "decoder_sparse_step", "hc_count",
)  # fmt: skip
_OPTIONAL_COUNTS = (
    "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "index_topk", "index_n_heads",
    "index_kv_heads", "intermediate_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "hc_lowrank",
)  # fmt: skip
_POSITIVE = ("rope_theta", "partial_rotary_factor", "rms_norm_eps")
_FLAGS = ("attn_output_gate", "norm_topk_prob", "layer_scale", "tie_word_embeddings")


@dataclass(frozen=True)
class HybridConfig:
    """Sizes and options of a hybrid model of Gated DeltaNet layers and full attention layers.

    Field names are those of Transformers' configurations where these have the field. Every number counts what one rank holds:
    `per_rank` divides a whole model's configuration for tensor parallelism.

    Parameters
    ----------
    vocab_size, hidden_size, num_hidden_layers : int
        Rows of the embedding, width of the residual stream, number of decoder layers.
    layer_types : tuple of {"linear_attention", "full_attention"}
        Token mixer of each layer: Gated DeltaNet, or attention (with an indexer where `index_topk` > 0).
    num_attention_heads, num_key_value_heads, head_dim : int
        Heads of full attention, and their dimension.
    rope_theta, partial_rotary_factor, max_position_embeddings : float, float, int
        Base of the rotary frequencies, the share of `head_dim` that is rotated, and the number of positions.
    linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim, linear_conv_kernel_dim : int
        H, HV, K, V and the width of the convolution of Gated DeltaNet.
    projection_layout : {"interleaved", "flat"}
        Order of the input projections of Gated DeltaNet in the checkpoint: per key-head group (Qwen3-Next) or separate
        tensors (Qwen3.5). The layer itself holds them flat.
    gdn_gate_activation : {"silu", "sigmoid"}
        Activation of the output gate of Gated DeltaNet.
    attn_output_gate : bool
        Whether the output of full attention is multiplied by the sigmoid of a gate that the query projection makes.
    index_topk : int
        Tokens that the indexer selects for a query; 0 = no indexer. Compressed indexers add the tokens of the unfinished group.
    index_n_heads, index_kv_heads, index_head_dim, index_ratio : int
        Query heads, key heads and head dimension of the indexer; tokens per indexer key (1 = token-wise, with weights per
        head; more = compressed, without weights).
    hidden_act, intermediate_size : {"silu"}, int
        Activation of the MLPs, and width of a dense one.
    num_experts, num_experts_per_tok, moe_intermediate_size, shared_expert_intermediate_size : int
        Mixture of experts; `num_experts` 0 = dense everywhere.
    norm_topk_prob : bool
        Whether the probabilities of the selected experts are divided by their sum.
    mlp_only_layers, decoder_sparse_step : tuple of int, int
        Layers with a dense MLP in a model with experts, and the period of the others.
    residual, hc_count, hc_lowrank : {"plain", "hyper"}, int, int
        Residual stream: one, with zero-centred norms; or `hc_count` gated streams mixed through `hc_lowrank` dimensions.
    layer_scale : bool
        Whether the output of each mixer and MLP is multiplied by 1 + a learned vector ("plain" only).
    rms_norm_eps : float
        Added to the mean square in every norm.
    tie_word_embeddings : bool
        Whether the embedding is the head too.

    Raises
    ------
    TypeError, ValueError
        Named after the field, where a size is no number or sizes do not fit each other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    projection_layout: str = "flat"
    gdn_gate_activation: str = "silu"
    attn_output_gate: bool = True
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 32_768
    index_topk: int = 0
    index_n_heads: int = 0
    index_kv_heads: int = 1
    index_head_dim: int = 128
    index_ratio: int = 1
    hidden_act: str = "silu"
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    residual: str = "plain"
    hc_count: int = 1
    hc_lowrank: int = 0
    layer_scale: bool = False
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for least, names in ((1, _COUNTS), (0, _OPTIONAL_COUNTS)):
            for name in names:
                at_least(name, getattr(self, name), least)
        for name in _POSITIVE:
            positive(name, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
        one_of("hidden_act", self.hidden_act, ("silu",))
        one_of("projection_layout", self.projection_layout, ("interleaved", "flat"))
        one_of("gdn_gate_activation", self.gdn_gate_activation, ("silu", "sigmoid"))
        one_of("residual", self.residual, ("plain", "hyper"))
        for layer_type in self.layer_types:
            one_of("layer_types", layer_type, LAYER_TYPES)
        if len(self.layer_types) != self.num_hidden_layers:
            refuse("layer_types", f"{self.num_hidden_layers} entries (num_hidden_layers)", len(self.layer_types))
        _divides("linear_num_value_heads", self.linear_num_value_heads, "linear_num_key_heads", self.linear_num_key_heads)
        _divides("num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads)
        if self.rotary_dim < 2 or self.rotary_dim > self.head_dim or self.rotary_dim % 2:
            refuse("partial_rotary_factor", f"an even number of 2 to {self.head_dim} rotated dimensions", self.rotary_dim)
        if self.index_topk:
            _divides("index_n_heads", self.index_n_heads, "index_kv_heads", self.index_kv_heads)
            _divides("index_topk", self.index_topk, "index_ratio", self.index_ratio)
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            refuse("num_experts_per_tok", f"1 to {self.num_experts} (num_experts)", self.num_experts_per_tok)
        if self.residual == "hyper" and (self.hc_count < 2 or self.hc_lowrank < 1):
            refuse("hc_count, hc_lowrank", "at least 2 and 1 with residual='hyper'", (self.hc_count, self.hc_lowrank))
        if self.residual == "hyper" and self.layer_scale:
            refuse("layer_scale", "False with residual='hyper'", True)

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: all q, k and v heads of Gated DeltaNet."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.linear_value_dim

    @property
    def linear_value_dim(self) -> int:
        """Width of the values of Gated DeltaNet: HV * V."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head of full attention."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def index_rotary_dim(self) -> int:
        """Rotated dimensions of a head of the indexer."""
        return min(self.index_head_dim, self.rotary_dim)

    @property
    def num_linear_layers(self) -> int:
        """Number of Gated DeltaNet layers."""
        return self.layer_types.count("linear_attention")

    @property
    def num_full_layers(self) -> int:
        """Number of full attention layers."""
        return self.layer_types.count("full_attention")

    def is_moe(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def place(self, layer: int) -> int:
        """Index of a layer among the layers of its type: its index in the caches."""
        return self.layer_types[:layer].count(self.layer_types[layer])

    def per_rank(self, size: int) -> "HybridConfig":
        """Configuration of one of `size` tensor-parallel ranks.

        Heads and widths are divided. Key and value heads of full attention are replicated where there are fewer than ranks; the
        embedding, the norms, the router, the indexer, the hyper-connections and the head are whole on every rank.

        Raises
        ------
        ValueError
            Named after the field that `size` does not divide.
        """
        at_least("size", size, 1)
        divided = {"num_attention_heads": self.num_attention_heads}
        if self.num_linear_layers:  # a value head stays with its key head
            divided |= {name: getattr(self, name) for name in ("linear_num_key_heads", "linear_num_value_heads")}
        widths = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
        divided |= {name: getattr(self, name) for name in widths}
        for name, value in divided.items():
            if value % size:
                refuse(name, f"a multiple of {size} ranks", value)
        heads = self.num_key_value_heads
        if heads % size and size % heads:
            refuse("num_key_value_heads", f"a multiple or a divisor of {size} ranks", heads)
        changes: dict[str, Any] = {name: value // size for name, value in divided.items()}
        return replace(self, **changes, num_key_value_heads=max(1, heads // size))

    @classmethod
    def from_transformers(cls, config: Any) -> "HybridConfig":
        """Configuration of a model of Transformers.

        Parameters
        ----------
        config : PreTrainedConfig or dict
            Configuration of Qwen3-Next (``qwen3_next``), Qwen3.5 (``qwen3_5_text``, ``qwen3_5_moe_text``) or ``qwen4_exp_text``,
            or the contents of a ``config.json``. The composite types ``qwen3_5``, ``qwen3_5_moe`` and ``qwen4_exp`` give
            their text model. Absent fields, and fields that are stated twice, are resolved as Transformers 5 does
            (`gdn.layers.transformers_fields`).

        Returns
        -------
        HybridConfig

        Raises
        ------
        TypeError, ValueError
            Named after the field, for what is not served: another model type (a vision model's, for example), layers with
            per-layer embeddings (`ple_layer_ids`) or fields of their own (`per_layer_config`), scaled rotary frequencies, biases
            in attention, another activation than SiLU; for a value that Transformers refuses; for a field of the text model that
            a composite configuration states with another value outside of it; and for a missing field without a default.
        """
        return cls(**read_fields(config))


def _divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if divisor < 1 or value < 1 or value % divisor:
        refuse(name, f"a positive multiple of {divisor_name} = {divisor}", value)
