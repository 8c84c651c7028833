"""Which instructions a kernel must hold, and which it must not: the reason it was written in a DSL at all.

Patterns as in MachineCode.count; alternatives are joined by "|". HGMMA and QGMMA are warpgroup matmuls on 16-bit and FP8
operands, UTMALDG and UTMASTG bulk tensor copies, UBLKCP plain bulk copies.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from gdn.problems import (
    ChunkProblem,
    CompressIndexerKeysProblem,
    Conv1dProblem,
    ConvolutionProblem,
    ExpandTopkGroupsProblem,
    GatherIndexerCacheProblem,
    GatingProblem,
    GdnDecodeProblem,
    LogitsProblem,
    PrepareIndexerProblem,
    Problem,
    QuantizeFp8Problem,
    RecurrentProblem,
    RmsNormGatedProblem,
    SplitProblem,
    TopkProblem,
    WriteIndexerCacheProblem,
)


@dataclass(frozen=True)
class Expectation:
    at_least: dict[str, int] = field(default_factory=dict)  # pattern -> occurrences over all entries
    none_of: tuple[str, ...] = ()
    at_most: dict[str, int] = field(default_factory=dict)


def expectation(problem: Problem, backend: str, entries: Collection[str]) -> Expectation:
    """Of what a problem and a configuration compile to; TypeError for an operator without one, so that none goes unchecked."""
    tensor_cores = ("HGMMA", "QGMMA", "HMMA")
    shared_memory = ("LDS", "STS", "ATOMS")
    if isinstance(problem, ChunkProblem):
        # Products of mma.sync on purpose, of 16 x 16 blocks: below a warpgroup matmul's 64 rows. In TileLang's one launch the
        # inverse's are 20, and the diagonal blocks of K K^T another 16; the norms of Q, there and in `chunk_prepare`, are one for
        # 8 columns. A tile's product that fell back to mma.sync would be 32 at least.
        norms = problem.head_k_dim // 8 if problem.use_qk_l2norm else 0
        wanted = {"chunk_fused": 36 + norms, "chunk_prepare": norms}
        at_most = {"HMMA": sum(wanted.get(entry, 0) for entry in entries)} if backend == "tilelang" else {}
        return Expectation({"HGMMA": 4, "UTMALDG|UBLKCP": 3}, none_of=("QGMMA",), at_most=at_most)
    if isinstance(problem, RecurrentProblem):
        # A matrix times a vector: no tensor cores, but the state in wide loads and stores: four values of a thread.
        width = "{0}.128" if problem.state_dtype == "float32" else "{0}.64|{0}.128"
        wide = {width.format("LDG"): problem.has_initial_state, width.format("STG"): problem.has_final_state}
        # K first, the warps that share columns pass their sums through shared memory.
        none_of = (*tensor_cores, *(shared_memory if problem.state_v_first else ()))
        return Expectation({pattern: 1 for pattern, wanted in wide.items() if wanted}, none_of=none_of)
    if isinstance(problem, LogitsProblem):
        matmul, other = ("QGMMA", "HGMMA") if problem.dtype == "float8_e4m3fn" else ("HGMMA", "QGMMA")
        return Expectation({matmul: 1, "UTMALDG|UBLKCP": 2}, none_of=(other, "HMMA"))
    if isinstance(problem, TopkProblem):
        # Rows in 16-byte accesses, samples by four scores, and counts whose lanes of one bin are added up by the hardware.
        loads = {"LDG.128": 2} | ({} if problem.dtype == "float32" else {"LDG.64": 1})
        return Expectation({**loads, "ATOMS.POPC.INC": 1, "UBLKPF": 1}, none_of=("HGMMA", "QGMMA", "HMMA"))
    if isinstance(problem, GdnDecodeProblem):
        # The state, as above; a part of a row in 8-byte accesses.
        wide = "64|{0}.128" if problem.state_dtype == "bfloat16" or not problem.state_v_first else "128"
        patterns = {f"{name}.{wide.format(name)}": 1 for name in ("LDG", "STG")}
        return Expectation(patterns, none_of=("HGMMA", "QGMMA", "HMMA"))
    if isinstance(problem, ExpandTopkGroupsProblem):
        # A row of out starts at any multiple of four bytes: neighbouring lanes write neighbouring words.
        return Expectation({"LDG": 2, "STG": 2, "LDS": 1, "STS": 1}, none_of=tensor_cores)
    # The other steps only move memory: rows in 16-byte accesses, several at once.
    none_of = (*tensor_cores, *shared_memory)
    if isinstance(problem, ConvolutionProblem):
        rows = 2 if isinstance(problem, Conv1dProblem) else 1
        return Expectation({"LDG.128": rows + 1, "STG.128": rows}, none_of=none_of)
    if isinstance(problem, SplitProblem):
        wide = "128" if problem.head_k_dim % 8 == 0 and problem.head_v_dim % 8 == 0 else "64"
        return Expectation({f"LDG.{wide}": 1, f"STG.{wide}": 1}, none_of=none_of)
    if isinstance(problem, RmsNormGatedProblem):
        wide = "128" if problem.head_dim % 8 == 0 else "64"
        return Expectation({f"LDG.{wide}": 1, f"STG.{wide}": 1}, none_of=none_of)
    if isinstance(problem, GatingProblem):
        return Expectation({"LDG": 4, "STG": 2}, none_of=none_of)
    # Rows of the indexer: both chunks of a lane in 16-byte loads, 8 values of e4m3 in 8-byte stores.
    codes = {"STG.64": 2, "F2FP.E4M3": 8}
    if isinstance(problem, QuantizeFp8Problem):
        return Expectation({"LDG.128": 2} | codes, none_of=none_of)
    if isinstance(problem, WriteIndexerCacheProblem):
        is_fp8 = problem.cache_dtype != "bfloat16"
        return Expectation({"LDG.128": 2} | (codes if is_fp8 else {"STG.128": 2}), none_of=none_of)
    if isinstance(problem, PrepareIndexerProblem):
        stores = codes if problem.q_out_dtype == "float8_e4m3fn" else {"STG.128": 2}
        return Expectation({"LDG.128": 4} | stores, none_of=none_of)
    if isinstance(problem, CompressIndexerKeysProblem):
        keys = codes if problem.cache_dtype != "bfloat16" else {}
        return Expectation({"LDG.128": 2 * problem.ratio + 2, "STG.128": 2} | keys, none_of=none_of)
    if isinstance(problem, GatherIndexerCacheProblem):
        return Expectation({"LDG.128": 1, "STG.128": 1}, none_of=none_of)
    raise TypeError(f"problem: expected one of an operator with an expectation, got {type(problem).__name__}")
