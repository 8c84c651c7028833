"""Stochastic rounding of a bfloat16 pool on the GPU: the noise of `gdn.ops.delta_rule.tokens`, bit for bit.

Where the keys are zero a token only decays the state: one product an element, whose bits do not depend on the layout, the
dtype of the pool or the order of sums. Then a bfloat16 pool must hold the float32 pool of the same inputs, rounded, bit for
bit, whatever the tiles.

In general the kernel's float32 state and the reference's differ in their last bits, and of a small difference of large values
these are many units of a bfloat16. But with its noise given, rounding is monotone: what lies within e of x is rounded to
something between the rounded x - e and the rounded x + e, for nearly all elements one and the same value.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.device import H100
from gdn.ops.delta_rule.inputs import recurrent_inputs, recurrent_problem
from gdn.ops.delta_rule.tokens import stochastic_bfloat16
from gdn.runtime import env, registry
from gdn.testing.compare import same_bits
from tests.gpu import cases, test_gdn_decode
from tests.gpu.delta_rule import Arguments, backends
from tests.gpu.framed import on_cpu
from tests.gpu.test_gdn_decode import BF16, F32, NULL, Case
from tests.gpu.twins import copy_of, twin
from tests.references import reference

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
SEEDS = [0, -1, 2**40 + 12345]
# Share of a column's largest value, for the kernel's float32 arithmetic: that of the reference on a CPU is wrong by up to 4e-7.
ARITHMETIC = 3e-6
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "recurrent": (gdn.fused_recurrent_gated_delta_rule, reference.fused_recurrent_gated_delta_rule, "initial_state"),
    "decode": (gdn.fused_gdn_decode, reference.fused_gdn_decode, "ssm_state"),
}


def recurrent(device: torch.device, v_first: bool, every_token: bool, dim: int, tree: bool = False) -> Arguments:
    row = cases.MAIN | {"state_v_first": v_first, "state_dtype": "bfloat16", "head_k_dim": dim, "head_v_dim": dim}
    problem = recurrent_problem(**row, write_every_token=every_token, has_accepted=every_token, has_parent=tree)
    options: Arguments = {"lengths": [1, 0, 4, 3, 2, 1], "slot_gap": 24, "null_sequences": [3], "null_slot": NULL}
    return recurrent_inputs(problem, device, **options)


def decode(device: torch.device, case: Case) -> Arguments:
    return test_gdn_decode.make(case, device)[0]


def decode_64(device: torch.device) -> Arguments:
    """Several tokens, K first, 64 values of the state a thread, each with a noise of its own; parameters of float32."""
    case = Case(
        state_dtype=BF16, v_first=False, dims=(64, 64), heads=(16, 32), width=3, layout="interleaved", gate_activation="sigmoid",
        offsets_dtype=torch.int64, index_dtype=torch.int64,
    )  # fmt: skip
    arguments = decode(device, case)
    return arguments | {name: arguments[name].float() for name in ("dt_bias", "norm_weight")}


MAKERS: dict[str, tuple[str, Callable[[torch.device], Arguments]]] = {
    "recurrent": ("recurrent", lambda device: recurrent(device, True, False, 128)),
    "recurrent-K-first": ("recurrent", lambda device: recurrent(device, False, False, 128)),
    "recurrent-every": ("recurrent", lambda device: recurrent(device, True, True, 128)),
    "recurrent-every-64": ("recurrent", lambda device: recurrent(device, False, True, 64)),
    "recurrent-every-K-first": ("recurrent", lambda device: recurrent(device, False, True, 128)),
    "recurrent-tree-K-first": ("recurrent", lambda device: recurrent(device, False, True, 128, tree=True)),
    "recurrent-tree": ("recurrent", lambda device: recurrent(device, True, True, 128, tree=True)),
    "decode-ragged": ("decode", lambda device: decode(device, Case(state_dtype=BF16))),
    "decode-ragged-64": ("decode", decode_64),
    "decode-drafts": ("decode", lambda device: decode(device, Case(state_dtype=BF16, spec=7, v_first=False))),
    "decode-ragged-K-first": ("decode", lambda device: decode(device, Case(state_dtype=BF16, v_first=False))),
    "decode-single-K-first": (
        "decode",
        lambda device: decode(device, Case(state_dtype=BF16, v_first=False, lengths=(1,) * 9, offsets_dtype=None)),
    ),
    "decode-single": (
        "decode",
        lambda device: decode(device, Case(state_dtype=BF16, lengths=(1,) * 9, offsets_dtype=None, heads=(1, 3), dims=(64, 128))),
    ),
}
REGISTERED = {"recurrent": "recurrent", "decode": "gdn_decode"}


def kinds(*names: str) -> Any:
    """Runs a test with each backend of the kinds' operators."""
    pairs = [(kind, backend) for kind in names or MAKERS for backend in backends(REGISTERED[MAKERS[kind][0]])]
    return pytest.mark.parametrize(("kind", "backend"), pairs)


