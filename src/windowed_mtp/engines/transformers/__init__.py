"""The embedded engine: windowed speculative decoding on a transformers model, on a CPU or one GPU."""

from windowed_mtp.engines.transformers.drafter import WindowedMTP

__all__ = ["WindowedMTP"]
