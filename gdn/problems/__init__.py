"""What every operator's kernels are compiled for, tuned for and launched with: one module per family of operators."""

from gdn.problems.base import COMPILES, DTYPE_BYTES, TUNES, Problem, size
from gdn.problems.delta_rule import (
    ChunkParams,
    ChunkProblem,
    DeltaRuleProblem,
    GdnDecodeProblem,
    RecurrentProblem,
    unserved_dtypes,
)
from gdn.problems.indexer import (
    CompressIndexerKeysProblem,
    ExpandTopkGroupsProblem,
    GatherIndexerCacheProblem,
    IndexerCacheProblem,
    PrepareIndexerProblem,
    QuantizeFp8Problem,
    RotatedKeysProblem,
    WriteIndexerCacheProblem,
)
from gdn.problems.logits import LogitsProblem, MqaLogitsProblem, PagedMqaLogitsProblem, TopkProblem
from gdn.problems.steps import (
    Conv1dProblem,
    Conv1dUpdateProblem,
    ConvolutionProblem,
    GatingProblem,
    RmsNormGatedProblem,
    SplitProblem,
)

__all__ = [
    "COMPILES",
    "ChunkParams",
    "ChunkProblem",
    "CompressIndexerKeysProblem",
    "Conv1dProblem",
    "Conv1dUpdateProblem",
    "ConvolutionProblem",
    "DTYPE_BYTES",
    "DeltaRuleProblem",
    "ExpandTopkGroupsProblem",
    "GatherIndexerCacheProblem",
    "GatingProblem",
    "GdnDecodeProblem",
    "IndexerCacheProblem",
    "LogitsProblem",
    "MqaLogitsProblem",
    "PagedMqaLogitsProblem",
    "PrepareIndexerProblem",
    "Problem",
    "QuantizeFp8Problem",
    "RecurrentProblem",
    "RmsNormGatedProblem",
    "RotatedKeysProblem",
    "SplitProblem",
    "TUNES",
    "TopkProblem",
    "WriteIndexerCacheProblem",
    "size",
    "unserved_dtypes",
]
