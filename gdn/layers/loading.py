"""Parameters from Transformers' tensors and back, whole or as the shard of a tensor-parallel rank.

Names are below `model.` (or `model.language_model.`); `L` is `layers.<i>`. A parameter with several tensors is their
concatenation along dimension 0, in this order.

    parameter                              Transformers' tensors                                     cut
    embed_tokens                           embed_tokens.weight                                       whole
    lm_head                                lm_head.weight (with tied embeddings see below)           whole
    norm.weight                            norm.weight                                               whole
    L.input_layernorm.weight, L.post_attention_layernorm.weight    the same                          whole
    L.attn_layer_scale, L.mlp_layer_scale  L.attn_layer_scale, L.ffn_layer_scale                     vector
    L.linear_attn.in_proj                  Qwen3-Next: linear_attn.in_proj_qkvz.weight               qkvz
                                                       linear_attn.in_proj_ba.weight                 ba
                                           later:      linear_attn.in_proj_qkv.weight                qkv
                                                       linear_attn.in_proj_{z, b, a}.weight          rows
    L.linear_attn.conv_weight              linear_attn.conv1d.weight                                 conv
    L.linear_attn.{A_log, dt_bias}         the same                                                  rows
    L.linear_attn.norm_weight              linear_attn.norm.weight                                   whole
    L.linear_attn.out_proj                 linear_attn.out_proj.weight                               columns
    L.self_attn.*                          `gdn.layers.sparse_attention.TENSORS`, `gdn.layers.indexer.TENSORS`
    L.mlp.gate_up_proj                     mlp.gate_proj.weight, mlp.up_proj.weight                  rows
    L.mlp.down_proj                        mlp.down_proj.weight                                      columns
    L.mlp.router                           mlp.gate.weight                                           whole
    L.mlp.{gate_up_proj, down_proj}        mlp.experts.{gate_up_proj, down_proj}, or for every expert e
      of a mixture                         mlp.experts.<e>.{gate, up, down}_proj.weight              expert_rows, expert_columns
    L.mlp.shared_expert.*                  as a dense MLP, below mlp.shared_expert
    L.mlp.shared_expert_gate               mlp.shared_expert_gate.weight                             whole
    L.{attn, mlp}_hyper_connection.*, hyper_connection_mixer.*     `gdn.layers.hyper.TENSORS`

With tied embeddings the checkpoint decides, as in Transformers 5: where it has a head that is not equal to the embedding, the
model gets a head of its own, whatever the configuration says; where it has the head alone, this is the embedding too.

`mtp.*` and `visual.*` are skipped. `gdn.layers.cuts` says what a rank takes of each tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gdn.layers import hyper, indexer, sparse_attention
from gdn.layers.checkpoint import SafetensorsFolder as SafetensorsFolder
from gdn.layers.checkpoint import read_config as read_config
from gdn.layers.config import HybridConfig
from gdn.layers.cuts import CUTS, Rank
from gdn.layers.gated_delta_net import ROW_MULTIPLE

Parts = tuple[tuple[str, str], ...]  # (tensor of the checkpoint, cut) of a parameter
_PREFIXES = ("model.language_model.", "language_model.", "model.")
_SKIPPED = ("mtp", "visual")
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_MOST_NAMED = 8  # names that a message lists


def table(config: HybridConfig) -> dict[str, Parts]:
    """Every parameter of `HybridModel` with the tensors that it is made of, by the names after the prefix.

    Parameters
    ----------
    config : HybridConfig
        Configuration of the whole model.

    Returns
    -------
    dict of str to tuple
        Parameter -> pairs (tensor, cut).
    """
    found: dict[str, Parts] = {"embed_tokens": ((_EMBEDDING, "whole"),)}
    is_hyper = config.residual == "hyper"
    for layer in range(config.num_hidden_layers):
        start = f"layers.{layer}"
        if config.layer_types[layer] == "linear_attention":
            found |= _below(f"{start}.linear_attn", _LINEAR | _PROJECTIONS[config.projection_layout])
        else:
            found |= _below(f"{start}.self_attn", sparse_attention.TENSORS)
            if config.index_topk:
                other = "index_qkw_proj.weight" if config.index_ratio > 1 else "index_qk_proj.weight"
                tensors = {name: parts for name, parts in indexer.TENSORS.items() if name != other}
                found |= _below(f"{start}.self_attn.indexer", tensors)
        found |= _below(f"{start}.mlp", _MOE if config.is_moe(layer) else _MLP)
        if is_hyper:
            for name in ("attn_hyper_connection", "mlp_hyper_connection"):
                found |= _below(f"{start}.{name}", hyper.TENSORS)
        else:
            found |= _below(start, _NORMS | (_SCALES if config.layer_scale else {}))
    if is_hyper:
        mixer = {name: parts for name, parts in hyper.TENSORS.items() if name != "block_inject_weight.weight"}
        found |= _below("hyper_connection_mixer", mixer)
    else:
        found["norm.weight"] = (("norm.weight", "whole"),)
    if not config.tie_word_embeddings:
        found["lm_head"] = _HEAD_PARTS
    return found


def from_transformers(
    tensors: Mapping[str, Tensor], config: HybridConfig, rank: int = 0, size: int = 1, *, only_first_layers: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Makes the parameters of one rank, one after another.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        State dict of a model of Transformers, with or without the prefixes `model.` and `model.language_model.`; experts fused or
        one by one. The values are looked up when they are needed.
    config : HybridConfig
        Configuration of the whole model.
    rank, size : int
        Tensor-parallel rank, and number of ranks. A key head of Gated DeltaNet keeps its value heads; key and value heads of
        attention are replicated where there are fewer than ranks.
    only_first_layers : bool
        Whether layers of the checkpoint after the last of `config` are skipped too.

    Returns
    -------
    iterator of (str, Tensor)
        Names and values for `HybridModel(config.per_rank(size))`. The last is an `lm_head` where embeddings are tied and the
        checkpoint has another head: both are kept, as Transformers 5 does.

    Raises
    ------
    ValueError
        Before the first parameter, where a tensor is missing, or matches nothing and is not skipped (`mtp.*`, `visual.*`); and
        where a tensor has another shape than the configuration says.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank: expected 0 to {size - 1} (size {size}), got {rank}")
    config.per_rank(size)  # raises where the heads or widths cannot be divided
    wanted = table(config)
    names = _names(tensors, config, only_first_layers)
    experts = _experts(wanted, names, config)
    if config.tie_word_embeddings and _HEAD in names:
        names.setdefault(_EMBEDDING, names[_HEAD])
    needed = {tensor for parts in wanted.values() for tensor, _ in parts}
    needed = {one for tensor in needed for one in experts.get(tensor, (tensor,))}
    unused = {_HEAD} if config.tie_word_embeddings else set()
    _refuse("tensors without a place in the model", sorted(set(names) - needed - unused))
    _refuse("missing tensors", sorted(needed - set(names)))
    made = _made(wanted, lambda tensor: _read(tensors, names, experts, tensor), Rank(config, rank, size))
    return chain(made, _other_head(tensors, names)) if config.tie_word_embeddings else made


def to_transformers(parameters: Mapping[str, Tensor], config: HybridConfig) -> dict[str, Tensor]:
    """State dict of Transformers' causal language model for the parameters of a whole `HybridModel`: the way back.

    Parameters
    ----------
    parameters : mapping of str to Tensor
        Named parameters of the model (`state_dict`).
    config : HybridConfig
        Configuration of the whole model.

    Returns
    -------
    dict of str to Tensor
        Names with the prefix `model.`, `lm_head.weight` without it; experts fused. Tied embeddings have no head, but one that
        the parameters have all the same.
    """
    whole, found = Rank(config, 0, 1), {}
    every = table(config) | ({"lm_head": _HEAD_PARTS} if "lm_head" in parameters else {})
    for name, parts in every.items():
        value = parameters[name]
        pieces: Sequence[Tensor] = (value,)
        if len(parts) > 1 or name.endswith(".in_proj"):  # the rows of zeros after the last one are ours
            rows = [CUTS[cut].rows(whole, tensor) or 0 for tensor, cut in parts]
            pieces = value[: sum(rows)].split(rows)
        for (tensor, cut), piece in zip(parts, pieces, strict=True):
            place = tensor if tensor.startswith("lm_head") else f"model.{tensor}"
            found[place] = CUTS[cut].give(piece, whole)
    return found


def load(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    config: HybridConfig,
    rank: int = 0,
    size: int = 1,
    *,
    only_first_layers: bool = False,
) -> None:
    """Fills a `HybridModel` of one rank; with tied embeddings it gets an `lm_head` where the checkpoint has another head.

    Arguments and errors are those of `from_transformers`. Graphs that were captured before, and caches with states or keys of
    other weights, must be dropped.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in from_transformers(tensors, config, rank, size, only_first_layers=only_first_layers):
            if name == "lm_head" and name not in parameters:
                like = torch.empty_like(model.get_parameter("embed_tokens"))
                model.lm_head = parameters[name] = nn.Parameter(like, requires_grad=False)
            target = parameters.pop(name)
            if target.shape != value.shape:
                raise ValueError(f"{name}: expected shape {list(target.shape)}, got {list(value.shape)} from the checkpoint")
            target.copy_(value)
    if config.tie_word_embeddings and parameters.pop("lm_head", None) is not None:
        del model.lm_head  # of another checkpoint
    _refuse("parameters without a tensor", sorted(parameters))


