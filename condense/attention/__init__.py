"""Attention over [memory ; current segment]: mask and metadata, the choice of an implementation, implementations."""

from .dispatch import IMPLEMENTATIONS, attend, choose_attention
from .mask import AttentionMask
from .metadata import AttentionMetadata, AttentionMetadataBuilder

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionMask",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "attend",
    "choose_attention",
]
