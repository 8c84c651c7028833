"""Whole models with the token-wise indexer, gated and ungated, which Transformers lacks: its Qwen3-Next with the attention layers
replaced by the masked dense oracle."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gdn.layers import loading
from gdn.layers.config import HybridConfig
from gdn.layers.model import HybridModel
from tests.layers import hf, oracle
from tests.layers.serving import Server

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 2e-5  # of the largest logit, float32
NEAR_TIES = 1e-5  # between scores of the indexer
STEPS = 32
INDEXER = {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 32}
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "token-wise": (INDEXER, [150, 3, 40]),
    "token-wise, no gate": (INDEXER | {"attn_output_gate": False, "index_topk": 64}, [120, 101]),
    "token-wise, two key heads, few dims": (
        INDEXER | {"index_kv_heads": 2, "index_head_dim": 8, "index_topk": 32, "partial_rotary_factor": 0.5},
        [90, 1],
    ),
    "no indexer, no gate": ({"attn_output_gate": False}, [33, 70]),
}  # fmt: skip
LEFT_OUT: dict[str, tuple[int, ...]] = {}  # seeds with a smaller gap


def attention_tensors(config: HybridConfig, seed: int) -> dict[str, Tensor]:
    """Random tensors of one attention layer, by the names of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)

    def rows(count: int, width: int) -> Tensor:
        return torch.randn(count, width, generator=generator) * width**-0.5

    heads, dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
    shapes = {"q_proj": heads * dim * (2 if config.attn_output_gate else 1)}
    shapes |= dict.fromkeys(("k_proj", "v_proj"), config.num_key_value_heads * dim)
    made = {f"{name}.weight": rows(count, hidden) for name, count in shapes.items()} | {
        "o_proj.weight": rows(hidden, heads * dim)
    }
    norms = {"q_norm": dim, "k_norm": dim}
    if config.index_topk:
        width = (config.index_n_heads + config.index_kv_heads) * config.index_head_dim + config.index_n_heads
        made["indexer.index_qkw_proj.weight"] = rows(width, hidden)
        norms |= dict.fromkeys(("indexer.q_layernorm", "indexer.k_layernorm"), config.index_head_dim)
    return made | {f"{name}.weight": torch.randn(size, generator=generator) * 0.3 for name, size in norms.items()}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str) -> None:
    changes, lengths = CASES[case]
    seed = next(seed for seed in range(9) if seed not in LEFT_OUT.get(case, ()))
    theirs = hf.build("qwen3_next", seed, num_experts=0)
    config = HybridConfig.from_transformers(theirs.config.to_dict() | changes)
    tensors: dict[str, Tensor] = {name: value for name, value in theirs.state_dict().items() if "self_attn" not in name}
    margins: list[float] = []
    for index, layer in enumerate(theirs.model.layers):
        if config.layer_types[index] == "full_attention":
            own = attention_tensors(config, seed + index)
            tensors |= {f"model.layers.{index}.self_attn.{name}": value for name, value in own.items()}
            weights = own | {"qkv_proj.weight": torch.cat([own[f"{one}_proj.weight"] for one in "qkv"])}

            def attend(hidden_states: Tensor, weights: dict[str, Tensor] = weights, **_: Any) -> tuple[Tensor, None]:
                found = oracle.attention(weights, hidden_states[0], config)
                margins.append(found.margin)
                return found.out.float()[None], None

            layer.self_attn.forward = attend
    model = HybridModel(config, dtype=torch.float32)
    loading.load(model, tensors, config)

    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(config.vocab_size, (length + STEPS,), generator=generator).tolist() for length in lengths]
    server = Server(model, config, len(rows), max(lengths) + STEPS, seed=seed)
    parts = [[one] for one in server.step([row[:length] for row, length in zip(rows, lengths, strict=True)])]
    for step in range(STEPS):
        new = server.step([[row[length + step]] for row, length in zip(rows, lengths, strict=True)])
        for kept, one in zip(parts, new, strict=True):
            kept.append(one)
    with torch.inference_mode():
        wanted = [theirs(torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    assert len(margins) == len(rows) and min(margins) >= NEAR_TIES, "a near tie: add the seed to LEFT_OUT"
    for kept, one in zip(parts, wanted, strict=True):
        assert float((torch.cat(kept) - one).abs().max() / one.abs().max()) < LIMIT
