"""The options of a draft's hot vocabulary, and what can be checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from windowed_mtp.cli.load import load_tokenizer
from windowed_mtp.cli.options import flag, given_flags, option
from windowed_mtp.cli.output import size
from windowed_mtp.errors import VocabularyError

if TYPE_CHECKING:
    from windowed_mtp.engines.transformers.heads.hot import HotHead
    from windowed_mtp.results import Setting
    from windowed_mtp.vocab import HotSet, HotVocabulary, Ranking

SHARE = 8
"""The default size is the model's vocabulary divided by this."""

PANEL = "Hot vocabulary"
HotVocabularyFile = Annotated[
    Path | None,
    option(
        PANEL,
        "--hot-vocabulary",
        "FILE",
        "Let the draft propose likely tokens only, by a file of vocab count or a token map.",
    ),
]
HotSize = Annotated[
    int | None,
    option(PANEL, "--hot-size", "N", "How many tokens, special and single-byte ones included (default: an eighth)."),
]
HotPromptTail = Annotated[
    int | None,
    option(PANEL, "--hot-prompt-tail", "N", "Tokens at the prompt's end that are always among them (default 0)."),
]
HotOnline = Annotated[
    bool,
    option(PANEL, "--hot-online", None, "Rank tokens by the output as it grows, on top of FILE or without it."),
]


@dataclass(frozen=True)
class HotOptions:
    """The options of the hot vocabulary as given; true if any was.

    Parameters
    ----------
    hot_vocabulary, hot_online, hot_size, hot_prompt_tail
        As on the command line.

    Raises
    ------
    VocabularyError
        If they contradict each other or are out of range.
    """

    hot_vocabulary: Path | None = None
    hot_online: bool = False
    hot_size: int | None = None
    hot_prompt_tail: int | None = None

    def __post_init__(self) -> None:
        if self and self.hot_vocabulary is None and not self.hot_online:
            raise VocabularyError(
                f"{self.given()[0]} does not say which tokens are hot; add --hot-vocabulary FILE or --hot-online."
            )
        for name, least in (("hot_size", 1), ("hot_prompt_tail", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise VocabularyError(f"{flag(name)} is {value}, but it must be at least {least}; pass a larger value.")

    def __bool__(self) -> bool:
        return bool(self.given())

    def given(self) -> list[str]:
        """Names of the options that were given."""
        return given_flags({field.name: getattr(self, field.name) for field in fields(self)})

    @cached_property
    def _file(self) -> HotVocabulary | None:
        from windowed_mtp.vocab import HotVocabulary

        return None if self.hot_vocabulary is None else HotVocabulary.load(self.hot_vocabulary)

    def check(self, model: str, eagle3: str | None) -> None:
        """Check the file, and the hot set against a model's config and tokenizer, before its weights are loaded.

        Parameters
        ----------
        model : str
            Folder or hub name.
        eagle3 : str or None
            Folder or hub name of an EAGLE-3 drafter.

        Raises
        ------
        VocabularyError
            If the file cannot be read or is another tokenizer's, or the hot set does not fit the model or the drafter.
        CheckpointError
            If there is no such model, it has no tokenizer, or the drafter's config is not one.
        """
        _ = self._file
        tokenizer = load_tokenizer(model)
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(tokenizer.name_or_path).get_text_config()
        vocab_size = getattr(config, "vocab_size", None)
        if vocab_size is None:
            return  # no language model, as loading will say
        if eagle3 is not None:
            from windowed_mtp.engines.transformers.heads.eagle3_config import Eagle3Config

            own = Eagle3Config.load(eagle3).draft_vocab_size
            if own < vocab_size:
                raise VocabularyError(
                    f"the EAGLE-3 drafter {eagle3!r} has a vocabulary of its own ({own} of the model's {vocab_size} "
                    f"tokens), which {self.given()[0]} cannot cut further; leave the hot options out."
                )
        self.hot_set(tokenizer, vocab_size)

    def hot_set(self, tokenizer: Any, vocab_size: int) -> HotSet:
        """Make the hot set of a model.

        Parameters
        ----------
        tokenizer : PreTrainedTokenizerBase
            The model's tokenizer.
        vocab_size : int
            Rows V of its output head.

        Raises
        ------
        VocabularyError
            If the file cannot be read or is another tokenizer's, or the size does not fit.
        """
        from windowed_mtp.probes.hot_vocabulary import INTERVAL
        from windowed_mtp.vocab import HotSet, OnlineCounts
        from windowed_mtp.vocab.file import byte_ids, special_ids

        file = None if self._file is None else self._file.completed(tokenizer)
        ranking: Ranking | None = file
        if ranking is None or self.hot_online:
            always = (*special_ids(tokenizer), *byte_ids(tokenizer))
            ranking = OnlineCounts(file, always=always, interval=INTERVAL)
        tail = self.hot_prompt_tail or 0
        hot = HotSet(ranking, self.hot_size or max(vocab_size // SHARE, len(ranking.always) + tail), tail)
        hot.ids(vocab_size)
        return hot

    def settings(self, hot_head: HotHead) -> dict[str, Setting]:
        """Give the values in force, for a result file; ``hot_head`` is the drafter's, its bytes those of the copy."""
        return {
            "hot_vocabulary": None if self.hot_vocabulary is None else str(self.hot_vocabulary),
            "hot_size": hot_head.hot.size,
            "hot_prompt_tail": hot_head.hot.prompt_tail,
            "hot_online": self.hot_online,
            "hot_head_bytes": hot_head.num_bytes,
        }

    def describe(self, hot_head: HotHead) -> str:
        """Say what is in force, as a part of a line."""
        from windowed_mtp.probes.hot_vocabulary import INTERVAL

        hot, output_head = hot_head.hot, hot_head.head.output_head()
        order = [] if self.hot_vocabulary is None else [str(self.hot_vocabulary)]
        if self.hot_online:
            counted = hot.ranking.version * INTERVAL
            order.insert(0, f"the output ({counted:,} tokens counted, anew every {INTERVAL})")
        text = f"hot vocabulary: {hot.size:,} of {output_head.out_features:,} tokens, by {', then '.join(order)}"
        if hot.prompt_tail:
            text += f", and the prompt's last {hot.prompt_tail:,}"
        return f"{text}; {size(hot_head.num_bytes)} copied" if hot_head.num_bytes else f"{text}; nothing left out"
