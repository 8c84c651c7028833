"""Whether vLLM's layers decode by replay."""

import re
from dataclasses import dataclass
from typing import Any

from gdn.integrations._vllm_pages import ALIGNMENT, Page, page_of
from gdn.integrations._vllm_parts import fuses_decode
from gdn.layers.replay_switch import unwanted


@dataclass
class Replay:
    """What the host lets a layer do. backend: of layers that replay; None where the host's functions are not those recorded."""

    backend: type | None = None


@dataclass(frozen=True)
class ReplayFacts:
    """What decides whether a layer that is served decodes by replay. Sizes are of one rank."""

    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    window_bytes: int  # of a block
    num_sequences: int
    num_spec: int
    cache_mode: str = "none"  # "align": the prefix cache keeps the blocks that a sequence leaves
    has_connector: bool = False
    pipeline_ranks: int = 1
    has_host: bool = True


def refusal(facts: ReplayFacts) -> str | None:
    """Why a layer keeps a state after every token; None where it replays."""
    head_dims = facts.head_k_dim, facts.head_v_dim
    if (reason := unwanted(facts.num_v_heads, head_dims, facts.num_sequences, facts.num_spec)) is not None:
        return reason
    if not facts.has_host:
        return "the host's functions about pages are not the recorded ones"
    if not fuses_decode(*head_dims):
        return f"the fused step has no kernel for head dims {head_dims[0]} and {head_dims[1]}"
    if facts.cache_mode not in ("none", "align"):
        return f"the host's cache mode is {facts.cache_mode}"
    if facts.cache_mode == "align" and facts.num_spec:
        return "with prefix caching the host copies the state of an accepted draft, which replay does not keep"
    if facts.has_connector:
        return "a KV connector moves the parts of a block that it knows"
    if facts.pipeline_ranks > 1:
        return "the ranks of a pipeline size their blocks apart"
    if facts.window_bytes % ALIGNMENT:
        return f"its windows take {facts.window_bytes} bytes, no multiple of {ALIGNMENT}"
    return None


def replay_facts(layer: Any, vllm_config: Any, *, has_host: bool) -> ReplayFacts:
    """The facts of a layer that the host has built."""
    window, _ = layer.get_state_shape()[:2]
    return ReplayFacts(
        num_v_heads=layer.num_v_heads // layer.tp_size,
        head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim,
        window_bytes=window[0] * window[1] * layer.get_state_dtype()[0].itemsize,
        num_sequences=vllm_config.scheduler_config.max_num_seqs,
        num_spec=layer.num_spec,
        cache_mode=vllm_config.cache_config.mamba_cache_mode,
        has_connector=vllm_config.kv_transfer_config is not None,
        pipeline_ranks=vllm_config.parallel_config.pipeline_parallel_size,
        has_host=has_host,
    )


def page_of_layer(layer: Any) -> Page:
    """What a block of a layer holds that replays."""
    return page_of(layer.num_k_heads // layer.tp_size, layer.get_state_shape(), layer.get_state_dtype()[1], layer.num_spec)


def fold_phase(prefix: str, fold_every: int) -> int:
    """When a layer folds: the layers of a model in turn. prefix: the host's name of it."""
    number = re.search(r"\blayers\.(\d+)", prefix)
    return int(number[1]) % fold_every if number else 0


def page_in(vllm_config: Any) -> Page | None:
    """The page of an engine's layers; None where they do not replay."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return next((page for layer in layers if (page := getattr(layer, "_gdn_page", None)) is not None), None)


def told(facts: ReplayFacts, page: Page | None, reason: str | None) -> str:
    """How layers decode, for people."""
    if page is None:
        return f"decode without replay: {reason}"
    plain, ours = (f"{(facts.window_bytes + behind) / 1e6:.2f} MB" for behind in page.bytes_behind_window)
    instead = f"{1 + facts.num_spec} blocks of {plain}" if facts.num_spec else f"one of {plain}"
    ring = f"a ring of {page.rows} rows, a fold in {page.fold_every} tokens"
    return f"decode by replay: {ring}, one block of {ours} a sequence and layer instead of {instead}"
