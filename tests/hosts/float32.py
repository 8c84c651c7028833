"""The float32 pass that judges a host: Transformers' own model in float32, on its plain torch path.

Transformers' code shares nothing with either side that is judged: neither with the host's kernels, nor with gdn's reference.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_KERNELS = ("fla", "causal_conv1d", "kernels")  # packages whose kernels Transformers would run instead of torch


def forbid_kernels() -> None:
    """Makes Transformers, which is not imported yet, run torch's own path."""
    loaded = [name for name in sys.modules if name.startswith("transformers.models.qwen3")]
    if loaded:
        raise RuntimeError(f"float32: expected no model of Transformers to be imported yet, got {loaded[0]}")
    for name in _KERNELS:
        sys.modules[name] = None  # type: ignore[assignment]


class Exact:
    """A checkpoint's model in float32.

    Parameters
    ----------
    folder : Path
        The checkpoint.
    device : str
        "cuda" or "cpu"; products are IEEE float32 on both.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False  # the default is True: the short convolution would round
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
        )
        self.model, self.device = model.eval().to(device), device

    def logits(self, texts: list[list[int]]) -> Tensor:
        """Logits [texts, tokens, vocabulary] of texts of one length, on the CPU."""
        with torch.inference_mode():
            found: Tensor = self.model(torch.tensor(texts, device=self.device), use_cache=False).logits
        return found.float().cpu()
