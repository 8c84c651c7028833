"""`gdn.warmup(config)`: every kernel that a model can reach is loaded, before the first request needs it."""

from typing import Any

import torch

from gdn.runtime import devices

_STATES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def warmup(config: Any, *, num_spec: int = 0, state_dtype: torch.dtype = torch.float32, block_size: int = 64) -> int:
    """Load every kernel that a `gdn.layers.HybridModel` can reach on the current GPU; what no cache holds is compiled.

    With a folder of ``gdn compile`` in ``GDN_CACHE_DIR`` nothing is compiled. Does nothing where there is no Hopper GPU.

    Parameters
    ----------
    config : gdn.layers.HybridConfig
        The model as one rank holds it: `HybridConfig.per_rank` divides a whole one.
    num_spec : int
        Most drafts of a sequence, >= 0.
    state_dtype : torch.dtype
        Of the recurrent states: float32 or bfloat16.
    block_size : int
        Tokens of a cache block of attention, >= 1.

    Returns
    -------
    int
        Number of kernels that were compiled.

    Raises
    ------
    TypeError, ValueError
        Named after the argument.
    RuntimeError
        Where a kernel does not compile, or is missing with ``GDN_COMPILE=off``: the message names the command that builds it.
    """
    if not hasattr(config, "projection_layout"):
        raise TypeError(f"config: expected a gdn.layers.HybridConfig, got {type(config).__name__}")
    for name, value, least in (("num_spec", num_spec, 0), ("block_size", block_size, 1)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if value < least:
            what = "drafts" if name == "num_spec" else "tokens"
            raise ValueError(f"{name}: expected a number of {what} >= {least}, got {value}")
    if state_dtype not in _STATES:
        raise ValueError(f"state_dtype: expected torch.float32 or torch.bfloat16, got {state_dtype}")
    spec = devices.spec(torch.device("cuda")) if torch.cuda.is_available() else None
    if spec is None:
        return 0
    from gdn import served  # here, since `import gdn` is to be light
    from gdn.runtime import reach

    problems = served.of_config(
        config, num_spec=num_spec, state_dtypes=(_STATES[state_dtype],), hosts=("layers",), block_size=block_size
    )
    return reach.load(reach.kernels(problems, spec))
