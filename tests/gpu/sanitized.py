"""Small calls of every kernel, for compute-sanitizer: python3 -m tests.gpu.sanitized <group> [<call> ...].

Judged too: a tool that slows a kernel down a hundredfold shows hazards that a fast run hides. Where an oracle runs token by
token, it does so on the CPU, where the tool does not see it. Most calls are those of the other tests, at their small sizes,
with what is around their tensors.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from gdn.ops.delta_rule.inputs import chunk_problem, recurrent_problem
from gdn.ops.delta_rule.oracle import oracle_of
from gdn.testing.compare import token_error
from tests.context_calls import parts_call, start_call, total_call
from tests.gpu import (
    cases,
    test_chunk_summary,
    test_context_kernels,
    test_gdn_decode,
    test_gdn_prefill,
    test_indexer_steps,
    test_indexer_topk,
    test_mqa_logits,
    test_paged_mqa_logits,
    test_recurrent,
    test_recurrent_tree,
    test_rounding,
    test_sparse_attention,
    test_sparse_attention_prefill,
    test_steps,
    test_topk,
)
from tests.gpu.chunk import FUNCTION, arguments_of
from tests.gpu.chunk_forms import FORMS, FOUR_SM
from tests.gpu.conftest import force_fields
from tests.gpu.delta_rule import Arguments, copied, run

Call = Callable[[], Any]

_LONGEST = 257
RAGGED: dict[str, Any] = {"lengths": [130, 0, 1, 64, _LONGEST, 63], "null_sequences": [3], "padded_tokens": 10}
_RAW = {"gate_dtype": "bfloat16", "use_gate": True, "beta_dtype": "bfloat16", "use_beta_sigmoid": True}
_POOL: tuple[dict[str, Any], dict[str, Any]] = ({**cases.MAIN, **_RAW, "has_mask": True}, RAGGED)
CHUNKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of the problem, its inputs
    "pool": _POOL,
    "64": ({**cases.MAIN, "head_k_dim": 64, "head_v_dim": 64, "has_mask": True}, RAGGED),
    "long": ({**cases.MAIN}, {"lengths": [1300]}),  # few heads: split
    "many": ({**cases.MAIN, "num_q_heads": 8, "num_k_heads": 8, "num_v_heads": 8}, {"lengths": [70, 3, 64] * 8}),
    "checkpoints": ({**cases.MAIN, "has_checkpoints": True}, RAGGED),
}
_KEY_HEAD: tuple[dict[str, Any], dict[str, Any]] = ({**cases.MAIN, **_RAW, "num_v_heads": 4, "has_mask": True}, RAGGED)
PADDED: tuple[dict[str, Any], dict[str, Any]] = ({**cases.MAIN, "head_k_dim": 100, "head_v_dim": 100}, RAGGED)


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _judged(function: str, arguments: Arguments, backend: str) -> None:
    """Checks against the oracle, loosely; `rounding_seed` changes what is stored and not o."""
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in copied(arguments).items()}
    expected = oracle_of({name: x for name, x in on_cpu.items() if name not in ("out", "rounding_seed")})
    o, _ = run(function, arguments, backend)
    found = token_error(o.cpu(), expected.o, expected.offsets)
    assert found.within(0.02, 0.1), f"{found}"


def chunk(backend: str, call: tuple[dict[str, Any], dict[str, Any]], **forced: Any) -> None:
    """forced: fields of the configuration, where it is not the default."""
    fields, inputs = call
    with pytest.MonkeyPatch.context() as patch:
        if forced:
            force_fields(patch, **forced)
        _judged(FUNCTION, arguments_of(chunk_problem(**fields), _cuda(), **inputs), backend)


def chunk_summary(name: str) -> None:
    test_chunk_summary.test_variants(name, _cuda())


def recurrent(backend: str, *, rounded: bool = False, tree: bool = False) -> None:
    if rounded:
        arguments = test_rounding.recurrent(_cuda(), True, True, 128)
        arguments["rounding_seed"] = torch.tensor([3], device="cuda")
        return _judged(test_recurrent.FUNCTION, arguments, backend)
    if tree:
        problem = recurrent_problem(**{**cases.MAIN, **test_recurrent_tree.TREE})
        return _judged(test_recurrent.FUNCTION, test_recurrent_tree.arguments_of(problem, "binary", _cuda()), backend)
    for problem in (cases.MAIN_RECURRENT, cases.MAIN_SPECULATIVE):
        _judged(test_recurrent.FUNCTION, test_recurrent.arguments_of(problem, _cuda()), backend)


def decode(**changes: Any) -> None:
    test_gdn_decode.run(test_gdn_decode.Case(**changes), _cuda())


def prefill(form: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_gdn_prefill.force_form(patch, form)
        test_gdn_prefill.run(test_gdn_prefill.Case(), _cuda())


def rounded_decode() -> None:
    test_rounding.test_general("decode-drafts", "cute", 0, _cuda())


def topk(columns: int, sorted_by: str, dtype: torch.dtype) -> None:
    rows = test_topk.between_guards(test_topk.adversarial(columns, 512, dtype))
    test_topk.check(rows, 512, sorted_by=sorted_by)


def steps() -> None:
    device, case = _cuda(), test_steps.Case()
    test_steps.run_prefill(case, device)
    test_steps.run_prefill(case, device, checkpoints=2)
    test_steps.run_decode(replace(case, lengths=test_steps.DECODE), device)
    test_steps.run_decode(replace(case, lengths=test_steps.DECODE), device, spec=4, tree=True)
    test_steps.test_split(7, (2, 6), (60, 100), torch.bfloat16, device)
    test_steps.test_gating(9, 6, device)
    test_steps.test_rms_norm_gated(100, "silu", device)
    test_steps.test_add_rms_norm(40, True, device)
    test_steps.test_add_rms_norm_with_a_layer_scale(40, torch.float32, device)


def indexer_steps() -> None:
    device = _cuda()
    test_indexer_steps.test_quantize_bit_for_bit(300, 128, torch.bfloat16, device)
    test_indexer_steps.test_write_bit_for_bit(37, 2, torch.uint8, torch.float16, 64, device)
    for case in test_indexer_steps.CASES[:6]:
        test_indexer_steps.check_prepared(case)
    test_indexer_steps.test_gather_bit_for_bit([0, 33, 0, 0, 5, 64, 1, 0], 2, 64, 16, torch.uint8, device)
    test_indexer_steps.test_compress("continued", 4, 12, 2, 64, torch.uint8, torch.float16, device)
    test_indexer_steps.test_compress("prompts", 4, 8, None, 128, torch.float8_e4m3fn, torch.bfloat16, device)


def context(dims: tuple[int, int], v_first: bool) -> None:
    """Every form of a launch, with few heads."""
    few: dict[str, Any] = {"heads": 2, "dims": dims}
    calls = [parts_call([1000, 0, 64], 2, torch.int32), parts_call([130], 1, torch.int64)]
    calls += [total_call(rank, 2, segments, v_first, **few) for rank in (0, 1) for segments in (1, 3)]
    calls += [start_call(2, 4, 2, segments, v_first, final, **few) for final in (None, "rows", "pool") for segments in (1, 3)]
    calls += [start_call(0, 3, 2, 1, v_first, "pool", **few), start_call(1, 2, 2, 2, v_first, "ends here", **few)]
    for call in calls:
        test_context_kernels.check(call, _cuda())


def expand() -> None:
    for tokens, k, ratio in ((33, 513, 4), (5, 5000, 3), (9, 1, 1)):
        test_indexer_steps.test_expand(tokens, k, ratio, torch.int32, _cuda())


def _wide(form: str, call: tuple[dict[str, Any], dict[str, Any]] = _POOL, **changes: int) -> Call:
    return partial(chunk, "cute", call, **(FORMS[form].fields or {}) | changes)


def _logits(backend: str) -> dict[str, Call]:
    return {
        "ragged-fp8": partial(test_mqa_logits.test_exact, backend, "h64-fp8", "hard"),
        "ragged-bf16": partial(test_mqa_logits.test_exact, backend, "h16-bf16", "sequences"),
        "paged-fp8": partial(test_paged_mqa_logits.test_exact, backend, "h64-fp8-p64-n2", 16),
        "paged-bf16": partial(test_paged_mqa_logits.test_exact, backend, "h16-bf16-p544", 16),
    }


_TOPK: dict[str, Call] = {  # rows in the registers of a block, and in pieces
    "topk": partial(topk, 2049, "index", torch.float32),
    "topk-by-score": partial(topk, 7001, "score", torch.bfloat16),
    "topk-any": partial(topk, 40001, "score", torch.float32),
}
_ONE_BLOCK = partial(decode, heads=(16, 32), lengths=(1,) * 8, offsets_dtype=None)  # a head in a block: no sum crosses blocks
_ATTENTION: dict[str, Call] = {
    **{
        f"decode-{backend}-{name}": partial(test_sparse_attention.test_exact, backend, variant, 300)
        for backend in test_sparse_attention.BACKENDS
        for name, variant in (("bf16", "16/2"), ("fp16", "24/2-fp16-272"))
    },
    "decode-one": partial(test_sparse_attention.test_one_sequence, "cute", "16/2"),
    "decode-all": partial(test_sparse_attention.test_all_positions, "cute", "16/2"),
    "prefill": partial(test_sparse_attention_prefill.test_exact, "cute", "16/2", "ragged"),
}
# What one process runs: starting it under the tool takes longer than most calls.
GROUPS: dict[str, dict[str, Call]] = {
    "chunk-cute": {
        **{name: partial(chunk, "cute", call) for name, call in (CHUNKS | {"padded": PADDED}).items()},
        "key-head": partial(chunk, "cute", _KEY_HEAD, **FORMS["key-head-3"].fields or {}),
    },
    "chunk-cute-summary": {name: partial(chunk_summary, name) for name in test_chunk_summary.VARIANTS},
    "chunk-cute-wide": {form: _wide(form) for form in FOUR_SM} | {"many": _wide("both", CHUNKS["many"])},
    "chunk-cute-choice": {
        name: _wide("both", split_chunks=2, split_if_longest_exceeds=tokens)
        for name, tokens in (("cut", _LONGEST - 1), ("whole", _LONGEST))
    },
    "chunk-tilelang": {
        "pool": partial(chunk, "tilelang", _POOL, split_chunks=2),
        "64": partial(chunk, "tilelang", CHUNKS["64"]),
        "long": partial(chunk, "tilelang", CHUNKS["long"], split_chunks=3),
        "checkpoints": partial(chunk, "tilelang", CHUNKS["checkpoints"], split_chunks=2),
    },
    "chunk-tilelang-one": {
        name: partial(chunk, "tilelang", CHUNKS[name], split_chunks=0, cluster_size=cluster)
        for name, cluster in (("pool", 3), ("many", 4), ("checkpoints", 2))
    }
    | {
        name: partial(chunk, "tilelang", _POOL, split_chunks=2, cluster_size=3, split_if_longest_exceeds=tokens)
        for name, tokens in (("cut", _LONGEST - 1), ("whole", _LONGEST))
    },
    "decode": {
        "recurrent-cute": partial(recurrent, "cute"),
        "recurrent-cute-tree": partial(recurrent, "cute", tree=True),
        "recurrent-cute-rounded": partial(recurrent, "cute", rounded=True),
        "recurrent-tilelang": partial(recurrent, "tilelang"),
        "fused": decode,
        "fused-one-block": _ONE_BLOCK,
        "fused-row": partial(decode, layout="concatenated"),  # as the layer calls it
        "fused-drafts": partial(decode, spec=3, dims=(64, 128)),
        "fused-wide": partial(decode, dims=(256, 256), layout="interleaved"),
        "fused-rounded": rounded_decode,
    },
    "prefill": {form: partial(prefill, form) for form in ("apart", "side by side", "normed, few clusters", "normed, short")},
    "logits-cute": _logits("cute"),
    "logits-tilelang": _logits("tilelang"),
    "indexer": {
        "topk-of-logits": partial(test_indexer_topk.test_ragged, 40, 3000, "sequences", "cute"),
        "topk-of-pages": partial(test_indexer_topk.test_paged, 2, True, True, "cute"),
        **_TOPK,
        "steps": indexer_steps,
        "expand": expand,
    },
    "attention": _ATTENTION,
    "context": {
        f"{dims[0]}-{'v' if v_first else 'k'}-first": partial(context, dims, v_first)
        for dims in test_context_kernels.DIMS
        for v_first in (False, True)
    },
    "steps": {"steps": steps},
    "shared": {
        **_TOPK,
        "expand": expand,
        "fused-one-block": _ONE_BLOCK,
        "recurrent-tilelang": partial(recurrent, "tilelang"),
    },
}


def main(group: str, *names: str) -> None:
    """The calls of a group, or those of them that are named."""
    for name in names or GROUPS[group]:
        try:
            GROUPS[group][name]()
            torch.cuda.synchronize()
        except Exception as error:
            raise RuntimeError(f"{group}: {name}") from error


if __name__ == "__main__":
    main(*sys.argv[1:])
