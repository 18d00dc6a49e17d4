"""Generate with vLLM and a windowed draft, and print what the draft read and what came of it, by context.

Runs on the bundled checkpoint, without a download; where vLLM is the one for CPUs:
VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind python examples/vllm_offline.py
"""

from vllm import LLM, SamplingParams

from windowed_mtp.engines.vllm.steps import collect
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.workloads.stdlib import heldout_text


def main() -> None:
    # A short window, so that it leaves keys out of prompts of one to three thousand tokens.
    llm = LLM(
        model=str(checkpoint_path()),
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
        additional_config={"windowed_mtp": {"sink": 4, "window": 300}},
        max_model_len=4096,
        max_num_seqs=4,
        disable_log_stats=False,  # the counts are those of vLLM's scheduler
        enforce_eager=True,  # a short start for a short run
        enable_prefix_caching=False,  # a hybrid's needs kernels that vLLM does not have on a CPU
    )
    prompts = [heldout_text(characters) for characters in (1000, 4500, 8500)]
    with collect(llm, bounds=(1024, 2048)) as statistics:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=96), use_tqdm=False)
    for output in outputs:
        print(f"{len(output.prompt_token_ids):,} prompt tokens: {output.outputs[0].text[:60]!r} ...")
    print()
    print(statistics.table())


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
