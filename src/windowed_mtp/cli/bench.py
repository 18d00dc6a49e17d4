"""``windowed-mtp bench``: the cost of a decode step in a serving engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windowed_mtp.cli.output import errors
from windowed_mtp.errors import WindowedMTPError
from windowed_mtp.results import check_writable

if TYPE_CHECKING:
    from windowed_mtp.engines.vllm.step_cost import Arm

KNOWN: dict[str, dict[str, Any]] = {"none": {}, "native": {}, "windowed": {"plugin": {"sink": 64, "window": 4032}}}
"""Arms that need no description."""


class EngineName(StrEnum):
    """The serving engine."""

    vllm = "vllm"


class Weights(StrEnum):
    """Where weights and cached keys come from."""

    random = "random"
    real = "real"


def bench(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", show_default=False, help="Folder of a geometry or of a checkpoint.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Record to add rows to.")],
    engine: Annotated[EngineName, typer.Option("--engine", help="Serving engine.")] = EngineName.vllm,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            metavar="NAME",
            help="none, native, windowed, or NAME={JSON} with the plugin's settings under 'plugin' and vLLM's "
            "attention config under 'attention'; once for each arm. By default the first three.",
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option("--context", metavar="N", help="Tokens in the cache; once for each context."),
    ] = None,
    gamma: Annotated[int, typer.Option("--gamma", min=1, help="Draft tokens a step.")] = 6,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences decoded together.")] = 1,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="bf16 or fp8.")] = "bf16",
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", min=1, help="Devices.")] = 1,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds over the arms, alternating.")] = 3,
    first_round: Annotated[int, typer.Option("--first-round", min=0, help="Number of the first round.")] = 0,
    weights: Annotated[
        Weights, typer.Option("--weights", help="Random weights and cached keys, or a checkpoint's and a real prefill.")
    ] = Weights.random,
    one_process: Annotated[
        bool,
        typer.Option(
            "--one-process", help="Put one arm after the other into one running engine instead of starting each anew."
        ),
    ] = False,
    minutes: Annotated[float, typer.Option("--minutes", help="Begin nothing more after this time.")] = float("inf"),
    cache_gib: Annotated[
        float | None, typer.Option("--cache-gib", help="Size of the KV cache of a device; by the engine if not given.")
    ] = None,
    machine: Annotated[str, typer.Option("--machine", help="The machine in words, for the record.")] = "",
    options: Annotated[str, typer.Option("--options", metavar="JSON", help="More arguments of vllm.LLM.")] = "{}",
    profiles: Annotated[
        Path | None, typer.Option("--profiles", metavar="FOLDER", help="Save a profile of each arm's kernels here.")
    ] = None,
) -> int:
    """Measure the wall time of a decode step, and the draft's share of it.

    Weights and cached keys may be random at a model's true geometry, as the cost does not depend on them: then no
    checkpoint is needed and no prompt is computed. Rows go into a record as they are measured; a run that was cut
    short is resumed by the same command.
    """
    check_writable(output)
    if not Path(model).is_dir():
        raise WindowedMTPError(f"{model!r} is no folder; pass one with a geometry's config.json, or a checkpoint.")
    if kv_dtype not in ("bf16", "fp8"):
        raise WindowedMTPError(f"--kv-dtype is {kv_dtype!r}, but it must be bf16 or fp8.")
    contexts = context or [8192, 131_072, 524_288, 1_040_000]
    arms = [read_arm(text) for text in arm or list(KNOWN)]
    if min(contexts) < 1:
        raise WindowedMTPError(f"a context of {min(contexts)} tokens cannot be measured; pass at least 1.")
    extra = _json(options, "--options")
    if profiles is not None:
        profiles.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    speculating = {each.name != "none" for each in arms}
    if not one_process or len(speculating) > 1:
        command = ["bench", model, "--output", str(output), "--engine", engine, "--gamma", str(gamma)]
        command += ["--batch", str(batch), "--kv-dtype", kv_dtype, "--tensor-parallel", str(tensor_parallel)]
        command += ["--weights", weights, "--machine", machine, "--options", options, "--one-process"]
        command += [word for each in contexts for word in ("--context", str(each))]
        command += [] if cache_gib is None else ["--cache-gib", str(cache_gib)]
        command += [] if profiles is None else ["--profiles", str(profiles)]
        return _each_in_a_process(command, arm or list(KNOWN), rounds, first_round, deadline)

    if find_spec("vllm") is None:
        raise WindowedMTPError("vLLM is not installed here, and this measures it; pip install vllm.")
    from windowed_mtp.engines.vllm.step_cost import Engine, measure

    made = measure(
        Engine(
            model=model,
            geometry=Path(model).name,
            gamma=gamma if True in speculating else 0,
            batch=batch,
            max_context=max(contexts),
            kv_dtype=kv_dtype,
            tensor_parallel=tensor_parallel,
            random_weights=weights is Weights.random,
            cache_bytes=None if cache_gib is None else int(cache_gib * 2**30),
            options=extra,
        ),
        arms,
        contexts,
        range(first_round, first_round + rounds),
        output,
        machine=machine,
        deadline=deadline,
        profiles=profiles,
        say=errors.print,
    )
    errors.print(f"{made} rows added to {output}")
    return 0


def read_arm(text: str) -> Arm:
    """Read an arm from the command line.

    Raises
    ------
    WindowedMTPError
        If it has no known name and no description, or the description is not as it must be.
    """
    from windowed_mtp.engines.vllm.step_cost import Arm

    name, _, described = text.partition("=")
    if not described and name not in KNOWN:
        raise WindowedMTPError(f"--arm {text!r} is none of {', '.join(KNOWN)}; describe it as NAME={{JSON}}.")
    given = _json(described, f"--arm {name}") if described else KNOWN[name]
    unknown = set(given) - {"plugin", "attention"}
    if unknown:
        raise WindowedMTPError(f"--arm {name} has an unknown key {min(unknown)!r}; known are plugin, attention.")
    return Arm(name, given.get("plugin"), given.get("attention", {}))


def _each_in_a_process(command: list[str], arms: list[str], rounds: int, first_round: int, deadline: float) -> int:
    """Run a command line once for each round and arm, in a process of its own."""
    for number in range(first_round, first_round + rounds):
        for each in arms:
            left = (deadline - time.monotonic()) / 60
            if left <= 0:
                return 0
            once = ["--arm", each, "--rounds", "1", "--first-round", str(number), "--minutes", f"{left:.3f}"]
            code = subprocess.run(
                [sys.executable, "-m", "windowed_mtp.cli.app", *command, *once], check=False
            ).returncode
            if code:
                errors.print(f"{each} in round {number} ended with exit code {code}")
                return code
    return 0


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        made = json.loads(text)
    except json.JSONDecodeError as error:
        raise WindowedMTPError(f"{where} is not JSON: {error}; quote it for the shell.") from None
    if not isinstance(made, dict):
        raise WindowedMTPError(f"{where} must be a JSON object.")
    return made
