"""Code that runs in a Python of its own, which has imported nothing yet."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(code: str, timeout_s: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code, which must end well, with these variables besides this process's."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr
    return done