def written(after: Tensor, before: Tensor) -> list[int]:
    slots = [slot for slot in range(len(after)) if not same_bits(after[slot].cpu(), before[slot].cpu().to(after.dtype))]
    assert slots
    return slots


def rounded(state: Tensor, seed: int, slot: int, v_first: bool) -> Tensor:
    """state: of one slot, in its layout."""
    return stochastic_bfloat16(state.mT, seed, slot).mT if v_first else stochastic_bfloat16(state, seed, slot)


@kinds()
@pytest.mark.parametrize("seed", SEEDS)
def test_general(kind: str, backend: str, seed: int, device: torch.device) -> None:
    op, make = MAKERS[kind]
    operator, exact_operator, name = OPERATORS[op]
    arguments = make(device)
    arguments["rounding_seed"] = torch.tensor([seed], device=device)
    before, v_first = copy_of(arguments[name]).cpu(), bool(arguments["state_v_first"])
    exact = on_cpu(arguments, wide=True)
    exact["rounding_seed"] = None
    exact_operator(**exact)
    operator(**arguments, backend=backend)
    found, wanted = arguments[name].cpu(), exact[name]
    slots = written(wanted, before)
    fixed, moved = [], []
    for slot in range(len(found)):
        if slot not in slots:
            assert same_bits(found[slot], before[slot])
            continue
        error = ARITHMETIC * wanted[slot].abs().amax(-1 if v_first else -2, keepdim=True)
        low, high = (rounded(wanted[slot] + sign * error, seed, slot, v_first) for sign in (-1, 1))
        assert bool(((low <= found[slot]) & (found[slot] <= high)).all())
        fixed.append((low == high).float().mean())
        moved.append((found[slot] != wanted[slot].to(BF16)).float().mean())
    assert float(torch.stack(fixed).mean()) > 0.9, "the bounds say little"
    assert float(torch.stack(moved).mean()) > 0.2, "the noise does nothing"


def decay_only(op: str, arguments: Arguments) -> None:
    """Zero keys, what else there is as it was. The fused step's keys are what the convolution makes of zeros."""
    if op == "recurrent":
        arguments["k"].zero_()
        return
    arguments["mixed_qkv"].nan_to_num_(0.0).mul_(0.0)
    arguments["conv_state"].nan_to_num_(0.0).mul_(0.0)


def stored_and_exact(kind: str, backend: str, seed: int, device: torch.device) -> tuple[Tensor, Tensor, list[int], bool]:
    """The bfloat16 pool after a decay, the float32 one after the same, the slots that were written, and the layout."""
    op, make = MAKERS[kind]
    operator, _, name = OPERATORS[op]
    arguments = make(device)
    decay_only(op, arguments)
    before = copy_of(arguments[name])
    narrow = twin(arguments | {"rounding_seed": torch.tensor([seed], device=device)})
    wide = twin(arguments | {"rounding_seed": None})
    wide[name] = arguments[name].float()
    operator(**narrow, backend=backend)
    operator(**wide, backend=backend)
    return narrow[name].cpu(), wide[name].cpu(), written(wide[name], before.float()), bool(arguments["state_v_first"])


def check_decay(kind: str, backend: str, seed: int, device: torch.device) -> None:
    found, exact, slots, v_first = stored_and_exact(kind, backend, seed, device)
    for slot in slots:
        assert bool(exact[slot].isfinite().all())
        assert same_bits(found[slot].contiguous(), rounded(exact[slot], seed, slot, v_first).contiguous())
    assert float((found[slots].float() != exact[slots].to(BF16).float()).float().mean()) > 0.2, "the noise does nothing"


@kinds()
@pytest.mark.parametrize("seed", SEEDS)
def test_decay(kind: str, backend: str, seed: int, device: torch.device) -> None:
    check_decay(kind, backend, seed, device)


