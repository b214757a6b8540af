import random
import time

import pytest
from conftest import EOS, StartEngine

from w4a4.serve.engine import EngineConfig, EngineStoppedError, QueueFullError
from w4a4.serve.request import FinishReason

TIGHT = EngineConfig(max_num_seqs=8, max_num_batched_tokens=48, eos_ids=frozenset({EOS}))
STOPS = frozenset({EOS})


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    generator = random.Random(seed)
    shared = [generator.randrange(256) for _ in range(longest)]
    result = []
    for _ in range(count):
        prompt = shared[: generator.randrange(longest // 2)]
        result.append(prompt + [generator.randrange(256) for _ in range(generator.randint(1, longest // 2))])
    return result


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("num_sink_slots", [0, 8])
def test_greedy_answers_do_not_depend_on_the_batch(
    start_engine: StartEngine, num_sink_slots: int, is_asynchronous: bool
) -> None:
    """Mixed lengths, shared prefixes and a pool that forces preemption: every answer is the one given alone."""
    harness = start_engine(
        TIGHT, num_pages=24, num_sink_slots=num_sink_slots, max_model_len=256, is_asynchronous=is_asynchronous
    )
    wanted = prompts(40)
    ids = [harness.submit(prompt, max_tokens=20 + index % 50) for index, prompt in enumerate(wanted)]
    outputs = harness.wait(*ids)
    for index, (prompt, output) in enumerate(zip(wanted, outputs, strict=True)):
        expected = harness.runner.expected_answer(prompt, 20 + index % 50, STOPS)
        assert output.token_ids == expected
        assert output.finish_reason == ("stop" if expected[-1] == EOS else "length")
        assert output.num_output_tokens == len(expected)
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hits > 0
    assert (stats.num_pages_in_use, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_prompt_tokens == sum(map(len, wanted))
    assert stats.num_output_tokens == sum(len(output.token_ids) for output in outputs)
    assert harness.engine.num_live == 0
    assert harness.runner.max_batch <= 8
    assert harness.runner.max_tokens <= 48


def test_plain_decoding_runs_ahead_of_what_the_host_knows(start_engine: StartEngine) -> None:
    """Answers end at any step, by length or by an end of text that the next step does not know of yet."""
    harness = start_engine(EngineConfig(max_num_seqs=6, eos_ids=STOPS), num_pages=64, is_asynchronous=True)
    harness.runner.gate.clear()
    wanted = prompts(6, seed=1)
    ids = [harness.submit(prompt, max_tokens=200 + 11 * index) for index, prompt in enumerate(wanted)]
    harness.runner.gate.set()
    for index, output in enumerate(harness.wait(*ids)):
        expected = harness.runner.expected_answer(wanted[index], 200 + 11 * index, STOPS)
        assert (output.token_ids, output.num_output_tokens) == (expected, len(expected))
    assert harness.runner.num_steps_ahead > harness.runner.num_steps / 2
    assert harness.engine.stats().num_pages_in_use == 0
    assert harness.engine.stats().num_output_tokens == sum(len(harness.outputs[key].token_ids) for key in ids)


def test_last_tokens_are_not_waited_for(start_engine: StartEngine) -> None:
    """Lengths are known before the tokens: a sequence is left out after its last one, and the others go on."""
    harness = start_engine(EngineConfig(max_num_seqs=4), num_pages=64, is_asynchronous=True)
    limits = (1, 12, 12, 20)
    requests = [harness.request(f"prompt {n}", max_tokens=n, ignore_eos=True) for n in limits]
    harness.engine.submit(requests)
    outputs = harness.wait(*(request.request_id for request in requests))
    for limit, request, output in zip(limits, requests, outputs, strict=True):
        assert output.token_ids == harness.runner.expected_answer(bytes(request.prompt_ids), limit)
    assert (harness.runner.num_steps, harness.runner.num_steps_ahead) == (20, 19)
    assert harness.engine.stats().num_pages_in_use == 0


@pytest.mark.parametrize("params", [{"logprobs": 1}, {"repetition_penalty": 1.1}, {"min_tokens": 5}])
def test_nothing_runs_ahead_that_needs_the_token(start_engine: StartEngine, params: dict[str, object]) -> None:
    harness = start_engine(is_asynchronous=True)
    together = [harness.submit("one", max_tokens=20), harness.submit("another", max_tokens=20, **params)]
    outputs = harness.wait(*together)
    again = start_engine()
    assert [output.token_ids for output in outputs] == [
        again.run("one", max_tokens=20).token_ids,
        again.run("another", max_tokens=20, **params).token_ids,
    ]
    harness.wait_until(lambda: harness.engine.num_live == 0)
    ahead = harness.runner.num_steps_ahead
    harness.run("alone", max_tokens=10, **params)
    assert harness.runner.num_steps_ahead == ahead


def test_an_aborted_request_was_answered_up_to_what_the_device_had_done(start_engine: StartEngine) -> None:
    harness = start_engine(is_asynchronous=True, step_seconds=0.002, num_pages=64)
    keys = [harness.submit(prompt, max_tokens=400, ignore_eos=True) for prompt in ("leaves", "stays")]
    harness.wait_until(lambda: harness.runner.num_steps_ahead > 10)
    harness.engine.abort(keys[0])
    stays = harness.wait(keys[1])[0]
    assert stays.token_ids == harness.runner.expected_answer(b"stays", 400)
    left = harness.outputs[keys[0]].token_ids
    assert left == harness.runner.expected_answer(b"leaves", len(left))
    assert harness.engine.stats().num_pages_in_use == 0


def test_the_fake_model_notices_a_corrupted_page(start_engine: StartEngine) -> None:
    """The tests above are worth something only if this one can tell."""
    harness = start_engine(num_pages=8, max_model_len=128, step_seconds=0.01)
    harness.runner.gate.clear()
    key = harness.submit([1] * 20, max_tokens=30)
    harness.runner.gate.set()
    harness.wait_until(lambda: harness.runner.num_steps > 3)
    harness.runner._pages[:] = 77
    assert harness.wait(key)[0].token_ids != harness.runner.expected_answer([1] * 20, 30, STOPS)


def test_text_is_the_tokens_decoded(start_engine: StartEngine) -> None:
    harness = start_engine()
    output = harness.run("hello", max_tokens=50, ignore_eos=True)
    expected = bytes(token for token in output.token_ids if token < 256)
    assert len(output.token_ids) == 50
    assert len(output.text) >= len(expected.decode(errors="ignore"))
    assert harness.num_outputs["r1"] == 50


def test_eos_and_stop_token_ids_end_the_answer_and_are_not_shown(start_engine: StartEngine) -> None:
    harness = start_engine()
    expected = harness.runner.expected_answer(b"stop here", 40)
    stop_id = expected[12]
    length = expected.index(stop_id) + 1
    output = harness.run("stop here", max_tokens=40, stop_token_ids=frozenset({stop_id}), ignore_eos=True)
    assert output.token_ids == expected[:length]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop_id)
    again = harness.run("stop here", max_tokens=length - 1, ignore_eos=True)
    assert output.text == again.text


def test_min_tokens_keeps_stops_away(start_engine: StartEngine) -> None:
    harness = start_engine()
    free = harness.runner.expected_answer(b"x", 40)
    stop_id = free[2]
    output = harness.run("x", max_tokens=40, min_tokens=10, stop_token_ids=frozenset({stop_id}))
    assert len(output.token_ids) >= 10
    assert stop_id not in output.token_ids[:9]


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_across_tokens(start_engine: StartEngine, is_asynchronous: bool, include_stop: bool) -> None:
    harness = start_engine(is_asynchronous=is_asynchronous, vocab_size=128)
    whole = harness.run("find a stop", max_tokens=60, ignore_eos=True)
    assert len(whole.text) == 60  # ASCII: a character per token
    stop = whole.text[20:25]
    where = whole.text.index(stop)
    output = harness.run("find a stop", max_tokens=60, ignore_eos=True, stop=(stop,), include_stop=include_stop)
    assert output.text == whole.text[: where + 5 * include_stop]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert len(output.token_ids) == where + 5
    assert harness.engine.stats().num_pages_in_use == 0
    # A stop string that ends with the very last token allowed is a stop, not a length.
    output = harness.run("find a stop", max_tokens=where + 5, ignore_eos=True, stop=(stop,))
    assert output.finish_reason == FinishReason.STOP
    # One that begins at the end is shown.
    output = harness.run("find a stop", max_tokens=where + 4, ignore_eos=True, stop=(stop,))
    assert (output.finish_reason, output.text) == (FinishReason.LENGTH, whole.text[: where + 4])


def test_logprobs_of_answer_and_prompt(start_engine: StartEngine) -> None:
    harness = start_engine(TIGHT)
    prompt = list(b"log-probabilities of a prompt that is longer than one step's budget, which is 48 tokens")
    output = harness.run(prompt, max_tokens=3, logprobs=2, prompt_logprobs=1)
    import numpy as np
    import torch

    tokens = prompt + output.token_ids
    assert output.prompt_logprobs is not None
    entries = output.prompt_logprobs + output.logprobs
    assert [entry.token_id for entry in entries] == tokens[1:]
    for position, entry in enumerate(entries):
        expected = torch.log_softmax(harness.runner.logits(np.array(tokens[: position + 1])), -1)
        assert entry.logprob == pytest.approx(expected[tokens[position + 1]].item(), abs=1e-5)
        best = expected.topk(len(entry.top))
        assert [token for token, _ in entry.top] == best.indices.tolist()
    assert len(output.prompt_logprobs[0].top) == 1
    assert len(output.logprobs[0].top) == 2
    # scoring alone
    scored = harness.run(prompt, max_tokens=0, prompt_logprobs=1)
    assert scored.prompt_logprobs == output.prompt_logprobs
    assert (scored.token_ids, scored.finish_reason) == ([], FinishReason.LENGTH)
    assert harness.engine.stats().num_pages_in_use == 0


def test_seeded_sampling_repeats_in_any_batch(start_engine: StartEngine) -> None:
    harness = start_engine(TIGHT, num_pages=24, max_model_len=256)
    alone = harness.run("dice", temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    ids = [harness.submit(prompt, temperature=0.8, max_tokens=40) for prompt in prompts(12, seed=3)]
    crowded = harness.submit("dice", temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    harness.wait(*ids)
    assert harness.wait(crowded)[0].token_ids == alone.token_ids
    other = harness.run("dice", temperature=1.0, seed=6, max_tokens=40, ignore_eos=True)
    assert other.token_ids != alone.token_ids


def test_abort_frees_the_pages_and_says_nothing_more(start_engine: StartEngine) -> None:
    harness = start_engine(step_seconds=0.002)
    key = harness.submit("endless", max_tokens=400, ignore_eos=True)
    harness.wait_until(lambda: harness.num_outputs.get(key, 0) > 3)
    harness.engine.abort(key)
    harness.engine.abort("never heard of")
    harness.wait_until(lambda: harness.engine.num_live == 0)
    count = harness.num_outputs[key]
    assert harness.engine.stats().num_pages_in_use == 0
    time.sleep(0.02)
    assert harness.num_outputs[key] == count
    assert harness.outputs[key].finish_reason is None
    assert harness.run("next", max_tokens=3, ignore_eos=True).finish_reason == FinishReason.LENGTH


def test_abort_while_waiting(start_engine: StartEngine) -> None:
    harness = start_engine(EngineConfig(max_num_seqs=1, max_num_batched_tokens=16), step_seconds=0.002)
    running = harness.submit("a", max_tokens=60)
    waiting = harness.submit("b", max_tokens=5)
    harness.wait_until(lambda: harness.engine.stats().num_waiting == 1)
    harness.engine.abort(waiting)
    assert len(harness.wait(running)[0].token_ids) == 60
    assert waiting not in harness.outputs
    assert harness.engine.num_live == 0


def test_abort_all_tells_everyone(start_engine: StartEngine) -> None:
    harness = start_engine(step_seconds=0.002, is_asynchronous=True)
    ids = [harness.submit([index], max_tokens=400, ignore_eos=True) for index in range(5)]
    harness.wait_until(lambda: len(harness.num_outputs) == 5)
    harness.engine.abort_all("going home")
    for output in harness.wait(*ids):
        assert (output.finish_reason, output.error) == (FinishReason.ABORT, "going home")
    assert harness.engine.stats().num_pages_in_use == 0


def test_the_queue_is_bounded(start_engine: StartEngine) -> None:
    harness = start_engine(EngineConfig(max_num_seqs=2, max_queued=3))
    harness.runner.gate.clear()
    ids = [harness.submit([index], max_tokens=2) for index in range(4)]
    pair = [harness.request([8], max_tokens=2), harness.request([9], max_tokens=2)]
    with pytest.raises(QueueFullError, match="4 requests are running or waiting, at most 5 may"):
        harness.engine.submit(pair)
    assert harness.engine.num_live == 4  # all or none
    ids.append(harness.submit([7], max_tokens=2))
    harness.runner.gate.set()
    harness.wait(*ids)
    harness.submit([6], max_tokens=2)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_failing_device_ends_the_engine_and_tells_everyone(start_engine: StartEngine, is_asynchronous: bool) -> None:
    harness = start_engine(EngineConfig(max_num_seqs=2), fail_after=3, is_asynchronous=is_asynchronous)
    ids = [harness.submit([index], max_tokens=50, ignore_eos=True) for index in range(5)]
    for output in harness.wait(*ids):
        assert output.finish_reason == FinishReason.ERROR
        assert "illegal memory access" in output.error
    assert not harness.engine.is_alive
    assert harness.engine.num_live == 0
    with pytest.raises(EngineStoppedError, match="has failed: CUDA error"):
        harness.submit([1])


def test_logits_that_are_not_finite_end_one_request(start_engine: StartEngine) -> None:
    harness = start_engine()
    harness.runner.nan_after = 4  # the first row of each batch from then on
    harness.runner.gate.clear()
    first = harness.submit([1], max_tokens=30, ignore_eos=True)
    second = harness.submit([2], max_tokens=3, ignore_eos=True)
    harness.runner.gate.set()
    outputs = harness.wait(first, second)
    assert outputs[0].finish_reason == FinishReason.ERROR
    assert "not finite after 5 tokens" in outputs[0].error
    assert outputs[1].token_ids == harness.runner.expected_answer([2], 3)
    assert harness.engine.is_alive


def test_drain_finishes_what_is_there_and_takes_nothing_new(start_engine: StartEngine) -> None:
    harness = start_engine(step_seconds=0.001)
    key = harness.submit("last words", max_tokens=30, ignore_eos=True)
    harness.engine.drain()
    with pytest.raises(EngineStoppedError, match="shutting down"):
        harness.submit("too late")
    assert len(harness.wait(key)[0].token_ids) == 30


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 512, {}, "the prompt has 512 tokens, this model takes 512"),
        ([1] * 500, {"min_tokens": 13}, "at least 13 must be left"),
        ([1] * 500, {"max_tokens": 13}, "has 500 tokens and max_tokens is 13; this model takes 512"),
        ([300], {}, "token id 300 is not in the vocabulary of 300"),
        ([-1], {}, "token id -1 is not"),
        ([1], {"logit_bias": {300: 1.0}}, "logit_bias: token id 300"),
        ([1], {"stop_token_ids": frozenset({999})}, "stop_token_ids: token id 999"),
    ],
)
def test_requests_that_cannot_run_are_refused(
    start_engine: StartEngine, prompt: list[int], params: dict[str, object], message: str
) -> None:
    harness = start_engine()
    with pytest.raises(ValueError, match=message):
        harness.submit(prompt, **params)
    assert harness.engine.num_live == 0


def test_an_end_of_text_beyond_the_vocabulary_does_no_harm(start_engine: StartEngine) -> None:
    harness = start_engine(EngineConfig(eos_ids=frozenset({5, 300})))
    output = harness.run("x", max_tokens=20, min_tokens=19)
    assert len(output.token_ids) >= 19 and 5 not in output.token_ids[:18]


def test_the_models_length_bounds_the_answer(start_engine: StartEngine) -> None:
    harness = start_engine()
    assert len(harness.run([1] * 500, ignore_eos=True).token_ids) == 12
    assert len(harness.run([1] * 511, ignore_eos=True).token_ids) == 1


def test_a_cached_prompt_is_reported(start_engine: StartEngine) -> None:
    harness = start_engine()
    assert harness.run([5] * 100, max_tokens=2).num_cached_tokens == 0
    again = harness.run([5] * 100, max_tokens=2)
    assert again.num_cached_tokens == 96
    assert again.token_ids == harness.outputs["r1"].token_ids
    off = start_engine(EngineConfig(is_prefix_caching=False))
    off.run([5] * 100, max_tokens=2)
    assert off.run([5] * 100, max_tokens=2).num_cached_tokens == 0


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_asked_for_the_crowd_changes_nothing(
    start_engine: StartEngine, seed: int, is_asynchronous: bool
) -> None:
    """Every parameter at random, alone and among others that are preempted and aborted: the same in every detail."""
    generator = random.Random(seed)

    def some_params(index: int) -> dict[str, object]:
        params: dict[str, object] = {"max_tokens": generator.choice([1, 30, 80, 120]), "temperature": 0.0}
        if generator.random() < 0.5:
            params |= {"temperature": generator.choice([0.5, 1.0, 1.7]), "seed": index}
        if generator.random() < 0.3:
            params |= {"top_k": generator.choice([1, 5, 40]), "top_p": generator.choice([0.3, 0.9, 1.0])}
        if generator.random() < 0.3:
            params |= {"min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
        if generator.random() < 0.3:
            params |= {"logprobs": generator.randrange(4)}
        if generator.random() < 0.2:
            params |= {"prompt_logprobs": generator.randrange(3)}
        if generator.random() < 0.4:
            params |= {"stop": tuple(generator.choices("abcdefghij", k=2)), "min_tokens": generator.choice([0, 1])}
        if generator.random() < 0.3:
            params |= {"stop_token_ids": frozenset(generator.sample(range(256), 5)), "ignore_eos": True}
        if generator.random() < 0.3:
            params |= {"logit_bias": {generator.randrange(256): 3.0, 97: 2.0}}
        return params

    asked = [(prompt, some_params(index)) for index, prompt in enumerate(prompts(24, seed=seed + 10))]
    alone = start_engine(TIGHT, num_pages=64, max_model_len=256)
    expected = [alone.run(prompt, **params) for prompt, params in asked]
    crowded = start_engine(
        TIGHT, num_pages=16, max_model_len=256, num_sink_slots=8, is_asynchronous=is_asynchronous, step_seconds=0.0005
    )
    nuisances = [crowded.submit(prompt, max_tokens=150) for prompt in prompts(6, seed=99)]
    ids = []
    for index, (prompt, params) in enumerate(asked):
        ids.append(crowded.submit(prompt, **params))
        if index % 4 == 3:
            crowded.engine.abort(nuisances[index // 4])
    for output, other in zip(crowded.wait(*ids), expected, strict=True):
        assert output.token_ids == other.token_ids
        assert output.text == other.text
        assert (output.finish_reason, output.stop_reason) == (other.finish_reason, other.stop_reason)
        assert output.logprobs == other.logprobs
        assert output.prompt_logprobs == other.prompt_logprobs
    crowded.wait_until(lambda: crowded.engine.num_live == 0)
    stats = crowded.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_pages_in_use == 0
