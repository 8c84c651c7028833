"""What each adapter touches of its host. Data alone: nothing here imports a host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Host:
    """A host library.

    functions are dotted names of the functions and methods that an adapter replaces or calls, by the module that defines them;
    replaced are those that `enable` replaces without further options (empty: all of them);
    classes maps a class to the attributes that the adapter reads. tested is the version range in words, for messages only.
    bindings: C++ file, relative to the folder of the package's sources, that binds functions which no Python file defines.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    tested: str
    functions: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    bindings: str | None = None


def _under(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


FLA = Host(
    name="fla",
    package="fla",
    distributions=("fla-core", "flash-linear-attention"),
    tested="0.6.0",
    functions=(
        *_under("fla.ops.gated_delta_rule", "chunk.chunk_gated_delta_rule", "fused_recurrent.fused_recurrent_gated_delta_rule"),
        *_under("fla.backends", "register", "BaseBackend.verify", "BaseBackend.is_available", "BaseBackend.is_enabled"),
        *_under(
            "fla.modules", "causal_conv1d.ops.causal_conv1d", "norm.fused_norm_gate.rms_norm_gated"
        ),  # to import, not patched
    ),
    replaced=("fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule",),
    classes=MappingProxyType({"fla.backends.BaseBackend": ("backend_type", "package_name", "priority")}),
)

FLASHINFER = Host(
    name="flashinfer",
    package="flashinfer",
    distributions=("flashinfer-python",),
    tested="0.7.2.post1",
    functions=(
        "flashinfer.gdn_prefill.chunk_gated_delta_rule",
        *_under(
            "flashinfer.gdn_decode",
            "gated_delta_rule_decode_pretranspose",
            "gated_delta_rule_decode",
            "gated_delta_rule_mtp",
        ),
    ),
)

_MQA_LOGITS = _under("deep_gemm", "fp8_mqa_logits", "fp8_paged_mqa_logits", "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits")
DEEPGEMM = Host(
    name="deepgemm",
    package="deep_gemm",
    distributions=("deep_gemm", "sgl-deep-gemm"),
    tested="2.6.1",
    functions=(*_MQA_LOGITS, "deep_gemm.get_paged_mqa_logits_metadata"),
    replaced=_MQA_LOGITS,
    bindings="csrc/apis/attention.hpp",
)

HOSTS: dict[str, Host] = {host.name: host for host in (DEEPGEMM, FLA, FLASHINFER)}
