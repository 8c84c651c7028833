"""A kernel module whose kernels are a few lines of C: compiled by cc, loaded by tvm-ffi, run on integers.

The journal (a static field of the problem) gets a line for every compilation, in whatever process it happens.
"""

import dataclasses
import subprocess
import tempfile
import time
from pathlib import Path

from gdn.device import DeviceSpec
from gdn.problem import COMPILES, TUNES, Problem, size

SOURCE = """
#include <stdint.h>
typedef struct { int32_t type_index; uint32_t padding; int64_t value; } any_t;
int __tvm_ffi_ENTRY(void *self, const any_t *arguments, int32_t count, any_t *result) {
  result->type_index = 1; /* an integer */
  result->padding = 0;
  result->value = arguments[0].value * FACTOR;
  return 0;
}
"""


@dataclasses.dataclass(frozen=True)
class FakeProblem(Problem):
    op = "recurrent"

    dtype: str = dataclasses.field(metadata=TUNES)
    head_dim: int = dataclasses.field(metadata=TUNES)
    journal: str = dataclasses.field(metadata=COMPILES)
    seconds: float = dataclasses.field(metadata=COMPILES)  # that compiling takes
    num_tokens: int = size()

    def sizes_only(self, num_tokens: int) -> "FakeProblem":
        return dataclasses.replace(self, num_tokens=num_tokens)


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int
    wide: bool


CONFIG = Config(tile=32, wide=False)


def compilations(problem: FakeProblem) -> int:
    path = Path(problem.journal)
    return len(path.read_text().splitlines()) if path.exists() else 0


SMALL_TILES_S = 0.001  # a problem that takes so long to compile takes small tiles only


def fits(problem: FakeProblem, config: Config, device: DeviceSpec) -> bool:
    return config.tile <= (64 if problem.seconds == SMALL_TILES_S else 128)


def refusal(problem: FakeProblem) -> str | None:
    if problem.head_dim not in (64, 128):
        return f"requires head_dim 64 or 128, got {problem.head_dim}"
    return None


def default_config(problem: FakeProblem, device: DeviceSpec) -> Config:
    return Config(tile=64 if problem.num_tokens >= 64 else 16, wide=False)


def compile(problem: FakeProblem, config: Config) -> dict[str, bytes]:
    with Path(problem.journal).open("a") as journal:
        journal.write(f"{config}\n")
    time.sleep(problem.seconds)
    if problem.head_dim == 64 and config.wide:
        raise RuntimeError("the compiler gave up")
    return {"first": _library("first", config.tile), "second": _library("second", 10 * config.tile)}


def _library(entry: str, factor: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        source.write_text(SOURCE.replace("ENTRY", entry).replace("FACTOR", str(factor)))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        return library.read_bytes()


def workspace_bytes(problem: FakeProblem, config: Config) -> int:
    return problem.num_tokens * config.tile


def launch(compiled, results: list, value: int) -> None:
    results.extend(function(value) for function in compiled.functions.values())
