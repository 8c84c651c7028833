"""No kernel narrows an index before it is compared.

What such a narrowing does shows only on a GPU (tests/gpu/test_index_width.py); that there is none shows in the text: whatever is
read from a tensor of indices stays in its own width, becomes int64, or goes through `kernels_cute.common.memory.narrowed`.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "kernels_cute").glob("**/*.py"), *(ROOT / "kernels_tl").glob("**/*.py")])
# Token offsets, which the caller promises to lie within the tokens, and the checkpoint offsets of the chunk operator, which are
# int32 when they arrive.
OFFSETS = {"bounds", "gOffsets", "cu_seqlens", "offsets"}


def tensor_in(node: ast.AST) -> str | None:
    """A global tensor of which an element is read in an expression, but for the offsets and what they are indexed with."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        name = node.value.id
        return None if name in OFFSETS or name.startswith("s_") else name  # s_: shared memory
    return next(filter(None, map(tensor_in, ast.iter_child_nodes(node))), None)


def narrowings(text: str) -> list[tuple[int, str]]:
    """(line, tensor) of every Int32(x[...]), x[...].to(Int32) and T.cast(x[...], "int32") of a global tensor of indices."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        narrowed: ast.AST | None = None
        if name == "Int32" and len(node.args) == 1:
            narrowed = node.args[0]
        elif name == "to" and isinstance(node.func, ast.Attribute) and node.args and ast.unparse(node.args[0]).endswith("Int32"):
            narrowed = node.func.value
        elif name == "cast" and len(node.args) == 2 and ast.unparse(node.args[1]) == "'int32'":
            narrowed = node.args[0]
        tensor = None if narrowed is None else tensor_in(narrowed)
        if tensor is not None:
            found.append((node.lineno, tensor))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_index_is_narrowed_as_it_is_read(path: Path) -> None:
    assert narrowings(path.read_text()) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("slot = Int32(gIndices[sequence])", True),
        ("slot = cutlass.Int32(gIndices[sequence, column])", True),
        ("position = gPositions[token].to(Int32)", True),
        ('slot = T.cast(indices[n], "int32")', True),
        ("group = Int32(gGroups[token, column] * 2)", True),
        ("begin = Int32(bounds[sequence])", False),
        ('begin = T.cast(cu_seqlens[place[0]], "int32")', False),
        ("first = Int32(bounds[order[rank]]) // 64 + Int32(gSlots[rank])", True),
        ("slot = Int64(gIndices[sequence])", False),
        ("slot = narrowed(gIndices[sequence])", False),
        ("count = Int32(5)", False),
    ],
)
def test_the_search_finds_narrowings(line: str, found: bool) -> None:
    assert bool(narrowings(line)) == found
