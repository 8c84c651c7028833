"""Other libraries on the shapes of this project's operators, measured in the same run where they are installed.

One module per library; its function with an operator's name returns the ways to call the library for that operator. Each
library gets what it asks for ready made and untimed: gates applied, q, k and v without gaps, states gathered from their pool in
the library's own layout. The measured time is therefore the time of its kernels, with the L2 norm of q and k (which the models
need) or without.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gdn.problems import ChunkProblem, Problem
from gdn.testing import timing

_MODULES = {"FlashInfer": "flashinfer", "FlashQLA": "flash_qla", "FLA": "fla"}
Outputs = tuple[torch.Tensor, torch.Tensor]  # o [tokens, HV, V]; final states [N, HV, V, K]
Call = Callable[[], Outputs]


@dataclass(frozen=True)
class Peer:
    """One way to call a library."""

    variant: str  # setting of the library's own switches, "" = none
    norm: bool  # the L2 norm of q and k inside the call
    call: Call
    captured: bool  # in a CUDA graph; else its kernels' time is summed


@dataclass(frozen=True)
class PeerRow:
    """Measured time of one way to call a library on one shape."""

    op: str
    shape: str
    library: str
    variant: str
    norm: bool
    time_us: float


@dataclass(frozen=True)
class Operands:
    """Inputs of a chunk kernel that has neither gates nor a state pool."""

    q: torch.Tensor  # [tokens, H, K]
    k: torch.Tensor
    v: torch.Tensor  # [tokens, HV, V]
    g: torch.Tensor  # [tokens, HV] float32, log decay
    beta: torch.Tensor  # [tokens, HV] float32
    state: torch.Tensor  # [N, HV, V, K] float32
    cu_seqlens: torch.Tensor  # [N + 1] int32
    scale: float


def operands(problem: ChunkProblem, arguments: Mapping[str, Any]) -> Operands:
    """Operands made from the arguments of gdn.chunk_gated_delta_rule."""
    q, k, v = (arguments[name][0].contiguous() for name in ("q", "k", "v"))
    g, beta = arguments["g"][0].float(), arguments["beta"][0].float()
    if problem.use_gate:
        g = -arguments["A_log"].float().exp() * torch.nn.functional.softplus(g + arguments["dt_bias"].float())
    if problem.use_beta_sigmoid:
        beta = beta.sigmoid()
    state = arguments["initial_state"]
    if problem.pooled:
        state = state[arguments["state_indices"].long()]
    state = state.float() if problem.state_v_first else state.float().transpose(-1, -2)
    if problem.has_mask:
        state = state * arguments["has_initial_state"][:, None, None, None]
    return Operands(
        q, k, v, g.contiguous(), beta.contiguous(), state.contiguous(), arguments["cu_seqlens"].int(), problem.head_k_dim**-0.5
    )


def keys_first(chunk: Callable[..., Any], x: Operands, norm: bool, cu_seqlens: torch.Tensor) -> Call:
    """Call in the form that FLA and FlashQLA share: a batch of one, K before V in the state."""
    state = x.state.transpose(-1, -2).contiguous()

    def call() -> Outputs:
        o, final = chunk(
            x.q[None], x.k[None], x.v[None], x.g[None], x.beta[None], scale=x.scale, initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=norm, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return o[0], final.transpose(-1, -2)

    return call


def time_us(same: Sequence[Peer]) -> float:
    """Microseconds of a call, measured like the calls of this project.

    same: one way of calling a library, on several sets of inputs that are taken in turn.
    """
    calls = [peer.call for peer in same]
    with torch.no_grad():
        if all(peer.captured for peer in same):
            timed = timing.Timed(calls)
            if timed.captured:
                return timed.sustained_us()
        return kernels_us(calls)


def kernels_us(calls: Sequence[Callable[[], object]], repeats: int = 12) -> float:
    """Mean GPU time of a call's kernels, without the gaps between them, over at least `repeats` calls."""
    for _ in range(3):  # compiles and tunes
        calls[0]()
    torch.cuda.synchronize()
    rounds = -(-repeats // len(calls))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    total = sum(event.self_device_time_total for event in profile.key_averages() if event.device_type == cuda)
    if total <= 0:
        raise RuntimeError("the profiler saw no kernel")
    return float(total) / (rounds * len(calls))


def libraries() -> list[str]:
    """Names for `--peer`."""
    return list(_MODULES)


def ways(library: str, problem: Problem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The ways to call a library, none where it has no kernel for the problem; ImportError where it is not installed.

    arguments: those of the public operator.
    """
    module = importlib.import_module(f"autotune.peers.{_MODULES[library]}")
    found = getattr(module, problem.op, None)
    return [] if found is None else list(found(problem, arguments))