@pytest.mark.parametrize("number", [0, 5, 9])
@kinds("recurrent", "recurrent-K-first", "decode-ragged", "decode-single")
def test_any_tiles(kind: str, backend: str, number: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise belongs to the element, not to the thread that rounds it."""
    op = MAKERS[kind][0]
    module = importlib.import_module(registry.operator(REGISTERED[op]).modules[backend])
    host = importlib.import_module(f"gdn.ops.{'delta_rule' if op == 'recurrent' else 'layer_step'}.{op}")

    def prepare(problem: Any, device: torch.device, backend: str) -> runtime.Prepared:
        space = module.configs(problem, H100)
        return runtime.prepare(problem, device, backend, config=space[number % len(space)])

    monkeypatch.setattr(host, "prepare", prepare)
    env.reload()  # forgets calls seen before
    check_decay(kind, backend, SEEDS[-1], device)


def test_right_on_average_over_seeds(device: torch.device) -> None:
    """Every element's mean over many seeds, in units of what the noise alone would make of it."""
    arguments = decode(device, Case(state_dtype=BF16, lengths=(1,) * 3, offsets_dtype=None))
    decay_only("decode", arguments)
    wide = twin(arguments | {"ssm_state": arguments["ssm_state"].float()})
    gdn.fused_gdn_decode(**wide, backend="cute")
    slots = written(wide["ssm_state"], arguments["ssm_state"].float())
    exact = wide["ssm_state"][slots].double()
    down = (exact.float().view(torch.int32) & -65536).view(F32).double()  # towards zero
    up = ((exact.float().view(torch.int32) & -65536) + 65536).view(F32).double()
    share = (exact - down) / (up - down)
    fresh, total, seeds = arguments["ssm_state"].clone(), torch.zeros_like(exact), 200
    for seed in range(seeds):
        arguments["ssm_state"].copy_(fresh)
        gdn.fused_gdn_decode(**arguments, rounding_seed=torch.tensor([seed], device=device), backend="cute")
        total += (arguments["ssm_state"][slots].double() - down) / (up - down)
    random = (share > 0) & (share < 1)
    deviation = ((total / seeds - share) / (share * (1 - share) / seeds).sqrt())[random]
    count = deviation.numel()
    assert count > 10_000
    assert abs(float(deviation.mean())) < 5 / count**0.5
    assert 0.9 < float(deviation.square().mean()) < 1.1


def test_drift_over_4096_steps(device: torch.device) -> None:
    """Decay near 1 and small updates, against a float32 pool: changes below half a unit, which nearest loses."""
    heads, dim, steps = 4, 64, 4096
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(BF16)

    q, k, v = normal(steps, 1, 1, heads, dim), normal(steps, 1, 1, heads, dim), normal(steps, 1, 1, heads, dim)
    g = torch.full((1, 1, heads), -(2.0**-12), device=device)
    beta = torch.full((1, 1, heads), 2.0**-8, device=device)
    start, seed = normal(2, heads, dim, dim), torch.zeros(1, dtype=torch.int64, device=device)
    common: Arguments = {
        "cu_seqlens": torch.tensor([0, 1], device=device), "ssm_state_indices": torch.tensor([1], device=device),
        "use_qk_l2norm_in_kernel": True, "state_v_first": True, "backend": "cute",
    }  # fmt: skip
    exact, nearest, noisy = start.float(), start.clone(), start.clone()
    for step in range(steps):
        seed.fill_(step)
        for pool in (exact, nearest, noisy):
            rounding = seed if pool is noisy else None
            gdn.fused_recurrent_gated_delta_rule(
                q[step], k[step], v[step], g, beta, initial_state=pool, rounding_seed=rounding, **common
            )
    wanted = exact[1].double()

    def error(pool: Tensor) -> float:
        return float((pool[1].double() - wanted).norm() / wanted.norm())

    assert error(nearest) > 1.0
    assert error(noisy) < 0.2
    assert abs(float((noisy[1].double() * wanted).sum() / wanted.square().sum()) - 1) < 0.02


def test_a_replayed_graph_reads_the_seed(device: torch.device) -> None:
    arguments = decode(device, Case(state_dtype=BF16, lengths=(1,) * 5, offsets_dtype=None))
    seed = torch.tensor([5], device=device)
    fresh, found = copy_of(arguments["ssm_state"]), []
    gdn.fused_gdn_decode(**arguments, rounding_seed=seed, backend="cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gdn.fused_gdn_decode(**arguments, rounding_seed=seed, backend="cute")
    windows = copy_of(arguments["conv_state"])
    for value in (5, 6, 5):
        seed.fill_(value)
        arguments["ssm_state"].copy_(fresh)
        arguments["conv_state"].copy_(windows)
        graph.replay()
        found.append(arguments["ssm_state"].clone())
    assert same_bits(found[0], found[2]) and not same_bits(found[0], found[1])
