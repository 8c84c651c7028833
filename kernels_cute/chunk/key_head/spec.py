"""Compile-time constants of the form with two state heads a cluster."""

from kernels_cute.chunk.key_head import shape
from kernels_cute.chunk.spec import ChunkSpec


def key_head_spec(spec: ChunkSpec) -> ChunkSpec:
    """The spec of this form, from one of the fused kernel."""
    heads = shape.STATE_HEADS
    rings = {
        "key_stages": shape.KEY_STAGES, "stages": shape.STAGES, "query_stages": shape.STAGES, "value_stages": shape.VALUE_STAGES
    }  # fmt: skip
    return spec.changed(state_heads=heads, units=spec.heads // heads, **rings)
