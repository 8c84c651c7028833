"""Operators: for each one its public functions, kernel modules, switches, and the modules that describe it.

An operator is one record of `_OPERATORS`, or of `_INTERNAL` where no public function runs it. Everything else that goes by
operator (the GDN_BACKEND_<OP> switch, `gdn explain`, the tuner, the tables' names, the benchmark, the compile tests) is found
through its record. Records hold strings: nothing is imported until it is needed.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gdn.models import ModelShape
from gdn.problem import Problem

Backend = Literal["tilelang", "cute", "reference"]  # of every public function's `backend`
BACKENDS: tuple[Backend, ...] = get_args(Backend)
KERNEL_BACKENDS = tuple(backend for backend in BACKENDS if backend != "reference")


@dataclass(frozen=True)
class Preference:
    """A serving-stack switch and the backend that each of its values asks for."""

    switch: str  # the variable's name
    backends: Mapping[str, str]  # parsed value as text ("true", "cute", ...) -> backend; other values ask for nothing


@dataclass(frozen=True)
class Family:
    """Modules that describe a family's operators. Each has one attribute per operator, under the operator's name."""

    cases: str  # gdn.core.tunable.Tunable: shapes to tune and measure, inputs, the verdict on a result
    variants: str  # tests.compile.variants.Variants: axes of dtypes and flags to compile for, expected instructions
    examples: str  # function of a model's shapes and `fp8`: the problem of a serving engine's call


@dataclass(frozen=True)
class Operator:
    """Record of one operator. `name` is the problem's `op`, the table's file name and the suffix of GDN_BACKEND_<NAME>."""

    name: str
    family: Family | None  # None for an operator without kernels of its own
    functions: tuple[str, ...]  # public functions of gdn that run it; one that deals its calls to two operators is in both
    modules: Mapping[str, str] = field(default_factory=dict)  # kernel backend -> module; which is faster: gdn.runtime.order
    preferences: tuple[Preference, ...] = ()
    composed_of: tuple[str, ...] = ()  # operators that this one calls, and whose kernels it therefore runs

    @property
    def switch(self) -> str:
        """Environment variable that orders a backend for this operator alone."""
        return f"GDN_BACKEND_{self.name.upper()}"

    def described(self, part: Literal["cases", "variants", "examples"]) -> Any:
        """The operator's attribute of a module of its family; LookupError where it has no family or the module lacks it."""
        if self.family is None:
            raise LookupError(f"{self.name}: expected an operator with kernels, got one that has none")
        place = getattr(self.family, part)
        try:
            return getattr(importlib.import_module(place), self.name)
        except AttributeError as error:
            raise LookupError(f"{self.name}: expected {place}.{self.name}, which describes the operator") from error

    def example(self, model: ModelShape, *, fp8: bool) -> Problem | None:
        """The operator's problem on a model's shapes; None where it has no kernels."""
        if self.family is None:
            return None
        problem: Problem = self.described("examples")(model, fp8)
        return problem


def _modules(name: str, *backends: str) -> dict[str, str]:
    """Kernel modules of an operator. name: the module within each backend's package."""
    packages = {"tilelang": "kernels_tl", "cute": "kernels_cute"}
    return {backend: f"{packages[backend]}.{name}" for backend in backends}


_ANY_BACKEND: dict[str, str] = {backend: backend for backend in BACKENDS}
_BLADNN = Preference("VLLM_GDN_USE_BLADNN", {"true": "cute", "false": "tilelang"})


def _family(name: str, variants: str) -> Family:
    return Family(f"gdn.ops.{name}.cases", f"tests.compile.variants.{variants}", f"gdn.ops.{name}.examples")


_DELTA_RULE, _REPLAY = _family("delta_rule", "delta_rule"), _family("delta_rule", "replay")
_DECODE, _STEPS = _family("layer_step", "decode"), _family("layer_step", "steps")
_LOGITS, _TOPK, _INDEXER = _family("indexer", "logits"), _family("indexer", "topk"), _family("indexer", "indexer")
_ATTENTION = _family("attention", "attention")

