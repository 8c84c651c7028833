"""Drawn calls of `gdn.attention` and `gdn.sparse_attention`, and a float64 oracle of one query and head at a time.

What no query may see holds NaN: padding rows, blocks of nobody, what comes after the last token of a sequence, rows that are not
selected. Tensors lie at odd addresses and have odd strides where the operators allow any.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gdn
from gdn.core.tensors import is_aligned

Tensor = torch.Tensor
Device = torch.device | str

OPERATORS = ("attention", "sparse_attention")
HEAD_DIMS = (64, 128, 192, 256, 40, 72, 100, 320)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (6, 3), (16, 1))  # of q, and of keys
BLOCK_SIZES = (1, 4, 16, 17, 272)
SCALES = (None, None, 0.7, -0.3, 0)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}  # of one result
# What a kernel is compiled for, by D, where few variants are asked for: dtype, heads, block size, dtype of indices.
KERNELS = {
    128: [(torch.bfloat16, (4, 2), 16, torch.int32), (torch.float16, (6, 3), 1344, torch.int64)],
    256: [(torch.float16, (16, 1), 272, torch.int64), (torch.bfloat16, (4, 1), 80, torch.int32)],
}
# Of long contexts, whose tiles the kernel of prefill deals to several blocks.
KERNELS_OF_LONG = {128: KERNELS[128][:1], 256: KERNELS[256][1:]}
CACHED, LONG_CACHED = (0, 0, 1, 5, 30, 170), (0, 400, 900, 2500, 5000, 9000)  # tokens of a sequence
FAR = 10**6  # a block, a position or a length that nobody has


@dataclass
class Drawn:
    """A call, and what the oracle needs to know of it."""

    seed: int
    operator: str
    arguments: dict[str, Any]
    lengths: list[tuple[int, int]]  # new tokens and all tokens of each sequence
    form: str  # the choices, for messages

    def run(self) -> tuple[Tensor, Tensor | None]:
        found = getattr(gdn, self.operator)(**self.arguments)
        return found if isinstance(found, tuple) else (found, None)


class _Source:
    """Random choices, and tensors at chosen places in memory. `form` remembers the choices."""

    def __init__(self, seed: int, device: Device) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.device, self.form = device, [f"seed {seed}"]

    def pick(self, name: str, *options: Any) -> Any:
        found = self.random.choice(options)
        self.form.append(f"{name} {found}")
        return found

    def maybe(self, name: str, probability: float = 0.5) -> bool:
        found = self.random.random() < probability
        if found:
            self.form.append(name)
        return found

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def placed(self, name: str, x: Tensor, *forms: str) -> Tensor:
        """x on the device, at one of the places."""
        form = self.pick(name, *forms)
        if form == "plain":
            return x.to(self.device)
        if form == "odd address":  # one element after a multiple of 16 bytes
            buffer = torch.full((x.numel() + 1,), 7, dtype=x.dtype, device=self.device)
            view = buffer[1:].view(x.shape)
        elif form == "odd rows":
            view = torch.full((*x.shape[:-1], x.shape[-1] + 1), 7, dtype=x.dtype, device=self.device)[..., : x.shape[-1]]
        elif form == "odd tokens":
            size = math.prod(x.shape[1:])
            buffer = torch.full((x.shape[0], size + 3), 7, dtype=x.dtype, device=self.device)
            view = buffer[:, :size].view(x.shape)
        elif form == "half":  # the first half of longer rows
            view = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7, dtype=x.dtype, device=self.device)[..., : x.shape[-1]]
        elif form == "transposed":
            return x.to(self.device).mT.contiguous().mT
        else:
            assert form == "spread", form  # every second element
            view = torch.full((*x.shape, 2), 7, dtype=x.dtype, device=self.device)[..., 0]
        return view.copy_(x)


def draw(seed: int, device: Device, operator: str | None = None, *, few_variants: bool = False, is_long: bool = False) -> Drawn:
    """The call of a seed. operator: one of `OPERATORS`; None = drawn. few_variants: few of those that kernels serve; is_long:
    these alone, and contexts of thousands of tokens."""
    source = _Source(seed, device)
    operator = source.pick("operator", *OPERATORS) if operator is None else operator
    kernels = KERNELS_OF_LONG if is_long else KERNELS
    dim = source.pick("D", *(kernels if is_long else HEAD_DIMS))
    dtype = source.pick("dtype", *(DTYPES[:2] if is_long else DTYPES))
    heads, kv_heads = source.pick("heads", *HEADS)
    block_size, index_dtype = source.pick("block size", *BLOCK_SIZES), source.pick("indices", torch.int32, torch.int64)
    if is_kernels := (few_variants or is_long) and dim in kernels and dtype != torch.float32:
        dtype, (heads, kv_heads), block_size, index_dtype = source.pick("in fact", *kernels[dim])
    lengths = _lengths(source, LONG_CACHED if is_long else CACHED)
    tokens = sum(new for new, _ in lengths) + source.pick("padding", 0, 1, 3)
    real = sum(new for new, _ in lengths)
    cache, tables = _cache(source, lengths, (block_size, kv_heads, dim), dtype)
    bounds = torch.tensor([0, *[new for new, _ in lengths]]).cumsum(0)
    arguments: dict[str, Any] = {
        "q": _queries(source, (tokens, heads, dim), real, dtype),
        "kv_cache": cache,
        "block_tables": tables,
        "query_start_loc": _index(source, "query_start_loc", bounds),
        "seq_lens": _index(source, "seq_lens", torch.tensor([length for _, length in lengths], dtype=torch.int64)),
    }
    if operator == "sparse_attention":
        _selection(source, arguments, lengths, tokens, index_dtype)
        if is_kernels and dim == 128:
            arguments.pop("topk_length", None)
    else:
        _bounds(source, arguments, lengths)
    _options(source, arguments, (tokens, heads, dim), real, dtype)
    if is_kernels and block_size == 272 and operator == "attention" and "backend" not in arguments:
        if torch.device(device).type == "cuda" and all(is_aligned(x) for x in cache):
            arguments["backend"] = "tilelang"  # the others take the first in order
    return Drawn(seed, operator, arguments, lengths, ", ".join(source.form))


def _lengths(source: _Source, contexts: Sequence[int]) -> list[tuple[int, int]]:
    """New tokens and all tokens of each sequence: decode and prefill rows in any order, some empty, some of equal lengths."""
    found: list[tuple[int, int]] = []
    for _ in range(source.random.randint(0 if source.maybe("maybe none", 0.05) else 1, 4)):
        if found and source.random.random() < 0.3:
            found.append(found[-1])
            continue
        new = source.random.choice((0, 1, 1, 2, 8, 9, 12, 17))
        cached = source.random.choice(contexts)
        found.append((new, FAR if new == 0 and source.random.random() < 0.2 else new + cached))
    source.form.append(f"lengths {found}")
    return found


def _cache(
    source: _Source, lengths: list[tuple[int, int]], row: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
    """Keys and values in one of five layouts, and block tables of shuffled blocks."""
    block_size, kv_heads, dim = row
    pages = [-(-length // block_size) if new else 0 for new, length in lengths]
    columns = max(pages, default=0) + source.pick("spare columns", 0, 1, 3)
    order = torch.randperm(sum(pages) + 2, generator=source.generator)
    both = torch.full((2, len(order), block_size, kv_heads, dim), math.nan, dtype=dtype)
    tables = torch.full((len(lengths), columns), source.pick("unused blocks", -1, FAR), dtype=torch.int32)
    first = 0
    for n, (count, (_, length)) in enumerate(zip(pages, lengths, strict=True)):
        own = order[first : first + count]
        tables[n, :count] = own.int()
        rows = source.normal(2, count * block_size, kv_heads, dim, dtype=dtype)
        rows[:, length:] = math.nan
        both[:, own] = rows.view(2, count, block_size, kv_heads, dim)
        first += count
    layout = source.pick("cache", "one tensor", "pair", "packed", "padded", "odd pair")
    placed = source.placed("block_tables", tables, "plain", "odd rows")
    if layout == "one tensor":
        return both.to(source.device), placed
    if layout == "packed":  # K and V of a head in one row
        packed = torch.cat([both[0], both[1]], dim=-1).to(source.device)
        return (packed[..., :dim], packed[..., dim:]), placed
    if layout == "padded":  # blocks and tokens apart
        wide = torch.full((2, len(order), block_size + 1, kv_heads + 1, dim), math.nan, dtype=dtype, device=source.device)
        view = wide[:, :, :block_size, :kv_heads].copy_(both)
        return (view[0], view[1]), placed
    if layout == "odd pair":
        k_cache, v_cache = (source.placed(name, x, "odd address", "odd rows") for name, x in zip("kv", both, strict=True))
        return (k_cache, v_cache), placed
    return (both[0].to(source.device), both[1].to(source.device)), placed


def _queries(source: _Source, shape: tuple[int, int, int], real: int, dtype: torch.dtype) -> Tensor:
    """Queries, NaN in padding rows; a stride of 0 over heads or tokens at times."""
    q = source.normal(*shape, dtype=dtype)
    q[real:] = math.nan
    form = source.pick("q", "placed", "placed", "placed", "one head", "one token")
    if form == "one head":
        return source.placed("q", q[:, :1].contiguous(), "plain", "odd address").expand(shape)
    if form == "one token" and real:
        return source.placed("q", q[:1].contiguous(), "plain", "odd address").expand(shape)
    return source.placed("q", q, "plain", "odd address", "odd rows", "odd tokens", "half", "transposed")


def _index(source: _Source, name: str, values: Tensor) -> Tensor:
    return source.placed(name, values.to(source.pick(name, torch.int32, torch.int64)), "plain", "spread", "odd address")


def _selection(
    source: _Source, arguments: dict[str, Any], lengths: list[tuple[int, int]], tokens: int, index_dtype: torch.dtype
) -> None:
    """Selected positions: none twice, -1 between, some after the query's own; anything in padding, and after topk_length."""
    k = source.pick("k", 0, 1, 5, 16, 33)
    selected = torch.full((tokens, k), FAR, dtype=torch.int64)
    counts = torch.full((tokens,), source.pick("lengths of padding", -1, FAR), dtype=torch.int64)
    token = 0
    for new, length in lengths:
        for _ in range(new):
            drawn = torch.tensor(source.random.sample(range(length), min(k, length)), dtype=torch.int64)
            row = torch.cat([drawn, torch.full((k - len(drawn),), -1)])[torch.randperm(k, generator=source.generator)]
            selected[token] = row.masked_fill(torch.rand(k, generator=source.generator) < 0.2, -1)
            counts[token] = source.random.randint(0, k)
            token += 1
    if source.maybe("topk_length"):
        beyond = torch.arange(k) >= counts[:, None]
        selected = selected.masked_fill(beyond & (torch.rand(tokens, k, generator=source.generator) < 0.3), -5)
        arguments["topk_length"] = _index(source, "topk_length", counts)
    arguments["topk_indices"] = source.placed("indices", selected.to(index_dtype), "plain", "odd rows", "odd address")
    if source.maybe("max_query_len"):
        arguments["max_query_len"] = max((new for new, _ in lengths), default=0)


