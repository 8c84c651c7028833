"""`gdn.warmup(config)`: every kernel that a model can reach is loaded, before the first request needs it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gdn.runtime import devices

_STATES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def warmup(
    config: Any = None, *, num_spec: int = 0, state_dtype: torch.dtype = torch.float32, calls: Iterable[Callable[[], object]] = ()
) -> int:
    """Load every kernel that a model's calls can reach on the current GPU; what no cache holds is compiled.

    With a folder of ``gdn compile`` in ``GDN_CACHE_DIR`` nothing is compiled. Does nothing where there is no Hopper GPU.

    Parameters
    ----------
    config : gdn.layers.HybridConfig, optional
        The model as one rank holds it: `HybridConfig.per_rank` divides a whole one. None = `calls` alone.
    num_spec : int
        Most drafts of a sequence, >= 0.
    state_dtype : torch.dtype
        Of the recurrent states: float32 or bfloat16.
    calls : iterable of callable
        Functions without arguments that call operators of `gdn` on tensors of any device, such as small ones on the CPU, and do
        nothing with the results. They are not run: what they would run is loaded, for any numbers of tokens and sequences.
        For code that calls the operators in other forms than `gdn.layers`.

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
    if config is not None and not hasattr(config, "projection_layout"):
        raise TypeError(f"config: expected a gdn.layers.HybridConfig, got {type(config).__name__}")
    if not isinstance(num_spec, int) or isinstance(num_spec, bool):
        raise TypeError(f"num_spec: expected an int, got {type(num_spec).__name__}")
    if num_spec < 0:
        raise ValueError(f"num_spec: expected a number of drafts >= 0, got {num_spec}")
    if state_dtype not in _STATES:
        raise ValueError(f"state_dtype: expected torch.float32 or torch.bfloat16, got {state_dtype}")
    spec = devices.spec(torch.device("cuda")) if torch.cuda.is_available() else None
    if spec is None:
        return 0
    from gdn import served  # here, since `import gdn` is to be light
    from gdn.runtime import reach

    problems = served.of_calls(calls)
    if config is not None:
        problems += served.of_config(config, num_spec=num_spec, state_dtypes=(_STATES[state_dtype],))
    return reach.load(reach.kernels(problems, spec))
