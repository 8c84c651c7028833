"""What the adapter of vLLM loads before an engine serves holds every kernel that its steps take then.

Kernels are chosen as on an H100, without one: inside `explaining` a step says what it would launch, and launches nothing.
"""

import random
from typing import Any

import pytest
import torch

from gdn.device import H100
from gdn.integrations import _vllm_warm_up
from gdn.integrations._vllm_replay import page_of_layer
from gdn.integrations._vllm_replay_step import step_of
from gdn.integrations._vllm_rows import Counter
from gdn.integrations._vllm_warm_up import Limits, unserved_replay, warm_up
from gdn.runtime import compiled, devices, explaining, registry
from gdn.warmup import warmup_sizes
from tests.integrations.vllm_engine import WIDTH, batch, counted, layer

LIMITS = Limits(tokens=8192, sequences=256)
DRAWN = 160


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "describe", lambda device: (H100, "an H100"))
    monkeypatch.setattr(_vllm_warm_up, "_done", set())


def of_model(
    heads: tuple[int, int], *, interleaved: bool, num_spec: int, state: torch.dtype, dims: tuple[int, int] = (128, 128),
    replays: bool = False,
) -> Any:  # fmt: skip
    """A layer of the sizes of a rank; its parameters hold anything."""
    half = torch.bfloat16
    found = layer(heads, dims, interleaved=interleaved, num_spec=num_spec)
    shapes = (WIDTH - 1 + num_spec, len(found.conv1d.weight)), (found.num_v_heads, *dims[::-1])
    found._checkpoint_alignment, found.page = 64, None
    found.get_state_shape, found.get_state_dtype = lambda: shapes, lambda: (half, state)
    if replays:
        found.page = page = page_of_layer(found)
        found.get_state_shape = lambda: page.shapes
    return found


