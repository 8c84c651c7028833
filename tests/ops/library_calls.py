"""Calls of every operator for the tests of torch.library: by a number of tokens, and seeded ones in all their forms; and what
these tests do with calls: copy, compile and compare them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import gdn
from gdn.ops.attention.attention import _dense
from gdn.ops.attention.sparse_attention import attend
from gdn.testing.compare import same_bits
from tests.described import plain
from tests.ops.spoiling.call import Call
from tests.ops.spoiling.calls import OPERATORS, good_call

Arguments = dict[str, Any]
# Forms of other operators: no operators of their own.
COMPOSED = {"fp8_mqa_logits", "fp8_paged_mqa_logits"}
REGISTERED = [name for name in OPERATORS if name not in COMPOSED]


BY_TOKENS: dict[str, Callable[[int], Arguments]] = {name: partial(plain.call, name, dtype=torch.bfloat16) for name in REGISTERED}


def seeded(name: str, seed: int) -> Call:
    """A small good call. The number of gathered rows is given: without values it could not be read."""
    call = good_call(name, seed)
    if name == "gather_indexer_cache":
        call.arguments.setdefault("num_rows", int(call.arguments["cu_seqlens"][-1]))
    return call


def copied(arguments: Arguments) -> Arguments:
    """The arguments with tensors of their own."""
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def compiled(function: Any, backend: str = "aot_eager", dynamic: bool | None = None) -> Any:
    """The function compiled anew, as one graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def check_same(found: Any, given: Arguments, expected: Any, plain: Arguments) -> None:
    """Two calls have the same results, and have left the same in their arguments."""
    for have, want in zip(as_tuple(found), as_tuple(expected), strict=True):
        assert have is want is None or same_bits(have, want)
    for name, x in plain.items():
        assert not isinstance(x, torch.Tensor) or same_bits(given[name], x), name


def of_schema(name: str, arguments: Arguments) -> tuple[Any, Arguments]:
    """The registered operator, and its arguments: one that a call may write is another argument where this call does."""
    public: Any = getattr(gdn, name)
    if name in ("sparse_attention", "attention"):
        public, (keys, values) = attend if name == "sparse_attention" else _dense, arguments["kv_cache"]
        missing = dict.fromkeys(public.operator.signature.parameters) | {"return_lse": False, **arguments}
        unknown = ("kv_cache", "return_lse") if name == "sparse_attention" else ("kv_cache",)
        arguments = {key: value for key, value in missing.items() if key not in unknown}
        arguments |= {"k_cache": keys, "v_cache": values}
    bound = public.operator.signature.bind(**arguments)
    bound.apply_defaults()
    given = dict(bound.arguments)
    for argument, condition in public.operator.writes.items():
        written = argument + "_written"
        if any(one.name == written for one in getattr(torch.ops.gdn, name).default._schema.arguments):
            given |= {written: None}
            if condition(bound.arguments):
                given |= {written: given[argument], argument: None}
    return getattr(torch.ops.gdn, name).default, given
