"""A server with the window answers as one without it, and its metrics say what the window spared."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

pytest.importorskip("openai", reason="openai is not installed; run make test-vllm")

from openai import OpenAI
from servers import GAMMA, MODEL, Server, stopped
from tokenizers import Tokenizer

from windowed_mtp.reference import checkpoint_path
from windowed_mtp.workloads.stdlib import heldout_text

NEAR_TIE = 0.2
"""Logprobs closer than this are a near tie: bf16 logits of 16 to 32 are 0.125 apart."""

WINDOW = {"sink": 4, "window": 300}
LENGTHS = [40, 100, 200, 383, 384, 700, 1100, 1500]
TOKENS = 32
OURS = "vllm:spec_decode_window_num_"
THEIRS = "vllm:spec_decode_num_"
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0}


@dataclass
class Answer:
    """What a server said: the text, its tokens, and the top logprobs of each."""

    text: str
    tokens: list[str]
    top: list[dict[str, float]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A server without the plugin's settings, and one with a window; started at once."""
    folder = tmp_path_factory.mktemp("servers")
    plain = Server(folder / "plain")
    with stopped(plain):
        windowed = Server(folder / "windowed", WINDOW)
        with stopped(windowed):
            plain.wait_until_healthy()
            windowed.wait_until_healthy()
            yield plain, windowed


@pytest.fixture(scope="module")
def reference(pair: tuple[Server, Server]) -> list[Answer]:
    """What the server without a window says, to one prompt at a time."""
    return [complete(pair[0], prompt) for prompt in prompts()]


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


@cache
def prompts() -> list[list[int]]:
    """Token ids of held-out text, each prompt of another part of it."""
    ids = Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json")).encode(heldout_text(60_000, 0)).ids
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    made = [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]
    assert [len(prompt) for prompt in made] == LENGTHS
    return made


def complete(server: Server, prompt: list[int]) -> Answer:
    extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
    [choice] = client(server).completions.create(prompt=prompt, logprobs=2, extra_body=extra, **GREEDY).choices
    return Answer(choice.text, choice.logprobs.tokens, choice.logprobs.top_logprobs)


def chat(server: Server, content: str) -> Answer:
    extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
    messages: Any = [{"role": "user", "content": content}]
    made = client(server).chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=2, extra_body=extra, **GREEDY
    )
    [choice] = made.choices
    entries = choice.logprobs.content
    top = [{each.token: each.logprob for each in entry.top_logprobs} for entry in entries]
    return Answer(choice.message.content, [entry.token for entry in entries], top)


def same_up_to_a_near_tie(want: Answer, got: Answer) -> bool:
    """Whether two answers are one; if they part, it must be where the reference's own choice is a near tie."""
    assert len(want.tokens) == len(got.tokens) == TOKENS
    for position, (ours, theirs) in enumerate(zip(want.tokens, got.tokens, strict=True)):
        if ours != theirs:
            margin = want.top[position][ours] - want.top[position].get(theirs, float("-inf"))
            assert margin < NEAR_TIE, f"token {position}: {theirs}, not {ours}, by {margin}"
            return False
    assert want.text == got.text
    return True


def test_completions_are_those_of_a_server_without_the_window(pair: tuple[Server, Server], reference: list[Answer]):
    answers = [complete(pair[1], prompt) for prompt in prompts()]
    same = [same_up_to_a_near_tie(want, got) for want, got in zip(reference, answers, strict=True)]
    assert sum(same) >= len(same) // 2


def test_chat(pair: tuple[Server, Server]):
    content = heldout_text(3500, 1)
    first, second = (chat(server, content) for server in pair)
    same_up_to_a_near_tie(first, second)


def test_a_stream_is_the_answer_in_pieces(pair: tuple[Server, Server]):
    _, windowed = pair
    prompt = prompts()[5]
    pieces = [
        chunk.choices[0].text
        for chunk in client(windowed).completions.create(
            prompt=prompt, stream=True, extra_body={"ignore_eos": True}, **GREEDY
        )
        if chunk.choices
    ]
    assert "".join(pieces) == complete(windowed, prompt).text
    assert 1 < len(pieces) <= TOKENS


def test_eight_requests_at_once(pair: tuple[Server, Server], reference: list[Answer]):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: complete(pair[1], prompt), prompts()))
    same = [same_up_to_a_near_tie(want, got) for want, got in zip(reference, answers, strict=True)]
    assert sum(same) >= len(same) // 2


