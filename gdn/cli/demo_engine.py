"""A greedy engine for the demo: it owns a hybrid model, its caches and its metadata, and drives them step by step."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gdn.cli.demo_drafts import accept_greedily
from gdn.cli.demo_graphs import FixedStep, FixedSteps
from gdn.layers import (
    AttentionMetadataBuilder,
    CacheAllocator,
    CachedSequence,
    CacheFullError,
    Checkpoint,
    GDNMetadataBuilder,
    HybridCaches,
    HybridModel,
    StepMetadata,
)
from gdn.layers.metadata import CHECKPOINT_MULTIPLE

OnLogits = Callable[[list["Stream"], list[int], Tensor], None]


@dataclass(frozen=True)
class EngineSizes:
    """Capacity of an engine.

    Parameters
    ----------
    max_num_sequences, max_seq_len : int
        Sequences at a time, and tokens of one.
    block_size : int
        Tokens of a cache block.
    num_blocks : int, optional
        Blocks of the caches; None = enough for all sequences at their longest.
    num_spec : int
        Largest number of drafts of a sequence; 0 = no speculation.
    num_checkpoints : int
        Prefixes kept for reuse; 0 = none.
    """

    max_num_sequences: int
    max_seq_len: int
    block_size: int = 64
    num_blocks: int | None = None
    num_spec: int = 0
    num_checkpoints: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the caches."""
        if self.num_blocks is not None:
            return self.num_blocks
        return self.max_num_sequences * -(-self.max_seq_len // self.block_size)


@dataclass(eq=False)
class Stream:
    """One sequence that the engine generates.

    Attributes
    ----------
    tokens : list of int
        Prompt and generated tokens. After the prefill the last one is not in the caches yet: the next step takes it.
    num_prompt_tokens, num_computed : int
        Tokens of the prompt; leading tokens that the caches and states hold.
    accepted : int
        Tokens of the last speculative step that were accepted: says which state slot is current.
    """

    cached: CachedSequence
    tokens: list[int]
    num_prompt_tokens: int
    num_computed: int
    accepted: int = 1
    _table: tuple[list[int], NDArray[Any]] | None = None

    def table(self) -> NDArray[Any]:
        """Block table as an array; made anew where it changed."""
        if self._table is None or self._table[0] != self.cached.blocks:
            self._table = list(self.cached.blocks), np.array(self.cached.blocks, dtype=np.int64)
        return self._table[1]


@dataclass(frozen=True)
class Work:
    """Work of one stream in a step: its new tokens, and how many of them are drafts (-1: not a speculative row)."""

    stream: Stream
    tokens: list[int]
    drafts: int = -1
    checkpoint: Checkpoint | None = None

    @property
    def length(self) -> int:
        """Tokens of the sequence, the new ones included."""
        return self.stream.num_computed + len(self.tokens)

    @property
    def is_prompt(self) -> bool:
        """Whether the row works on its prompt."""
        return self.stream.num_computed < self.stream.num_prompt_tokens


@dataclass(frozen=True)
class Generated:
    """Result of one phase.

    Attributes
    ----------
    tokens : list of list of int
        New tokens of each stream.
    num_tokens : int
        Tokens that the phase is measured by: those of the prompts (of prefill), or the new ones.
    seconds : float
        Wall time, the device's work included; captures of graphs are not.
    """

    tokens: list[list[int]] = field(repr=False)
    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all streams together."""
        return self.num_tokens / self.seconds if self.num_tokens else 0.0


class Engine:
    """Greedy generation with a hybrid model.

    Parameters
    ----------
    model : HybridModel
        On its device; its null slot is that of `caches`. Tensor-parallel ranks make the same calls of their engines.
    sizes : EngineSizes
    state_dtype : torch.dtype
        Dtype of the recurrent states.
    use_graphs : bool, optional
        Whether decode and verification run padded batches of fixed shape, captured as CUDA graphs on a GPU. None = on a GPU.
    null_slot : int
        Largest state slot that is never used.

    Attributes
    ----------
    streams : list of Stream
        Live sequences, in the order of their prompts.
    on_logits : callable, optional
        Called after every step with the step's streams, the number of rows of each, and the logits of these rows. A prompt
        chunk has one row, its last token's.
    """

    def __init__(
        self,
        model: HybridModel,
        sizes: EngineSizes,
        *,
        state_dtype: torch.dtype = torch.float32,
        use_graphs: bool | None = None,
        null_slot: int = -1,
    ) -> None:
        self.model, self.sizes = model, sizes
        self.device, dtype = model.embed_tokens.device, model.embed_tokens.dtype
        config = model.config
        self.caches = HybridCaches(
            config, sizes.blocks, sizes.block_size, sizes.max_num_sequences, num_checkpoints=sizes.num_checkpoints,
            num_spec=sizes.num_spec, null_slot=null_slot, dtype=dtype, state_dtype=state_dtype, device=self.device,
        )  # fmt: skip
        self.allocator = CacheAllocator(self.caches)
        rows = sizes.max_num_sequences
        ranks = {"cp_rank": model.context_parallel.rank, "cp_size": model.context_parallel.size}
        self._gdn = GDNMetadataBuilder(self.device, num_spec=sizes.num_spec, max_num_sequences=rows, null_slot=null_slot, **ranks)
        self._attention = AttentionMetadataBuilder(
            self.device, block_size=sizes.block_size, max_seq_len=sizes.max_seq_len, index_ratio=config.index_ratio,
            max_num_sequences=rows, max_query_len=1 + sizes.num_spec, **ranks,
        )  # fmt: skip
        on_gpu = self.device.type == "cuda"
        self.use_graphs = on_gpu if use_graphs is None else use_graphs
        self._fixed = FixedSteps(self._make_fixed, rows)
        self.streams: list[Stream] = []
        self.on_logits: OnLogits | None = None

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int | None = None) -> Generated:
        """Starts a stream for each prompt and computes its first token, all prompts in one ragged batch.

        chunk: most tokens of a prompt in one step, a multiple of 64; None = whole prompts.

        Raises
        ------
        CacheFullError
            No stream was started then.
        ValueError
            Named after the argument.
        """
        if chunk is not None and (chunk < 1 or chunk % CHECKPOINT_MULTIPLE):
            raise ValueError(f"chunk: expected a positive multiple of {CHECKPOINT_MULTIPLE}, got {chunk}")
        for prompt in prompts:
            if not 0 < len(prompt) <= self.sizes.max_seq_len:
                raise ValueError(f"prompts: expected 1 to {self.sizes.max_seq_len} tokens each, got {len(prompt)}")
        started = self._now()
        streams = self._admit(prompts)
        count = sum(stream.num_prompt_tokens - stream.num_computed for stream in streams)
        try:
            while works := [
                self._next_chunk(stream, chunk) for stream in streams if stream.num_computed < stream.num_prompt_tokens
            ]:
                self._run_prompts(works)
        except BaseException:
            for stream in streams:
                self.allocator.free(stream.cached)
            raise
        self.streams += streams
        return Generated([stream.tokens[-1:] for stream in streams], count, self._now() - started)

    @torch.inference_mode()
    def decode(self, steps: int, forced: Sequence[Sequence[int]] | None = None) -> Generated:
        """`steps` tokens for every stream, one at a time. The host waits for the device after the last step alone.

        forced: tokens [streams][steps] that take the place of the model's choices (teacher forcing).

        Raises
        ------
        CacheFullError
            No stream was changed then.
        """
        streams, count = self.streams, len(self.streams)
        if not streams or steps < 1:
            return Generated([[] for _ in streams], 0, 0.0)
        given = None if forced is None else self._to_device([list(step) for step in zip(*forced, strict=True)])
        self._reserve(streams, [steps] * count)
        rows = self._fixed.padded(count) if self.use_graphs else count
        fixed = self._fixed.get(rows, 1) if self.use_graphs else None
        started = self._now()
        current = self._to_device([stream.tokens[-1] for stream in streams])
        chosen = torch.empty(steps, count, dtype=torch.int64, device=self.device)
        for step in range(steps):
            drafts = 0 if self.sizes.num_spec else -1
            works = [Work(stream, [-1], drafts) for stream in streams]  # the token is on the device
            logits = self._run(works, current) if fixed is None else self._run_fixed(works, current, fixed, rows, 1)
            best = self.model.greedy_tokens(logits) if fixed is None else fixed.next_ids[:count]
            chosen[step] = best if given is None else given[step]
            current = chosen[step]
            self._tell(works, logits[:count])
            for stream in streams:
                stream.num_computed, stream.accepted = stream.num_computed + 1, 1
        tokens: list[list[int]] = chosen.T.tolist()
        for stream, new in zip(streams, tokens, strict=True):
            stream.tokens += new
        return Generated(tokens, steps * count, self._now() - started)

    @torch.inference_mode()
    def verify(self, drafts: Sequence[Sequence[int]]) -> Generated:
        """One speculative step: every stream's drafts are checked at once, and those that greedy decoding would make are kept.

        The states go on from the last accepted draft: the next step reads them by the number of accepted tokens.

        Parameters
        ----------
        drafts : [streams][0 to num_spec]
            Proposed tokens of each stream.

        Returns
        -------
        Generated
            Accepted drafts and one token more of each stream.

        Raises
        ------
        CacheFullError
            No stream was changed then.
        ValueError
            Named after the argument.
        """
        streams, most = self.streams, self.sizes.num_spec
        if len(drafts) != len(streams):
            raise ValueError(f"drafts: expected {len(streams)} rows, one for each stream, got {len(drafts)}")
        if not most or any(len(one) > most for one in drafts):
            raise ValueError(f"drafts: expected at most {most} (num_spec, at least 1), got {[len(one) for one in drafts]}")
        if not streams:
            return Generated([], 0, 0.0)
        works = [Work(stream, [stream.tokens[-1], *one], len(one)) for stream, one in zip(streams, drafts, strict=True)]
        self._reserve(streams, [len(work.tokens) for work in works])
        rows = self._fixed.padded(len(streams))
        fixed = self._fixed.get(rows, 1 + most) if self.use_graphs else None
        started = self._now()
        ids = self._to_device([token for work in works for token in work.tokens])
        logits = self._run(works, ids) if fixed is None else self._run_fixed(works, ids, fixed, rows, 1 + most)
        logits = logits[: ids.shape[0]]
        best = iter(self.model.greedy_tokens(logits).tolist())
        self._tell(works, logits)
        tokens = []
        for work in works:
            new = accept_greedily(work.tokens[1:], [next(best) for _ in work.tokens])
            stream = work.stream
            stream.tokens += new
            stream.num_computed, stream.accepted = stream.num_computed + len(new), len(new)
            self.allocator.truncate(stream.cached, stream.num_computed)
            tokens.append(new)
        return Generated(tokens, sum(map(len, tokens)), self._now() - started)

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Tensor]:
        """Logits [length - start, vocab] after the tokens of whole sequences from `starts` on, from one pass.

        Nothing of the sequences stays in the caches.

        Raises
        ------
        CacheFullError
        """
        streams = self._admit(sequences)
        try:
            works = [Work(stream, stream.tokens[stream.num_computed :]) for stream in streams]
            ids = self._to_device([token for work in works for token in work.tokens])
            hidden_states = self.model(ids, self._to_device(_positions(works)), self._metadata(works), self.caches)
            ends = np.cumsum([len(work.tokens) for work in works]).tolist()
            counts = [len(tokens) - start for tokens, start in zip(sequences, starts, strict=True)]
            wanted = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
            logits = self.model.compute_logits(hidden_states.index_select(0, self._to_device(wanted)))
        finally:
            for stream in streams:
                self.allocator.free(stream.cached)
        return list(logits.split(counts))

    def fork(self, stream: Stream) -> Stream:
        """New stream that continues where another is now."""
        copy = Stream(
            self.allocator.fork(stream.cached), list(stream.tokens), stream.num_prompt_tokens, stream.num_computed,
            stream.accepted,
        )  # fmt: skip
        self.streams.append(copy)
        return copy

    def finish(self, stream: Stream | None = None) -> None:
        """Frees one stream, or all of them."""
        for one in [stream] if stream is not None else list(self.streams):
            self.streams.remove(one)
            self.allocator.free(one.cached)

    def drop_graphs(self) -> None:
        """Frees captured steps: NCCL does not let a group of ranks end before the graphs with its exchanges."""
        self._fixed.clear()

    def _admit(self, prompts: Sequence[Sequence[int]]) -> list[Stream]:
        """A stream for every prompt, or for none."""
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                cached = self.allocator.add_prompt(prompt)
                streams.append(Stream(cached, list(prompt), len(prompt), cached.num_cached_tokens))
        except BaseException:
            for stream in streams:
                self.allocator.free(stream.cached)
            raise
        return streams

    def _next_chunk(self, stream: Stream, chunk: int | None) -> Work:
        """The next tokens of a prompt, with a checkpoint at the last multiple of 64 before the prompt's last token."""
        start, stop = stream.num_computed, stream.num_prompt_tokens
        if chunk is not None:
            stop = min(stop, start + chunk)
        unit = math.lcm(CHECKPOINT_MULTIPLE, self.caches.indexer.ratio)
        target = (stream.num_prompt_tokens - 1) // unit * unit
        checkpoint = None
        if self.sizes.num_checkpoints and start < target <= stop:
            try:
                checkpoint = self.allocator.checkpoint(stream.cached, target)
            except CacheFullError:  # the prompt goes on without
                pass
        return Work(stream, stream.tokens[start:stop], checkpoint=checkpoint)

    def _run_prompts(self, works: list[Work]) -> None:
        ids = self._to_device([token for work in works for token in work.tokens])
        try:
            logits = self._run(works, ids)
        except BaseException:
            for work in works:
                if work.checkpoint is not None:
                    self.allocator.drop(work.checkpoint)
            raise
        best = self.model.greedy_tokens(logits).tolist()
        self._tell(works, logits)
        for work, token in zip(works, best, strict=True):
            stream = work.stream
            stream.num_computed = work.length
            if work.checkpoint is not None:
                self.allocator.keep(work.checkpoint, stream.tokens[: work.checkpoint.num_tokens])
            if stream.num_computed == stream.num_prompt_tokens:
                stream.tokens.append(token)

    def _reserve(self, streams: list[Stream], counts: list[int]) -> None:
        for stream, count in zip(streams, counts, strict=True):
            if stream.num_computed + count > self.sizes.max_seq_len:
                raise ValueError(f"steps: expected at most {self.sizes.max_seq_len} tokens of a sequence (max_seq_len)")
        self.allocator.extend_all([stream.cached for stream in streams], counts)

    def _metadata(self, works: list[Work], pad_to: int | None = None, query_len: int | None = None) -> StepMetadata:
        queries, lengths = [len(work.tokens) for work in works], [work.length for work in works]
        streams = [work.stream for work in works]
        checkpoints: dict[str, Any] = {}
        if any(work.checkpoint for work in works):
            kept = [(0, -1) if one is None else (one.num_tokens - work.stream.num_computed, one.slot)
                    for work in works for one in [work.checkpoint]]  # fmt: skip
            checkpoints = {"checkpoint_offsets": [[at] for at, _ in kept], "checkpoint_slots": [[slot] for _, slot in kept]}
        gdn = self._gdn.build(
            queries, lengths, [stream.cached.state_slots for stream in streams],
            num_draft_tokens=[work.drafts for work in works], num_accepted_tokens=[stream.accepted for stream in streams],
            is_prefilling=[work.is_prompt for work in works], pad_to=pad_to, **checkpoints,
        )  # fmt: skip
        tables = np.full((len(works), -(-self.sizes.max_seq_len // self.sizes.block_size)), -1)
        for row, stream in enumerate(streams):
            tables[row, : len(stream.cached.blocks)] = stream.table()
        slots = [stream.cached.slot for stream in streams]
        attention = self._attention.build(queries, lengths, tables, slots, pad_to=pad_to, pad_query_len=query_len)
        return StepMetadata(gdn, attention)

    def _run(self, works: list[Work], ids: Tensor) -> Tensor:
        """Logits of a step of any shape: of all rows of speculative and decode rows, of the last row of a prompt chunk."""
        step = self._metadata(works)
        hidden_states = self.model(ids, self._to_device(_positions(works)), step, self.caches)
        if any(work.drafts < 0 and len(work.tokens) > 1 for work in works):
            ends = np.cumsum([len(work.tokens) for work in works])
            wanted = [
                row
                for work, end in zip(works, ends.tolist(), strict=True)
                for row in range(end - (len(work.tokens) if work.drafts >= 0 else 1), end)
            ]
            hidden_states = hidden_states.index_select(0, self._to_device(wanted))
        return self.model.compute_logits(hidden_states)

    def _run_fixed(self, works: list[Work], ids: Tensor, fixed: FixedStep, rows: int, query_len: int) -> Tensor:
        """Logits of a padded step, in its buffer."""
        step = self._metadata(works, rows, query_len)
        positions = _positions(works)
        count = len(positions)
        fixed.input_ids[:count].copy_(ids)
        fixed.positions[:count].copy_(self._to_device(positions))
        fixed(step)
        return fixed.logits

    def _make_fixed(self, rows: int, query_len: int) -> FixedStep:
        """Step of `rows` rows of `query_len` tokens, all of them padding."""
        sizes, null_slot = self.sizes, self.caches.gdn.null_slot
        slots = [[null_slot] * (1 + sizes.num_spec)] * rows
        drafts = [0 if sizes.num_spec else -1] * rows
        gdn = self._gdn.build([1] * rows, [1] * rows, slots, num_draft_tokens=drafts, pad_to=rows)
        attention = self._attention.build([], [], [], [], pad_to=rows, pad_query_len=query_len)
        step, captured = StepMetadata(gdn, attention), self.device.type == "cuda"
        return FixedStep(self.model, self.caches, rows * query_len, step, self.device, is_captured=captured)

    def _tell(self, works: list[Work], logits: Tensor) -> None:
        if self.on_logits is not None:
            rows = [1 if work.drafts < 0 else len(work.tokens) for work in works]
            self.on_logits([work.stream for work in works], rows, logits)

    def _to_device(self, values: Any) -> Tensor:
        """int64 tensor of host values; on a GPU from pinned memory, without a wait."""
        host = torch.tensor(values, dtype=torch.int64, device="cpu")
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def _now(self) -> float:
        """Wall time after the device's work is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _positions(works: list[Work]) -> list[int]:
    return [position for work in works for position in range(work.stream.num_computed, work.length)]
