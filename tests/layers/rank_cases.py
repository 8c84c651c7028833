"""Results of the ranks of a tensor-parallel group, and of one process alone: the same functions, with and without a group."""

import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gdn.cli.demo import run as demo_run
from gdn.cli.demo.engine import Engine, EngineSizes
from gdn.cli.demo.reference import in_float32
from gdn.layers import MLP, DecoderLayer, GatedDeltaNet, HybridConfig, HybridModel, MoE, SparseAttention
from gdn.layers.loading import SafetensorsFolder, load
from gdn.layers.random_weights import RandomTensors
from tests.layers.paged import Batch
from tests.layers.serving import Server, gdn_metadata

Case = Callable[..., list[Tensor]]

LAYERS = {"num_hidden_layers": 3, "layer_types": ("linear_attention", "full_attention", "linear_attention")}
# Numbers of heads and widths that 2, 3 and 4 ranks divide.
SHAPES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, **LAYERS, "num_attention_heads": 12, "head_dim": 16, "linear_num_key_heads": 12,
    "linear_num_value_heads": 24, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "intermediate_size": 24,
    "max_position_embeddings": 512,
}  # fmt: skip
_INDEXER = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 24}
FORMS: dict[str, dict[str, Any]] = {
    "experts": {"projection_layout": "interleaved", "num_key_value_heads": 1, **_INDEXER, **_EXPERTS},  # keys on every rank
    "dense": {"num_key_value_heads": 12, "layer_scale": True, "tie_word_embeddings": True},  # keys divided
    "hyper": {"residual": "hyper", "hc_count": 2, "hc_lowrank": 4, "index_ratio": 4, **_INDEXER},  # as many ranks hold a key head
}
SIZES = (2, 3, 4)


def make_config(form: str, size: int) -> HybridConfig:
    """Configuration of the whole model; with residual "hyper", neighbouring ranks share a head of keys where they can."""
    heads = {} if "num_key_value_heads" in FORMS[form] else {"num_key_value_heads": 3 if size == 3 else 2}
    return HybridConfig(**SHAPES | FORMS[form] | heads)


def make_model(config: HybridConfig, group: Any, tensors: Mapping[str, Tensor] | None = None) -> HybridModel:
    model = HybridModel(config, tp_group=group, dtype=torch.float32)
    load(model, RandomTensors(config, 5) if tensors is None else tensors, config, *rank_of(group))
    return model


def rank_of(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def tokens(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(61) for _ in range(length)] for length in lengths]


def serve(model: HybridModel) -> list[Tensor]:
    """Logits of a ragged prefill, a prompt's next chunk with other sequences' decode rows, decode, drafts, all kinds at once."""
    server = Server(model, model.config, 4, 160, num_spec=2, is_packaged=True)
    steps: list[tuple[list[int], dict[str, Any]]] = [
        ([65, 5, 1, 0], {}), ([40, 1, 1, 0], {}), ([1, 1, 1, 0], {}),
        ([3, 2, 1, 0], {"drafted": [True] * 4, "keep": [2, 1, 1, 0]}),
        ([3, 3, 3, 0], {"drafted": [True] * 4, "keep": [3, 1, 2, 0]}),
        ([1, 3, 2, 20], {"drafted": [True, True, True, False], "keep": [1, 2, 2, 20]}),
    ]  # fmt: skip
    return [torch.cat(server.step(tokens(*lengths, seed=n), **more)) for n, (lengths, more) in enumerate(steps)]


def model_case(form: str, group: Any, size: int, folder: Path) -> list[Tensor]:
    return serve(make_model(make_config(form, size), group))


def copied_case(form: str, group: Any, size: int, folder: Path) -> list[Tensor]:
    """A copy of the model sums over the ranks too, and so do the demo's experts, one after another."""
    model = in_float32(make_model(make_config(form, size), group))
    server = Server(model, model.config, 2, 40)
    return [torch.cat(server.step(tokens(30, 7)))]


def engine_case(form: str, group: Any, size: int) -> list[Tensor]:
    """Tokens of the demo's engine: prompts in chunks, decode, drafts in batches of fixed shape; then whole sequences' logits."""
    model = make_model(make_config(form, size), group)
    engine = Engine(model, EngineSizes(4, 200, 48, num_spec=2), use_graphs=True)
    engine.prefill(tokens(130, 3, 64), 64)
    engine.decode(4)
    right = [stream.tokens[-2:] for stream in engine.streams]
    engine.verify([right[0], [1], []])
    engine.verify([stream.tokens[-3:-1] for stream in engine.streams])
    engine.decode(2)
    made = [stream.tokens for stream in engine.streams]
    engine.finish()
    return [torch.tensor([token for one in made for token in one]), *engine.score(made, [0, 0, 0])]


