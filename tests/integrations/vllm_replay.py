"""An engine around one layer that decodes by replay, on pages as vLLM plans them, against a float64 recurrence.

Sequences come and go: prompts in chunks, decode, drafts that are accepted at random, preemption with recompute, blocks that are
dealt out again. A batch is described as vLLM's builder does it; every result of every token is compared.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import gdn
from gdn.integrations._vllm_pages import page_of
from gdn.integrations._vllm_replay_step import step_of
from gdn.integrations._vllm_rows import Counter, Rows
from tests.integrations.vllm_engine import HV, WIDTH, H, Host, common, int32, metadata_of, offsets

Tensor = torch.Tensor
CLOSE = 2e-5
NO_DRAFTS = -1


class ReplayHost(Host):
    """A layer whose blocks hold a ring too. What nobody wrote is not a number, and its counts are negative."""

    def _pages(self, state_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        columns = WIDTH - 1 + self.num_spec
        order = (self.channels, columns) if self.dim_first else (columns, self.channels)
        self.page = page_of(H, (order, (HV, self.V, self.K)), state_dtype, self.num_spec)
        _, (elements,) = self.page.shapes
        window, size = 4 * columns * self.channels, state_dtype.itemsize
        page = -(-(window + elements * size) // 512) * 512 + 1024
        memory = torch.full((self.num_blocks * page,), 0xFF, dtype=torch.uint8)
        windows = memory.view(torch.float32).as_strided((self.num_blocks, *order), (page // 4, order[1], 1), 0)
        flat = memory.view(state_dtype).as_strided((self.num_blocks, elements), (page // size, 1), window // size)
        windows[0], flat[0] = 0, 0
        return windows, flat


@dataclass
class Row:
    """A sequence in a batch: its new tokens, and how many of them are drafts; NO_DRAFTS in rows that are not speculative."""

    own: "Running"
    tokens: int
    drafts: int = NO_DRAFTS


@dataclass
class Running:
    """A sequence: its block, its committed tokens, those accepted of the last step, and the recurrence after the former."""

    block: int
    computed: int = 0
    accepted: int = 1
    history: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0), torch.empty(0)))  # qkvz, ba
    state: Tensor = field(default_factory=lambda: torch.empty(0))
    window: Tensor = field(default_factory=lambda: torch.empty(0))


class Engine:
    """Steps of sequences.

    Parameters
    ----------
    host : ReplayHost
    build : callable, optional
        Takes rows, and how many padded ones follow them; returns the host's metadata with `gdn_replay`. A stand-in by default.
    """

    def __init__(self, host: ReplayHost, build: Callable[[list[Row], int], Any] | None = None) -> None:
        self.host = host
        self.step = step_of(host.layer, conv_dim_first=host.dim_first, page=host.page, fold_phase=3)
        self.views = host.page.views(host.layer.kv_cache[1])
        self.stand_in = StandIn(host)
        self.build: Callable[[list[Row], int], Any] = build or self.stand_in
        self.worst = 0.0

    def new(self) -> Running:
        host = self.host
        return self.reset(Running(host.free.pop()))

    def reset(self, own: Running) -> Running:
        """A sequence without tokens."""
        host = self.host
        own.computed, own.accepted = 0, 1
        own.history = (torch.zeros(0, host.channels + HV * host.V), torch.zeros(0, 2 * HV))
        own.state, own.window = host.nothing()
        return own

    def end(self, own: Running) -> None:
        """The block goes to whoever comes next."""
        self.host.free.insert(0, own.block)

    def run(self, rows: list[Row], padded: int = 0, again: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        """Makes a step and checks it; of drafts a random number is accepted. again: tokens that are computed once more."""
        host = self.host
        drawn = [(again or {}).get(row.own.block) or host.rows(row.tokens) for row in rows]
        metadata = self.build(rows, padded)
        count = sum(row.tokens for row in rows)
        extra = host.rows(metadata.num_actual_tokens - count + 2)
        given = host.projected(*(torch.cat([*(one[part] for one in drawn), extra[part]]) for part in (0, 1)))
        core = torch.zeros(len(given[0]), HV, host.V)
        nobody = [pages[0].clone() for pages in host.layer.kv_cache]
        self.step(*given, core, metadata)
        assert not core[count:].any()
        assert all(torch.equal(pages[0], kept) for pages, kept in zip(host.layer.kv_cache, nobody, strict=True))
        for row, (qkvz, ba), found in zip(rows, drawn, core[:count].split([row.tokens for row in rows]), strict=True):
            results, states, line = host.recurrence(qkvz, ba, row.own.state, row.own.window)
            self._note((found - results).abs())
            own, kept = row.own, row.tokens
            if row.drafts != NO_DRAFTS:
                kept = host.random.randint(1, row.tokens)
            own.accepted = kept if row.drafts != NO_DRAFTS else 1
            own.computed += kept
            own.state, own.window = states[kept - 1], line[kept : kept + WIDTH - 1]
            own.history = (torch.cat([own.history[0], qkvz[:kept]]), torch.cat([own.history[1], ba[:kept]]))

    def _note(self, errors: Tensor) -> None:
        """Keeps the worst, which is not a number once one was not."""
        self.worst = float(torch.maximum(torch.tensor(self.worst), errors.max().float()))

    def check_states(self, every: list[Running]) -> None:
        """Folds into copies, so that the sequences go on as they are, and compares; windows too."""
        host, page = self.host, self.host.page
        flat = host.layer.kv_cache[1].clone()
        views = page.views(flat)
        gdn.fold_states(
            views.states, int32([own.block for own in every]), views.ring, views.state_tokens,
            int32([own.computed for own in every]), num_k_heads=H, fold_every=page.fold_every, fold_phase=3,
            num_accepted_tokens=int32([own.accepted for own in every]), state_v_first=True, null_slot=0,
        )  # fmt: skip
        windows = host.layer.kv_cache[0] if host.dim_first else host.layer.kv_cache[0].transpose(-1, -2)
        for own in every:
            self._note((views.states[own.block] - own.state).abs())
            begin = own.accepted - 1
            assert torch.equal(windows[own.block, :, begin : begin + WIDTH - 1], own.window.T.float())


class StandIn:
    """Describes batches as vLLM's builder does, and adds what ours adds. padded: a batch for a captured graph.

    checkpoint: of the next batch, (offset, block) of each of its rows without drafts.
    """

    def __init__(self, host: ReplayHost) -> None:
        self.host = host
        self.checkpoint: list[tuple[int, int]] | None = None
        self.count = Counter(16, host.num_spec, WIDTH - 1, torch.device("cpu"))

    def __call__(self, rows: list[Row], padded: int) -> Any:
        batch, accepted, drafts = described(rows, padded, self.host.num_spec)
        found = self._metadata(rows, padded, batch)
        if self.checkpoint is not None:
            places, blocks = zip(*self.checkpoint, strict=True)
            found.checkpoint = SimpleNamespace(checkpoint_offsets=int32([*places]), state_indices=int32([*blocks]))
            self.checkpoint = None
        found.gdn_replay = self.count(found, batch, accepted, drafts)
        assert isinstance(found.gdn_replay, Rows)
        return found

    def _metadata(self, rows: list[Row], padded: int, batch: Any) -> SimpleNamespace:
        num_spec, lengths = self.host.num_spec, [row.tokens for row in rows]
        blocks = int32([row.own.block for row in rows] + [0] * padded)
        tokens = (len(rows) + padded) * (1 + num_spec) if padded else sum(lengths)
        is_draft = [row.drafts != NO_DRAFTS for row in rows]
        has_state = torch.tensor([row.own.computed > 0 for row in rows])
        bounds = int32(batch.query_start_loc_cpu.tolist())
        known: dict[str, Any] = {"num_actual_tokens": tokens}
        if not any(is_draft):
            decoding = sum(row.tokens == 1 and row.own.computed > 0 for row in rows)
            assert all(row.tokens == 1 for row in rows[:decoding])
            known |= {"num_decodes": decoding, "num_decode_tokens": decoding, "non_spec_state_indices_tensor": blocks}
            if decoding < len(rows):
                known |= {
                    "num_prefills": len(rows) - decoding, "prefill_query_start_loc": bounds[decoding:] - decoding,
                    "prefill_state_indices": blocks[decoding:], "prefill_has_initial_state": has_state[decoding:],
                }  # fmt: skip
            return metadata_of(**known)
        drafting, others = ([n for n, is_one in enumerate(is_draft) if is_one is which] for which in (True, False))
        table = blocks[:, None].expand(-1, 1 + num_spec).contiguous()
        known |= {
            "num_spec_decodes": len(drafting), "spec_sequence_masks": torch.tensor(is_draft + [False] * padded),
            "spec_state_indices_tensor": table, "spec_query_start_loc": bounds,
            "num_accepted_tokens": int32([row.own.accepted for row in rows] + [1] * padded),
        }  # fmt: skip
        if others:
            where = [list(range(begin, end)) for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
            known |= {
                "num_prefills": len(others), "spec_state_indices_tensor": table[drafting],
                "spec_query_start_loc": offsets([lengths[n] for n in drafting]),
                "num_accepted_tokens": int32([rows[n].own.accepted for n in drafting]),
                "spec_token_indx": torch.tensor([token for n in drafting for token in where[n]]),
                "non_spec_token_indx": torch.tensor([token for n in others for token in where[n]]),
                "prefill_query_start_loc": offsets([lengths[n] for n in others]), "prefill_state_indices": blocks[others],
                "prefill_has_initial_state": has_state[others],
            }  # fmt: skip
        return metadata_of(**known)


def described(rows: list[Row], padded: int, num_spec: int) -> tuple[Any, Tensor | None, Tensor | None]:
    """What the host's runner gives to a builder: the batch, accepted tokens and drafts of each row."""
    batch = common([row.own.computed for row in rows] + [0] * padded, [row.tokens for row in rows] + [0] * padded)
    if not num_spec:
        return batch, None, None
    accepted = int32([row.own.accepted for row in rows] + [1] * padded)
    return batch, accepted, int32([row.drafts for row in rows] + [NO_DRAFTS] * padded)
