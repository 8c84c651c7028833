"""Metadata of the Gated DeltaNet layers of one step, built on the host without a wait for the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gdn.distributed import split_tokens
from gdn.layers.host_arrays import (
    Array,
    Ints,
    PersistentBuffers,
    as_array,
    as_indices,
    as_steps,
    at_least,
    check_own_slots,
    check_padding,
    check_rank,
    refuse,
    to_device,
)
from gdn.layers.parallel import ContextParts

CHECKPOINT_MULTIPLE = 64  # tokens: the chunk operator stores states at multiples of its chunk


@dataclass(frozen=True)
class GDNMetadata:
    """Sequences of one step as the Gated DeltaNet layers see them; field names are those of vLLM.

    A row is one sequence of the step. Speculative rows (draft count >= 0) and the others take different operators. Batches
    without speculative rows have the decode rows first; with speculative rows every other row counts as prefill. Rows without
    tokens are not counted: a batch of decode rows alone leaves them out, other batches keep their places.

    Parameters
    ----------
    num_prefills, num_prefill_tokens, num_decodes, num_decode_tokens, num_spec_decodes, num_spec_decode_tokens : int
        Rows that have tokens, and their tokens, by kind. num_decodes and num_spec_decodes are never both positive.
    num_actual_tokens : int
        Tokens of the step without padding.
    has_initial_state : Tensor [non-speculative rows] of bool, optional
        Whether a row continues a state: sequence length > query length. None without prefills.
    spec_query_start_loc, non_spec_query_start_loc : Tensor [rows + 1] of int32, optional
        Token offsets of the rows of each kind, counted among the tokens of that kind.
    spec_state_indices_tensor, non_spec_state_indices_tensor : Tensor [rows, 1 + num_spec], Tensor [rows] of int32, optional
        State slots of the rows of each kind; with replay [rows] for both.
    spec_sequence_masks : Tensor [rows of both kinds] of bool, optional
        Which rows are speculative. None where none is.
    spec_token_indx, non_spec_token_indx : Tensor [tokens] of int32, optional
        Places of the tokens of each kind in the step, ascending. None without speculative rows.
    num_accepted_tokens : Tensor [speculative rows] of int32, optional
        Tokens that the previous step accepted, the bonus token included: column num_accepted_tokens - 1 holds the state.
    retrieve_parent_token : Tensor [speculative tokens] of int32, optional
        Draft trees: parent of each token within its sequence, -1 = the starting state.
    checkpoint_offsets, checkpoint_slots : Tensor [non-speculative rows, C] of int32, optional
        States to keep, as for `gdn.chunk_gated_delta_rule`.
    non_spec_lengths_host : tuple of int, optional
        Query lengths of the non-speculative rows, as `lengths_host` of `gdn.gated_delta_rule`. None in batches for a captured
        graph.
    num_computed_tokens : Tensor [rows that decode] of int32, optional
        With replay: committed tokens of the decode rows, or of the speculative rows, before the step.
    prefill_slots, prefill_computed_tokens, prefill_accepted_tokens : Tensor [rows] of int32, optional
        With replay: slots of the prefilling rows that continue a state, their committed tokens, and those that their previous
        step accepted. None where no row continues one;
        prefill_accepted_tokens also where all are 1.
    prefill_written_slots, prefill_seq_lens : Tensor [slots] of int64, Tensor [slots] of int32, optional
        With replay: the slots that prefill writes, checkpoints included, and the tokens that their states contain afterwards.
    prefill_query_start_loc : Tensor [prefilling rows + 1] of int32, optional
        With replay, in a step of decode rows before prompts: offsets of the prompts' tokens among themselves.
    parts : ContextParts, optional
        How the tokens of the step lie on context-parallel ranks. Then non_spec_query_start_loc are the offsets of this rank's
        tokens of every row. None = every rank computes all.

    References
    ----------
    .. [1] The fields and their meanings are those of ``GDNAttentionMetadata`` in vLLM; those from checkpoint_offsets on are this
       project's.
    """

    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_spec_decodes: int = 0
    num_spec_decode_tokens: int = 0
    num_actual_tokens: int = 0
    has_initial_state: Tensor | None = None
    spec_query_start_loc: Tensor | None = None
    non_spec_query_start_loc: Tensor | None = None
    spec_state_indices_tensor: Tensor | None = None
    non_spec_state_indices_tensor: Tensor | None = None
    spec_sequence_masks: Tensor | None = None
    spec_token_indx: Tensor | None = None
    non_spec_token_indx: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    retrieve_parent_token: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    checkpoint_slots: Tensor | None = None
    non_spec_lengths_host: tuple[int, ...] | None = None
    num_computed_tokens: Tensor | None = None
    prefill_slots: Tensor | None = None
    prefill_computed_tokens: Tensor | None = None
    prefill_accepted_tokens: Tensor | None = None
    prefill_written_slots: Tensor | None = None
    prefill_seq_lens: Tensor | None = None
    prefill_query_start_loc: Tensor | None = None
    parts: ContextParts | None = None


@dataclass(frozen=True)
class _Rows:
    """Checked inputs of one step, a row each."""

    queries: Array
    lengths: Array
    slots: Array  # [rows, 1 + num_spec]
    drafts: Array
    accepted: Array
    is_prefilling: Array
    parents: Array | None
    checkpoints: tuple[Array, Array] | None  # offsets and slots [rows, C]

    @property
    def is_spec(self) -> Array:
        return self.drafts >= 0


class GDNMetadataBuilder:
    """Builds `GDNMetadata` from what the host knows of a step.

    Parameters
    ----------
    device : torch.device
        Where the tensors go; on a CUDA device from pinned memory, without a wait.
    num_spec : int
        Largest number of drafts of a sequence; 0 = no speculation.
    max_num_sequences : int
        Most rows of a batch for a captured graph: the size of the persistent buffers, which the first such batch makes.
    null_slot : int
        Slot of padded rows, -1 (vLLM: 0).
    cp_rank, cp_size : int
        This process among context-parallel ranks. The tokens of prompts, packed, are parted over them; every rank computes decode
        rows, and steps with speculative rows or checkpoints, by itself.
    replay : bool
        Whether the caches decode by replay (`GDNStateCache.has_replay`): a sequence then has one slot, and the metadata has its
        committed tokens.

    Notes
    -----
    Tensors of a batch built with `pad_to` are views of the builder's persistent buffers: they keep their addresses, and the
    next such batch of the same builder overwrites them.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        num_spec: int = 0,
        max_num_sequences: int = 256,
        null_slot: int = -1,
        cp_rank: int = 0,
        cp_size: int = 1,
        replay: bool = False,
    ) -> None:
        at_least("num_spec", num_spec, 0)
        at_least("max_num_sequences", max_num_sequences, 1)
        at_least("null_slot", null_slot, -1)
        check_rank(cp_rank, cp_size)
        self.cp_rank, self.cp_size, self.replay = cp_rank, cp_size, replay
        self.device = torch.device(device)
        self.num_spec, self.max_num_sequences, self.null_slot = num_spec, max_num_sequences, null_slot
        self._buffers = PersistentBuffers(self.device)

    def build(
        self,
        query_lens: Ints,
        seq_lens: Ints,
        slots: Any,
        *,
        num_draft_tokens: Ints | None = None,
        num_accepted_tokens: Ints | None = None,
        is_prefilling: Sequence[bool] | Tensor | None = None,
        parent_token: Ints | None = None,
        checkpoint_offsets: Any = None,
        checkpoint_slots: Any = None,
        pad_to: int | None = None,
    ) -> GDNMetadata:
        """Metadata of one step.

        Parameters
        ----------
        query_lens, seq_lens : sequence of int or CPU tensor [N]
            New tokens of each row, and all its tokens, the new ones included. Decode rows come first where no row is
            speculative.
        slots : sequence or CPU tensor [N] or [N, >= 1 + num_spec]
            State slots of each row. Rows that are not speculative use column 0, as all do with replay, speculative ones
            1 + num_spec columns. No two
            of those in use are the same, of one row or of two; slots up to `null_slot`, and rows without tokens, do not count.
            Slots are values of the host, so that this is checked in every step, without a sync.
        num_draft_tokens : [N], optional
            Drafts of each row; -1 = not speculative (a prompt chunk). With speculation on, a decode row without drafts has 0:
            the speculative path alone starts from the accepted state. None = no row is speculative; not with
            num_accepted_tokens or parent_token.
        num_accepted_tokens : [N], optional
            Accepted tokens of each row's previous step, 1..1 + num_spec; read for speculative rows, with replay also for prompts
            that continue a sequence. None = 1.
        is_prefilling : [N] of bool, optional
            Whether a row still works on its prompt. Only a first chunk of one token (query length 1 = sequence length) needs
            it: True = it is prefill, and clears a recycled slot; False = a row made up for a capture, a decode. None = True,
            False with `pad_to`.
        parent_token : [tokens], optional
            Draft trees: parent of each token of the step within its row, before it there, or -1; entries of rows that are not
            speculative are ignored.
        checkpoint_offsets, checkpoint_slots : [N, C], optional
            Token counts of this step, multiples of 64, and slots, for the rows that are not speculative; 0 keeps nothing. A
            slot that is written is no other row's and no state slot.
        pad_to : int, optional
            Rows of the captured graph's batch: decode rows alone or speculative rows alone, the rest is padding (null slot,
            mask False, an empty range, 1 accepted token).

        Returns
        -------
        GDNMetadata

        Raises
        ------
        ValueError, TypeError
            Named after the argument; no buffer is written then.
        """
        queries, lengths = as_steps(query_lens, seq_lens)
        count = queries.shape[0]
        drafts = (
            np.full(count, -1, np.int64) if num_draft_tokens is None else as_array("num_draft_tokens", num_draft_tokens, count)
        )
        if (drafts > self.num_spec).any() or (drafts < -1).any():
            refuse("num_draft_tokens", f"-1 to {self.num_spec} (num_spec)", drafts.tolist())
        if ((drafts >= 0) & (queries > drafts + 1)).any():
            refuse("query_lens", "at most 1 + num_draft_tokens new tokens of a speculative row", queries.tolist())
        accepted = np.ones(count, np.int64)
        if num_accepted_tokens is not None:
            accepted = as_array("num_accepted_tokens", num_accepted_tokens, count)
            outside = (accepted < 1) | (accepted > 1 + self.num_spec)
            if (outside & ((drafts >= 0) | (self.replay & (lengths > queries)))).any():
                refuse("num_accepted_tokens", f"1 to {1 + self.num_spec} in speculative rows", accepted.tolist())
        prefilling = np.full(count, pad_to is None)
        if is_prefilling is not None:
            prefilling = as_array("is_prefilling", is_prefilling, count).astype(bool)
        parents = None if parent_token is None else _parents(parent_token, queries, drafts >= 0)
        if num_draft_tokens is None and (num_accepted_tokens is not None or parent_token is not None):
            name = "parent_token" if num_accepted_tokens is None else "num_accepted_tokens"
            refuse("num_draft_tokens", f"the drafts of each row next to {name}, which speculative rows alone read", None)
        checkpoints = _checkpoints(checkpoint_offsets, checkpoint_slots, count)
        rows = _Rows(queries, lengths, self._slots(slots, count), drafts, accepted, prefilling, parents, checkpoints)
        self._check_slots(rows)
        if (rows.is_spec & (queries > 0)).any():
            return self._with_spec(rows, pad_to)
        return self._without_spec(rows, pad_to)

    def _slots(self, slots: Any, count: int) -> Array:
        found = as_indices("slots", slots, rows=count, ranks=(1, 2))
        if found.ndim == 1:
            found = found[:, None]
        columns = 1 if self.replay else 1 + self.num_spec
        if found.shape[1] < columns and count:
            refuse("slots", f"at least {columns} columns (1 + num_spec)", f"shape {list(found.shape)}")
        return found[:, :columns]

    def _check_slots(self, rows: _Rows) -> None:
        """Two sequences in one slot would read and write each other's states."""
        has_tokens = (rows.queries > 0)[:, None]
        in_use = has_tokens & (rows.slots > self.null_slot)
        in_use[:, 1:] &= rows.is_spec[:, None]
        names, slots, places = ["slots"], [rows.slots[in_use]], [np.nonzero(in_use)[0]]
        if rows.checkpoints is not None:
            offsets, kept = rows.checkpoints
            is_kept = in_use[:, :1] & ~rows.is_spec[:, None] & (offsets > 0) & (offsets <= rows.queries[:, None])
            is_kept &= kept > self.null_slot
            names, slots, places = [*names, "checkpoint_slots"], [*slots, kept[is_kept]], [*places, np.nonzero(is_kept)[0]]
        check_own_slots(names, slots, places)

    def _without_spec(self, rows: _Rows, pad_to: int | None) -> GDNMetadata:
        queries, has_tokens = rows.queries, rows.queries > 0
        is_decode = (queries == 1) & ((rows.lengths > 1) | ~rows.is_prefilling)
        prefill_at = np.flatnonzero(has_tokens & ~is_decode)
        first_prefill = int(prefill_at[0]) if prefill_at.size else queries.shape[0]
        num_decodes = int(has_tokens[:first_prefill].sum())
        num_prefills = int(has_tokens[first_prefill:].sum())
        counts: dict[str, Any] = {
            "num_prefills": num_prefills,
            "num_prefill_tokens": int(queries[first_prefill:].sum()),
            "num_decodes": num_decodes,
            "num_decode_tokens": num_decodes,
            "num_actual_tokens": int(queries.sum()),
        }
        if num_prefills:
            if pad_to is not None:
                refuse("pad_to", "None for a batch with prefills", pad_to)
            own = self._non_spec(rows, np.full(queries.shape[0], True))
            if self.replay:
                is_prefill = np.arange(queries.shape[0]) >= first_prefill
                computed = (rows.lengths - queries)[:first_prefill].astype(np.int32)
                own |= self._written(rows, is_prefill) | {"num_computed_tokens": to_device(computed, self.device)}
                own["prefill_query_start_loc"] = to_device(_offsets(queries[first_prefill:]), self.device)
            metadata = GDNMetadata(**counts, **own)
            return self._parted(metadata, queries, first_prefill)
        # Rows without tokens are left out: token i is then that of row i, which lets a decode step do without offsets.
        slots = rows.slots[has_tokens, 0].astype(np.int32)
        offsets = np.arange(num_decodes + 1, dtype=np.int32)
        computed = (rows.lengths - queries)[has_tokens].astype(np.int32)
        if pad_to is None:
            if self.replay:
                counts["num_computed_tokens"] = to_device(computed, self.device)
            return GDNMetadata(
                **counts,
                non_spec_query_start_loc=to_device(offsets, self.device),
                non_spec_state_indices_tensor=to_device(slots, self.device),
                non_spec_lengths_host=(1,) * num_decodes,
            )
        check_padding(num_decodes, pad_to, self.max_num_sequences)
        write, most = self._buffers.write, self.max_num_sequences
        if self.replay:
            counts["num_computed_tokens"] = write("computed", computed, pad_to, 0, most=most)
        return GDNMetadata(
            **counts,
            non_spec_query_start_loc=write("offsets", offsets, pad_to + 1, num_decodes, most=most + 1),
            non_spec_state_indices_tensor=write("slots", slots, pad_to, self.null_slot, most=most),
        )

    def _parted(self, metadata: GDNMetadata, queries: Array, first_prefill: int) -> GDNMetadata:
        """The same step, with this rank's offsets."""
        if self.cp_size == 1 or metadata.checkpoint_offsets is not None:
            return metadata
        ends, shared = np.cumsum(queries), int(queries[:first_prefill].sum())
        lengths = split_tokens(int(ends[-1]) - shared, self.cp_size)
        parts = ContextParts(tuple((shared + np.cumsum(lengths)).tolist()), self.cp_rank, shared, first_prefill)
        first, stop = parts.bounds(self.cp_rank, int(ends[-1]))
        own = np.clip(ends, first, stop) - np.clip(ends - queries, first, stop)
        own[:first_prefill] = queries[:first_prefill]
        return replace(metadata, non_spec_query_start_loc=to_device(_offsets(own), self.device), parts=parts)

    def _with_spec(self, rows: _Rows, pad_to: int | None) -> GDNMetadata:
        queries, is_spec = rows.queries, rows.is_spec
        token_is_spec = np.repeat(is_spec, queries)
        spec_tokens = np.flatnonzero(token_is_spec).astype(np.int32)
        others = queries[~is_spec]
        counts: dict[str, Any] = {
            "num_prefills": int((others > 0).sum()),
            "num_prefill_tokens": int(others.sum()),
            "num_spec_decodes": int((queries[is_spec] > 0).sum()),
            "num_spec_decode_tokens": int(queries[is_spec].sum()),
            "num_actual_tokens": int(queries.sum()),
        }
        offsets, slots = _offsets(queries[is_spec]), rows.slots[is_spec].astype(np.int32)
        accepted = rows.accepted[is_spec].astype(np.int32)
        parents = None if rows.parents is None else rows.parents[token_is_spec].astype(np.int32)
        computed = (rows.lengths - queries)[is_spec].astype(np.int32) if self.replay else None
        if self.replay:
            slots = slots[:, 0]
        if pad_to is not None:
            if counts["num_prefills"]:
                refuse("pad_to", "None for a batch with prefills", pad_to)
            return GDNMetadata(**counts, **self._padded_spec(offsets, slots, accepted, parents, computed, pad_to))
        fields: dict[str, Any] = {
            "spec_query_start_loc": offsets,
            "spec_state_indices_tensor": slots,
            "spec_sequence_masks": is_spec,
            "spec_token_indx": spec_tokens,
            "non_spec_token_indx": np.flatnonzero(~token_is_spec).astype(np.int32),
            "num_accepted_tokens": accepted,
        }
        if parents is not None:
            fields["retrieve_parent_token"] = parents
        if computed is not None:
            fields["num_computed_tokens"] = computed
        moved: dict[str, Any] = {name: to_device(value, self.device) for name, value in fields.items()}
        if counts["num_prefills"]:
            moved |= self._non_spec(rows, ~is_spec)
            if self.replay:
                moved |= self._written(rows, ~is_spec)
        return GDNMetadata(**counts, **moved)

    def _padded_spec(
        self, offsets: Array, slots: Array, accepted: Array, parents: Array | None, computed: Array | None, pad_to: int
    ) -> dict[str, Any]:
        """Fields of a batch of speculative rows alone, in the persistent buffers."""
        count, columns = slots.shape[0], 1 + self.num_spec
        check_padding(count, pad_to, self.max_num_sequences)
        write, most = self._buffers.write, self.max_num_sequences
        fields = {
            "spec_query_start_loc": write("spec_offsets", offsets, pad_to + 1, int(offsets[-1]), most=most + 1),
            "spec_state_indices_tensor": write("spec_slots", slots, pad_to, self.null_slot, most=most),
            "spec_sequence_masks": write("masks", np.full(count, True), pad_to, False, most=most),
            "num_accepted_tokens": write("accepted", accepted, pad_to, 1, most=most),
            "spec_token_indx": self._buffers.constant("tokens", np.arange(most * columns, dtype=np.int32))[: pad_to * columns],
            "non_spec_token_indx": self._buffers.constant("no_tokens", np.zeros(0, np.int32)),
        }
        if computed is not None:
            fields["num_computed_tokens"] = write("computed", computed, pad_to, 0, most=most)
        if parents is not None:
            fields["retrieve_parent_token"] = write("parents", parents, pad_to * columns, -1, most=most * columns)
        return fields

    def _non_spec(self, rows: _Rows, chosen: Array) -> dict[str, Any]:
        """Fields of the rows that are not speculative, in a batch with prefills."""
        queries = rows.queries[chosen]
        fields: dict[str, Array] = {
            "has_initial_state": rows.lengths[chosen] > queries,
            "non_spec_query_start_loc": _offsets(queries),
            "non_spec_state_indices_tensor": rows.slots[chosen, 0].astype(np.int32),
        }
        if rows.checkpoints is not None:
            offsets, slots = (part[chosen].astype(np.int32) for part in rows.checkpoints)
            if offsets.any():
                fields |= {"checkpoint_offsets": offsets, "checkpoint_slots": slots}
        moved: dict[str, Any] = {name: to_device(value, self.device) for name, value in fields.items()}
        return moved | {"non_spec_lengths_host": tuple(queries.tolist())}

    def _written(self, rows: _Rows, is_prefill: Array) -> dict[str, Any]:
        """Fields of the prefilling rows that `GDNStateCache.begin_step` reads."""
        slots, computed = rows.slots[:, 0], rows.lengths - rows.queries
        is_live = is_prefill & (rows.queries > 0) & (slots > self.null_slot)
        written, tokens = slots[is_live], rows.lengths[is_live]
        if rows.checkpoints is not None:
            offsets, places = rows.checkpoints
            is_kept = is_live[:, None] & (offsets > 0) & (offsets <= rows.queries[:, None]) & (places > self.null_slot)
            written = np.concatenate([written, places[is_kept]])
            tokens = np.concatenate([tokens, (computed[:, None] + offsets)[is_kept]])
        fields: dict[str, Array] = {
            "prefill_written_slots": written.astype(np.int64), "prefill_seq_lens": tokens.astype(np.int32),
        }  # fmt: skip
        is_continued = is_live & (computed > 0)
        if is_continued.any():
            fields["prefill_slots"] = slots[is_continued].astype(np.int32)
            fields["prefill_computed_tokens"] = computed[is_continued].astype(np.int32)
            if (accepted := rows.accepted[is_continued].astype(np.int32)).max() > 1:
                fields["prefill_accepted_tokens"] = accepted
        return {name: to_device(value, self.device) for name, value in fields.items()}


