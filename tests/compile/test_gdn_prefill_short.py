"""The prefill step whose short sequences have a launch of their own, without a GPU: code, shared memory, what it serves."""

import dataclasses
from typing import Any

import pytest

from gdn.device import H100
from gdn.testing import machine_code
from tests.compile.test_gdn_prefill_calls import LAYOUTS
from tests.compile.variants.base import example

module: Any = pytest.importorskip("kernels_cute.gdn_prefill", reason="needs the CuTe DSL")


def _problem(**changes: Any) -> Any:
    sizes = {"num_k_heads": 16, "num_v_heads": 32, "num_tokens": 8192, "num_sequences": 256}
    return example("gdn_prefill", **sizes | changes)


def _config(problem: Any, is_beside: bool = False) -> Any:
    """With the norm in the chunk kernel, or side by side."""
    (found,) = [one for one in module.configs(problem, H100) if one.takes_short and bool(one.num_conv_blocks) == is_beside]
    return found


_VARIANTS: list[dict[str, Any]] = [
    {}, LAYOUTS["flat, checkpoints"], LAYOUTS["interleaved, kept states"],
    LAYOUTS["interleaved"], LAYOUTS["merged"], {"num_v_heads": 64}, {"num_k_heads": 4, "num_v_heads": 32},
    {"dtype": "float16", "z_dtype": "float16", "bias_dtype": "float32", "weight_dtype": "float32", "width": 3},
    {"state_dtype": "bfloat16", "state_v_first": False, "conv_channels_contiguous": False, "A_log_dtype": "bfloat16"},
    {"index_dtype": "int64", "cu_seqlens_dtype": "int64", "conv_dtype": "float32", "gate_sigmoid": True, "has_mask": False},
    {"num_k_heads": 16, "num_v_heads": 16, "bias_dtype": "bfloat16", "silu": False, "norm_dtype": "bfloat16", "width": 2},
]  # fmt: skip


@pytest.mark.cover
@pytest.mark.parametrize(
    ("is_beside", "changes"), [*((False, one) for one in _VARIANTS), *((True, one) for one in _VARIANTS[1::3])], ids=str
)
def test_machine_code(is_beside: bool, changes: dict[str, Any]) -> None:
    """No spills in any of the launches, two blocks of the short sequences an SM, every product once."""
    problem = _problem(**changes)
    config = _config(problem, is_beside)
    assert module.fits(problem, config, H100)
    (library,) = module.compile(problem, config).values()
    kernels = {kernel.name.split("_object_at_")[0].rsplit("kernel", 1)[-1]: kernel for kernel in machine_code.kernels(library)}
    (short,) = [kernel for name, kernel in kernels.items() if "ShortStep" in name]
    assert len(kernels) == (5 if is_beside else 3)
    assert all(kernel.spills == kernel.stack_bytes == 0 for kernel in kernels.values())
    assert short.max_threads == 256 and short.registers <= 65536 // 512
    # K K^T or Q K^T, S K^T and S Q^T, M, P, and two halves of the state's update.
    assert short.count("HGMMA") == 8 + 2 * 8 + 4 + 4 + 2 * 4


@pytest.mark.cover
@pytest.mark.parametrize("changes", [_VARIANTS[0], _VARIANTS[2], _VARIANTS[4]], ids=str)
def test_heads_in_turn_side_by_side_spill_nothing(changes: dict[str, Any]) -> None:
    """Without that launch. A chunk kernel that deals work tiles and waits for the convolution's rows takes the most registers."""
    problem = _problem(**changes)
    config = next(one for one in module.configs(problem, H100) if one.num_conv_blocks and not one.takes_short)
    assert config.num_persistent_clusters > 0
    (library,) = module.compile(problem, config).values()
    assert all(kernel.spills == kernel.stack_bytes == 0 for kernel in machine_code.kernels(library))


def test_two_blocks_have_room_on_an_sm() -> None:
    from kernels_cute.chunk.barriers import shared_bytes
    from kernels_cute.chunk.storage import struct_of
    from kernels_cute.gdn_prefill.short.shape import BLOCKS_PER_SM, RESERVED_BYTES, fields

    for ratio in (1, 2, 4, 8):
        found = fields(_problem(num_k_heads=4, num_v_heads=4 * ratio))
        size = shared_bytes(found)
        assert size == struct_of(found).size_in_bytes()
        assert BLOCKS_PER_SM * (size + RESERVED_BYTES) <= H100.shared_bytes_per_block + RESERVED_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"num_k_heads": 1, "num_v_heads": 16}, {"norm_dtype": None, "z_dtype": None}, {"z_dtype": "float32"},
        {"num_sequences": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_such_launch(changes: dict[str, Any]) -> None:
    """More than eight value heads a key head, no norm, a wider z, and calls that leave SMs idle."""
    assert not any(config.takes_short for config in module.configs(_problem(**changes), H100))


def test_where_it_is_the_default() -> None:
    """Many sequences whose mean is at most a chunk, and with few key heads more of them."""

    def is_default(num_sequences: int, length: int, heads: tuple[int, int] = (16, 32), **changes: Any) -> bool:
        sizes = {"num_tokens": num_sequences * length, "num_sequences": num_sequences}
        problem = _problem(**sizes, num_k_heads=heads[0], num_v_heads=heads[1], **changes)
        return bool(module.default_config(problem, H100).takes_short)

    assert all(is_default(n, length) for n in (50, 64, 256, 1024) for length in (1, 32, 64))
    assert not any(is_default(n, length) for n in (1, 2, 12, 49) for length in (1, 32, 64))
    assert not any(is_default(n, 65) for n in (50, 64, 256))
    assert is_default(198, 32, (4, 8)) and not is_default(197, 32, (4, 8))
    assert is_default(198, 32, (4, 32)) and not is_default(197, 32, (4, 32))
    assert not is_default(256, 32, norm_dtype=None, z_dtype=None)


def test_the_launch_is_never_alone() -> None:
    problem = _problem()
    config = _config(problem)
    assert not module.fits(problem, dataclasses.replace(config, norm_in_chunk=0), H100)
    assert not module.fits(problem, dataclasses.replace(_config(problem, True), num_conv_blocks=0), H100)
    wide, beside = _problem(z_dtype="float32"), _config(problem, True)
    assert not module.fits(wide, beside, H100) and module.fits(wide, dataclasses.replace(beside, takes_short=0), H100)
