"""Options that several commands share, and the checks that need no model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windowed_mtp.errors import WindowedMTPError, WindowError
from windowed_mtp.window import SinkWindow

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from windowed_mtp.cli.hot_options import HotOptions
    from windowed_mtp.engines.transformers import WindowedMTP
    from windowed_mtp.engines.transformers.heads.hot import HotHead
    from windowed_mtp.results import Setting

DEFAULT_DEPTH = 3


class Keep(StrEnum):
    """Which draft keys stay in memory."""

    all = "all"
    ring = "ring"


class Prefill(StrEnum):
    """Which of the prompt's entries the draft runs over."""

    full = "full"
    pruned = "pruned"


class Dtype(StrEnum):
    """Number format of the weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def option(panel: str, name: str, metavar: str | None, help: str) -> Any:
    """Make an option whose help says itself what its default is, under a panel of the help."""
    return typer.Option(name, metavar=metavar, show_default=False, rich_help_panel=panel, help=help)


Model = Annotated[
    str, typer.Argument(metavar="MODEL", show_default=False, help="Folder of a checkpoint, or its name on the hub.")
]
Sink = Annotated[int | None, option("Draft", "--sink", "N", "Keys read at the start of the text (default 64).")]
Window = Annotated[
    int | None, option("Draft", "--window", "N", "Most recent keys read, the query's own included (default 4032).")
]
MinContext = Annotated[
    int | None, option("Draft", "--min-context", "N", "Read every key in contexts shorter than this (default 0).")
]
Depth = Annotated[int | None, option("Draft", "--depth", "N", f"Tokens drafted a step (default {DEFAULT_DEPTH}).")]
Native = Annotated[bool, option("Draft", "--native", None, "No window: the draft reads every key.")]
KeepOption = Annotated[
    Keep | None,
    option("Draft", "--keep", None, "Hold all draft keys (default), or a ring of sink + window + depth slots."),
]
PrefillOption = Annotated[
    Prefill | None,
    option("Draft", "--prefill", None, "Draft keys of the prompt: all (default), or with a ring those it will read."),
]
Eagle3 = Annotated[
    str | None, option("Draft", "--eagle3", "NAME", "EAGLE-3 drafter, folder or hub name, in place of MTP.")
]
Device = Annotated[
    str | None, option("Model", "--device", "NAME", "Torch device (default: cuda if there is one, else cpu).")
]
DtypeOption = Annotated[
    Dtype, option("Model", "--dtype", None, "Number format; auto (default) takes the checkpoint's own.")
]
Json = Annotated[Path | None, option("Output", "--json", "OUT", "Also write the numbers to this file.")]
Temperature = Annotated[
    float | None, option("Sampling", "--temperature", "T", "Above 0 (default: the checkpoint's, else 1).")
]
TopP = Annotated[
    float | None,
    option("Sampling", "--top-p", "P", "Draw from the likeliest tokens of this joint probability (default likewise)."),
]
TopK = Annotated[
    int | None, option("Sampling", "--top-k", "K", "Draw from the K likeliest tokens, 0 from all (default likewise).")
]


@dataclass(frozen=True)
class DraftOptions:
    """The draft options as given; ``None`` where an option was left out.

    Parameters
    ----------
    sink, window, min_context, depth, native, keep, prefill, eagle3
        As on the command line.
    hot
        The options of the hot vocabulary.

    Raises
    ------
    WindowError
        If they contradict each other.
    """

    sink: int | None = None
    window: int | None = None
    min_context: int | None = None
    depth: int | None = None
    native: bool = False
    keep: Keep | None = None
    prefill: Prefill | None = None
    eagle3: str | None = None
    hot: HotOptions | None = None

    def __post_init__(self) -> None:
        if self.native:
            for name in ("sink", "window", "min_context"):
                if getattr(self, name) is not None:
                    raise WindowError(
                        f"--native reads every key, so {flag(name)} has no meaning; leave one of them out."
                    )
            if self.keep == Keep.ring:
                raise WindowError(
                    "--native reads every key, but --keep ring holds only a window; leave one of them out."
                )
        if self.depth is not None and self.depth < 1:
            raise WindowError(f"--depth is {self.depth}, but it must be at least 1; pass a larger value.")
        if self.prefill == Prefill.pruned and self.keep != Keep.ring:
            raise WindowError("--prefill pruned leaves out keys that --keep all promises to hold; add --keep ring.")
        _ = self.sink_window

    @property
    def sink_window(self) -> SinkWindow | None:
        """The window; ``None`` for ``--native``."""
        if self.native:
            return None
        given = {"sink": self.sink, "window": self.window, "min_context": self.min_context}
        return SinkWindow(**{name: value for name, value in given.items() if value is not None})

    def given(self) -> list[str]:
        """Names of the options that were given."""
        own = {name: value for name, value in vars(self).items() if name != "hot"}
        return given_flags(own) + (self.hot.given() if self.hot else [])

    def check(self, model: str) -> None:
        """Check what the engine would refuse, before the model of that name is loaded.

        Raises
        ------
        WindowError
            If the options contradict each other.
        VocabularyError
            If the hot vocabulary does not fit the model.
        """
        from windowed_mtp.engines.transformers.request import check_options

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the engine warns itself
            check_options(**self._engine())
        if self.hot:
            self.hot.check(model, self.eagle3)

    def build(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> WindowedMTP:
        """Make the drafter of a model; a hot vocabulary needs its tokenizer."""
        from windowed_mtp.engines.transformers import WindowedMTP

        hot = self.hot.hot_set(tokenizer, model.get_output_embeddings().weight.shape[0]) if self.hot else None
        return WindowedMTP.from_model(model, eagle3=self.eagle3, hot_vocabulary=hot, measure=True, **self._engine())

    def settings(self, hot_head: HotHead | None = None) -> dict[str, Setting]:
        """Give the values in force, for a result file; ``hot_head`` is the drafter's."""
        engine = self._engine()
        window = engine.pop("window")
        parts = {name: getattr(window, name, None) for name in ("sink", "window", "min_context")}
        hot = self.hot.settings(hot_head) if self.hot and hot_head else {}
        return {**parts, **engine, "eagle3": self.eagle3, **hot}

    def describe(self, entries: int, hot_head: HotHead | None = None) -> str:
        """Say in one line what is in force, for a sequence of ``entries`` draft entries; ``hot_head`` as above."""
        text = f"draft: {self._engine()['num_speculative_tokens']} tokens a step, "
        window = self.sink_window
        if window is None:
            text += "no window (every key is read)"
        else:
            text += f"sink {window.sink}, window {window.window}"
            text += f", keep {self.keep or Keep.all}, prefill {self.prefill or Prefill.full}"
            if not window.engages(entries):
                bound = max(window.span + 1, window.min_context)
                text += f"; not engaged: it leaves keys out from {bound:,} on, and there were {entries:,}"
        return f"{text}; {self.hot.describe(hot_head)}" if self.hot and hot_head else text

    def _engine(self) -> dict[str, Any]:
        return {
            "window": self.sink_window,
            "num_speculative_tokens": DEFAULT_DEPTH if self.depth is None else self.depth,
            "keep": (self.keep or Keep.all).value,
            "prefill": (self.prefill or Prefill.full).value,
        }


