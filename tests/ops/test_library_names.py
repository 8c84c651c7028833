"""torch.ops.gdn has every public operator after `import gdn` alone."""

import subprocess
import sys

from tests.ops.library_calls import REGISTERED


def test_a_fresh_process_has_them_all() -> None:
    program = f"import gdn, torch; print(all(hasattr(torch.ops.gdn, name) for name in {REGISTERED!r}))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "True\n"
