"""The vLLM that is installed: its sources, and what is said of it at the start."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed")

import vllm
from vllm.platforms import current_platform

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm import install
from windowed_mtp.engines.vllm.config import PluginConfig
from windowed_mtp.engines.vllm.fingerprint import installed, known, moved
from windowed_mtp.engines.vllm.symbols import RUN, V1, V2, missing, release

VERSION = ".".join(map(str, release(vllm.__version__)))


def test_the_stored_fingerprint_is_the_installed_ones():
    found = installed()
    assert len(found) > 40
    assert moved(found, known()[VERSION]) == []


@pytest.mark.parametrize("runner", [V1, V2])
def test_nothing_is_missing(runner: str):
    assert missing(runner, vllm.__version__) is None


@pytest.mark.parametrize("version", [VERSION, "0.25.0"])
def test_a_start_warns_where_the_plugin_was_never_run(monkeypatch: pytest.MonkeyPatch, version: str):
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(install, "_say", lambda runner, level, text: said.append((level, text)))
    monkeypatch.setattr("vllm.__version__", version)
    speculative, model = SimpleNamespace(num_speculative_tokens=3), SimpleNamespace(max_model_len=4096)
    vllm_config = SimpleNamespace(speculative_config=speculative, model_config=model)
    runner: Any = SimpleNamespace(attn_groups=[], vllm_config=vllm_config, speculator=None)
    install.say_what_is_in_force(runner, PluginConfig(SinkWindow()), [])
    run = (version, "V2", current_platform.device_type.upper()) in RUN
    assert [level for level, _ in said] == (["info"] if run else ["info", "warning"])
    assert run or f"the plugin was never run with vLLM {version}" in said[1][1]
