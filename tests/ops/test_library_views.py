"""torch.compile with inductor: written arguments that are views of one buffer, with sizes that change from call to call.

Every call is compared with an eager one on a buffer of its own: results, and each byte of the buffers.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import gdn
from gdn.core.call import operator_named
from gdn.testing.compare import same_bits
from tests.ops.library_calls import BY_TOKENS, REGISTERED, as_tuple

Arguments = dict[str, Any]
Step = Callable[..., Any]
Made = tuple[Step, Tensor | tuple[Tensor, ...], Arguments]  # of the buffer or views, and of the other arguments; both of these

# Tokens, and rows that the first dim of every cache has more: the second number of blocks makes it a symbol.
SIZES = [(6, 0), (6, 0), (8, 0), (7, 2), (6, 2), (8, 1), (7, 0), (5, 2), (5, 1), (8, 0)] * 2
MODES: dict[str, tuple[bool | None, Callable[[], AbstractContextManager[Any]]]] = {
    "default": (None, torch.no_grad), "dynamic": (True, torch.inference_mode),
}  # fmt: skip
# States and counts of these are of two dtypes in any case: no buffer of one dtype holds them.
TWO_DTYPES = ("fold_states", "accept_draft_tree")


def caches_of(name: str) -> tuple[str, ...]:
    """What a plain call of an operator writes, `out` apart."""
    given = BY_TOKENS[name](6)
    return tuple(key for key in operator_named(name).writes if key != "out" and given.get(key) is not None)


CACHES = {name: found for name in REGISTERED if name not in TWO_DTYPES and (found := caches_of(name))}
WITHOUT_OUT = [name for name in CACHES if "out" not in operator_named(name).writes]
TWO_WRITTEN = [name for name, caches in CACHES.items() if len(caches) + (name not in WITHOUT_OUT) > 1]


def arguments_of(name: str, tokens: int, more: int, device: str) -> Arguments:
    """A call in bfloat16, whose caches have some rows more."""
    arguments = BY_TOKENS[name](tokens)
    if name in WITHOUT_OUT:  # pages without scales, full, so that a copy to the wrong place is seen
        pages = torch.randn(2, 99, 16, 16, generator=torch.Generator().manual_seed(0))
        arguments |= {key: x for key, x in zip(("cache", "v_cache"), pages, strict=True) if key in arguments}
    if name == "prepare_indexer":
        arguments["weights"] = None  # they come back as they are, which is no result of a graph
    for key in CACHES[name]:
        arguments[key] = torch.cat([arguments[key], arguments[key][:more]])
    moved = {key: x.to(device) for key, x in arguments.items() if isinstance(x, Tensor)}
    return arguments | {key: x.bfloat16() if x.is_floating_point() else x for key, x in moved.items()}


def in_memory_order(x: Tensor) -> tuple[Tensor, list[int]]:
    """The same elements with dims in the order that they have in memory, and the permutation back."""
    order = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))
    return x.permute(order), [order.index(dim) for dim in range(x.dim())]


def as_arguments(name: str, tokens: int, more: int, device: str) -> Made:
    """All written arguments, `out` too, are views that the caller makes of one buffer."""
    given, function = arguments_of(name, tokens, more, device), getattr(gdn, name)
    written = {key: given.pop(key) for key in CACHES[name]}
    if name not in WITHOUT_OUT:
        found = function(**given, **{key: x.clone() for key, x in written.items()})
        written["out"] = torch.zeros_like(found[0] if isinstance(found, tuple) else found)
    names, views = list(written), []
    buffer = torch.zeros(sum(x.numel() + 8 for x in written.values()) + 8, dtype=torch.bfloat16, device=device)
    at = 8  # no view begins where the buffer does; all of them are aligned
    for x in written.values():
        ordered, back = in_memory_order(x)
        views.append(buffer[at : at + x.numel()].view(ordered.shape).permute(back))
        views[-1].copy_(x)
        at += -(-x.numel() // 8) * 8

    def step(views: tuple[Tensor, ...], **others: Any) -> Any:
        return function(**others, **dict(zip(names, views, strict=True)))

    return step, tuple(views), given


def halves(name: str, tokens: int, more: int, device: str) -> Made:
    """Caches of one shape are halves of one buffer; another cache is the second half of one. All taken in the graph."""
    given, function = arguments_of(name, tokens, more, device), getattr(gdn, name)
    caches = {key: in_memory_order(given.pop(key)) for key in CACHES[name]}
    is_pair = len({x.shape for x, _ in caches.values()}) == 1 and len(caches) == 2
    groups = [list(caches)] if is_pair else [[key] for key in caches]
    buffers = tuple(torch.stack([caches[group[0]][0], caches[group[-1]][0]]) for group in groups)
    backs = {key: back for key, (_, back) in caches.items()}

    def step(buffers: tuple[Tensor, ...], **others: Any) -> Any:
        for group, buffer in zip(groups, buffers, strict=True):
            for place, key in enumerate(group, start=2 - len(group)):
                others[key] = buffer[place].permute(backs[key])
        return function(**others)

    return step, buffers, given


def rows_of_pages(name: str, tokens: int, more: int, device: str) -> Made:
    """Two caches are columns of one buffer, which has a row for each of their slots or pages. Taken in the graph."""
    given, function = arguments_of(name, tokens, more, device), getattr(gdn, name)
    caches = {key: in_memory_order(given.pop(key)) for key in CACHES[name]}
    pages = torch.cat([x.flatten(1) for x, _ in caches.values()], dim=1)
    inner = {key: (x.shape[1:], back) for key, (x, back) in caches.items()}

    def step(pages: Tensor, **others: Any) -> Any:
        at = 0
        for key, (shape, back) in inner.items():
            others[key] = pages[:, at : at + math.prod(shape)].unflatten(1, shape).permute(back)
            at += math.prod(shape)
        return function(**others)

    return step, pages, given


FORMS: dict[str, tuple[Callable[[str, int, int, str], Made], list[str]]] = {
    "arguments": (as_arguments, TWO_WRITTEN),
    "halves": (halves, list(CACHES)),
    "rows": (rows_of_pages, ["fused_gdn_decode", "fused_gdn_prefill", "prepare_indexer"]),
}
CASES = [(name, form, mode) for form, (_, names) in FORMS.items() for name in names for mode in MODES]
QUICK = [("prepare_indexer", "arguments", "default"), ("prepare_indexer", "halves", "default")]


def compare(name: str, form: str, mode: str, sizes: list[tuple[int, int]], device: str = "cpu") -> None:
    """Compiled calls against eager ones."""
    make, (dynamic, context) = FORMS[form][0], MODES[mode]
    torch._dynamo.reset()
    compiled = None
    for count, (tokens, more) in enumerate(sizes):
        with context():
            (step, buffers, given), (plain, others, same) = (make(name, tokens, more, device) for _ in range(2))
            compiled = compiled or torch.compile(step, fullgraph=True, dynamic=dynamic)
            found, expected = compiled(buffers, **given), plain(others, **same)
            pairs = zip((*as_tuple(found), *as_tuple(buffers)), (*as_tuple(expected), *as_tuple(others)), strict=True)
            for have, want in pairs:
                assert have is want is None or same_bits(have, want), (count, tokens, more)


@pytest.mark.parametrize(("name", "form", "mode"), QUICK)
def test_views_of_one_buffer(name: str, form: str, mode: str) -> None:
    compare(name, form, mode, [SIZES[place] for place in (0, 2, 3, 5, 7)])


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_of_a_view(dynamic: bool) -> None:
    """Refused where it is compiled: some versions of torch write it to another place. Code of another layer is right for it.

    That code may come from torch's cache on the disk, whose key has no storage offsets.
    """
    step, (pair,), given = halves("prepare_indexer", 6, 0, "cpu")
    layers, plain = torch.stack([pair, pair]), torch.stack([pair, pair])
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    text = "cache: expected in a compiled call .* a view of one at storage offset"
    with torch._functorch.config.patch(enable_autograd_cache=False), pytest.raises(Exception, match=text):
        compiled((layers[1],), **given)
    assert same_bits(layers, plain)
    for layer in range(2):  # the first starts its storage
        compiled((layers[layer],), **given)
        step((plain[layer],), **given)
    assert same_bits(layers, plain)


def test_two_dtypes_of_one_page_are_refused() -> None:
    given = BY_TOKENS["fused_gdn_decode"](6)
    windows, states = given["conv_state"], given["ssm_state"]
    page = torch.zeros(windows.nbytes + states.nbytes, dtype=torch.uint8)
    given["conv_state"] = page[: windows.nbytes].view(windows.dtype).view(windows.mT.shape).mT
    given["ssm_state"] = page[windows.nbytes :].view(states.dtype).view(states.shape)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="ssm_state: expected in a compiled call a tensor of dtype torch.bfloat16, as conv_state"):
        torch.compile(gdn.fused_gdn_decode, fullgraph=True)(**given)
    gdn.fused_gdn_decode(**given)  # an eager call takes them


def graph_of(step: Step, *arguments: Any, **named: Any) -> list[str]:
    """Operators of gdn in the graph that inductor gets."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*arguments, **named)
    [graph] = graphs
    called = [node.args[0] if "auto_functionalized" in str(node.target) else node.target for node in graph.graph.nodes]
    return [str(target) for target in called if str(target).startswith("gdn.")]


