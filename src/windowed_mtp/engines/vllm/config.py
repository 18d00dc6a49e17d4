"""The plugin's settings, as they stand in ``additional_config["windowed_mtp"]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windowed_mtp.errors import WindowedMTPError, WindowError
from windowed_mtp.window import SinkWindow

KEY = "windowed_mtp"
_KINDS = {
    "sink": int,
    "window": int,
    "min_context": int,
    "window_first_pass": bool,
    "widest_window": int,
    "strict": bool,
    "hot_vocabulary": Mapping,
}
_SAID = {int: "a whole number", bool: "true or false", Mapping: 'an object such as {"size": 32768, "file": "hot.json"}'}


class PluginError(WindowedMTPError):
    """A window that was asked for and cannot be put in force."""


@dataclass(frozen=True)
class HotVocabularyConfig:
    """Which rows of its output head a draft looks at.

    Attributes
    ----------
    size : int
        Number of rows.
    file : str
        A ranking made by ``windowed-mtp vocab count``.
    """

    size: int
    file: str

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> HotVocabularyConfig:
        """Read the settings.

        Raises
        ------
        PluginError
            If a key is unknown or missing, or a value is of the wrong type or impossible.
        """
        place = f'additional_config["{KEY}"]["hot_vocabulary"]'
        for name in given:
            if name not in ("size", "file"):
                raise PluginError(f"{place} has an unknown key {name!r}; known are size, file.")
        size, file = given.get("size"), given.get("file")
        if type(size) is not int or size < 1:
            raise PluginError(f'{place}["size"] is {size!r}, but it must be a whole number of at least 1.')
        if not isinstance(file, str) or not file:
            raise PluginError(f'{place}["file"] is {file!r}, but it must name a file of windowed-mtp vocab count.')
        return cls(size, file)


@dataclass(frozen=True)
class PluginConfig:
    """What an engine was asked for.

    Attributes
    ----------
    window : SinkWindow
        What a draft query reads; sink and window are rounded up to the attention's blocks.
    window_first_pass : bool
        Whether the pass over the verified tokens is windowed too, or only the passes after it.
    widest_window : int
        Largest window that `Windowing.window` may be set to while the engine runs with CUDA graphs; room is made for
        it. The window itself, if smaller.
    strict : bool
        Whether a window that cannot be put in force stops the engine; else it is a warning.
    hot_vocabulary : HotVocabularyConfig or None
        Which rows of its output head the draft looks at; all, if ``None``.
    """

    window: SinkWindow
    window_first_pass: bool = True
    widest_window: int = 0
    strict: bool = True
    hot_vocabulary: HotVocabularyConfig | None = None

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
            kind = _KINDS[name]
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise PluginError(f'additional_config["{KEY}"]["{name}"] is {value!r}, but it must be {_SAID[kind]}.')
        if given.get("widest_window", 0) < 0:
            raise PluginError(
                f'additional_config["{KEY}"]["widest_window"] is negative; leave it out, or name a window.'
            )
        own = {name: given[name] for name in ("window_first_pass", "widest_window", "strict") if name in given}
        if "hot_vocabulary" in given:
            own["hot_vocabulary"] = HotVocabularyConfig.read(given["hot_vocabulary"])
        try:
            window = SinkWindow(**{name: value for name, value in given.items() if name not in own})
        except WindowError as error:
            raise PluginError(f'additional_config["{KEY}"]: {error}') from None
        return cls(window, **own)
