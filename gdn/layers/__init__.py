"""Torch modules over the operators: the layers of hybrid models, their metadata and their caches.

`import gdn.layers` touches neither CUDA nor a DSL, which load with the first kernel.
"""

from gdn.layers.allocator import CacheAllocator as CacheAllocator
from gdn.layers.allocator import CachedSequence as CachedSequence
from gdn.layers.allocator import Checkpoint as Checkpoint
from gdn.layers.attention_metadata import AttentionMetadata as AttentionMetadata
from gdn.layers.attention_metadata import AttentionMetadataBuilder as AttentionMetadataBuilder
from gdn.layers.caches import GDNStateCache as GDNStateCache
from gdn.layers.caches import HybridCaches as HybridCaches
from gdn.layers.caches import IndexerCache as IndexerCache
from gdn.layers.caches import KVCache as KVCache
from gdn.layers.config import HybridConfig as HybridConfig
from gdn.layers.decoder_layer import DecoderLayer as DecoderLayer
from gdn.layers.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from gdn.layers.hyper import HyperConnection as HyperConnection
from gdn.layers.indexer import Indexer as Indexer
from gdn.layers.metadata import GDNMetadata as GDNMetadata
from gdn.layers.metadata import GDNMetadataBuilder as GDNMetadataBuilder
from gdn.layers.mlp import MLP as MLP
from gdn.layers.mlp import MoE as MoE
from gdn.layers.model import HybridModel as HybridModel
from gdn.layers.norm import RMSNorm as RMSNorm
from gdn.layers.pools import CacheFullError as CacheFullError
from gdn.layers.rotary import RotaryEmbedding as RotaryEmbedding
from gdn.layers.sparse_attention import SparseAttention as SparseAttention
from gdn.layers.step import StepMetadata as StepMetadata
