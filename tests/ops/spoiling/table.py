"""Table of what every public operator accepts and what it refuses: operator, argument, spoiling -> verdict.

To look something up: find the function in the module of its family (`tests/described/`), then the argument; its kind
(`kinds.py`, `kinds_sequences.py`) has the rows that all arguments of the kind share, the rest is written there. The kinds of
flags, numbers and words follow from the signature, and so does whether an argument may be left out; a family's module has what a
signature does not say. `python -m tests.ops.spoiling OPERATOR ARGUMENT` prints the rows of an argument, and with a spoiling and a
seed makes that call. The argument "*" is the call as a whole.

Decided here, where the contract is silent:
- A tensor that is only read has any strides and any address; only the large ones (q, k, v, x, z, projections, raw keys)
  say so when they must be copied, on the CPU too. The exception is what is read in place because a copy would be too
  large: caches.
- out of the recurrence, the convolution, the decode step and the attention is aligned to 16 bytes and contiguous in its
  last dim; out of scores and indices needs the last dim alone, as do the rows of a ring.
- Counts, null_slot and flags are Python's int and bool; numbers may also be numpy scalars, never tensors or Fractions.
- A tensor of a dtype that the operator does not take is a TypeError, out_dtype included; a tensor elsewhere or of another
  size is a ValueError; so is an unknown word, while anything but a word is a TypeError.
- A cache that is only read is refused too where its pages overlap: it is an engine's error in any case.
- On the CPU all that GDN_VALIDATE=1 finds elsewhere is found always: starts of ranges below 0, sequences longer than their
  block table (a length beyond max_context_len alone is none), rows written twice. Padding by the operators' contracts stays
  padding, accepted counts out of range included.
- Tensors made under inference_mode are taken outside of it too, written ones included: a kernel could not tell.
- mqa_logits and its relatives take q in all dtypes that prepare_indexer returns: bfloat16 caches then hold the keys.
- Not in the table: one slot that two live sequences read and neither writes (final_state_indices; the contract forbids it, and
  it harms nothing), keys that max_seqlen_k leaves out, FP8 keys without scales in fp8_mqa_logits, numpy integers as counts.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import gdn
from gdn.core.kinds import without_words
from tests import described
from tests.ops.spoiling.kinds import (
    AT_LEAST_ONE,
    BACKEND,
    COUNT,
    EPS,
    FLAG,
    FLOAT_CALL,
    LENGTHS,
    NULL_SLOT,
    NUMBER,
    OPTIONAL_COUNT,
    OPTIONAL_FLAG,
    OPTIONAL_NUMBER,
    OPTIONAL_WORD,
    OUT_DTYPE,
    REQUIRED,
    WORD,
    Kind,
)  # fmt: skip
from tests.ops.spoiling.verdict import Verdict

# Kinds of arguments that are no tensors, by annotation; some words of the table are narrower.
_BY_ANNOTATION: dict[Any, Kind] = {
    bool: FLAG, bool | None: OPTIONAL_FLAG, int: AT_LEAST_ONE, int | None: OPTIONAL_COUNT, float: NUMBER,
    float | None: OPTIONAL_NUMBER, str: WORD, str | None: OPTIONAL_WORD, torch.dtype: OUT_DTYPE,
    Sequence[int] | None: LENGTHS,
}  # fmt: skip
_BY_NAME: dict[str, Kind] = {"backend": BACKEND, "null_slot": NULL_SLOT, "eps": EPS, "skip_rows_up_to": COUNT}

_LEFT_OUT = {("fp8_mqa_logits", "weights"), ("fp8_paged_mqa_logits", "weights")}  # annotated as in vLLM, and may be None


def _table(operator: str, special: Mapping[str, Kind]) -> dict[str, Kind]:
    """All arguments of an operator: the special ones, and those whose kind follows from the signature."""
    parameters = inspect.signature(getattr(gdn, operator)).parameters
    required = {name for name, one in parameters.items() if one.annotation is torch.Tensor and (operator, name) not in _LEFT_OUT}
    found = {name: REQUIRED | kind if name in required else kind for names, kind in special.items() for name in names.split(", ")}
    named = {name.partition(" ")[0] for name in found}
    for name, parameter in parameters.items():
        kind = _BY_NAME.get(name) or _BY_ANNOTATION.get(without_words(parameter.annotation))
        if name not in named and kind is not None:
            found[name] = kind
    return {"*": FLOAT_CALL} | found


TABLE = {operator: _table(operator, one.arguments) for operator, one in described.every().items()}


@dataclass(frozen=True)
class Row:
    operator: str
    argument: str
    spoiling: str
    verdict: Verdict
    use: str = ""  # "as a pool" or "to read", where an argument is both

    def __str__(self) -> str:
        return f"{self.operator} | {f'{self.argument} {self.use}'.strip()} | {self.spoiling}"


def rows(operator: str, argument: str | None = None) -> Iterator[Row]:
    """The rows of an operator, or of one argument of it."""
    for names, kind in TABLE[operator].items():
        for entry in names.split(", "):
            name, _, use = entry.partition(" ")
            if argument in (None, name):
                yield from (Row(operator, name, spoiling, verdict, use) for spoiling, verdict in kind.items())
