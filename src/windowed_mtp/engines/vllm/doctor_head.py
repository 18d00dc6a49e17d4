"""Whether a checkpoint holds the MTP head that its config names, by its tensors' names and a few small tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from windowed_mtp.checkpoint import Inventory, opened
from windowed_mtp.engines.vllm.doctor_quantisation import Answer, quantisation_findings
from windowed_mtp.engines.vllm.findings import Finding

_NAMED = re.compile(r"(?:^|[._])mtp(?:[._]|$)|\bnextn\b")
_LAYER = re.compile(r"(?:^|\.)(?:mtp\.|mtp_)?layers\.(\d+)\.")


def head_findings(
    inventory: Inventory,
    config: Mapping[str, Any],
    target_layers: int,
    ask: Callable[[str], Answer] | None,
    method: str | None,
) -> Iterator[Finding]:
    """Look at a checkpoint's head.

    Parameters
    ----------
    inventory : Inventory
        The checkpoint's tensors.
    config : mapping
        The checkpoint's ``config.json``.
    target_layers : int
        Decoder layers of the target; layers with a higher index belong to the head.
    ask, method
        How to ask vLLM about a module's quantisation, and what it calls the method; see `quantisation_findings`.
    """
    if not inventory.file_of:
        yield Finding(
            check="head", level="warning",
            cause=f"the checkpoint {inventory.folder} holds no safetensors files, so its head cannot be looked at",
            remedy="pass a checkpoint in safetensors",
        )  # fmt: skip
        return
    head = head_names(inventory.file_of, target_layers)
    presence = head_presence(head, expected_layers(config))
    yield presence
    if presence.level == "ok":
        yield from quantisation_findings(inventory, head, ask, method)
        norms = [name for name in head if "norm" in name and name.endswith(".weight")]
        if norms and all(_is_constant(inventory, name) for name in norms):
            yield Finding(
                check="head", level="warning",
                cause=f"all {len(norms)} norms of the head are constant, as before training, so it may be random",
                remedy="use a checkpoint whose head was trained; with a random one AL stays at 1",
            )  # fmt: skip


def unseen_head(model: str) -> Finding:
    """Say that a head cannot be looked at, as its checkpoint is not on this machine."""
    return Finding(
        check="head", level="warning",
        cause=f"the checkpoint {model} is not on this machine, so its head cannot be looked at",
        remedy=f"download it first (hf download {model}), or pass the folder that it is in",
    )  # fmt: skip


def head_names(names: Collection[str], target_layers: int) -> list[str]:
    """Tensors that belong to the head: by name, or of a decoder layer after the target's last."""
    return sorted(
        name
        for name in names
        if _NAMED.search(name) or ((layer := _LAYER.search(name)) and int(layer[1]) >= target_layers)
    )


def expected_layers(config: Mapping[str, Any]) -> int | None:
    """Layers of the head by the checkpoint's config; ``None`` if it does not say."""
    for part in (config, config.get("text_config") or {}):
        for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"):
            if part.get(name) is not None:
                return int(part[name])
    return None


def head_presence(head: Collection[str], expected: int | None) -> Finding:
    """Judge whether the head's tensors are there, for as many layers as the config says."""
    if not head:
        return Finding(
            check="head", level="problem", cause="the checkpoint holds no tensors of an MTP head",
            remedy="use a checkpoint that has its head (conversions often drop it); vLLM would fail to start, or draft "
            "with random weights and AL would stay at 1",
        )  # fmt: skip
    layers = {int(layer[1]) for name in head if (layer := _LAYER.search(name))}
    if expected is not None and layers and len(layers) != expected:
        return Finding(
            check="head", level="problem",
            cause=f"the config says {_count(expected)} of MTP, but the checkpoint holds tensors of {len(layers)}",
            remedy="set the number in config.json to what is there, or use a complete checkpoint",
        )  # fmt: skip
    count = f" of {_count(len(layers))}" if layers else ""
    return Finding(check="head", level="ok", cause=f"the checkpoint holds an MTP head: {len(head)} tensors{count}")


def _count(layers: int) -> str:
    return f"{layers} layer{'s' * (layers != 1)}"


def _is_constant(inventory: Inventory, name: str) -> bool:
    file = inventory.file_of[name]
    if file in inventory.absent:
        return False
    with opened(inventory.folder / file, "pt") as tensors:
        tensor = tensors.get_tensor(name).float().flatten()
    return bool((tensor == tensor[:1]).all())
