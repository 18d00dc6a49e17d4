"""EAGLE-3's checkpoints as the V2 model runner wants them."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import models


@functools.cache
def llama_with_eagle3() -> tuple[str, str]:
    """A target and its drafter, which says at the top of its config which layers it takes: V2 looks nowhere else."""
    target, drafter = models.llama_with_eagle3()
    copy = shutil.copytree(drafter, Path(tempfile.mkdtemp(prefix="tiny-eagle3-")) / "drafter")
    config = json.loads((copy / "config.json").read_text())
    config.update(config.pop("eagle_config"))
    (copy / "config.json").write_text(json.dumps(config))
    return target, str(copy)
