"""Ways in which a file of a checkpoint is not what its name says, and what is said of each."""

from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1\n"
BROKEN = "is damaged or no (safetensors file|JSON) "


def folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


ANY: dict[str, tuple[Damage, str]] = {
    "empty": (lambda path: path.write_bytes(b""), "is empty; fetch it again"),
    "pointer": (lambda path: path.write_bytes(LFS), "is only a pointer of git LFS; fetch the file itself"),
    "cut": (lambda path: path.write_bytes(path.read_bytes().rstrip()[:-1]), BROKEN),
    "noise": (lambda path: path.write_bytes(bytes(range(128, 256)) * 9), BROKEN),
    "folder": (folder_in_place, "is a folder, not a file; put the file in its place"),
}
JSON: dict[str, tuple[Damage, str]] = ANY | {
    "list": (lambda path: path.write_text("[]"), "holds JSON, but no object"),
    "null": (lambda path: path.write_text("null"), "holds JSON, but no object"),
    "deep": (lambda path: path.write_text("[" * 100_000), BROKEN),
}
INDEX: dict[str, tuple[Damage, str]] = JSON | {
    "no map": (lambda path: path.write_text("{}"), "is no index: its weight_map does not name a file for each"),
    "list as map": (lambda path: path.write_text('{"weight_map": ["mtp"]}'), "is no index"),
    "map of numbers": (lambda path: path.write_text('{"weight_map": {"mtp.fc.weight": 2}}'), "is no index"),
    "empty map": (lambda path: path.write_text('{"weight_map": {}}'), "is no index"),
}


def kinds_of(file: str) -> dict[str, tuple[Damage, str]]:
    """Ways in which a file of this name can be damaged."""
    return INDEX if file.endswith(".index.json") else JSON if file.endswith(".json") else ANY
