"""A call of every operator that runs a kernel, for rules that all keep. Those written here have the fields that other tests have
compiled; an operator that none is written for has its plain one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gdn.core.call import operator_named
from gdn.ops.indexer.inputs import make_mqa_inputs, make_paged_inputs
from gdn.runtime import registry
from tests.described import plain
from tests.gpu import (
    attention,
    cases,
    chunk,
    test_chunk_summary,
    test_gdn_decode,
    test_gdn_prefill,
    test_indexer_steps,
    test_mqa_logits,
    test_paged_mqa_logits,
    test_recurrent,
    test_replay_step,
    test_steps,
)
from tests.gpu.delta_rule import Arguments, backends
from tests.gpu.replay_step import Step

Tensor = torch.Tensor
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Call:
    function: str
    op: str  # in the registry: of its kernels
    make: Callable[[torch.device], Arguments]
    pools: tuple[str, ...] = ()  # written, whatever else the call writes
    weights: tuple[str, ...] = ()  # a model's parameters

    @property
    def backends(self) -> list[str]:
        return [*backends(self.op), "reference"]


def fused_decode(case: test_gdn_decode.Case, **changes: torch.dtype) -> Callable[[torch.device], Arguments]:
    """changes: dtypes of arguments."""

    def make(device: torch.device) -> Arguments:
        arguments, _ = test_gdn_decode.make(case, device)
        return arguments | {name: arguments[name].to(dtype) for name, dtype in changes.items()}

    return make


def mqa(device: torch.device, variant: str, rows: int = 67, keys: int = 300, **options: Any) -> Arguments:
    """options: seed and ranges of the inputs."""
    problem = test_mqa_logits.problem_of(variant, rows, keys)
    inputs = make_mqa_inputs(problem, device, poison=False, **options)
    names = ("q", "k", "weights", "cu_seqlen_ks", "cu_seqlen_ke", "k_scale")
    return {name: getattr(inputs, name) for name in names} | {
        "scale": test_mqa_logits.SCALE, "out_dtype": getattr(torch, problem.out_dtype), "relu": problem.relu,
    }  # fmt: skip


def paged(device: torch.device, variant: str, lengths: Sequence[int], longest: int) -> Arguments:
    problem = test_paged_mqa_logits.problem_of(variant, len(lengths), longest)
    inputs = make_paged_inputs(problem, device, lengths=test_paged_mqa_logits.lengths_of(problem, list(lengths)))
    return inputs.arguments() | {
        "scale": test_paged_mqa_logits.SCALE, "out_dtype": getattr(torch, problem.out_dtype), "relu": problem.relu,
    }  # fmt: skip


_LENGTHS = (300, 0, 17, 64, 299)


def _topk(device: torch.device) -> Arguments:
    source = torch.Generator(device).manual_seed(3)
    return {"logits": torch.randn(20, 900, device=device, generator=source), "k": 512}


def _attention(new: list[int], most: int, *, dense: bool = False) -> Callable[[torch.device], Arguments]:
    """Queries at the ends of sequences; most: of a sequence, which decides between decode and prefill."""

    def make(device: torch.device) -> Arguments:
        lengths = [max(count, length) for count, length in zip(new, (90, 1, 33, 0, 40), strict=True)]
        inputs = attention.make_inputs(attention.Variant(16, 2, has_gate=True), lengths, new, 32, dense=dense)
        arguments = {name: x for name, x in inputs.arguments.items() if x is not None}
        return arguments | {"max_query_len": most, "return_lse": True}

    return make


def _maker(device: torch.device, seed: int) -> test_steps.Maker:
    return test_steps.Maker(test_steps.Case(), device, seed)


def gating(device: torch.device, rows: int = 9, seed: int = 0, A_log: torch.dtype = F32, dt_bias: torch.dtype = F32) -> Arguments:
    """A_log, dt_bias: dtypes."""
    of = _maker(device, seed)
    a, b = of.normal(rows, 32), of.normal(rows, 32)
    return {"A_log": of.normal(32, dtype=A_log), "a": a, "b": b, "dt_bias": of.normal(32, dtype=dt_bias)}


def norm(
    device: torch.device, rows: int = 7, seed: int = 0, x: torch.dtype = BF16, z: torch.dtype = BF16, weight: torch.dtype = F32
) -> Arguments:
    """x, z, weight: dtypes."""
    of, shape = _maker(device, seed), (rows, 4, 128)
    return {"x": of.normal(*shape, dtype=x), "z": of.normal(*shape, dtype=z), "weight": of.normal(128, dtype=weight)}


def add_norm(device: torch.device, rows: int = 7, seed: int = 0) -> Arguments:
    of = _maker(device, seed)
    return {"x": of.normal(rows, 2048), "residual": of.normal(rows, 2048), "weight": of.normal(2048)}


def first_norm(device: torch.device, rows: int = 7, seed: int = 0) -> Arguments:
    return add_norm(device, rows, seed) | {"residual": None}


def _add_norm_scaled(device: torch.device) -> Arguments:
    arguments = add_norm(device)
    return arguments | {"layer_scale": 0.5 * arguments["weight"]}


def split(device: torch.device, rows: int = 7, seed: int = 0) -> Arguments:
    of = _maker(device, seed)
    sizes = {"num_heads_qk": 16, "num_heads_v": 32, "head_qk": 128, "head_v": 128}
    return {"mixed_qkvz": of.normal(rows, 2 * 16 * 128 + 2 * 32 * 128), "mixed_ba": of.normal(rows, 64)} | sizes


def quantized(device: torch.device, rows: int = 9, seed: int = 1) -> Arguments:
    return {"x": test_indexer_steps.normal(rows, 128, seed=seed, device=device), "group_size": 128}


def _prepare(device: torch.device) -> Arguments:
    arguments = test_indexer_steps.call_of(test_indexer_steps.Case())
    arguments["positions"].clamp_(max=arguments["cos_sin"].shape[0] - 1)
    return arguments


_CONV = ("weight", "bias")
_DECODE = ("conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight")
_POOLS = ("conv_state", "ssm_state")
# One of those that the decode's own tests compile: weights, norm and gates in float32, with a bias.
WIDE_DECODE = next(
    case for case in test_gdn_decode.CASES
    if case.weight_dtype == case.other_dtype == F32 and case.layout == "flat" and case.bias_dtype is not None
)  # fmt: skip
WIDE_CONV = next(case for case in test_steps.CASES if case.weight_dtype == F32 and case.bias_dtype is not None)


def _streamed(form: str, state_dtype: torch.dtype) -> Callable[[torch.device], Arguments]:
    """With a ring, and items for all SMs: the form that streams states."""
    case = test_gdn_decode.Case(heads=(16, 32), dims=(128, 128), v_first=True, state_dtype=state_dtype)
    return lambda device: Step(case=case, **test_replay_step.FORMS[form]).arguments(device)[0]


def _ring_in_registers(device: torch.device) -> Arguments:
    """With a ring and drafts of few sequences and heads: the form that holds states in registers."""
    case = test_gdn_decode.Case(heads=(2, 4), dims=(128, 128), v_first=True, state_dtype=F32)
    form = test_replay_step.FORMS["drafts"]
    return Step(case=case, **form | {"members": form["members"][:5]}).arguments(device)[0]


_RAW_CHUNK = next(problem for problem in cases.chunk_problems() if problem.use_gate and problem.pooled)
_RAW_RECURRENT = next(problem for problem in cases.recurrent_problems() if problem.use_gate and problem.pooled)

CALLS = {
    "chunk": Call(
        chunk.FUNCTION, "chunk", lambda device: chunk.arguments_of(cases.MAIN_CHUNK, device, lengths=[65, 0, 130, 1]),
        ("initial_state",),
    ),
    "chunk, raw gates": Call(
        chunk.FUNCTION, "chunk", lambda device: chunk.arguments_of(_RAW_CHUNK, device, lengths=[65, 0, 130, 1]),
        ("initial_state",), ("A_log", "dt_bias"),
    ),
    "chunk summary": Call(
        "chunk_summary", "chunk_summary",
        lambda device: test_chunk_summary.make(test_chunk_summary.problem_of(), device), (), ("A_log", "dt_bias"),
    ),
    "recurrent": Call(
        test_recurrent.FUNCTION, "recurrent", lambda device: test_recurrent.arguments_of(cases.MAIN_SPECULATIVE, device),
        ("initial_state",),
    ),
    "recurrent, raw gates": Call(
        test_recurrent.FUNCTION, "recurrent", lambda device: test_recurrent.arguments_of(_RAW_RECURRENT, device),
        ("initial_state",), ("A_log", "dt_bias"),
    ),
    "decode": Call("fused_gdn_decode", "gdn_decode", fused_decode(test_gdn_decode.Case()), _POOLS, _DECODE),
    "decode, one projection": Call(
        "fused_gdn_decode", "gdn_decode", fused_decode(test_gdn_decode.Case(layout="concatenated")), _POOLS, _DECODE
    ),
    "decode, two projections": Call(
        "fused_gdn_decode", "gdn_decode", fused_decode(test_gdn_decode.Case(layout="merged")), _POOLS, _DECODE
    ),
    "decode, drafts": Call(  # several tokens of a sequence at once
        "fused_gdn_decode", "gdn_decode", fused_decode(test_gdn_decode.Case(dims=(128, 128), spec=3)), _POOLS, _DECODE
    ),
    "decode, ring": Call("fused_gdn_decode", "gdn_decode", _streamed("drafts", F32), (*_POOLS, "ring"), _DECODE),
    "decode, ring, bfloat16": Call("fused_gdn_decode", "gdn_decode", _streamed("one", BF16), (*_POOLS, "ring"), _DECODE),
    "decode, ring in registers": Call("fused_gdn_decode", "gdn_decode", _ring_in_registers, (*_POOLS, "ring"), _DECODE),
    "decode, float32": Call("fused_gdn_decode", "gdn_decode", fused_decode(WIDE_DECODE), _POOLS, _DECODE),
    "decode, bfloat16": Call(
        "fused_gdn_decode", "gdn_decode", fused_decode(test_gdn_decode.Case(), A_log=BF16), _POOLS, _DECODE
    ),
    "prefill": Call(
        "fused_gdn_prefill", "gdn_prefill", lambda device: test_gdn_prefill.make(test_gdn_prefill.Case(), device),
        test_gdn_prefill.POOLS, _DECODE,
    ),
    "prefill, two projections": Call(
        "fused_gdn_prefill", "gdn_prefill",
        lambda device: test_gdn_prefill.make(test_gdn_prefill.Case(dims=(128, 128), layout="merged"), device),
        test_gdn_prefill.POOLS, _DECODE,
    ),
    "conv": Call(
        "causal_conv1d_fn", "conv1d", lambda device: test_steps.prefill(test_steps.Case(), device), ("conv_states",), _CONV
    ),
    "conv, float32": Call(
        "causal_conv1d_fn", "conv1d", lambda device: test_steps.prefill(WIDE_CONV, device), ("conv_states",), _CONV
    ),
    "update": Call(
        "causal_conv1d_update", "conv1d_update",
        lambda device: test_steps.decode(test_steps.Case(lengths=test_steps.DECODE), device, spec=4), ("conv_state",), _CONV,
    ),
    "update, float32": Call(
        "causal_conv1d_update", "conv1d_update",
        lambda device: test_steps.decode(
            test_steps.replace(WIDE_CONV, lengths=test_steps.DECODE), device, spec=4
        ), ("conv_state",), _CONV,
    ),
    "gating": Call("fused_gdn_gating", "gating", gating, (), ("A_log", "dt_bias")),
    "gating, bfloat16": Call("fused_gdn_gating", "gating", partial(gating, A_log=BF16), (), ("A_log", "dt_bias")),
    "split": Call("fused_qkvzba_split_reshape_cat", "split", split),
    "add norm": Call("add_rms_norm", "add_rms_norm", add_norm, (), ("weight",)),
    "add norm, layer scale": Call("add_rms_norm", "add_rms_norm", _add_norm_scaled, (), ("weight", "layer_scale")),
    "norm of the first layer": Call("add_rms_norm", "add_rms_norm", first_norm, (), ("weight",)),
    "norm, float32": Call("rms_norm_gated", "rms_norm_gated", norm, (), ("weight",)),
    "norm, bfloat16": Call("rms_norm_gated", "rms_norm_gated", partial(norm, x=F16, z=F32, weight=BF16), (), ("weight",)),
    "mqa, fp8": Call("mqa_logits", "mqa_logits", partial(mqa, variant="h64-fp8")),
    "mqa, bfloat16": Call("mqa_logits", "mqa_logits", partial(mqa, variant="h16-bf16")),
    "paged": Call("paged_mqa_logits", "paged_mqa_logits", partial(paged, variant="h64-fp8-p64", lengths=_LENGTHS, longest=300)),
    "topk": Call("topk_indices", "topk", _topk),
    "sparse decode": Call("sparse_attention", "sparse_attention_decode", _attention([1, 1, 3, 0, 8], 8)),
    "sparse prefill": Call("sparse_attention", "sparse_attention_prefill", _attention([90, 1, 20, 0, 8], 90)),
    "dense decode": Call("attention", "sparse_attention_decode", _attention([1, 1, 3, 0, 8], 8, dense=True)),
    "dense prefill": Call("attention", "attention_prefill", _attention([90, 1, 20, 0, 8], 90, dense=True)),
    "prepare": Call("prepare_indexer", "prepare_indexer", _prepare, ("cache",), ("q_norm", "k_norm")),
    "quantize": Call("quantize_fp8", "quantize_fp8", quantized),
}  # fmt: skip

_ELSEWHERE = {  # tests.gpu.test_streams has their calls
    "write_indexer_cache", "gather_indexer_cache", "compress_indexer_keys", "expand_topk_groups", "fold_states",
    "accept_draft_tree",
}  # fmt: skip


def _plain(op: str) -> Call:
    function = registry.operator(op).functions[0]
    pools = tuple(name for name in operator_named(function).writes if name != "out")
    return Call(function, op, lambda device: plain.on_device(op, device, 9), pools)


_MISSING = {one.name for one in registry.with_kernels()} - {call.op for call in CALLS.values()} - _ELSEWHERE
CALLS |= {op: _plain(op) for op in sorted(_MISSING)}


def every_call() -> list[tuple[str, str]]:
    """Names of calls, each with each backend that serves it."""
    return [(name, backend) for name, call in CALLS.items() for backend in call.backends]
