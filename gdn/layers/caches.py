"""Caches of a hybrid model: recurrent states per slot, keys and values per block of tokens, and the indexer's keys.

Each kind of tensor is one buffer for all layers of its cache, of which every layer has a view; a copy of a block or slot is then
one copy. Two kinds never share a buffer: an operator writes several of them, and compilers copy arguments that share memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import gdn
from gdn.layers.config import HybridConfig
from gdn.layers.host_arrays import at_least, refuse
from gdn.layers.replay_switch import unwanted
from gdn.runtime import env

PAGE_MULTIPLE = 4  # rows: what the operators that write a cache take as the size of a page
STATE_DTYPES = (torch.float32, torch.bfloat16)


class _Buffers:
    """A cache whose attributes for the layers are views of its buffers.

    Pickled, or copied, one by one, every view gets a memory of its own, and a copied slot or block is then missing in the views.
    So the buffers alone are pickled and copied, and the views made of them. A shallow copy is another name of the same memory.

    Buffers and views are made outside of inference mode, since what is made in it cannot be written outside of it.
    """

    _VIEWS: tuple[str, ...]

    def _make_views(self) -> None:
        """Sets the attributes that are named in `_VIEWS`."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._VIEWS}

    @torch.inference_mode(False)
    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():  # copied in inference mode, a buffer is of it
            vars(self)[name] = value.clone() if isinstance(value, Tensor) and value.is_inference() else value
        self._make_views()


class Replay(NamedTuple):
    """What a layer needs to decode by replay; see `gdn.fused_recurrent_gated_delta_rule`."""

    ring: Tensor  # [ring slots, R, W] of the layer
    state_tokens: Tensor  # [slots], one for all layers
    fold_every: int
    fold_phase: int


