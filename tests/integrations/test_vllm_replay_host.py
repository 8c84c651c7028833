"""Replay in batches that vLLM's own builder describes, and blocks that vLLM sizes and deals out, where it can be imported."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn.integrations._calls import Calls
from gdn.integrations._vllm_pages import page_of, sizes_point
from gdn.integrations._vllm_replay import page_in
from gdn.integrations._vllm_rows import backend_class
from tests.integrations import record_vllm_batches as record
from tests.integrations.test_vllm_replay import Life
from tests.integrations.vllm_engine import int32
from tests.integrations.vllm_replay import CLOSE, Engine, ReplayHost, Row, described

pytest.importorskip("vllm", reason="vLLM is not installed")


class HostBuilder:
    """vLLM's builder with ours on top. A table of blocks has one column, as without speculative blocks."""

    def __init__(self, host: ReplayHost, monkeypatch: pytest.MonkeyPatch, is_second_group: bool = False) -> None:
        from vllm.v1.attention.backends import gdn_attn
        from vllm.v1.kv_cache_interface import MambaSpec

        record.without_pinned_memory(monkeypatch.setattr)
        config = record.config(host.num_spec)
        layer = SimpleNamespace(conv1d=host.layer.conv1d)
        config.compilation_config.static_forward_context = {"layer": layer}
        shapes = host.page.shapes
        spec = MambaSpec(block_size=4096, shapes=shapes, dtypes=(torch.float32, host.page.state_dtype))
        self.num_spec = host.num_spec
        self.builder = backend_class(gdn_attn).get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))  # type: ignore[attr-defined]
        self.other = backend_class(gdn_attn).get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))  # type: ignore[attr-defined]
        for builder in (self.builder, self.other):
            builder.gdn_prefill_backend = "flashinfer"  # what an SM90 GPU resolves to: no tables of chunks
        assert not self.builder.supports_update_block_table  # on a GPU
        self.is_second_group = is_second_group

    def __call__(self, rows: list[Row], padded: int) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        batch, accepted, drafts = described(rows, padded, self.num_spec)
        bounds = batch.query_start_loc_cpu
        tokens = batch.num_reqs * (1 + self.num_spec) if padded else int(bounds[-1])
        blocks = int32([row.own.block for row in rows] + [0] * padded)[:, None]
        is_new = [row.drafts < 0 and row.own.computed == 0 for row in rows]
        common = CommonAttentionMetadata(
            query_start_loc=bounds, query_start_loc_cpu=bounds, seq_lens=batch.seq_lens, num_reqs=batch.num_reqs,
            num_actual_tokens=tokens, max_query_len=int(bounds.diff().max()), max_seq_len=int(batch.seq_lens.max()),
            block_table_tensor=blocks, slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            is_prefilling=torch.tensor(is_new + [False] * padded), seq_lens_cpu_upper_bound=batch.seq_lens,
        )  # fmt: skip
        if not self.is_second_group:
            return self.builder.build(0, common, accepted, drafts)
        # The metadata of a group whose blocks have other numbers, and then this one's blocks in it.
        first = self.other.build(0, common.replace(block_table_tensor=blocks + 50 * (blocks > 0)), accepted, drafts)
        return self.builder.update_block_table(first, blocks, common.slot_mapping)


@pytest.mark.parametrize(("num_spec", "is_second_group"), [(0, False), (2, False), (3, False), (0, True), (3, True)])
def test_a_long_run_by_the_hosts_builder(num_spec: int, is_second_group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    host = ReplayHost(30 + num_spec, num_spec=num_spec, interleaved=num_spec == 2, dim_first=num_spec == 3)
    host.free = host.free[:7]
    life = Life(Engine(host, HostBuilder(host, monkeypatch, is_second_group)))
    for n in range(130):
        life.step()
        if n % 10 == 9:
            life.engine.check_states([own for own in life.running if own.computed])
            assert life.engine.worst < CLOSE


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_the_prefix_cache_copies_all_of_a_block(state_dtype: torch.dtype) -> None:
    """The host copies its two parts; the second one ends with the count."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator

    host = ReplayHost(8, num_spec=0, interleaved=False, dim_first=False, state_dtype=state_dtype)
    windows, flat = host.layer.kv_cache
    found = [
        (copied.start_addr - part[5].data_ptr(), copied.num_elements * part.element_size())
        for part, function in zip((windows, flat), MambaStateCopyFuncCalculator.gated_delta_net_state_copy_func(), strict=True)
        for copied in (function(part, [3, 5, 9], 1, 1),)
    ]
    views = host.page.views(flat)
    count = views.state_tokens[5:].data_ptr() - flat[5].data_ptr()
    assert found == [(0, windows[5].nbytes), (0, flat[5].nbytes)] and flat[5].nbytes == count + 16
    assert views.ring[5].data_ptr() + views.ring[5].nbytes == flat[5].data_ptr() + count


PAGES = [  # drafts, dtype of the states, bytes of a block without replay and with it, for Qwen3-Next's layers
    (0, "float32", 2162688, 2555904),
    (3, "float32", 2195456, 2752512),
    (0, "auto", 1114112, 1409024),
    (3, "auto", 1146880, 1638400),
]


@pytest.mark.parametrize(("num_spec", "state", "plain", "ours"), PAGES)
def test_the_size_of_a_block(num_spec: int, state: str, plain: int, ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as the host makes one of attention: without replay a sequence takes 1 + drafts of them."""
    import vllm.config
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM as Model
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.kv_cache_interface import MambaSpec

    monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda architecture, model_config: (Model, architecture))
    monkeypatch.setattr(vllm.config.vllm, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(Platform, "_find_non_ssm_backends", classmethod(lambda cls, config: [FlashAttentionBackend]))
    undo = sizes_point(page_in).install(Calls())
    try:
        for replays, expected in ((False, plain), (True, ours)):
            config = _model_config(num_spec, state)
            shapes, dtypes = Model.get_mamba_state_shape_from_config(config), Model.get_mamba_state_dtype_from_config(config)
            if replays:
                page = page_of(16, shapes, dtypes[1], num_spec)
                config.compilation_config.static_forward_context["layer"] = SimpleNamespace(_gdn_page=page)
                shapes = page.shapes
            Platform._align_hybrid_block_size(config, FlashAttentionBackend)
            padded = config.cache_config.mamba_page_size_padded
            spec = MambaSpec(block_size=4096, shapes=shapes, dtypes=dtypes, page_size_padded=padded)
            assert spec.page_size_bytes == expected
    finally:
        undo()


def _model_config(num_spec: int, state: str) -> Any:
    """As much of a configuration as the host's sizing reads."""
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    model = SimpleNamespace(
        dtype=torch.bfloat16, use_mla=False, get_num_kv_heads=lambda parallel: 2, get_head_size=lambda: 256, architecture="",
        hf_text_config=SimpleNamespace(linear_conv_kernel_dim=4, **heads),
    )  # fmt: skip
    cache = SimpleNamespace(
        cache_dtype="auto", mamba_cache_dtype="auto", mamba_ssm_cache_dtype=state, block_size=16, mamba_cache_mode="none",
        mamba_page_size_padded=None, mamba_block_size=None,
    )  # fmt: skip
    return SimpleNamespace(
        cache_config=cache, model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=num_spec) if num_spec else None,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )  # fmt: skip
