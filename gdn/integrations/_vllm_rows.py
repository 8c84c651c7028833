"""What replay decode needs of one of vLLM's batches beyond the host's own metadata, and the builder that adds it.

It is made once a batch for the layers of a cache group, from tensors on the device, so that nothing waits for the GPU:

    computed    committed tokens of the rows that decode or have drafts
    slots       the block of each row with drafts: it has one, where the host's table repeats it
    prompts     blocks whose rings are emptied before the prompts run, and the counts of all that they write

A captured graph reads `computed` and `slots` in the buffers of the builder.
"""

from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor
NULL_SLOT = 0  # vLLM's block 0 belongs to nobody


class Fold(NamedTuple):
    """Sequences that go on with a prompt, one a row of the batch's prompts; the block of a new one is null."""

    slots: Tensor  # [rows] int32
    computed: Tensor  # [rows] int32
    accepted: Tensor | None  # [rows] int32: tokens of the last step; None where steps have one
    moved: tuple[Tensor, Tensor, Tensor] | None  # of windows after drafts: blocks [rows, 1], columns to, and from [rows, w - 1]


class Prompts(NamedTuple):
    """The prompts of a batch."""

    fold: Fold | None  # None where all of them are new
    written: Tensor  # [writes] int64: blocks whose states the prompts write
    tokens: Tensor  # [writes] int32: tokens that those contain then


class Tokens(NamedTuple):
    """What a batch is for all cache groups, which differ in blocks alone."""

    decoding: Tensor  # [>= rows] int32: committed tokens of rows that decode or have drafts
    computed: Tensor | None = None  # [rows of prompts] int32: their committed tokens; None without prompts
    lengths: Tensor | None = None  # [rows of prompts] int32: those after the batch
    accepted: Tensor | None = None  # [rows of prompts] int32: tokens of their last step
    any_goes_on: bool = False  # whether a prompt may have a state to go on with, as far as the host knows


class Rows(NamedTuple):
    """What is added to the metadata of a batch."""

    computed: Tensor  # [>= rows] int32
    slots: Tensor | None  # [rows] int32; None without drafts
    prompts: Prompts | None
    tokens: Tokens | None = None


class Counter:
    """Makes `Rows`.

    Parameters
    ----------
    most_rows : int
        Of a captured graph.
    num_spec : int
        Most drafts of a sequence.
    window : int
        Columns of a window without drafts, w - 1.
    device : torch.device
    """

    def __init__(self, most_rows: int, num_spec: int, window: int, device: torch.device) -> None:
        self._computed = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self._num_spec = num_spec
        self._columns = torch.arange(window, device=device)

    def __call__(self, metadata: Any, batch: Any, accepted: Tensor | None, drafts: Tensor | None) -> Rows:
        """Of a batch.

        Parameters
        ----------
        metadata : GDNAttentionMetadata
            What the host made of it.
        batch : CommonAttentionMetadata
            What the host made that of.
        accepted, drafts : Tensor or None
            Accepted tokens of each row's last step, on the device, and drafts of each row, on the host, negative in rows that
            have none.
        """
        return self.rows(metadata, self._tokens(metadata, batch, accepted, drafts))

    def rows(self, metadata: Any, tokens: Tokens) -> Rows:
        """Of a batch whose tokens are known. metadata: with the blocks of a cache group."""
        has_drafts = metadata.spec_sequence_masks is not None
        slots = metadata.spec_state_indices_tensor[:, 0] if has_drafts else None
        if tokens.computed is None or tokens.lengths is None:
            return Rows(tokens.decoding, slots, None, tokens)
        fold = self._fold(metadata, tokens.computed, tokens.accepted) if tokens.any_goes_on else None
        return Rows(tokens.decoding, slots, _prompts(metadata, fold, tokens.computed, tokens.lengths), tokens)

    def _tokens(self, metadata: Any, batch: Any, accepted: Tensor | None, drafts: Tensor | None) -> Tokens:
        computed = batch.compute_num_computed_tokens()
        if not metadata.num_prefills:
            return Tokens(self._kept(computed))
        if metadata.spec_sequence_masks is not None:
            assert drafts is not None
            on_host: Any = drafts < 0
            places: Any = on_host.nonzero()[:, 0].to(computed.device, non_blocking=True)
            decoding = computed[(drafts >= 0).nonzero()[:, 0].to(computed.device, non_blocking=True)]
        else:
            on_host = places = slice(metadata.num_decodes, None)
            decoding = computed[: metadata.num_decodes]
        last = accepted[places] if accepted is not None and self._num_spec else None
        return Tokens(decoding, computed[places], batch.seq_lens[places], last, _any_goes_on(batch, on_host))

    def _kept(self, computed: Tensor) -> Tensor:
        """Where graphs read it, if they can hold the batch."""
        if len(computed) > len(self._computed):
            return computed
        kept = self._computed[: len(computed)]
        return kept.copy_(computed, non_blocking=True)

    def _fold(self, metadata: Any, computed: Tensor, accepted: Tensor | None) -> Fold:
        goes_on = metadata.prefill_has_initial_state
        slots = torch.where(goes_on, metadata.prefill_state_indices, NULL_SLOT)
        if accepted is None:
            return Fold(slots, computed, None, None)
        # A chunk that sampled nothing may be counted as 0; nothing is live after it, so any count does.
        accepted = torch.where(goes_on, accepted.clamp(1, 1 + self._num_spec), 1)
        moved = (slots.long()[:, None], self._columns, accepted[:, None] - 1 + self._columns)
        return Fold(slots, computed, accepted, moved)


