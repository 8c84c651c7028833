"""Lists the kernels of a folder that keep values of a thread in local memory.

usage: python3 -m tests.compile.spills FOLDER

FOLDER: one that `gdn compile -o` has written, or the cache of a test run. The covers compile every pair of a kernel's values; a
spill that takes three of them shows only where the kernels that calls have used are read. Exit status 1 where there are any.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from gdn.runtime import compiled
from gdn.testing import machine_code


def spilling(folder: Path) -> Iterator[str]:
    """A line for each of them: operator and backend, what is spilled, configuration and problem."""
    for manifest in sorted(folder.glob("*/*/manifest.json")):
        about = json.loads(manifest.read_text(encoding="utf-8"))
        for library in compiled.libraries_of(manifest.parent).values():
            # Only these are disassembled: it takes a hundred times as long as reading the size of a frame.
            framed = [one for one in machine_code.undecoded(library.read_bytes()) if one.kernel.stack_bytes]
            for kernel in machine_code.decoded(framed):
                yield f"{about['op']}.{about['backend']}: {kernel.spilled}: {about['config']} of {about['problem']}"


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python3 -m tests.compile.spills FOLDER")
    found = list(spilling(Path(sys.argv[1])))
    print(*found, f"{len(found)} kernels spill", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
