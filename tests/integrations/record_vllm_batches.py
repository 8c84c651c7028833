"""Writes recorded_vllm_batches.json: batches with drafts as vLLM's own GDNAttentionMetadataBuilder describes them.

    python -m tests.integrations.record_vllm_batches        # where vLLM can be imported; no GPU is needed

A trace is a run of an engine that drafts: prompts, captured batches with padded rows, uniform and ragged drafts, prompts among
drafts, later parts of prompts. Each step holds what the engine gave to the builder and what came back.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

Tensor = torch.Tensor
PLACE = Path(__file__).with_name("recorded_vllm_batches.json")
NAMES = (
    "num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_spec_decodes", "num_spec_decode_tokens",
    "num_actual_tokens", "checkpoint", "has_initial_state", "spec_query_start_loc", "non_spec_query_start_loc",
    "spec_state_indices_tensor", "non_spec_state_indices_tensor", "spec_sequence_masks", "spec_token_indx",
    "non_spec_token_indx", "num_accepted_tokens", "prefill_query_start_loc", "prefill_state_indices", "prefill_has_initial_state",
)  # fmt: skip
NO_DRAFTS = -1  # of a row that is still in its prompt


@dataclass
class Row:
    """A sequence in a batch: its new tokens, those computed before, its drafts among the new ones (or NO_DRAFTS)."""

    sequence: int
    tokens: int
    before: int
    drafts: int
    accepted: int


class Run:
    """Sequences of an engine with drafts, without prefix caching: each owns 1 + num_spec blocks."""

    def __init__(self, num_spec: int, seed: int) -> None:
        self.num_spec, self.random = num_spec, random.Random(seed)
        self.blocks: list[list[int]] = []
        self.lengths: list[int] = []
        self.accepted: list[int] = []
        self.free = list(range(1, 40))
        self.random.shuffle(self.free)

    def prompt(self, tokens: int, sequence: int | None = None) -> Row:
        """A prompt, or a later part of one."""
        if sequence is None:
            sequence = len(self.blocks)
            self.blocks.append([self.free.pop() for _ in range(1 + self.num_spec)])
            self.lengths.append(0)
            self.accepted.append(1)
        return Row(sequence, tokens, self.lengths[sequence], NO_DRAFTS, 1)

    def draft(self, sequence: int, drafts: int) -> Row:
        return Row(sequence, 1 + drafts, self.lengths[sequence], drafts, self.accepted[sequence])

    def ragged(self, *sequences: int) -> list[Row]:
        return [self.draft(one, self.random.randint(0, self.num_spec)) for one in sequences]

    def uniform(self, *sequences: int) -> list[Row]:
        return [self.draft(one, self.num_spec) for one in sequences]

    def end(self, rows: list[Row]) -> None:
        """The engine samples: of each row's drafts some are accepted, and the token after them."""
        for row in rows:
            self.accepted[row.sequence] = 1 if row.drafts == NO_DRAFTS else self.random.randint(1, row.tokens)
            kept = row.tokens if row.drafts == NO_DRAFTS else self.accepted[row.sequence]
            self.lengths[row.sequence] = row.before + kept


def trace(num_spec: int, seed: int) -> list[dict[str, Any]]:
    """The steps of a run; sequences by number, in the order of their first step."""
    run, builder = Run(num_spec, seed), _builder(num_spec)
    steps: list[dict[str, Any]] = []

    def step(rows: list[Row], padded: int = 0) -> None:
        metadata = _build(builder, run, rows, padded)
        blocks = [run.blocks[row.sequence] for row in rows]
        steps.append({"rows": [vars(row) for row in rows], "blocks": blocks, "metadata": metadata})
        run.end(rows)

    step([run.prompt(7), run.prompt(10), run.prompt(1)])
    step(run.uniform(0, 1, 2), padded=2)  # a captured graph of 5 sequences
    step(run.ragged(0, 1, 2))
    step([*run.ragged(2), run.prompt(1), *run.ragged(0), run.prompt(18), *run.ragged(1)])
    step([run.draft(1, 0), run.prompt(1, sequence=3), *run.uniform(2), run.prompt(12, sequence=4), run.draft(0, num_spec)])
    step([run.draft(one, 0) for one in range(5)])  # nobody drafted: the accepted counts still apply
    step(run.uniform(4, 0, 3), padded=1)
    step(run.ragged(3, 2, 1, 4))
    return steps


