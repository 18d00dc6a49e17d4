"""Draft heads by family."""

from __future__ import annotations

from transformers import PreTrainedModel

from windowed_mtp.engines.transformers.heads.base import DraftHead, MTPHead
from windowed_mtp.engines.transformers.heads.deepseek import DeepseekHead
from windowed_mtp.engines.transformers.heads.eagle3 import Eagle3Head
from windowed_mtp.engines.transformers.heads.nemotron_h import NemotronHHead
from windowed_mtp.engines.transformers.heads.qwen3_5 import Qwen3_5Head
from windowed_mtp.engines.transformers.loading import Checkpoint
from windowed_mtp.errors import CheckpointError

FAMILIES: tuple[type[MTPHead], ...] = (Qwen3_5Head, DeepseekHead, NemotronHHead)


def load_head(model: PreTrainedModel, checkpoint: str | None = None, eagle3: str | None = None) -> DraftHead:
    """Load the draft head of a model.

    Parameters
    ----------
    model : PreTrainedModel
        A transformers causal language model.
    checkpoint : str, optional
        Folder or hub name to take the head from; the one the model was loaded from without it.
    eagle3 : str, optional
        Folder or hub name of an EAGLE-3 drafter, which takes the place of a built-in head.

    Raises
    ------
    CheckpointError
        If the family is unknown, or there is no head, or it does not fit.
    """
    if eagle3 is not None:
        if checkpoint is not None:
            raise CheckpointError(
                "checkpoint says where a built-in head is and eagle3 names a drafter instead of it; pass one of them."
            )
        return Eagle3Head.load(model, eagle3)
    model_type = model.config.get_text_config().model_type
    family = next((family for family in FAMILIES if model_type in family.model_types), None)
    if family is None:
        known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
        raise CheckpointError(
            f"no MTP head is known for model type {model_type!r}; supported are {known}, or pass an EAGLE-3 drafter."
        )
    name = checkpoint or model.config.name_or_path
    # What the model came from is read at the commit it came from.
    revision = None if checkpoint else getattr(model.config, "_commit_hash", None)
    if not name:
        raise CheckpointError(
            "the model was not loaded from a checkpoint; pass checkpoint=... to say where its head is."
        )
    return family.load(model, Checkpoint(name, revision))
