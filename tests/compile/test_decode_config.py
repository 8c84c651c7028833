"""The fused decode's choice of tiles: what was fastest where it was measured, and a choice for everything it serves."""

from dataclasses import replace
from typing import Any

import pytest

from gdn.device import H100
from gdn.ops.layer_step.problem import GdnDecodeProblem
from gdn.testing import machine_code
from kernels_cute import gdn_decode
from tests.compile.variants.base import example

MAIN: GdnDecodeProblem = example("gdn_decode", num_tokens=1, num_sequences=1)
QUARTER = replace(MAIN, num_k_heads=4, num_v_heads=8)
BF16 = replace(MAIN, state_dtype="bfloat16")
DRAFTS = replace(MAIN, cu_seqlens_dtype="int32", has_columns=True, has_accepted=True)


@pytest.mark.parametrize(
    ("problem", "batch", "tiles"),
    [
        (MAIN, 1, (64, 8, 4)),
        (MAIN, 8, (256, 8, 4)),
        (MAIN, 32, (64, 8, 4)),
        (MAIN, 128, (128, 16, 4)),
        (MAIN, 512, (128, 16, 4)),
        (QUARTER, 1, (64, 8, 4)),
        (QUARTER, 8, (64, 8, 4)),
        (QUARTER, 32, (256, 8, 4)),
        (QUARTER, 512, (128, 16, 4)),
        (BF16, 128, (128, 8, 4)),
        (DRAFTS, 32, (128, 16, 4)),
        (DRAFTS, 128, (128, 16, 4)),
        (replace(DRAFTS, num_k_heads=4, num_v_heads=8), 32, (256, 8, 4)),
        (replace(DRAFTS, state_dtype="bfloat16"), 128, (128, 8, 4)),
    ],
)
def test_measured_tiles(problem: GdnDecodeProblem, batch: int, tiles: tuple[int, int, int]) -> None:
    config = gdn_decode.default_config(replace(problem, num_sequences=batch, num_tokens=batch), H100)
    assert (config.threads, config.threads_per_column, config.v_per_thread) == tiles


@pytest.mark.parametrize("batch", [0, 1, 3, 8, 16, 64, 256, 4096])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 160), (128, 128), (256, 256)])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("base", [MAIN, DRAFTS], ids=["single", "drafts"])
def test_default_fits(base: GdnDecodeProblem, state_dtype: str, v_first: bool, dims: tuple[int, int], batch: int) -> None:
    problem = replace(
        base, num_v_heads=16, head_k_dim=dims[0], head_v_dim=dims[1], state_dtype=state_dtype, state_v_first=v_first,
        num_sequences=batch, num_tokens=batch,
    )  # fmt: skip
    assert gdn_decode.refusal(problem) is None
    assert gdn_decode.fits(problem, gdn_decode.default_config(problem, H100), H100)


@pytest.mark.cover
@pytest.mark.parametrize(
    "fields",
    [
        {"state_dtype": "bfloat16", "intermediate_dtype": "float32", "num_k_heads": 2, "num_v_heads": 6, "width": 2},
        {
            "state_dtype": "bfloat16", "has_rounding": True, "cu_seqlens_dtype": "int32", "has_columns": True, "num_k_heads": 4,
            "num_v_heads": 4, "head_k_dim": 96, "head_v_dim": 160, "num_tokens": 512,
        },
    ],
    ids=["states of every token", "noise with wide values"],
)  # fmt: skip
def test_forms_that_spilled(fields: dict[str, Any]) -> None:
    """Drawn from all variants: more than two choices at once, which a cover of pairs does not hold."""
    problem = replace(MAIN, **{"num_tokens": 128, "num_sequences": 128} | fields)
    (library,) = gdn_decode.compile(problem, gdn_decode.default_config(problem, H100)).values()
    assert not any(kernel.spills for kernel in machine_code.kernels(library))
