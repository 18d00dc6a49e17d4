"""Choose the number of drafted tokens step by step, and compare the windowed proposals with the native ones.

The policy drafts one token more after a step whose drafts were all accepted and one fewer after another. A shadow head
without a window drafts beside the real one, and has no influence on the output.

Runs on the bundled checkpoint, on a CPU, without a download: python examples/depth_policy.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

from windowed_mtp import SinkWindow
from windowed_mtp.engines.protocol import StepContext, StepEvent
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.workloads.stdlib import heldout_text

LIMIT = 6


class FollowAcceptance:
    """A depth policy that looks at how the last step went, and keeps every step for later."""

    def __init__(self) -> None:
        self.depth = 3
        self.events: list[StepEvent] = []

    def __call__(self, context: StepContext) -> int:
        """Give the depth of the coming step."""
        return self.depth

    def observe(self, event: StepEvent) -> None:
        """Take note of a finished step."""
        self.events.append(event)
        all_accepted = event.accepted == len(event.proposed)
        self.depth = min(LIMIT, self.depth + 1) if all_accepted else max(1, self.depth - 1)


model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
policy = FollowAcceptance()
drafter = WindowedMTP.from_model(
    model,
    window=SinkWindow(sink=4, window=60),
    num_speculative_tokens=LIMIT,
    depth=policy,
    on_step=policy.observe,
    shadows={"native": None},
)
inputs = tokenizer(heldout_text(6000), return_tensors="pt")
model.generate(**inputs, custom_generate=drafter, max_new_tokens=64, do_sample=False)

print("step  depth  accepted  windowed draft = native draft, by position")
for event in policy.events:
    pairs = zip(event.proposed, event.shadow["native"], strict=True)
    same = " ".join("yes" if windowed == native else "no" for windowed, native in pairs)
    print(f"{event.step:4}  {event.depth:5}  {event.accepted:8}  {same}")
firsts = [event for event in policy.events if event.proposed]
agree = sum(event.proposed[0] == event.shadow["native"][0] for event in firsts)
stats = drafter.stats
print(f"\nfirst drafted token the same in {agree} of {len(firsts)} steps")
print(f"acceptance length {stats.acceptance_length:.2f} tokens a step, {stats.ms_per_step:.1f} ms a step")
