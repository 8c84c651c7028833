"""The compiled kernel of dense prefill: order of the machine code, registers of the roles, refusals, and a launch on tensors that
say they are on a GPU.
"""

import dataclasses
import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from gdn import runtime
from gdn.device import H100, H200, DeviceSpec
from gdn.ops.attention.problem import AttentionPrefillProblem
from gdn.runtime import env, select
from tests.compile import fake_cuda, inspection
from tests.compile.attention_calls import params_of
from tests.compile.checks import slow
from tests.compile.variants.base import example

dense = pytest.importorskip("kernels_cute.attention.dense", reason="needs the CuTe DSL")

_libraries: dict[tuple[bool, int], dict[str, bytes]] = {}
every_form = pytest.mark.parametrize("splits", [pytest.param(1, id="a block a tile"), slow(8, id="8 blocks a tile")])


def problem(**fields: Any) -> AttentionPrefillProblem:
    one: AttentionPrefillProblem = example("attention_prefill", **fields)
    return one


def libraries(has_gate: bool = False, splits: int = 1) -> dict[str, bytes]:
    """The default's kernel of a few queries on a long context, or of many."""
    if (has_gate, splits) not in _libraries:
        sizes = {"num_tokens": 8192 if splits == 1 else 64, "max_context_len": 32768}
        one = problem(has_gate=has_gate, **sizes)
        config = dense.default_config(one, H100)
        assert config.splits == splits
        _libraries[has_gate, splits] = dense.compile(one, config)
    return _libraries[has_gate, splits]


def instructions(splits: int) -> list[str]:
    return inspection.listing(libraries(splits=splits)[dense.ENTRY])


@every_form
def test_softmax_runs_under_the_product_of_values(splits: int) -> None:
    """In both loops all of a step's 2^x lie between the wait for the scores and the wait for P V."""
    lines = instructions(splits)
    waits = [at for at, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line]
    # Waits: of the first scores, a masked step's scores and P V, a whole step's, the last P V.
    assert len(waits) == 6
    for first, second in (waits[1:3], waits[3:5]):
        part = lines[first:second]
        count = {name: sum(name in line for line in part) for name in ("MUFU.EX2", "SYNCS.ARRIVE", "F2FP", "HGMMA")}
        # 40 scores and two factors a lane; the stage of keys is free, and no register of P is written.
        assert count == {"MUFU.EX2": 42, "SYNCS.ARRIVE": 1, "F2FP": 0, "HGMMA": 0}


@every_form
def test_roles_keep_to_their_registers(splits: int) -> None:
    tiles = importlib.import_module("kernels_cute.attention.dense.tiles")
    copy, math = inspection.registers_of_roles(instructions(splits))
    assert copy < tiles.COPY_REGISTERS <= math < tiles.MATH_REGISTERS
    assert 128 * tiles.COPY_REGISTERS + 256 * tiles.MATH_REGISTERS <= 168 * tiles.THREADS


def test_configurations() -> None:
    for dim, steps in ((256, {80}), (128, {128, 96})):
        one = problem(head_dim=dim)
        found = dense.configs(one, H100)
        assert {config.step for config in found} == steps
        assert dense.default_config(one, H100) in found
        for config in found:
            rows = dense.ROWS + (config.key_stages + config.value_stages) * config.step
            assert 2 * dim * rows + dense.TABLE_BYTES <= H100.shared_bytes_per_block
            # A part of a split tile lies where keys and values were.
            assert dense.ROWS * 4 * (dim + 8) <= 2 * dim * (rows - dense.ROWS)
        assert {config.splits for config in found} == {1, 2, 4, 8}


def splits_of(device: DeviceSpec, **fields: Any) -> int:
    config = dense.default_config(problem(**fields), device)
    assert dense.fits(problem(**fields), config, device)
    splits: int = config.splits
    return splits


@pytest.mark.parametrize("device", [H100, H200], ids=lambda device: device.key)
def test_the_default_is_the_fastest_that_was_measured(device: DeviceSpec) -> None:
    """At most 6 % from it, on an H200: the table of LAB-NOTES.md."""
    for tokens, context, splits in (
        (8192, 8192, 1), (2048, 32768, 1), (1024, 1024, 1), (512, 32768, 2), (256, 32768, 2), (64, 32768, 8), (16, 32768, 8),
        (16, 131072, 8),
    ):  # fmt: skip
        sizes = {"num_tokens": tokens, "num_sequences": 1, "max_context_len": context}
        assert splits_of(device, num_heads=16, num_kv_heads=2, **sizes) == splits, sizes


