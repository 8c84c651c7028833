"""Problems of vLLM's layers where they decode by replay: the decode steps with a ring, and the folds before prompts.

A server decides by its own settings whether it replays (`gdn.integrations.vllm`), so these come besides those without a ring.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gdn.ops.delta_rule.problem import FoldStatesProblem, ring_choice
from gdn.served.gdn_layer import GdnLayer
from gdn.served.sizes import SEQUENCES, Group, at


def groups(layer: GdnLayer) -> Iterator[Group]:
    """Each call's problem at all of its sizes; none for head dims that the fused step does not serve."""
    K, V = layer.head_k_dim, layer.head_v_dim
    if K % 32 or V % 32 or max(K, V) > 256:
        return
    rows, fold_every = ring_choice(1 + layer.num_spec, layer.state_dtype)
    ring: dict[str, Any] = {"ring_rows": rows, "fold_every": fold_every}
    for group in layer.decode():
        yield tuple(replace(problem, has_columns=False, **ring) for problem in group)  # type: ignore[type-var]
    fold = FoldStatesProblem(
        num_k_heads=layer.num_k_heads, num_state_heads=layer.num_v_heads, head_k_dim=K, head_v_dim=V,
        state_dtype=layer.state_dtype, state_v_first=layer.state_v_first, index_dtype=layer.index_dtype,
        has_accepted=bool(layer.num_spec), has_final_indices=False, has_rounding=False, num_layers=1, num_sequences=1, **ring,
    )  # fmt: skip
    yield at(fold, ("num_sequences",), ((count,) for count in SEQUENCES))
