"""The prefill step whose short sequences have launches of their own, without a GPU: code, shared memory, what it serves."""

import dataclasses
from typing import Any

import pytest

from gdn.device import H100
from gdn.testing import machine_code
from tests.compile.test_gdn_prefill_calls import LAYOUTS
from tests.compile.variants.base import example

module: Any = pytest.importorskip("kernels_cute.gdn_prefill", reason="needs the CuTe DSL")


def _problem(**changes: Any) -> Any:
    return example("gdn_prefill", **{"num_tokens": 8192, "num_sequences": 256} | changes)


def _uneven(problem: Any, **changes: Any) -> Any:
    """With few heads and one long sequence, of which the host knows."""
    ratio = problem.num_v_heads // problem.num_k_heads
    few = {"num_k_heads": max(8 // ratio, 1), "num_v_heads": max(8 // ratio, 1) * ratio}
    return dataclasses.replace(problem, **few | {"num_tokens": 8192, "num_sequences": 65, "longest": 8128} | changes)


def _config(problem: Any, form: str = "short") -> Any:
    """With the norm in the chunk kernel all short sequences elsewhere, or those of one token; side by side these, or none; and
    one long sequence in segments."""
    if form == "segments":
        return module.default_config(problem, H100)
    most = {"short": 64, "normed": 1, "beside": 1, "none elsewhere": 0}[form]
    is_beside = form in ("beside", "none elsewhere")
    found = [one for one in module.configs(problem, H100) if bool(one.num_conv_blocks) == is_beside]
    return next(one for one in found if one.max_short_tokens == most)


_VARIANTS: list[dict[str, Any]] = [
    {}, LAYOUTS["flat, checkpoints"], LAYOUTS["interleaved, kept states"],
    LAYOUTS["interleaved"], LAYOUTS["merged"], {"num_v_heads": 64}, {"num_k_heads": 4, "num_v_heads": 32},
    {"dtype": "float16", "z_dtype": "float16", "bias_dtype": "float32", "weight_dtype": "float32", "width": 3},
    {"state_dtype": "bfloat16", "state_v_first": False, "conv_channels_contiguous": False, "A_log_dtype": "bfloat16"},
    {"index_dtype": "int64", "cu_seqlens_dtype": "int64", "conv_dtype": "float32", "gate_sigmoid": True, "has_mask": False},
    {"num_k_heads": 16, "num_v_heads": 16, "bias_dtype": "bfloat16", "silu": False, "norm_dtype": "bfloat16", "width": 2},
]  # fmt: skip
_BFLOAT16_STATES: list[dict[str, Any]] = [  # which have the most values a register
    LAYOUTS["interleaved"] | {"state_dtype": "bfloat16", "weight_dtype": "float32"},
    {"state_dtype": "bfloat16", "num_k_heads": 4, "num_v_heads": 32, "bias_dtype": "float32", "weight_dtype": "float32"},
    LAYOUTS["merged"] | {"state_dtype": "bfloat16", "silu": False, "conv_dtype": "float32", "conv_channels_contiguous": False},
]
_WITHOUT_NORM = {"norm_dtype": None, "z_dtype": None}


@pytest.mark.cover
@pytest.mark.parametrize(
    ("form", "changes"),
    [
        *(("short", one) for one in _VARIANTS),
        *(("normed", one) for one in _VARIANTS[::5]),
        *(("beside", one) for one in (*_VARIANTS[1::3], _WITHOUT_NORM, {"z_dtype": "float32"}, *_BFLOAT16_STATES)),
        *(("none elsewhere", one) for one in _VARIANTS[:1] + _VARIANTS[2:5:2]),
        *(("segments", one) for one in (*_VARIANTS[::9], _WITHOUT_NORM, _BFLOAT16_STATES[2])),
    ],
    ids=str,
)
def test_machine_code(form: str, changes: dict[str, Any]) -> None:
    """No spills in any of the launches, two blocks of the short sequences an SM, every product once. Heads of 256 sequences take
    turns."""
    problem = _problem(**changes) if form != "segments" else _uneven(_problem(**changes))
    config = _config(problem, form)
    assert module.fits(problem, config, H100)
    (library,) = module.compile(problem, config).values()
    kernels = {kernel.name.split("_object_at_")[0].rsplit("kernel", 1)[-1]: kernel for kernel in machine_code.kernels(library)}
    assert len(kernels) == {
        "short": 4, "normed": 3, "beside": 4 + problem.has_norm, "none elsewhere": 4, "segments": 5 + problem.has_norm,
    }[form]  # fmt: skip
    assert all(kernel.spills == kernel.stack_bytes == 0 for kernel in kernels.values())
    assert len([name for name in kernels if "OneToken" in name]) == (form != "none elsewhere")
    if form != "short":
        return
    (short,) = [kernel for name, kernel in kernels.items() if "ShortStep" in name]
    assert short.max_threads == 256 and short.registers <= 65536 // 512
    # K K^T or Q K^T, S K^T and S Q^T, M, P, and two halves of the state's update.
    assert short.count("HGMMA") == 8 + 2 * 8 + 4 + 4 + 2 * 4


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
    assert not any(config.max_short_tokens > 1 for config in module.configs(_problem(**changes), H100))


def test_what_has_no_launch_for_sequences_of_one_token() -> None:
    """What the decode step's kernel does not serve, and a call of one sequence."""
    for changes in ({"num_k_heads": 1, "num_v_heads": 16}, {"width": 5}, {"num_sequences": 1}):
        problem = _problem(**changes)
        found = module.configs(problem, H100)
        assert found and not any(config.max_short_tokens for config in found)
        if problem.num_sequences > 1:
            assert not any(module.fits(problem, dataclasses.replace(one, max_short_tokens=1), H100) for one in found)


def test_where_it_is_the_default() -> None:
    """Many sequences whose mean is at most a chunk, and with few key heads more of them. Those of one token alone: side by side
    where heads take turns."""

    def is_default(num_sequences: int, length: int, heads: tuple[int, int] = (16, 32), **changes: Any) -> bool:
        sizes = {"num_tokens": num_sequences * length, "num_sequences": num_sequences}
        problem = _problem(**sizes, num_k_heads=heads[0], num_v_heads=heads[1], **changes)
        return bool(module.default_config(problem, H100).max_short_tokens > 1)

    assert all(is_default(n, length) for n in (50, 64, 256, 1024) for length in (1, 32, 64))
    assert not any(is_default(n, length) for n in (1, 2, 12, 49) for length in (1, 32, 64))
    assert not any(is_default(n, 65) for n in (50, 64, 256))
    assert is_default(198, 32, (4, 8)) and not is_default(197, 32, (4, 8))
    assert is_default(198, 32, (4, 32)) and not is_default(197, 32, (4, 32))
    assert not is_default(256, 32, norm_dtype=None, z_dtype=None)

    def is_beside(num_sequences: int, length: int, heads: tuple[int, int] = (16, 32)) -> bool:
        sizes = {"num_tokens": num_sequences * length, "num_sequences": num_sequences}
        config = module.default_config(_problem(**sizes, num_k_heads=heads[0], num_v_heads=heads[1]), H100)
        return bool(config.num_conv_blocks) and config.max_short_tokens == 1

    assert all(is_beside(n, length) for n, length in ((65, 126), (17, 480), (80, 100), (128, 65), (8, 512), (2, 4096)))
    assert not any(is_beside(n, length) for n, length in ((65, 64), (1, 8192)))
    assert not any(is_beside(65, 126, heads) for heads in ((4, 8), (8, 16), (16, 64)))


def test_the_launch_is_never_alone() -> None:
    problem = _problem()
    short, normed, beside = (_config(problem, form) for form in ("short", "normed", "beside"))
    assert not any(module.fits(problem, dataclasses.replace(one, norm_in_chunk=0), H100) for one in (short, normed))
    assert not module.fits(problem, dataclasses.replace(beside, num_conv_blocks=0), H100)
    assert not any(module.fits(problem, dataclasses.replace(beside, max_short_tokens=tokens), H100) for tokens in (2, 64, -1))
    assert not any(module.fits(problem, dataclasses.replace(short, max_short_tokens=tokens), H100) for tokens in (2, 63, -1))


def test_one_long_sequence_is_cut_where_the_host_knows_of_it() -> None:
    known = _uneven(_problem())
    config = module.default_config(known, H100)
    assert config.split_chunks > 0 and config.max_short_tokens == 1 and module.fits(known, config, H100)
    assert config.max_long_sequences == 5  # the long one, and room for a few that the host does not know of
    assert module.default_config(dataclasses.replace(known, longest=8100), H100).max_long_sequences == 33
    for slots in (0, 1, 66):
        assert not module.fits(known, dataclasses.replace(config, max_long_sequences=slots), H100)
    assert config in module.configs(known, H100)
    for changes in (
        {"longest": 0},  # not known
        {"longest": 300},  # as long as the others
        {"longest": 131072},  # a bound that says nothing of this call
        {"num_k_heads": 16, "num_v_heads": 32},  # heads enough
        {"num_tokens": 1264, "longest": 1200},  # too short to be cut
    ):
        assert module.default_config(_uneven(_problem(), **changes), H100).split_chunks == 0
    # Next to prompts that are no rows of one token: segments, and no launch for these.
    others = module.default_config(_uneven(_problem(), num_tokens=9000, num_sequences=10, longest=8000), H100)
    assert others.split_chunks > 0 and others.max_short_tokens == 0 and others.split_if_longest_exceeds == 0
    assert not module.fits(known, dataclasses.replace(others, max_long_sequences=5), H100)
    assert not module.suits(known, config, H100)
    assert all(module.suits(dataclasses.replace(known, longest=longest), config, H100) for longest in (0, 131072))


@pytest.mark.parametrize(("tokens", "is_cut"), [(1024, False), (1500, False), (2048, True), (3000, True)])
@pytest.mark.parametrize("heads", [(2, 4), (4, 8), (8, 16)])
def test_where_it_is_cut_next_to_rows_of_one_token(heads: tuple[int, int], tokens: int, is_cut: bool) -> None:
    """Sooner than alone, where whole ones may have four SMs a head."""
    sizes = {"num_k_heads": heads[0], "num_v_heads": heads[1], "num_tokens": 64 + tokens, "longest": tokens}
    assert (module.default_config(_uneven(_problem(), **sizes), H100).split_chunks > 0) is is_cut


def test_lengths_change_no_key() -> None:
    known = _uneven(_problem())
    unknown = dataclasses.replace(known, longest=0)
    assert known != unknown and known.hints() == {"longest": 8128}
    assert (
        known.static_key() == unknown.static_key() and known.tune_key() == unknown.tune_key() and known.sizes() == unknown.sizes()
    )
