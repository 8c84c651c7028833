"""`gdn.warmup(config)`: every kernel that a model can reach is loaded, before the first request needs it.

`warmup_sizes`, `warmup_uneven`: the sizes at which an adapter makes a call of its own, for the same end. `without_kernel`: what
no kernel runs.
`unusable`: why there are no kernels.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from gdn.runtime import devices

_STATES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def warmup(
    config: Any = None, *, num_spec: int = 0, state_dtype: torch.dtype = torch.float32, block_size: int = 64,
    replay: bool | None = None, calls: Iterable[Callable[[], object]] = (),
) -> int:  # fmt: skip
    """Load every kernel that a `gdn.layers.HybridModel` can reach on the current GPU; what no cache holds is compiled.

    With a folder of ``gdn compile`` in ``GDN_CACHE_DIR`` nothing is compiled. Does nothing where there is no Hopper GPU.

    Parameters
    ----------
    config : gdn.layers.HybridConfig, optional
        The model as one rank holds it: `HybridConfig.per_rank` divides a whole one. None = `calls` alone.
    num_spec : int
        Most drafts of a sequence, >= 0.
    state_dtype : torch.dtype
        Of the recurrent states: float32 or bfloat16.
    block_size : int
        Tokens of a cache block of attention, >= 1.
    replay : bool, optional
        Whether the caches decode by replay, as for `gdn.layers.GDNStateCache`. None = as ``GDN_REPLAY`` says now; where the
        number of sequences decides, both forms are loaded.
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
    for name, value, least in (("num_spec", num_spec, 0), ("block_size", block_size, 1)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if value < least:
            what = "drafts" if name == "num_spec" else "tokens"
            raise ValueError(f"{name}: expected a number of {what} >= {least}, got {value}")
    if replay is not None and not isinstance(replay, bool):
        raise TypeError(f"replay: expected a bool or None, got {type(replay).__name__}")
    if state_dtype not in _STATES:
        raise ValueError(f"state_dtype: expected torch.float32 or torch.bfloat16, got {state_dtype}")
    spec = devices.spec(torch.device("cuda")) if torch.cuda.is_available() else None
    if spec is None:
        return 0
    from gdn import served  # here, since `import gdn` is to be light
    from gdn.runtime import reach

    problems = served.of_calls(calls)
    if config is not None:
        options = {"state_dtypes": (_STATES[state_dtype],), "hosts": ("layers",), "block_size": block_size}
        switch = None if replay is None else str(int(replay))
        problems += served.of_config(config, num_spec=num_spec, replay=switch, **options)
    return reach.load(reach.kernels(problems, spec))


def unusable() -> str | None:
    """Why the kernels of this package cannot run in this process, whatever its GPU; None where they can.

    Asks for those of the CuTe DSL, which alone has every operator: without them the reference runs, which is slow.
    """
    from gdn.runtime import packages

    for package in (packages.DSLS["cute"], packages.TVM_FFI):
        if packages.version(package) is None:
            return f"requires {package.distribution} {package.served}, got none"
        if (reason := packages.unserved(package)) is not None:
            return reason
    return None


def warmup_sizes(
    call: Callable[[], object], device: torch.device, *, most_tokens: int, most_sequences: int, most_each: int | None = None
) -> list[tuple[int, int]]:
    """Sizes at which a call takes, one after the other, every kernel that it can take at any size.

    An engine that makes the call once at each of them has loaded all its kernels, and has had the largest workspace. Nothing is
    compiled or loaded here.

    Parameters
    ----------
    call : callable
        Calls operators of this package on one token, with the dtypes, layouts and flags that are to come. It is run without a
        launch: what it would write stays as it is.
    device : torch.device
        Where the engine runs.
    most_tokens, most_sequences : int
        Largest sizes of a call, >= 1.
    most_each : int, optional
        Most tokens of a sequence: 1 for decode, 1 + drafts with drafts. None = no limit.

    Returns
    -------
    list of (int, int)
        Numbers of tokens and of sequences, the largest first; (1, 1) alone where no kernel serves the device.

    Raises
    ------
    ValueError
        Named after the argument.
    """
    for name, value in (("most_tokens", most_tokens), ("most_sequences", most_sequences), ("most_each", most_each)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected a count >= 1, got {value}")
    spec = devices.spec(device)
    if spec is None:
        return [(1, 1)]
    from gdn.runtime import explaining, reach

    with explaining() as asked:
        call()
    lines = _lines(most_tokens, most_sequences, most_each)
    found = {max(lines[0]), max(lines[-1])}  # the most tokens of one sequence, and of all that fit
    for _, problem in asked.answers:
        if problem is None:  # a part that no kernel runs
            continue
        names = problem.sizes().keys() & {"num_tokens", "num_sequences"}
        sized = (*itertools.chain(*lines), *sorted(itertools.chain(*lines)))
        if "longest" in problem.hints() and most_each is None:
            sized += _close(most_tokens, most_sequences)
        for kernel in reach.kernels([_at(problem, names, *size) for size in sized], spec):
            sizes = kernel.problem.sizes()
            sequences = sizes.get("num_sequences", 1)
            found.add((sizes.get("num_tokens", sequences), sequences))
    return sorted(found, reverse=True)


def warmup_uneven(
    call: Callable[[], object], device: torch.device, *, most_tokens: int, most_sequences: int
) -> list[tuple[int, int, int]]:
    """Sizes at which a call takes kernels that `warmup_sizes` has not reached, if the host knows the longest sequence.

    Parameters
    ----------
    call, device, most_tokens, most_sequences
        As for `warmup_sizes`.

    Returns
    -------
    list of (int, int, int)
        Numbers of tokens, of sequences, and of tokens of the longest: all others have equally many. Empty where no operator of
        the call has `max_seqlen`, and where no kernel serves the device.
    """
    spec = devices.spec(device)
    if spec is None:
        return []
    from gdn.runtime import explaining, reach
    from gdn.served.sizes import longs

    with explaining() as asked:
        call()
    found: set[tuple[int, int, int]] = set()
    for _, problem in asked.answers:
        if problem is None or "longest" not in problem.hints():
            continue
        counts = [n for n in _counts(2, most_sequences, 8.0) if n <= most_sequences]
        # In small steps: the length of a segment, which decides what is compiled, goes up and down with the number of tokens.
        sizes = [(tokens, n) for n in counts for tokens in _counts(2 * n, most_tokens, 1.1) if n < tokens <= most_tokens]
        names = ("num_tokens", "num_sequences")
        lines = itertools.chain(*_lines(most_tokens, most_sequences, None))
        reached = [_at(problem, names, *size) for size in (*lines, *_close(most_tokens, most_sequences))]
        even = reach.kernels(reached, spec)
        known = {kernel.key for kernel in even}
        uneven = [replace(_at(problem, names, tokens, n), longest=long) for tokens, n in sizes for long in longs(tokens, n)]
        own: list[Any] = [kernel.problem for kernel in reach.kernels(uneven, spec) if kernel.key not in known]
        found |= {(one.num_tokens, one.num_sequences, one.longest) for one in own}
    return sorted(found, reverse=True)


def without_kernel(call: Callable[[], object]) -> set[str]:
    """Short names of the operators that a call would leave to the reference. It is run without a launch."""
    from gdn.runtime import explaining

    with explaining() as asked:
        call()
    return {choice.op for choice, _ in asked.answers if choice.backend == "reference"}


def _at(problem: Any, names: Iterable[str], tokens: int, sequences: int) -> Any:
    """The problem at a size, as far as it has one."""
    size = {"num_tokens": tokens, "num_sequences": sequences}
    return replace(problem, **{name: size[name] for name in names})


def _lines(most_tokens: int, most_sequences: int, most_each: int | None) -> list[list[tuple[int, int]]]:
    """Sizes (tokens, sequences), a list for each number of sequences."""
    lines = []
    for sequences in _counts(1, min(most_sequences, most_tokens), 1.4):
        last = most_tokens if most_each is None else min(most_tokens, sequences * most_each)
        lines.append([(tokens, sequences) for tokens in _counts(sequences, last, 1.5)])
    return lines


def _close(most_tokens: int, most_sequences: int) -> tuple[tuple[int, int], ...]:
    """Sizes (tokens, sequences) of a few prompts, close to each other: where the rule's forms take turns."""
    from gdn.served.sizes import CLOSE, FEW

    return tuple((tokens, n) for n in FEW for tokens in CLOSE if n <= min(most_sequences, tokens) and tokens <= most_tokens)


def _counts(first: int, last: int, factor: float) -> list[int]:
    """From the first to the last, each at most `factor` times the one before, or one more."""
    found = [first]
    while found[-1] < last:
        found.append(min(last, max(found[-1] + 1, int(found[-1] * factor))))
    return found