def test_nothing_is_added_to_a_graph_without_views_of_one_buffer() -> None:
    given = arguments_of("prepare_indexer", 6, 0, "cpu")
    assert graph_of(gdn.prepare_indexer, **given) == ["gdn.prepare_indexer.default"]
    step, views, given = as_arguments("prepare_indexer", 6, 0, "cpu")
    assert graph_of(step, views, **given) == ["gdn.write_nothing.default", "gdn.prepare_indexer.default"]


class Exported(torch.nn.Module):
    """A call of `prepare_indexer` on halves of one buffer."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, buffer: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.step((buffer,), **tensors, weights=None, rotary_dim=4)[0]
        return found


@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.cover)])
def test_an_exported_program_and_its_compilation(strict: bool) -> None:
    """A dynamic number of pages stays dynamic in the program; compiled, it is right for each."""

    def make(more: int) -> tuple[Exported, Tensor, dict[str, Tensor]]:
        step, (buffer,), given = halves("prepare_indexer", 6, more, "cpu")
        return Exported(step), buffer, {name: x for name, x in given.items() if isinstance(x, Tensor)}

    module, buffer, given = make(0)
    shapes = ({1: torch.export.Dim("pages", min=3)}, dict.fromkeys(given))
    program = torch.export.export(module, (buffer, given), dynamic_shapes=shapes, strict=strict).module()
    torch._dynamo.reset()
    for run in (program, torch.compile(program)):
        for more in (0, 2, 1):
            (_, buffer, given), (plain, other, same) = make(more), make(more)
            with torch.no_grad():
                assert same_bits(run(buffer, given), plain(other, same))
            assert same_bits(buffer, other)


@pytest.mark.cover
@pytest.mark.parametrize(("name", "form", "mode"), CASES)
def test_every_operator_and_20_calls(name: str, form: str, mode: str) -> None:
    compare(name, form, mode, SIZES)
