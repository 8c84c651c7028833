"""Replay in batches that vLLM's own builder describes, and blocks that vLLM sizes and deals out, where it can be imported."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn.integrations._vllm_rows import backend_class
from tests.integrations import record_vllm_batches as record
from tests.integrations.test_vllm_replay import Life
from tests.integrations.vllm_engine import int32
from tests.integrations.vllm_replay import CLOSE, Engine, ReplayHost, Row, described

pytest.importorskip("vllm", reason="vLLM is not installed")


class HostBuilder:
    """vLLM's builder with ours on top. A table of blocks has one column, as without speculative blocks."""

    def __init__(self, host: ReplayHost, monkeypatch: pytest.MonkeyPatch) -> None:
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
        self.builder.gdn_prefill_backend = "flashinfer"  # what an SM90 GPU resolves to: no tables of chunks
        assert not self.builder.supports_update_block_table  # each cache group has metadata of its own

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
        return self.builder.build(0, common, accepted, drafts)


@pytest.mark.parametrize("num_spec", [0, 2, 3])
def test_a_long_run_by_the_hosts_builder(num_spec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host = ReplayHost(30 + num_spec, num_spec=num_spec, interleaved=num_spec == 2, dim_first=num_spec == 3)
    host.free = host.free[:7]
    life = Life(Engine(host, HostBuilder(host, monkeypatch)))
    for n in range(130):
        life.step()
        if n % 10 == 9:
            life.engine.check_states([own for own in life.running if own.computed])
            assert life.engine.worst < CLOSE
