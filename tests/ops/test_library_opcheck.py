"""torch.library.opcheck over every operator, in several forms each."""

from typing import Any

import pytest
import torch

from tests.ops.library_calls import REGISTERED, as_tuple, copied, of_schema, seeded

SEEDS = range(40)
FORMS = 1  # of a call, with FP8 tensors and without
MORE_FORMS = 2  # in the tests that take minutes
FP8 = torch.float8_e4m3fn
# torch's check of the schema compares tensors with allclose, which has no FP8.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ALL = ("test_schema", *WITHOUT_SCHEMA)


def has_fp8(operator: Any, arguments: dict[str, Any]) -> bool:
    tensors = [*arguments.values(), *as_tuple(operator(**copied(arguments)))]
    return any(isinstance(x, torch.Tensor) and x.dtype == FP8 for x in tensors)


@pytest.mark.parametrize("most", [FORMS, pytest.param(MORE_FORMS, marks=pytest.mark.cover)])
@pytest.mark.parametrize("name", REGISTERED)
def test_opcheck(name: str, most: int) -> None:
    forms = {True: 0, False: 0}
    for seed in SEEDS:
        operator, arguments = of_schema(name, seeded(name, seed).arguments)
        is_fp8 = has_fp8(operator, arguments)
        if forms[is_fp8] < most:
            torch.library.opcheck(operator, (), arguments, test_utils=WITHOUT_SCHEMA if is_fp8 else ALL)
            forms[is_fp8] += 1
    assert forms[False] == most or name == "quantize_fp8", "no call was held to the schema"