class GDNStateCache(_Buffers):
    """States of the Gated DeltaNet layers: a pool of slots, 1 + num_spec of them for a sequence, one with replay.

    With replay a decode call leaves the newest tokens of a sequence as entries of its slot's ring, and writes the state once in
    `fold_every` tokens. Who writes a state in another way sets `state_tokens` of its slot: `begin_step` does so for prompts,
    `copy_slot` for copies.

    Parameters
    ----------
    config : HybridConfig
        Sizes of one rank.
    num_slots : int
        Slots of the pool, those up to `null_slot` included.
    num_spec : int
        Largest number of drafts of a sequence.
    null_slot : int
        Largest slot that is never used: -1 = none; 0 as in vLLM.
    dtype, state_dtype : torch.dtype
        Dtypes of the windows of the convolution and of the recurrent states (float32 or bfloat16).
    device : torch.device
    replay : bool, optional
        Whether decode is by replay. None = as ``GDN_REPLAY`` says now.
    num_rings : int, optional
        Leading slots that have a ring, those up to `null_slot` included: the rest are for checkpoints. None = all.

    Attributes
    ----------
    has_replay : bool
    replay : tuple of Replay or None
        What each layer needs for it; None without.
    rings : tuple of Tensor [num_rings, R, W]
        Entries of each layer; empty without replay.
    state_tokens : Tensor [slots] of int32, or None
        Tokens that a slot's states contained when something other than a decode call last wrote them.
    fold_every : int or None
        Tokens from one write of a state to the next.
    conv_states : tuple of Tensor [slots, conv_dim, w - 1 + num_spec]
        Windows of each layer; channels are adjacent in memory.
    ssm_states : tuple of Tensor [slots, HV, V, K]
        Recurrent states of each layer, V first.
    """

    _VIEWS = ("conv_states", "ssm_states", "rings", "replay")

    @torch.inference_mode(False)
    def __init__(
        self,
        config: HybridConfig,
        num_slots: int,
        *,
        num_spec: int = 0,
        null_slot: int = -1,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        replay: bool | None = None,
        num_rings: int | None = None,
    ) -> None:
        at_least("num_slots", num_slots, 0)
        at_least("num_spec", num_spec, 0)
        at_least("null_slot", null_slot, -1)
        num_rings = num_slots if num_rings is None else num_rings
        if not 0 <= num_rings <= num_slots:
            refuse("num_rings", f"0 to {num_slots} (num_slots)", num_rings)
        if state_dtype not in STATE_DTYPES:
            raise TypeError(f"state_dtype: expected torch.float32 or torch.bfloat16, got {state_dtype}")
        self.num_slots, self.num_spec, self.null_slot = num_slots, num_spec, null_slot
        self._window = config.linear_conv_kernel_dim - 1
        layers, columns = config.num_linear_layers, self._window + num_spec
        heads = (config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim)
        self._conv = torch.zeros(layers, num_slots, columns, config.conv_dim, dtype=dtype, device=device)
        self._ssm = torch.zeros(layers, num_slots, *heads, dtype=state_dtype, device=device)
        self.num_key_heads = config.linear_num_key_heads
        if replay is None:
            replay = unwanted(heads[0], (heads[2], heads[1]), max(0, num_rings - null_slot - 1), num_spec) is None
        self.has_replay = bool(layers) and replay
        self._rings: Tensor | None = None
        self.state_tokens: Tensor | None = None
        self.fold_every: int | None = None
        if self.has_replay:
            dims = (self.num_key_heads, heads[0], heads[2], heads[1])
            rows, width, self.fold_every = gdn.ring_shape(*dims, num_spec=num_spec, state_dtype=state_dtype)
            self._rings = torch.zeros(layers, num_rings, rows, width, device=device, dtype=torch.float32)
            self.state_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._make_views()

    def _make_views(self) -> None:
        self.conv_states = tuple(layer.mT for layer in self._conv)
        self.ssm_states = tuple(self._ssm)
        self.rings: tuple[Tensor, ...] = ()
        self.replay: tuple[Replay | None, ...] = (None,) * len(self.ssm_states)
        if self._rings is not None and self.state_tokens is not None and self.fold_every is not None:
            self.rings, every, tokens = tuple(self._rings), self.fold_every, self.state_tokens
            self.replay = tuple(Replay(ring, tokens, every, layer % every) for layer, ring in enumerate(self.rings))

    @property
    def num_rings(self) -> int:
        """Leading slots that have a ring; 0 without replay."""
        return 0 if self._rings is None else self._rings.shape[1]

    @property
    def slots_per_sequence(self) -> int:
        """Slots that a sequence holds."""
        return 1 if self.has_replay else 1 + self.num_spec

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in all layers: a checkpoint's."""
        return _row_bytes(self._conv, 1) + _row_bytes(self._ssm, 1)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that a sequence holds in all layers, whatever its length."""
        ring = 0 if self._rings is None else _row_bytes(self._rings, 1)
        return self.slots_per_sequence * self.bytes_per_slot + ring

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        rings = 0 if self._rings is None else self._rings.nbytes
        counts = 0 if self.state_tokens is None else self.state_tokens.nbytes
        return self._conv.nbytes + self._ssm.nbytes + rings + counts

    def copy_slot(self, source: int, target: int, *, conv: bool = True, ssm: bool = True) -> None:
        """Copies the window, the recurrent state, or both of one slot to another, in all layers.

        With the state go its count, and the entries of the ring where both slots have one. A state with entries is never copied
        to a slot without a ring: `gdn.fold_states` writes it there.
        """
        for buffer, wanted in ((self._conv, conv), (self._ssm, ssm)):
            if wanted:
                buffer[:, target].copy_(buffer[:, source])
        if ssm and self.state_tokens is not None and self._rings is not None:
            self.state_tokens[target].copy_(self.state_tokens[source])
            if source < self.num_rings and target < self.num_rings:
                self._rings[:, target].copy_(self._rings[:, source])

    def begin_step(self, metadata: Any) -> None:
        """Makes ready for the prompts of a step: once a step, before the first layer. Nothing to do without replay or prompts.

        States that a prompt continues get the entries of their rings, and their windows move to the start of their slots, from
        where drafts left them. The counts of the slots that the step's prompts write are set.

        Parameters
        ----------
        metadata : GDNMetadata
            Of the step, from a builder with `replay` as the cache has it.

        Raises
        ------
        ValueError
            With replay: if `metadata` is from a builder without.
        """
        if self.state_tokens is None or self._rings is None or self.fold_every is None:
            return
        decodes = metadata.num_decodes + metadata.num_spec_decodes
        lacks_counts = metadata.num_computed_tokens is None if decodes else metadata.prefill_written_slots is None
        if lacks_counts and decodes + metadata.num_prefills:
            expected = "that of a GDNMetadataBuilder with replay=True, since the cache decodes by replay"
            raise ValueError(f"metadata: expected {expected}, got one without")
        if not metadata.num_prefills:
            return
        if metadata.prefill_slots is not None:
            gdn.fold_states(
                self._ssm, metadata.prefill_slots, self._rings, self.state_tokens, metadata.prefill_computed_tokens,
                num_k_heads=self.num_key_heads, fold_every=self.fold_every,
                num_accepted_tokens=metadata.prefill_accepted_tokens, state_v_first=True, null_slot=self.null_slot,
            )  # fmt: skip
            if metadata.prefill_accepted_tokens is not None:
                rows, columns = metadata.prefill_slots.long()[:, None], torch.arange(self._window, device=self._conv.device)
                accepted = metadata.prefill_accepted_tokens[:, None] - 1 + columns
                self._conv[:, rows, columns] = self._conv[:, rows, accepted]
        self.state_tokens.index_copy_(0, metadata.prefill_written_slots, metadata.prefill_seq_lens)


class KVCache(_Buffers):
    """Keys and values of the full attention layers, in blocks of tokens.

    Parameters
    ----------
    config : HybridConfig
        Sizes of one rank.
    num_blocks, block_size : int
        Blocks, and tokens of a block: a multiple of 4.
    dtype, device : torch.dtype, torch.device
        Dtype of keys and values, and where they are.

    Attributes
    ----------
    kv : tuple of (Tensor, Tensor)
        k_cache and v_cache of each layer, each [num_blocks, block_size, kv_heads, D].
    """

    _VIEWS = ("kv",)

    @torch.inference_mode(False)
    def __init__(
        self,
        config: HybridConfig,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        at_least("num_blocks", num_blocks, 0)
        at_least("block_size", block_size, 1)
        if block_size % PAGE_MULTIPLE:
            refuse("block_size", f"a multiple of {PAGE_MULTIPLE}", block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (config.num_full_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._make_views()

    def _make_views(self) -> None:
        self.kv = tuple(zip(self._keys, self._values, strict=True))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return 2 * _row_bytes(self._keys, 1, 2)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return self._keys.nbytes + self._values.nbytes

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block to another in all layers."""
        for buffer in (self._keys, self._values):
            buffer[:, target].copy_(buffer[:, source])


