"""The compiled kernels of the fused prefill step take what its launch hands them, as far as they can be called without a GPU; and
which form of it is chosen."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn.device import H100
from gdn.ops.layer_step.problem import GdnPrefillParams, GdnPrefillProblem
from tests.compile import fake_cuda
from tests.compile.variants.base import example

module: Any = pytest.importorskip("kernels_cute.gdn_prefill", reason="needs the CuTe DSL")

H, HV, ROWS = 2, 4, 70
SMALL = {"num_k_heads": H, "num_v_heads": HV, "head_k_dim": 128, "head_v_dim": 128, "num_tokens": ROWS, "num_sequences": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "interleaved": {"interleaved": True, "z_dtype": None, "a_dtype": None},
    "merged": {"merged": True, "z_dtype": None, "a_dtype": None},
    "flat, checkpoints": {"has_checkpoints": True, "index_dtype": "int64", "has_mask": False},
    "interleaved, kept states": {
        "interleaved": True,
        "z_dtype": None,
        "a_dtype": None,
        "has_checkpoints": True,
        "checkpoint_state_dtype": "bfloat16",
    },
}


def params_of(problem: GdnPrefillProblem, num_bytes: int) -> GdnPrefillParams:
    """A call of 70 tokens in two sequences, as the operator hands it over."""
    dim, V = problem.dim, problem.head_v_dim
    wide = torch.randn(ROWS, dim + HV * V).bfloat16()
    ba, indices = torch.randn(ROWS, 2 * HV).bfloat16(), getattr(torch, problem.index_dtype)
    own: dict[str, Any] = {"A_log": torch.randn(HV),
        "mixed_qkv": wide[:, :dim], "z": wide[:, dim:].unflatten(1, (HV, V)), "b": ba[:, :HV], "a": ba[:, HV:],
        "conv_states": torch.randn(9, 3, dim).bfloat16().mT, "conv_weight": torch.randn(dim, 4).bfloat16(),
        "dt_bias": torch.randn(HV), "norm_weight": torch.randn(V).bfloat16(), "ssm_state": torch.randn(9, HV, V, V),
        "state_indices": torch.tensor([5, 2]).to(indices), "cu_seqlens": torch.tensor([0, 2, ROWS], dtype=torch.int32),
        "has_initial_state": torch.ones(2, dtype=torch.bool) if problem.has_mask else None,
        "out": torch.zeros(ROWS, HV, V).bfloat16(), "workspace": fake_cuda.workspace(num_bytes), "scale": 0.1, "eps": 1e-6,
        "null_slot": -1,
    }  # fmt: skip
    if problem.interleaved or problem.merged:
        own |= {"mixed_qkv": wide, "z": None, "b": ba, "a": None}
    if problem.has_checkpoints:
        own["checkpoint_offsets"] = torch.zeros(2, 3, dtype=torch.int32)
        own["checkpoint_slots"] = torch.zeros(2, 3, dtype=indices)
    if problem.checkpoint_state_dtype is not None:
        own["checkpoint_states"] = torch.zeros(7, HV, V, V, dtype=getattr(torch, problem.checkpoint_state_dtype))
    return GdnPrefillParams(**{name: own.get(name) for name in GdnPrefillParams._fields})


@pytest.mark.cover
@fake_cuda.NO_GPU
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("beside", "flat"), ("beside", "interleaved"), ("beside", "flat, checkpoints"), ("normed", "flat"),
        ("normed", "interleaved"), ("normed", "flat, checkpoints"), ("normed", "interleaved, kept states"),
        ("short", "flat"), ("short", "merged"), ("short", "interleaved, kept states"), ("beside, one token", "flat"),
        ("beside, one token", "merged"), ("beside, one token", "interleaved, kept states"),
        *(("in turn", layout) for layout in LAYOUTS),
        *(("apart", layout) for layout in LAYOUTS if "kept" not in layout),
    ],
)  # fmt: skip
def test_every_entry_takes_its_arguments(form: str, layout: str, tmp_path: Path) -> None:
    dims = dict.fromkeys(("head_k_dim", "head_v_dim"), 96 if form == "apart" else 128)
    problem = example("gdn_prefill", **SMALL | LAYOUTS[layout] | dims)
    config = next(one for one in module.configs(problem, H100) if bool(one.num_conv_blocks) == form.startswith("beside"))
    config = dataclasses.replace(config, split_if_longest_exceeds=0, split_chunks=0, max_short_tokens=int("one token" in form))
    if form in ("normed", "short"):
        tiles = {"conv_rows": 16, "conv_threads": 64, "norm_in_chunk": 1, "max_short_tokens": 64 * (form == "short"), "stages": 4}
        config = dataclasses.replace(config, **tiles, prefetch=0, num_four_sm_clusters=0, max_l2_ring_groups=0)
    assert module.fits(problem, config, H100)
    kernel = fake_cuda.compile_and_load(module, "cute", problem, config, tmp_path)
    entries = fake_cuda.refused(module, kernel, params_of(problem, module.workspace_bytes(problem, config)))
    assert entries[0].startswith("gdn_cute_prefill") and len(entries) == (5 if form == "apart" else 1)


def chosen(heads: tuple[int, int], tokens: int, sequences: int, **changes: Any) -> Any:
    sizes = {"num_k_heads": heads[0], "num_v_heads": heads[1], "num_tokens": tokens, "num_sequences": sequences}
    problem = example("gdn_prefill", **sizes | changes)
    config = module.default_config(problem, H100)
    assert module.fits(problem, config, H100)
    return config


@pytest.mark.parametrize("tokens", [1024, 8192])
def test_side_by_side_where_the_chunk_kernel_leaves_sms_idle(tokens: int) -> None:
    config = chosen((16, 32), tokens, 1)
    assert (config.num_conv_blocks, config.conv_rows, config.num_persistent_clusters) == (46, 16, 0)
    assert config.num_conv_blocks + 2 * 32 <= H100.num_sms


@pytest.mark.parametrize(("tokens", "sequences"), [(8128, 2), (8192, 8), (65536, 32)])
def test_heads_of_several_sequences_take_turns(tokens: int, sequences: int) -> None:
    config = chosen((16, 32), tokens, sequences)
    assert (config.num_conv_blocks, config.conv_rows, config.num_persistent_clusters) == (46, 16, 32)


@pytest.mark.parametrize(
    ("heads", "tokens", "sequences", "changes"),
    [
        ((4, 8), 8192, 1, {}),  # segments are faster, and take all SMs
        ((2, 4), 200, 1, {}),  # short
        *(((16, 32), tokens, count, {}) for tokens, count in ((8192, 128), (16384, 256))),  # short ones
        ((16, 64), 8192, 1, {}),
        ((16, 32), 8192, 1, {"head_k_dim": 64, "head_v_dim": 64}),
        ((16, 32), 8192, 1, {"head_k_dim": 96, "head_v_dim": 96}),
    ],
)
def test_not_side_by_side_elsewhere(heads: tuple[int, int], tokens: int, sequences: int, changes: dict[str, Any]) -> None:
    assert chosen(heads, tokens, sequences, **changes).num_conv_blocks == 0


@pytest.mark.parametrize(
    "change",
    [
        {"num_conv_blocks": 45}, {"num_conv_blocks": 132}, {"num_persistent_clusters": 44}, {"stages": 3}, {"prefetch": 2},
        {"conv_rows": 24}, {"conv_rows": 128}, {"conv_threads": 32}, {"split_chunks": 16}, {"num_four_sm_clusters": 28},
        {"norm_in_chunk": 1}, {"state_heads": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_side_by_side(change: dict[str, int]) -> None:
    """Half a cluster, no SM left, more clusters than SMs are left, forms without words, tiles that are no part of a chunk."""
    problem = example("gdn_prefill", num_tokens=8192, num_sequences=1)
    config = module.default_config(problem, H100)
    assert module.fits(problem, config, H100) and config.num_conv_blocks == 46
    assert not module.fits(problem, dataclasses.replace(config, **change), H100)


def test_words_of_a_call_fit_into_its_workspace() -> None:
    """The highest number of a chunk of ragged lengths is below the count, and the rows follow the words."""
    from kernels_cute.gdn_prefill import parts, side_by_side

    for lengths in ((1,) * 9, (64, 0, 64), (63, 65, 1), (8192,), (5, 4000, 0, 77)):
        starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        chunks = [(start, n, j) for n, start in enumerate(starts[:-1]) for j in range(-(-lengths[n] // 64))]
        numbers = [start // 64 + n + j for start, n, j in chunks]
        count = side_by_side.words(sum(lengths), len(lengths), 0)
        assert len(set(numbers)) == len(numbers) and max(numbers) < count
    problem = example("gdn_prefill", num_tokens=8192, num_sequences=1)
    config = module.default_config(problem, H100)
    words = side_by_side.words_bytes(side_by_side.words(8192, 1, 32))
    assert words % 256 == 0 and module.workspace_bytes(problem, config) == words + parts.rows_bytes(problem)
