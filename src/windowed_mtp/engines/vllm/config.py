"""The plugin's settings, as they stand in ``additional_config["windowed_mtp"]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windowed_mtp.errors import WindowedMTPError, WindowError
from windowed_mtp.window import SinkWindow

KEY = "windowed_mtp"
_KINDS = {"sink": int, "window": int, "min_context": int, "window_first_pass": bool, "strict": bool}


class PluginError(WindowedMTPError):
    """A window that was asked for and cannot be put in force."""


@dataclass(frozen=True)
class PluginConfig:
    """What an engine was asked for.

    Attributes
    ----------
    window : SinkWindow
        What a draft query reads; sink and window are rounded up to the attention's blocks.
    window_first_pass : bool
        Whether the pass over the verified tokens is windowed too, or only the passes after it.
    strict : bool
        Whether a window that cannot be put in force stops the engine; else it is a warning.
    """

    window: SinkWindow
    window_first_pass: bool = True
    strict: bool = True

    @classmethod
    def read(cls, additional_config: Any) -> PluginConfig | None:
        """Read the settings of an engine.

        Parameters
        ----------
        additional_config : Any
            vLLM's ``additional_config``.

        Returns
        -------
        PluginConfig or None
            ``None`` if there are none, and the plugin stays out of the way.

        Raises
        ------
        PluginError
            If a key is unknown, or a value is of the wrong type or impossible.
        """
        if not isinstance(additional_config, Mapping) or KEY not in additional_config:
            return None
        given = additional_config[KEY]
        if not isinstance(given, Mapping):
            raise PluginError(
                f'additional_config["{KEY}"] is {given!r}, but it must be an object such as {{"window": 4032}}.'
            )
        for name, value in given.items():
            if name not in _KINDS:
                raise PluginError(
                    f'additional_config["{KEY}"] has an unknown key {name!r}; known are {", ".join(_KINDS)}.'
                )
            if type(value) is not _KINDS[name]:
                kind = "true or false" if _KINDS[name] is bool else "a whole number"
                raise PluginError(f'additional_config["{KEY}"]["{name}"] is {value!r}, but it must be {kind}.')
        own = {name: given[name] for name in ("window_first_pass", "strict") if name in given}
        try:
            window = SinkWindow(**{name: value for name, value in given.items() if name not in own})
        except WindowError as error:
            raise PluginError(f'additional_config["{KEY}"]: {error}') from None
        return cls(window, **own)
