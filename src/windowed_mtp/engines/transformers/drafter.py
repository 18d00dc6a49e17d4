"""Speculative decoding with a windowed draft, as a ``custom_generate`` callable for transformers."""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList

from windowed_mtp.engines.protocol import DepthPolicy, ProposalOverride, StepContext, StepEvent, StepObserver
from windowed_mtp.engines.stats import DecodeStats, StatsByThread
from windowed_mtp.engines.transformers.compat import cache_argument
from windowed_mtp.engines.transformers.draft import DraftState, Keep, Prefill
from windowed_mtp.engines.transformers.heads import load_head
from windowed_mtp.engines.transformers.heads.base import DraftHead
from windowed_mtp.engines.transformers.heads.hot import HotHead
from windowed_mtp.engines.transformers.processors import DRAFTING
from windowed_mtp.engines.transformers.request import check_options, check_request, streamer_of
from windowed_mtp.engines.transformers.target import Target
from windowed_mtp.engines.transformers.verify import accept_or_resample, point_mass
from windowed_mtp.errors import GenerationError
from windowed_mtp.vocab import HotSet
from windowed_mtp.window import SinkWindow


class WindowedMTP:
    """A draft head that reads only sinks and a recent window, for ``model.generate(custom_generate=...)``.

    Parameters
    ----------
    model : PreTrainedModel
        The target, a transformers causal language model.
    head : DraftHead
        Its draft head.
    window : SinkWindow or None
        What the draft reads; ``None`` for everything (native MTP).
    num_speculative_tokens : int
        Largest number of tokens drafted a step, γ.
    keep : {"all", "ring"}
        ``"all"`` keeps every draft key; ``"ring"`` keeps sink + window + γ slots.
    prefill : {"full", "pruned"}
        ``"pruned"`` (ring only) skips the prompt's middle, which no draft query would read.
    hot_vocabulary : HotSet, optional
        The tokens that the draft may propose; all without it.
    depth : callable, optional
        Gives the number of tokens to draft before each step, 0 to γ; always γ without it.
    on_step : callable, optional
        Observes every step.
    override : callable, optional
        Replaces proposals before verification.
    shadows : mapping of str to SinkWindow or None, optional
        Windows (``None`` for everything) by name: each is drafted beside the real one at every step, greedily and
        without any influence on it, and reported in the step event.
    measure : bool
        Synchronise the GPU around the halves of a step, so that their times are exact.

    Notes
    -----
    One drafter serves several generations at once, in threads of their own or one within another, and the model may
    be used beside them. What is passed in (callables, an `OnlineCounts`) is shared by all of them.

    Raises
    ------
    WindowError
        If the options contradict each other.
    VocabularyError
        If the hot vocabulary does not fit the head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: DraftHead,
        *,
        window: SinkWindow | None = SinkWindow(),  # noqa: B008 (frozen)
        num_speculative_tokens: int = 3,
        keep: Keep = "all",
        prefill: Prefill = "full",
        hot_vocabulary: HotSet | None = None,
        depth: DepthPolicy | None = None,
        on_step: StepObserver | None = None,
        override: ProposalOverride | None = None,
        shadows: Mapping[str, SinkWindow | None] | None = None,
        measure: bool = False,
    ) -> None:
        check_options(window, num_speculative_tokens, keep, prefill, hot_vocabulary)
        self.model = model
        self.hot_head = None if hot_vocabulary is None else HotHead(head, hot_vocabulary)
        self.head = self.hot_head or head
        self.window = window
        self.num_speculative_tokens = num_speculative_tokens
        self.keep = keep
        self.prefill = prefill
        self.depth = depth
        self.on_step = on_step
        self.override = override
        self.shadows = dict(shadows or {})
        self.measure = measure
        self._stats = StatsByThread()

    @property
    def stats(self) -> DecodeStats:
        """Counts and times of the last generation in this thread; in a thread without one, of the last in any."""
        return self._stats.get()

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        *,
        window: SinkWindow | None = SinkWindow(),  # noqa: B008 (frozen)
        num_speculative_tokens: int = 3,
        keep: Keep = "all",
        prefill: Prefill = "full",
        checkpoint: str | None = None,
        eagle3: str | None = None,
        **options: Any,
    ) -> WindowedMTP:
        """Load the head that belongs to a model.

        Parameters
        ----------
        model : PreTrainedModel
            A transformers causal language model.
        window, num_speculative_tokens, keep, prefill
            As the constructor takes them.
        checkpoint : str, optional
            Folder or hub name to take the head from; the one the model was loaded from without it.
        eagle3 : str, optional
            Folder or hub name of an EAGLE-3 drafter to use instead of a built-in head.
        **options
            The constructor's others: ``hot_vocabulary``, ``depth``, ``on_step``, ``override``, ``shadows``,
            ``measure``.

        Raises
        ------
        CheckpointError
            If the family is unknown, or the checkpoint has no head or one that does not fit.
        WindowError
            If the options contradict each other.
        VocabularyError
            If the hot vocabulary does not fit the head.
        """
        return cls(
            model,
            load_head(model, checkpoint=checkpoint, eagle3=eagle3),
            window=window,
            num_speculative_tokens=num_speculative_tokens,
            keep=keep,
            prefill=prefill,
            **options,
        )

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode; called by ``model.generate(..., custom_generate=self)`` with everything it prepared.

        Logits processors and stopping criteria are asked what plain decoding asks them: about each prefix that is
        emitted, once, in order. The draft is drawn with the processors that transformers itself brings and that depend
        on nothing but ids and scores (``DRAFTING``), and without all others.

        Returns
        -------
        Tensor or GenerateDecoderOnlyOutput
            Prompt and generated tokens, ``[1, n]`` int64, as ``generate`` would return them.

        Raises
        ------
        GenerationError
            If the request is one that this engine does not serve.
        AllocationError
            If there is no memory for the draft's keys and values.
        """
        streamer = streamer_of(inspect.currentframe())
        cache = check_request(self.model, model, input_ids, generation_config, model_kwargs)
        target = Target(model, cache, self.head.feature_layers())
        with torch.no_grad(), target.hooked():
            decoding = _Decoding(
                self, target, input_ids, logits_processor, stopping_criteria, generation_config, streamer
            )
            self._stats.put(decoding.stats)
            output = decoding.run()
            self._stats.put(decoding.stats)  # again: generations within this one have ended since
            return output


