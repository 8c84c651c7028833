"""Builds the library of the fused decode step."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams, GdnDecodeProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.gdn_decode.config import Config
from kernels_cute.gdn_decode.kernel import GdnDecode
from kernels_cute.gdn_decode.spec import Spec
from kernels_cute.gdn_decode.streamed.kernel import StreamedDecode
from kernels_cute.gdn_decode.streamed.spec import Spec as StreamedSpec


def library(problem: GdnDecodeProblem, config: Config) -> dict[str, bytes]:
    p, HV, K, V = problem, problem.num_v_heads, problem.head_k_dim, problem.head_v_dim
    num_tokens, dim = cute.sym_int(), p.dim
    inner = (V, K) if p.state_v_first else (K, V)
    channel_stride = 1 if p.conv_channels_contiguous else None
    has_pairs = p.interleaved or p.merged
    width = None if p.concatenated else dim + (HV * V if has_pairs else 0)
    mixed_qkv = fake(p.dtype, num_tokens, width, last=1)
    z, out = fake(p.z_dtype, num_tokens, HV, V, last=1), fake(p.dtype, num_tokens, HV * V, last=1)
    b, a = fake(p.b_dtype, num_tokens, 2 * HV if has_pairs else HV), fake(p.a_dtype, num_tokens, HV)
    conv_state = fake(p.conv_dtype, cute.sym_int64(), dim, cute.sym_int64(), last=(channel_stride, None))
    conv_weight, conv_bias = fake(p.weight_dtype, dim, p.width, last=(p.width, 1)), fake(p.bias_dtype, dim, last=1)
    A_log, dt_bias, norm_weight = fake(p.A_log_dtype, HV), fake(p.dt_bias_dtype, HV), fake(p.norm_dtype, V)
    ssm_state = fake(p.state_dtype, cute.sym_int64(), HV, *inner, last=(inner[1], 1))
    indices, accepted = fake(p.index_dtype, *[None] * (1 + p.has_columns)), fake("int32" if p.has_accepted else None, None)
    cu_seqlens, seed = fake(p.cu_seqlens_dtype, None, last=1), fake("int64" if p.has_rounding else None, 1, last=1)
    conv = (conv_state, conv_weight, conv_bias)
    kept = fake(p.intermediate_dtype, cute.sym_int64(), cute.sym_int64(), HV, *inner, last=(inner[1], 1))
    kept_rows = fake(p.index_dtype if p.intermediate_dtype else None, None)
    has_ring = p.ring_rows is not None
    ring = fake("float32" if has_ring else None, cute.sym_int64(), p.ring_rows, cute.sym_int64(), last=1)
    counts = [fake("int32" if has_ring else None, size) for size in (cute.sym_int64(), None)]
    slots = (ssm_state, indices, accepted, cu_seqlens, seed, kept, kept_rows, ring, *counts)
    scalars = (Float32(1.0), Float32(1e-6), Int64(-1), Int32(0) if has_ring else None)
    fakes = GdnDecodeParams(mixed_qkv, z, b, a, *conv, A_log, dt_bias, norm_weight, *slots, out, *scalars)
    kernel = StreamedDecode(StreamedSpec(problem, config)) if config.stages else GdnDecode(Spec(problem, config))
    return build.one_entry("gdn_decode", kernel, fakes)
