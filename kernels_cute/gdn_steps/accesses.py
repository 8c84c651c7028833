"""Accesses that the kernels of single steps are made of, from sizes alone: the choice and the kernels read them."""

from gdn.ops.layer_step.problem import AddRmsNormProblem, RmsNormGatedProblem, SplitProblem

VECTOR = 8  # elements of an access of `add_rms_norm`


def row_pieces(problem: SplitProblem, threads: int) -> tuple[int, int]:
    """Elements per access, a divisor of every part of a group; number of blocks that share a row of mixed_qkvz."""
    vector = 4 if problem.head_k_dim % 8 or problem.head_v_dim % 8 else 8
    return vector, -(-(problem.row_elements // vector) // threads)


def row_chunks(problem: AddRmsNormProblem, threads: int) -> int:
    """Accesses of a thread to a row of `add_rms_norm`."""
    return -(-problem.dim // (VECTOR * threads))


def row_parts(problem: RmsNormGatedProblem) -> tuple[int, int, int]:
    """Elements per access; threads per row: a power of two, one access each if a warp is enough; elements of a row per thread."""
    vector = 4 if problem.head_dim % 8 else 8
    lanes = min(32, 1 << (-(-problem.head_dim // vector) - 1).bit_length())
    return vector, lanes, -(-problem.head_dim // (vector * lanes)) * vector
