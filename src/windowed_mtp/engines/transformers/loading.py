"""Draft-head tensors from a safetensors checkpoint, by the names that the public checkpoints use."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from windowed_mtp.checkpoint import INDEX, SINGLE, Inventory, opened, tensor_names
from windowed_mtp.errors import CheckpointError

_EXPERT = re.compile(r"^(?P<prefix>.*experts)\.(?P<index>\d+)\.(?P<name>gate_proj|up_proj|down_proj)\.weight$")


class Checkpoint:
    """The safetensors files of one checkpoint, local or on the hub.

    Parameters
    ----------
    name_or_path : str
        Folder or hub name. Of a checkpoint on the hub, only the files that `read` needs are downloaded.
    revision : str, optional
        Commit or branch on the hub; the main one without it.
    without : str
        What to do if there are no safetensors files, for the error.

    Raises
    ------
    CheckpointError
        If there are no safetensors files, or one of those that are here cannot be read.
    """

    def __init__(
        self,
        name_or_path: str,
        revision: str | None = None,
        without: str = "pass checkpoint=... with the folder or hub name that the model came from",
    ) -> None:
        self.name_or_path = name_or_path
        self.revision = revision
        folder: Path | None = Path(name_or_path)
        if not Path(name_or_path).is_dir():
            found = self._resolve(INDEX) or self._resolve(SINGLE)
            folder = found.parent if found else None
        inventory = None if folder is None else Inventory.read(folder)
        if inventory is None or not inventory.file_of:
            raise CheckpointError(
                f"{name_or_path!r} holds no safetensors files to load a draft head from, or they cannot be reached; "
                f"{without}."
            )
        self.inventory = inventory
        if SINGLE in inventory.files and not (inventory.folder / INDEX).exists():
            # transformers reads this file alone then: of two tensors of one name its own counts.
            inventory.file_of.update(dict.fromkeys(tensor_names(inventory.folder / SINGLE), SINGLE))

    def _resolve(self, file_name: str) -> Path | None:
        try:
            path = cached_file(
                self.name_or_path,
                file_name,
                revision=self.revision,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except (OSError, ValueError):
            return None
        return Path(path) if path else None

    def names(self, pattern: str) -> dict[str, str]:
        """Tensors whose name matches ``pattern``.

        Parameters
        ----------
        pattern : str
            Regular expression with a group ``name``: the part of the name to go on with.

        Returns
        -------
        dict of str to str
            The group ``name`` of each match, with the tensor's full name.
        """
        matches = ((re.fullmatch(pattern, full), full) for full in self.inventory.file_of)
        return {match["name"]: full for match, full in matches if match}

    def headless(self, lacks: str) -> CheckpointError:
        """Make the error of a checkpoint without a head.

        Parameters
        ----------
        lacks : str
            What it does not hold, such as ``"tensors named mtp.*"``.
        """
        unlisted = self.inventory.unlisted
        aside = f" (its index does not list {', '.join(unlisted)}, so nothing was read from there)" if unlisted else ""
        return CheckpointError(
            f"{self.name_or_path!r} has no MTP head: it holds no {lacks}{aside}; use a checkpoint that kept its head."
        )

    def read(self, full_names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by their full names, on the CPU, in the checkpoint's dtype.

        Raises
        ------
        CheckpointError
            If a file cannot be reached or read.
        """
        by_file: dict[str, list[str]] = {}
        for full in full_names:
            by_file.setdefault(self.inventory.file_of[full], []).append(full)
        tensors = {}
        for file_name, names in by_file.items():
            path = self._resolve(file_name)
            if path is None:
                raise CheckpointError(
                    f"{self.name_or_path!r} names {file_name} in its index, but the file is missing; fetch it."
                )
            with opened(path, "pt") as file:
                tensors.update({name: file.get_tensor(name) for name in names})
        return tensors


def fuse_experts(tensors: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    """Stack per-expert weights into the tensors that transformers' expert modules hold.

    Parameters
    ----------
    tensors : dict of str to Tensor
        Names such as ``mlp.experts.3.gate_proj.weight``, ``[out, in]``; other names are passed through.
    what : str
        How to call the head in an error.

    Returns
    -------
    dict of str to Tensor
        ``...experts.gate_up_proj`` ``[E, 2·inter, hidden]`` (or ``up_proj`` where there is no gate) and
        ``...experts.down_proj`` ``[E, hidden, inter]``.

    Raises
    ------
    CheckpointError
        If experts are missing, or differ in shape.
    """
    fused: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.match(name)
        if match:
            by_name = experts.setdefault(match["prefix"], {})
            by_name.setdefault(match["name"], {})[int(match["index"])] = tensor
        else:
            fused[name] = tensor
    for prefix, by_name in experts.items():
        indices = range(1 + max(max(by_index) for by_index in by_name.values()))
        missing = [
            f"{prefix}.{i}.{name}.weight" for name, by_index in by_name.items() for i in indices if i not in by_index
        ]
        if missing:
            raise CheckpointError(f"{what} is not one this version can load: it comes without {missing[0]}.")
        for names in (("gate_proj", "up_proj"), ("down_proj",)):
            if len({(t.shape, t.dtype) for name in names for t in by_name.get(name, {}).values()}) > 1:
                raise CheckpointError(f"{what} does not fit the model: its {prefix} differ in shape or dtype.")
        stacked = {name: torch.stack([by_index[i] for i in indices]) for name, by_index in by_name.items()}
        if {"gate_proj", "up_proj"} <= stacked.keys():
            stacked["gate_up_proj"] = torch.cat([stacked.pop("gate_proj"), stacked.pop("up_proj")], dim=1)
        fused |= {f"{prefix}.{name}": tensor for name, tensor in stacked.items()}
    return fused


def fill(module: nn.Module, tensors: dict[str, Tensor], like: nn.Module, device: torch.device, what: str) -> None:
    """Give a module built on the meta device its weights.

    Parameters
    ----------
    module : nn.Module
        On the meta device.
    tensors : dict of str to Tensor
        By the module's own parameter names.
    like : nn.Module
        The target model: gives the dtype, and the names it keeps in float32.
    device : torch.device
        Where the weights go.
    what : str
        How to call the head in an error.

    Raises
    ------
    CheckpointError
        If tensors are missing, left over, of another shape, or quantised.
    """
    dtype = next(like.parameters()).dtype
    fp32_lists = (getattr(like, name, None) or () for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    in_fp32 = tuple({part for names in fp32_lists for part in names})
    expected = module.state_dict()
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"{what} is quantised ({name} is {tensor.dtype}); use a checkpoint in bf16, fp16 or fp32."
            )
        if name in expected and expected[name].shape != tensor.shape:
            raise CheckpointError(
                f"{what} does not fit the model: {name} is {tuple(tensor.shape)}, "
                f"but the model needs {tuple(expected[name].shape)}."
            )
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        detail = f"without {missing[0]}" if missing else f"with an unknown tensor {unexpected[0]}"
        raise CheckpointError(f"{what} is not one this version can load: it comes {detail}.")
    placed = {
        name: tensor.to(device, torch.float32 if any(part in name for part in in_fp32) else dtype)
        for name, tensor in tensors.items()
    }
    module.load_state_dict(placed, assign=True)
    module.requires_grad_(False).eval()