@pytest.mark.parametrize("heads", [(16, 2), (24, 2), (5, 5), (64, 4), (128, 1), (64, 64)])
@pytest.mark.parametrize("dim", [256, 128])
def test_the_default_keeps_to_its_bounds(heads: tuple[int, int], dim: int) -> None:
    """Blocks at once, and steps of each. More tiles take fewer blocks each, a longer context takes more."""
    own = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": dim, "num_sequences": 1}
    queries, step = dense.ROWS // (heads[0] // heads[1]), 80 if dim == 256 else 128
    before = dict.fromkeys(range(60, 20000, 700), 8)
    for tokens in range(1, 800, 13):
        last = 1
        for context, most in before.items():
            splits = splits_of(H100, **own, num_tokens=tokens, max_context_len=context)
            assert last <= splits <= most
            if splits > 1:
                blocks, most_blocks = splits * heads[1] * -(-tokens // queries), 132 if splits == 2 else 99
                assert blocks <= most_blocks and context >= 3 * step * splits
            before[context] = last = splits
    half = dataclasses.replace(H100, num_sms=66)
    assert splits_of(half, **own | {"num_heads": 16, "num_kv_heads": 2}, num_tokens=64, max_context_len=32768) == 4


def test_the_default_counts_tiles_as_of_equal_sequences() -> None:
    own = {"num_heads": 16, "num_kv_heads": 2, "max_context_len": 32768}
    for tokens, sequences, splits in ((64, 1, 8), (64, 4, 8), (64, 8, 4), (65, 4, 4), (130, 33, 2), (130, 34, 1), (0, 0, 8)):
        assert splits_of(H100, **own, num_tokens=tokens, num_sequences=sequences) == splits, (tokens, sequences)


@pytest.mark.parametrize("heads", [(16, 2), (24, 2), (5, 5), (128, 1), (1, 1), (8, 1)])
@pytest.mark.parametrize("device", [H100, H200], ids=lambda device: device.key)
def test_a_batch_invariant_choice_is_one_for_all_sizes(heads: tuple[int, int], device: DeviceSpec) -> None:
    """A row's bits depend on the number of blocks to its tile."""
    found: set[Any] = set()
    free: set[Any] = set()
    sizes_of = itertools.product((1, 16, 64, 256, 2048, 8192), (1, 3, 64), (16, 500, 1000, 32768, 131072))
    for tokens, sequences, context in sizes_of:
        sizes = {"num_tokens": max(tokens, sequences), "num_sequences": sequences, "max_context_len": context}
        one = problem(num_heads=heads[0], num_kv_heads=heads[1], **sizes)
        for choices, is_invariant in ((found, True), (free, False)):
            switches = env.Switches(batch_invariant=is_invariant)
            choices.add(select.choose(one, device, runtime.candidates(one.op), switches).config)
    assert len(found) == 1 and {config.splits for config in free} == {1, 2, 4, 8}


def test_refusals() -> None:
    assert dense.refusal(problem()) is None and dense.refusal(problem(num_heads=24, block_size=1344, dtype="float16")) is None
    for fields, word in (
        ({"head_dim": 64}, "head_dim"), ({"num_heads": 258}, "query heads"), ({"rows_aligned": False}, "16 bytes"),
        ({"dtype": "float32"}, "float16"), ({"num_heads": 3}, "query heads"), ({"block_size": 24}, "multiple of 16"),
    ):  # fmt: skip
        assert word in dense.refusal(problem(**fields)), fields


@fake_cuda.NO_GPU
@every_form
@pytest.mark.parametrize("has_gate", [pytest.param(False, id="plain"), slow(True, id="gated")])
def test_launch(has_gate: bool, splits: int, tmp_path: Path) -> None:
    """Refused by the driver alone."""
    params = params_of(problem(has_gate=has_gate, heads_adjacent=False))
    function = fake_cuda.load(libraries(has_gate, splits), "cute", tmp_path)[dense.ENTRY]
    with pytest.raises(RuntimeError, match="(?i)cuda"):
        function(*map(fake_cuda.on_device, params))
    with pytest.raises((TypeError, ValueError), match="seq_lens|int32"):
        function(*map(fake_cuda.on_device, params._replace(seq_lens=params.seq_lens.long())))
