"""`vllm serve` as a process: started, asked, and taken down whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from windowed_mtp.reference import checkpoint_path

MODEL = "tiny"
GAMMA = 3
START = 240.0
"""Seconds that a server may take to start, or to refuse to."""

MTP = {"method": "mtp", "num_speculative_tokens": GAMMA}
TEMPLATE = "{% for message in messages %}# {{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOG_STATS_INTERVAL": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
OPTIONS = {
    "dtype": "bfloat16",
    "max-model-len": "4096",
    "max-num-seqs": "8",
    "num-gpu-blocks-override": "160",
    "seed": "0",
    "served-model-name": MODEL,
}


class Server:
    """A server on the bundled checkpoint.

    Parameters
    ----------
    folder : Path
        Where its log and its chat template go.
    window : dict or None
        The plugin's settings.
    drafter : dict
        vLLM's ``speculative_config``.
    """

    def __init__(self, folder: Path, window: dict[str, Any] | None = None, drafter: dict[str, Any] = MTP) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "out.log", folder / "err.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        template = folder / "chat.jinja"
        template.write_text(TEMPLATE)
        options = OPTIONS | {
            "host": "127.0.0.1",
            "port": str(self.port),
            "chat-template": str(template),
            "speculative-config": json.dumps(drafter),
        }
        if window is not None:
            options["additional-config"] = json.dumps({"windowed_mtp": window})
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        flags += ["--enforce-eager", "--no-enable-prefix-caching"]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint_path()), *flags],
                env=os.environ | ENVIRONMENT | python_path(folder),
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def wait_until_healthy(self) -> None:
        end = time.monotonic() + START
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            time.sleep(0.2)
        raise AssertionError(f"the server did not start (exit code {self.process.poll()}):\n{self.log[-6000:]}")

    def exit_code(self) -> int:
        """Wait for a server that refuses to start."""
        return self.process.wait(START)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name and labels as scraped, without the labels that all of them have."""
        common = re.compile(r'(engine|model_name)="[^"]*",?')
        lines = (line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if line.startswith("vllm:"))
        return {common.sub("", name).replace(",}", "}").replace("{}", ""): float(value) for name, value in lines}

    def stop(self) -> None:
        """Stop the server and what it started; ask first."""
        for how, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Ask Linux to end this process when the tests' process ends, in whatever way."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def python_path(folder: Path) -> dict[str, str]:
    """Give vLLM's command line the version that it asks for: vllm-cpu is no distribution called vllm."""
    with contextlib.suppress(PackageNotFoundError):
        version("vllm")
        return {}
    known = f"{version('vllm-cpu')}+cpu"
    info = folder / "path" / f"vllm-{known}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {known}\n")
    paths = [str(info.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def stopped(*servers: Server) -> Iterator[None]:
    """Stop servers in the end, whatever happens."""
    try:
        yield
    finally:
        for server in servers:
            server.stop()
