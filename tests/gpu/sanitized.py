"""A few small calls of a chunk kernel, for compute-sanitizer: python3 -m tests.gpu.sanitized <backend> <name>.

Judged too, loosely: a tool that slows a kernel down a hundredfold shows hazards that a fast run hides.
"""

import sys
from typing import Any

import torch

from gdn.testing.compare import token_error
from gdn.testing.inputs import chunk_problem
from gdn.testing.oracle import oracle_of
from tests.gpu import cases
from tests.gpu.chunk import FUNCTION, arguments_of
from tests.gpu.delta_rule import copied, run

RAGGED: dict[str, Any] = {"lengths": [130, 0, 1, 64, 257, 63], "null_sequences": [3], "padded_tokens": 10}
_RAW = {"gate_dtype": "bfloat16", "use_gate": True, "beta_dtype": "bfloat16", "use_beta_sigmoid": True}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of the problem, its inputs
    "pool": ({**cases.MAIN, **_RAW, "has_mask": True}, RAGGED),
    "64": ({**cases.MAIN, "head_k_dim": 64, "head_v_dim": 64, "has_mask": True}, RAGGED),
    "long": ({**cases.MAIN}, {"lengths": [1300]}),  # few heads: split
    "many": ({**cases.MAIN, "num_q_heads": 8, "num_k_heads": 8, "num_v_heads": 8}, {"lengths": [70, 3, 64] * 8}),
    "checkpoints": ({**cases.MAIN, "has_checkpoints": True}, RAGGED),
    "padded": ({**cases.MAIN, "head_k_dim": 100, "head_v_dim": 100}, RAGGED),
}


def main(backend: str, name: str) -> None:
    fields, inputs = CALLS[name]
    arguments = arguments_of(chunk_problem(**fields), torch.device("cuda"), **inputs)
    expected = oracle_of(copied(arguments))
    o, _ = run(FUNCTION, arguments, backend)
    torch.cuda.synchronize()
    found = token_error(o, expected.o, expected.offsets)
    assert found.within(0.02, 0.1), f"{found}"


if __name__ == "__main__":
    main(*sys.argv[1:])
