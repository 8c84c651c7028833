"""Other libraries on the shapes of this project's operators, measured in the same run where they are installed.

Each library gets what it asks for ready made and untimed: gates applied, q, k and v without gaps, states gathered from their pool
in the library's own layout. The measured time is therefore the time of its kernels, with the L2 norm of q and k (which the models
need) or without. Torch's dense attention does more than sparse prefill: it is what a model runs that selects nothing.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import dense_attention
from gdn.ops.attention.problem import SparsePrefillProblem
from gdn.ops.delta_rule.problem import ChunkProblem, RecurrentProblem
from gdn.problem import Problem
from gdn.testing import timing

Outputs = tuple[torch.Tensor, torch.Tensor]  # o [tokens, HV, V]; final states [N, HV, V, K], of attention an empty tensor
Call = Callable[[], Outputs]


@dataclass(frozen=True)
class Peer:
    """One way to call a library."""

    variant: str  # setting of the library's own switches, "" = none
    norm: bool  # the L2 norm of q and k inside the call; True where the operator has none
    call: Call
    captured: bool  # in a CUDA graph; else its kernels' time is summed
    step: str = ""  # the part of the operator that the call is, "" = all of it


class Refused(Exception):
    """Raised by a way that the library turns out not to have for these inputs; its other ways may run."""


@dataclass(frozen=True)
class PeerRow:
    """Measured time of one way to call a library on one shape."""

    op: str
    shape: str
    library: str
    variant: str
    norm: bool
    time_us: float
    step: str = ""


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


def timed(same: Sequence[Peer]) -> Callable[[], float]:
    """A function that measures microseconds of a call, like the calls of this project.

    same: one way of calling a library, on several sets of inputs that are taken cyclically.
    """
    calls = [peer.call for peer in same]
    with torch.no_grad():
        if all(peer.captured for peer in same):
            found = timing.Timed(calls)
            if found.captured:
                return found.sustained_us
    return torch.no_grad()(partial(kernels_us, calls))


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


def _fla(problem: ChunkProblem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The prefill kernels with the norm. Where FlashQLA is installed, FLA calls that, unless FLA_FLASH_QLA=0 is set.

    Their GPU time is summed by the profiler: a CUDA graph cannot capture their launches, and the host bounds them.
    """
    x = operands(problem, arguments)
    prefill = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return [Peer("", True, keys_first(prefill, x, True, x.cu_seqlens.long()), False)]


