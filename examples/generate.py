"""Generate text with a windowed draft, streaming it, and print what the draft did.

Runs on the bundled checkpoint, on a CPU, without a download: python examples/generate.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from windowed_mtp import SinkWindow
from windowed_mtp.engines.acceptance import by_position
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.workloads.stdlib import heldout_text

model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())

# A short window, so that it leaves keys out of a prompt of about 2,000 tokens.
drafter = WindowedMTP.from_model(
    model, window=SinkWindow(sink=64, window=448), num_speculative_tokens=4, keep="ring", prefill="pruned"
)
inputs = tokenizer(heldout_text(6000), return_tensors="pt")
model.generate(
    **inputs,
    custom_generate=drafter,
    streamer=TextStreamer(tokenizer, skip_prompt=True),
    max_new_tokens=96,
    do_sample=False,
)

stats = drafter.stats
print(f"\n{stats.prompt_tokens:,} prompt tokens, {stats.new_tokens} new ones in {stats.steps} steps")
print(f"acceptance length {stats.acceptance_length:.2f} tokens a step, {stats.ms_per_step:.1f} ms a step")
print("unconditional acceptance by position:", by_position(stats.unconditional_acceptance))
print("conditional acceptance by position:", by_position(stats.conditional_acceptance))
print(f"draft keys read a step: {stats.keys_per_step:,.0f}; draft KV held: {stats.draft_kv_bytes / 2**10:,.0f} KiB")
