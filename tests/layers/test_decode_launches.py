"""A decode step of the attention layer launches its projections and operators, and nothing of torch; the residual stream of a
decoder layer takes one launch a norm."""

import dataclasses
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gdn.layers import AttentionMetadataBuilder, DecoderLayer, RotaryEmbedding
from tests.layers.attention_cases import config, layer_of
from tests.layers.paged import Batch

LAUNCHES = {
    "no indexer": ["linear", "prepare_indexer", "attention", "linear"],
    "token-wise": [
        "linear", "prepare_indexer", "linear", "prepare_indexer", "paged_indexer_topk", "sparse_attention", "linear",
    ],
    "compressed": [
        "linear", "prepare_indexer", "linear", "prepare_indexer", "compress_indexer_keys", "paged_indexer_topk",
        "sparse_attention", "linear",
    ],
}  # fmt: skip
VIEWS = {"device", "empty", "unflatten", "flatten", "view", "split", "split_with_sizes", "slice", "select", "as_strided"}


class Launches(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", LAUNCHES)
def test_launches(case: str) -> None:
    chosen = config(case)
    layer = layer_of(chosen)
    batch = Batch(layer, chosen, 4, 96)
    builder = AttentionMetadataBuilder(
        "cpu", block_size=batch.block_size, max_seq_len=96, index_ratio=chosen.index_ratio, max_num_sequences=8
    )
    metadata = builder.build([1] * 4, [40, 1, 96, 7], batch.block_tables, batch.slots, pad_to=6)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {name: mode.from_tensor(value) for name, value in vars(metadata).items() if torch.is_tensor(value)}
    caches = [None if one is None else mode.from_tensor(one) for one in (*batch.kv, batch.keys, batch.ring)]
    with torch.inference_mode(), mode, Launches() as launches:
        hidden, positions = torch.empty(6, chosen.hidden_size), torch.empty(6, dtype=torch.int64)
        layer(hidden, positions, dataclasses.replace(metadata, **tensors), (caches[0], caches[1]), *caches[2:])
    assert [name for name in launches.names if name not in VIEWS] == LAUNCHES[case]


@pytest.mark.parametrize("layer_scale", [False, True])
@pytest.mark.parametrize("has_residual", [True, False])
def test_norms_of_a_decoder_layer_are_one_launch_each(
    layer_scale: bool, has_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = dataclasses.replace(config("no indexer"), layer_scale=layer_scale, intermediate_size=8)
    layer = DecoderLayer(chosen, 0, RotaryEmbedding(chosen))
    monkeypatch.setattr(layer, "_mix", lambda hidden, *_: hidden)
    layer.mlp = torch.nn.Identity()
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True), Launches() as launches:
        hidden, residual = torch.empty(2, 6, chosen.hidden_size)
        layer(hidden, residual if has_residual else None, None, None, None)
    names = [name for name in launches.names if name not in VIEWS | {"unbind"}]
    assert names == ["add_rms_norm", "add_rms_norm", *["addcmul"] * layer_scale]
