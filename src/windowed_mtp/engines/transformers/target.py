"""The target model as the drafter sees it: forward passes, features for the draft, and rollback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin

from windowed_mtp.engines.transformers.compat import cache_argument
from windowed_mtp.errors import GenerationError

_MIXER_STATE = ("conv_states", "recurrent_states")
_REGISTERING = threading.Lock()
"""Torch numbers hooks without a lock: of two that got one number, the second would take the first's place."""


class Target:
    """A causal language model, its cache, and the hooks that read its features while it runs.

    Others may use the model meanwhile, in another thread or within a pass of this request (a processor, a streamer, a
    hook of the user's). The hooks know this request's own passes by its cache, which nobody else has, and let all
    others go by.

    Parameters
    ----------
    model : PreTrainedModel
        A transformers causal language model.
    cache : Cache
        The empty dynamic cache that ``generate`` made.
    feature_layers : list of int or None
        Layers whose inputs are the features; ``None`` for the final hidden state.

    """

    def __init__(self, model: PreTrainedModel, cache: Cache, feature_layers: list[int] | None) -> None:
        self.model = model
        self.cache = cache
        self.feature_layers = feature_layers
        self._cache_argument = cache_argument(model)
        self._features: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        self._mixers: list[Any] = []
        self._calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._saved: list[tuple[Any, dict[str, dict[int, Tensor]]]] | None = None
        self._recording = False

    @contextmanager
    def hooked(self) -> Iterator[Target]:
        """Have the model's features read for the duration of a generation; all hooks come off at its end."""
        decoder = self.model.get_decoder()
        with _REGISTERING:
            if self.feature_layers is None:
                self._handles.append(decoder.register_forward_hook(self._keep_output, with_kwargs=True))
            for position, index in enumerate(self.feature_layers or ()):
                hook = self._keep_input(position)
                self._handles.append(decoder.layers[index].register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield self
        finally:
            while self._handles:
                self._handles.pop().remove()

    # A pass of another thread that meets a hook while it is put on or taken off calls it without keyword arguments.

    def _keep_output(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        *kwargs, output = rest
        if self._is_own(args, *kwargs):
            self._features = {0: output[0]}

    def _keep_input(self, position: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
            if self._is_own(args, kwargs):
                self._features[position] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _keep_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        if self._recording and self._is_own(args, kwargs):
            self._calls.append((module, args, kwargs))

    def _is_own(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
        """Whether a module was called in a pass of this request: with its cache."""
        return any(value is self.cache for value in (*args, *(kwargs or {}).values()))

    def prefill(self, ids: Tensor, chunk: int | None) -> tuple[Tensor, Tensor]:
        """Run the prompt.

        Parameters
        ----------
        ids : Tensor
            ``[1, n]`` int64.
        chunk : int or None
            Longest forward pass in tokens; ``None`` for one pass.

        Returns
        -------
        logits : Tensor
            ``[1, 1, V]`` of the last token.
        features : Tensor
            ``[1, n, F]``.

        Raises
        ------
        GenerationError
            If the cache turns out to have layers that cannot be rolled back.
        """
        features = []
        for part in ids.split(chunk or ids.shape[1], dim=1):
            logits, part_features = self._forward(part, logits_to_keep=1)
            features.append(part_features)
        self._find_mixers()
        return logits, torch.cat(features, dim=1) if len(features) > 1 else features[0]

    def verify(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run the last known token and the drafted ones; ``keep`` must follow.

        Parameters
        ----------
        tokens : Tensor
            ``[1, k + 1]`` int64.

        Returns
        -------
        logits : Tensor
            ``[1, k + 1, V]``.
        features : Tensor
            ``[1, k + 1, F]``.
        """
        if tokens.shape[1] > 1 and self._mixers:
            layers = [self.cache.layers[m.layer_idx] for m in self._mixers]
            # Clones: single-token kernels update the states in place.
            self._saved = [
                (layer, {name: {i: s.clone() for i, s in getattr(layer, name).items()} for name in _MIXER_STATE})
                for layer in layers
            ]
        self._recording = self._saved is not None
        result = self._forward(tokens, logits_to_keep=0)
        self._recording = False  # ``keep`` runs the mixers again
        return result

    def keep(self, kept: int, ran: int) -> None:
        """Roll the cache back to the first ``kept`` of the ``ran`` tokens of the last ``verify``.

        Attention layers are cropped. Recurrent states are restored, and the mixers alone run again over the kept
        tokens, on the inputs they had.
        """
        calls, saved = self._calls, self._saved
        self._calls, self._saved = [], None
        if kept == ran:
            return
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer) and layer.get_seq_length():  # others: recurrent, or without a cache
                layer.crop(kept - ran)
        for layer, states in saved or ():
            for name, by_index in states.items():
                getattr(layer, name).update(by_index)
        for mixer, args, kwargs in calls:
            kwargs = {name: _first(value, ran, kept) for name, value in kwargs.items()}
            mixer(*(_first(value, ran, kept) for value in args), **kwargs)

    def _find_mixers(self) -> None:
        """Find, after the prompt, the modules that update a recurrent state, and keep their calls from now on."""
        blocks = self.model.get_decoder().layers
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                if isinstance(layer, DynamicLayer):
                    raise GenerationError(
                        "the target mixes attention and recurrence in one layer; that is not supported."
                    )
                if any(layer.has_previous_state.values()):
                    mixer = next(m for m in blocks[index].children() if getattr(m, "layer_idx", None) == index)
                    self._mixers.append(mixer)
                    with _REGISTERING:
                        self._handles.append(mixer.register_forward_pre_hook(self._keep_call, with_kwargs=True))
            elif getattr(layer, "is_sliding", False):
                raise GenerationError(
                    "the target has sliding-window layers, whose cache cannot be rolled back exactly; "
                    "use a model with full or linear attention."
                )

    def _forward(self, tokens: Tensor, logits_to_keep: int) -> tuple[Tensor, Tensor]:
        cache = {self._cache_argument: self.cache}
        output = self.model(input_ids=tokens, use_cache=True, logits_to_keep=logits_to_keep, **cache)
        features = [self._features[i] for i in sorted(self._features)]
        self._features = {}
        return output.logits, torch.cat(features, dim=-1) if len(features) > 1 else features[0]


def _first(value: Any, ran: int, kept: int) -> Any:
    """Cut a per-token tensor ``[1, ran, ...]`` to its first ``kept`` tokens; anything else stays as it is."""
    return value[:, :kept] if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == ran else value
