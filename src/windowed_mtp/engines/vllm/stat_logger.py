"""Statistics of a server: counters beside vLLM's own, and a line in its log."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from windowed_mtp.engines.vllm.config import PluginConfig, PluginError
from windowed_mtp.engines.vllm.statistics import DraftPlan, DraftStatistics
from windowed_mtp.engines.vllm.steps import install, steps_of

logger = init_logger("vllm.windowed_mtp")

PREFIX = "vllm:spec_decode_window_num_"


class WindowStatLogger(AggregateStatLoggerBase):
    """Counts what drafts read and what came of them; the entry point in ``vllm.stat_logger_plugins``.

    Counters, labelled ``model_name`` and ``engine`` as vLLM's own:

    - ``vllm:spec_decode_window_num_drafts{windowed}``: drafts verified; ``windowed`` is ``"true"`` where a draft read
      less than everything.
    - ``vllm:spec_decode_window_num_accepted_tokens{windowed}``: 1 + this / drafts is the mean acceptance length.
    - ``vllm:spec_decode_window_num_accepted_tokens_per_pos{windowed, position}``.
    - ``vllm:spec_decode_window_num_draft_keys_read`` and ``..._full``: keys that one windowed draft layer read, and
      would have read without the window; prefill excluded. They are counted in blocks of the engine's attention: a
      kernel that splits these blocks reads less.

    An engine without the plugin's settings is left alone.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self.engine_indexes = engine_indexes
        self.labels = {"model_name": getattr(vllm_config.model_config, "served_model_name", None)}
        self.plan: DraftPlan | None = None
        self.counters: dict[str, Counter] = {}
        self.since_log = DraftStatistics()
        if PluginConfig.read(vllm_config.additional_config) is None:
            return
        try:
            self.plan = DraftPlan.read(vllm_config)
            install()
        except PluginError as reason:
            self.plan = None
            logger.warning_once("Windowed MTP: %s", reason)

    def log_engine_initialized(self) -> None:
        """Register the counters: not before, as vLLM's Prometheus logger first takes off all that begin with vllm:."""
        if self.plan is None:
            return
        common, windowed = ["model_name", "engine"], ["model_name", "engine", "windowed"]
        for name, labels, text in (
            ("drafts", windowed, "Number of drafts verified, by whether the window left something out."),
            ("accepted_tokens", windowed, "Number of accepted tokens, by whether the window left something out."),
            ("accepted_tokens_per_pos", [*windowed, "position"], "Accepted tokens per draft position."),
            ("draft_keys_read", common, "Number of keys that a windowed draft layer read, prefill excluded."),
            ("draft_keys_full", common, "Number of keys that it would have read without the window."),
        ):
            self.counters[name] = Counter(PREFIX + name, text, labels)
        for engine in self.engine_indexes:
            for is_windowed in (True, False):
                self._count(
                    engine, is_windowed, DraftStatistics(accepted_per_position=[0] * self.plan.num_speculative_tokens)
                )

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Count the steps of one iteration of one engine."""
        if self.plan is None or not self.counters:
            return
        if scheduler_stats is not None and scheduler_stats.spec_decoding_stats is None:
            return  # nothing was drafted
        counts = {True: DraftStatistics(), False: DraftStatistics()}
        for step in steps_of(iteration_stats):
            read, full = self.plan.keys(step)
            counts[read < full].add(step, self.plan)
            self.since_log.add(step, self.plan)
        for is_windowed, made in counts.items():
            if made.steps:
                self._count(engine_idx, is_windowed, made)

    def log(self) -> None:
        """Say what the steps since the last call read, if there were any."""
        made, self.since_log = self.since_log, DraftStatistics()
        if made.steps:
            logger.info(
                "Windowed MTP metrics: Mean acceptance length: %.2f, Per-position acceptance rate: %s, "
                "Windowed drafts: %d of %d, Draft keys read: %d of %d (%.1f%%)",
                made.acceptance_length,
                ", ".join(f"{share:.3f}" for share in made.acceptance),
                made.windowed_steps,
                made.steps,
                made.keys_read,
                made.keys_full,
                100 * made.share_read,
            )

    def _count(self, engine: int, is_windowed: bool, made: DraftStatistics) -> None:
        common = {**self.labels, "engine": str(engine)}
        windowed = {**common, "windowed": str(is_windowed).lower()}
        self.counters["drafts"].labels(**windowed).inc(made.steps)
        self.counters["accepted_tokens"].labels(**windowed).inc(sum(made.accepted_per_position))
        for position, accepted in enumerate(made.accepted_per_position):
            self.counters["accepted_tokens_per_pos"].labels(**windowed, position=str(position)).inc(accepted)
        self.counters["draft_keys_read"].labels(**common).inc(made.keys_read)
        self.counters["draft_keys_full"].labels(**common).inc(made.keys_full)
