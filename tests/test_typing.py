"""`py.typed` is true: a type checker sees the signature of every public function, as a user's own code calls them."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gdn

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.cover  # mypy reads torch first: 20 s

FUNCTIONS = sorted(name for name in gdn.__all__ if not name.startswith("_"))
RIGHT = """
import gdn
import gdn.layers
import torch
from gdn.layers.named import NAMED

q = torch.zeros(1, 2, 2, 64)
o, state = gdn.chunk_gated_delta_rule(q, q, q, None, None, use_qk_l2norm_in_kernel=True, output_final_state=True)
head: torch.Tensor = o[0]
indices: torch.Tensor = gdn.topk_indices(torch.zeros(2, 9), 2, sorted_by="score")
backend: str = gdn.explain("topk_indices", torch.zeros(2, 9), 2).backend
version: str = gdn.__version__
indices = gdn.topk_indices(torch.zeros(2, 9), 2, backend="reference")

config = NAMED["tiny"]
caches = gdn.layers.HybridCaches(config, 4, 64, 2, dtype=torch.float16, state_dtype=torch.bfloat16, device="cpu")
model = gdn.layers.HybridModel(config, device="cpu", dtype=torch.float16)


def step(metadata: gdn.layers.StepMetadata, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, positions=ids, step=metadata, caches=caches)
"""
WRONG = """
import gdn
import gdn.layers
import torch
from gdn.layers.named import NAMED

gdn.chunk_gated_delta_rule(1, 2, 3)
count: int = gdn.topk_indices(torch.zeros(2, 9), 2)
gdn.rms_norm_gated(torch.zeros(2), torch.zeros(2), torch.zeros(2), epsilon=1e-6)
gdn.topk_indices(torch.zeros(2, 9), 2, backend="triton")
gdn.layers.HybridCaches(NAMED["tiny"], 4, 64, 2, datatype=torch.float16)
gdn.layers.HybridCaches(NAMED["tiny"], 4, 64, 2, state_dtype="float32")
tokens: torch.Tensor = gdn.layers.HybridModel(NAMED["tiny"])(1, 2, 3, 4)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def check(program: str, folder: Path, cache: Path) -> tuple[int, list[str]]:
    """mypy's exit status and its lines about a user's file, which knows nothing of this project's configuration."""
    file = folder / "user.py"
    file.write_text(program)
    code = "import sys; from mypy import api; out, err, status = api.run(sys.argv[1:]); print(out); sys.exit(err or status)"
    options = ["--config-file=", "--strict", "--follow-imports=silent", "--no-error-summary", f"--cache-dir={cache}", str(file)]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    return done.returncode, [line for line in done.stdout.splitlines() if line]


def test_a_right_call_has_no_error(tmp_path: Path, cache: Path) -> None:
    assert check(RIGHT, tmp_path, cache) == (0, [])


def test_a_wrong_call_has_errors(tmp_path: Path, cache: Path) -> None:
    status, lines = check(WRONG, tmp_path, cache)
    text = "\n".join(lines)
    assert status == 1
    for place in (1, 2, 3):
        assert f'Argument {place} to "chunk_gated_delta_rule" has incompatible type "int"; expected "Tensor"' in text
    assert 'expression has type "Tensor", variable has type "int"' in text
    assert 'Unexpected keyword argument "epsilon" for "rms_norm_gated"' in text
    backends = "Literal['tilelang', 'cute', 'reference'] | None"
    assert f'Argument "backend" to "topk_indices" has incompatible type "Literal[\'triton\']"; expected "{backends}"' in text
    assert 'Unexpected keyword argument "datatype" for "HybridCaches"' in text
    assert 'Argument "state_dtype" to "HybridCaches" has incompatible type "str"; expected "dtype"' in text
    for kind in ("Tensor", "Tensor", "StepMetadata", "HybridCaches"):
        assert f'has incompatible type "int"; expected "{kind}"' in text, text
    assert len([line for line in lines if "error:" in line]) == 12


def test_every_public_function_has_a_signature(tmp_path: Path, cache: Path) -> None:
    program = "import gdn\n" + "".join(f"reveal_type(gdn.{name})\n" for name in FUNCTIONS)
    _, lines = check(program, tmp_path, cache)
    revealed = [line for line in lines if "Revealed type is" in line]
    assert len(FUNCTIONS) > 20 and len(revealed) == len(lines) == len(FUNCTIONS)
    for name, line in zip(FUNCTIONS, revealed, strict=True):
        assert 'Revealed type is "def (' in line or "Overload(" in line, f"{name}: {line}"


def test_the_marker_is_there_and_is_shipped() -> None:
    assert (Path(gdn.__file__).parent / "py.typed").is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["gdn"]
