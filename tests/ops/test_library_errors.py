"""Compiled calls refuse what eager ones refuse: TypeError or ValueError, or torch's wrapper of it, that names the argument."""

import random
import re
from typing import Any

import pytest
import torch

import gdn
from tests.ops.library_calls import BY_TOKENS, compiled
from tests.ops.spoiling import judge
from tests.ops.spoiling.calls import OPERATORS

Arguments = dict[str, Any]

# What a compiler takes for something else, or refuses itself.
NOT_HELD = {
    "a numpy array",  # a tensor to torch.compile
    "sparse COO", "sparse CSR",  # torch.compile refuses them
    "on the meta device", "10**400",  # no number of torch's schemas
}  # fmt: skip
PER_OPERATOR = 3
MORE_PER_OPERATOR = 8  # in the tests that take minutes


def columns_of(name: str, arguments: Arguments) -> int:
    return 4 * 4 + 3 if name == "expand_topk_groups" else arguments["k" if name == "topk_indices" else "topk"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["topk_indices", "indexer_topk", "paged_indexer_topk", "expand_topk_groups"])
def test_out_of_a_selection(name: str, dynamic: bool) -> None:
    function, arguments = getattr(gdn, name), BY_TOKENS[name](6)
    columns = columns_of(name, arguments)
    good = torch.zeros(6, columns, dtype=torch.int32)
    assert compiled(function, dynamic=dynamic)(**arguments | {"out": good}) is good
    bad = {
        "elements that do not overlap": good[:1].expand(6, -1),
        "a contiguous last dimension": good[:, :1].expand(-1, columns),
        "dtype int32": good.long(),
    }
    for text, out in bad.items():
        with pytest.raises(Exception, match=f"out: expected {text}"):
            compiled(function, dynamic=dynamic)(**arguments | {"out": out})


@pytest.mark.parametrize(
    ("name", "argument", "value", "text"),
    [
        ("chunk_gated_delta_rule", "output_final_state", 1, "a bool, got int"),
        ("chunk_gated_delta_rule", "null_slot", True, "an int, got bool"),
        ("topk_indices", "k", object(), "an int, got object"),
        ("mqa_logits", "relu", 1.0, "a bool, got float"),
        ("mqa_logits", "scale", "1", "a number, got str"),
        ("quantize_fp8", "x", [1.0], "a torch.Tensor, got list"),
        ("paged_mqa_logits", "max_context_len", True, "an int, got bool"),
        ("causal_conv1d_fn", "activation", 3, "a str, got int"),
    ],
)
def test_a_flag_of_another_kind(name: str, argument: str, value: Any, text: str) -> None:
    """A schema would take True for 1, and names nothing."""
    with pytest.raises(Exception, match=f"{argument}: expected {text}"):
        compiled(getattr(gdn, name))(**BY_TOKENS[name](6) | {argument: value})


@pytest.mark.parametrize("count", [PER_OPERATOR, pytest.param(MORE_PER_OPERATOR, marks=pytest.mark.cover)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_of_the_table_of_spoilings(operator: str, count: int) -> None:
    """Rows that refuse, drawn: compiled calls refuse them too, and name the argument or what it shares memory with."""
    source, held = random.Random(operator), 0
    while held < count:
        row = source.choice([row for row in judge.rows(operator) if row.verdict.errors and row.spoiling not in NOT_HELD])
        found = judge.spoilt(row, source.randrange(10**6))
        if found is None:
            continue
        held += 1
        spoiled = found[1]
        names = {name.split("[")[0] for name in {row.argument} | spoiled.names}
        with spoiled.around(), pytest.raises(Exception) as error:
            compiled(getattr(gdn, operator))(**spoiled.call.arguments)
        named = {
            word for before in re.findall(r"([\w\[\], ]+): expected", str(error.value)) for word in re.findall(r"\w+", before)
        }
        names |= {"k", "k_scale"} if "kv" in names else set()
        assert named & names, (row, str(error.value))