def layer_case(form: str, group: Any, size: int, folder: Path) -> list[Tensor]:
    """Each layer by itself, made with the group; its weights are its part of the whole model's."""
    config, generator = make_config(form, size), torch.Generator().manual_seed(3)
    layers = make_model(config, group).layers
    options: dict[str, Any] = {"tp_group": group, "dtype": torch.float32}

    def given(layer: Any, source: Any) -> Any:
        layer.load_state_dict(source.state_dict())
        return layer

    linear = given(GatedDeltaNet(config, **options), layers[0].linear_attn)
    attention = given(SparseAttention(config, **options), layers[1].self_attn)
    mlp = MoE(config, **options) if config.num_experts else MLP(config.hidden_size, config.intermediate_size, **options)
    given(mlp, layers[0].mlp)
    rows = [torch.randn(length, config.hidden_size, generator=generator) for length in (40, 7)]
    token = [torch.randn(1, config.hidden_size, generator=generator) for _ in rows]
    found = [mlp(torch.cat(rows)), *gdn_steps(linear, config, rows, token, *rank_of(group))]
    batch = Batch(attention, config.per_rank(rank_of(group)[1]), 2, 48)
    return [*found, *batch.step(rows), *batch.step(token)]


def gdn_steps(
    layer: GatedDeltaNet, config: HybridConfig, rows: list[Tensor], token: list[Tensor], rank: int, size: int
) -> Iterator[Tensor]:
    """A prefill that goes on from given states, and a decode step."""
    heads, dims = config.linear_num_value_heads, (config.linear_value_head_dim, config.linear_key_head_dim)
    states = torch.randn(3, heads, *dims, generator=torch.Generator().manual_seed(4)).chunk(size, 1)[rank].contiguous()
    windows = torch.zeros(3, layer.conv_dim, 3)
    slots = torch.tensor([[2], [0]], dtype=torch.int32)
    for hidden, contexts in ((rows, [9, 0]), (token, [49, 7])):
        metadata = gdn_metadata([len(one) for one in hidden], contexts, [False, False], slots, [1, 1])
        yield layer(torch.cat(hidden), metadata, windows, states)


def decoder_case(form: str, group: Any, size: int, folder: Path) -> list[Tensor]:
    """Decoder layers that were made one by one, in the place of the model's."""
    config = make_config(form, size)
    model = make_model(config, group)
    for place, layer in enumerate(model.layers):
        own = DecoderLayer(config, place, model.rotary, tp_group=group, dtype=torch.float32)
        own.load_state_dict(layer.state_dict())
        model.layers[place] = own
    return [torch.cat(Server(model, model.config, 2, 40).step(tokens(30, 7)))]


def checkpoint_case(form: str, group: Any, size: int, folder: Path) -> list[Tensor]:
    """Every rank reads its part of the files."""
    config = make_config(form, size)
    model = make_model(config, group, SafetensorsFolder(folder / form))
    return [torch.cat(Server(model, model.config, 2, 40).step(tokens(30, 7)))]


CASES: dict[str, Case] = {
    "model": model_case, "copy": copied_case, "layers": layer_case, "decoder layers": decoder_case,
    "checkpoint": checkpoint_case,
}  # fmt: skip


def write_checkpoints(size: int, folder: Path) -> None:
    """The forms' checkpoints, as Transformers names their tensors."""
    from safetensors.torch import save_file

    for form in FORMS:
        (folder / form).mkdir()
        save_file(
            {f"model.{name}": one for name, one in RandomTensors(make_config(form, size), 7).items()},
            folder / form / "a.safetensors",
        )


def refusals(group: Any) -> dict[str, str]:
    """Messages for groups that cannot divide a model, and for what is no group of this process."""
    config, found = make_config("experts", group.size()), {}
    outside = dist.new_group([0])
    bad: dict[str, Callable[[], Any]] = {
        "heads": lambda: GatedDeltaNet(replace(config, linear_num_key_heads=5, linear_num_value_heads=10), tp_group=group),
        "attention": lambda: SparseAttention(replace(config, num_attention_heads=5), tp_group=group),
        "keys": lambda: HybridModel(replace(config, num_attention_heads=60, num_key_value_heads=5), tp_group=group),
        "width": lambda: MLP(8, 13, tp_group=group),
        "experts": lambda: MoE(replace(config, moe_intermediate_size=13), tp_group=group),
        "outside": lambda: MLP(8, 12, tp_group=outside),
        "size": lambda: MLP(8, 12, tp_group=group.size()),
    }
    for name, make in bad.items():
        try:
            make()
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def demo_report(size: int, group: Any = None) -> Any:
    """Run of the demo: whether it passed, its tokens, and the other ranks' wrong results."""
    plan = demo_run.Plan(
        "small", make_config("experts", size), (37, 70, 2), steps=2, drafts=2, device=torch.device("cpu"), tensor_parallel=1
    )
    plan = replace(plan, tensor_parallel=rank_of(group)[1])
    found = demo_run.run(plan, None, group=group)
    return found.passed, found.tokens, found.others


def run_layers(group: Any, folder: Path) -> dict[str, Any]:
    """Layers and models, on one rank of a group."""
    found: dict[str, Any] = {
        f"{name}, {form}": case(form, group, group.size(), folder) for name, case in CASES.items() for form in FORMS
    }
    return found | {"refusals": refusals(group)}


def run_engines(group: Any, folder: Path) -> dict[str, Any]:
    """The engines and the demo, on one rank of a group."""
    size = group.size()
    return {form: engine_case(form, group, size) for form in FORMS} | {"demo": demo_report(size, group)}


def die(group: Any, folder: Path) -> None:
    """The last rank is gone after the first step; the others go on."""
    model = make_model(make_config("dense", group.size()), group)
    server = Server(model, model.config, 1, 40)
    server.step(tokens(9))
    if group.rank() == group.size() - 1:
        os._exit(1)
    server.step(tokens(9))
