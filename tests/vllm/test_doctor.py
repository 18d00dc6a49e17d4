"""What the doctor says of engines, from the flags that vLLM would get; none but one is started."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import damaged
import pytest
import torch

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from engines import engine
from models import llama_with_eagle3
from ngram import NGRAM, plugin_log
from safetensors.torch import load_file, save_file

from windowed_mtp.checkpoint import INDEX
from windowed_mtp.cli import main
from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.doctor import diagnose
from windowed_mtp.engines.vllm.doctor_blocks import Blocks
from windowed_mtp.engines.vllm.doctor_files import look_at_files
from windowed_mtp.engines.vllm.doctor_prefix import prefix_findings
from windowed_mtp.engines.vllm.doctor_splits import AttentionDevice, attention_device, splits_findings
from windowed_mtp.engines.vllm.findings import DoctorResult, Finding
from windowed_mtp.engines.vllm.serve_flags import serve_config
from windowed_mtp.reference import checkpoint_path

MTP = {"method": "mtp", "num_speculative_tokens": 3}
WINDOW = {"sink": 4, "window": 300}


def flags(model: Any, drafter: dict[str, Any] | None, window: dict[str, Any] | None, *others: str) -> list[str]:
    made = [str(model), "--dtype", "bfloat16", *others]
    if "--max-model-len" not in others:
        made += ["--max-model-len", "4096"]
    if drafter is not None:
        made += ["--speculative-config", json.dumps(drafter)]
    return made if window is None else [*made, "--additional-config", json.dumps({"windowed_mtp": window})]


def rows(result: DoctorResult) -> dict[str, Finding]:
    return {row.check: row for row in result.rows}


def test_it_says_before_the_start_what_the_log_says_after_it():
    result = diagnose(flags(checkpoint_path(), MTP, WINDOW, "--port", "8001"))
    assert result.passed
    assert {row.check: row.level for row in result.rows} == {
        "version": "ok", "window": "ok", "head": "ok", "rope": "ok", "prefix cache": "warning",
    }  # fmt: skip
    with plugin_log() as lines, engine(window=WINDOW):
        assert lines == [("INFO", f"Windowed MTP is in force: {result.in_force}")]


def test_prefix_hits_in_blocks_of_a_hybrid():
    found = rows(diagnose(flags(checkpoint_path(), MTP, None, "--enable-prefix-caching")))
    assert "in blocks of 384 tokens" in found["prefix cache"].cause
    assert "shorter than 768 tokens is never found" in found["prefix cache"].cause
    assert found["window"].level == "warning" and "no window is configured" in found["window"].cause
    off = rows(diagnose(flags(checkpoint_path(), None, None, "--no-enable-prefix-caching")))
    assert "prefix caching is off" in off["prefix cache"].cause


def test_what_keeping_the_last_block_of_a_hit_would_give(monkeypatch: pytest.MonkeyPatch):
    from vllm.config.speculative import SpeculativeConfig

    caching = ("--enable-prefix-caching",)
    dropping = rows(diagnose(flags(checkpoint_path(), MTP, None, *caching)))["prefix cache"]
    assert dropping.remedy is not None and "so that beginnings from 384 tokens on are found" in dropping.remedy
    keeping = rows(diagnose(flags(checkpoint_path(), {**MTP, "disable_eagle_block_drop": True}, None, *caching)))
    assert "shorter than 384 tokens is never found" in keeping["prefix cache"].cause
    assert "gives up" not in keeping["prefix cache"].cause and "disable_eagle" not in str(
        keeping["prefix cache"].remedy
    )
    plain = rows(diagnose(flags(checkpoint_path(), None, None, *caching)))["prefix cache"]
    assert "disable_eagle" not in str(plain.remedy) and plain.cause == keeping["prefix cache"].cause
    config = serve_config(flags(checkpoint_path(), MTP, None, *caching))
    older = {name: getattr(SpeculativeConfig, name) for name in ("use_eagle", "use_eagle_block_drop")}
    speculative = SimpleNamespace(**{name: partial(call, config.speculative_config) for name, call in older.items()})
    monkeypatch.setattr(config, "speculative_config", speculative)  # of a vLLM without the setting
    [found] = prefix_findings(config, Blocks("FLASH_ATTN", 384, 384))
    assert found.cause == dropping.cause and "disable_eagle" not in str(found.remedy)
    monkeypatch.setattr(config.cache_config, "prefix_match_unit", 32)
    [found] = prefix_findings(config, Blocks("FLASH_ATTN", 384, 384))
    assert found.level == "ok" and "multiples of 32 tokens" in found.cause


@pytest.mark.parametrize(("drops", "tokens"), [(True, 768), (False, 1152)])
def test_vllm_gives_up_one_block_of_a_hit(drops: bool, tokens: int):
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    everything_cached = SimpleNamespace(
        hash_block_size=384, get_cached_block=lambda _, groups: [object() for _ in groups]
    )
    spec = FullAttentionSpec(block_size=384, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    _, length = FullAttentionManager.find_longest_cache_hit(
        block_hashes=[b"a", b"b", b"c"],
        max_length=1200,
        kv_cache_group_ids=[0],
        block_pool=everything_cached,
        kv_cache_spec=spec,
        drop_eagle_block=drops,
        alignment_tokens=384,
    )
    assert length == tokens


def test_splits_of_attention_for_few_sequences():
    from vllm.config import CUDAGraphMode

    more = ["--max-model-len", "16384", "--max-num-seqs", "1"]
    config = serve_config(flags(checkpoint_path(), MTP, None, *more))
    assert attention_device(config) is None  # this is no Hopper
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    hopper, blocks = AttentionDevice(flash_attention=3, multiprocessors=132), Blocks("FLASH_ATTN", 384, 384)
    heads = config.model_config.hf_text_config.num_key_value_heads
    [found] = splits_findings(config, blocks, hopper)
    assert f"= {32 * heads} tiles of work" in found.cause
    config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    assert list(splits_findings(config, blocks, hopper)) == []


def test_a_head_that_is_missing(tmp_path: Path):
    shutil.copytree(checkpoint_path(), tmp_path / "headless")
    file = tmp_path / "headless" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}, file)
    result = diagnose(flags(tmp_path / "headless", MTP, WINDOW))
    assert not result.passed
    assert rows(result)["head"].level == "problem"
    assert "holds no tensors of an MTP head" in rows(result)["head"].cause


def shards(folder: Path, files: dict[str, list[str]], index: dict[str, str] | None) -> Path:
    folder.mkdir()
    for number, (file, names) in enumerate(files.items()):
        save_file({name: torch.full((2,), float(number)) for name in names}, folder / file)
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize(
    ("files", "index"),
    [
        ({"model.safetensors": ["a"], "mtp.safetensors": ["b"]}, None),
        ({"m-1.safetensors": ["a", "b"], "m-2.safetensors": ["c"]}, {"a": "m-1.safetensors"}),
        ({"m-10.safetensors": ["a"], "m-9.safetensors": ["a"]}, {"a": "m-10.safetensors", "b": "m-9.safetensors"}),
        ({"model.safetensors": ["a"], "consolidated.safetensors": ["b"]}, {"a": "model.safetensors"}),
    ],
)
def test_the_inventory_is_what_vllm_reads(files: dict[str, list[str]], index: dict[str, str] | None, tmp_path: Path):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    folder, load = shards(tmp_path / "made", files, index), LoadConfig()
    inventory, _ = look_at_files(str(folder), None, load)
    assert inventory is not None
    _, chosen, use_safetensors, _ = DefaultModelLoader(load)._prepare_weights(str(folder), None, None, True, None)
    assert use_safetensors and {Path(file).name for file in chosen} == set(inventory.files)
    order = list(files)
    last = {name: order[int(tensor[0])] for name, tensor in safetensors_weights_iterator(chosen, False)}
    assert last == inventory.file_of


def test_an_absent_file_stops_vllm(tmp_path: Path):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    folder = shards(tmp_path / "made", {"m-1.safetensors": ["a"]}, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    _, [found] = look_at_files(str(folder), None, LoadConfig())
    assert found.level == "problem" and "the engine would not start" in found.cause
    with pytest.raises(FileNotFoundError, match=r"m-2\.safetensors"):
        DefaultModelLoader(LoadConfig())._prepare_weights(str(folder), None, None, True, None)


def test_a_head_that_the_index_omits_is_found(tmp_path: Path):
    shutil.copytree(checkpoint_path(), tmp_path / "omitted")
    index = {name: "model.safetensors" for name in load_file(tmp_path / "omitted" / "model.safetensors")}
    kept = {name: file for name, file in index.items() if not name.startswith("mtp.")}
    assert len(kept) < len(index)
    (tmp_path / "omitted" / INDEX).write_text(json.dumps({"weight_map": kept}))
    assert rows(diagnose(flags(tmp_path / "omitted", MTP, WINDOW)))["head"].level == "ok"


@pytest.mark.parametrize(
    ("window", "match"),
    [
        ({"sink": 4, "window": 4032}, "leaves keys out from a context of 4,800 tokens on, and the maximum is 4,096"),
        ({**WINDOW, "min_context": 5000}, "from a context of 5,000 tokens on, and the maximum is 4,096"),
    ],
)
def test_a_window_without_effect(window: dict[str, Any], match: str):
    result = diagnose(flags(checkpoint_path(), MTP, window))
    assert result.in_force is None and not result.passed
    assert rows(result)["window"].level == "problem" and match in rows(result)["window"].cause


@pytest.mark.parametrize(("strict", "match"), [(True, "would not start"), (False, "would run without the window")])
def test_a_drafter_without_attention(strict: bool, match: str):
    target, _ = llama_with_eagle3()
    result = diagnose(flags(target, NGRAM, {**WINDOW, "strict": strict}, "--skip-tokenizer-init"))
    assert result.in_force is None
    assert "ngram" in rows(result)["window"].cause and match in rows(result)["window"].cause


def test_one_pass_that_is_to_be_left_alone():
    drafter = {**MTP, "num_speculative_tokens": 1}
    result = diagnose(flags(checkpoint_path(), drafter, {**WINDOW, "window_first_pass": False}))
    assert (
        "has no other pass, as it drafts one token a step" in rows(result)["window"].cause and result.in_force is None
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("of_target", "of_draft", "check", "level", "match"),
    [
        ({}, {}, "rope", "ok", "are the target's"),
        ({"rope_parameters": YARN}, {}, "rope", "problem", "rope is yarn with factor 4, the draft's unscaled"),
        ({"rope_parameters": YARN}, {"rope_parameters": YARN}, "rope", "ok", "are the target's"),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope", "warning", "theta 500,000"),
        (
            {},
            {"max_position_embeddings": 512},
            "length",
            "warning",
            "made for 512 positions, and the engine serves 4,096",
        ),
        ({}, {"sliding_window": 128}, "window", "problem", "they have a sliding window of their own"),
    ],
)
def test_a_draft_of_another_length_or_rope(
    of_target: Any, of_draft: Any, check: str, level: str, match: str, tmp_path: Path
):
    folders = []
    for source, changes in zip(llama_with_eagle3(), (of_target, of_draft), strict=True):
        folder = tmp_path / Path(source).name
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        folders.append(str(folder))
    drafter = {"method": "eagle3", "model": folders[1], "num_speculative_tokens": 3}
    result = diagnose(flags(folders[0], drafter, WINDOW, "--skip-tokenizer-init"))
    assert rows(result)[check].level == level
    assert match in rows(result)[check].cause
    assert result.passed == (level != "problem")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (["--no-such-flag"], "vllm serve does not take this: unrecognized arguments: --no-such-flag"),
        (["--max-model-len", "many"], "vllm serve does not take this: argument --max-model-len"),
        (["--max-num-seqs", "0"], "vLLM refuses these flags: "),
    ],
)
def test_flags_that_vllm_does_not_take_get_one_sentence(given: list[str], match: str):
    with pytest.raises(PluginError) as caught:
        diagnose([str(checkpoint_path()), *given])
    assert str(caught.value).startswith(match) and "\n" not in str(caught.value)


def test_a_model_that_is_not_there_gets_one_sentence(tmp_path: Path):
    with pytest.raises(PluginError, match=r"there is no folder '.*nothing'; check the spelling"):
        diagnose([str(tmp_path / "nothing")])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PluginError, match=r"vLLM refuses these flags: ") as caught:
        diagnose([str(tmp_path)])
    assert "\n" not in str(caught.value)


FILES = ("config.json", "hf_quant_config.json", "model.safetensors", INDEX)


@pytest.mark.parametrize(("file", "kind"), [(file, kind) for file in FILES for kind in damaged.kinds_of(file)])
def test_a_file_that_cannot_be_read_gets_one_sentence(
    file: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "400")
    folder = tmp_path / "bad"
    shutil.copytree(checkpoint_path(), folder)
    if file == INDEX:
        names = load_file(folder / "model.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    elif file == "hf_quant_config.json":
        (folder / file).write_text("{}\n")
    change, says = damaged.kinds_of(file)[kind]
    change(folder / file)
    code = main(["doctor", *flags(folder, MTP, WINDOW)])
    shown = capsys.readouterr()
    assert code in (1, 2) and "Traceback" not in shown.out + shown.err
    lines = [line for line in (shown.out + shown.err).splitlines() if re.search(f"{re.escape(file)}' ", line)]
    assert len(lines) == 1 and re.search(says.replace("; ", r"(; |\. Remedy: )"), lines[0])
    if code == 2:
        assert shown.out == "" and shown.err.startswith("Error: ") and len(shown.err.splitlines()) == 1


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", damaged.ANY)
def test_a_drafter_that_cannot_be_read_gets_one_sentence(
    file: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "400")
    target, drafter = llama_with_eagle3()
    shutil.copytree(drafter, tmp_path / "bad")
    change, says = damaged.kinds_of(file)[kind]
    change(tmp_path / "bad" / file)
    eagle3 = {"method": "eagle3", "model": str(tmp_path / "bad"), "num_speculative_tokens": 3}
    assert main(["doctor", *flags(target, eagle3, WINDOW, "--skip-tokenizer-init")]) in (1, 2)
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if f"bad/{file}' " in line]
    assert len(lines) == 1 and re.search(says.replace("; ", r"(; |\. Remedy: )"), lines[0])


def test_exit_codes_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    metrics, file = tmp_path / "metrics.txt", tmp_path / "doctor.json"
    metrics.write_text("vllm:spec_decode_num_drafts_total 500\nvllm:spec_decode_num_accepted_tokens_total 900\n")
    good = flags(checkpoint_path(), MTP, WINDOW)
    assert main(["doctor", "--engine", "vllm", *good, "--metrics", str(metrics), "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "In force" in shown and "AL is 2.80 over 500 steps" in shown and "1 warning" in shown
    saved = DoctorResult.load(file)
    assert saved.in_force is not None and saved.rows[-1].cause.startswith("AL is 2.80")
    assert main(["doctor", *flags(checkpoint_path(), None, WINDOW)]) == 1
    assert "There is a window but no --speculative-config" in capsys.readouterr().out
    assert main(["doctor", *good, "--no-such-flag"]) == 2
    assert capsys.readouterr().err.startswith("Error: vllm serve does not take this")
