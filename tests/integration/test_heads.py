"""Heads are read from the public checkpoints' tensors, put where they belong, and refused where they do not fit."""

import copy
import functools
from pathlib import Path
from typing import Any

import checks
import pytest
import tiny
import torch
from checks import Case, check_greedy, pairwise, prompt
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from windowed_mtp.engines.transformers import loading
from windowed_mtp.engines.transformers.cache import KeepAll
from windowed_mtp.engines.transformers.draft import DraftState
from windowed_mtp.engines.transformers.heads import load_head
from windowed_mtp.errors import CheckpointError

QWEN = [family for family in tiny.BUILDERS if family.startswith("qwen")]
NUMBERED = [family for family in tiny.BUILDERS if family.startswith(("deepseek", "glm"))]


@functools.cache
def stored(family: str) -> dict[str, Tensor]:
    """All tensors of a family's checkpoint, by the names they have in the file."""
    return load_file(Path(tiny.checkpoint(family)) / "model.safetensors")


def head_names(family: str) -> list[str]:
    """Names of the head's own tensors."""
    first = tiny.model(family).config.num_hidden_layers
    prefixes = ("mtp.", *(f"model.layers.{n}." for n in range(first, first + 3)))
    shared = ("embed_tokens.weight", "shared_head.head.weight")
    return sorted(n for n in stored(family) if n.startswith(prefixes) and not n.endswith(shared))


def load_changed(family: str, folder: Path, **changes: Any) -> Any:
    """Load a family's head from a copy of its checkpoint, with tensors replaced, added or (``None``) left out."""
    tensors = {name: t for name, t in {**stored(family), **changes}.items() if t is not None}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return load_head(tiny.model(family), checkpoint=str(folder))


