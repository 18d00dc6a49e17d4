"""A file of a checkpoint that is not what its name says gets one sentence, wherever it is read."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import damaged
import pytest
import tiny
import tiny_eagle3
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from windowed_mtp.checkpoint import INDEX, SINGLE
from windowed_mtp.cli import main
from windowed_mtp.engines.transformers.heads import load_head
from windowed_mtp.errors import CheckpointError

HEAD, EAGLE3 = "built-in head", "EAGLE-3 drafter"
READ = {HEAD: (SINGLE, INDEX), EAGLE3: ("config.json", SINGLE, INDEX)}
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("config.json", "tokenizer_config.json", "tokenizer.json", SINGLE, INDEX),
    "generate --eagle3": ("config.json", SINGLE, INDEX),
    "vocab count": ("tokenizer_config.json", "tokenizer.json"),
}


def cases(places: dict[str, tuple[str, ...]]) -> list[tuple[str, str, str]]:
    """Every kind of damage at every place; a folder named tokenizer_config.json counts as no file in transformers."""
    made = [(place, file, kind) for place in places for file in places[place] for kind in damaged.kinds_of(file)]
    return [case for case in made if case[1:] != ("tokenizer_config.json", "folder")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("damaged") / "checkpoint"
    shutil.copytree(tiny.checkpoint("qwen3_5"), folder)
    vocab = {"<unk>": 0, **{f"t{i}": i for i in range(1, tiny.VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_eagle3.save(tmp_path_factory.mktemp("damaged") / "drafter", "draft-vocabulary"))


def damage(source: Path, folder: Path, file: str, kind: str) -> str:
    """Copy a checkpoint and damage one of its files; return what is to be said."""
    shutil.copytree(source, folder)
    if file == INDEX:
        index = dict.fromkeys(tiny.load_file(folder / SINGLE), "shard-1.safetensors")
        (folder / SINGLE).rename(folder / "shard-1.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    change, says = damaged.kinds_of(file)[kind]
    change(folder / file)
    return f"{re.escape(str(folder / file))}' {says}"


def check_sentence(text: str, says: str) -> None:
    assert re.search(says, text)
    assert "\n" not in text and text.endswith(".") and not re.search(r"[.!?] [A-Z]", text)


@pytest.mark.parametrize(("place", "file", "kind"), cases(READ))
def test_in_the_library(place: str, file: str, kind: str, checkpoint: Path, drafter: Path, tmp_path: Path):
    folder = tmp_path / "bad"
    says = damage(checkpoint if place == HEAD else drafter, folder, file, kind)
    with pytest.raises(CheckpointError) as caught:
        if place == HEAD:
            load_head(tiny.model("qwen3_5"), checkpoint=str(folder))
        else:
            load_head(tiny_eagle3.target("draft-vocabulary"), eagle3=str(folder))
    check_sentence(str(caught.value), says)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(("command", "file", "kind"), cases(COMMANDS))
def test_in_the_command_line(
    command: str,
    file: str,
    kind: str,
    checkpoint: Path,
    drafter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    text, folder = tmp_path / "text.txt", tmp_path / "bad"
    text.write_text("t1 t2")
    says = damage(drafter if "--eagle3" in command else checkpoint, folder, file, kind)
    arguments: dict[str, list[object]] = {
        "generate": ["generate", folder, "--prompt", "t1"],
        "generate --eagle3": ["generate", checkpoint, "--prompt", "t1", "--eagle3", folder],
        "vocab count": ["vocab", "count", text, "--tokenizer", folder, "--output", tmp_path / "hot.json"],
    }
    assert main([str(argument) for argument in arguments[command]]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("Error: ")
    check_sentence(" ".join(shown.err.removeprefix("Error: ").split()), says)
    assert not (tmp_path / "hot.json").exists()


@pytest.mark.parametrize("kind", ["empty", "pointer", "noise", "folder"])
def test_weights_of_pytorch(kind: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "bad"
    shutil.copytree(checkpoint, folder)
    torch.save(tiny.load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()
    damaged.ANY[kind][0](folder / "pytorch_model.bin")
    assert main(["generate", str(folder), "--prompt", "t1"]) == 2
    shown = capsys.readouterr()
    says = "cannot load .*/bad': " if kind == "noise" else damaged.ANY[kind][1]
    check_sentence(" ".join(shown.err.removeprefix("Error: ").split()), says)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"eagle_config": [1]}, "eagle_config is no object"),
        ({"transformer_layer_config": "llama"}, "transformer_layer_config is no object"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "eagle_aux_hidden_state_layer_ids is 3"),
        ({"eagle_aux_hidden_state_layer_ids": ["2", "3"]}, "eagle_aux_hidden_state_layer_ids is "),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({"draft_vocab_size": "61"}, "draft_vocab_size is '61'"),
        ({"target_hidden_size": [32]}, r"target_hidden_size is \[32\]"),
        ({"hidden_size": 0}, "hidden_size is 0"),
    ],
)
def test_values_of_the_wrong_type_in_a_drafters_config(
    changes: dict[str, object], match: str, drafter: Path, tmp_path: Path
):
    shutil.copytree(drafter, tmp_path / "bad")
    file = tmp_path / "bad" / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "eagle_config"}
    file.write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError) as caught:
        load_head(tiny_eagle3.target("draft-vocabulary"), eagle3=str(tmp_path / "bad"))
    check_sentence(str(caught.value), match)
