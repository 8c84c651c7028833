"""Drafts of multi-token prediction by the metadata that vLLM's own builder made, against a float64 loop over every token.

The batches are recorded (record_vllm_batches.py): ragged accepted counts, captured batches with padded rows, sequences without a
draft, prompts and later parts of prompts among drafts.
"""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn.integrations._vllm_replay_step import step_of
from gdn.integrations._vllm_rows import Counter
from gdn.integrations._vllm_step import Step
from tests.integrations import record_vllm_batches as record
from tests.integrations.vllm_engine import HV, WIDTH, Host, Sequence, V, common, int32
from tests.integrations.vllm_replay import ReplayHost

RECORDED = json.loads(record.PLACE.read_text(encoding="utf-8"))
LAYOUTS = [  # drafts, interleaved, dim_first
    pytest.param(*one, marks=() if one in ((2, False, False), (3, True, True)) else pytest.mark.cover)
    for one in itertools.product((2, 3), (False, True), (False, True))
]
CLOSE = 2e-5


class Replay:
    """Sequences of a recorded run, with drawn projections."""

    def __init__(self, host: Host) -> None:
        self.host, self.step = host, Step(host.layer, conv_dim_first=host.dim_first)
        self.own: dict[int, Sequence] = {}

    def make(self, recorded: dict[str, Any]) -> None:
        host, rows = self.host, recorded["rows"]
        metadata = SimpleNamespace(**{name: record.tensor(plain) for name, plain in recorded["metadata"].items()})
        drawn = []
        for row, blocks in zip(rows, recorded["blocks"], strict=True):
            own = self.own.setdefault(row["sequence"], Sequence(blocks))
            # Those of the step before that were not accepted are forgotten.
            own.qkvz, own.ba = own.qkvz[: row["before"]], own.ba[: row["before"]]
            drawn.append(host.rows(row["tokens"]))
            own.qkvz, own.ba = torch.cat([own.qkvz, drawn[-1][0]]), torch.cat([own.ba, drawn[-1][1]])
        real = sum(row["tokens"] for row in rows)
        padding = host.rows(metadata.num_actual_tokens - real + 2)
        self.add(metadata, rows)
        given = host.projected(*(torch.cat([*(one[part] for one in drawn), padding[part]]) for part in (0, 1)))
        core = torch.full((len(given[0]), HV, V), torch.nan)
        nobody = [pages[0].clone() for pages in host.layer.kv_cache]
        self.step(*given, core, metadata)
        assert not core[real:].any()
        assert all(torch.equal(pages[0], before) for pages, before in zip(host.layer.kv_cache, nobody, strict=True))
        for row, result in zip(rows, core[:real].split([row["tokens"] for row in rows]), strict=True):
            self.check(row, result)

    def add(self, metadata: SimpleNamespace, rows: list[dict[str, int]]) -> None:
        """What the adapter's own builder adds to the host's metadata."""

    def check(self, row: dict[str, int], result: torch.Tensor) -> None:
        """Results; every state that the next step may start from; the window, which ends at the last new token."""
        host, own, new = self.host, self.own[row["sequence"]], row["tokens"]
        windows, states = host.layer.kv_cache
        windows = windows if host.dim_first else windows.transpose(-1, -2)
        expected, after, _ = host.expected(own, new)
        assert (result - expected).abs().max() < CLOSE
        is_drafting = row["drafts"] != record.NO_DRAFTS
        for block, state in zip(own.blocks, after[-new:] if is_drafting else after[-1:], strict=False):
            assert (states[block] - state).abs().max() < CLOSE
        columns = WIDTH - 1 + (new - 1 if is_drafting else 0)
        line = torch.cat([torch.zeros(columns, windows.shape[1]), own.qkvz[:, : windows.shape[1]]])[-columns:]
        assert torch.equal(windows[own.blocks[0], :, :columns], line.T)


@pytest.mark.parametrize(("num_spec", "interleaved", "dim_first"), LAYOUTS)
def test_recorded_batches(num_spec: int, interleaved: bool, dim_first: bool) -> None:
    replay = Replay(Host(num_spec, num_spec=num_spec, interleaved=interleaved, dim_first=dim_first))
    for recorded in RECORDED["traces"][str(num_spec)]:
        replay.make(recorded)


class RingReplay(Replay):
    """The same with rings: a sequence uses the first of its blocks alone."""

    host: ReplayHost

    def __init__(self, host: ReplayHost) -> None:
        super().__init__(host)
        self.step = step_of(host.layer, conv_dim_first=host.dim_first, page=host.page)
        self.count = Counter(16, host.num_spec, WIDTH - 1, torch.device("cpu"))

    def add(self, metadata: SimpleNamespace, rows: list[dict[str, int]]) -> None:
        masks = metadata.spec_sequence_masks
        padded = 0 if masks is None else len(masks) - len(rows)
        none = [0] * padded
        batch = common([row["before"] for row in rows] + none, [row["tokens"] for row in rows] + none)
        accepted = int32([row["accepted"] for row in rows] + [1] * padded)
        drafts = int32([row["drafts"] for row in rows] + [record.NO_DRAFTS] * padded)
        metadata.gdn_replay = self.count(metadata, batch, accepted, drafts)

    def check(self, row: dict[str, int], result: torch.Tensor) -> None:
        expected, _, _ = self.host.expected(self.own[row["sequence"]], row["tokens"])
        assert (result - expected).abs().max() < CLOSE


@pytest.mark.parametrize(("num_spec", "interleaved", "dim_first"), LAYOUTS)
def test_recorded_batches_by_replay(num_spec: int, interleaved: bool, dim_first: bool) -> None:
    replay = RingReplay(ReplayHost(num_spec, num_spec=num_spec, interleaved=interleaved, dim_first=dim_first))
    for recorded in RECORDED["traces"][str(num_spec)]:
        replay.make(recorded)


def test_what_was_recorded() -> None:
    """The kinds of batches that the file must hold for the test above to mean what it says."""
    for num_spec, steps in RECORDED["traces"].items():
        drafting = [step for step in steps if step["metadata"]["spec_sequence_masks"] is not None]
        accepted = {row["accepted"] for step in drafting for row in step["rows"] if row["drafts"] != record.NO_DRAFTS}
        assert accepted == set(range(1, 2 + int(num_spec)))
        padded = [step for step in drafting if step["metadata"]["num_actual_tokens"] > sum(row["tokens"] for row in step["rows"])]
        assert len(padded) == 2 and all(0 in step["metadata"]["spec_state_indices_tensor"]["values"] for step in padded)
        mixed = [step for step in drafting if step["metadata"]["num_prefills"]]
        starts = [step["metadata"]["prefill_has_initial_state"]["values"] for step in mixed]
        assert len(mixed) == 2 and False in starts[0] and True in starts[1]
        assert {step["metadata"]["spec_token_indx"]["dtype"] for step in mixed} == {"int64"}


def test_the_recorded_batches_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: its batches are those that were recorded")
    from importlib.metadata import version

    assert version("vllm") == RECORDED["vllm"], "record the batches again"
    record.without_pinned_memory(monkeypatch.setattr)
    assert json.loads(json.dumps(record.traces())) == RECORDED["traces"]