_OPERATORS = (
    Operator("chunk", _DELTA_RULE, ("chunk_gated_delta_rule",), _modules("chunk", "cute", "tilelang"), (_BLADNN,)),
    Operator(
        "recurrent", _DELTA_RULE, ("fused_recurrent_gated_delta_rule",), _modules("recurrent", "cute", "tilelang"), (_BLADNN,)
    ),
    Operator("chunk_summary", _DELTA_RULE, ("chunk_summary",), _modules("chunk.summaries", "cute")),
    Operator("gated_delta_rule", None, ("gated_delta_rule",), composed_of=("chunk", "recurrent")),
    Operator("gdn_decode", _DECODE, ("fused_gdn_decode",), _modules("gdn_decode", "cute")),
    Operator("gdn_prefill", _DECODE, ("fused_gdn_prefill",), _modules("gdn_prefill", "cute")),
    Operator("fold_states", _REPLAY, ("fold_states",), _modules("replay.fold_states", "cute")),
    Operator("accept_draft_tree", _REPLAY, ("accept_draft_tree",), _modules("replay.accept_draft_tree", "cute")),
    Operator("gating", _STEPS, ("fused_gdn_gating",), _modules("gdn_steps.gating", "cute")),
    Operator("split", _STEPS, ("fused_qkvzba_split_reshape_cat",), _modules("gdn_steps.split", "cute")),
    Operator("conv1d", _STEPS, ("causal_conv1d_fn",), _modules("conv1d.prefill", "cute")),
    Operator("conv1d_update", _STEPS, ("causal_conv1d_update",), _modules("conv1d.update", "cute")),
    Operator("add_rms_norm", _STEPS, ("add_rms_norm",), _modules("gdn_steps.add_rms_norm", "cute")),
    Operator("rms_norm_gated", _STEPS, ("rms_norm_gated",), _modules("gdn_steps.rms_norm_gated", "cute")),
    Operator("quantize_fp8", _INDEXER, ("quantize_fp8",), _modules("indexer.quantize_fp8", "cute")),
    Operator("write_indexer_cache", _INDEXER, ("write_indexer_cache",), _modules("indexer.write_indexer_cache", "cute")),
    Operator("prepare_indexer", _INDEXER, ("prepare_indexer",), _modules("indexer.prepare_indexer", "cute")),
    Operator("compress_indexer_keys", _INDEXER, ("compress_indexer_keys",), _modules("indexer.compress_indexer_keys", "cute")),
    Operator("gather_indexer_cache", _INDEXER, ("gather_indexer_cache",), _modules("indexer.gather_indexer_cache", "cute")),
    Operator("expand_topk_groups", _INDEXER, ("expand_topk_groups",), _modules("indexer.expand_topk_groups", "cute")),
    Operator(
        "mqa_logits", _LOGITS, ("mqa_logits", "fp8_mqa_logits"), _modules("mqa_logits.ragged", "cute", "tilelang"),
        (Preference("VLLM_QSA_PREFILL_USE_TL_INDEXER", {"true": "tilelang", "false": "cute"}),),
    ),
    Operator(
        "paged_mqa_logits", _LOGITS, ("paged_mqa_logits", "fp8_paged_mqa_logits"),
        _modules("mqa_logits.paged", "cute", "tilelang"),
        (Preference("VLLM_QSA_DECODE_USE_TL_INDEXER", {"true": "tilelang", "false": "cute"}),),
    ),
    Operator("topk", _TOPK, ("topk_indices",), _modules("topk", "cute")),
    Operator("indexer_topk", None, ("indexer_topk",), composed_of=("mqa_logits", "topk")),
    Operator("paged_indexer_topk", None, ("paged_indexer_topk",), composed_of=("paged_mqa_logits", "topk")),
    Operator(
        "sparse_attention_prefill", _ATTENTION, ("sparse_attention",), _modules("attention.prefill", "cute"),
        (Preference("VLLM_QSA_PREFILL_ATTN_BACKEND", _ANY_BACKEND),),
    ),
    Operator(
        "sparse_attention_decode", _ATTENTION, ("sparse_attention",), _modules("attention.decode", "cute", "tilelang"),
        (Preference("VLLM_QSA_DECODE_ATTN_BACKEND", _ANY_BACKEND),),
    ),
    Operator("attention", None, ("attention",), composed_of=("sparse_attention_decode",)),
)  # fmt: skip

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _OPERATORS}

# Operators that other parts of gdn run and nobody calls. No switch orders their backend, and nothing tunes them.
_CONTEXT = Family("", "tests.compile.variants.context", "gdn.ops.context.examples")
_INTERNAL = (
    Operator("context_parts", _CONTEXT, (), _modules("context.parts", "cute")),
    Operator("context_total", _CONTEXT, (), _modules("context.total", "cute")),
    Operator("context_start", _CONTEXT, (), _modules("context.start", "cute")),
)
INTERNAL: dict[str, Operator] = {operator.name: operator for operator in _INTERNAL}


def every() -> list[Operator]:
    """Public and internal operators."""
    return [*OPERATORS.values(), *INTERNAL.values()]


def with_kernels() -> list[Operator]:
    """The public operators that have kernels of their own."""
    return [operator for operator in OPERATORS.values() if operator.modules]


def operator(name: str) -> Operator:
    """The operator of this name, internal ones too, or the first one of the public function of this name."""
    return INTERNAL[name] if name in INTERNAL else operators(name)[0]


def operators(name: str) -> list[Operator]:
    """The operator of this name, or those that the public function of this name deals its calls to."""
    if name in OPERATORS:
        return [OPERATORS[name]]
    found = [candidate for candidate in OPERATORS.values() if name in candidate.functions]
    if found:
        return found
    raise ValueError(f"op: expected one of {', '.join(OPERATORS)} or a public function of gdn, got {name!r}")