def below(family: str, prefix: str) -> dict[str, Tensor]:
    """Tensors below a prefix, without it, the experts stacked."""
    part = {name.removeprefix(prefix): t for name, t in stored(family).items() if name.startswith(prefix)}
    experts = {name for name in part if ".experts." in name}
    whole = {name: t for name, t in part.items() if name not in experts}
    for name in ("gate_proj", "up_proj", "down_proj"):
        rows = sorted(n for n in experts if n.endswith(f"{name}.weight"))  # fewer than ten experts
        if rows:
            whole[f"{rows[0].split('.')[0]}.experts.{name}"] = torch.stack([part[n] for n in rows])
    if experts and (gate := whole.pop("mlp.experts.gate_proj", None)) is not None:
        whole["mlp.experts.gate_up_proj"] = torch.cat([gate, whole.pop("mlp.experts.up_proj")], dim=1)
    return whole


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def qwen(family: str, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
    """The head written out; its decoder layer is transformers', filled by its own loader."""
    model, raw = tiny.model(family), stored(family)
    config = copy.deepcopy(model.config)
    config.layer_types, config._attn_implementation = ["full_attention"], "eager"
    block = type(model.model.layers[0])(config, 0)
    block.load_state_dict(below(family, f"mtp.layers.{layer}."))
    norm = lambda x, name: rms(x, 1 + raw[f"mtp.{name}.weight"], config.rms_norm_eps)  # noqa: E731
    embedding = raw["model.embed_tokens.weight"][tokens]
    joined = torch.cat([norm(embedding, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], dim=-1)
    mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    rotary = model.model.rotary_emb(hidden, position_ids=positions)
    x = F.linear(joined, raw["mtp.fc.weight"])
    return norm(block.eval()(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions), "norm")


def nemotron(family: str, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
    """The head written out in plain tensor operations."""
    config, raw = tiny.model(family).config, stored(family)
    first, second = below(family, "mtp.layers.0."), below(family, "mtp.layers.1.")
    norm = lambda x, weight: rms(x, weight, config.layer_norm_epsilon)  # noqa: E731
    embedding = next(t for n, t in raw.items() if n.endswith("embeddings.weight"))[tokens]
    joined = torch.cat([norm(embedding, first["enorm.weight"]), norm(hidden, first["hnorm.weight"])], dim=-1)
    x = F.linear(joined, first["eh_proj.weight"])

    y = norm(x, first["norm.weight"])
    q, k, v = (
        F.linear(y, first[f"mixer.{name}_proj.weight"]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for name in "qkv"
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + F.linear(attended.transpose(1, 2).flatten(2), first["mixer.o_proj.weight"])

    y = norm(x, second["norm.weight"])
    scores = F.linear(y, second["mixer.gate.weight"]).sigmoid()
    chosen = (scores + second["mixer.gate.e_score_correction_bias"]).topk(config.num_experts_per_tok).indices
    weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
    latent = F.linear(y, second["mixer.fc1_latent_proj.weight"])
    inner = torch.einsum("btl,eil->btei", latent, second["mixer.experts.up_proj"]).relu().square()
    mixed = torch.einsum("btei,eli,bte->btl", inner, second["mixer.experts.down_proj"], weights)
    shared = F.linear(y, second["mixer.shared_experts.up_proj.weight"]).relu().square()
    x = x + F.linear(mixed, second["mixer.fc2_latent_proj.weight"])
    x = x + F.linear(shared, second["mixer.shared_experts.down_proj.weight"])
    return norm(x, second["final_layernorm.weight"])


@pytest.mark.parametrize("family", [*QWEN, "nemotron_h"])
@torch.no_grad()
def test_a_pass_equals_the_head_written_out(family: str):
    head = tiny.head(family)
    tokens, hidden = prompt(12), torch.randn(1, 12, tiny.HIDDEN, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12)[None]
    for layer in range(head.num_layers):
        expected = (qwen if family in QWEN else nemotron)(family, layer, tokens, hidden, positions)
        out, recycled = head.forward(layer, tokens, hidden, positions, KeepAll(None))
        assert torch.allclose(out, expected, atol=1e-5), (out - expected).abs().max()
        assert torch.equal(recycled, out)
        logits = head.logits(layer, out)
        assert torch.equal(logits, F.linear(out, stored(family)["lm_head.weight"]))


@pytest.mark.parametrize("family", NUMBERED)
@torch.no_grad()
def test_drafted_logits_equal_those_of_transformers_own_head(family: str, monkeypatch: pytest.MonkeyPatch):
    model, head = tiny.model(family), tiny.head(family)
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", {r"model\.layers\.[234]\."})
    own = MtpModel.from_pretrained(model)
    ids = prompt(20)
    hidden = model.model(ids).last_hidden_state
    tokens, expected, _ = own(
        input_ids=ids[:, 1:], last_hidden_states=hidden[:, :-1], attention_mask=None,
        position_ids=torch.arange(1, 20)[None], mtp_cache=MtpCache(config=model.config.get_mtp_config()),
    )  # fmt: skip
    seen = []

    def choose(logits: Tensor, ids: Tensor) -> Tensor:
        seen.append(logits)
        return logits.argmax(-1, keepdim=True)

    state = DraftState(head, None, head.num_layers)
    state.observe(hidden[:, :-1])
    assert state.propose(ids, head.num_layers, choose).tolist() == tokens.tolist()
    assert torch.allclose(torch.stack(seen, dim=1), expected, atol=1e-5)


@pytest.mark.parametrize("family", tiny.BUILDERS)
def test_dtypes_are_those_of_the_target(family: str):
    model = tiny.model(family, torch.bfloat16)
    in_target = {".".join(name.split(".")[-2:]): t.dtype for name, t in model.state_dict().items()}
    in_head = [item for module in load_head(model).modules for item in module.state_dict().items()]
    for name, tensor in in_head:
        assert tensor.dtype == in_target.get(".".join(name.split(".")[-2:]), torch.bfloat16), name
        assert not tensor.requires_grad
    assert any(t.dtype == torch.float32 for _, t in in_head) == (family not in QWEN)


def test_stacked_experts_are_read_as_they_are(tmp_path: Path):
    prefix = "mtp.layers.0."
    experts = {name: None for name in head_names("qwen3_5_moe") if ".experts." in name}
    stacked = {f"{prefix}{n}": t for n, t in below("qwen3_5_moe", prefix).items() if ".experts." in n}
    assert len(experts) == 12 and len(stacked) == 2
    head = load_changed("qwen3_5_moe", tmp_path, **experts, **stacked)
    expected = tiny.head("qwen3_5_moe").modules[0].state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in head.modules[0].state_dict().items())


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        ("qwen3_5", "model.language_model.mtp."),
        ("nemotron_h", "language_model.mtp."),
        ("nemotron_h", "backbone.mtp."),
        ("glm4_moe", "model.language_model.layers."),
        ("glm4_moe", "language_model.model.layers."),
    ],
)
def test_prefixes_of_wrapped_models_are_accepted(family: str, prefix: str, tmp_path: Path):
    old = "model.layers." if family == "glm4_moe" else "mtp."
    names = head_names(family)
    moved = {f"{prefix}{name.removeprefix(old)}": stored(family)[name] for name in names}
    assert load_changed(family, tmp_path, **dict.fromkeys(names), **moved).num_layers == 1


@pytest.mark.parametrize("family", tiny.BUILDERS)
def test_a_checkpoint_without_a_head_is_refused_by_name(family: str, tmp_path: Path):
    gone = dict.fromkeys(stored(family).keys() - {"lm_head.weight"})
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}.* has no MTP head: it holds no .*; use a checkpoint"):
        load_changed(family, tmp_path, **gone)


@pytest.mark.parametrize("family", tiny.BUILDERS)
def test_what_does_not_fit_is_refused_in_one_sentence(family: str, tmp_path: Path):
    names = head_names(family)
    query = next(n for n in names if "q_proj" in n or "q_a_proj" in n)
    joining = next(n for n in names if n.endswith(("mtp.fc.weight", "eh_proj.weight")))
    extra = f"{query.removesuffix('weight')}unknown"
    cases: list[tuple[str, Tensor | None, str]] = [
        (query, None, f"comes without layers.{query.split('layers.')[1]}"),
        (joining, stored(family)[joining][:, :-1], "does not fit the model: .* is .*, but the model needs"),
        (extra, torch.zeros(3), "comes with an unknown tensor"),
        (query, stored(family)[query].to(torch.float8_e4m3fn), "is quantised .*float8.*; use a checkpoint in bf16"),
        (query, stored(family)[query].to(torch.int8), "is quantised .*int8.*; use a checkpoint in bf16"),
    ]
    experts = [n for n in names if ".experts." in n]
    if experts:
        one = next(n for n in experts if ".1.up_proj" in n)
        cases += [
            (one, None, f"comes without layers.{one.split('layers.')[1]}"),
            (one, stored(family)[one][:, :-1], "does not fit the model: its .*experts differ in shape or dtype"),
            (one, stored(family)[one].to(torch.float8_e4m3fn), "experts differ in shape or dtype"),
        ]
    for name, tensor, message in cases:
        with pytest.raises(CheckpointError, match=message) as error:
            load_changed(family, tmp_path, **{name: tensor})
        text = str(error.value)
        assert text.count("\n") == 0 and text.endswith(".") and tmp_path.name in text


def test_quantised_experts_are_refused(tmp_path: Path):
    experts = {n: stored("glm4_moe")[n].to(torch.float8_e4m3fn) for n in head_names("glm4_moe") if ".experts." in n}
    with pytest.raises(CheckpointError, match="is quantised"):
        load_changed("glm4_moe", tmp_path, **experts)


@pytest.mark.parametrize("pattern", [["full_attention"] * 2, ["moe"], ["full_attention", "linear_attention"]])
def test_a_nemotron_pattern_without_exactly_one_attention_block_is_refused(
    pattern: list[str], monkeypatch: pytest.MonkeyPatch
):
    model = tiny.model("nemotron_h")
    monkeypatch.setattr(model.config, "mtp_layers_block_type", pattern)
    with pytest.raises(CheckpointError, match="needs exactly one attention block"):
        load_head(model)


def test_the_head_is_read_at_the_commit_of_the_model(monkeypatch: pytest.MonkeyPatch):
    asked: list[str | None] = []
    cached_file = loading.cached_file

    def spy(*args: Any, revision: str | None, **options: Any) -> Any:
        asked.append(revision)
        return cached_file(*args, **options)

    monkeypatch.setattr(loading, "cached_file", spy)
    model = tiny.model("qwen3_5")
    monkeypatch.setattr(model.config, "_commit_hash", "0123abc", raising=False)
    load_head(model)
    assert set(asked) == {"0123abc"}
    asked.clear()
    load_head(model, checkpoint=tiny.checkpoint("qwen3_5"))
    assert set(asked) == {None}


def test_an_unknown_family_is_refused_with_what_is_supported():
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(CheckpointError, match="'llama'; supported are deepseek_v3, glm4_moe, nemotron_h, qwen3_5"):
        load_head(LlamaForCausalLM(config))


ROWS = pairwise(depth=(1, 3, 5), window=((0, 1), (4, 16)), arrangement=tuple(checks.ARRANGEMENTS))


@pytest.mark.parametrize("family", tiny.BUILDERS)
def test_greedy_output_is_that_of_the_target(family: str):
    for row in ROWS:
        check_greedy(Case(family, drafter="alternating", **row))
