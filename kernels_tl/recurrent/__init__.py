"""Gated delta rule, token by token: decode, speculative decoding and short ragged sequences.

Per state head, S [K, V] float32 in registers over all tokens of a sequence, a = exp(g):

    u = beta * (v - a * S^T k)
    o = a * S^T q + u * (k . q)            equal to S_new^T q, and needs no second pass over S
    S = a * S + k u^T

q (times scale) and k are divided by their L2 norms on request; the norms are row scales, so they multiply the dot products
and u, never the registers of q and k.

Tensors: q [1, L, Hq, K], k [1, L, Hk, K], v and out [1, L, heads, V] bfloat16 | float16; g, beta [1, L, HS]; state
[slots, HS, V, K] or [slots, HS, K, V] float32 | bfloat16. `gdn.ops.delta_rule.problem.RecurrentParams` has the contract of each.

A block owns (sequence, state head, block_v columns of V). `threads_per_column` threads share the K entries of `v_per_thread`
columns each, so a dot product is log2(threads_per_column) shuffles; nothing passes through shared memory but the sums of K-first
states, whose columns are shared by several warps. A thread's part of the state is loaded at once and every byte of it moves once
each way. q, k, v and the gates of the next token are loaded while the current one is computed; those of the first token before
the state's slot is even known.
"""

from dataclasses import astuple
from typing import Any

from gdn.device import DeviceSpec
from gdn.ops.delta_rule import tiles as recurrent_tiles
from gdn.ops.delta_rule.problem import RecurrentParams, RecurrentProblem
from gdn.ops.delta_rule.tiles import TUNED_WITHIN, refusal
from gdn.ops.delta_rule.tiles import Tiles as Config
from kernels_tl.common.launch import arguments

__all__ = ["TUNED_WITHIN", "Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "workspace_bytes"]


def fits(problem: RecurrentProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled, without spills, and launched."""
    if problem.ring_rows is not None:
        return recurrent_tiles.fits_ring(problem, config, recurrent_tiles.spills_tilelang)
    return recurrent_tiles.fits(problem, recurrent_tiles.Config(*astuple(config)), device)


def configs(problem: RecurrentProblem, device: DeviceSpec) -> list[Config]:
    """The feasible configurations worth measuring; the next token is always prefetched."""
    if problem.ring_rows is not None:
        return recurrent_tiles.ring_tiles(problem, recurrent_tiles.spills_tilelang)
    return [config.tiles for config in recurrent_tiles.configs_prefetching(problem, device)]


def default_config(problem: RecurrentProblem, device: DeviceSpec) -> Config:
    if problem.ring_rows is not None:
        return recurrent_tiles.default_ring_tiles(problem, device, recurrent_tiles.spills_tilelang)
    return recurrent_tiles.default_prefetching(problem, device).tiles


def workspace_bytes(problem: RecurrentProblem, config: Config) -> int:
    return 0


def compile(problem: RecurrentProblem, config: Config) -> dict[str, bytes]:
    """The one kernel, built for sm_90a."""
    from kernels_tl.common import build
    from kernels_tl.recurrent.kernel import kernel
    from kernels_tl.recurrent.replay import replay_kernel
    from kernels_tl.recurrent.spec import Spec

    # All indices are masked here; the automatic bounds checks would undo the 16-byte accesses.
    options = {"tl.disable_safe_memory_legalize": True}
    if problem.ring_rows is None:
        return {"recurrent": build.library(kernel(Spec(problem, config)), pass_configs=options)}
    # The entries share one array of shared memory, in which the compiler would see conflicts everywhere.
    options["tl.disable_thread_storage_sync"] = True
    return {"recurrent": build.library(replay_kernel(Spec(problem, config)), pass_configs=options)}


def launch(compiled: Any, params: RecurrentParams) -> None:
    compiled.functions["recurrent"](*arguments(*params))
