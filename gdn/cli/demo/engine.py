"""A greedy engine for the demo: it owns a hybrid model, its caches and its metadata, and drives them step by step."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from gdn.cli.demo.drafts import accept_greedily
from gdn.cli.demo.graphs import FixedStep, FixedSteps
from gdn.cli.demo.streams import EngineSizes as EngineSizes
from gdn.cli.demo.streams import Generated as Generated
from gdn.cli.demo.streams import Stream as Stream
from gdn.cli.demo.streams import StreamLostError as StreamLostError
from gdn.cli.demo.streams import Work
from gdn.layers import (
    AttentionMetadataBuilder,
    CacheAllocator,
    CacheFullError,
    GatedDeltaNet,
    GDNMetadataBuilder,
    HybridCaches,
    HybridModel,
    StepMetadata,
)
from gdn.layers.host_arrays import as_tokens, at_least, refuse, to_device
from gdn.layers.metadata import CHECKPOINT_MULTIPLE

OnLogits = Callable[[list["Stream"], list[int], Tensor], None]


class Engine:
    """Greedy generation with a hybrid model.

    A step takes the blocks and slots that it can need before its first launch: a full cache, and bad input, change nothing. Where
    a step fails after a launch its streams are lost: `finish` frees them, and what else uses them raises. Other streams, and kept
    prefixes, go on. An engine cannot be pickled or copied.

    Parameters
    ----------
    model : HybridModel
        On its device; its null slot is `null_slot`. Tensor-parallel ranks make the same calls of their engines.
    sizes : EngineSizes
    state_dtype : torch.dtype
        Dtype of the recurrent states.
    use_graphs : bool, optional
        Whether decode and verification run padded batches of fixed shape, captured as CUDA graphs on a GPU. None = on a GPU.
    null_slot : int
        Largest state slot that is never used.
    replay : bool, optional
        Whether decode is by replay, as for `gdn.layers.HybridCaches`. None = as ``GDN_REPLAY`` says now.

    Attributes
    ----------
    streams : list of Stream
        Live sequences, in the order of their prompts.
    on_logits : callable, optional
        Called after every step with the step's streams, the number of rows of each, and the logits of these rows. A prompt
        chunk has one row, its last token's. It may not call the engine, which refuses; where it raises, the step fails.

    Raises
    ------
    TypeError, ValueError
        Named after the argument: sequences longer than the model's positions, sizes that no cache can have, a null slot that is
        not the model's.
    """

    def __init__(
        self,
        model: HybridModel,
        sizes: EngineSizes,
        *,
        state_dtype: torch.dtype = torch.float32,
        use_graphs: bool | None = None,
        null_slot: int = -1,
        replay: bool | None = None,
    ) -> None:
        self.model, self.sizes = model, sizes
        self.device, dtype = model.embed_tokens.device, model.embed_tokens.dtype
        config = model.config
        most = config.max_position_embeddings
        if sizes.max_seq_len > most:
            refuse("max_seq_len", f"at most {most} (max_position_embeddings of the model)", sizes.max_seq_len)
        own = {module.null_slot for module in model.modules() if isinstance(module, GatedDeltaNet)}
        if own - {null_slot}:
            refuse("null_slot", f"{min(own)}, the model's", null_slot)
        self.caches = HybridCaches(
            config, sizes.blocks, sizes.block_size, sizes.max_num_sequences, num_checkpoints=sizes.num_checkpoints,
            num_spec=sizes.num_spec, null_slot=null_slot, dtype=dtype, state_dtype=state_dtype, device=self.device,
            replay=replay,
        )  # fmt: skip
        self.allocator = CacheAllocator(self.caches)
        rows = sizes.max_num_sequences
        ranks: dict[str, Any] = {"cp_rank": model.context_parallel.rank, "cp_size": model.context_parallel.size}
        self._gdn = GDNMetadataBuilder(
            self.device, num_spec=sizes.num_spec, max_num_sequences=rows, null_slot=null_slot,
            replay=self.caches.gdn.has_replay, **ranks,
        )  # fmt: skip
        self._attention = AttentionMetadataBuilder(
            self.device, block_size=sizes.block_size, max_seq_len=sizes.max_seq_len, index_ratio=config.index_ratio,
            max_num_sequences=rows, max_query_len=1 + sizes.num_spec, **ranks,
        )  # fmt: skip
        on_gpu = self.device.type == "cuda"
        self.use_graphs = on_gpu if use_graphs is None else use_graphs
        self._fixed = FixedSteps(self._make_fixed, rows)
        self.streams: list[Stream] = []
        self.on_logits: OnLogits | None = None
        self._is_busy = False
        self._launches = 0  # forwards that were started on live streams

    def __reduce__(self) -> NoReturn:
        """Refuses pickles and copies."""
        raise TypeError(
            "Engine: expected no copy and no pickle of an engine, whose captured steps and ranks are of this process; "
            "pickle the weights and the tokens of the streams, and prefill these"
        )

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int | None = None) -> Generated:
        """Starts a stream for each prompt and computes its first token, all prompts in one ragged batch.

        chunk: most tokens of a prompt in one step, a multiple of 64; None = whole prompts.

        Raises
        ------
        CacheFullError
            No stream was started then.
        TypeError, ValueError
            Named after the argument; no stream was started.
        """
        if chunk is not None:
            at_least("chunk", chunk, 1)
            if chunk % CHECKPOINT_MULTIPLE:
                raise ValueError(f"chunk: expected a positive multiple of {CHECKPOINT_MULTIPLE}, got {chunk}")
        tokens = self._checked("prompts", prompts)
        with self._alone():
            started = self._now()
            streams = self._admit(tokens)
            count = sum(stream.num_prompt_tokens - stream.num_computed for stream in streams)
            try:
                while rest := [stream for stream in streams if stream.num_computed < stream.num_prompt_tokens]:
                    self._run_prompts(rest, chunk)
                seconds = self._now() - started
            except BaseException:
                self._discard(streams)
                raise
            self.streams += streams
        return Generated([stream.tokens[-1:] for stream in streams], count, seconds)

    @torch.inference_mode()
    def decode(self, steps: int, forced: Sequence[Sequence[int]] | None = None) -> Generated:
        """`steps` tokens for every stream, one at a time. The host waits for the device after the last step alone.

        forced: tokens [streams][steps] that take the place of the model's choices (teacher forcing).

        Raises
        ------
        CacheFullError
            No stream was changed then.
        StreamLostError
            A stream was lost before.
        TypeError, ValueError
            Named after the argument; no stream was changed.
        """
        streams, count = self._usable(), len(self.streams)
        at_least("steps", steps, 0)
        given: list[list[int]] | None = None
        if forced is not None:
            given = [as_tokens(f"forced[{n}]", tokens, self.model.config.vocab_size) for n, tokens in enumerate(forced)]
            if [len(tokens) for tokens in given] != [steps] * count:
                got = [len(tokens) for tokens in given]
                refuse("forced", f"{count} rows of {steps} tokens, one row for each stream", f"rows of {got} tokens")
        if not streams or not steps:
            return Generated([[] for _ in streams], 0, 0.0)
        with self._alone(), self._reserved("steps", streams, [steps] * count):
            rows = self._fixed.padded(count) if self.use_graphs else count
            fixed = self._fixed.get(rows, 1) if self.use_graphs else None
            started = self._now()
            targets = None if given is None else self._to_device([list(step) for step in zip(*given, strict=True)])
            current = self._to_device([stream.tokens[-1] for stream in streams])
            chosen = torch.empty(steps, count, dtype=torch.int64, device=self.device)
            for step in range(steps):
                drafts = 0 if self.sizes.num_spec else -1
                works = [Work(stream, [-1], drafts) for stream in streams]  # the token is on the device
                logits = self._run(works, current) if fixed is None else self._run_fixed(works, current, fixed, rows, 1)
                best = self.model.greedy_tokens(logits) if fixed is None else fixed.next_ids[:count]
                chosen[step] = best if targets is None else targets[step]
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
        StreamLostError
            A stream was lost before.
        TypeError, ValueError
            Named after the argument; no stream was changed.
        """
        streams, most = self._usable(), self.sizes.num_spec
        if len(drafts) != len(streams):
            raise ValueError(f"drafts: expected {len(streams)} rows, one for each stream, got {len(drafts)}")
        given = [as_tokens(f"drafts[{n}]", one, self.model.config.vocab_size) for n, one in enumerate(drafts)]
        if not most or any(len(one) > most for one in given):
            raise ValueError(f"drafts: expected at most {most} (num_spec, at least 1), got {[len(one) for one in given]}")
        if not streams:
            return Generated([], 0, 0.0)
        works = [Work(stream, [stream.tokens[-1], *one], len(one)) for stream, one in zip(streams, given, strict=True)]
        with self._alone(), self._reserved("drafts", streams, [len(work.tokens) for work in works]):
            rows = self._fixed.padded(len(streams))
            fixed = self._fixed.get(rows, 1 + most) if self.use_graphs else None
            started = self._now()
            ids = self._to_device(_tokens(works))
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
                self.allocator.truncate(stream.cached, stream.num_computed)  # of what was reserved: no copy
                tokens.append(new)
            return Generated(tokens, sum(map(len, tokens)), self._now() - started)

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Tensor]:
        """Logits [length - start, vocab] after the tokens of whole sequences from `starts` on, from one pass.

        Nothing of the sequences stays in the caches. Kept prefixes that end at or before a sequence's start are used.

        Raises
        ------
        CacheFullError
            Nothing was computed then.
        TypeError, ValueError
            Named after the argument; nothing was computed.
        """
        given = self._checked("sequences", sequences)
        if len(starts) != len(given):
            refuse("starts", f"{len(given)} numbers, one for each sequence", len(starts))
        for n, (tokens, start) in enumerate(zip(given, starts, strict=True)):
            at_least(f"starts[{n}]", start, 0)
            if start >= len(tokens):
                refuse(f"starts[{n}]", f"0 to {len(tokens) - 1}, a token of the sequence", start)
        if not given:
            return []
        with self._alone():
            streams = self._admit(given, starts)
            try:
                works = [Work(stream, stream.tokens[stream.num_computed :]) for stream in streams]
                ids = self._to_device(_tokens(works))
                hidden_states = self.model(ids, self._to_device(_positions(works)), self._metadata(works), self.caches)
                counts = [len(tokens) - start for tokens, start in zip(given, starts, strict=True)]
                logits = self.model.compute_logits(hidden_states.index_select(0, self._to_device(_last_rows(works, counts))))
            finally:
                self._discard(streams)
        return list(logits.split(counts))

    def fork(self, stream: Stream) -> Stream:
        """New stream that continues where another is now.

        Raises
        ------
        CacheFullError
            Nothing has changed then.
        StreamLostError
            The stream is lost.
        ValueError
            It is no live stream of this engine.
        """
        self._check_own(stream)
        if stream.is_lost:
            raise StreamLostError("stream: expected one that is not lost: a step of this one failed, and it can only be finished")
        with self._alone():
            copy = Stream(
                self.allocator.fork(stream.cached), list(stream.tokens), stream.num_prompt_tokens, stream.num_computed,
                stream.accepted,
            )  # fmt: skip
            self.streams.append(copy)
        return copy

    def finish(self, stream: Stream | None = None) -> None:
        """Frees one stream, or all of them; lost ones too.

        Raises
        ------
        ValueError
            It is no live stream of this engine.
        """
        if stream is not None:
            self._check_own(stream)
        with self._alone():
            for one in [stream] if stream is not None else list(self.streams):
                self.streams.remove(one)
                self.allocator.free(one.cached)

    def drop_graphs(self) -> None:
        """Frees captured steps: NCCL does not let a group of ranks end before the graphs with its exchanges."""
        self._fixed.clear()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuses calls of the engine from within one of its steps, from `on_logits`: they would change what it works on."""
        if self._is_busy:
            raise RuntimeError("on_logits: expected no call of the engine, which is in a step")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    @contextmanager
    def _reserved(self, name: str, streams: list[Stream], counts: list[int]) -> Iterator[None]:
        """Takes the blocks of `counts` more tokens of each stream. Where the body fails before a launch they go back, else the
        streams are lost. name: argument that gave the counts."""
        for stream, count in zip(streams, counts, strict=True):
            if (length := stream.num_computed + count) > self.sizes.max_seq_len:
                refuse(name, f"at most {self.sizes.max_seq_len} tokens of a sequence (max_seq_len)", length)
        self.allocator.extend_all([stream.cached for stream in streams], counts)
        launches = self._launches
        try:
            yield
        except BaseException:
            for stream in streams:
                if self._launches == launches:
                    self.allocator.truncate(stream.cached, stream.num_computed)
                else:
                    stream.is_lost = True
            raise

    def _usable(self) -> list[Stream]:
        """The live streams; raises where one of them is lost."""
        lost = sum(stream.is_lost for stream in self.streams)
        if lost:
            raise StreamLostError(f"streams: expected none that is lost, got {lost} of {len(self.streams)}: finish these")
        return list(self.streams)

    def _check_own(self, stream: Stream) -> None:
        if not any(one is stream for one in self.streams):
            refuse("stream", "a live stream of this engine", "one that was finished, or never was its own")

    def _checked(self, name: str, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tokens of sequences that the engine can hold."""
        found = [as_tokens(f"{name}[{n}]", one, self.model.config.vocab_size) for n, one in enumerate(sequences)]
        for tokens in found:
            if not 0 < len(tokens) <= self.sizes.max_seq_len:
                refuse(name, f"1 to {self.sizes.max_seq_len} tokens each", len(tokens))
        return found

    def _admit(self, prompts: list[list[int]], most_cached: Sequence[int] | None = None) -> list[Stream]:
        """A stream for every prompt, or for none. most_cached: longest kept prefix of each that may be used."""
        cached = self.allocator.add_prompts(prompts, most_cached)
        return [Stream(one, prompt, len(prompt), one.num_cached_tokens) for one, prompt in zip(cached, prompts, strict=True)]

    def _discard(self, streams: list[Stream]) -> None:
        """Frees streams that no caller gets."""
        for stream in streams:
            stream.is_lost = True
            self.allocator.free(stream.cached)

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

    def _run_prompts(self, streams: list[Stream], chunk: int | None) -> None:
        """One step of prompts. Where it fails, its checkpoints are dropped, and the caller frees the streams."""
        works: list[Work] = []
        try:
            for stream in streams:
                works.append(self._next_chunk(stream, chunk))
            logits = self._run(works, self._to_device(_tokens(works)))
            best = self.model.greedy_tokens(logits).tolist()
            self._tell(works, logits)
            for work, token in zip(works, best, strict=True):
                stream = work.stream
                stream.num_computed = work.length
                if work.checkpoint is not None:
                    self.allocator.keep(work.checkpoint, stream.tokens[: work.checkpoint.num_tokens])
                if stream.num_computed == stream.num_prompt_tokens:
                    stream.tokens.append(token)
        except BaseException:
            for work in works:
                if work.checkpoint is not None and work.checkpoint.is_live:
                    self.allocator.drop(work.checkpoint)
            raise

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
        step, positions = self._metadata(works), self._to_device(_positions(works))
        self._launches += 1
        hidden_states = self.model(ids, positions, step, self.caches)
        if any(work.drafts < 0 and len(work.tokens) > 1 for work in works):
            wanted = _last_rows(works, [work.num_logits for work in works])
            hidden_states = hidden_states.index_select(0, self._to_device(wanted))
        return self.model.compute_logits(hidden_states)

    def _run_fixed(self, works: list[Work], ids: Tensor, fixed: FixedStep, rows: int, query_len: int) -> Tensor:
        """Logits of a padded step, in its buffer."""
        step = self._metadata(works, rows, query_len)
        positions = _positions(works)
        count = len(positions)
        fixed.input_ids[:count].copy_(ids)
        fixed.positions[:count].copy_(self._to_device(positions))
        self._launches += 1
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
            self.on_logits([work.stream for work in works], [work.num_logits for work in works], logits)

    def _to_device(self, values: Any) -> Tensor:
        """int64 tensor of host values, without a wait."""
        return to_device(np.array(values, dtype=np.int64), self.device)

    def _now(self) -> float:
        """Wall time after the device's work is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _tokens(works: list[Work]) -> list[int]:
    return [token for work in works for token in work.tokens]


def _last_rows(works: list[Work], counts: Sequence[int]) -> list[int]:
    """Rows of the last tokens of each work in a step, that many of each."""
    ends = accumulate(len(work.tokens) for work in works)
    return [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]


def _positions(works: list[Work]) -> list[int]:
    return [position for work in works for position in range(work.stream.num_computed, work.length)]
