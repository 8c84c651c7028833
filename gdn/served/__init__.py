"""Problems of a served model: every operator's calls by this package's layers and adapters, and their sizes.

Configuration in, problems out; `gdn.runtime.reach` finds the kernels of problems. An adapter that knows its host's layer names
it by `GdnLayer`; `of_config` names the forms of every caller from a model's configuration.

    layers        gdn.layers.HybridModel: projections in one matrix, attention with its indexer, residual norms
    vllm          gdn.integrations.vllm: fused steps on vLLM's pages, with rings where GDN_REPLAY lets it
    sglang        gdn.integrations.sglang: decode steps, convolutions and the delta rule on SGLang's pools
    transformers  gdn.integrations.transformers: fused steps on the cache's tensors, and its functions

Not here: context-parallel layers, whose ranks part a prompt, and the adapters of FLA, FlashInfer and DeepGEMM, whose callers are
no model.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from gdn.models import ModelShape
from gdn.ops.delta_rule.crossing import replay_forms
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.ops.layer_step.problem import Conv1dProblem, GdnPrefillProblem
from gdn.problem import Problem
from gdn.runtime import env, explaining
from gdn.served import attention, gdn_layer, rule, sizes, steps
from gdn.served.gdn_layer import GdnLayer as GdnLayer
from gdn.served.sizes import Group

HOSTS = ("layers", "vllm", "sglang", "transformers")
STATE_DTYPES = ("float32", "bfloat16")
_OF_PROMPTS = (ChunkProblem, Conv1dProblem, GdnPrefillProblem)
REPLAY = ("auto", "0", "1")
_MOST_DRAFTED = 8  # tokens of a sequence in a step with drafts


def shape_of(name: str, config: Any) -> ModelShape:
    """Shapes of a `gdn.layers` configuration, as it is: whole, or one rank's."""
    return ModelShape(
        name, config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim, config.linear_conv_kernel_dim, config.index_n_heads, config.index_head_dim,
        config.index_topk, config.index_rotary_dim, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
    )  # fmt: skip


def of_config(config: Any, **options: Any) -> list[Problem]:
    """The problems of a rank of a model, at all sizes; options as for `groups`."""
    return _flat(groups(config, **options))


def of_calls(calls: Iterable[Callable[[], object]]) -> list[Problem]:
    """The problems of calls of operators on tensors of any size, which are made inside `explaining`, at all sizes."""
    with explaining() as asked:
        for call in calls:
            call()
    static = {(type(problem), problem.static_key()): problem for _, problem in asked.answers if problem is not None}
    return _flat([
        sizes.prompts(one) if isinstance(one, _OF_PROMPTS) else sizes.steps(one, _MOST_DRAFTED) for one in static.values()
    ])  # fmt: skip


def groups(
    config: Any, *, num_spec: int = 0, state_dtypes: Sequence[str] | None = None, hosts: Sequence[str] = HOSTS,
    block_size: int = 64, replay: str | None = None,
) -> list[Group]:  # fmt: skip
    """Each call's problem at all of its sizes.

    config: a `gdn.layers.HybridConfig`, of the rank. num_spec: most drafts of a sequence. state_dtypes: of the recurrent states;
    None = what each host takes by itself. hosts: the callers. block_size: tokens of a cache block of `gdn.layers`. replay: "0",
    "1", or "auto", both ways where the number of sequences decides; None = as ``GDN_REPLAY`` says.
    """
    replay = env.current().replay if replay is None else replay
    if replay not in REPLAY:
        raise ValueError(f"replay: expected {', '.join(REPLAY)}, got {replay!r}")
    layers, vllm = partial(_layers, replay=replay), partial(_vllm, replay=replay)
    makers: dict[str, Callable[..., Iterator[Group]]] = {
        "layers": layers, "vllm": vllm, "sglang": _sglang, "transformers": _transformers,
    }  # fmt: skip
    found: list[Group] = []
    for host in hosts if config.num_linear_layers else ():
        for state in _states(host, config, state_dtypes):
            found += makers[host](config, state, num_spec)
    if "layers" in hosts:
        found += _full_layers(config, block_size)
    if "transformers" in hosts:
        found += _transformers_attention(config)
    return list(dict.fromkeys(found))


def _flat(groups: Sequence[Group]) -> list[Problem]:
    return [problem for group in groups for problem in group]


def _states(host: str, config: Any, wanted: Sequence[str] | None) -> Sequence[str]:
    """Dtypes of a host's states. By itself vLLM takes the model's dtype for Qwen3-Next, others and later models float32."""
    if host == "transformers":
        return ("float32",)
    if wanted is not None:
        return wanted
    return ("bfloat16",) if host == "vllm" and config.projection_layout == "interleaved" else ("float32",)


