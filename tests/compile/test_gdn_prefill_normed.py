"""The prefill step with the norm in the chunk kernel, without a GPU: machine code, shared memory, what it serves."""

import dataclasses
from typing import Any

import pytest

from gdn.device import H100
from gdn.testing import machine_code
from tests.compile.test_gdn_prefill_calls import LAYOUTS
from tests.compile.variants.base import example

module: Any = pytest.importorskip("kernels_cute.gdn_prefill", reason="needs the CuTe DSL")

_CHUNK_REGISTERS = 65536 // 512


def _problem(tokens: int, sequences: int, **changes: Any) -> Any:
    return example("gdn_prefill", num_tokens=tokens, num_sequences=sequences, **changes)


def _normed(problem: Any) -> Any:
    """The configuration of a full batch, with a cluster for every work tile where there are few."""
    found = module.configs(_problem(8192, 32), H100)
    config = next(one for one in found if one.norm_in_chunk and not one.max_short_tokens)
    clusters = config.num_persistent_clusters if problem.num_sequences > 1 else 0
    return dataclasses.replace(config, num_persistent_clusters=clusters)


_HALF = {"dtype": "float16", "z_dtype": "float16", "norm_dtype": "bfloat16"}
_OTHERS = {
    "conv_dtype": "float32",
    "gate_sigmoid": True,
    "state_dtype": "bfloat16",
    "state_v_first": False,
    "bias_dtype": "float32",
}
_VARIANTS = [
    (8192, 32, {}), (1024, 1, LAYOUTS["interleaved"]), (8192, 32, LAYOUTS["interleaved"]),
    (8192, 32, LAYOUTS["flat, checkpoints"]), (1024, 1, LAYOUTS["flat, checkpoints"]), (8192, 32, _HALF),
    (1024, 1, _HALF | _OTHERS), (8192, 32, {"conv_channels_contiguous": False}),
]  # fmt: skip


@pytest.mark.cover
@pytest.mark.parametrize(("tokens", "sequences", "changes"), _VARIANTS)
def test_machine_code(tokens: int, sequences: int, changes: dict[str, Any]) -> None:
    """No spills, as many products as without the norm and none made one after the other, and the sums to the other block."""
    problem = _problem(tokens, sequences, **changes)
    config = _normed(problem)
    assert module.fits(problem, config, H100)
    assert bool(config.num_persistent_clusters) == (sequences > 1)
    ((entry, library),) = module.compile(problem, config).items()
    assert entry == "gdn_cute_prefill_normed"
    chunk, conv = sorted(machine_code.kernels(library), key=lambda kernel: -kernel.count("HGMMA"))
    assert chunk.spills == conv.spills == 0 and chunk.stack_bytes == conv.stack_bytes == 0
    assert chunk.registers == _CHUNK_REGISTERS
    assert chunk.count("HGMMA") == 52 and chunk.count("WARPGROUP.DEPBAR") == 9
    assert chunk.count("STAS") == 2 and chunk.count("UTMALDG") >= 4
    assert conv.count("LDGSTS") > 0


def test_shared_memory_is_full() -> None:
    from kernels_cute.chunk.barriers import block_fields, shared_bytes
    from kernels_cute.chunk.storage import struct_of
    from kernels_cute.gdn_prefill.normed import normed_spec

    for is_persistent in (False, True):
        spec = normed_spec(_problem(8192, 32), is_persistent, 0)
        size = shared_bytes(block_fields(spec))
        assert size == struct_of(block_fields(spec)).size_in_bytes()
        assert size <= H100.shared_bytes_per_block


@pytest.mark.parametrize(
    "change",
    [
        {"stages": 3},
        {"prefetch": 2},
        {"split_chunks": 16},
        {"num_four_sm_clusters": 28},
        {"conv_rows": 18},
        {"state_heads": 2},
        {"num_persistent_clusters": 1000},
    ],
    ids=str,
)
def test_what_does_not_fit(change: dict[str, int]) -> None:
    problem = _problem(8192, 32)
    config = _normed(problem)
    assert module.fits(problem, config, H100)
    assert not module.fits(problem, dataclasses.replace(config, **change), H100)


@pytest.mark.parametrize("changes", [{"z_dtype": "float32"}, {"head_k_dim": 64, "head_v_dim": 64}], ids=str)
def test_what_it_does_not_serve(changes: dict[str, Any]) -> None:
    """z wider than the rows has no room in shared memory, and at D = 64 a block has whole rows."""
    problem = _problem(8192, 32, **changes)
    assert not any(one.norm_in_chunk for one in module.configs(problem, H100))
    assert not module.fits(problem, _normed(_problem(8192, 32)), H100)


@pytest.mark.parametrize(
    ("tokens", "sequences", "heads", "wanted"),
    [
        (1024, 32, (16, 32), 1), (16384, 256, (16, 32), 1), (8192, 32, (8, 16), 1), (65536, 256, (16, 64), 1),
        (8192, 32, (16, 32), 0), (8192, 8, (16, 32), 0), (8192, 1, (16, 32), 0), (1024, 1, (16, 32), 0),
    ],
)  # fmt: skip
def test_the_default_of_full_batches(tokens: int, sequences: int, heads: tuple[int, int], wanted: int) -> None:
    """The norm is in the chunk kernel where work tiles take turns on all SMs, and heads do not take turns side by side."""
    config = module.default_config(_problem(tokens, sequences, num_k_heads=heads[0], num_v_heads=heads[1]), H100)
    assert config.norm_in_chunk == wanted
    assert config.num_persistent_clusters or not wanted