def _prompts(metadata: Any, fold: Fold | None, computed: Tensor, lengths: Tensor) -> Prompts:
    """computed, lengths: tokens of the prompts' rows before and after the batch."""
    slots = metadata.prefill_state_indices
    if (kept := metadata.checkpoint) is None:
        return Prompts(fold, slots.long(), lengths)
    # States from inside the prompts. A row without one writes its own count once more.
    offsets, blocks = (x[metadata.num_decodes :] for x in (kept.checkpoint_offsets, kept.state_indices))
    is_kept = blocks > NULL_SLOT
    written = torch.cat([slots, torch.where(is_kept, blocks, slots)])
    return Prompts(fold, written.long(), torch.cat([lengths, torch.where(is_kept, computed + offsets, lengths)]))


def _any_goes_on(batch: Any, places: Any) -> bool:
    """As `Tokens.any_goes_on`. places: of the prompts' rows, on the host."""
    known = batch.seq_lens_cpu_upper_bound
    if known is None:
        return True
    return bool((known > batch.query_start_loc_cpu.diff())[places].any())


def backend_class(host: Any) -> type:
    """The backend of layers that replay: the host's own with another builder. host: gdn_attn of vLLM."""

    class GDNReplayMetadataBuilder(host.GDNAttentionMetadataBuilder):  # type: ignore[misc]
        def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: torch.device) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            scheduler, layers = vllm_config.scheduler_config, vllm_config.compilation_config.static_forward_context
            captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
            most_rows = max(scheduler.max_num_seqs * (1 + self.num_spec), captured)
            window = layers[layer_names[0]].conv1d.weight.shape[-1] - 1
            self._gdn_count = Counter(most_rows, self.num_spec, window, device)
            # As the host's own: the second runner describes a batch once, and for other groups changes the blocks alone.
            is_second = bool(vllm_config.use_v2_model_runner) and device.type == "cuda"
            self.supports_update_block_table = is_second and vllm_config.cache_config.mamba_cache_mode == "none"

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: Any,
            num_accepted_tokens: Tensor | None = None,
            num_decode_draft_tokens_cpu: Tensor | None = None,
            fast_build: bool = False,
        ) -> Any:
            given = (num_accepted_tokens, num_decode_draft_tokens_cpu)
            metadata = super().build(common_prefix_len, common_attn_metadata, *given, fast_build)
            metadata.gdn_replay = self._gdn_count(metadata, common_attn_metadata, *given)
            return metadata

        def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
            found = super().update_block_table(metadata, blk_table, slot_mapping)
            found.gdn_replay = self._gdn_count.rows(found, metadata.gdn_replay.tokens)
            return found

    class GDNReplayBackend(host.GDNAttentionBackend):  # type: ignore[misc]
        @staticmethod
        def get_builder_cls() -> type:
            return GDNReplayMetadataBuilder

    return GDNReplayBackend
