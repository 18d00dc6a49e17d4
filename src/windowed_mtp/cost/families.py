"""Geometries of model families, from the keys of their configs.

The shapes are those of the modules in transformers 5.19 and vLLM 0.32. Norms, biases and rotary tables are left out:
they are below a thousandth of the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from windowed_mtp.cost.geometry import Attention, Experts, Geometry, Layers, Recurrent, Weights
from windowed_mtp.errors import WindowedMTPError

Config = dict[str, Any]


class GeometryError(WindowedMTPError):
    """A config.json that is none, or of a model family whose cost is not modelled."""


def read_geometry(folder: str | os.PathLike[str]) -> Geometry:
    """Read the geometry of a model from its folder's ``config.json``.

    Raises
    ------
    GeometryError
        If the file cannot be read, is no model's config, or is one that `geometry_of` refuses.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GeometryError(f"cannot read {str(path)!r}: {error}; pass a folder with a model's config.json.") from None
    if not isinstance(config, dict):
        raise GeometryError(f"{str(path)!r} holds no object; pass a folder with a model's config.json.")
    return geometry_of(config)


def geometry_of(config: Config) -> Geometry:
    """Build the geometry of a model from its config in Hugging Face style.

    Parameters
    ----------
    config : dict
        The config; a language model nested as ``text_config`` is found.

    Raises
    ------
    GeometryError
        If its family is not modelled, or it lacks a key that its family has.
    """
    text = {**config, **config.get("text_config", {})}
    family = FAMILIES.get(text.get("model_type", ""))
    if family is None:
        raise GeometryError(
            f"the cost of model_type {text.get('model_type')!r} is not modelled; known are {', '.join(FAMILIES)}."
        )
    try:
        return family(text)
    except KeyError as error:
        raise GeometryError(
            f"the config lacks {error}, which {text['model_type']!r} has; pass the whole config.json."
        ) from None


def _width(config: Config, name: str) -> int:
    """Bytes of a weight of a module, by the config's quantization and its list of exceptions."""
    quantization = config.get("quantization_config")
    if not quantization:
        return 2
    kept = [*quantization.get("modules_to_not_convert", ()), *quantization.get("ignore", ())]
    return 2 if any(pattern in name or fnmatch(name, pattern) for pattern in kept) else 1


def _gqa(config: Config, name: str, gate: bool = False) -> Attention:
    """Grouped-query attention; with ``gate`` the query projection makes an output gate too."""
    hidden, heads, kv_heads, size = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    elements = hidden * size * (heads * (1 + gate) + 2 * kv_heads + heads)
    return Attention(
        weights=(Weights(elements=elements, width=_width(config, f"{name}.qkv_proj")),),
        heads=heads, score_size=size, value_size=size, cache_heads=kv_heads, cache_size=2 * size,
    )  # fmt: skip