def config(num_spec: int) -> Any:
    """As much of a configuration as vLLM's builder reads. It captures whole graphs, as by default."""
    speculative = SimpleNamespace(
        num_speculative_tokens=num_spec, parallel_drafting=False, use_eagle_block_drop=lambda: False, method="mtp"
    )
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True), max_cudagraph_capture_size=None
        ),
        speculative_config=speculative if num_spec else None, additional_config=None, num_hash_lookahead_tokens=0,
        use_v2_model_runner=False, num_speculative_tokens=num_spec,
        scheduler_config=SimpleNamespace(max_num_seqs=16), cache_config=SimpleNamespace(mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(linear_key_head_dim=128, linear_value_head_dim=128)),
    )  # fmt: skip


def _builder(num_spec: int) -> Any:
    """vLLM's builder."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(block_size=4096, shapes=((1,), (1,)), dtypes=(torch.float32, torch.float32), num_speculative_blocks=num_spec)
    builder = GDNAttentionMetadataBuilder(spec, ["layer"], config(num_spec), torch.device("cpu"))
    builder.gdn_prefill_backend = "flashinfer"  # what an SM90 GPU resolves to: no tables of chunks
    return builder


def _build(builder: Any, run: Run, rows: list[Row], padded: int) -> dict[str, Any]:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lengths = [row.tokens for row in rows] + [0] * padded
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    seq_lens = torch.tensor([row.before + row.tokens for row in rows] + [0] * padded, dtype=torch.int32)
    blocks = [run.blocks[row.sequence] for row in rows] + [[0] * (1 + run.num_spec)] * padded
    is_prefilling = torch.tensor([row.drafts == NO_DRAFTS for row in rows] + [False] * padded)
    tokens = len(lengths) * (1 + run.num_spec) if padded else sum(lengths)
    common = CommonAttentionMetadata(
        query_start_loc=bounds, query_start_loc_cpu=bounds, seq_lens=seq_lens, num_reqs=len(lengths), num_actual_tokens=tokens,
        max_query_len=max(lengths), max_seq_len=int(seq_lens.max()), block_table_tensor=torch.tensor(blocks, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64), is_prefilling=is_prefilling, seq_lens_cpu_upper_bound=seq_lens,
    )  # fmt: skip
    accepted = torch.tensor([row.accepted for row in rows] + [1] * padded, dtype=torch.int32)
    drafts = torch.tensor([row.drafts for row in rows] + [NO_DRAFTS] * padded, dtype=torch.int32)
    built = builder.build(0, common, accepted, drafts)
    unknown = {field.name for field in fields(built)} - {*NAMES, *_NOT_OURS}
    if unknown:
        raise RuntimeError(f"fields of the metadata that are not recorded: {sorted(unknown)}")
    return {name: _plain(getattr(built, name)) for name in NAMES}


_NOT_OURS = (  # of other kernels, or on the host alone
    "flashinfer_checkpoint_plan", "spec_sequence_masks_cpu", "uniform_spec_sequence_length", "chunk_indices", "chunk_offsets",
    "aiter_prefill_metadata", "nums_dict", "batch_ptr", "token_chunk_offset_ptr",
)  # fmt: skip


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    kind = str(value.dtype).removeprefix("torch.")
    return {"dtype": kind, "shape": list(value.shape), "stride": list(value.stride()), "values": value.flatten().tolist()}


def tensor(plain: Any) -> Any:
    """A recorded value again, with its strides."""
    if not isinstance(plain, dict):
        return plain
    dtype = getattr(torch, plain["dtype"])
    made = torch.zeros(1 + sum((n - 1) * s for n, s in zip(plain["shape"], plain["stride"], strict=True) if n), dtype=dtype)
    made = made.as_strided(plain["shape"], plain["stride"])
    return made.copy_(torch.tensor(plain["values"], dtype=dtype).view(plain["shape"]))


def without_pinned_memory(put: Callable[[Any, str, bool], None]) -> None:
    """Where there is no GPU. The modules that the builder uses took the flag by name. put: as setattr."""
    from vllm.utils import torch_utils
    from vllm.v1.attention.backends import utils

    for module in (torch_utils, utils):
        put(module, "PIN_MEMORY", False)


def traces() -> dict[str, Any]:
    return {str(num_spec): trace(num_spec, seed=num_spec) for num_spec in (2, 3)}


def main() -> None:
    from importlib.metadata import version

    without_pinned_memory(setattr)
    content = {"vllm": version("vllm"), "traces": traces()}
    PLACE.write_text(json.dumps(content, separators=(",", ":")).replace('{"rows"', '\n{"rows"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