# dt_bias and the norm's weight: as the model, the weight kept in float32, and both.
_PARAMETERS = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"))


def _of_config(config: Any, **more: Any) -> GdnLayer:
    return GdnLayer(
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim,
        config.linear_conv_kernel_dim, gate_activation=config.gdn_gate_activation, **more,
    )  # fmt: skip


def _forms(layer: GdnLayer, switch: str) -> Iterator[tuple[GdnLayer, bool]]:
    """The layer, and the same without drafts, whose ring is another one; each with replay and without, as far as it is reached.

    Without a ring the steps with drafts hold those without.
    """
    for num_spec in dict.fromkeys((layer.num_spec, 0)):
        one = dataclasses.replace(layer, num_spec=num_spec)
        for has_replay in replay_forms(switch, one.num_v_heads, (one.head_k_dim, one.head_v_dim), num_spec):
            if has_replay or num_spec == layer.num_spec:
                yield one, has_replay


def _layers(config: Any, state: str, num_spec: int, replay: str) -> Iterator[Group]:
    layer = _of_config(
        config, layout="concatenated", state_dtype=state, num_spec=num_spec, has_offsets=True, checkpoints=(False, True)
    )
    for one, has_replay in _forms(layer, replay):
        yield from _steps_of_layers(dataclasses.replace(one, replay=has_replay), config.num_linear_layers)
    if layer.head_k_dim == layer.head_v_dim <= 128 and layer.head_k_dim % 8 == 0:
        yield from layer.prefill()
    else:
        yield from steps.prefill(layer)


def _steps_of_layers(layer: GdnLayer, num_layers: int) -> Iterator[Group]:
    """Decode and drafts, with replay or without."""
    yield from layer.decode()
    if layer.replay:
        yield from steps.folds(layer, num_layers)
    if layer.num_spec:
        yield from steps.trees(layer)
    if layer.num_spec and layer.replay:
        yield from steps.accepted_trees(layer, num_layers)


def _vllm(config: Any, state: str, num_spec: int, replay: str) -> Iterator[Group]:
    """The layout of pages is a setting of the host, and so is the dtype in which it loads the parameters."""
    layout = "interleaved" if config.projection_layout == "interleaved" else "merged"
    for channels_contiguous, (dt_bias, norm) in product((True, False), _PARAMETERS):
        layer = _of_config(
            config, layout=layout, state_dtype=state, num_spec=num_spec, norm_dtype=norm, dt_bias_dtype=dt_bias,
            channels_contiguous=channels_contiguous, checkpoints=(False, True),
        )  # fmt: skip
        yield from gdn_layer.problems(layer)
        for one, has_replay in _forms(layer, replay):
            if has_replay:  # besides those without a ring: whether a server replays depends on its own settings too
                yield from gdn_layer.by_replay(one)


def _sglang(config: Any, state: str, num_spec: int) -> Iterator[Group]:
    return rule.sglang(shape_of("served", config), state, num_spec)


def _transformers(config: Any, state: str, num_spec: int) -> Iterator[Group]:
    """Parameters in the model's dtype, or in float32; windows with one column more than the operators read."""
    for A_log, (dt_bias, norm) in product(("float32", "bfloat16"), _PARAMETERS):
        layer = _of_config(
            config, layout=config.projection_layout, state_dtype=state, A_log_dtype=A_log, dt_bias_dtype=dt_bias,
            norm_dtype=norm, channels_contiguous=False, state_v_first=False,
        )  # fmt: skip
        yield from gdn_layer.problems(layer)
    yield from rule.transformers(shape_of("served", config), config.gdn_gate_activation)


def _transformers_attention(config: Any) -> Iterator[Group]:
    """Attention with a compressed indexer. The host rotates and keeps the cache."""
    if config.num_full_layers and config.index_topk and config.index_ratio > 1:
        yield from attention.selected(shape_of("served", config), ratio=config.index_ratio)


def _full_layers(config: Any, block_size: int) -> Iterator[Group]:
    """Attention, and the norms of the residual stream."""
    shape, ratio = shape_of("served", config), config.index_ratio
    if config.num_full_layers:
        yield from attention.attention(
            shape, config.rotary_dim, block_size=block_size, has_gate=config.attn_output_gate, ratio=ratio
        )
        if config.index_topk:
            yield from attention.indexer(shape, block_size=block_size, ratio=ratio)
    if config.residual == "plain":
        yield from attention.residual_norm(shape, config.layer_scale)
