"""Problem of every operator on a model's shapes, with the dtypes, layouts and flags of a serving engine's call: shared parts.

Each family has them in its `examples.py`, one function per operator, under the operator's name. `gdn explain`, the autotuner's
shapes, the seeded calls, `gdn compile` and the tests' variants start from these problems and replace fields. Prompts have 8192
tokens; decode steps have 128 sequences of one token.

fp8: whether the indexer's cache and logits are in FP8 (else bfloat16); the other operators ignore it.
"""

from typing import Any

from gdn.models import ModelShape

BF16, FP8 = "bfloat16", "float8_e4m3fn"
TOKENS = 8192


def same(value: Any, *names: str) -> dict[str, Any]:
    """One value for several fields."""
    return dict.fromkeys(names, value)


def heads_of(model: ModelShape) -> dict[str, Any]:
    return {name: getattr(model, name) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")}
