"""Context parallel: the tokens of a sequence over the ranks of a torch.distributed group, in rank order.

Every rank calls an operator with its own part of every sequence, of any length, none included. Each call makes one exchange,
whose size does not depend on the number of tokens. NCCL carries it on GPUs, gloo on the CPU.

``import gdn`` does not import this module, as little as `gdn.layers`: ``import gdn.distributed``.
"""

from gdn.distributed.chunk import chunk_gated_delta_rule as chunk_gated_delta_rule
from gdn.distributed.conv import causal_conv1d_fn as causal_conv1d_fn
from gdn.distributed.group import Ranks as Ranks
from gdn.distributed.parts import split_tokens as split_tokens
from gdn.distributed.parts import zigzag as zigzag
