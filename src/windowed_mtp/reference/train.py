"""Train the reference checkpoint: first the target, then its MTP head on the frozen target.

Two commands, so that the text can be prepared on one machine and the training done on another::

    python -m windowed_mtp.reference.train prepare DATA
    python -m windowed_mtp.reference.train fit DATA OUT --target-minutes 4 --head-minutes 2
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
import typer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM

from windowed_mtp.reference import acceptance
from windowed_mtp.reference.corpus import token_stream, train_tokenizer
from windowed_mtp.reference.delta_rule import trainable_delta_rule
from windowed_mtp.reference.model import MTPHead, load_checkpoint, reference_config, save_checkpoint

LONG = 8  # long sequences are so many times the usual length
LONG_FROM = 0.8  # and come after this share of a phase
DEPTH = 6  # draft steps that are measured

app = typer.Typer(add_completion=False, help=__doc__)


class Log:
    """A file of JSON lines, echoed to the terminal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = time.monotonic()

    def write(self, event: str, **values: Any) -> None:
        """Append one event with the seconds since the start."""
        line = json.dumps({"event": event, "seconds": time.monotonic() - self.start, **values})
        line = json.dumps(json.loads(line, parse_float=lambda number: float(f"{float(number):.5g}")))
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


class Crops:
    """Random stretches of a stream of tokens, longer ones in the last part of a phase."""

    def __init__(self, stream: Tensor, length: int, batch: int, seed: int) -> None:
        self.stream, self.length, self.batch = stream, length, batch
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, progress: float, extra: int) -> Tensor:
        """Draw ``(batch, length + extra)`` int64, or a quarter as many stretches that are eight times as long."""
        long = progress >= LONG_FROM
        batch, length = (max(1, self.batch // 4), LONG * self.length) if long else (self.batch, self.length)
        length = min(length, len(self.stream) - extra - 1) + extra
        starts = torch.randint(len(self.stream) - length, (batch, 1), generator=self.generator)
        return self.stream[(starts + torch.arange(length)).to(self.stream.device)]


def schedule(minutes: float, max_steps: int | None) -> Iterator[tuple[int, float, bool]]:
    """Yield (step, progress from 0 to 1, whether a twentieth has just passed) until the time or steps are used up."""
    start, passed = time.monotonic(), 0
    for step in itertools.count():
        progress = (time.monotonic() - start) / (60 * minutes) if minutes else 1.0
        if max_steps is not None:
            progress = max(progress, step / max_steps)
        if progress >= 1:
            return
        yield step, progress, int(20 * progress) > passed
        passed = int(20 * progress)


class Optimizer:
    """AdamW, weight decay on matrices only; warm-up over 100 steps, then a cosine down to 2 % of the peak rate."""

    def __init__(self, module: nn.Module, peak: float) -> None:
        self.peak = peak
        self.parameters = list(module.parameters())
        matrices = [parameter for parameter in self.parameters if parameter.dim() == 2]
        others = [parameter for parameter in self.parameters if parameter.dim() != 2]
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            fused=matrices[0].is_cuda,
        )

    def step(self, loss: Tensor, step: int, progress: float) -> None:
        """One update, the gradient's norm clipped to 1."""
        loss.backward()
        rate = self.peak * min(1, (step + 1) / 100) * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
        for group in self.adamw.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)


def target_loss(model: Qwen3_5ForCausalLM, ids: Tensor) -> Tensor:
    """Mean next-token cross-entropy of ``ids``, int64 ``(B, T)``, in nats."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def draft_loss(model: Qwen3_5ForCausalLM, head: MTPHead, ids: Tensor, steps: int, last: int) -> Tensor:
    """Cross-entropy between the target's next-token distribution and the head's, one value a draft step.

    Parameters
    ----------
    model, head : Qwen3_5ForCausalLM, MTPHead
        The frozen target and its head.
    ids : Tensor of int64, shape (B, T)
        Text.
    steps, last : int
        Draft steps, and from how many bases of each text.

    Returns
    -------
    Tensor, shape (steps,)
        Means over the bases, in nats.
    """
    with torch.no_grad():
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        embeddings = model.model.embed_tokens(ids)
        teacher = model.lm_head(hidden[:, -(last + steps) :]).float().softmax(dim=-1)  # positions T-steps-last .. T-1
    losses = []
    for step, output in enumerate(head.unroll(embeddings, hidden, steps, last), start=1):
        log_probs = model.lm_head(output).float().log_softmax(dim=-1)
        losses.append(-(teacher[:, step : step + last] * log_probs).sum(dim=-1).mean())
    return torch.stack(losses)


def measure_loss(model: Qwen3_5ForCausalLM, stream: Tensor, length: int, log: Log) -> None:
    """Log the loss over the whole held-out text in pieces of the usual and of the long length."""
    for size in (length, LONG * length):
        log.write("held-out loss", length=size, loss=acceptance.next_token_loss(model, stream, size))


def measure_acceptance(
    model: Qwen3_5ForCausalLM, head: MTPHead, stream: Tensor, size: int, prompts: int, new_tokens: int, log: Log
) -> None:
    """Log the acceptance over greedy continuations of held-out prompts of ``size`` tokens."""
    starts = torch.linspace(0, len(stream) - size - 1, prompts, device=stream.device).long()
    ids = stream[starts[:, None] + torch.arange(size, device=stream.device)]
    ids = acceptance.greedy_continuation(model, ids, new_tokens + DEPTH)
    matches = acceptance.draft_matches(model, head, ids, DEPTH, last=new_tokens)
    log.write(
        "acceptance",
        device=device_name(stream.device),
        prompt_tokens=size,
        prompts=prompts,
        new_tokens=new_tokens,
        conditional_acceptance=acceptance.conditional_acceptance(matches),
        acceptance_length=acceptance.acceptance_length(matches),
    )


def move(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move the modules' parameters and buffers to the device, in place."""
    for module in modules:
        nn.Module.to(module, device)


