"""A prefill step between a layer's projections, as other libraries' kernels for each step of it, and as our separate operators.

No library has the step in one call: what a model runs with them is, step by step,

    pool     windows of the convolution gathered from their slots, and scattered back as they are afterwards; slots of new
             sequences cleared
    conv     q, k and v, a call each: the chunk kernels want them without gaps
    gates    decays and betas from the projections' columns, by torch
    chunk    with the L2 norm of q and k; FlashInfer on the pool, the others on states that were gathered untimed
    norm     the gated RMS norm

Each step is timed by itself, with its inputs ready made; the fastest library of each step enters their sum (benchmarks.report).
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import gdn
from benchmarks import peers
from benchmarks.peers import Outputs, Peer
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.ops.layer_step.problem import GdnPrefillProblem

OP = "gdn_prefill"
OURS = "gdn"  # as a library: the separate operators
_CONV_MODULE, _NORM_MODULE = "fla.modules.causal_conv1d", "fla.modules.norm.fused_norm_gate"


@dataclass(frozen=True)
class Step:
    """Inputs of every step, from the arguments of gdn.fused_gdn_prefill."""

    problem: GdnPrefillProblem
    given: Mapping[str, Any]
    rows: torch.Tensor  # [tokens, dim] after the convolution

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        """Channels of q, k and v."""
        keys = self.problem.num_k_heads * self.problem.head_k_dim
        return slice(0, keys), slice(keys, 2 * keys), slice(2 * keys, self.problem.dim)

    @property
    def slots(self) -> torch.Tensor:
        found: torch.Tensor = self.given["state_indices"].long()
        return found

    @property
    def fresh(self) -> torch.Tensor:
        """Slots of sequences that begin."""
        return self.slots[~self.given["has_initial_state"]]


def step_of(problem: GdnPrefillProblem, arguments: Mapping[str, Any]) -> Step:
    """ValueError for what the libraries have no call for."""
    if problem.interleaved or problem.has_checkpoints or not (problem.has_mask and problem.state_v_first):
        raise ValueError(f"problem: expected flat rows, a mask, states with V first, no checkpoints, got {problem.static_key()}")
    rows = gdn.causal_conv1d_fn(
        arguments["mixed_qkv"], arguments["conv_weight"], arguments["conv_bias"], activation=arguments["activation"],
        conv_states=arguments["conv_states"].clone(), query_start_loc=arguments["query_start_loc"],
        cache_indices=arguments["state_indices"], has_initial_state=arguments["has_initial_state"],
    )  # fmt: skip
    return Step(problem, arguments, rows)


def chunk_of(x: Step) -> tuple[ChunkProblem, dict[str, Any]]:
    """The chunk operator's problem and arguments."""
    p, given = x.problem, x.given
    problem = ChunkProblem(
        num_q_heads=p.num_k_heads, num_k_heads=p.num_k_heads, num_v_heads=p.num_v_heads, head_k_dim=p.head_k_dim,
        head_v_dim=p.head_v_dim, dtype=p.dtype, state_dtype=p.state_dtype, gate_dtype=p.a_dtype, beta_dtype=p.b_dtype,
        cu_seqlens_dtype=p.cu_seqlens_dtype, index_dtype=p.index_dtype, state_v_first=True, use_qk_l2norm=True, use_gate=True,
        use_beta_sigmoid=True, has_initial_state=True, has_final_state=True, has_final_indices=False, has_mask=True,
        has_checkpoints=False, num_tokens=p.num_tokens, num_sequences=p.num_sequences,
    )  # fmt: skip
    q, k, v = (x.rows[None, :, part].unflatten(2, (-1, p.head_k_dim)) for part in x.parts)
    arguments = {name: given[name] for name in ("A_log", "dt_bias", "state_indices", "has_initial_state")}
    arguments |= {"q": q, "k": k, "v": v, "g": given["a"][None], "beta": given["b"][None]}
    return problem, arguments | {"initial_state": given["ssm_state"], "cu_seqlens": given["query_start_loc"]}


def _separate(x: Step) -> list[Peer]:
    """Our operators, one after the other, on the pools."""
    given, (_, chunk) = x.given, chunk_of(x)
    windows = {"conv_states": given["conv_states"], "cache_indices": given["state_indices"]}
    windows |= {name: given[name] for name in ("query_start_loc", "has_initial_state", "activation")}
    flags: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

    def call() -> Outputs:
        rows = gdn.causal_conv1d_fn(given["mixed_qkv"], given["conv_weight"], given["conv_bias"], **windows)
        _, own = chunk_of(replace(x, rows=rows))
        o, pool = gdn.chunk_gated_delta_rule(**chunk | own, output_final_state=True, state_v_first=True, **flags)
        assert pool is not None
        return gdn.rms_norm_gated(o[0], given["z"], given["norm_weight"], activation=given["gate_activation"]), pool

    return [Peer("separate operators", True, call, True)]


