"""The problems of a served model hold every kernel that the real callers ask for: layers and engine, and the adapters."""

import dataclasses
import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gdn
from gdn import served
from gdn.cli.demo.engine import Engine, EngineSizes
from gdn.device import H100, H200, DeviceSpec
from gdn.integrations import _sglang_warm_up as sglang_warm_up
from gdn.integrations._vllm_pages import page_of
from gdn.integrations._vllm_replay_step import step_of
from gdn.integrations._vllm_rows import Counter
from gdn.layers import HybridConfig, HybridModel
from gdn.layers.named import NAMED
from gdn.problem import Problem
from gdn.runtime import env, explaining, reach
from gdn.served import GdnLayer, gdn_layer, rule
from tests.integrations import sglang_engine, vllm_engine
from tests.runtime.recorded import recording

BFLOAT16 = torch.bfloat16
Form = tuple[str, str]  # operator and static fields: with the configuration, what a kernel is compiled for


def forms(problems: list[Any]) -> set[Form]:
    return {(problem.op, problem.static_key()) for problem in problems}


def check(asked: list[Problem], known: list[Any], least: int) -> None:
    """Every form that was asked for is one of the known groups', and there were several."""
    wanted, have = forms(asked), forms([group[0] for group in known])
    nearest = {form: min((_differences(form, one) for one in have), key=len) for form in wanted - have}
    assert not nearest
    assert len(wanted) >= least, sorted(wanted)


def _differences(form: Form, other: Form) -> list[str]:
    """What a form has and another one has not."""
    own, others = (set(f"op={op},{static}".split(",")) for op, static in (form, other))
    return sorted(own - others)


# --- gdn.layers ----------------------------------------------------------------------------------------------------------------


