"""The hot vocabulary: the token ids that a draft may propose, ranked by how often they occur. Needs no torch."""

from windowed_mtp.vocab.file import HotVocabulary, TokenizerIdentity
from windowed_mtp.vocab.ids import HotSet, Ranking, hot_ids, left_out
from windowed_mtp.vocab.online import OnlineCounts

__all__ = ["HotSet", "HotVocabulary", "OnlineCounts", "Ranking", "TokenizerIdentity", "hot_ids", "left_out"]
