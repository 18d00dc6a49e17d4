"""Whether a checkpoint holds the MTP head that its config names, by its tensors' names and a few small tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from windowed_mtp.checkpoint import Inventory, opened
from windowed_mtp.engines.vllm.findings import Finding

_NAMED = re.compile(r"(?:^|[._])mtp(?:[._]|$)|\bnextn\b")
_LAYER = re.compile(r"(?:^|\.)(?:mtp\.|mtp_)?layers\.(\d+)\.")
_SCALE = re.compile(r"scale|qweight|qzeros|g_idx|zero_point")
_LISTS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude")


def head_findings(inventory: Inventory, config: Mapping[str, Any], target_layers: int) -> Iterator[Finding]:
    """Look at a checkpoint's head.

    Parameters
    ----------
    inventory : Inventory
        The checkpoint's tensors.
    config : mapping
        The checkpoint's ``config.json``.
    target_layers : int
        Decoder layers of the target; layers with a higher index belong to the head.
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
        quantised = head_quantisation(head, config)
        if quantised is not None:
            yield quantised
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


def head_quantisation(head: Collection[str], config: Mapping[str, Any]) -> Finding | None:
    """Judge whether the head's projections are quantised as the config says; ``None`` if nothing is quantised."""
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not settings:
        return None
    left_out = [str(name) for key in _LISTS for name in settings.get(key) or ()]
    modules = {name.rpartition(".")[0] for name in head if "proj" in name}
    scaled = {name.rpartition(".")[0] for name in head if _SCALE.search(name.rpartition(".")[2])}
    wrong = [
        module for module in sorted(modules) if (module in scaled) == any(_covers(name, module) for name in left_out)
    ]
    if wrong:
        is_, says = ("quantised", "leaves it out") if wrong[0] in scaled else ("not quantised", "does not leave it out")
        return Finding(
            check="quantisation", level="warning",
            cause=f"the head's {wrong[0]} is {is_}, but quantization_config {says}",
            remedy="make quantization_config's list of ignored modules agree with the tensors; else the head is "
            "loaded wrongly, or not at all, and AL stays at 1",
        )  # fmt: skip
    return Finding(check="quantisation", level="ok", cause="the head is quantised where quantization_config says so")


def _covers(entry: str, module: str) -> bool:
    """Whether an entry of a list of ignored modules means a module or one around it."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    name = entry.strip("*.")
    return bool(name) and f".{name}." in f".{module}."


def _count(layers: int) -> str:
    return f"{layers} layer{'s' * (layers != 1)}"


def _is_constant(inventory: Inventory, name: str) -> bool:
    file = inventory.file_of[name]
    if file in inventory.absent:
        return False
    with opened(inventory.folder / file, "pt") as tensors:
        tensor = tensors.get_tensor(name).float().flatten()
    return bool((tensor == tensor[:1]).all())
