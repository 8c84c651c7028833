"""The references of all operators as attributes of one object, under the names of the public functions."""

import types

import gdn
from gdn.core.call import operator_named

COMPOSED = ("fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "ring_shape", "explain", "warmup")
NAMES = [name for name in gdn.__all__ if not name.startswith("_") and name not in COMPOSED]

reference = types.SimpleNamespace(**{name: operator_named(name).reference for name in NAMES})
