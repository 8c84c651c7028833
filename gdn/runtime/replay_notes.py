"""What `gdn explain` and `gdn.explain` say of a call with a ring (see gdn.problems.replay)."""

from gdn.device import H100, DeviceSpec
from gdn.problems.base import Problem
from gdn.problems.delta_rule import GdnDecodeProblem, RecurrentProblem
from gdn.problems.replay import FoldStatesProblem, mean_live, most_tokens


def replay_notes(problem: Problem | None, device: DeviceSpec | None) -> tuple[str, ...]:
    """Tokens of a call, live entries, bytes and floor; nothing for a problem without a ring. Without a device: of an H100."""
    if isinstance(problem, FoldStatesProblem):
        return (f"replay: {_traffic(problem, device)}, where every sequence has {mean_live(problem.fold_every, 1):.3g} entries",)
    if not isinstance(problem, GdnDecodeProblem | RecurrentProblem) or problem.ring_rows is None or problem.fold_every is None:
        return ()
    most = most_tokens(problem.ring_rows, problem.fold_every) if problem.has_accepted else 1
    windows = ", fewer where a window has no room for them" if isinstance(problem, GdnDecodeProblem) and most > 1 else ""
    each = problem.num_tokens / max(problem.num_sequences, 1)
    return (
        f"replay: at most {most} token{'s' if most > 1 else ''} of a sequence in a call{windows}",
        f"replay: a mean of {mean_live(problem.fold_every, each):.3g} live entries a sequence, a fold every "
        f"{problem.fold_every} tokens; {_traffic(problem, device)}",
    )


def _traffic(problem: Problem, device: DeviceSpec | None) -> str:
    """Bytes, and the time that copying as many takes."""
    spec, moved = device or H100, problem.bytes_moved()
    return f"{moved / 1e6:.4g} MB, floor {moved / spec.copy_gbps / 1e3:.4g} us on {spec.key}"