class _Decoding:
    """One generation: the loop of prefill, then draft, verify, emit."""

    def __init__(
        self,
        drafter: WindowedMTP,
        target: Target,
        ids: Tensor,
        processor: Any,
        criteria: Any,
        config: Any,
        streamer: Any,
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.ids = ids
        self._room = ids  # begins with the ids
        self.processor = processor
        self.draft_processor: Any = LogitsProcessorList(one for one in processor if type(one) in DRAFTING)
        self.criteria = criteria
        self.config = config
        self.streamer = streamer
        self.sample = bool(config.do_sample)
        self.head = drafter.head.for_request(ids[0].tolist())
        depth = drafter.num_speculative_tokens
        self.draft = DraftState(self.head, drafter.window, depth, drafter.keep, drafter.prefill)
        self.shadows = {name: DraftState(self.head, window, depth) for name, window in drafter.shadows.items()}
        self.emitted: tuple[int, ...] = ()
        returned = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if returned and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if returned and config.output_logits else None
        self.stats = DecodeStats(prompt_tokens=ids.shape[1])

    def run(self) -> Tensor | GenerateDecoderOnlyOutput:
        begin = self._clock()
        logits, features = self.target.prefill(self.ids, getattr(self.config, "prefill_chunk_size", None))
        prefilled = self._clock()
        self._observe(features)
        self.draft.advance(self.ids)
        self.stats.target_prefill_seconds = prefilled - begin
        self.stats.draft_prefill_seconds = self._clock() - prefilled
        for shadow in self.shadows.values():
            shadow.advance(self.ids)

        done = self._emit(self._accept(self.ids[:, :0], [], logits[0]), logits[0])
        self.emitted = tuple(self.ids[0, -1:].tolist())
        while not done:
            done = self._step()
        self.head.follow(self.emitted)
        self.stats.new_tokens = self.ids.shape[1] - self.stats.prompt_tokens
        self.stats.draft_kv_bytes = self.draft.num_bytes
        self.stats.hot_head_bytes = self.head.num_bytes
        if self.streamer is not None:
            self.streamer.end()
        sequences = self.ids.clone()  # without the room
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=self.scores,  # type: ignore[arg-type]
            logits=self.logits,  # type: ignore[arg-type]
            **{cache_argument(self.target.model): self.target.cache},  # type: ignore[arg-type]
        )

    def _step(self) -> bool:
        context = self._context()
        depth = self._depth(context)
        keys_before, begin = self.draft.keys_read, self._clock()
        self.head.follow(self.emitted)  # a part of the draft's work, and of its time
        drafted, distributions = self._propose(context, depth)
        drafted_at = self._clock()

        logits, features = self.target.verify(torch.cat([self.ids[:, -1:], drafted], dim=1))
        before = self.ids.shape[1]
        done = self._emit(self._accept(drafted, distributions, logits[0]), logits[0])
        proposed, emitted = drafted[0].tolist(), self.ids[0, before:].tolist()
        # The cache holds what has been read: every token but the last.
        self.target.keep(len(emitted), len(proposed) + 1)
        self._observe(features[:, : len(emitted)])
        event = StepEvent(
            step=context.step,
            length=context.length,
            depth=depth,
            proposed=tuple(proposed),
            accepted=sum(takewhile(bool, map(operator.eq, proposed, emitted))),
            emitted=tuple(emitted),
            draft_keys=self.draft.keys_read - keys_before,
            draft_seconds=drafted_at - begin,
            verify_seconds=self._clock() - drafted_at,
        )
        self.stats.add(event)
        if self.drafter.on_step is not None:
            self.drafter.on_step(replace(event, shadow=self._shadow(context, depth)))
        self.emitted = event.emitted
        return done

    def _context(self) -> StepContext:
        length = self.ids.shape[1]
        return StepContext(self.stats.steps, self.ids, length, self.config.max_length - length)

    def _depth(self, context: StepContext) -> int:
        depth = self.drafter.num_speculative_tokens if self.drafter.depth is None else self.drafter.depth(context)
        if not isinstance(depth, SupportsIndex) or not 0 <= depth <= self.drafter.num_speculative_tokens:
            raise GenerationError(
                f"the depth callable returned {depth!r}, but it must stay between 0 and num_speculative_tokens "
                f"({self.drafter.num_speculative_tokens})."
            )
        return min(operator.index(depth), max(0, context.remaining - 1))

    def _propose(self, context: StepContext, depth: int) -> tuple[Tensor, list[Tensor]]:
        """Drafted tokens ``[1, k]``, and when sampling the distribution ``[1, V]`` each was drawn from."""
        distributions: list[Tensor] = []

        def choose(logits: Tensor, drafted: Tensor) -> Tensor:
            scores = _copied(logits)
            if self.draft_processor:
                scores = self.draft_processor(torch.cat([self.ids, drafted], dim=1), scores)
            if not self.sample:
                return scores.argmax(-1, keepdim=True)
            # Where the processors forbid every token of the draft's vocabulary, all are equally likely.
            distributions.append(scores.softmax(-1).nan_to_num(nan=1 / scores.shape[-1]))
            return torch.multinomial(distributions[-1], 1)

        drafted = self.draft.propose(self.ids, depth, choose)
        if self.drafter.override is not None:
            replaced = self.drafter.override(context, tuple(drafted[0].tolist()))
            if replaced is not None:
                vocab_size = self.target.model.config.get_text_config().vocab_size
                replaced = list(replaced)[:depth]
                if not all(0 <= token < vocab_size for token in replaced):
                    raise GenerationError(
                        f"the override proposed {replaced}, but the model's {vocab_size} tokens are 0 to "
                        f"{vocab_size - 1}."
                    )
                drafted = torch.tensor([replaced], dtype=torch.int64, device=self.ids.device)
                distributions = [point_mass(token, vocab_size) for token in drafted.unbind(1)] if self.sample else []
        return drafted, distributions

    def _accept(self, drafted: Tensor, distributions: list[Tensor], logits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens to emit (each ``[1]``) and their scores ``[1, V]``: accepted ones, then the target's own.

        Made one by one, as processors may be asked about a token only if those before it did not end the generation.
        """
        if not self.sample and not self.processor:  # one comparison on the device, one transfer
            picks = logits.float().argmax(-1)
            agree = (picks[:-1] == drafted[0]).long().cumprod(0).sum()
            count = int(agree) + 1
            yield from zip(picks[:count, None], logits[:count, None].float(), strict=True)
            return
        for position in range(drafted.shape[1]):
            scores = self.processor(self.ids, _copied(logits[position : position + 1]))
            proposal = drafted[:, position]
            if self.sample:
                token, _ = accept_or_resample(scores.softmax(-1), distributions[position], proposal)
            else:
                token = scores.argmax(-1)
            yield token, scores
            if bool(token != proposal):
                return
        scores = self.processor(self.ids, _copied(logits[-1:]))
        yield torch.multinomial(scores.softmax(-1), 1)[:, 0] if self.sample else scores.argmax(-1), scores

    def _emit(self, tokens: Iterable[tuple[Tensor, Tensor]], logits: Tensor) -> bool:
        """Append tokens one by one until a stopping criterion holds; whether one does."""
        for position, (token, scores) in enumerate(tokens):
            self._append(token)
            if self.scores is not None:
                self.scores += (scores,)
            if self.logits is not None:
                self.logits += (logits[position : position + 1].float(),)
            done = bool(self.criteria(self.ids, self.scores).all())
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            if done:
                return True
        return False

    def _append(self, token: Tensor) -> None:
        """Add a token ``[1]`` to the ids, in room that grows by half, so that a step never copies all of them."""
        length = self.ids.shape[1]
        if length == self._room.shape[1]:
            self._room = torch.cat([self._room, self._room.new_empty(1, max(256, length // 2))], dim=1)
        self._room[:, length] = token
        self.ids = self._room[:, : length + 1]

    def _observe(self, features: Tensor) -> None:
        self.draft.observe(features)
        for shadow in self.shadows.values():
            shadow.observe(features)

    def _shadow(self, context: StepContext, depth: int) -> dict[str, tuple[int, ...]]:
        greedy = lambda logits, drafted: logits.argmax(-1, keepdim=True)  # noqa: E731
        drafts = {name: state.propose(context.ids, depth, greedy) for name, state in self.shadows.items()}
        return {name: tuple(tokens[0].tolist()) for name, tokens in drafts.items()}

    def _clock(self) -> float:
        if self.drafter.measure and self.ids.is_cuda:
            torch.cuda.synchronize(self.ids.device)
        return time.perf_counter()


def _copied(logits: Tensor) -> Tensor:
    """Logits in float32, for processors that change what they are given."""
    return logits.to(torch.float32, copy=True)