def _mla(config: Config, name: str) -> Attention:
    """Multi-head latent attention as it decodes: one latent vector a token, projections absorbed into the query."""
    hidden, heads, latent = (config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query_rank = config.get("q_lora_rank")
    query = heads * (nope + rope)
    split = (query_rank or hidden) * query + latent * heads * (nope + value) + heads * value * hidden
    copied = hidden * ((query_rank or 0) + latent + rope)
    width = _width(config, f"{name}.o_proj")
    return Attention(
        weights=(Weights(elements=split, width=width), Weights(elements=copied, width=width, replicated=True)),
        heads=heads, score_size=latent + rope, value_size=latent, cache_heads=1, cache_size=latent + rope,
    )  # fmt: skip


def _gated_delta(config: Config) -> Recurrent:
    """Gated DeltaNet: ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b``, ``in_proj_a``, a convolution, ``out_proj``."""
    hidden, value_heads, key_size, value_size = (
        config[key] for key in ("hidden_size", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    )
    keys, values = config["linear_num_key_heads"] * key_size, value_heads * value_size
    channels, kernel = 2 * keys + values, config["linear_conv_kernel_dim"]
    name = "model.layers.0.linear_attn"
    state = value_heads * key_size * value_size
    return Recurrent(
        weights=(
            Weights(elements=hidden * (channels + values), width=_width(config, f"{name}.in_proj_qkv")),
            Weights(elements=2 * hidden * value_heads, width=_width(config, f"{name}.in_proj_b")),
            Weights(elements=values * hidden, width=_width(config, f"{name}.out_proj")),
            Weights(elements=channels * kernel),
        ),
        state_bytes=state * (4 if config["mamba_ssm_dtype"] == "float32" else 2) + 2 * channels * (kernel - 1),
        state_ops=6 * state,  # read out, correct, update: a multiply-add each
    )


def _mamba2(config: Config) -> Recurrent:
    """Mamba2: ``in_proj`` to gate, x, B, C and dt, a convolution over x, B and C, ``out_proj``."""
    hidden, heads, size, states = (
        config[key] for key in ("hidden_size", "mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    )
    inner, channels = heads * size, heads * size + 2 * config["n_groups"] * states
    name = "model.layers.0.mixer"
    state = inner * states
    return Recurrent(
        weights=(
            Weights(elements=hidden * (inner + channels + heads), width=_width(config, f"{name}.in_proj")),
            Weights(elements=inner * hidden, width=_width(config, f"{name}.out_proj")),
            Weights(elements=channels * config["conv_kernel"]),
        ),
        state_bytes=state * (4 if config["mamba_ssm_cache_dtype"] == "float32" else 2)
        + 2 * channels * (config["conv_kernel"] - 1),
        state_ops=4 * state,  # update, read out: a multiply-add each
    )


def _qwen3_5_moe(config: Config) -> Geometry:
    hidden, inner, shared = (
        config[key] for key in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    )

    def experts(name: str) -> Experts:
        width = _width(config, f"{name}.mlp.experts")
        return Experts(
            experts=config["num_experts"], per_token=config["num_experts_per_tok"],
            expert=Weights(elements=3 * hidden * inner, width=width),
            always=(
                Weights(elements=hidden * (config["num_experts"] + 1), replicated=True),
                Weights(elements=3 * hidden * shared, width=width),
            ),
        )  # fmt: skip

    count, drafts = config["num_hidden_layers"], config["mtp_num_hidden_layers"]
    if "layer_types" in config:
        full = config["layer_types"].count("full_attention")
    else:
        full = count // config["full_attention_interval"]
    gate = config.get("attn_output_gate", True)
    return Geometry(
        vocabulary=config["vocab_size"],
        hidden=hidden,
        target=Layers(
            attention=(_gqa(config, "model.layers.0.self_attn", gate),) * full,
            recurrent=(_gated_delta(config),) * (count - full),
            experts=(experts("model.layers.0"),) * count,
        ),
        draft=Layers(
            attention=(_gqa(config, "mtp.layers.0.self_attn", gate),) * drafts,
            experts=(experts("mtp.layers.0"),) * drafts,
            dense=(Weights(elements=2 * hidden * hidden, width=_width(config, "mtp.fc")),),
        ),
    )


def _nemotron_h(config: Config) -> Geometry:
    hidden, latent = config["hidden_size"], config.get("moe_latent_size")

    def experts(name: str) -> Experts:
        width = _width(config, f"{name}.mixer.experts")
        project = _width(config, f"{name}.mixer.fc1_latent_proj")
        shared = config["n_shared_experts"] * config["moe_shared_expert_intermediate_size"]
        return Experts(
            experts=config["n_routed_experts"], per_token=config["num_experts_per_tok"],
            expert=Weights(elements=2 * (latent or hidden) * config["moe_intermediate_size"], width=width),
            always=(
                Weights(elements=hidden * config["n_routed_experts"], replicated=True),
                Weights(elements=2 * hidden * (latent or 0), width=project, replicated=True),
                Weights(elements=2 * hidden * shared, width=width),
            ),
        )  # fmt: skip

    pattern = config["hybrid_override_pattern"]
    draft = config["mtp_hybrid_override_pattern"] * config["num_nextn_predict_layers"]
    mlp = Weights(
        elements=2 * hidden * config["intermediate_size"], width=_width(config, "model.layers.0.mixer.up_proj")
    )
    return Geometry(
        vocabulary=config["vocab_size"],
        hidden=hidden,
        target=Layers(
            attention=(_gqa(config, "model.layers.0.mixer"),) * pattern.count("*"),
            recurrent=(_mamba2(config),) * pattern.count("M"),
            experts=(experts("model.layers.0"),) * pattern.count("E"),
            dense=(mlp,) * pattern.count("-"),
        ),
        draft=Layers(
            attention=(_gqa(config, "mtp.layers.0.mixer"),) * draft.count("*"),
            experts=(experts("mtp.layers.1"),) * draft.count("E"),
            dense=(Weights(elements=2 * hidden * hidden, width=_width(config, "mtp.layers.0.eh_proj")),),
        ),
    )


def _glm4_moe(config: Config, attention: Callable[[Config, str], Attention]) -> Geometry:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    count, drafts, first = (
        config[key] for key in ("num_hidden_layers", "num_nextn_predict_layers", "first_k_dense_replace")
    )
    layer = attention(config, "model.layers.0.self_attn")
    width = _width(config, "model.layers.0.mlp.experts")
    experts = Experts(
        experts=config["n_routed_experts"], per_token=config["num_experts_per_tok"],
        expert=Weights(elements=3 * hidden * inner, width=width),
        always=(
            Weights(elements=hidden * config["n_routed_experts"], replicated=True),
            Weights(elements=3 * hidden * inner * config["n_shared_experts"], width=width),
        ),
    )  # fmt: skip
    return Geometry(
        vocabulary=config["vocab_size"],
        hidden=hidden,
        target=Layers(
            attention=(layer,) * count,
            experts=(experts,) * (count - first),
            dense=(Weights(elements=3 * hidden * config["intermediate_size"], width=width),) * first,
        ),
        draft=Layers(
            attention=(layer,) * drafts,
            experts=(experts,) * drafts,
            dense=(Weights(elements=2 * hidden * hidden, replicated=True),),
        ),
    )


FAMILIES: dict[str, Callable[[Config], Geometry]] = {
    "qwen3_5_moe_text": _qwen3_5_moe,
    "nemotron_h": _nemotron_h,
    "glm4_moe": lambda config: _glm4_moe(config, _gqa),
    "glm4_moe_lite": lambda config: _glm4_moe(config, _mla),
    "deepseek_v3": lambda config: _glm4_moe(config, _mla),
}
