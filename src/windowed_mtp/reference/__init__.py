"""The bundled reference checkpoint: a small Qwen3.5 language model with a trained MTP head, and how it was made."""

from pathlib import Path


def checkpoint_path() -> Path:
    """Folder of the bundled checkpoint, which ``AutoModelForCausalLM`` and vLLM load as it is."""
    return Path(__file__).parent / "checkpoint"
