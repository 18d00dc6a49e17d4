"""The reference checkpoint's tokenizer and its training text as token arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from windowed_mtp.workloads.stdlib import Split, documents

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048


def train_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the train part of the standard library and save it for ``AutoTokenizer``.

    Parameters
    ----------
    folder : Path
        Where ``tokenizer.json`` and ``tokenizer_config.json`` are written.

    Returns
    -------
    PreTrainedTokenizerFast
        2048 entries; number 0 ends a text and pads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in documents("train")), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
    return fast


def token_stream(tokenizer: PreTrainedTokenizerFast, split: Split) -> np.ndarray:
    """All files of one side of the split as one stream of tokens.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerFast
        The reference tokenizer.
    split : {"train", "heldout"}
        Which side to encode.

    Returns
    -------
    ndarray of uint16, shape (tokens,)
        Files in the order of their names, so that a long stretch covers related modules, each followed by the
        end-of-text token.
    """
    texts = [text for _, text in documents(split)]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.concatenate([np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16) for ids in encoded])
