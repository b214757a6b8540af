"""Generates greedily with vLLM, one model after the other: importing vLLM takes longer than a tiny model.

A process of its own, since what a plug-in registers stays for a whole process. A line of standard input is JSON:
{"folder": path, "prompts": [[ids]], "num_tokens": n, ...} with further arguments of `vllm.LLM`; a line of its output
that starts with RESULT is JSON: the tokens, and the log probabilities of the five likeliest first ones.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any


def main() -> None:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",  # one core for each of two ranks
    }
    look_at_models_here()
    for line in sys.stdin:
        print("RESULT", json.dumps(generate(**json.loads(line))), flush=True)
        forget()


def look_at_models_here() -> None:
    """vLLM starts another Python, which imports it once more, to ask a class of models what it can do."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda ask: ask()


def generate(folder: str, prompts: list[list[int]], num_tokens: int, **settings: Any) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
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
    return {"tokens": [list(text.token_ids) for text in texts], "first": first}


def forget() -> None:
    """Leave nothing of the last engine behind: its groups of ranks, and the attention put in place of vLLM's."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    gc.collect()
    cleanup_dist_env_and_memory()
    AttentionBackendEnum.CPU_ATTN.clear_override()


if __name__ == "__main__":
    main()
