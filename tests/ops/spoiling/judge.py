"""Makes a spoilt call and holds it to its row of the table."""

import contextlib
import logging
import random
import re
from collections.abc import Iterator
from typing import Any

import torch

from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.ops.spoiling.call import Call
from tests.ops.spoiling.calls import OPERATORS, good_call
from tests.ops.spoiling.live import changed_elements, use_of
from tests.ops.spoiling.memory import Snapshot, duplicated
from tests.ops.spoiling.spoilings import SPOILINGS, Spoiled
from tests.ops.spoiling.table import Row, rows
from tests.ops.spoiling.verdict import Verdict

Tensor = torch.Tensor
# Entries of pairs go by these names too: the function's own, and that of the operator it calls.
ALIASES = {"kv[0]": {"kv", "k"}, "kv[1]": {"kv", "k_scale"}, "kv_cache[0]": {"kv_cache"}, "kv_cache[1]": {"kv_cache"}}
# Sums in another order: largest difference, as a share of the largest value. One step of the dtype, twice.
ROUNDING = {
    torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 2**-48, torch.float8_e4m3fn: 2**-3,
}  # fmt: skip


# What a refusal says after the argument's name, by the spoiling.
_SHAPE = r"expected .*, got (shape \[.*\](, strides \(.*\))?|\d+.*)"
_MESSAGES = {
    "its values as a list": "expected a torch.Tensor, got list",
    "a numpy array": "expected a torch.Tensor, got ndarray",
    "a Fraction instead": "expected a torch.Tensor, got Fraction",
    "a str instead": "expected a torch.Tensor, got str",
    "1.0 instead": "expected a torch.Tensor, got float",
    "None instead": "expected a torch.Tensor, got NoneType",
    "sparse COO": r"expected a dense tensor, got torch\.sparse_coo",
    "sparse CSR": r"expected a dense tensor, got torch\.sparse_csr",
    "on the meta device": "expected a tensor on (cpu, got a tensor on meta|meta, got a tensor on cpu)",
    "0-d": r"expected shape \[.*\].*, got shape \[\]",
    "two dims more": r"expected shape \[.*\].*, got shape \[.*\]",
    "one shorter": _SHAPE,
    "one longer": _SHAPE,
    "a slot beyond the pool": r"expected slots below \d+ \(or null, <= -?\d+\), got \d+ at \[.*\]",
    "a page beyond the cache": r"expected a page in \[0, \d+\), got \d+",
    "decreases": r"expected offsets that never decrease, got \d+ then \d+ at index \d+",
    "starts at 1": "expected a first offset of 0, got 1",
    "ends beyond the tokens": r"expected a last offset of at most \d+ tokens, got \d+",
    "no offset": r"expected (at least one offset|shape \[.*\]), got shape \[0\]",
    "-2": "expected an int >= -1 that fits int32, got -2",
    "-1.0": r"expected a (finite )?number >=? 0, got -1\.0",
    "one tap": "expected .*w >= 2.*, got .*",
    "too few columns": r"expected (at least \d+ columns|.*columns >= \d+\]), got .*",
    "torch.float16": r"expected torch\.float32 or torch\.bfloat16, got torch\.float16",
    "a page size of 6": "expected .*multiple of 4.*, got .*6.*",
    "nan": "expected a finite number, got nan|expected an int, got float",
    "inf": "expected a finite number, got inf",
    "10**400": "expected a finite number, got inf",
    "a word in capitals": r"expected '.*' or ('.*'|None), got '.*'",
    "an unknown word": r"expected '.*' or ('.*'|None), got '.*'",
}
# Flags and numbers of another type.
_TYPES = {
    "a list": "list", "a dict": "dict", "a str": "str", "1": "int", "1.0": "float", "None": "NoneType", "a 0-d tensor": "Tensor",
}  # fmt: skip


class Wrong(Exception):
    """The call did not do what its row says."""


def spoilt(row: Row, seed: int) -> tuple[Call, Spoiled] | None:
    """The good call of a seed and what the row makes of it; None where it does not apply to this call."""
    good = good_call(row.operator, seed)
    if row.use and row.use != use_of(good, row.argument):
        return None
    try:
        spoiled = SPOILINGS[row.spoiling](good, row.argument, random.Random(seed))
    except Exception as error:
        raise Wrong(f"the spoiling itself failed: {type(error).__name__}: {error}") from error
    return None if spoiled is None else (good, spoiled)


def check(row: Row, seed: int) -> bool:
    """Holds one row with the call of a seed: False where it does not apply, `Wrong` where it does not hold."""
    found = spoilt(row, seed)
    if found is None:
        return False
    good, spoiled = found
    if row.verdict.errors:
        _refused(row, good, spoiled)
    else:
        _accepted(row, good, spoiled)
    return True


def draw(seed: int) -> Row:
    """A row that applies to the call of this seed: operator, argument and spoiling each drawn evenly."""
    rng = random.Random(seed)
    operator = rng.choice(list(OPERATORS))
    arguments = list(dict.fromkeys(row.argument for row in rows(operator)))
    for argument in rng.sample(arguments, len(arguments)):
        candidates = list(rows(operator, argument))
        for row in rng.sample(candidates, len(candidates)):
            if spoilt(row, seed) is not None:
                return row
    raise Wrong(f"no row of {operator} applies to the call of seed {seed}")


