"""Tests in a running engine with vLLM's V2 model runner. They need a process of their own: pytest tests/vllm_v2."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parent / "vllm")]

found = find_spec("vllm")
if found is not None and found.origin is not None and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
    import interpreter

    interpreter.prepare()


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest) -> Any:
    """What engines without the plugin give, for the module's ``DRAFTER``."""
    from v2_modes import reference_of

    return reference_of(request.module.DRAFTER)


@pytest.fixture(scope="module")
def windowed(request: pytest.FixtureRequest, reference: Any) -> Iterator[Any]:
    """An engine with the window, for the module's ``DRAFTER``."""
    from v2_modes import running

    with running(request.module.DRAFTER) as llm:
        yield llm