def engine_problems(config: HybridConfig, state: torch.dtype, num_spec: int, block: int) -> list[Problem]:
    """Problems of prompts whole and in parts, of kept prefixes, decode and drafts, eager and in padded batches."""
    with recording() as asked:
        model = HybridModel(config, dtype=BFLOAT16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        for use_graphs in (False, True):
            sizes = EngineSizes(6, 200, block, num_spec=num_spec, num_checkpoints=2)
            engine = Engine(model, sizes, state_dtype=state, use_graphs=use_graphs)
            engine.prefill([list(range(1, 60)) * 2, [1, 2, 3]], chunk=64)
            engine.decode(1)
            if num_spec:
                engine.verify([[1] * num_spec, [1]])
            engine.prefill([[1, 2, 3] * 20])
            engine.score([[1, 2, 3] * 20], [0])
    return asked


ENGINES = [  # model, tensor parallel, dtype of the states, drafts, tokens of a block, FP8 of the indexer, replay
    ("qwen3-next-80b", 4, "float32", 2, 64, "0", "0"),
    ("qwen3.8-flash-next", 2, "bfloat16", 3, 16, "1", "1"),
]
MORE_ENGINES = [
    ("qwen3-next-80b", 1, "bfloat16", 3, 16, "1", "1"),
    ("qwen3.5-35b", 1, "bfloat16", 0, 16, "0", "1"),
    ("qwen3.5-35b", 4, "float32", 2, 64, "1", "1"),
    ("qwen3.8-flash-next", 1, "float32", 0, 64, "0", "0"),
    ("tiny", 1, "bfloat16", 0, 48, "1", "0"),
    ("tiny", 2, "float32", 1, 64, "0", "1"),
]


@pytest.mark.parametrize(
    ("name", "tp", "state", "num_spec", "block", "fp8", "replay"),
    [*ENGINES, *(pytest.param(*one, marks=pytest.mark.cover) for one in MORE_ENGINES)],
)
def test_the_engine_of_the_demo(
    name: str, tp: int, state: str, num_spec: int, block: int, fp8: str, replay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_REPLAY", replay)
    monkeypatch.setenv("VLLM_QSA_USE_FP8_INDEXER", fp8)
    monkeypatch.setenv("VLLM_DSA_USE_DENSE_PREFILL_THRESHOLD", "16")  # short prompts select positions too
    env.reload()
    config = NAMED[name].per_rank(tp)
    small: dict[str, Any] = {"vocab_size": 64, "num_experts": 0, "intermediate_size": 64, "hidden_size": 64}
    config = dataclasses.replace(config, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"), **small)
    asked = engine_problems(config, getattr(torch, state), num_spec, block)
    assert any(problem.op == "fold_states" for problem in asked) == (replay == "1")
    options: dict[str, Any] = {"state_dtypes": (state,), "hosts": ("layers",), "block_size": block, "replay": replay}
    check(asked, served.groups(config, num_spec=num_spec, **options), 7)


def test_layers_whose_steps_are_operators_of_their_own() -> None:
    """Head dims without a fused prefill step; and draft trees."""
    from gdn.layers import GatedDeltaNet, GDNMetadataBuilder

    config = dataclasses.replace(
        NAMED["tiny"], num_hidden_layers=1, layer_types=("linear_attention",), linear_key_head_dim=192, linear_value_head_dim=192
    )
    columns = config.linear_conv_kernel_dim + 1
    with recording() as asked:
        layer = GatedDeltaNet(config, dtype=BFLOAT16)
        windows = torch.zeros(8, columns, config.conv_dim, dtype=BFLOAT16).mT
        states = torch.zeros(8, config.linear_num_value_heads, 192, 192)
        builder = GDNMetadataBuilder(torch.device("cpu"), num_spec=2, max_num_sequences=4)
        for queries, drafts, parents in (([70, 3], None, None), ([3, 3], [2, 2], [-1, 0, 0] * 2)):
            step = builder.build(queries, [90, 80], [[1, 2, 3], [4, 5, 6]], num_draft_tokens=drafts, parent_token=parents)
            layer(torch.zeros(sum(queries), config.hidden_size, dtype=BFLOAT16), step, windows, states)
    check(asked, served.groups(config, num_spec=2, hosts=("layers",)), 3)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_draft_trees_by_replay(state: str) -> None:
    """Trees, their accepted paths in all layers, and prompts that go on after drafts."""
    from gdn.layers import GatedDeltaNet, GDNMetadataBuilder, GDNStateCache

    kinds = ("linear_attention", "linear_attention")
    config, dtype = dataclasses.replace(NAMED["tiny"], num_hidden_layers=2, layer_types=kinds), getattr(torch, state)
    with recording() as asked:
        layer = GatedDeltaNet(config, dtype=BFLOAT16)
        for parameter in layer.parameters():
            parameter.data.zero_()
        cache = GDNStateCache(config, 4, num_spec=2, state_dtype=dtype, replay=True)
        builder = GDNMetadataBuilder(torch.device("cpu"), num_spec=2, max_num_sequences=4, replay=True)
        for queries, lengths, drafts, parents in (
            ([70, 3], [70, 3], None, None), ([3, 3], [73, 6], [2, 2], [-1, 0, 0] * 2), ([3, 70], [74, 78], [2, -1], None),
        ):  # fmt: skip
            accepted = None if drafts is None else [1, 2]
            step = builder.build(
                queries, lengths, [1, 2], num_draft_tokens=drafts, num_accepted_tokens=accepted, parent_token=parents
            )
            cache.begin_step(step)
            rows = torch.zeros(sum(queries), config.hidden_size, dtype=BFLOAT16)
            layer(rows, step, cache.conv_states[0], cache.ssm_states[0], cache.replay[0])
            if parents is not None:
                nodes, lengths_of_paths = torch.tensor([[1, 2], [1, 2]], dtype=torch.int32)
                gdn.accept_draft_tree(
                    cache.rings[0], cache.conv_states[0], step.spec_state_indices_tensor, step.retrieve_parent_token, nodes,
                    step.num_computed_tokens, lengths_of_paths, query_start_loc=step.spec_query_start_loc, conv_width=4,
                )  # fmt: skip
    assert {problem.op for problem in asked} >= {"fold_states", "accept_draft_tree", "recurrent"}
    check(asked, served.groups(config, num_spec=2, state_dtypes=(state,), hosts=("layers",), replay="1"), 6)


def test_which_forms_the_layers_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the number of sequences decides, both are built."""
    config = NAMED["qwen3-next-80b"].per_rank(4)

    def rings(num_spec: int, **options: Any) -> set[bool]:
        found = served.groups(config, num_spec=num_spec, hosts=("layers",), **options)
        return {getattr(group[0], "ring_rows", None) is not None for group in found if group[0].op == "gdn_decode"}

    assert rings(0) == {False, True} and rings(2) == {True}
    for num_spec in (0, 2):
        assert rings(num_spec, replay="0") == {False} and rings(num_spec, replay="1") == {True}
    with pytest.raises(ValueError, match="replay: expected auto, 0, 1, got 'maybe'"):
        served.groups(config, replay="maybe")
    monkeypatch.setattr("gdn.ops.delta_rule.crossing.REPLAY_DIMS", (64, 96))
    assert rings(0) == rings(2) == {False}


# --- vLLM ----------------------------------------------------------------------------------------------------------------------


def layout_of(config: HybridConfig) -> str:
    """Of vLLM's two projections."""
    return "interleaved" if config.projection_layout == "interleaved" else "merged"


def vllm_layer(config: HybridConfig, kind: GdnLayer) -> SimpleNamespace:
    """A layer with vLLM's attributes."""
    names = {"bias": kind.bias_dtype, "A_log": kind.A_log_dtype, "dt_bias": kind.dt_bias_dtype, "norm": kind.norm_dtype}
    made = vllm_engine.layer(
        (kind.num_k_heads, kind.num_v_heads), (kind.head_k_dim, kind.head_v_dim),
        interleaved=config.projection_layout == "interleaved", **{name: getattr(torch, x) for name, x in names.items() if x},
    )  # fmt: skip
    made.norm.activation = kind.gate_activation
    return made


def vllm_batches(num_spec: int) -> list[SimpleNamespace]:
    """Decode rows, prompts with and without checkpoints and decode rows, drafts, prompts among drafts."""
    columns, prompts = 1 + num_spec, [70, 10]
    plain: list[dict[str, Any]] = [
        {"decode": 3, "columns": 4},
        *({"decode": 1, "prompts": prompts, "checkpoints": kept} for kept in ([], [0, 64, 0])),
    ]
    drafts: dict[str, Any] = {"drafts": [columns, 1], "columns": columns}
    return [vllm_engine.batch(**given) for given in (*plain, *([drafts, drafts | {"prompts": prompts}] if num_spec else []))]


def vllm_problems(config: HybridConfig, kind: GdnLayer) -> list[Problem]:
    with recording() as asked:
        vllm_steps(config, kind)
    return asked


def vllm_steps(config: HybridConfig, kind: GdnLayer, *, replays: bool = False) -> None:
    """Makes a step of each kind of batch."""
    layer, page = vllm_layer(config, kind), None
    columns = 3 + kind.num_spec
    channels, values = 2 * layer.key_dim + layer.value_dim, layer.value_dim
    windows = (channels, columns) if not kind.channels_contiguous else (columns, channels)
    states: tuple[int, ...] = (kind.num_v_heads, kind.head_v_dim, kind.head_k_dim)
    if replays:
        page = page_of(kind.num_k_heads, (windows, states), getattr(torch, kind.state_dtype), kind.num_spec)
        states = page.shapes[1]
    step = step_of(layer, conv_dim_first=not kind.channels_contiguous, page=page)
    counter = Counter(8, kind.num_spec, 3, torch.device("cpu"))
    pages = (
        torch.zeros(16, *windows, dtype=BFLOAT16), torch.zeros(16, *states, dtype=getattr(torch, kind.state_dtype)),
    )  # fmt: skip
    for batch in vllm_batches(kind.num_spec):
        if replays:
            vllm_engine.counted(counter, batch)
        tokens = batch.num_actual_tokens + 2
        rows = [torch.zeros(tokens, width, dtype=BFLOAT16) for width in (channels + values, 2 * step.num_value_heads)]
        step(rows[0], rows[1], torch.zeros(tokens, step.num_value_heads, step.head_v_dim, dtype=BFLOAT16), batch, pages)


VLLM_KINDS: list[dict[str, Any]] = [
    {"dt_bias_dtype": "bfloat16"},
    {"norm_dtype": "float32", "dt_bias_dtype": "bfloat16"},
    {"channels_contiguous": False, "num_spec": 2, "norm_dtype": "float32"},
    {"num_spec": 3, "state_dtype": "bfloat16", "dt_bias_dtype": "bfloat16"},
]


@pytest.mark.parametrize("name", ["qwen3-next-80b", pytest.param("qwen3.5-35b", marks=pytest.mark.cover)])
@pytest.mark.parametrize("kind", VLLM_KINDS, ids=lambda kind: ",".join(f"{name}={value}" for name, value in kind.items()))
def test_layers_of_vllm(name: str, kind: dict[str, Any]) -> None:
    config = NAMED[name].per_rank(4)
    layer = GdnLayer(
        config.linear_num_key_heads, config.linear_num_value_heads, 128, 128, layout=layout_of(config),
        checkpoints=(False, True), **kind,
    )  # fmt: skip
    asked = vllm_problems(config, layer)
    known = served.groups(config, num_spec=layer.num_spec, state_dtypes=(layer.state_dtype,), hosts=("vllm",))
    check(asked, known, 4 if layer.num_spec else 3)
    check(asked, gdn_layer.problems(layer), 4 if layer.num_spec else 3)


@pytest.mark.parametrize("kind", [pytest.param(VLLM_KINDS[1], marks=pytest.mark.cover), *VLLM_KINDS[2:]], ids=str)
def test_layers_of_vllm_by_replay(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = NAMED["qwen3-next-80b"].per_rank(4)
    layer = GdnLayer(4, 8, 128, 128, layout=layout_of(config), checkpoints=(False, True), **kind)
    with recording() as asked:
        vllm_steps(config, layer, replays=True)
    with explaining() as every:  # the folds too, whether they have a kernel or not
        vllm_steps(config, layer, replays=True)
    asked += [problem for _, problem in every.answers if problem is not None and problem.op == "fold_states"]
    found = {}
    for switch in ("0", "1"):
        monkeypatch.setenv("GDN_REPLAY", switch)
        env.reload()
        found[switch] = served.groups(
            config, num_spec=layer.num_spec, state_dtypes=(layer.state_dtype,), hosts=("vllm",)
        )  # fmt: skip
    check(asked, found["1"], 5 if layer.num_spec else 4)
    rings = {form for form in forms(asked) if "fold_every" in form[1] and "fold_every=None" not in form[1]}
    assert {op for op, _ in rings} == {"gdn_decode", "fold_states"}
    assert not rings & forms([group[0] for group in found["0"]])
    assert set(found["0"]) < set(found["1"])  # whether a server replays depends on its settings too


@pytest.mark.parametrize("host", ["layers", "vllm"])
def test_a_folder_for_drafts_serves_without_them(host: str) -> None:
    """By replay too, though the ring is another one."""
    config = NAMED["qwen3-next-80b"].per_rank(4)

    def static(num_spec: int) -> set[Any]:
        groups = served.groups(config, num_spec=num_spec, hosts=(host,), replay="1")
        return {(problem.op, problem.static_key()) for group in groups for problem in group}

    assert static(0) < static(3)


def test_head_dims_that_do_not_replay() -> None:
    assert not gdn_layer.by_replay(GdnLayer(4, 8, 40, 40)) and gdn_layer.by_replay(GdnLayer(4, 8, 64, 128))


@pytest.mark.parametrize("other", [{"bias_dtype": "bfloat16"}, {"A_log_dtype": "bfloat16"}, {"gate_activation": "sigmoid"}])
def test_a_layer_says_what_a_configuration_does_not(other: dict[str, Any]) -> None:
    config = NAMED["qwen3.5-35b"].per_rank(4)
    plain = GdnLayer(4, 8, 128, 128, layout="merged", checkpoints=(False, True), num_spec=2)
    layer = dataclasses.replace(plain, **other)
    asked = vllm_problems(config, layer)
    check(asked, gdn_layer.problems(layer), 4)
    assert forms(asked) - forms([group[0] for group in gdn_layer.problems(plain)])


# --- SGLang --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_the_kernel_object_of_sglang(state: str) -> None:
    config = NAMED["tiny"]  # whose heads are those of the engine
    with recording() as asked:
        engine = sglang_engine.Engine(1, dtype=getattr(torch, state), dim=64)
        engine.token_dtype = BFLOAT16
        weights = {"A_log": engine.A_log, "dt_bias": engine.dt_bias}
        packed, a, b = engine.rows(6)
        slots, lengths = [4, 0], [3, 3]
        given = engine.options(slots, lengths)
        one_each = {**engine.options(slots, [1, 1])}
        engine.kernel.decode(*engine.split(packed[:2]), a[:2], b[:2], **weights, **one_each)
        del one_each["query_start_loc"]
        engine.kernel.packed_decode(packed[:2], a[:2], b[:2], scale=1.0, num_v_heads=4, head_v_dim=64, **weights, **one_each)
        g, beta = engine.gates(a, b)
        chunks = {"track_state": torch.zeros(2, *engine.state_shape), "track_chunk_idx": engine.int32([0, -1])}
        for tracked in ({}, chunks):
            engine.kernel.extend(*engine.split(packed), g[None], beta[None], **given, **tracked)
        kept = torch.zeros(2, 3, *engine.state_shape, dtype=getattr(torch, state))
        for parents in (None, engine.int32([[0, 0, 1]] * 2)):
            engine.kernel.target_verify(
                *weights.values(), *engine.split(packed), a, b, **given, intermediate_states_buffer=kept,
                intermediate_state_indices=engine.int32([0, 1]), retrieve_parent_token=parents,
            )  # fmt: skip
    assert not engine.calls.left and engine.calls.served == 6
    check(asked, served.groups(config, num_spec=2, state_dtypes=(state,), hosts=("sglang",)), 5)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_what_the_adapter_of_sglang_loads_is_built_ahead(state: str) -> None:
    """Every form of call that it loads when SGLang makes a backend."""
    config, dtype = NAMED["tiny"], getattr(torch, state)
    sizes = (config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    calls: list[Any] = []
    for dt_bias, overlap in itertools.product((torch.float32, BFLOAT16), (True, False)):
        form = sglang_warm_up.Form(
            *sizes, 4, False, "silu", BFLOAT16, BFLOAT16, torch.float32, dt_bias, BFLOAT16, dtype, drafts=3, buffer_dtype=dtype,
            overlap=overlap,
        )  # fmt: skip
        calls += sglang_warm_up.calls(form, sglang_warm_up.PHASES)
    loaded = forms(served.of_calls(calls))
    assert loaded == forms([group[0] for group in served.groups(config, num_spec=2, state_dtypes=(state,), hosts=("sglang",))])


# --- Transformers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("qwen3_next", "layers"),
        ("qwen4_exp", "layers"),
        pytest.param("qwen3_next", "functions", marks=pytest.mark.cover),
        pytest.param("qwen3_5", "layers", marks=pytest.mark.cover),
        pytest.param("qwen3_5", "functions", marks=pytest.mark.cover),
        pytest.param("qwen4_exp", "functions", marks=pytest.mark.cover),
    ],
)
def test_models_of_transformers(kind: str, level: str) -> None:
    host = pytest.importorskip("tests.integrations.transformers_host")
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 64}
    with recording() as asked:
        model = host.build(kind, **sizes).to(BFLOAT16)
        ids, mask = host.prompts(21, 9)
        with host.on(model, level) as handle:
            cache = host.dynamic(model)
            host.run(model, ids, cache, attention_mask=mask)
            host.run(model, ids[:, :1], cache, attention_mask=torch.cat([mask, mask[:, :1]], dim=1))
            host.run(model, ids)
        assert host.served(handle) and not host.reasons(handle)
    config = HybridConfig.from_transformers(model.config.to_dict())
    check(asked, served.groups(config, hosts=("transformers",)), 2)


# --- sizes ---------------------------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, problem: Any) -> Any:
    """The problem at sizes between those of a serving engine."""

    def count(least: int, most: int) -> int:
        return min(most, round(math.exp(rng.uniform(math.log(least), math.log(most + 0.4)))))

    names, n = problem.sizes().keys(), count(1, 1024)
    limits = {
        "num_tokens": (n, 131072), "num_rows": (n, 32768), "num_columns": (1, 65536), "num_queries": (9, 32768),
        "num_keys": (64, 65536), "max_context_len": (64, 262144),
    }  # fmt: skip
    values = {name: count(*limits[name]) if name in limits else n for name in names}
    if problem.op in ("gdn_decode", "recurrent", "conv1d_update"):
        values["num_tokens"] = n
    if problem.op.startswith("sparse_attention"):
        values["num_tokens"] = values["num_sequences"] = n
        values["max_context_len"] = problem.block_size << rng.randint(0, 11)  # block tables have a power of two of blocks
    fixed = {name: getattr(problem, name) for name in names if name == "k"}
    return dataclasses.replace(problem, **{name: values[name] for name in names} | fixed)


SIZED = ("gdn_decode", "gdn_prefill", "chunk", "recurrent", "sparse_attention_decode", "attention_prefill", "topk")
MORE_SIZED = (
    "sparse_attention_prefill",
    "mqa_logits",
    "paged_mqa_logits",
    "prepare_indexer",
    "gather_indexer_cache",
    "add_rms_norm",
)


@pytest.mark.parametrize("op", [*SIZED, *(pytest.param(op, marks=pytest.mark.cover) for op in MORE_SIZED)])
def test_kernels_of_sizes_between(op: str) -> None:
    """Also of those where a kernel changes between two points of a line."""
    config, rng = NAMED["qwen3-next-80b"].per_rank(4), random.Random(op)
    group = next(one for one in served.groups(config) if one[0].op == op)
    of_one_width = [problem for problem in group if getattr(problem, "k", 0) == getattr(group[0], "k", 0)]
    found = {kernel.key for kernel in reach.kernels(of_one_width, H100)}
    for problem in [drawn(rng, group[0]) for _ in range(100)]:
        (kernel,) = reach.kernels([problem], H100)
        assert kernel.key in found, (problem, kernel.config)


def lengths(rng: random.Random) -> list[int]:
    """Of the prompts of a step: one or few, one long among short ones, or any."""
    form, long = rng.random(), round(2 ** rng.uniform(6, 16.5))
    count = rng.randint(1, 8) if form < 0.3 else rng.randint(2, 40)
    if form < 0.3:
        return [long // count + 1] * count
    most = 1 if form < 0.5 else 200 if form < 0.8 else max(1, 2 * long // count)
    return [*(rng.randint(1, most) for _ in range(count - 1)), long]


# Tokens, sequences and the longest of steps whose kernel was in no list.
UNLISTED = {
    (8, 24): [(600, 1, 0), (1100, 1, 0), (10625, 5, 10621)], (4, 12): [(3100, 2, 0)], (8, 16): [(3192, 4, 3192)],
    (4, 8): [(5128, 8, 3000), (4309, 8, 2798), (6771, 8, 3456)], (4, 16): [(17413, 1, 0), (20633, 1, 0), (4215, 5, 4211)],
    (2, 4): [], (16, 32): [], (16, 64): [],
}  # fmt: skip


@pytest.mark.parametrize("heads", UNLISTED)
@pytest.mark.parametrize("device", [H200, pytest.param(H100, marks=pytest.mark.cover)], ids=lambda one: one.key)
def test_kernels_of_prompts_of_any_lengths(heads: tuple[int, int], device: DeviceSpec) -> None:
    """Also where the host knows of a long prompt."""
    group: Any = next(iter(GdnLayer(*heads, 128, 128).prefill()))
    found, rng = {kernel.key for kernel in reach.kernels(group, device)}, random.Random(str(heads))
    drawn = [(sum(one), len(one), rng.choice([0, max(one)])) for one in (lengths(rng) for _ in range(400))]
    for tokens, sequences, longest in (*UNLISTED[heads], *drawn):
        problem = dataclasses.replace(group[0], num_tokens=tokens, num_sequences=sequences, longest=longest)
        (kernel,) = reach.kernels([problem], device)
        assert kernel.key in found, (problem, kernel.config)


@pytest.mark.parametrize("heads", [(4, 8), (16, 32), (4, 16), (8, 24)])
def test_kernels_of_the_rule_by_itself_where_the_host_knows_the_longest(heads: tuple[int, int]) -> None:
    """Of hosts that keep the steps around it. Lengths that are known to be equal take a kernel of their own on an H200."""
    shape = served.shape_of("served", NAMED["qwen3-next-80b"])
    model = dataclasses.replace(shape, num_k_heads=heads[0], num_v_heads=heads[1])
    group: Any = next(group for group in rule.transformers(model, "silu") if group[0].op == "chunk")
    found, rng, taken = {kernel.key for kernel in reach.kernels(group, H200)}, random.Random(str(heads)), set()
    equal = [[length] * count for count, length in ((32, 2048), (8, 8192), (200, 40), (64, 64))]
    for one in (*equal, *(lengths(rng) for _ in range(200))):
        problem = dataclasses.replace(group[0], num_tokens=sum(one), num_sequences=len(one), longest=max(one))
        (kernel,) = reach.kernels([problem], H200)
        assert kernel.key in found, (problem, kernel.config)
        taken.add(kernel.config.state_heads)
    assert taken == ({1, 2} if heads[1] // heads[0] % 2 == 0 else {1})


@pytest.mark.parametrize(("name", "tp"), [("qwen3-next-80b", 1), ("qwen3-next-80b", 4), ("qwen3.5-35b", 1)])
@pytest.mark.parametrize("block_size", [16, 64, 1344])
def test_dense_prefill_is_listed_with_every_number_of_blocks_to_a_tile(name: str, tp: int, block_size: int) -> None:
    """As a step of some sequences takes them, too, whose contexts are as many blocks as they like."""
    config, rng = NAMED[name].per_rank(tp), random.Random(tp)
    groups = served.groups(config, hosts=("layers",), block_size=block_size)
    (group,) = (one for one in groups if one[0].op == "attention_prefill")
    found = {kernel.key: kernel.config.splits for kernel in reach.kernels(group, H100)}
    assert sorted(found.values()) == [1, 2, 4, 8]
    taken = set()
    for _ in range(300):
        tokens, blocks = round(2 ** rng.uniform(0, 11)), round(2 ** rng.uniform(0, 15))
        sizes = {"num_tokens": tokens, "num_sequences": rng.randint(1, min(tokens, 40)), "max_context_len": blocks * block_size}
        one: Any = dataclasses.replace(group[0], **sizes)  # type: ignore[type-var]
        (kernel,) = reach.kernels([one], H100)
        assert kernel.key in found, sizes
        taken.add(found[kernel.key])
    assert taken == {1, 2, 4, 8}


def test_a_kernel_between_two_neighbours_is_found() -> None:
    """Few tokens, many tokens: the kernels between are found although no problem of the list takes them."""
    config = NAMED["qwen3-next-80b"].per_rank(4)
    group = next(one for one in served.groups(config) if one[0].op == "gdn_prefill")
    ends = [dataclasses.replace(group[0], num_tokens=count, num_sequences=1) for count in (16, 131072)]
    assert len(reach.kernels(ends[::-1], H100)) == 2  # not neighbours of a line: sizes shrink
    assert len(reach.kernels(ends, H100)) > 3


def test_hosts_have_their_own_forms() -> None:
    config = NAMED["qwen3-next-80b"].per_rank(4)
    of_host = {host: forms([group[0] for group in served.groups(config, hosts=(host,))]) for host in served.HOSTS}
    assert {"gdn_decode", "topk"} <= {op for op, _ in of_host["layers"]} and not of_host["layers"] & of_host["vllm"]
    assert {op for op, _ in of_host["vllm"]} == {"gdn_decode", "gdn_prefill", "fold_states"}
    assert {op for op, _ in of_host["sglang"]} == {"chunk", "conv1d", "conv1d_update", "gdn_decode", "recurrent"}
    assert all("state_dtype=bfloat16" in static for _, static in of_host["vllm"])  # vLLM's own choice for Qwen3-Next
    later = served.groups(NAMED["qwen3.5-35b"], hosts=("vllm",))
    assert all("state_dtype=float32" in static for _, static in forms([group[0] for group in later]))
