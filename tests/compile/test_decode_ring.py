"""The fused decode step with a ring: its tiles and their shared memory."""

from dataclasses import replace
from typing import Any

import pytest

from gdn.device import H100
from gdn.ops.layer_step.problem import GdnDecodeProblem
from kernels_cute import gdn_decode
from tests.compile import checks
from tests.compile.test_decode_config import MAIN

ONE = replace(MAIN, ring_rows=16, fold_every=15)
DRAFTS = replace(MAIN, cu_seqlens_dtype="int32", has_accepted=True, ring_rows=22, fold_every=15)
FORMS = {"one": ONE, "drafts": DRAFTS}
# Forms that spilled with the tiles of their neighbours: drafts of narrow keys, one token of wide keys with a float32 filter,
# drafts K first of few heads, and one token with offsets, of a bfloat16 state or K first.
_NARROW: dict[str, Any] = {"head_k_dim": 64, "num_k_heads": 1, "num_v_heads": 2, "num_sequences": 1, "num_tokens": 4}
_WIDE: dict[str, Any] = {"head_k_dim": 256, "head_v_dim": 256, "num_k_heads": 1, "num_v_heads": 1, "state_dtype": "bfloat16"}
_FLOAT: dict[str, Any] = {"weight_dtype": "float32", "bias_dtype": "float32", "conv_dtype": "float32"}
_INTERLEAVED: dict[str, Any] = {
    "interleaved": True, "z_dtype": None, "a_dtype": None, "gate_sigmoid": True, "width": 2, "conv_channels_contiguous": False,
    "cu_seqlens_dtype": "int64",
}  # fmt: skip
_FEW: dict[str, Any] = {"num_k_heads": 2, "num_v_heads": 4, "state_v_first": False, "num_sequences": 1, "num_tokens": 4}
_OFFSETS = replace(ONE, cu_seqlens_dtype="int32", num_sequences=200, num_tokens=200)
TIGHT = [
    replace(DRAFTS, head_v_dim=64, **_NARROW),
    replace(DRAFTS, head_v_dim=64, dtype="float16", norm_dtype="float32", ring_rows=39, fold_every=24, **_NARROW, **_FLOAT),
    replace(DRAFTS, head_v_dim=128, dtype="float16", norm_dtype=None, index_dtype="int64", **_NARROW | _INTERLEAVED),
    replace(ONE, conv_channels_contiguous=False, silu=False, width=3, cu_seqlens_dtype="int64", **_WIDE, **_FLOAT),
    replace(DRAFTS, **_FEW),
    replace(_OFFSETS, state_dtype="bfloat16"),
    replace(_OFFSETS, state_v_first=False),
    replace(_OFFSETS, **_FEW),
]
CHANGES: list[dict[str, Any]] = [{}, {"state_dtype": "bfloat16"}, {"state_v_first": False}, {"head_k_dim": 64, "head_v_dim": 64}]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("rows", [16, 39, 300])
@pytest.mark.parametrize("form", FORMS)
def test_tiles_fit_into_shared_memory(form: str, rows: int, changes: dict[str, Any]) -> None:
    """What the choice takes for a block's memory is no less than what the kernel asks for."""
    from kernels_cute.gdn_decode.spec import Spec  # imports the DSL

    problem = replace(FORMS[form], ring_rows=rows, **changes)
    for sizes in gdn_decode._ring_tiles(problem):
        tiles = gdn_decode.Config(*sizes)
        if gdn_decode.fits(problem, tiles, H100):
            asked = Spec(problem, tiles).shared_bytes
            assert asked <= gdn_decode._ring_bytes(problem, tiles) <= H100.shared_bytes_per_block


@checks.compiles(lambda: checks.tasks_of("kernels_cute.gdn_decode", [(problem, None) for problem in TIGHT]))
def test_tight_forms_spill_nothing() -> None:
    checks.check("kernels_cute.gdn_decode", "cute", [(problem, None) for problem in TIGHT])


def test_a_ring_that_is_too_large_is_refused() -> None:
    assert gdn_decode.refusal(replace(DRAFTS, ring_rows=22)) is None
    assert "shared memory, got 2000 rows" in str(gdn_decode.refusal(replace(DRAFTS, ring_rows=2000)))


@pytest.mark.parametrize(("problem", "batch"), [(ONE, 1), (ONE, 128), (DRAFTS, 1), (DRAFTS, 2), (DRAFTS, 4), (DRAFTS, 128)])
def test_default_fits(problem: GdnDecodeProblem, batch: int) -> None:
    problem = replace(problem, num_sequences=batch, num_tokens=4 * batch)
    config = gdn_decode.default_config(problem, H100)
    assert gdn_decode.fits(problem, config, H100)
    assert (config.stages > 0) == (batch >= 4)  # an item of 16 key heads for every third SM: states are streamed


def test_many_heads_that_are_not_streamed() -> None:
    """What a large batch reads is hidden by 512 threads an SM, each with 64 values of a state."""
    for problem in (ONE, DRAFTS):
        problem = replace(
            problem, state_v_first=problem is DRAFTS, ring_rows=39, fold_every=24, num_sequences=128, num_tokens=512
        )
        config = gdn_decode.default_config(problem, H100)
        assert config.stages == 0
        assert (config.min_threads_per_sm, config.threads_per_column, config.v_per_thread) == (512, 8, 4)


def test_tiles_that_spill_k_first_do_not_fit() -> None:
    one, drafts = (replace(problem, state_v_first=False) for problem in (ONE, DRAFTS))

    def fits(problem: GdnDecodeProblem, *tiles: int) -> bool:
        return gdn_decode.fits(problem, gdn_decode.Config(*tiles), H100)

    assert fits(one, 128, 8, 4, 512) and fits(drafts, 128, 8, 4, 384)
    for changes in ({"width": 3}, {"index_dtype": "int64"}, {"has_rounding": True, "state_dtype": "bfloat16"}):
        assert not fits(replace(one, **changes), 128, 8, 4, 512) and fits(replace(one, **changes), 128, 8, 4, 384)
    noisy = replace(drafts, has_rounding=True, state_dtype="bfloat16")
    assert not fits(noisy, 128, 8, 4, 384) and fits(noisy, 128, 8, 4, 256)
