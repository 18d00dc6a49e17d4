"""Ask a server that examples/vllm_serve.sh started, and print what its metrics say of the draft.

python examples/vllm_client.py [http://127.0.0.1:8000]; it needs the openai package.
"""

import sys
import urllib.request

from openai import OpenAI

from windowed_mtp.engines.acceptance import by_position as write
from windowed_mtp.engines.acceptance import conditional, unconditional
from windowed_mtp.workloads.stdlib import heldout_text

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
[model] = client.models.list().data

stream = client.completions.create(
    model=model.id, prompt=heldout_text(6000), max_tokens=128, temperature=0, stream=True
)
for chunk in stream:
    print(chunk.choices[0].text, end="", flush=True)
print("\n")

counters = {}
with urllib.request.urlopen(f"{url}/metrics") as answer:
    for line in answer.read().decode().splitlines():
        if line.startswith("vllm:spec_decode_window_num_"):
            name, value = line.rsplit(" ", 1)
            counters[name] = float(value)
            if float(value) and "_created" not in name:
                print(name, value)


def total(name: str, label: str = "") -> float:
    """Add up a counter over its labels, or over those with one value."""
    prefix = f"vllm:spec_decode_window_num_{name}_total"
    return sum(value for key, value in counters.items() if key.startswith(prefix) and label in key)


def by_position(name: str) -> list[float]:
    """A counter by draft position."""
    positions = {key.split('position="')[1].split('"')[0] for key in counters if f"num_{name}_total" in key}
    return [total(name, f'position="{position}"') for position in sorted(positions, key=int)]


print(f"\nacceptance length {1 + total('accepted_tokens') / total('drafts'):.2f} tokens a step")
accepted, tested = by_position("accepted_tokens_per_pos"), by_position("tested_tokens_per_pos")
print("unconditional acceptance by position:", write(unconditional(accepted, total("drafts"))))
print("conditional acceptance by position:", write(conditional(accepted, tested)))
print(f"draft keys read: {total('draft_keys_read') / total('draft_keys_full'):.1%} of what a full draft reads")
