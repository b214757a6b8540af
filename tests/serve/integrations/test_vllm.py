"""A packed checkpoint in vLLM gives the tokens of our own engine. Needs vLLM's CPU build: `make test-vllm`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from w4a4.export.checkpoint import open_checkpoint
from w4a4.export.compressed_tensors import export_compressed_tensors
from w4a4.export.fake_quant import export_fake_quant
from w4a4.kernels.layout import ActMode
from w4a4.serve.integrations.vllm.versions import require_vllm
from w4a4.serve.model import CausalLM

pytestmark = pytest.mark.vllm

PackedFolder = Callable[..., Path]


def is_old() -> bool:
    """0.26, whose blocks have one size: it keeps no first positions in 16 bits and no sliding windows."""
    return require_vllm()[1].startswith("0.26.")


@pytest.fixture(scope="session")
def packed(packed_folder: PackedFolder) -> PackedFolder:
    """`packed_folder`, of checkpoints that ask for what this vLLM has."""
    return partial(packed_folder, sink_tokens=0) if is_old() else packed_folder


WORKER = Path(__file__).with_name("vllm_worker.py")
NUM_TOKENS = 24
KV4 = {"kv_cache_dtype": "int4_per_token_head"}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (5, 17, 40)]


class Worker:
    """A process that runs one model after the other in vLLM."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: subprocess.Popen[str] | None = None

    def run(self, folder: Path, **settings: Any) -> dict[str, Any]:
        """What vllm_worker.py says about a model. After a failure the next one gets a new process."""
        if self._process is None:
            with self.log.open("w") as log:
                self._process = subprocess.Popen(
                    [sys.executable, str(WORKER)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        settings |= {"folder": str(folder), "prompts": prompts(), "num_tokens": NUM_TOKENS}
        print(json.dumps(settings), file=self._process.stdin, flush=True)
        said = ""
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return result
            said += line
        self.stop()
        raise AssertionError(said[-2000:] + self.log.read_text()[-4000:])

    def generate(self, folder: Path, **settings: Any) -> list[list[int]]:
        tokens: list[list[int]] = self.run(folder, **settings)["tokens"]
        return tokens

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("vllm") / "log")
    yield worker
    worker.stop()


def greedy(folder: Path, act: ActMode, kv_bits: int) -> list[list[int]]:
    model = CausalLM(open_checkpoint(folder), act=act, kv_bits=kv_bits)
    texts = []
    for prompt in prompts():
        tokens = torch.tensor([prompt])
        for _ in range(NUM_TOKENS):
            tokens = torch.cat([tokens, model.score(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        texts.append(tokens[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize(
    ("kind", "recipe"), [("llama-biased", "fmpq-int8"), ("mistral", "dual"), ("qwen2", "quik"), ("qwen3", "dual")]
)
def test_greedy_tokens_equal_our_own(kind: str, recipe: str, packed: PackedFolder, vllm: Worker) -> None:
    """Orders of channels, asymmetric activations, 16-bit columns, biases, windows; KV4 with a mean off the keys,
    Hadamard and sinks: every number is the same."""
    if kind == "mistral" and is_old():
        pytest.skip("no sliding windows in KV4 there")
    folder = packed(kind, recipe)
    assert vllm.generate(folder, **KV4) == greedy(folder, "map", 4)


def test_two_ranks_equal_one(packed: PackedFolder, vllm: Worker) -> None:
    """Ranks quantise whole tokens, at 4 and 8 bits, and have rows of every linear, in whatever order its channels are:
    this one's 8-bit columns stand where magnitude puts them."""
    folder = packed("llama-biased", "fmpq-int8")
    assert vllm.generate(folder, tensor_parallel_size=2, **KV4) == greedy(folder, "map", 4)


def test_two_ranks_with_scales_of_their_own(packed: PackedFolder, vllm: Worker) -> None:
    """Columns of o_proj and down_proj are cut right. Activations are left alone: quantised, they would differ."""
    folder = packed("qwen2", down_hadamard=64)
    settings = {"w4a4": {"act": "a16", "per_rank_scales": True}}
    tokens = vllm.generate(folder, tensor_parallel_size=2, additional_config=settings, **KV4)
    assert tokens == greedy(folder, "a16", 4)


def test_compiled_equals_eager(packed: PackedFolder, vllm: Worker) -> None:
    """torch.compile sees our operators and what two ranks exchange. Activations are left alone: its norms round
    differently."""
    folder = packed("qwen2")
    settings = {"w4a4": {"act": "a16"}}
    tokens = vllm.generate(folder, enforce_eager=False, tensor_parallel_size=2, additional_config=settings, **KV4)
    assert tokens == greedy(folder, "a16", 4)


def test_a_model_in_bf16_keeps_scales_and_means_in_float32(packed: PackedFolder, vllm: Worker) -> None:
    folder = packed("llama")
    first = vllm.run(folder, dtype="bfloat16", additional_config={"w4a4": {"act": "a16"}}, **KV4)["first"]
    check_first(first, CausalLM(open_checkpoint(folder), act="a16"))


def test_vllm_without_us_runs_the_float_model(packed_folder: PackedFolder, vllm: Worker, tmp_path: Path) -> None:
    packed = packed_folder("llama", "w4a16")
    folder = export_fake_quant(open_checkpoint(packed), tmp_path / "float", torch.float32)
    assert vllm.generate(folder) == greedy(packed, "a16", 16)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's integer kernels need AVX-512")
@pytest.mark.parametrize("recipe", ["w4a16", "w8a8"])
def test_vllm_without_us_runs_compressed_tensors(
    recipe: str, packed_folder: PackedFolder, vllm: Worker, tmp_path: Path
) -> None:
    """Its kernels for int4 weights on a CPU know bf16 alone, so probabilities are compared."""
    packed = packed_folder("llama", recipe)
    folder = export_compressed_tensors(open_checkpoint(packed), tmp_path / "out")
    check_first(vllm.run(folder, dtype="bfloat16")["first"], CausalLM(open_checkpoint(packed)))


def check_first(first: list[dict[str, float]], model: CausalLM) -> None:
    """The likeliest first tokens have the log probabilities that `model` gives them, as far as bf16 goes."""
    for prompt, found in zip(prompts(), first, strict=True):
        expected = model.score(torch.tensor([prompt]))[0, -1].log_softmax(-1)
        assert len(found) >= 5
        for token, logprob in found.items():
            assert abs(float(expected[int(token)]) - logprob) < 0.15