def test_a_request_aborted_in_its_stream_leaves_the_server_serving(pair: tuple[Server, Server]):
    _, windowed = pair
    before = windowed.metrics()
    options = {**GREEDY, "max_tokens": 2500}
    stream = client(windowed).completions.create(
        prompt=prompts()[1], stream=True, extra_body={"ignore_eos": True}, **options
    )
    for _ in range(3):
        next(stream)
    assert windowed.metrics()["vllm:num_requests_running"] == 1
    stream.close()
    end = time.monotonic() + 30
    while windowed.metrics()["vllm:num_requests_running"] and time.monotonic() < end:
        time.sleep(0.1)
    after = windowed.metrics()
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 2500
    assert complete(windowed, prompts()[0]).text


def test_metrics_say_what_the_window_spared(pair: tuple[Server, Server]):
    plain, windowed = pair
    before = windowed.metrics()
    short, long = prompts()[0], prompts()[-1]
    for prompt in (short, long):
        complete(windowed, prompt)
    after = windowed.metrics()
    moved = {name: after[name] - before[name] for name in after if name.startswith((OURS, THEIRS))}

    def ours(name: str, **labels: str) -> float:
        listed = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        return moved[f"{OURS}{name}_total" + (f"{{{listed}}}" if labels else "")]

    drafts = {windowed: ours("drafts", windowed=windowed) for windowed in ("true", "false", "unknown")}
    accepted = {windowed: ours("accepted_tokens", windowed=windowed) for windowed in drafts}
    print(moved)
    assert min(drafts["true"], drafts["false"]) > 5 and min(accepted["true"], accepted["false"]) > 0
    assert drafts["unknown"] == 0  # one request at a time
    assert sum(drafts.values()) == ours("draft_keys_drafts")
    for windowed_too in drafts:
        positions = [
            ours("accepted_tokens_per_pos", windowed=windowed_too, position=str(position)) for position in range(GAMMA)
        ]
        assert sum(positions) == accepted[windowed_too]
        assert positions == sorted(positions, reverse=True)
        tested = [
            ours("tested_tokens_per_pos", windowed=windowed_too, position=str(position)) for position in range(GAMMA)
        ]
        assert tested == [drafts[windowed_too], *positions[:-1]]
    # Each answer's last draft may be cut.
    assert 0 <= sum(drafts.values()) + sum(accepted.values()) - 2 * (TOKENS - 1) <= 2 * GAMMA
    read, full = ours("draft_keys_read"), ours("draft_keys_full")
    longest = drafts["true"] * GAMMA * (len(long) + TOKENS + GAMMA)
    assert 0 < read < 0.7 * full
    assert drafts["true"] * (GAMMA - 1) * len(long) < full < longest + drafts["false"] * GAMMA * 100
    assert not any(name.startswith(OURS) for name in plain.metrics())


def test_counters_are_vllms_own_over_all_that_the_server_has_served(pair: tuple[Server, Server]):
    _, windowed = pair
    with ThreadPoolExecutor(8) as pool:  # they stop at once, some of them inside a draft
        list(pool.map(lambda prompt: complete(windowed, prompt), prompts()))
    found = windowed.metrics()

    def total(name: str) -> float:
        values = (value for key, value in found.items() if re.match(rf"{name}(_total)?({{|$)", key))
        return sum(values)

    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert total(f"{OURS}{name}") == total(f"{THEIRS}{name}") > 0
    for position in range(GAMMA):
        ours, theirs = (
            sum(value for key, value in found.items() if key.startswith(start) and f'position="{position}"' in key)
            for start in (f"{OURS}accepted_tokens_per_pos_total", f"{THEIRS}accepted_tokens_per_pos_total")
        )
        assert ours == theirs > 0


def test_the_log_says_what_is_in_force_and_what_came_of_it(pair: tuple[Server, Server]):
    plain, windowed = pair
    complete(windowed, prompts()[-1])
    end = time.monotonic() + 20
    while "Windowed MTP metrics: Mean acceptance length" not in windowed.log and time.monotonic() < end:
        time.sleep(0.2)
    assert "Windowed MTP metrics: Mean acceptance length" in windowed.log
    [line] = [line for line in windowed.log.splitlines() if "Windowed MTP is in force" in line]
    assert "sink 4" in line and "window 300" in line
    assert "Windowed MTP" not in plain.log
