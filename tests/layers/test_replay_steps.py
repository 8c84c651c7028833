"""Steps of a layer by replay against the same steps without: decode rows and drafts next to prompts, trees, new turns."""

from typing import Any

import pytest
import torch

import gdn
from gdn.layers import GatedDeltaNet, GDNMetadataBuilder, GDNStateCache
from tests.layers.small import small_config

SLOTS, COUNT = 5, 3  # slots of sequences, of which so many are used


class Steps:
    """A layer on two caches, with and without replay, and the sequences on them."""

    def __init__(self, num_spec: int) -> None:
        self.config, self.num_spec = small_config(), num_spec
        generator = self.generator = torch.Generator().manual_seed(num_spec)
        self.layer = GatedDeltaNet(self.config, dtype=torch.float32)
        for parameter in self.layer.parameters():
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        options: dict[str, Any] = {"num_spec": num_spec, "dtype": torch.float32}
        self.ours = GDNStateCache(self.config, SLOTS, replay=True, **options)
        self.theirs = GDNStateCache(self.config, SLOTS * (1 + num_spec), replay=False, **options)
        for pool in (*self.ours.ssm_states, *self.ours.rings, *self.theirs.ssm_states):
            pool.fill_(torch.nan)
        self.builders = [GDNMetadataBuilder("cpu", num_spec=num_spec, replay=replay) for replay in (True, False)]
        self.tokens, self.accepted = [0] * COUNT, [1] * COUNT  # committed, and those of the last call
        self.nodes = [1] * COUNT  # accepted node + 1, without replay

    def draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))

    def step(self, queries: list[int], drafts: list[int], parents: list[int] | None = None) -> None:
        """One step of all sequences, in this order. drafts: -1 = a prompt, or a decode row without drafts."""
        x = torch.randn(sum(queries), self.config.hidden_size, generator=self.generator)
        lengths = [p + count for p, count in zip(self.tokens, queries, strict=True)]
        width, found, built = 1 + self.num_spec, [], []
        for builder, cache, accepted in zip(self.builders, (self.ours, self.theirs), (self.accepted, self.nodes), strict=True):
            slots = [[n + 2] for n in range(COUNT)]
            if cache is self.theirs:
                slots = [list(range((n + 2) * width, (n + 3) * width)) for n in range(COUNT)]
            spec: dict[str, Any] = {}
            if self.num_spec:
                spec = {"num_draft_tokens": drafts, "num_accepted_tokens": accepted, "parent_token": parents}
            if cache is self.theirs:
                self._resume(queries, drafts)
            metadata = builder.build(queries, lengths, slots, **spec)
            built.append(metadata)
            cache.begin_step(metadata)
            found.append(self.layer(x, metadata, cache.conv_states[0], cache.ssm_states[0], cache.replay[0]))
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
        self._accept(queries, drafts, parents, built[0])

    def _resume(self, queries: list[int], drafts: list[int]) -> None:
        """Without replay the caller of a prompt after drafts moves the accepted state and window to where prompts start from."""
        first = self.config.linear_conv_kernel_dim - 1
        for n, (count, is_spec) in enumerate(zip(queries, drafts, strict=True)):
            if count and is_spec < 0 and self.nodes[n] > 1:
                slot, last = (n + 2) * (1 + self.num_spec), self.nodes[n] - 1
                self.theirs.copy_slot(slot + last, slot, conv=False)
                window = self.theirs.conv_states[0][slot]
                window[:, :first] = window[:, last : last + first].clone()

    def _accept(self, queries: list[int], drafts: list[int], parents: list[int] | None, metadata: Any) -> None:
        """Accepts a random number of drafts, or a random node."""
        chosen = [self.draw(max(count, 1)) if is_spec >= 0 else count - 1 for count, is_spec in zip(queries, drafts, strict=True)]
        if parents is not None:
            lengths = torch.tensor(self.accepted, dtype=torch.int32)
            gdn.accept_draft_tree(
                self.ours.rings[0], self.ours.conv_states[0], metadata.spec_state_indices_tensor, metadata.retrieve_parent_token,
                torch.tensor(chosen, dtype=torch.int32), metadata.num_computed_tokens, lengths,
                query_start_loc=metadata.spec_query_start_loc, conv_width=self.config.linear_conv_kernel_dim,
            )  # fmt: skip
        for n, (count, node) in enumerate(zip(queries, chosen, strict=True)):
            if not count:
                continue
            is_spec = drafts[n] >= 0
            self.nodes[n] = node + 1 if is_spec else 1
            self.accepted[n] = int(lengths[n]) if parents is not None else self.nodes[n]
            self.tokens[n] += self.accepted[n] if is_spec else count


def test_decode_rows_next_to_prompts() -> None:
    steps = Steps(0)
    steps.step([4, 70, 1], [-1] * 3)
    for _ in range(10):
        kind = steps.draw(3)
        # Decode rows first; then, in some steps, prompt tokens of a sequence that has decoded, or of two.
        queries = [[1, 1, 1], [1, 1, 2 + steps.draw(3)], [1, 3, 66]][kind]
        steps.step(queries, [-1] * 3)


def test_drafts_next_to_prompts() -> None:
    steps = Steps(3)
    steps.step([4, 5, 9], [-1] * 3)
    for _ in range(25):
        drafts = [steps.draw(5) - 1 for _ in range(3)]
        queries = [1 + count if count >= 0 else 2 + steps.draw(4) for count in drafts]
        if steps.draw(4) == 0:
            queries[steps.draw(3)] = 0
        steps.step(queries, drafts)


@pytest.mark.parametrize("num_spec", [4])
def test_draft_trees(num_spec: int) -> None:
    steps = Steps(num_spec)
    steps.step([4, 5, 9], [-1] * 3)
    for _ in range(15):
        drafts = [steps.draw(1 + num_spec) for _ in range(3)]
        parents = [steps.draw(i + 1) - 1 for count in drafts for i in range(count + 1)]
        steps.step([count + 1 for count in drafts], drafts, parents)


@pytest.mark.parametrize(
    "step",
    [
        {"query_lens": [5], "seq_lens": [5], "slots": [[0]]},
        {"query_lens": [1], "seq_lens": [9], "slots": [[0]]},
        {"query_lens": [2], "seq_lens": [9], "slots": [[0, 1]], "num_draft_tokens": [1], "num_accepted_tokens": [1]},
    ],
    ids=["a prompt", "a decode row", "a draft"],
)
def test_metadata_of_a_builder_without_replay_is_refused(step: dict[str, Any]) -> None:
    """Nothing is counted, and no state is touched."""
    num_spec = len(step["slots"][0]) - 1
    cache = GDNStateCache(small_config(), SLOTS, num_spec=num_spec, dtype=torch.float32, replay=True)
    assert cache.state_tokens is not None
    cache.state_tokens.fill_(7)
    metadata = GDNMetadataBuilder("cpu", num_spec=num_spec).build(**step)
    with pytest.raises(ValueError, match="metadata: expected that of a GDNMetadataBuilder with replay=True"):
        cache.begin_step(metadata)
    assert (cache.state_tokens == 7).all() and not cache.ssm_states[0].any()
    cache.begin_step(GDNMetadataBuilder("cpu", num_spec=num_spec, replay=True).build([], [], []))
