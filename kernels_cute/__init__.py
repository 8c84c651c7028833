"""CuTe DSL kernels for SM90, one operator per file. Loaded by name by gdn.runtime; see docs/architecture.md."""

import os

# The DSL reads its target when it is imported, and every module here imports it: without this line a machine without a
# GPU would compile for the DSL's own default.
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
