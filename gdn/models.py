"""Shapes of published hybrid models, per tensor-parallel rank. Leaf module."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden_size: int
    num_k_heads: int  # GDN query/key heads
    num_v_heads: int  # GDN value heads
    head_k_dim: int
    head_v_dim: int
    conv_width: int
    index_num_heads: int  # the indexer is replicated: not divided by tensor parallelism
    index_head_dim: int
    index_topk: int
    index_rotary_dim: int

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: all q, k and v heads."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    def per_rank(self, tensor_parallel: int) -> "ModelShape":
        """The part of one rank: GDN heads divided, the indexer whole.

        Raises ValueError where the heads do not divide.
        """
        if tensor_parallel < 1 or self.num_k_heads % tensor_parallel or self.num_v_heads % tensor_parallel:
            raise ValueError(
                f"tp: expected a divisor of {self.num_k_heads} key and {self.num_v_heads} value heads, got {tensor_parallel}"
            )
        return replace(self, num_k_heads=self.num_k_heads // tensor_parallel, num_v_heads=self.num_v_heads // tensor_parallel)


QWEN3_NEXT_80B = ModelShape(
    name="qwen3-next-80b",
    hidden_size=2048,
    num_k_heads=16,
    num_v_heads=32,
    head_k_dim=128,
    head_v_dim=128,
    conv_width=4,
    index_num_heads=16,
    index_head_dim=128,
    index_topk=2048,
    index_rotary_dim=64,
)
# Small enough for seconds on a CPU; every head ratio and rule of the large one.
TINY = ModelShape(
    name="tiny",
    hidden_size=128,
    num_k_heads=2,
    num_v_heads=4,
    head_k_dim=64,
    head_v_dim=64,
    conv_width=4,
    index_num_heads=4,
    index_head_dim=64,
    index_topk=32,
    index_rotary_dim=32,
)
MODELS = {model.name: model for model in (QWEN3_NEXT_80B, TINY)}
