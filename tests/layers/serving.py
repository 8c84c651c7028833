"""A small server for tests: packed steps of a model on shuffled, stale caches, with metadata stated plainly, row by row."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gdn.layers import AttentionMetadataBuilder, GDNMetadataBuilder, HybridConfig, StepMetadata


def gdn_metadata(queries: list[int], contexts: list[int], drafted: list[bool], slots: Tensor, accepted: list[int]) -> Any:
    """Metadata of one step by the rules of a mixed batch.

    queries: new tokens of each sequence. contexts: tokens before them. drafted: whether the row is speculative. slots: state
    slots [N, 1 + num_spec]. accepted: tokens of each sequence's previous step that were kept.
    """
    spec = [i for i, is_spec in enumerate(drafted) if is_spec]
    plain = [i for i, is_spec in enumerate(drafted) if not is_spec]
    owner = [i for i, count in enumerate(queries) for _ in range(count)]
    is_decode = [not spec and queries[i] == 1 and contexts[i] > 0 for i in plain]
    first_prefill = is_decode.index(False) if False in is_decode else len(plain)
    decodes, prefills = plain[:first_prefill], plain[first_prefill:]

    def offsets(rows: list[int]) -> Tensor:
        return torch.tensor([0, *[queries[i] for i in rows]]).cumsum(0).int()

    return SimpleNamespace(
        num_prefills=sum(queries[i] > 0 for i in prefills),
        num_prefill_tokens=sum(queries[i] for i in prefills),
        num_decodes=len(decodes),
        num_decode_tokens=sum(queries[i] for i in decodes),
        num_spec_decodes=sum(queries[i] > 0 for i in spec),
        num_spec_decode_tokens=sum(queries[i] for i in spec),
        num_actual_tokens=sum(queries),
        has_initial_state=torch.tensor([contexts[i] > 0 for i in plain]),
        spec_query_start_loc=offsets(spec),
        non_spec_query_start_loc=offsets(plain),
        spec_state_indices_tensor=slots[spec],
        non_spec_state_indices_tensor=slots[plain, 0],
        spec_sequence_masks=torch.tensor(drafted),
        spec_token_indx=torch.tensor([t for t, i in enumerate(owner) if drafted[i]], dtype=torch.int64),
        non_spec_token_indx=torch.tensor([t for t, i in enumerate(owner) if not drafted[i]], dtype=torch.int64),
        num_accepted_tokens=torch.tensor([accepted[i] for i in spec], dtype=torch.int32),
        retrieve_parent_token=None,
    )


@dataclass
class Server:
    """Sequences of one model. Every cache starts with stale contents; slots and blocks are shuffled.

    is_packaged: the package's builders make the metadata, instead of the plain statement here. cp: rank and number of
    context-parallel ranks, for these builders.
    """

    model: Any
    config: HybridConfig
    count: int
    longest: int
    num_spec: int = 0
    block_size: int = 16
    seed: int = 0
    is_packaged: bool = False
    cp: tuple[int, int] = (0, 1)
    lengths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        config, generator = self.config, torch.Generator().manual_seed(self.seed)
        self.lengths, self.accepted = [0] * self.count, [1] * self.count

        def stale(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        rows = self.count * (1 + self.num_spec)
        self.slots = torch.randperm(rows + 3, generator=generator)[:rows].view(self.count, -1).int()
        columns = config.linear_conv_kernel_dim - 1 + self.num_spec
        heads, dims = config.linear_num_value_heads, (config.linear_value_head_dim, config.linear_key_head_dim)
        states = SimpleNamespace(
            conv_states=[stale(rows + 3, config.conv_dim, columns) for _ in range(config.num_linear_layers)],
            ssm_states=[stale(rows + 3, heads, *dims) for _ in range(config.num_linear_layers)],
        )
        blocks = -(-self.longest // self.block_size)
        self.block_tables = torch.randperm(self.count * blocks, generator=generator).view(self.count, blocks).int()
        page = (self.count * blocks, self.block_size)
        kv = [
            tuple(stale(*page, config.num_key_value_heads, config.head_dim) for _ in range(2))
            for _ in range(config.num_full_layers)
        ]
        states.replay, states.begin_step = (None,) * config.num_linear_layers, lambda metadata: None
        self.caches = SimpleNamespace(gdn=states, kv=SimpleNamespace(kv=kv), indexer=None)
        if config.index_topk:
            ratio, shape = config.index_ratio, (config.index_kv_heads, config.index_head_dim)
            size = -(-(ratio + self.num_spec) // ratio) * ratio
            layers = range(config.num_full_layers)
            self.caches.indexer = SimpleNamespace(
                keys=[stale(page[0], page[1] // ratio, *shape) for _ in layers],
                rings=[stale(self.count + 1, size, *shape) if ratio > 1 else None for _ in layers],
            )
        self.ring_slots = (torch.randperm(self.count, generator=generator) + 1).int()

    def step(
        self, rows: list[list[int]], *, drafted: list[bool] | None = None, keep: list[int] | None = None, padding: int = 0
    ) -> list[Tensor]:
        """Runs new tokens of sequences; returns the logits of each [new tokens, vocab].

        rows: new tokens; a sequence without any is not part of the step. drafted: rows with drafts after their first token.
        keep: tokens of each row that stay; the others were rejected. padding: rows after the last token.
        """
        active = [i for i, row in enumerate(rows) if row]
        drafted = drafted or [False] * self.count
        queries, contexts = [len(rows[i]) for i in active], [self.lengths[i] for i in active]
        positions = [torch.arange(old, old + new) for old, new in zip(contexts, queries, strict=True)]
        make = self._built if self.is_packaged else self._stated
        step = make(active, queries, contexts, [drafted[i] for i in active], padding)
        ids = torch.tensor([token for row in rows for token in row] + [0] * padding)
        with torch.inference_mode():
            hidden = self.model(ids, torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]), step, self.caches)
            logits = self.model.compute_logits(hidden[: sum(queries)])
        for i in active:
            kept = len(rows[i]) if keep is None else keep[i]
            self.lengths[i] += kept
            self.accepted[i] = kept if drafted[i] else 1  # the state of another row is in its first slot
        return list(logits.split([len(row) for row in rows]))

    def _built(self, active: list[int], queries: list[int], contexts: list[int], drafted: list[bool], padding: int) -> Any:
        """Metadata by the package's builders."""
        assert padding == 0, "the builders pad captured batches alone"
        lengths = [old + new for old, new in zip(contexts, queries, strict=True)]
        drafts = [new - 1 if is_spec else -1 for new, is_spec in zip(queries, drafted, strict=True)]
        accepted = [self.accepted[i] for i in active]
        ranks: dict[str, Any] = {"cp_rank": self.cp[0], "cp_size": self.cp[1]}
        states = GDNMetadataBuilder("cpu", num_spec=self.num_spec, **ranks).build(
            queries, lengths, self.slots[active], num_draft_tokens=drafts, num_accepted_tokens=accepted
        )
        attention = AttentionMetadataBuilder(
            "cpu", block_size=self.block_size, max_seq_len=self.longest, index_ratio=self.config.index_ratio, **ranks
        ).build(queries, lengths, self.block_tables[active], self.ring_slots[active])
        return StepMetadata(states, attention)

    def _stated(self, active: list[int], queries: list[int], contexts: list[int], drafted: list[bool], padding: int) -> Any:
        """Metadata stated here."""
        lengths = [old + new for old, new in zip(contexts, queries, strict=True)]
        tables = self.block_tables[active]
        slots = []
        for table, old, new in zip(tables, contexts, lengths, strict=True):
            at = torch.arange(old, new)
            slots.append(table[at // self.block_size].long() * self.block_size + at % self.block_size)
        attention = SimpleNamespace(
            query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.cat([*slots, torch.full((padding,), -1)]),
            sequence_slots=self.ring_slots[active],
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            num_actual_tokens=sum(queries),
            seq_lens_host=tuple(lengths),
            query_lens_host=tuple(queries),
        )
        accepted = [self.accepted[i] for i in active]
        states = gdn_metadata(queries, contexts, drafted, self.slots[active], accepted)
        return SimpleNamespace(gdn=states, attention=attention)
