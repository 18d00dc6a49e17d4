"""Which tensors a checkpoint holds: one inventory for the embedded engine and for the doctor."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import damaged
import pytest
import torch
from safetensors.torch import save_file

from windowed_mtp.checkpoint import INDEX, Inventory, read_object
from windowed_mtp.engines.transformers.loading import Checkpoint
from windowed_mtp.engines.vllm.doctor_files import look_at_files, prefix_in
from windowed_mtp.engines.vllm.findings import Finding
from windowed_mtp.errors import CheckpointError, CheckpointFileError

TARGET, HEAD, NORM = "model.layers.0.mlp.up_proj.weight", "mtp.fc.weight", "mtp.norm.weight"
AUTO = SimpleNamespace(load_format="auto", download_dir=None)


def write(folder: Path, files: dict[str, list[str]], index: dict[str, str] | None = None) -> Path:
    """Make a folder of safetensors files; a tensor's value says which file it is from."""
    folder.mkdir(exist_ok=True)
    for number, (file, names) in enumerate(files.items()):
        save_file({name: torch.full((2, 2), float(number)) for name in names}, folder / file)
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


FOLDERS: dict[str, tuple[dict[str, list[str]], dict[str, str] | None]] = {
    "one file": ({"model.safetensors": [TARGET, HEAD]}, None),
    "several without an index": ({"model.safetensors": [TARGET], "mtp.safetensors": [HEAD]}, None),
    "several": (
        {"model-1.safetensors": [TARGET], "model-2.safetensors": [HEAD]},
        {TARGET: "model-1.safetensors", HEAD: "model-2.safetensors"},
    ),
    "a tensor that the index omits": (
        {"model-1.safetensors": [TARGET], "model-2.safetensors": [HEAD, NORM]},
        {TARGET: "model-1.safetensors", HEAD: "model-2.safetensors"},
    ),
    "a tensor in another file than the index says": (
        {"model-1.safetensors": [TARGET, HEAD], "model-2.safetensors": [NORM]},
        {TARGET: "model-1.safetensors", HEAD: "model-2.safetensors", NORM: "model-2.safetensors"},
    ),
    "a tensor in two files": (
        {"model-10.safetensors": [HEAD], "model-9.safetensors": [TARGET, HEAD]},
        {TARGET: "model-9.safetensors", HEAD: "model-10.safetensors"},
    ),
    "a file that the index does not list": (
        {"model-1.safetensors": [TARGET], "mtp.safetensors": [HEAD]},
        {TARGET: "model-1.safetensors"},
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_embedded_engine_and_the_doctor_see_the_same_tensors(kind: str, tmp_path: Path):
    folder = write(tmp_path, *FOLDERS[kind])
    inventory, _ = look_at_files(str(folder), None, AUTO)
    assert inventory is not None
    checkpoint = Checkpoint(str(folder))
    assert checkpoint.names("(?P<name>.*)").keys() == inventory.file_of.keys()
    assert checkpoint.inventory == inventory
    files, index = FOLDERS[kind]
    order = list(files)
    for name, tensor in checkpoint.read(inventory.file_of).items():
        assert name in files[inventory.file_of[name]] and tensor[0, 0] == order.index(inventory.file_of[name])
    read = {name for file, names in files.items() if index is None or file in index.values() for name in names}
    assert inventory.file_of.keys() == read


def test_what_the_index_omits_is_found_and_what_it_does_not_list_is_named(tmp_path: Path):
    omitted = Inventory.read(write(tmp_path / "omitted", *FOLDERS["a tensor that the index omits"]))
    assert omitted.file_of[NORM] == "model-2.safetensors" and omitted.unlisted == ()
    folder = write(tmp_path / "unlisted", *FOLDERS["a file that the index does not list"])
    assert Inventory.read(folder).unlisted == ("mtp.safetensors",)
    [found] = look_at_files(str(folder), None, AUTO)[1]
    assert (found.check, found.level) == ("files", "warning")
    assert "mtp.safetensors is not in the index, so vLLM does not read it, though it holds mtp.fc.weight" in found.cause
    with pytest.raises(CheckpointError, match=r"no tensors named mtp\.\* \(its index does not list mtp\.safetensors, "):
        raise Checkpoint(str(folder)).headless("tensors named mtp.*")
    copy = write(tmp_path / "copy", {"a.safetensors": [HEAD], "model.safetensors": [HEAD]}, {HEAD: "a.safetensors"})
    [found] = look_at_files(str(copy), None, AUTO)[1]
    assert found.level == "ok" and "model.safetensors is not in the index" in found.cause


def test_a_file_that_is_absent(tmp_path: Path):
    folder = write(tmp_path, *FOLDERS["several"])
    (folder / "model-2.safetensors").unlink()
    inventory, [found] = look_at_files(str(folder), None, AUTO)
    assert inventory is not None and inventory.absent == ("model-2.safetensors",) and HEAD in inventory.file_of
    assert found.level == "problem" and "names model-2.safetensors, but the folder does not hold it" in found.cause
    checkpoint = Checkpoint(str(folder))
    assert checkpoint.read([TARGET])[TARGET].shape == (2, 2)
    with pytest.raises(CheckpointError, match=r"names model-2\.safetensors in its index, but the file is missing"):
        checkpoint.read([HEAD])


def test_a_tensor_that_no_file_holds(tmp_path: Path):
    index = {TARGET: "model.safetensors", HEAD: "model.safetensors", NORM: "model.safetensors"}
    folder = write(tmp_path, {"model.safetensors": [TARGET]}, index)
    inventory, [found] = look_at_files(str(folder), None, AUTO)
    assert inventory is not None and inventory.unheld == (HEAD, NORM) and HEAD not in inventory.file_of
    assert "names mtp.fc.weight and 1 more, but no file holds them" in found.cause and found.level == "warning"


def test_files_of_mistrals_format_come_first(tmp_path: Path):
    write(tmp_path, {"model.safetensors": [TARGET], "consolidated.safetensors": [HEAD]})
    inventory, _ = look_at_files(str(tmp_path), None, AUTO)
    assert inventory is not None and inventory.file_of == {HEAD: "consolidated.safetensors"}
    assert prefix_in(tmp_path, "safetensors") == "model" and prefix_in(tmp_path, "mistral") == "consolidated"


def test_weights_that_are_not_read(tmp_path: Path):
    (write(tmp_path, *FOLDERS["one file"]) / "model.safetensors").write_bytes(b"")
    dummy = SimpleNamespace(load_format="dummy", download_dir=None)
    assert look_at_files(str(tmp_path), None, dummy) == (None, [])
    assert look_at_files("nobody/such-a-model-7b", None, AUTO) == (None, [])


CASES = [(file, kind) for file in ("model-2.safetensors", INDEX) for kind in damaged.kinds_of(file)]


@pytest.mark.parametrize(("file", "kind"), CASES)
def test_a_file_that_cannot_be_read_gets_one_sentence(file: str, kind: str, tmp_path: Path):
    damage, match = damaged.kinds_of(file)[kind]
    folder = write(tmp_path, *FOLDERS["several"])
    damage(folder / file)
    with pytest.raises(CheckpointFileError, match=match) as caught:
        Checkpoint(str(folder))
    text = str(caught.value)
    assert file in text and text.endswith(".") and "\n" not in text and caught.value.__cause__ is None
    inventory, [found] = look_at_files(str(folder), None, AUTO)
    assert inventory is None and found == Finding(
        check="files", level="problem", cause=caught.value.cause, remedy=caught.value.remedy
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


@pytest.mark.parametrize("kind", damaged.JSON)
def test_json_files_that_cannot_be_read(kind: str, tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    assert read_object(file) == {"model_type": "llama"}
    damage, match = damaged.JSON[kind]
    damage(file)
    with pytest.raises(CheckpointFileError, match=match):
        read_object(file)
    with pytest.raises(CheckpointFileError, match="is missing"):
        read_object(tmp_path / "generation_config.json")