class Engine:
    """Batches of drawn sizes, described as vLLM describes them."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.step, self.random = layer, step_of(layer, conv_dim_first=False, page=layer.page), random.Random(7)
        self.channels, self.values = 2 * layer.key_dim + layer.value_dim, layer.value_dim
        self.qkvz = torch.empty(LIMITS.tokens, self.channels + self.values, dtype=torch.bfloat16)
        self.ba = torch.empty(LIMITS.tokens, 2 * layer.num_v_heads, dtype=torch.bfloat16)
        self.core = torch.empty(LIMITS.tokens, layer.num_v_heads, layer.head_v_dim, dtype=torch.bfloat16)
        self.counter = Counter(LIMITS.sequences, layer.num_spec, WIDTH - 1, self.qkvz.device)
        blocks = 1 + 2 * LIMITS.sequences * (1 + layer.num_spec)  # their memory is never touched
        self.pages = _vllm_warm_up._pages(layer.get_state_shape(), layer.get_state_dtype(), self.qkvz.device, blocks)

    def taken(self, metadata: Any) -> set[Any]:
        tokens = metadata.num_actual_tokens
        with explaining() as asked:
            self.step(self.qkvz[:tokens], self.ba[:tokens], self.core[:tokens], metadata, self.pages)
        assert asked.answers
        return forms(asked)

    def warmed(self) -> set[Any]:
        with explaining() as asked:
            warm_up(self.layer, self.step, self.qkvz, self.ba, LIMITS)
        return forms(asked)

    def count(self, most: int) -> int:
        """Few and many alike."""
        return min(most, int(2 ** self.random.uniform(0, most.bit_length())))

    def draw(self) -> Any:
        """One-token rows, drafts, prompts, or prompts behind the one or among the other."""
        kind = self.random.choice(["decode", "prompts", "behind", *(["drafts", "among"] if self.layer.num_spec else [])])
        columns = 1 + self.layer.num_spec
        drafting = self.count(LIMITS.sequences // 4) if kind in ("drafts", "among") else 0
        decoding = self.count(LIMITS.sequences // 2) if kind in ("decode", "behind") else 0
        drafts = [self.random.randint(1, columns) for _ in range(drafting)]
        lengths: list[int] = []
        checkpoints: list[int] = []
        if kind not in ("decode", "drafts"):
            new, begin = self.count(min(LIMITS.sequences // 2, 64)), sum(drafts) or decoding
            most = LIMITS.tokens if not drafting else 1024  # their rows are gathered
            tokens = max(begin + new, self.count(most)) - begin
            lengths = [tokens // new] * new
            if self.random.random() < 0.25:  # one is long, as the host may know
                others, tokens = self.random.choice([[1], [1, 1, 1, 9]]), self.random.randint(most // 2, most) - begin
                lengths = [min(self.random.choice(others), lengths[0]) for _ in lengths]
            lengths[-1] += tokens - sum(lengths)
            if self.random.random() < 0.5:
                checkpoints = [0] * (decoding + new)
        found = batch(decode=decoding, drafts=drafts, prompts=lengths, checkpoints=checkpoints, columns=columns)
        if lengths and self.random.random() < 0.7:
            found.nums_dict = {8: {"nums": -(-torch.tensor(lengths) // 8)}}
        return found if self.layer.page is None else counted(self.counter, found)


def forms(asked: Any) -> set[Any]:
    """What is compiled and loaded for each call."""
    return {
        (problem.op, problem.static_key(), choice.backend, tuple(compiled.compiled_fields(choice.config).items()))
        for choice, problem in asked.answers
    }


MODELS = {  # of published models, on 1, 2 and 8 ranks
    "qwen3-next": {"heads": (16, 32), "interleaved": True, "num_spec": 0, "state": torch.bfloat16},
    "qwen3-next on 2 ranks": {"heads": (8, 16), "interleaved": True, "num_spec": 2, "state": torch.float32},
    "half of 48 value heads": {"heads": (8, 24), "interleaved": False, "num_spec": 0, "state": torch.float32},
    "values wider than keys": {
        "heads": (4, 8),
        "interleaved": True,
        "num_spec": 2,
        "state": torch.float32,
        "dims": (64, 128),
    },
    "qwen3.5 on 8 ranks": {"heads": (2, 6), "interleaved": False, "num_spec": 3, "state": torch.float32},
    "qwen3.5 by replay": {"heads": (8, 16), "interleaved": False, "num_spec": 3, "state": torch.float32, "replays": True},
    "qwen3-next by replay": {
        "heads": (16, 32),
        "interleaved": True,
        "num_spec": 0,
        "state": torch.bfloat16,
        "replays": True,
    },
}


FOLDS = bool(registry.operator("fold_states").modules)
ALSO_UNSERVED = [] if FOLDS else ["fold_states"]


def test_steps_of_prompts_whose_kernel_was_not_loaded() -> None:
    """Where the faster form changes within a few tokens."""
    engine = Engine(of_model(**MODELS["half of 48 value heads"]))
    warmed = engine.warmed()
    for lengths in ([600], [1100], [384, 385, 385], [450, 450, 453], [1, 1, 1, 1, 5000], [30, 40, 50, 60, 7000]):
        known = batch(decode=0, drafts=[], prompts=lengths, checkpoints=[], columns=1)
        known.nums_dict = {8: {"nums": -(-torch.tensor(lengths) // 8)}}
        assert engine.taken(known) <= warmed, lengths


def test_a_long_prompt_is_told_where_it_tells_something() -> None:
    """The host counts in blocks of 8 tokens: rounded up it may be more than all tokens, which would tell nothing."""
    engine = Engine(of_model(**MODELS["qwen3-next on 2 ranks"]))
    long = {(1, 1, 1, 1, 4090): 4094, (*[1] * 9, 4001): 4008}
    for lengths, told in (long | dict.fromkeys([(1, 1, 4001), (500, 600, 700), (3000,)], 0)).items():
        known = batch(decode=0, drafts=[], prompts=list(lengths), checkpoints=[], columns=3)
        known.nums_dict = {8: {"nums": -(-torch.tensor(lengths) // 8)}}
        tokens = sum(lengths)
        with explaining() as asked:
            engine.step(engine.qkvz[:tokens], engine.ba[:tokens], engine.core[:tokens], known, engine.pages)
        assert [getattr(problem, "longest", None) for _, problem in asked.answers] == [told], lengths


@pytest.mark.parametrize("model", [pytest.param(name, marks=() if "2 ranks" in name else pytest.mark.cover) for name in MODELS])
def test_every_kernel_of_a_step_was_loaded(model: str) -> None:
    if MODELS[model].get("replays") and not FOLDS:
        pytest.skip("fold_states has no kernel, so that no layer replays on a GPU")
    engine = Engine(of_model(**MODELS[model]))
    warmed, seen = engine.warmed(), set()
    for _ in range(DRAWN):
        drawn = engine.draw()
        taken = engine.taken(drawn)
        assert taken <= warmed, (vars(drawn), taken - warmed)
        seen |= taken
    ops = {op for op, *_ in seen}
    assert all(backend == "cute" for _, _, backend, _ in seen)
    if "dims" in MODELS[model]:
        assert ops == {"gdn_decode", "split", "conv1d", "chunk", "rms_norm_gated"}
        return
    if MODELS[model].get("replays"):
        assert ops == {"gdn_decode", "gdn_prefill", "fold_states"}
        return  # prompts are those of the other models
    assert ops == {"gdn_decode", "gdn_prefill"}
    prefill = [dict(fields) for op, _, _, fields in seen if op == "gdn_prefill"]
    assert {bool(one["num_conv_blocks"]) for one in prefill} == {False, True}
    assert {bool(one["norm_in_chunk"]) for one in prefill} == {False, True}


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_spec", "interleaved"), [(0, True), (3, False), (7, True)])
def test_replay_needs_kernels_with_a_ring(num_spec: int, interleaved: bool, state: torch.dtype) -> None:
    layer = of_model((16, 32), interleaved=interleaved, num_spec=num_spec, state=state)
    step = step_of(layer, conv_dim_first=False, page=page_of_layer(layer))
    lacking = [None, "no kernel takes its ring in fold_states"][len(ALSO_UNSERVED)]
    assert unserved_replay(layer, step, torch.bfloat16) == lacking
    reason = "no kernel takes its ring in " + " and ".join([*ALSO_UNSERVED, "gdn_decode"])
    assert unserved_replay(layer, step, torch.float32) == reason


@pytest.mark.cover
def test_a_form_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice: without the sizes of a form, steps take kernels that were not loaded."""
    engine = Engine(of_model(**MODELS["qwen3-next on 2 ranks"]))
    every = engine.warmed()
    drawn = [engine.draw() for _ in range(DRAWN)]
    served = set().union(*map(engine.taken, drawn))
    assert served <= every
    for form in ("num_conv_blocks", "norm_in_chunk", "num_four_sm_clusters"):

        def without(*given: Any, form: str = form, **sizes: Any) -> list[tuple[int, int]]:
            found = warmup_sizes(*given, **sizes)
            return found if sizes["most_each"] else [size for size in found if not takes(engine, form, *size)]

        monkeypatch.setattr(_vllm_warm_up, "_done", set())
        monkeypatch.setattr(_vllm_warm_up, "warmup_sizes", without)
        missing = served - engine.warmed()
        assert {op for op, *_ in missing} == {"gdn_prefill"}
        assert any(dict(fields)[form] for _, _, _, fields in missing)
    monkeypatch.setattr(_vllm_warm_up, "_done", set())
    monkeypatch.setattr(_vllm_warm_up, "warmup_sizes", warmup_sizes)
    monkeypatch.setattr(_vllm_warm_up, "warmup_uneven", lambda *_, **__: [])
    missing = {fields for _, _, _, fields in served - engine.warmed()}
    assert missing and all(dict(fields)["split_chunks"] for fields in missing)


def takes(engine: Engine, form: str, tokens: int, sequences: int) -> bool:
    """Whether prompts of these sizes take a form."""
    kind = _vllm_warm_up.Kind(None)
    prompts = _vllm_warm_up.batch(kind, tokens, sequences, 1, torch.device("cpu"))
    return any(dict(fields)[form] for op, _, _, fields in engine.taken(prompts))