def _refused(row: Row, good: Call, spoiled: Spoiled) -> None:
    snapshot = Snapshot([*good.tensors().values(), *spoiled.call.tensors().values()])
    try:
        with spoiled.around():
            spoiled.call.run()
    except row.verdict.errors as error:
        named = set(re.findall(r"[A-Za-z_]\w*", str(error).split(":")[0]))
        allowed = {row.argument} | spoiled.names
        allowed |= {alias for name in allowed for alias in ALIASES.get(name, ())}
        if not named & allowed:
            raise Wrong(f"the error does not name {' or '.join(sorted(allowed))}: {_short(error)}") from None
        if not re.fullmatch(rf"[\w\[\], ]+: ({_message(row.spoiling)})", str(error), re.DOTALL):
            raise Wrong(f"the message is of another form: {_short(error)}") from None
    except Exception as error:
        raise Wrong(f"{type(error).__name__} instead: {_short(error)}") from None
    else:
        raise Wrong("accepted") from None
    if not snapshot.is_kept():
        raise Wrong("refused, but a tensor was changed before")


def _message(spoiling: str) -> str:
    """Pattern of a refusal's message, after the argument's name: what was expected and what came."""
    kind, _, dtype = spoiling.partition(" ")
    if kind == "dtype":
        return rf"expected dtype .*, got torch\.{dtype}"
    if spoiling in _TYPES:
        return f"expected .+, got {_TYPES[spoiling]}"
    return _MESSAGES.get(spoiling, "expected .+, got .+")


def _accepted(row: Row, good: Call, spoiled: Spoiled) -> None:
    model = spoiled.model or good
    tensors: dict[int, Tensor] = {}
    storages: dict[int, Tensor] = {}
    model = model.with_values({path: duplicated(tensors, storages, x) for path, x in model.tensors().items()})
    with torch.no_grad():
        expected = model.run()
    call = spoiled.call
    given = call.tensors()
    graphs = {path: x.grad_fn for path, x in given.items()}
    masks = changed_elements(call)
    snapshot = Snapshot(given.values())
    with _warnings(row.verdict is Verdict.COPIED) as messages, spoiled.around():
        try:
            result = call.run()
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {_short(error)}") from None
    _compare("the result", result, expected, spoiled.is_exact)
    for path in masks:
        other = model.get(path)
        if isinstance(other, Tensor):
            _compare(path, given[path], other, spoiled.is_exact)
    for path, mask in masks.items():
        snapshot.is_kept_but(given[path], mask)
    if not snapshot.is_kept():
        raise Wrong("accepted, but more was written than the operator says")
    for path, x in given.items():
        if x.grad_fn is not graphs[path]:
            raise Wrong(f"{path} became part of a graph")
    for x in _leaves(result):
        if x.requires_grad and all(x is not other for other in given.values()):
            raise Wrong("the result requires grad")
    if row.verdict is Verdict.COPIED:
        name = row.argument.split("[")[0]
        naming = [message for message in messages if message.split(":")[0] in {name, *ALIASES.get(row.argument, ())}]
        if len(naming) != 1:
            raise Wrong(f"{len(naming)} warnings name {row.argument}, expected one")


@contextlib.contextmanager
def _warnings(is_wanted: bool) -> Iterator[list[str]]:
    """Warnings of the project's logger, given anew."""
    messages: list[str] = []
    if not is_wanted:
        yield messages
        return
    env.reload()  # what was said once is said again
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gdn")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for entry in value for x in _leaves(entry)] if isinstance(value, tuple | list) else []


def _compare(name: str, actual: Any, expected: Any, is_exact: bool) -> None:
    if not isinstance(expected, Tensor):
        if type(actual) is not type(expected) or isinstance(expected, tuple | list) and len(actual) != len(expected):
            raise Wrong(f"{name} is a {type(actual).__name__}, expected a {type(expected).__name__}")
        if isinstance(expected, tuple | list):
            for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
                _compare(f"{name}[{i}]", one, other, is_exact)
        return
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        got = f"{actual.dtype} {list(actual.shape)}" if isinstance(actual, Tensor) else type(actual).__name__
        raise Wrong(f"{name} is {got}, expected {expected.dtype} {list(expected.shape)}")
    actual, expected = actual.detach(), expected.detach()
    if same_bits(actual, expected):
        return
    if is_exact or not expected.is_floating_point():
        raise Wrong(f"{name} differs from the good call's")
    want, have = expected.double(), actual.double()
    finite = want.isfinite()
    if not torch.equal(want[~finite].nan_to_num(nan=1.5), have[~finite].nan_to_num(nan=1.5)):
        raise Wrong(f"{name} differs from the good call's where that is not finite")
    if not finite.any():
        return
    difference, size = (have - want)[finite].abs().max(), want[finite].abs().max()
    if not difference <= ROUNDING[expected.dtype] * size:
        raise Wrong(f"{name} differs from the good call's by {float(difference):.3g} of {float(size):.3g}")


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 200 else text[:200] + " ..."
