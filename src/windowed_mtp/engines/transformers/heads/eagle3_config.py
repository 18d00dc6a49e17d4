"""What the config.json of an EAGLE-3 drafter says, in either of its two published layouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from windowed_mtp.checkpoint import first_unreadable
from windowed_mtp.errors import CheckpointError

_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_LAYER_FIELDS = (
    *_REQUIRED,
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
)
_LISTED = {"layer_types": str, "eagle_aux_hidden_state_layer_ids": int}
_ONLY: dict[str, Any] = {
    "num_hidden_layers": 1,
    "norm_before_fc": False,
    "fc_norm": False,
    "use_aux_hidden_state": True,
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
    "parallel_draft_step": 1,
    "layer_types": ["full_attention"],
    "speculators_model_type": "eagle3",
    "pard_token": None,
    "ptd_token_id": None,
}
"""Options that change what the drafter computes, with the only value that is served."""


@dataclass(frozen=True)
class Eagle3Config:
    """Shape and options of a drafter.

    Attributes
    ----------
    layer : LlamaConfig
        Its decoder layer, with SDPA attention; ``vocab_size`` counts the rows of an embedding of its own.
    draft_vocab_size : int
        Rows of its output head.
    target_hidden_size : int
        Hidden size of the target that it was trained for.
    feature_layers : tuple of int or None
        Target layers whose inputs it takes, ascending; ``None`` for the default ones.
    norm_before_residual : bool
        Whether the residual stream starts after the norm of the hidden state.
    norm_output : bool
        Whether the next entry takes the output after the final norm.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_output: bool

    @classmethod
    def load(cls, name: str) -> Eagle3Config:
        """Read a drafter's config.

        Parameters
        ----------
        name : str
            Folder or hub name.

        Raises
        ------
        CheckpointError
            If there is none, or it lacks a size, or it sets an option that is not served.
        """
        try:
            raw, _ = PreTrainedConfig.get_config_dict(name)
        except Exception:  # what is no JSON object fails in more than one way
            raw = {}
        if not raw:
            raise first_unreadable(Path(name), weights=False) or CheckpointError(
                f"{name!r} has no readable config.json; pass the name of an EAGLE-3 drafter."
            )
        for key in ("transformer_layer_config", "eagle_config"):
            if not isinstance(raw.get(key) or {}, dict):
                raise _invalid(name, f"{key} is no object")
        nested = raw.get("transformer_layer_config")
        config = {**(nested or {}), **raw, **(raw.get("eagle_config") or {})}
        config = {key: value for key, value in config.items() if value is not None}
        for key in _LISTED.keys() & config.keys():
            if not isinstance(config[key], list) or not all(isinstance(each, _LISTED[key]) for each in config[key]):
                raise _invalid(name, f"{key} is {config[key]!r}")
        if "layer_types" in config:
            config["layer_types"] = sorted(set(config["layer_types"]))
        for option, served in _ONLY.items():
            value = config.get(option, served)
            if value != served:
                needed = "without it" if served is None else f"with {served!r}"
                raise CheckpointError(
                    f"the EAGLE-3 drafter {name!r} sets {option} to {value!r}, which is not supported; "
                    f"use a drafter {needed}."
                )
        missing = [key for key in _REQUIRED if key not in config]
        if missing:
            raise CheckpointError(f"{name!r} is no EAGLE-3 drafter: its config.json does not give {missing[0]}.")
        for key in (*_REQUIRED, "draft_vocab_size", "target_hidden_size"):
            if type(config.get(key, 1)) is not int or config.get(key, 1) < 1:
                raise _invalid(name, f"{key} is {config[key]!r}")
        return cls(
            layer=_layer(name, {key: config[key] for key in _LAYER_FIELDS if key in config}),
            draft_vocab_size=config.get("draft_vocab_size", config["vocab_size"]),
            target_hidden_size=config.get("target_hidden_size", config["hidden_size"]),
            feature_layers=_inputs(config.get("eagle_aux_hidden_state_layer_ids")),
            norm_before_residual=config.get("norm_before_residual", nested is not None),
            norm_output=config.get("norm_output", False),
        )


def _layer(name: str, fields: dict[str, Any]) -> LlamaConfig:
    try:
        config = LlamaConfig(**fields, num_hidden_layers=1)
    except Exception as error:  # the validators of the installed version share no narrower base
        reason = str(error).strip().splitlines()[-1].strip()
        raise _invalid(name, reason) from None
    rope_type = dict(config.rope_parameters or {})["rope_type"]
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        raise CheckpointError(
            f"the EAGLE-3 drafter {name!r} sets rope_type to {rope_type!r}, which is not supported; "
            f"use a drafter with one of default, {', '.join(ROPE_INIT_FUNCTIONS)}."
        )
    config._attn_implementation = "sdpa"
    return config


def _invalid(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"the config.json of the EAGLE-3 drafter {name!r} is not valid: {reason}; correct it.")


def _inputs(layer_ids: list[int] | None) -> tuple[int, ...] | None:
    """Layers by whose input a feature is known.

    Published configs count in two ways, for one and the same feature: from 2 on they name the layer that takes it,
    from 1 on the layer that gives it. The first id tells them apart: none takes the input of layer 1.
    """
    if not layer_ids:
        return None
    ids = sorted(set(layer_ids))
    return tuple(i + 1 for i in ids) if ids[0] == 1 else tuple(ids)
