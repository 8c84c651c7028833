"""torch.ops.gdn has every public operator after `import gdn` alone."""

import subprocess
import sys

import gdn
from tests.ops.library_calls import COMPOSED, REGISTERED

# Functions of another kind: forms of operators in other libraries' argument order, and what computes nothing.
NO_OPERATORS = {*COMPOSED, "get_paged_mqa_logits_metadata", "explain", "warmup", "__version__"}


def test_every_operator_is_known() -> None:
    assert set(gdn.__all__) - NO_OPERATORS == set(REGISTERED)


def test_a_fresh_process_has_them_all() -> None:
    program = f"import gdn, torch; print(all(hasattr(torch.ops.gdn, name) for name in {REGISTERED!r}))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "True\n"
