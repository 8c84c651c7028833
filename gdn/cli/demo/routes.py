"""Which experts a model selects for each row of a step.

Scores of two experts may be nearly equal. A rounding then selects the other one, and the row is several times as far off as rows
with the same experts: two kinds of rows, which are judged apart (`reference.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gdn.layers import HybridModel, MoE


class Routes:
    """Experts of the rows of a model's last step, in captured steps too.

    Parameters
    ----------
    model : HybridModel
        Its steps are recorded from here on, until `stop`. Steps that are captured meanwhile write to this object's memory at
        every replay: it has to live as long as they do.
    most_rows : int
        Most rows of a step, padding included.
    kinds : tuple of type
        Modules that select experts by a method `route`.
    """

    def __init__(self, model: HybridModel, most_rows: int, kinds: tuple[type[nn.Module], ...] = (MoE,)) -> None:
        self._model = model
        self._modules: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
        width = self._modules[0].top_k if self._modules else 0
        device = model.embed_tokens.device
        self._experts = torch.zeros(most_rows, len(self._modules), width, dtype=torch.int64, device=device)
        forward = model.forward

        def recorded(input_ids: Tensor, positions: Tensor, step: Any, caches: Any) -> Tensor:
            output = forward(input_ids, positions, step, caches)
            ranks, parts = model.context_parallel, getattr(step.gdn, "parts", None)
            if parts is not None and self._modules:  # a rank's own rows were seen; numbers of experts are exact in float32
                own = self._experts[: ranks.own(input_ids, parts).shape[0]].float()
                self._experts[: input_ids.shape[0]] = ranks.whole(own, parts, input_ids.shape[0]).long()
            return output

        vars(model)["forward"] = recorded
        for layer, module in enumerate(self._modules):
            vars(module)["route"] = self._recording(module.route, layer)

    def _recording(self, route: Any, layer: int) -> Any:
        def recorded(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            weights, experts = route(hidden_states)
            self._experts[: experts.shape[0], layer].copy_(experts)
            return weights, experts

        return recorded

    def of(self, rows: Sequence[int]) -> Tensor:
        """Experts of some rows of the last step [rows, layers, k], ascending."""
        places = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self._experts.device)
        return self._experts.index_select(0, places).sort(dim=-1).values

    def stop(self) -> None:
        """Ends the recording."""
        for module in (self._model, *self._modules):
            for name in ("forward", "route"):
                vars(module).pop(name, None)


@contextmanager
def recording(model: HybridModel, most_rows: int, *kinds: type[nn.Module]) -> Iterator[Routes]:
    """Records the steps of the body; none of them may stay captured."""
    routes = Routes(model, most_rows, kinds or (MoE,))
    try:
        yield routes
    finally:
        routes.stop()


def reroutings(experts: Tensor, others: Tensor) -> Tensor:
    """Number of layers [rows] in which two passes select different experts for a row; each [rows, layers, k], ascending."""
    return (experts != others).any(dim=-1).sum(dim=-1)
