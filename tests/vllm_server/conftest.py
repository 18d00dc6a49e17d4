"""Tests with `vllm serve` on a CPU, driven by the `openai` client."""

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in ("vllm", "openai") if name not in packages_distributions()]
    for item in items:
        if missing and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"{' and '.join(missing)} not installed; run make test-vllm"))
