"""Expected results of the operators' calls, from the oracles of their families: in float64 and independent of the references."""

from gdn.ops.attention import oracle as attention
from gdn.ops.delta_rule import oracle as delta_rule
from gdn.ops.indexer import oracle as indexer
from gdn.ops.layer_step import oracle as layer_step
from gdn.testing.expected import Call, Expected, Pairs

EXPECTED: Expected = {**layer_step.EXPECTED, **delta_rule.EXPECTED, **indexer.EXPECTED, **attention.EXPECTED}


def pairs(call: Call) -> Pairs:
    """Values that the call returned or updated, each with its expected content."""
    return EXPECTED[call.operator](call, call.before)
