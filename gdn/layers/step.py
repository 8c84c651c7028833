"""Metadata of the batch of one forward of a hybrid model."""

from dataclasses import dataclass

from gdn.layers.attention_metadata import AttentionMetadata
from gdn.layers.metadata import GDNMetadata


@dataclass(frozen=True)
class StepMetadata:
    """Metadata of one step, by kind of layer.

    Parameters
    ----------
    gdn : GDNMetadata
        For the Gated DeltaNet layers.
    attention : AttentionMetadata
        For the full attention layers and their indexers.
    """

    gdn: GDNMetadata
    attention: AttentionMetadata
