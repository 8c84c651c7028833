"""Torch modules over the operators: the layers of hybrid models, their metadata and their caches.

`import gdn.layers` touches neither CUDA nor a DSL, which load with the first kernel.
"""

from gdn.layers.config import HybridConfig as HybridConfig
from gdn.layers.norm import RMSNorm as RMSNorm
from gdn.layers.norm import add_rms_norm as add_rms_norm
from gdn.layers.norm import rms_norm as rms_norm
from gdn.layers.rotary import RotaryEmbedding as RotaryEmbedding
