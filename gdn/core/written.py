"""Written arguments that are views, under torch.compile.

A compiler replaces an operator that writes by one that returns new values of the *bases* of its written arguments. An argument
that is a view made in the compiled function is replaced by its base, and by the place of the view in it; an argument of the
compiled function is its own base. Inductor then writes in place again. In torch 2.8 to 2.14 it does so at the wrong place

    where the place depends on a symbolic size (`kv[1]` of a `kv` whose number of blocks is dynamic): it is taken to be 0
    where the base does not start its storage: its own offset counts twice, or not at all
    where two bases share a storage (`kv[0]` and `kv[1]` as arguments): the second is copied, from and to the wrong place

`place_written`, which a traced call passes on its way to the operator, makes the first and the last of these right and refuses
the second. It is an operator of torch.library that decomposes: it runs with the tensors that the compiler replaces, which know
their bases, and leaves nothing in the graph of a call without such views. Export keeps it, for torch.compile of the program.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from gdn.core.check import bad_value

_library = torch.library.Library("gdn", "FRAGMENT")
_library.define("write_nothing(Tensor(a!) x) -> ()", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
_library.impl("write_nothing", lambda x: None, "CompositeExplicitAutograd")
torch.library.register_fake("gdn::write_nothing", lambda x: None, lib=_library)
_library.define("place_written(Tensor[] tensors, str[] names) -> ()", tags=(torch.Tag.pt2_compliant_tag,))

OUTSIDE = "take views outside of the compiled function"


def _place(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """Prepares the written arguments of one traced call for a compiler. Does nothing to tensors with memory.

    Sizes that the place of a view depends on become constants of the compiled function. Of arguments that share a storage, all
    but the first pass an operator that writes nothing: to a compiler its result is a new tensor, which it can write in place.

    Raises ValueError, naming the argument, where a view cannot be written by compiled code.
    """
    if torch.compiler.is_exporting():  # a program that torch runs, or compiles later
        return
    storages: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if isinstance(tensor, FunctionalTensor):  # a compiler is about to replace the operator
            base = _base(tensor)
            if base is not None:
                _fix_place(name, tensor, base)
            root = tensor if base is None else base
            key = torch._from_functional_tensor(root.elem).untyped_storage()._cdata
            if storages.setdefault(key, (name, root))[1] is not root:
                torch.ops.gdn.write_nothing(root)
        elif isinstance(tensor, FakeTensor):  # Dynamo is tracing
            first, other = storages.setdefault(tensor.untyped_storage()._cdata, (name, tensor))
            if other.dtype != tensor.dtype:
                expected = f"a tensor of dtype {other.dtype}, as {first}, whose memory it shares, or memory of its own"
                bad_value(name, f"in a compiled call {expected}", tensor.dtype)


_library.impl("place_written", _place, "CompositeImplicitAutograd")
place_written = torch.ops.gdn.place_written.default


def _base(tensor: FunctionalTensor) -> Any:
    """The tensor that a view was made from in the compiled function; None for another tensor."""
    return tensor._inference_mode_base if torch.is_inference_mode_enabled() else tensor._base


def _is_true(condition: Any) -> bool:
    """Whether a condition on sizes holds for all calls of the compiled function."""
    # Here, because it loads sympy, which takes longer than all of `import gdn`; a compiler has loaded it.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _fix_place(name: str, view: Tensor, base: Tensor) -> None:
    """Makes the place of a view in its base a constant, unless it is a slice, whose bounds compilers know."""
    if not _is_true(base.storage_offset() == 0):
        expected = "in a compiled call an argument of the compiled function, or a view of one at storage offset 0"
        bad_value(name, f"{expected} ({OUTSIDE})", f"a view of one at storage offset {base.storage_offset()}")
    offset = view.storage_offset()
    if isinstance(offset, torch.SymInt) and not _is_slice(view, base):
        for symbol in offset.node.expr.free_symbols:
            offset.node.shape_env.evaluate_expr(symbol)  # a guard: with another value the function is compiled again


def _is_slice(view: Tensor, base: Tensor) -> bool:
    """Whether a view is its base, but for the bounds of one dimension."""
    if view.dim() != base.dim():
        return False
    strides = zip(view.stride(), base.stride(), strict=True)
    sizes = zip(view.shape, base.shape, strict=True)
    return all(_is_true(one == other) for one, other in strides) and (
        sum(not _is_true(one == other) for one, other in sizes) == 1
    )
