"""Attention with an indexer (qwen4_exp) by the adapter: the same tokens selected, and what is left to the host."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from gdn.integrations import Handle, _calls
from gdn.integrations._transformers import packed, qsa
from gdn.integrations.transformers import enable
from tests.integrations import transformers_host as host
from tests.integrations.transformers_host import assert_close, on, prompts, run
from tests.layers import hf

PACKED = "packed sequences in attention with an indexer"


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    model = host.build("qwen4_exp", **host.SHORT)
    with hf.exact_ties():
        yield model


def attention_of(model: Any) -> Any:
    (found,) = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    return found


def counts(handle: Handle) -> tuple[int, dict[str, int]]:
    (point,) = [one for one in handle.report().points if one.path.endswith("self_attn")]
    return point.served, dict(point.left)


@pytest.mark.parametrize(("kind", "lengths"), [("dynamic", (1, 1)), ("dynamic", (22, 9)), ("static", (2, 3))])
def test_a_padded_prompt_in_two_parts_and_a_decode_step(model: PreTrainedModel, kind: str, lengths: tuple[int, ...]) -> None:
    ids, mask = prompts(*lengths)
    ids = torch.cat([ids, ids[:, -1:], ids[:, :5].clamp(min=1)], dim=1)
    mask = torch.cat([mask, mask.new_ones(len(lengths), ids.shape[1] - mask.shape[1])], dim=1)
    cuts = (0, max(lengths), ids.shape[1] - 1, ids.shape[1])

    def logits() -> torch.Tensor:
        cache = getattr(host, kind)(model)
        parts = [run(model, ids[:, a:b], cache, attention_mask=mask[:, :b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        return torch.cat(parts, dim=1)[mask.bool()]

    wanted = logits()
    with on(model, "layers") as handle:
        assert_close(logits(), wanted)
        assert counts(handle) == (3, {})


def test_without_a_cache_and_with_holes_in_the_mask(model: PreTrainedModel) -> None:
    ids, mask = prompts(30, 30)
    mask[0, 7:12] = 0
    mask[1, -3:] = 0
    for options in ({}, {"attention_mask": mask}):
        wanted = run(model, ids, **options)
        real = options.get("attention_mask", torch.ones_like(ids)).bool()
        with on(model, "layers") as handle:
            assert_close(run(model, ids, **options)[real], wanted[real])
            assert counts(handle) == (1, {})


def test_other_masks_and_packed_rows_are_the_hosts(model: PreTrainedModel) -> None:
    ids, mask = prompts(12)
    positions = torch.arange(12)[None] % 5
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    local = causal & ~causal.roll(3, 2)
    offsets = torch.tensor([0, 5, 10, 12], dtype=torch.int32)
    for options, reason in (
        ({"attention_mask": local}, packed.OTHER_MASK),
        ({"position_ids": positions}, PACKED),
        ({"position_ids": positions, "cu_seq_lens_q": offsets}, PACKED),
        ({"output_attentions": True}, "attention weights are wanted"),
    ):
        with on(model, "layers") as handle:
            run(model, ids, **options)
            assert counts(handle) == (0, {reason: 1})


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_four_dimensions_that_hide_padding_and_later_tokens(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """As `generate` makes them for a static cache: one for each kind of layer."""
    ids, mask = prompts(12, 7)
    seen = torch.ones(12, 12, dtype=torch.bool).tril()[None, None] & mask[:, None, None].bool()
    seen = seen if dtype == torch.bool else torch.zeros(2, 1, 12, 12).masked_fill(~seen, torch.finfo(dtype).min)
    masks = {"indexed_attention": seen, "linear_attention": mask}
    wanted = run(model, ids, attention_mask=masks)[mask.bool()]
    with on(model, "layers") as handle:
        assert_close(run(model, ids, attention_mask=masks)[mask.bool()], wanted)
        assert counts(handle) == (1, {})


def test_every_other_reason(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, hidden, mask = attention_of(model), torch.randn(1, 4, 64), torch.ones(1, 1, 4, 4, dtype=torch.bool)

    def refusal(hidden: Any = hidden, mask: Any = mask, allow_reference: bool = True) -> str | None:
        with torch.inference_mode():
            return qsa.refusal(layer, hidden, mask, None, allow_reference)

    assert refusal() is None and refusal(allow_reference=False) == "the tokens are on cpu"
    assert refusal(hidden[:0]) == "no tokens" and refusal(mask=mask[0]) == "a mask of 3 dimensions"
    assert qsa.refusal(layer, hidden, mask, None, True) == "autograd needs gradients, which this project does not record"
    with torch.inference_mode():
        assert qsa.refusal(layer, hidden, mask, packed.OUTSIDE, True) == packed.OUTSIDE
    assert packed.Boundaries().unserved_mask == packed.OUTSIDE
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert refusal() == "autocast is on"
    with monkeypatch.context() as one:
        one.setattr(torch.compiler, "is_compiling", lambda: True)
        assert refusal() == "more than one token of attention with an indexer in a compiled call"
        assert refusal(hidden[:, :1], mask[:, :, :1]) is None
    with monkeypatch.context() as one:
        one.setattr(layer, "training", True)
        one.setattr(layer, "attention_dropout", 0.1)
        assert refusal() == "dropout"
    monkeypatch.setattr(_calls, "_is_sm90", lambda index: True)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = torch.empty(1, 4, 64, dtype=torch.bfloat16, device="cuda")
    assert refusal(on_gpu) == "no kernel for head dims 32 and 32 of the indexer"
    indexer = layer.indexer
    for owner, name, value in ((layer, "head_dim", 128), (indexer, "index_head_dim", 256)):
        monkeypatch.setattr(owner, name, value)
    assert refusal(on_gpu) == "no kernel for head dims 128 and 256 of the indexer"
    monkeypatch.setattr(indexer, "index_head_dim", 64)
    assert refusal(on_gpu) is None
    heads = layer.q_proj.out_features // (2 * layer.k_proj.out_features)
    monkeypatch.setattr(indexer, "index_n_heads", 65)
    assert refusal(on_gpu) == f"no kernel for {heads} heads a key head and 65 heads of the indexer"


def test_another_name_of_the_cache(model: PreTrainedModel) -> None:
    layer = attention_of(model)
    with on(model, "layers"), torch.inference_mode():
        with pytest.raises(TypeError, match="cache_params: expected the cache under the name"):
            layer(torch.randn(1, 4, 64), (None, None), None, cache_params=host.dynamic(model))


def test_an_indexer_that_is_not_the_hosts_is_left_alone(model: PreTrainedModel) -> None:
    layer = attention_of(model)
    indexer = layer.indexer
    for other, why in ((torch.nn.Identity(), "its indexer is a Identity"), (indexer, "someone else replaced its forward")):
        if other is indexer:
            indexer.forward = lambda *args: None
        layer.indexer = other
        try:
            with enable(model, allow_reference=True) as handle:
                (point,) = [one for one in handle.report().points if one.path.endswith("self_attn")]
                assert (point.replaced, point.why) == (False, why)
        finally:
            layer.indexer = indexer
    del indexer.forward
