"""Replay decode on vLLM's pages on the GPU next to the same steps on the CPU, eager and as captured graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gdn
from gdn.integrations._vllm_replay_step import step_of
from tests.integrations.test_vllm_replay import Life
from tests.integrations.test_vllm_warm_up import FOLDS
from tests.integrations.vllm_engine import H, int32
from tests.integrations.vllm_replay import Engine, ReplayHost, Running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(not FOLDS, reason="fold_states has no kernel, so that no layer replays on a GPU"),
]
Tensor = torch.Tensor
DIMS, PHASE = (128, 128), 3
# In l2; the CPU computes in float32 throughout. CLOSE is of all steps together. One step of few rows may have a head whose query
# and key nearly cancel; the norm after it raises the rounding of that head with it.
CLOSE, CLOSE_STATES, CLOSE_STEP = 1e-2, 2e-3, 3e-2


class RoundedHost(ReplayHost):
    """All that the projections give, and all parameters, are values of bfloat16: the windows are equal on both sides then."""

    def normal(self, *shape: int) -> Tensor:
        return super().normal(*shape).bfloat16().float()


class Both:
    """The step on the CPU in float32, and on another device, compared. Takes the place of an engine's step.

    captures: steps without prompts are graphs there, made once for each kind and size of batch.
    """

    def __init__(self, host: ReplayHost, device: torch.device, dtype: torch.dtype, *, captures: bool) -> None:
        self.host, self.device, self.dtype, self.captures = host, device, dtype, captures
        options: dict[str, Any] = {"conv_dim_first": host.dim_first, "page": host.page, "fold_phase": PHASE}
        self.here, self.there = step_of(host.layer, **options), step_of(self._layer(), **options)
        windows, flat = host.layer.kv_cache
        self.pages = (apart(windows.to(device, dtype)), apart(flat.to(device)))
        self.graphs: dict[Any, tuple[Any, list[Tensor], SimpleNamespace]] = {}
        self.replays = 0
        self.errors, self.sizes = 0.0, 0.0  # squares, of all steps

    def _layer(self) -> SimpleNamespace:
        known = vars(self.host.layer) | {"kv_cache": None}
        own = moved(known, self.device)
        own["conv1d"].weight = own["conv1d"].weight.to(self.dtype)
        own["norm"].weight = own["norm"].weight.to(self.dtype)
        return SimpleNamespace(**own)

    def __call__(self, qkvz: Tensor, ba: Tensor, core: Tensor, metadata: SimpleNamespace) -> None:
        self.here(qkvz, ba, core, metadata)
        rows = [x.to(self.device, self.dtype) for x in (qkvz, ba)]
        rows.append(torch.zeros(core.shape, dtype=self.dtype, device=self.device))
        batch = moved(metadata, self.device)
        found = rows[2]
        if self.captures and not metadata.num_prefills:
            found = self._replayed(rows, batch)
        else:
            self.there(*rows, batch, self.pages)
        error, size = (found.float().cpu() - core).norm(), core.norm()
        assert error < CLOSE_STEP * size, (error / size, vars(metadata))
        self.errors += float(error) ** 2
        self.sizes += float(size) ** 2

    def _replayed(self, rows: list[Tensor], batch: SimpleNamespace) -> Tensor:
        key = (batch.spec_sequence_masks is not None, batch.num_actual_tokens, len(batch.gdn_replay.computed))
        if key not in self.graphs:
            nobody = moved(batch, self.device)
            for name in ("non_spec_state_indices_tensor", "spec_state_indices_tensor"):
                if getattr(nobody, name) is not None:
                    getattr(nobody, name).zero_()
            nobody.gdn_replay = nobody.gdn_replay._replace(
                slots=None if batch.gdn_replay.slots is None else 0 * batch.gdn_replay.slots
            )
            self.there(*rows, nobody, self.pages)  # compiles, and moves nothing
            kept, kept_batch = [x.clone() for x in rows], moved(batch, self.device)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.there(*kept, kept_batch, self.pages)
            self.graphs[key] = (graph, kept, kept_batch)
        graph, kept, kept_batch = self.graphs[key]
        for target, source in zip((*kept, *tensors(kept_batch)), (*rows, *tensors(batch)), strict=True):
            target.copy_(source)
        graph.replay()
        self.replays += 1
        return kept[2]

    def check_states(self, every: list[Running]) -> None:
        """Folds copies on both sides and compares."""
        host, page, folded = self.host, self.host.page, []
        for flat in (host.layer.kv_cache[1].clone(), self.pages[1].clone()):
            views, device = page.views(flat), flat.device
            gdn.fold_states(
                views.states, int32([own.block for own in every]).to(device), views.ring, views.state_tokens,
                int32([own.computed for own in every]).to(device), num_k_heads=H, fold_every=page.fold_every, fold_phase=PHASE,
                num_accepted_tokens=int32([own.accepted for own in every]).to(device), state_v_first=True, null_slot=0,
            )  # fmt: skip
            folded.append(views.states[[own.block for own in every]].cpu())
        assert (folded[1] - folded[0]).norm() / folded[0].norm() < CLOSE_STATES


def apart(x: Tensor) -> Tensor:
    """A copy whose blocks are longer than what they hold, by a multiple of 16 bytes."""
    size = x[0].numel()
    memory = x.new_empty(len(x), size + 128 // x.element_size())
    memory[:, :size] = x.flatten(1)
    return memory[:, :size].unflatten(1, x.shape[1:])


def moved(value: Any, device: torch.device) -> Any:
    """A copy of all tensors in it on a device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**moved(vars(value), device))
    if isinstance(value, dict):
        return {name: moved(one, device) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(one, device) for one in value))
    return value


def tensors(batch: SimpleNamespace) -> list[Tensor]:
    """What a step without prompts reads of a batch."""
    found = [batch.non_spec_state_indices_tensor, batch.spec_query_start_loc, batch.num_accepted_tokens]
    return [one for one in (*found, batch.gdn_replay.computed, batch.gdn_replay.slots) if one is not None]


def run(host: ReplayHost, device: torch.device, dtype: torch.dtype, *, captures: bool, steps: int = 120) -> Both:
    """A life of sequences on both sides."""
    host.free = host.free[:7]
    engine = Engine(host)
    both = Both(host, device, dtype, captures=captures)
    engine.step = both  # type: ignore[assignment]
    life = Life(engine)
    with torch.inference_mode():
        for n in range(steps):
            life.step()
            if n % 10 == 9:
                both.check_states([own for own in life.running if own.computed])
    return both


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize(("num_spec", "interleaved", "dim_first"), [(0, True, False), (2, False, False), (3, True, True)])
def test_both_sides_go_the_same_way(num_spec: int, interleaved: bool, dim_first: bool, captures: bool) -> None:
    host = RoundedHost(40 + num_spec, num_spec=num_spec, interleaved=interleaved, dim_first=dim_first, dims=DIMS)
    both = run(host, torch.device("cuda"), torch.bfloat16, captures=captures)
    assert both.errors < CLOSE**2 * both.sizes
    assert both.replays > 20 or not captures
