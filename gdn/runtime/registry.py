"""Which operators there are, which module holds each of their kernels, and which switch prefers which backend.

Everything here is strings: nothing is imported until a kernel is wanted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

KERNEL_BACKENDS = ("tilelang", "cute")
BACKENDS = (*KERNEL_BACKENDS, "reference")


@dataclass(frozen=True)
class Preference:
    """A serving-stack switch and the backend that each of its values asks for."""

    switch: str  # the variable's name
    backends: Mapping[str, str]  # parsed value as text ("true", "cute", ...) -> backend; other values ask for nothing
    phase: str | None = None  # "prefill" | "decode": heeded only where the call is of this phase


@dataclass(frozen=True)
class Operator:
    """`name` is the problem's `op`, the table's file name and the end of GDN_BACKEND_<NAME>."""

    name: str
    functions: tuple[str, ...]  # public functions of gdn that run it
    modules: Mapping[str, str] = field(default_factory=dict)  # kernel backend -> module; which is faster: gdn.runtime.order
    preferences: tuple[Preference, ...] = ()
    composed_of: tuple[str, ...] = ()  # operators that this one calls, and whose kernels it therefore runs

    @property
    def switch(self) -> str:
        return f"GDN_BACKEND_{self.name.upper()}"


def _modules(name: str, *backends: str) -> dict[str, str]:
    """name: of the module within each backend's package."""
    packages = {"tilelang": "kernels_tl", "cute": "kernels_cute"}
    return {backend: f"{packages[backend]}.{name}" for backend in backends}


_BLADNN = Preference("VLLM_GDN_USE_BLADNN", {"true": "cute", "false": "tilelang"})
_PREFILL_INDEXER = Preference("VLLM_QSA_PREFILL_USE_TL_INDEXER", {"true": "tilelang", "false": "cute"})
_DECODE_INDEXER = Preference("VLLM_QSA_DECODE_USE_TL_INDEXER", {"true": "tilelang", "false": "cute"})
_ATTENTION = {backend: backend for backend in BACKENDS}

_OPERATORS = (
    Operator("chunk", ("chunk_gated_delta_rule",), _modules("chunk", "cute", "tilelang"), (_BLADNN,)),
    Operator("recurrent", ("fused_recurrent_gated_delta_rule",), _modules("recurrent", "cute", "tilelang"), (_BLADNN,)),
    Operator("gdn_decode", ("fused_gdn_decode",), _modules("gdn_decode", "cute")),
    Operator("gating", ("fused_gdn_gating",), _modules("gdn_steps.gating", "cute")),
    Operator("split", ("fused_qkvzba_split_reshape_cat",), _modules("gdn_steps.split", "cute")),
    Operator("conv1d", ("causal_conv1d_fn",), _modules("conv1d.prefill", "cute")),
    Operator("conv1d_update", ("causal_conv1d_update",), _modules("conv1d.update", "cute")),
    Operator("rms_norm_gated", ("rms_norm_gated",), _modules("gdn_steps.rms_norm_gated", "cute")),
    Operator("quantize_fp8", ("quantize_fp8",), _modules("indexer.quantize_fp8", "cute")),
    Operator("write_indexer_cache", ("write_indexer_cache",), _modules("indexer.write_indexer_cache", "cute")),
    Operator("prepare_indexer", ("prepare_indexer",), _modules("indexer.prepare_indexer", "cute")),
    Operator("compress_indexer_keys", ("compress_indexer_keys",), _modules("indexer.compress_indexer_keys", "cute")),
    Operator("gather_indexer_cache", ("gather_indexer_cache",), _modules("indexer.gather_indexer_cache", "cute")),
    Operator("expand_topk_groups", ("expand_topk_groups",), _modules("indexer.expand_topk_groups", "cute")),
    Operator(
        "mqa_logits",
        ("mqa_logits", "fp8_mqa_logits"),
        _modules("mqa_logits.ragged", "cute", "tilelang"),
        (_PREFILL_INDEXER,),
    ),
    Operator(
        "paged_mqa_logits",
        ("paged_mqa_logits", "fp8_paged_mqa_logits"),
        _modules("mqa_logits.paged", "cute", "tilelang"),
        (_DECODE_INDEXER,),
    ),
    Operator("topk", ("topk_indices",), _modules("topk", "cute")),
    Operator("indexer_topk", ("indexer_topk",), composed_of=("mqa_logits", "topk")),
    Operator("paged_indexer_topk", ("paged_indexer_topk",), composed_of=("paged_mqa_logits", "topk")),
    Operator(
        "sparse_attention",
        ("sparse_attention",),
        preferences=(
            Preference("VLLM_QSA_PREFILL_ATTN_BACKEND", _ATTENTION, "prefill"),
            Preference("VLLM_QSA_DECODE_ATTN_BACKEND", _ATTENTION, "decode"),
        ),
    ),
)

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _OPERATORS}


def operator(name: str) -> Operator:
    """The operator of this name, or of the public function of this name."""
    found = OPERATORS.get(name)
    if found is not None:
        return found
    for candidate in _OPERATORS:
        if name in candidate.functions:
            return candidate
    raise ValueError(f"op: expected one of {', '.join(OPERATORS)} or a public function of gdn, got {name!r}")
