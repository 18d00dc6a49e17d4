"""Which logits processors a draft is drawn with."""

from __future__ import annotations

from transformers.generation import logits_process as known

DRAFTING = frozenset(
    {
        known.EncoderNoRepeatNGramLogitsProcessor,
        known.EncoderRepetitionPenaltyLogitsProcessor,
        known.EpsilonLogitsWarper,
        known.EtaLogitsWarper,
        known.ExponentialDecayLengthPenalty,
        known.ForcedBOSTokenLogitsProcessor,
        known.ForcedEOSTokenLogitsProcessor,
        known.InfNanRemoveLogitsProcessor,
        known.LogitNormalization,
        known.MinLengthLogitsProcessor,
        known.MinNewTokensLengthLogitsProcessor,
        known.MinPLogitsWarper,
        known.NoBadWordsLogitsProcessor,
        known.NoRepeatNGramLogitsProcessor,
        known.RepetitionPenaltyLogitsProcessor,
        known.SequenceBiasLogitsProcessor,
        known.SuppressTokensAtBeginLogitsProcessor,
        known.SuppressTokensLogitsProcessor,
        known.TemperatureLogitsWarper,
        known.TopHLogitsWarper,
        known.TopKLogitsWarper,
        known.TopPLogitsWarper,
        known.TypicalLogitsWarper,
        known.WatermarkLogitsProcessor,
    }
)
"""Processors of transformers that depend on nothing but the ids and scores of a call.

Any other may advance with each call (a grammar's matcher, guidance, SynthID), or not know what to say of a prefix that
is never emitted (``prefix_allowed_tokens_fn``). A subclass is another: nobody knows what it adds.
"""
