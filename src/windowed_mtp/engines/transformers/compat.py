"""What differs between the transformers versions that are supported."""

from __future__ import annotations

import inspect

from torch import nn


def cache_argument(module: nn.Module) -> str:
    """Return a module's name for its cache: ``cache`` from transformers 5.24 on, ``past_key_values`` before.

    ``generate`` passes its cache to a ``custom_generate`` callable, and returns it, under the model's name for it.
    """
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