def _offsets(lengths: Array) -> Array:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _parents(parent_token: Ints, queries: Array, is_spec: Array) -> Array:
    found = as_array("parent_token", parent_token, int(queries.sum()))
    own = np.arange(found.shape[0]) - np.repeat(np.cumsum(queries) - queries, queries)  # each token's place in its row
    wrong = np.flatnonzero(np.repeat(is_spec, queries) & ((found < -1) | (found >= own)))
    if wrong.size:
        place = int(wrong[0])
        refuse("parent_token", f"-1 to {own[place] - 1}, a token before its own in the row", f"{found[place]} at [{place}]")
    return found


def _checkpoints(offsets: Any, slots: Any, count: int) -> tuple[Array, Array] | None:
    if offsets is None and slots is None:
        return None
    if offsets is None or slots is None:
        refuse("checkpoint_offsets, checkpoint_slots", "both or neither", "one of them")
    found = as_indices("checkpoint_offsets", offsets, rows=count, ranks=(2,))
    places = as_indices("checkpoint_slots", slots, rows=count, ranks=(2,))
    if found.shape != places.shape:
        refuse("checkpoint_slots", f"shape {list(found.shape)}, as checkpoint_offsets", f"shape {list(places.shape)}")
    if ((found < 0) | (found % CHECKPOINT_MULTIPLE != 0)).any():
        refuse("checkpoint_offsets", f"multiples of {CHECKPOINT_MULTIPLE} tokens, or 0", found.tolist())
    return found, places