def _flash_qla(problem: ChunkProblem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The prefill kernel, with and without the norm."""
    x = operands(problem, arguments)
    prefill = importlib.import_module("flash_qla").chunk_gated_delta_rule
    return [Peer("", norm, keys_first(prefill, x, norm, x.cu_seqlens), True) for norm in (True, False)]


def _flashinfer_chunk(problem: ChunkProblem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The prefill kernel with and without the norm, each with the split of sequences that it chooses and without a split."""
    call = flashinfer_prefill(operands(problem, arguments))
    return [Peer(name, norm, partial(call, norm, split), True) for norm in (True, False) for name, split in SPLITS.items()]


SPLITS: dict[str, Any] = {"its split": "auto", "no split": False}


def flashinfer_prefill(
    x: Operands, pool: torch.Tensor | None = None, slots: torch.Tensor | None = None
) -> Callable[[bool, Any], Outputs]:
    """The prefill kernel, with the norm or without, and a split of sequences. pool: of the states, with the slots of each."""
    prefill = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    alpha, (state, final) = x.g.exp(), (x.state, torch.empty_like(x.state)) if pool is None else (pool, pool)
    places = {} if slots is None else {"state_indices": slots}

    def call(norm: bool, split: Any) -> Outputs:
        found = prefill(
            x.q, x.k, x.v, alpha, x.beta, x.scale, state, True, x.cu_seqlens,
            use_qk_l2norm_in_kernel=norm, output_state=final, use_cp=split, **places,
        )  # fmt: skip
        return found[0], found[1]

    return call


def _flashinfer_recurrent(problem: RecurrentProblem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The decode kernel, or the kernel for drafts; none where neither does what the problem asks for.

    They do what the recurrent operator does: raw gates, the L2 norm, and a pool of states (V first) that is updated in place.
    q, k and v come without gaps, so that the time is the kernel's. Every sequence has the same number of tokens.
    """
    if not _served(problem):
        return []
    options = _decode_arguments(problem, arguments)
    module = importlib.import_module("flashinfer.gdn_decode")
    decode = module.gated_delta_rule_mtp if problem.write_every_token else module.gated_delta_rule_decode_pretranspose

    def call() -> Outputs:
        out, pool = decode(**options)
        return out, pool

    return [Peer("", True, call, True)]


def _served(problem: RecurrentProblem) -> bool:
    """Whether the library has a call that reads and writes the same: it scatters drafts over float32 pools alone."""
    required = (
        problem.pooled, problem.state_v_first, problem.use_gate, problem.use_beta_sigmoid, problem.use_qk_l2norm,
        problem.has_final_state, not (problem.has_final_indices or problem.has_parent or problem.has_rounding),
        problem.num_tokens % problem.num_sequences == 0,
        problem.write_every_token == (problem.num_tokens > problem.num_sequences),
        problem.state_dtype == "float32" or not problem.write_every_token,
    )  # fmt: skip
    return all(required)


def _decode_arguments(problem: RecurrentProblem, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of gated_delta_rule_mtp for drafts (a slot for each token), else of gated_delta_rule_decode_pretranspose."""
    batch = problem.num_sequences

    def rows(name: str) -> Any:  # [batch, tokens of a sequence, heads, ...]
        return arguments[name][0].unflatten(0, (batch, -1)).contiguous()

    slots = arguments["ssm_state_indices"][:batch]
    options: dict[str, Any] = {
        "q": rows("q"), "k": rows("k"), "v": rows("v"), "a": rows("g"), "b": rows("beta"), "A_log": arguments["A_log"].float(),
        "dt_bias": arguments["dt_bias"], "scale": problem.head_k_dim**-0.5, "use_qk_l2norm": True,
        "initial_state": arguments["initial_state"],
    }  # fmt: skip
    options["output"] = options["v"].new_empty(options["v"].shape)
    if not problem.write_every_token:
        return options | {"state": None, "initial_state_indices": slots}
    read = slots[:, 0]
    if problem.has_accepted:
        read = slots.gather(1, arguments["num_accepted_tokens"][:batch, None].long() - 1)[:, 0]
    written = {"ssm_state_indices": slots.int().contiguous(), "disable_state_update": False}
    return options | {"initial_state_indices": read.contiguous()} | written


def _torch(problem: SparsePrefillProblem, arguments: Mapping[str, Any]) -> list[Peer]:
    """Dense attention over all positions, by each of torch's backends."""
    return [
        Peer(variant, True, refusable(partial(_without_states, call)), True) for variant, call in dense_attention.ways(arguments)
    ]


def refusable(call: Call) -> Call:
    def tried() -> Outputs:
        try:
            return call()
        except (RuntimeError, ValueError) as error:  # no such kernel, or no memory for it
            raise Refused(f"{type(error).__name__}: {error}") from error

    return tried


def _without_states(call: Callable[[], torch.Tensor]) -> Outputs:
    out = call()
    return out, out.new_empty(0)


# Library -> operator -> its ways to call the library, from the problem and the public operator's arguments.
_LIBRARIES: dict[str, dict[str, Callable[[Any, Mapping[str, Any]], list[Peer]]]] = {
    "FlashInfer": {"chunk": _flashinfer_chunk, "recurrent": _flashinfer_recurrent},
    "FlashQLA": {"chunk": _flash_qla},
    "FLA": {"chunk": _fla},
    "torch": {"sparse_attention_prefill": _torch},
}
LIBRARIES = (*_LIBRARIES, "gdn")  # names for `--peer`; gdn: this project's separate operators (benchmarks.prefill_peers)


def ways(library: str, problem: Problem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The ways to call a library, none where it has no kernel for the problem; ImportError where it is not installed."""
    found = _LIBRARIES.get(library, {}).get(problem.op)
    return [] if found is None else found(problem, arguments)