def _pool(x: Step) -> Peer:
    given, slots, fresh = x.given, x.slots, x.fresh
    windows, states = given["conv_states"], given["ssm_state"]
    kept = given["has_initial_state"][:, None, None]
    final = functional.pad(windows[slots], (1, 0))  # as the convolution returns them: a column more than is kept

    def call() -> Outputs:
        initial = functional.pad(windows[slots] * kept, (1, 0))
        states.index_fill_(0, fresh, 0.0)
        windows.index_copy_(0, slots, final[:, :, 1:])
        return initial, states

    return Peer("windows and states", True, call, True, "pool")


def _gates(x: Step) -> Peer:
    """Gates as FlashInfer's kernel takes them: factors of the state, not their logarithms."""
    given = x.given
    rate, bias = -given["A_log"].float().exp(), given["dt_bias"].float()  # of the weights: made once

    def call() -> Outputs:
        return (functional.softplus(given["a"].float() + bias) * rate).exp(), given["b"].float().sigmoid()

    return Peer("decays and betas", True, call, True, "gates")


def _fla_conv(x: Step) -> Peer:
    given = x.given
    conv = importlib.import_module(_CONV_MODULE).causal_conv1d
    initial = functional.pad(given["conv_states"][x.slots] * given["has_initial_state"][:, None, None], (1, 0)).contiguous()
    inputs = [
        (given["mixed_qkv"][None, :, part], given["conv_weight"][part].contiguous(), initial[:, part].contiguous())
        for part in x.parts
    ]
    biases = [None if given["conv_bias"] is None else given["conv_bias"][part].contiguous() for part in x.parts]
    offsets = given["query_start_loc"].long()

    def call() -> Outputs:
        found = [
            conv(rows, weight, bias, initial_state=window, output_final_state=True, activation="silu", cu_seqlens=offsets)
            for (rows, weight, window), bias in zip(inputs, biases, strict=True)
        ]
        return found[0][0], found[0][1]  # of q; those of k and v are like it

    return Peer("q, k, v", True, call, False, "conv")


def _fla_norm(x: Step) -> Peer:
    """Norm on rows of a head, and z without gaps if the call does not make it so."""
    given, p = x.given, x.problem
    norm = importlib.import_module(_NORM_MODULE).rms_norm_gated
    o = x.rows[:, x.parts[2]].unflatten(1, (p.num_v_heads, p.head_v_dim)).contiguous()
    activation = "sigmoid" if p.gate_sigmoid else "swish"

    def call() -> Outputs:
        found = norm(o, given["z"], given["norm_weight"], None, activation=activation, eps=1e-6)
        return found, found.new_empty(0)

    return Peer("", True, call, False, "norm")


def _flashinfer(x: Step) -> list[Peer]:
    """The chunk kernel on the pool, with the split of sequences that it chooses and without a split."""
    call = peers.flashinfer_prefill(peers.operands(*chunk_of(x)), x.given["ssm_state"], x.given["state_indices"])
    ways = {name: peers.refusable(partial(call, True, split)) for name, split in peers.SPLITS.items()}
    return [Peer(name, True, way, True, "chunk") for name, way in ways.items()]


def _chunk_alone(library: str, x: Step) -> list[Peer]:
    """Chunk step on gathered states, which the time leaves out."""
    found = peers.ways(library, *chunk_of(x))
    return [replace(one, step="chunk") for one in found if one.norm]


_WAYS: dict[str, Callable[[Step], list[Peer]]] = {
    OURS: _separate,
    "torch": lambda x: [_pool(x), _gates(x)],
    "FLA": lambda x: [_fla_conv(x), *_chunk_alone("FLA", x), _fla_norm(x)],
    "FlashInfer": _flashinfer,
    "FlashQLA": partial(_chunk_alone, "FlashQLA"),
}
STEPS = ("pool", "conv", "gates", "chunk", "norm")


def ways(library: str, problem: Any, arguments: Mapping[str, Any]) -> list[Peer]:
    """Ways of a library, as benchmarks.peers.ways has them; every way but ours is one step."""
    found = _WAYS.get(library)
    return [] if found is None else found(step_of(problem, arguments))
