"""Public clients, unchanged, against a served checkpoint: lm-eval's local-completions and guidellm."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from live_server import BOS, LiveServer, byte_tokenizer

from w4a4.serve.evaluate import evaluate
from w4a4.serve.model_runner import ModelRunner, load_runner
from w4a4.serve.settings import ServeSettings

TEXTS = [
    "The quick brown fox jumps over the lazy dog, as it has done in every example since.",
    "A perplexity is an average: exp of the mean negative log-probability of each token.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich – täglich.",
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_packed import write_packed

    folder = write_packed(tmp_path_factory.mktemp("tiny"), "llama", "dual")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runner(packed: Path) -> ModelRunner:
    return load_runner(ServeSettings(checkpoint=packed, device="cpu", max_num_seqs=16, kv_cache_bytes=1 << 24))


@pytest.fixture(scope="module")
def live(runner: ModelRunner) -> Iterator[LiveServer]:
    server = LiveServer(runner)
    yield server
    assert server.stop() == 0


def perplexity(runner: ModelRunner, text: str) -> float:
    """As `w4a4 eval` computes it, on one window that begins with the beginning-of-text token."""
    ids = torch.tensor([[BOS, *text.encode()]])
    return math.exp(evaluate(runner.model.score, ids).loss)


def test_echoed_logprobs_give_the_perplexity_of_eval(live: LiveServer, runner: ModelRunner) -> None:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        for text in TEXTS:
            ids = [BOS, *text.encode()]
            answer = client.completions.create(model="fake-model", prompt=ids, max_tokens=1, logprobs=1, echo=True)
            logprobs = answer.choices[0].logprobs.token_logprobs[1 : len(ids)]  # type: ignore[union-attr, index]
            measured = math.exp(-sum(logprobs) / len(logprobs))  # type: ignore[arg-type]
            assert measured == pytest.approx(perplexity(runner, text), rel=1e-5)


def test_greedy_answers_do_not_depend_on_the_batch(live: LiveServer) -> None:
    """A real model: Ten requests at once give what each gives alone, to the byte."""

    async def ask_all(is_together: bool) -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:

            async def ask(index: int) -> str:
                answer = await client.completions.create(
                    model="fake-model",
                    prompt=TEXTS[index % 3][: 10 + 2 * index],
                    max_tokens=12,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                return answer.choices[0].text

            if is_together:
                return list(await asyncio.gather(*(ask(index) for index in range(10))))
            return [await ask(index) for index in range(10)]

    assert asyncio.run(ask_all(True)) == asyncio.run(ask_all(False))


@pytest.mark.e2e
def test_lm_eval_local_completions_give_the_perplexity_of_eval(
    live: LiveServer, runner: ModelRunner, packed: Path
) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance")
    model = completions.LocalCompletionsAPI(
        model="fake-model",
        base_url=live.url + "/v1/completions",
        tokenizer=str(packed),
        tokenizer_backend="huggingface",
        max_length=127,
        batch_size=2,
    )
    requests = [instance.Instance("loglikelihood_rolling", {}, (text,), 0) for text in TEXTS]
    for text, loglikelihood in zip(TEXTS, model.loglikelihood_rolling(requests, disable_tqdm=True), strict=True):
        measured = math.exp(-loglikelihood / len(text.encode()))
        assert measured == pytest.approx(perplexity(runner, text), rel=1e-3)
    # Is the continuation the greedy one? Its first token is.
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        ids = list(TEXTS[0].encode())
        best = client.completions.create(
            model="fake-model", prompt=ids, max_tokens=1, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
        )
    greedy = runner.model.score(torch.tensor([ids]))[0, -1].argmax().item()
    results = model._loglikelihood_tokens([(("", ""), ids, [greedy]), (("", ""), ids, [(greedy + 1) % 256])])
    assert [is_greedy for _, is_greedy in results] == [True, False]
    assert results[0][0] == pytest.approx(best.choices[0].logprobs.token_logprobs[0], abs=1e-4)  # type: ignore[union-attr, index]


@pytest.mark.e2e
def test_guidellm_finds_no_fault(live: LiveServer, packed: Path, tmp_path: Path) -> None:
    guidellm = shutil.which("guidellm") or shutil.which("guidellm", path=str(Path(sys.executable).parent))
    if guidellm is None:
        pytest.skip("guidellm is not installed")
    report = tmp_path / "report.json"
    command = [guidellm, "run", "--backend", f"kind=openai_http,target={live.url},model=fake-model"]
    command += ["--profile", "kind=concurrent,streams=8", "--constraint", "kind=max_requests,count=40"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={packed}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (40, 0, 0)
