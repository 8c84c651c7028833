"""The form of the fused step that streams the states of large batches with a ring: its variants compile without spills."""

from kernels_cute import gdn_decode
from tests.compile import checks
from tests.compile.variants.decode import streamed_cover

MODULE = "kernels_cute.gdn_decode"


def test_the_cover_is_of_this_form() -> None:
    """One token and several, both dtypes of states, in two and more numbers of stages."""
    cover = streamed_cover(gdn_decode)
    assert all(config.stages for _, config in cover) and len({config.stages for _, config in cover}) > 1
    assert {(problem.has_accepted, problem.state_dtype) for problem, _ in cover} == {  # type: ignore[attr-defined]
        (drafts, state) for drafts in (False, True) for state in ("float32", "bfloat16")
    }


@checks.compiles(lambda: checks.tasks_of(MODULE, streamed_cover(gdn_decode)))
def test_streamed_cover() -> None:
    checks.check(MODULE, "cute", streamed_cover(gdn_decode))