def device_name(device: torch.device) -> str:
    """Name of the accelerator, or ``"CPU"``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@app.command()
def prepare(data: Annotated[Path, typer.Argument(help="Folder to write the tokenizer and the tokens to.")]) -> None:
    """Train the tokenizer and encode the running interpreter's standard library."""
    data.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(data)
    train, heldout = token_stream(tokenizer, "train"), token_stream(tokenizer, "heldout")
    np.savez_compressed(data / "tokens.npz", train=train, heldout=heldout, python=platform.python_version())
    print(f"{len(train)} tokens to train on, {len(heldout)} held out")


@app.command()
def fit(
    data: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder that `prepare` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the checkpoint and training.log to.")],
    target_minutes: Annotated[float, typer.Option(help="Time for the target.")] = 4.0,
    head_minutes: Annotated[float, typer.Option(help="Time for the MTP head.")] = 2.0,
    max_steps: Annotated[int | None, typer.Option(help="At most so many steps a phase.")] = None,
    length: Annotated[
        int, typer.Option(help="Tokens a sequence; the last fifth of a phase has 8 times as many.")
    ] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences a step; the head takes half as many.")] = 32,
    draft_steps: Annotated[int, typer.Option(help="Draft steps that the head is unrolled for.")] = 4,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    init: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="Checkpoint to go on from.")] = None,
) -> None:
    """Train the target for some minutes, then its head; measure the saved checkpoint on the held-out text."""
    options = {key: value for key, value in locals().items() if not isinstance(value, Path)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    every = 100 if device.type == "cuda" else 1
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / name, out / name)
    tokens = np.load(data / "tokens.npz")
    train, heldout = (torch.from_numpy(tokens[name].astype(np.int64)).to(device) for name in ("train", "heldout"))
    sample = heldout[: 128 * length]
    if init is None:
        model, head = Qwen3_5ForCausalLM(reference_config()), MTPHead(reference_config())
    else:
        model, head = load_checkpoint(init, torch.float32)
    move((model, head), device)
    log = Log(out / "training.log")
    log.write(
        "start",
        command="python -m windowed_mtp.reference.train fit",
        options=options,
        continued=init is not None,
        date=datetime.now(UTC).date().isoformat(),
        device=device_name(device),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        text=f"standard library of Python {tokens['python']}",
        train_tokens=len(train),
        heldout_tokens=len(heldout),
        target_parameters=sum(parameter.numel() for parameter in model.parameters()),
        head_parameters=sum(parameter.numel() for parameter in head.parameters()),
    )

    optimizer, crops, seen = Optimizer(model, rate), Crops(train, length, batch, seed), 0
    model.train()
    for step, progress, due in schedule(target_minutes, max_steps):
        ids = crops.draw(progress, extra=1)
        seen += ids.numel()
        with torch.autocast(device.type, torch.bfloat16), trainable_delta_rule():
            loss = target_loss(model, ids)
        optimizer.step(loss, step, progress)
        if step % every == 0:
            log.write("target", step=step, progress=progress, tokens=seen, loss=loss.item())
        if due:
            with torch.autocast(device.type, torch.bfloat16):
                log.write("target held-out", step=step, loss=acceptance.next_token_loss(model, sample, length))
            save_checkpoint(out, model, head)

    model.eval().requires_grad_(False)
    if init is None:
        head.layers[0].load_state_dict(model.model.layers[-1].state_dict())
    optimizer, crops, seen = Optimizer(head, rate), Crops(train, length, max(1, batch // 2), seed + 1), 0
    texts = heldout[: 8 * (length + draft_steps)].view(8, -1)
    for step, progress, due in schedule(head_minutes, max_steps):
        ids = crops.draw(progress, extra=draft_steps)
        seen += ids.numel()
        with torch.autocast(device.type, torch.bfloat16), trainable_delta_rule():
            losses = draft_loss(model, head, ids, draft_steps, last=length)
        optimizer.step(losses.mean(), step, progress)
        if step % every == 0:
            log.write("head", step=step, progress=progress, tokens=seen, losses=losses.tolist())
        if due:
            with torch.autocast(device.type, torch.bfloat16), torch.no_grad():
                losses = draft_loss(model, head, texts, draft_steps, last=length)
            log.write("head held-out", step=step, losses=losses.tolist())
            save_checkpoint(out, model, head)

    save_checkpoint(out, model, head)
    model, head = load_checkpoint(out)
    move((model, head), device)
    measure_loss(model, heldout, length, log)
    measure_acceptance(model, head, heldout, length, prompts=32, new_tokens=min(128, length), log=log)
    measure_acceptance(model, head, heldout, LONG * length, prompts=8, new_tokens=min(128, length), log=log)


@app.command()
def evaluate(
    data: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder that `prepare` wrote.")],
    checkpoint: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Checkpoint, whose training.log is added to.")
    ],
    size: Annotated[int, typer.Option(help="Tokens a prompt.")] = 2048,
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens to continue each prompt by.")] = 128,
) -> None:
    """Measure a checkpoint's acceptance on greedy continuations of held-out prompts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heldout = torch.from_numpy(np.load(data / "tokens.npz")["heldout"].astype(np.int64)).to(device)
    model, head = load_checkpoint(checkpoint)
    log = Log(checkpoint / "training.log")
    move((model, head), device)
    measure_acceptance(model, head, heldout, size, prompts, new_tokens, log)


if __name__ == "__main__":
    app()
