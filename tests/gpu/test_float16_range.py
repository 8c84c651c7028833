"""float16 in the chunk form: what GDN_VALIDATE=1 accepts has finite results wherever the reference's fit, on every backend."""

import random
from typing import Any

import pytest
import torch

import gdn
from gdn.runtime import env
from tests.gpu.delta_rule import backends

pytestmark = pytest.mark.gpu

LIMIT = 65504.0


def draw(seed: int, device: torch.device) -> dict[str, Any]:
    """A call of a few chunks whose tokens are of any size: small, ordinary, and near what float16 holds."""
    source, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    tokens, dim = source.choice((2, 70, 200)), source.choice((64, 128))

    def rows(heads: int, smallest: float, largest: float) -> torch.Tensor:
        """Of a size between two powers of ten."""
        size = 10 ** source.uniform(smallest, largest)
        x = size * torch.randn(1, tokens, heads, dim, device=device, generator=generator)
        return x.clamp(-LIMIT, LIMIT).half()

    normed = source.random() < 0.6
    found: dict[str, Any] = {"q": rows(2, -3, 4), "k": rows(2, -4, 2 if normed else 0), "v": rows(4, 0, 4.8)}
    if source.random() < 0.3:
        found["k"][:, source.randrange(tokens)] = 0
    found["beta"] = 10 ** source.uniform(-3, 0) * torch.rand(1, tokens, 4, device=device, generator=generator)
    found["g"] = -(10 ** source.uniform(-3, 1)) * torch.rand(1, tokens, 4, device=device, generator=generator)
    return found | {"use_qk_l2norm_in_kernel": normed, "output_final_state": True}


def is_refused(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        patch.setenv("GDN_VALIDATE", "1")
        env.reload()
        try:
            gdn.chunk_gated_delta_rule(**arguments, backend="reference")
        except ValueError as error:
            assert "float16 values" in str(error)
            return True
        finally:
            patch.undo()
            env.reload()
    return False


@pytest.mark.parametrize("backend", backends("chunk"))
def test_what_is_accepted_is_finite(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, wrong = {True: 0, False: 0}, []
    for seed in range(200):
        arguments = draw(seed, device)
        refused = is_refused(arguments, monkeypatch)
        counts[refused] += 1
        if refused:
            continue
        o, state = gdn.chunk_gated_delta_rule(**arguments, backend=backend)
        want, _ = gdn.chunk_gated_delta_rule(**arguments, backend="reference")
        fits = want.isfinite() & (want.abs() < 0.9 * LIMIT)
        if not bool(o[fits].isfinite().all() and state.isfinite().all()):
            wrong.append(seed)
    assert not wrong, wrong
    assert min(counts.values()) > 20, counts