def _bounds(source: _Source, arguments: dict[str, Any], lengths: list[tuple[int, int]]) -> None:
    """What the host knows of the lengths."""
    forms: tuple[Callable[[list[int]], Any], ...] = (list, tuple, lambda values: list(np.array(values, dtype=np.int64)))
    for name, column in (("query_lens_host", 0), ("seq_lens_host", 1)):
        if source.maybe(name, 0.85):
            arguments[name] = source.random.choice(forms)([one[column] for one in lengths])
    longest = max((new for new, _ in lengths), default=0)
    most = max((length for new, length in lengths if new), default=0)
    if source.maybe("max_query_len", 0.4):
        arguments["max_query_len"] = longest + source.pick("more", 0, 3)
    if source.maybe("max_seq_len", 0.4):
        arguments["max_seq_len"] = most + source.pick("more", 0, 0, 40)


def _options(source: _Source, arguments: dict[str, Any], shape: tuple[int, int, int], real: int, dtype: torch.dtype) -> None:
    """Scale, log-sum-exp, gate, out, backend."""
    dim = shape[2]
    arguments["scale"] = source.pick("scale", *SCALES)
    arguments["return_lse"] = source.maybe("lse")
    gate, heads = source.normal(*shape, dtype=dtype), None
    gate[real:] = math.nan
    if source.maybe("gate"):
        if source.maybe("gate next to out", 0.3):
            heads = torch.full((*shape[:2], 2 * dim), 7, dtype=dtype, device=source.device)
            arguments["gate"] = heads[..., dim:].copy_(gate)
        else:
            arguments["gate"] = source.placed("gate", gate, "plain", "odd address", "odd rows", "half", "transposed")
    if heads is not None:
        arguments["out"] = heads[..., :dim]
    elif source.maybe("out"):
        out = torch.full(shape, math.nan, dtype=dtype)
        arguments["out"] = source.placed("out", out, "plain", "odd address", "odd rows", "odd tokens", "half")
    if source.maybe("reference", 0.1):
        arguments["backend"] = "reference"