class IndexerCache(_Buffers):
    """Keys of the indexers in pages, one page for a block of tokens, and the rings of raw keys of compressed indexers.

    Parameters
    ----------
    config : HybridConfig
        Sizes; without an indexer (index_topk 0) the cache has no layers.
    num_blocks, block_size : int
        Blocks, and tokens of a block: a multiple of 4 * `index_ratio`.
    num_sequences : int
        Sequence slots: rows of the rings.
    num_spec : int
        Largest number of drafts of a sequence.
    use_fp8 : bool, optional
        Whether keys are e4m3: with scales (uint8 pages) token-wise, plain where compressed. None = as
        ``VLLM_QSA_USE_FP8_INDEXER`` says now.
    dtype, device : torch.dtype, torch.device
        Dtype of raw keys, and of keys without FP8: the model's.

    Attributes
    ----------
    keys : tuple of Tensor [num_blocks, block_size / index_ratio, index_kv_heads, D, or D + 4 bytes]
        Pages of each layer.
    rings : tuple of Tensor [num_sequences, size, index_kv_heads, D] or None
        Raw keys of unfinished groups of each layer, None where keys are token-wise; size = index_ratio + num_spec, rounded up
        to a multiple of the ratio.
    """

    _VIEWS = ("keys", "rings")

    @torch.inference_mode(False)
    def __init__(
        self,
        config: HybridConfig,
        num_blocks: int,
        block_size: int,
        num_sequences: int,
        *,
        num_spec: int = 0,
        use_fp8: bool | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        at_least("num_blocks", num_blocks, 0)
        at_least("block_size", block_size, 1)
        at_least("num_sequences", num_sequences, 0)
        at_least("num_spec", num_spec, 0)
        self.ratio = config.index_ratio
        if config.index_topk and block_size % (PAGE_MULTIPLE * self.ratio):
            refuse("block_size", f"a multiple of {PAGE_MULTIPLE} * index_ratio = {PAGE_MULTIPLE * self.ratio}", block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.page_size = block_size // self.ratio
        self.use_fp8 = env.current().qsa_use_fp8_indexer if use_fp8 is None else use_fp8
        layers = config.num_full_layers if config.index_topk else 0
        width, key_dtype = config.index_head_dim, dtype
        if self.use_fp8 and self.ratio > 1:
            key_dtype = torch.float8_e4m3fn
        elif self.use_fp8:  # a page: all values, then a float32 scale for each row and head
            width, key_dtype = config.index_head_dim + 4, torch.uint8
        placed: dict[str, Any] = {"device": device}
        shape = (layers, num_blocks, self.page_size, config.index_kv_heads, width)
        self._key_dtype = key_dtype
        self._pages = torch.zeros(shape, dtype=key_dtype, **placed)
        self._rings: Tensor | None = None
        if self.ratio > 1:
            size = -(-(self.ratio + num_spec) // self.ratio) * self.ratio
            shape = (layers, num_sequences, size, config.index_kv_heads, config.index_head_dim)
            self._rings = torch.zeros(shape, dtype=dtype, **placed)
        self._make_views()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._pages.dtype == torch.float8_e4m3fn:  # which `pickle` cannot load
            state["_pages"] = self._pages.view(torch.uint8)
        return state

    def _make_views(self) -> None:
        self._pages = self._pages.view(self._key_dtype)
        self.keys = tuple(self._pages)
        self.rings: tuple[Tensor | None, ...] = (None,) * len(self.keys) if self._rings is None else tuple(self._rings)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in all layers; of compressed keys the share of a group's row."""
        return _row_bytes(self._pages, 1, 2) / self.ratio

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that a sequence holds in all layers, whatever its length: its rows of the rings."""
        return 0 if self._rings is None else _row_bytes(self._rings, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return self._pages.nbytes + (0 if self._rings is None else self._rings.nbytes)

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block's page to another in all layers."""
        pages = self._pages.view(torch.uint8)  # float8 has no copies of its own everywhere
        pages[:, target].copy_(pages[:, source])

    def copy_ring(self, source: int, target: int) -> None:
        """Copies the unfinished groups of one sequence slot to another in all layers."""
        if self._rings is not None:
            self._rings[:, target].copy_(self._rings[:, source])


class HybridCaches:
    """All caches of a hybrid model, with one block table for those of attention.

    A deep copy, and a pickle, hold memory of their own in the same layout.

    Parameters
    ----------
    config : HybridConfig
        Sizes of one rank.
    num_blocks, block_size : int
        Blocks of `kv` and `indexer`, and tokens of a block.
    max_num_sequences : int
        Sequences that may be live at a time: each has its slots of `gdn` (`slots_per_sequence`) and its rings.
    num_checkpoints : int
        Further slots of `gdn` for kept prefixes.
    num_spec, null_slot : int
        Largest number of drafts of a sequence, and largest state slot that is never used.
    use_fp8_indexer : bool, optional
        As `use_fp8` of `IndexerCache`.
    replay : bool, optional
        As `replay` of `GDNStateCache`; checkpoints have no ring.
    dtype, state_dtype, device : torch.dtype, torch.dtype, torch.device
        Dtypes of the model and of the recurrent states, and where the caches are.

    Attributes
    ----------
    gdn, kv, indexer : GDNStateCache, KVCache, IndexerCache
    max_seq_len : int
        Most tokens of a sequence: the positions that the model's rotary embedding has. The allocator takes no longer one.
    """

    def __init__(
        self,
        config: HybridConfig,
        num_blocks: int,
        block_size: int,
        max_num_sequences: int,
        *,
        num_checkpoints: int = 0,
        num_spec: int = 0,
        null_slot: int = -1,
        use_fp8_indexer: bool | None = None,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        replay: bool | None = None,
    ) -> None:
        at_least("max_num_sequences", max_num_sequences, 0)
        at_least("num_checkpoints", num_checkpoints, 0)
        self.max_num_sequences, self.num_spec = max_num_sequences, num_spec
        self.max_seq_len = config.max_position_embeddings
        if replay is None:
            dims = config.linear_key_head_dim, config.linear_value_head_dim
            replay = unwanted(config.linear_num_value_heads, dims, max_num_sequences, num_spec) is None
        first = null_slot + 1 + max_num_sequences * (1 if replay else 1 + num_spec)
        placed: dict[str, Any] = {"dtype": dtype, "device": device}
        self.gdn = GDNStateCache(
            config, first + num_checkpoints, num_spec=num_spec, null_slot=null_slot, state_dtype=state_dtype, replay=replay,
            num_rings=first, **placed,
        )  # fmt: skip
        self.kv = KVCache(config, num_blocks, block_size, **placed)
        self.indexer = IndexerCache(
            config, num_blocks, block_size, max_num_sequences, num_spec=num_spec, use_fp8=use_fp8_indexer, **placed
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes that grow with each token of a sequence."""
        return self.kv.bytes_per_token + self.indexer.bytes_per_token

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that a sequence holds whatever its length."""
        return self.gdn.bytes_per_sequence + self.indexer.bytes_per_sequence

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return self.gdn.nbytes + self.kv.nbytes + self.indexer.nbytes

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block of tokens to another, in all layers and caches."""
        self.kv.copy_block(source, target)
        self.indexer.copy_block(source, target)


def _row_bytes(buffer: Tensor, *dims: int) -> int:
    """Bytes of one index of some dimensions."""
    sizes = [size for dim, size in enumerate(buffer.shape) if dim not in dims]
    return int(torch.Size(sizes).numel()) * buffer.element_size()
