"""Steps of fixed shape: padded batches on persistent buffers, captured as CUDA graphs where there is a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn.layers import StepMetadata

WARM_UPS = 2  # runs before the capture: kernels are compiled and libraries set up


class FixedStep:
    """One forward of a model over `tokens` rows, with the greedy choice after each row.

    Parameters
    ----------
    model, caches : HybridModel, HybridCaches
    tokens : int
        Rows, padding included.
    step : StepMetadata
        A batch of padding alone, of the shape that the later ones have and in the same buffers.
    device : torch.device
    is_captured : bool
        Whether to capture a CUDA graph; else every call runs the model.

    Attributes
    ----------
    input_ids, positions : Tensor [tokens] of int64
        To be filled before a call.
    logits, next_ids : Tensor [tokens, vocab], Tensor [tokens] of int64
        Results of the last call, overwritten by the next.
    """

    logits: Tensor

    def __init__(
        self, model: Any, caches: Any, tokens: int, step: StepMetadata, device: torch.device, *, is_captured: bool
    ) -> None:
        self._model, self._caches = model, caches
        self.input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.next_ids = torch.zeros_like(self.input_ids)
        self._graph: torch.cuda.CUDAGraph | None = None
        if is_captured:
            self._capture(step)

    def __call__(self, step: StepMetadata) -> None:
        """Runs the batch whose metadata is in the buffers."""
        if self._graph is None:
            self._run(step)
        else:
            self._graph.replay()

    def _run(self, step: StepMetadata) -> None:
        hidden_states = self._model(self.input_ids, self.positions, step, self._caches)
        self.logits = self._model.compute_logits(hidden_states)
        self.next_ids.copy_(self._model.greedy_tokens(self.logits))

    def _capture(self, step: StepMetadata) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._run(step)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # With several ranks, another thread watches NCCL's events meanwhile: what it calls is no concern of the capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._run(step)


class FixedSteps:
    """Fixed steps by their shape, made at the first use of each: rows of a batch, and tokens of a row.

    Parameters
    ----------
    make : callable (rows, tokens per row) -> FixedStep
    max_rows : int
        Most rows of a batch.
    """

    def __init__(self, make: Callable[[int, int], FixedStep], max_rows: int) -> None:
        self._make, self._max_rows = make, max_rows
        self._made: dict[tuple[int, int], FixedStep] = {}

    def padded(self, rows: int) -> int:
        """Rows of the smallest batch that holds `rows`: a power of two, at most `max_rows`."""
        return min(self._max_rows, 1 << max(0, rows - 1).bit_length())

    def get(self, rows: int, query_len: int) -> FixedStep:
        """Step of `rows` rows of `query_len` tokens."""
        key = rows, query_len
        if key not in self._made:
            self._made[key] = self._make(rows, query_len)
        return self._made[key]

    def clear(self) -> None:
        """Frees all steps."""
        self._made.clear()
