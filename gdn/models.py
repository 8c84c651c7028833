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
    num_heads: int  # query heads of full attention
    num_kv_heads: int
    head_dim: int

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: all q, k and v heads."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    def per_rank(self, tensor_parallel: int) -> "ModelShape":
        """The part of one rank: heads of GDN and attention divided (one key head at least), the indexer whole.

        Raises ValueError where the heads do not divide.
        """
        if tensor_parallel < 1 or self.num_k_heads % tensor_parallel or self.num_v_heads % tensor_parallel:
            raise ValueError(
                f"tp: expected a divisor of {self.num_k_heads} key and {self.num_v_heads} value heads, got {tensor_parallel}"
            )
        return replace(
            self,
            num_k_heads=self.num_k_heads // tensor_parallel,
            num_v_heads=self.num_v_heads // tensor_parallel,
            num_heads=self.num_heads // tensor_parallel,
            num_kv_heads=max(1, self.num_kv_heads // tensor_parallel),
        )


# Values in the order of the fields: name, hidden size; heads and dims of GDN, width of its convolution; the indexer; attention.
QWEN3_NEXT_80B = ModelShape("qwen3-next-80b", 2048, 16, 32, 128, 128, 4, 16, 128, 2048, 64, 16, 2, 256)
# Seconds on a CPU; every head ratio and rule of the large one.
TINY = ModelShape("tiny", 128, 2, 4, 64, 64, 4, 4, 64, 32, 32, 4, 2, 128)
MODELS = {model.name: model for model in (QWEN3_NEXT_80B, TINY)}