_HEAD_PARTS: Parts = ((_HEAD, "whole"),)
_NORMS: dict[str, Parts] = {name: ((name, "whole"),) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
_SCALES: dict[str, Parts] = {
    "attn_layer_scale": (("attn_layer_scale", "vector"),),
    "mlp_layer_scale": (("ffn_layer_scale", "vector"),),
}
_LINEAR: dict[str, Parts] = {
    "conv_weight": (("conv1d.weight", "conv"),),
    "A_log": (("A_log", "rows"),),
    "dt_bias": (("dt_bias", "rows"),),
    "norm_weight": (("norm.weight", "whole"),),
    "out_proj": (("out_proj.weight", "columns"),),
}
_PROJECTIONS: dict[str, dict[str, Parts]] = {
    "interleaved": {"in_proj": (("in_proj_qkvz.weight", "qkvz"), ("in_proj_ba.weight", "ba"))},
    "flat": {
        "in_proj": (("in_proj_qkv.weight", "qkv"), *((f"in_proj_{name}.weight", "rows") for name in ("z", "b", "a"))),
    },
}
_MLP: dict[str, Parts] = {
    "gate_up_proj": (("gate_proj.weight", "rows"), ("up_proj.weight", "rows")),
    "down_proj": (("down_proj.weight", "columns"),),
}
_MOE: dict[str, Parts] = {
    "router": (("gate.weight", "whole"),),
    "gate_up_proj": (("experts.gate_up_proj", "expert_rows"),),
    "down_proj": (("experts.down_proj", "expert_columns"),),
    "shared_expert_gate": (("shared_expert_gate.weight", "whole"),),
}


def _below(prefix: str, tensors: Mapping[str, Parts]) -> dict[str, Parts]:
    """The same names below a module."""
    return {f"{prefix}.{name}": tuple((f"{prefix}.{t}", cut) for t, cut in parts) for name, parts in tensors.items()}


_MOE |= _below("shared_expert", _MLP)


def _names(tensors: Mapping[str, Tensor], config: HybridConfig, only_first_layers: bool) -> dict[str, str]:
    """Name after the prefix -> name in the checkpoint, without what is skipped."""
    found: dict[str, str] = {}
    for name in tensors:
        short = name
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                short = name.removeprefix(prefix)
                break
        first, _, rest = short.partition(".")
        if first in _SKIPPED:
            continue
        layer = rest.partition(".")[0]
        if only_first_layers and first == "layers" and layer.isdecimal() and int(layer) >= config.num_hidden_layers:
            continue
        if short in found:
            raise ValueError(f"tensors: expected one {short}, got {found[short]} and {name}")
        found[short] = name
    return found


def _experts(wanted: Mapping[str, Parts], names: Mapping[str, str], config: HybridConfig) -> dict[str, tuple[str, ...]]:
    """Fused tensor of experts -> those of single experts, where the checkpoint has these instead."""
    found = {}
    for parts in wanted.values():
        for tensor, cut in parts:
            if cut in ("expert_rows", "expert_columns") and tensor not in names:
                start = tensor.rpartition(".")[0]
                kinds = ("gate_proj", "up_proj") if cut == "expert_rows" else ("down_proj",)
                found[tensor] = tuple(f"{start}.{e}.{kind}.weight" for e in range(config.num_experts) for kind in kinds)
    return found


def _read(tensors: Mapping[str, Tensor], names: Mapping[str, str], experts: Mapping[str, tuple[str, ...]], tensor: str) -> Tensor:
    """A tensor of the checkpoint; one of all experts is put together."""
    if tensor not in experts:
        return tensors[names[tensor]]
    each = [tensors[names[one]] for one in experts[tensor]]
    if tensor.endswith("gate_up_proj"):
        each = [torch.cat([gate, up]) for gate, up in zip(each[::2], each[1::2], strict=True)]
    return torch.stack(each)


def _made(wanted: Mapping[str, Parts], read: Any, rank: Rank) -> Iterator[tuple[str, Tensor]]:
    for name, parts in wanted.items():
        pieces = [CUTS[cut].take(_checked(tensor, cut, read(tensor), rank), rank) for tensor, cut in parts]
        value = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if name.endswith(".in_proj") and value.shape[0] % ROW_MULTIPLE:
            value = torch.cat([value, value.new_zeros(-value.shape[0] % ROW_MULTIPLE, value.shape[1])])
        yield name, value


def _other_head(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The head of a checkpoint with tied embeddings, where it has one with other values than the embedding."""
    if _HEAD not in names or names[_HEAD] == names[_EMBEDDING]:
        return
    head, embedding = tensors[names[_HEAD]], tensors[names[_EMBEDDING]]
    if head.is_meta or embedding.is_meta:  # no values: as the configuration says
        return
    if head.dtype != embedding.dtype or not torch.equal(head, embedding.to(head.device)):
        yield "lm_head", head


def _checked(tensor: str, cut: str, value: Tensor, rank: Rank) -> Tensor:
    """A tensor whose first dimension is what the configuration says; cutting another one would take wrong rows."""
    rows = CUTS[cut].rows(rank, tensor)
    if rows is not None and value.shape[0] != rows:
        raise ValueError(f"{tensor}: expected {rows} rows, got shape {list(value.shape)}")
    return value


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise ValueError(f"tensors: expected those of the configuration, got {what}: {', '.join(names[:_MOST_NAMED])}{more}")
