"""Generates greedily with vLLM; prints the tokens and the log probabilities of the five likeliest first ones.

A process of its own, since vLLM has one engine in a process.

python vllm_generation.py FOLDER JSON: {"prompts": [[ids]], "num_tokens": n, ...} with further arguments of `vllm.LLM`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[2])
    prompts, num_tokens = settings.pop("prompts"), settings.pop("num_tokens")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if settings.get("tensor_parallel_size", 1) == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        ranks = range(settings["tensor_parallel_size"])
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, ranks))  # one core each
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        max_model_len=96,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        compilation_config={"custom_ops": ["none"]},  # norms, RoPE and SwiGLU in PyTorch, bit for bit as ours
        **{"enforce_eager": True, "dtype": "float32", **settings},
    )
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=5)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    texts = [output.outputs[0] for output in outputs]
    first = [{token: entry.logprob for token, entry in text.logprobs[0].items()} for text in texts]
    print("RESULT", json.dumps({"tokens": [list(text.token_ids) for text in texts], "first": first}))


if __name__ == "__main__":
    main()
