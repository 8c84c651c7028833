"""What the adapter of vLLM loads before an engine serves holds every kernel that its steps take then.

Kernels are chosen as on an H100, without one: inside `explaining` a step says what it would launch, and launches nothing.
"""

import random
from types import SimpleNamespace
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
from tests.integrations.vllm_engine import int32, offsets

Tensor = torch.Tensor
LIMITS = Limits(tokens=8192, sequences=256)
WIDTH = 4
DRAWN = 120  # batches


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "describe", lambda device: (H100, "an H100"))
    monkeypatch.setattr(_vllm_warm_up, "_done", set())


def of_model(
    heads: tuple[int, int], *, interleaved: bool, num_spec: int, state: torch.dtype, dims: tuple[int, int] = (128, 128),
    replays: bool = False,
) -> Any:  # fmt: skip
    """A layer of the sizes of a rank; its parameters hold anything."""
    (H, HV), (K, V) = heads, dims
    channels = 2 * H * K + HV * V
    half = torch.bfloat16
    found = SimpleNamespace(
        tp_size=1, num_k_heads=H, num_v_heads=HV, head_k_dim=K, head_v_dim=V, key_dim=H * K, value_dim=HV * V,
        layer_norm_epsilon=1e-6, activation="silu", gqa_interleaved_layout=interleaved, num_spec=num_spec,
        conv1d=SimpleNamespace(weight=torch.zeros(channels, 1, WIDTH, dtype=half), bias=None),
        A_log=torch.zeros(HV), dt_bias=torch.zeros(HV, dtype=half),
        norm=SimpleNamespace(weight=torch.zeros(V, dtype=half), activation="silu"),
        split_ba=lambda ba: ba.chunk(2, dim=-1), _checkpoint_alignment=64,
        get_state_shape=lambda: ((WIDTH - 1 + num_spec, channels), (HV, V, K)), get_state_dtype=lambda: (half, state), page=None,
    )  # fmt: skip
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
        known = dict.fromkeys(("num_prefills", "num_decodes", "num_decode_tokens"), 0) | dict.fromkeys(
            ("checkpoint", "spec_sequence_masks", "spec_token_indx", "non_spec_token_indx")
        )
        columns, begin = 1 + self.layer.num_spec, 0
        drafting = self.count(LIMITS.sequences // 4) if kind in ("drafts", "among") else 0
        decoding = self.count(LIMITS.sequences // 2) if kind in ("decode", "behind") else 0
        counts = [self.random.randint(1, columns) for _ in range(drafting)]
        table = (1 + torch.arange((drafting + decoding) * columns, dtype=torch.int32)).view(-1, columns)
        if drafting:
            begin = sum(counts)
            known |= {
                "spec_sequence_masks": torch.ones(drafting, dtype=torch.bool), "spec_state_indices_tensor": table,
                "spec_query_start_loc": offsets(counts), "num_accepted_tokens": int32([1] * drafting),
            }  # fmt: skip
        if decoding:
            begin = decoding
            known |= {"num_decodes": decoding, "num_decode_tokens": decoding, "non_spec_state_indices_tensor": table[:, 0]}
        total = begin
        if kind not in ("decode", "drafts"):
            new = self.count(min(LIMITS.sequences // 2, 64))
            most = LIMITS.tokens if not drafting else 1024  # their rows are gathered
            total = max(begin + new, self.count(most))
            lengths = [(total - begin) // new] * new
            if self.random.random() < 0.3:  # one is long, as the host may know
                lengths = [self.random.choice([1, 1, 1, min(9, lengths[0])]) for _ in lengths]
            lengths[-1] += total - begin - sum(lengths)
            if self.random.random() < 0.7:
                known["nums_dict"] = {8: {"nums": -(-torch.tensor(lengths) // 8)}}
            own = table.numel() + 1 + torch.arange(new, dtype=torch.int32)
            known |= {
                "num_prefills": new, "prefill_query_start_loc": offsets(lengths), "prefill_state_indices": own,
                "prefill_has_initial_state": torch.zeros(new, dtype=torch.bool),
            }  # fmt: skip
            if self.random.random() < 0.5:
                nothing = torch.zeros(decoding + new, dtype=torch.int32)
                known["checkpoint"] = SimpleNamespace(checkpoint_offsets=nothing, state_indices=nothing)
        if kind == "among":
            known |= {"spec_token_indx": torch.arange(begin), "non_spec_token_indx": torch.arange(begin, total)}
        metadata = SimpleNamespace(num_actual_tokens=total, **known)
        if self.layer.page is not None:
            self._count(metadata, drafting)
        return metadata

    def _count(self, metadata: Any, drafting: int) -> None:
        """What the builder adds; prompts go on."""
        rows = drafting + metadata.num_decodes + metadata.num_prefills
        lengths = int32([9] * rows)
        batch = SimpleNamespace(
            seq_lens=lengths, seq_lens_cpu_upper_bound=lengths, query_start_loc_cpu=offsets([1] * rows),
            compute_num_computed_tokens=lambda: lengths - 1,
        )  # fmt: skip
        drafts = int32([0] * drafting + [-1] * (rows - drafting))
        metadata.gdn_replay = self.counter(metadata, batch, int32([1] * rows), drafts)


def forms(asked: Any) -> set[Any]:
    """What is compiled and loaded for each call."""
    return {
        (problem.op, problem.static_key(), choice.backend, tuple(compiled.compiled_fields(choice.config).items()))
        for choice, problem in asked.answers
    }


MODELS = {  # of published models, on 1, 2 and 8 ranks
    "qwen3-next": {"heads": (16, 32), "interleaved": True, "num_spec": 0, "state": torch.bfloat16},
    "qwen3-next on 2 ranks": {"heads": (8, 16), "interleaved": True, "num_spec": 2, "state": torch.float32},
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


@pytest.mark.parametrize("model", [pytest.param(name, marks=() if "2 ranks" in name else pytest.mark.cover) for name in MODELS])
def test_every_kernel_of_a_step_was_loaded(model: str) -> None:
    if MODELS[model].get("replays") and not FOLDS:
        pytest.skip("fold_states has no kernel, so that no layer replays on a GPU")
    engine = Engine(of_model(**MODELS[model]))
    warmed, seen = engine.warmed(), set()
    for _ in range(DRAWN):
        batch = engine.draw()
        taken = engine.taken(batch)
        assert taken <= warmed, (vars(batch), taken - warmed)
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


def takes(engine: Engine, form: str, tokens: int, sequences: int) -> bool:
    """Whether prompts of these sizes take a form."""
    kind = _vllm_warm_up.Kind(None)
    prompts = _vllm_warm_up.batch(kind, tokens, sequences, 1, torch.device("cpu"))
    return any(dict(fields)[form] for op, _, _, fields in engine.taken(prompts))
