"""Windowed draft attention for speculative decoding with built-in draft heads."""

from windowed_mtp.window import SinkWindow

__version__ = "0.1.0"
__all__ = ["SinkWindow", "__version__"]