@dataclass(frozen=True)
class SamplingOptions:
    """The sampling options as given; ``None`` where an option was left out.

    Raises
    ------
    WindowedMTPError
        If they contradict each other or are out of range.
    """

    sample: bool
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None

    def __post_init__(self) -> None:
        given = [flag(name) for name in ("temperature", "top_p", "top_k", "seed") if getattr(self, name) is not None]
        if given and not self.sample:
            raise WindowedMTPError(f"{given[0]} has no effect on greedy decoding; add --sample, or leave it out.")
        if self.temperature == 0:
            raise WindowedMTPError(
                "a temperature of 0 is greedy decoding; leave out --sample and --temperature for it."
            )
        if self.temperature is not None and self.temperature < 0:
            raise WindowedMTPError(f"--temperature is {self.temperature}, but it must be above 0; pass a larger value.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise WindowedMTPError(f"--top-p is {self.top_p}, but it must be above 0 and at most 1; pass such a value.")
        if self.top_k is not None and self.top_k < 0:
            raise WindowedMTPError(f"--top-k is {self.top_k}, but it must be at least 0, which keeps all tokens.")

    def generate_kwargs(self) -> dict[str, Any]:
        """Arguments of ``model.generate``; what was left out is the checkpoint's own."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {"do_sample": self.sample, **{name: value for name, value in given.items() if value is not None}}


def given_flags(values: Mapping[str, object]) -> list[str]:
    """Names of the options that were given, by field: those that are neither left out nor off."""
    return [flag(name) for name, value in values.items() if value is not None and value is not False]


def flag(name: str) -> str:
    """Name of a field as the option that it is."""
    return "--" + name.replace("_", "-")