@dataclass
class Exact:
    """Results in float64, and the sizes that rounding errors are measured by."""

    o: Tensor  # [tokens, heads, D]
    lse: Tensor  # [tokens, heads]
    spread: Tensor  # [tokens, heads, D]: the same sum of absolute values
    reach: Tensor  # [tokens, heads]: largest sum of absolute products of a score
    most: Tensor  # [tokens, heads]: positions times the largest value


def exact(drawn: Drawn) -> Exact:
    """One query and key head at a time."""
    arguments = drawn.arguments
    q, (k_cache, v_cache) = arguments["q"].cpu().double(), (x.cpu() for x in arguments["kv_cache"])
    tables, gate, indices = (None if (x := arguments.get(name)) is None else x.cpu() for name in _READ)
    counts = None if arguments.get("topk_length") is None else arguments["topk_length"].tolist()
    tokens, heads, dim = q.shape
    kv_heads, group = k_cache.shape[2], heads // k_cache.shape[2]
    scale = dim**-0.5 if arguments["scale"] is None else arguments["scale"]
    found = Exact(torch.zeros_like(q), torch.full((tokens, heads), -math.inf).double(), *_zeros(q))
    token = 0
    for n, (new, length) in enumerate(drawn.lengths):
        if not new:
            continue
        assert tables is not None
        pages = tables[n, : -(-length // k_cache.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:length].double() for cache in (k_cache, v_cache))
        for own in range(length - new, length):
            seen = torch.arange(own + 1)
            if indices is not None:
                row = indices[token] if counts is None else indices[token, : counts[token]]
                seen = row[(row >= 0) & (row <= own)].long()
            for kv in range(kv_heads) if len(seen) else ():
                at = slice(kv * group, (kv + 1) * group)
                k, v = keys[seen, kv], values[seen, kv]
                score = q[token, at] @ k.T * scale
                shares = score.softmax(-1)
                found.o[token, at], found.lse[token, at] = shares @ v, score.logsumexp(-1)
                found.spread[token, at] = shares @ v.abs()
                found.reach[token, at] = (q[token, at].abs() @ k.abs().T).amax(-1) * abs(scale)
                found.most[token, at] = len(seen) * v.abs().max()
            token += 1
    if gate is not None:
        weight = torch.where(found.lse.isfinite()[..., None], gate.double().sigmoid(), 0.0)
        found.o, found.spread = found.o * weight, found.spread * weight
    return found


_READ = ("block_tables", "gate", "topk_indices")


def _zeros(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros_like(q[..., 0]), torch.zeros_like(q[..., 0])


def fault(drawn: Drawn, o: Tensor, lse: Tensor | None) -> str | None:
    """What is wrong with the results; None where they are right.

    An entry of o may be wrong by roundings: of a weight, of itself, and of itself with the gate; by the scores' in float32;
    and by weights below the dtype's range.
    """
    q, out, want = drawn.arguments["q"], drawn.arguments.get("out"), exact(drawn)
    if o.shape != q.shape or o.dtype != q.dtype or (out is not None and o is not out):
        return f"o is a tensor {o.dtype} {list(o.shape)}, or not out"
    have = o.cpu().double()
    unit = ROUNDING[o.dtype]
    allowed = 1.25 * unit * (want.spread + 2 * want.o.abs())
    allowed += (2**-20 * (1 + want.reach) * want.spread.amax(-1) + 2**-24 * want.most)[..., None]
    wrong = ~((have - want.o).abs() <= allowed)
    if bool(wrong.any()):
        token, head, d = wrong.nonzero()[0].tolist()
        place = f"{int(wrong.sum())} entries of o, first [{token}, {head}, {d}]"
        return f"{place}: {float(have[token, head, d])} instead of {float(want.o[token, head, d])}"
    if (lse is not None) != drawn.arguments["return_lse"]:
        return "the log-sum-exp is there, or is not"
    if lse is None:
        return None
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32:
        return f"lse is a tensor {lse.dtype} {list(lse.shape)}"
    got = lse.cpu().double()
    if not torch.equal(got == -math.inf, want.lse == -math.inf):
        return "lse is -inf in other rows"
    difference = torch.where(want.lse.isfinite(), got - want.lse, 0.0).abs()
    wrong = ~(difference <= 2**-17 * (1 + want.lse.abs().nan_to_num(posinf=0) + want.reach) + (1e-3 if lse.is_cuda else 0))
    if bool(wrong.any()):
        token, head = wrong.nonzero()[0].tolist()
        return f"lse [{token}, {head}]: {float(got[token, head])} instead of {float(want.lse[token, head])}"
    return None


def _storages(drawn: Drawn) -> dict[int, Tensor]:
    """Memory of every argument, by address, as bytes."""
    found = {}
    for value in drawn.arguments.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, Tensor) and x.untyped_storage().nbytes():
                memory = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
                found[memory.data_ptr()] = memory
    return found


def check(seed: int, device: Device, operator: str | None = None, *, few_variants: bool = False, is_long: bool = False) -> None:
    """Runs the call of a seed twice; raises AssertionError, which names the seed and the choices, where something is wrong."""
    drawn = draw(seed, device, operator, few_variants=few_variants, is_long=is_long)
    out = drawn.arguments.get("out")
    before = {address: memory.clone() for address, memory in _storages(drawn).items()}
    try:
        for attempt in ("first", "repeated"):  # the second by a plan
            wrong = fault(drawn, *drawn.run())
            assert wrong is None, f"{attempt} call: {wrong}"
        for address, memory in _storages(drawn).items():
            may_differ = torch.zeros_like(memory, dtype=torch.bool)
            if out is not None and out.untyped_storage().data_ptr() == address:
                size = out.element_size()
                strides = (*[stride * size for stride in out.stride()], 1)
                may_differ.as_strided((*out.shape, size), strides, out.storage_offset() * size).fill_(True)
            assert bool(((memory == before[address]) | may_differ).all()), "more than out was written"
    except Exception as error:
        error.add_note(f"{drawn.operator}: {drawn.form}")
        raise
