"""An engine whose drafter has no attention, in a process of its own.

The n-gram drafter imports numba, whose bindings no later engine of vLLM's on a CPU survives in the same process.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from engines import engine, generate, runner_of
from models import llama_with_eagle3, random_prompts

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm.config import PluginConfig, PluginError
from windowed_mtp.engines.vllm.install import window_draft_layers

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


@contextmanager
def plugin_log() -> Iterator[list[tuple[str, str]]]:
    """The plugin's log lines, as (level, text); by a filter, as vLLM takes its loggers' handlers off when it starts."""
    lines: list[tuple[str, str]] = []
    logger = logging.getLogger("vllm.windowed_mtp")

    def keep(record: logging.LogRecord) -> bool:
        lines.append((record.levelname, record.getMessage()))
        return True

    logger.addFilter(keep)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeFilter(keep)
        logger.setLevel(logging.NOTSET)


def _run(window: dict[str, Any]) -> tuple[list[list[int]], list[tuple[str, str]], str]:
    [prompt] = random_prompts([300])
    options = {"skip_tokenizer_init": True, "max_model_len": 2048}
    with plugin_log() as lines, engine(llama_with_eagle3()[0], window, NGRAM, **options) as llm:
        answers = [answer.tokens for answer in generate(llm, [prompt, prompt])]
        try:
            window_draft_layers(runner_of(llm), PluginConfig(SinkWindow(), strict=True))
        except PluginError as error:
            return answers, lines, str(error)
        return answers, lines, ""


def run(window: dict[str, Any]) -> tuple[list[list[int]], list[tuple[str, str]], str]:
    """Two continuations of one prompt, the plugin's log lines, and what it says where it is strict."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, window).result()
