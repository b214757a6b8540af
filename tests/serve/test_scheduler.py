import random

import pytest

from w4a4.configs.errors import UsageError
from w4a4.serve.batches import build_batch
from w4a4.serve.detokenizer import Detokenizer
from w4a4.serve.pages import PagePool
from w4a4.serve.request import FinishReason, Request, SamplingParams, Sequence
from w4a4.serve.scheduler import Scheduled, Scheduler, SchedulerLimits


def scheduler(num_pages: int = 16, max_num_seqs: int = 4, budget: int = 16, **pool: object) -> Scheduler:
    return Scheduler(PagePool(num_pages, 4, **pool), SchedulerLimits(max_num_seqs, budget, num_pages * 4))  # type: ignore[arg-type]


def sequence(name: str, prompt: list[int], **params: object) -> Sequence:
    request = Request(name, tuple(prompt), SamplingParams(**params))  # type: ignore[arg-type]
    return Sequence(request, 100, frozenset(), Detokenizer(lambda ids: ""))


def shares(plan: list[Scheduled]) -> dict[str, int]:
    return {entry.sequence.request.request_id: entry.num_tokens for entry in plan}


def advance(target: Scheduler, plan: list[Scheduled], token: int = 0) -> None:
    """As if the step had run and sampled `token` for everyone that reached its end."""
    target.commit(plan)
    for entry in plan:
        if entry.is_sampled:
            entry.sequence.tokens.append(token)


def test_decoding_goes_first_and_prompts_are_cut_to_the_budget() -> None:
    target = scheduler(budget=8)
    target.add(sequence("a", [1] * 3))
    advance(target, target.schedule())
    target.add(sequence("b", [2] * 18))
    target.add(sequence("c", [3] * 2))
    for expected in ({"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 4, "c": 2}, {"a": 1, "b": 1, "c": 1}):
        plan = target.schedule()
        assert shares(plan) == expected
        assert all(entry.is_sampled == (entry.num_tokens == entry.sequence.num_pending) for entry in plan)
        advance(target, plan)


def test_no_more_than_max_num_seqs_run() -> None:
    target = scheduler(max_num_seqs=2)
    for name in "abc":
        target.add(sequence(name, [1]))
    assert list(shares(target.schedule())) == ["a", "b"]
    target.remove(target.running[0])
    assert "c" in shares(target.schedule())


def test_the_latest_arrival_is_preempted_and_comes_back_first() -> None:
    target = scheduler(num_pages=4, max_num_seqs=3, is_caching=False)
    a, b, c = (sequence(name, [ord(name)] * 4) for name in "abc")
    for each in (a, b, c):
        target.add(each)
        advance(target, target.schedule(), 9)
    # a and b take a page of margin each: c waits although a page is free
    assert [s.request.request_id for s in target.running] == ["a", "b"]
    plan = target.schedule()
    assert shares(plan) == {"a": 1, "b": 1}
    advance(target, plan, 9)
    while not target.num_preemptions:
        advance(target, target.schedule(), 9)
    assert target.running == [a]
    assert list(target.waiting) == [b, c]
    assert (b.pages, b.num_computed, b.row) == ([], 0, -1)
    assert b.num_output > 0
    a.finish_reason = FinishReason.STOP
    target.remove(a)
    plan = target.schedule()
    assert shares(plan)["b"] == len(b.tokens)
    assert b.num_preemptions == 1


def test_a_shared_prefix_is_computed_once() -> None:
    target = scheduler(num_pages=16, budget=32)
    target.add(sequence("a", list(range(12))))
    advance(target, target.schedule())
    target.add(sequence("b", [*range(12)]))
    target.add(sequence("c", [*range(8), 50, 51]))
    plan = target.schedule()
    # Of b's three full pages the last is not used: its last token must be computed for the logits.
    assert shares(plan) == {"a": 1, "b": 4, "c": 2}
    a, b, c = (entry.sequence for entry in plan)
    assert a.pages[:2] == b.pages[:2] == c.pages[:2]
    assert len({*a.pages, *b.pages, *c.pages}) == 4 + 1 + 1
    assert (target.num_prefix_queries, target.num_prefix_hits) == (8 + 8 + 8, 8 + 8)


def test_a_prompt_that_is_being_computed_is_waited_for() -> None:
    target = scheduler(num_pages=32, max_num_seqs=6, budget=8)
    target.add(sequence("a", list(range(12))))
    for name, own in (("b", [50]), ("c", [60, 61])):  # share two pages with a
        target.add(sequence(name, [*range(8), *own]))
    target.add(sequence("d", [70, 71]))  # shares nothing
    target.add(sequence("e", list(range(12))))
    plan = target.schedule()
    assert shares(plan) == {"a": 8}  # the budget
    advance(target, plan)
    plan = target.schedule()
    assert shares(plan) == {"a": 4, "b": 1, "c": 2, "d": 1}
    advance(target, plan)
    plan = target.schedule()
    assert shares(plan) == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 4}
    assert [s.request.request_id for s in target.running] == ["a", "b", "c", "d", "e"]


def test_nobody_waits_for_a_sequence_that_is_gone() -> None:
    target = scheduler(num_pages=32, budget=6)
    target.add(sequence("a", list(range(12))))
    target.add(sequence("b", list(range(12))))
    target.add(sequence("c", [7] * 3))
    plan = target.schedule()
    assert shares(plan) == {"a": 6}
    advance(target, plan)
    plan = target.schedule()
    assert shares(plan) == {"a": 6}
    target.running[0].finish_reason = FinishReason.ABORT
    target.remove(target.running[0])
    plan = target.schedule()  # the first page was computed, the rest is b's to do
    assert shares(plan) == {"b": 6}
    assert plan[0].sequence.num_computed == 4
    advance(target, plan)
    target.add(sequence("d", list(range(12))))  # b has computed the two pages that d may take over
    assert shares(target.schedule()) == {"b": 2, "c": 3, "d": 1}


def test_prompt_logprobs_compute_every_token() -> None:
    target = scheduler(budget=32)
    target.add(sequence("a", list(range(9))))
    advance(target, target.schedule())
    target.add(sequence("b", list(range(9)), prompt_logprobs=0))
    plan = target.schedule()
    assert shares(plan) == {"a": 1, "b": 9}
    batch, num_rows = build_batch(plan, target.tables, 4)
    assert num_rows == [1, 9]  # 8 for the prompt's tokens 1 .. 8, one to sample from
    assert batch.logit_rows.tolist() == [0, *range(1, 10)]


def test_the_batch_says_where_everything_is() -> None:
    target = scheduler(budget=11, num_sink_slots=4)
    target.add(sequence("a", list(range(20, 26))))
    advance(target, target.schedule(), 99)
    target.add(sequence("b", list(range(40, 55))))
    plan = target.schedule()
    batch, num_rows = build_batch(plan, target.tables, 4)
    a, b = (entry.sequence for entry in plan)
    assert batch.input_ids.tolist() == [99, *range(40, 50)]
    assert batch.positions.tolist() == [6, *range(10)]
    assert batch.query_start.tolist() == [0, 1, 11]
    assert batch.context_lens.tolist() == [7, 10]
    assert batch.logit_rows.tolist() == [0]
    assert num_rows == [1, 0]
    assert batch.block_tables.tolist() == [[*a.pages, 0], b.pages[:3]]
    assert batch.sink_slots.tolist() == [target.pool.sink_slot(a.pages[0]), target.pool.sink_slot(b.pages[0])]
    assert batch.slot_mapping.tolist() == [a.pages[1] * 4 + 2, *(b.pages[p // 4] * 4 + p % 4 for p in range(10))]
    assert not batch.is_decode
    advance(target, plan, 99)
    batch, _ = build_batch(target.schedule(), target.tables, 4)
    assert batch.positions.tolist() == [7, *range(10, 15)]
    assert batch.logit_rows.tolist() == [0, 5]


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot hold one sequence of 65 tokens"):
        Scheduler(PagePool(16, 4), SchedulerLimits(1, 1, 65))
    with pytest.raises(UsageError, match="max_num_batched_tokens 3 is less than max_num_seqs 4"):
        SchedulerLimits(4, 3, 16)
    with pytest.raises(UsageError, match="2 sink slots are fewer"):
        Scheduler(PagePool(16, 4, 2), SchedulerLimits(4, 4, 16))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_sink_slots", [0, 5])
def test_random_traffic_loses_nothing_and_gives_everything_back(seed: int, num_sink_slots: int) -> None:
    generator = random.Random(seed)
    target = scheduler(num_pages=12, max_num_seqs=5, budget=9, num_sink_slots=num_sink_slots)
    alive: list[Sequence] = []
    wanted: dict[str, int] = {}
    num_done = 0
    for step in range(800):
        if generator.random() < 0.15 and step < 600:
            new = sequence(f"s{step}", [generator.randrange(2) for _ in range(generator.randint(1, 30))])
            wanted[new.request.request_id] = generator.randint(1, 48 - new.num_prompt)
            alive.append(new)
            target.add(new)
        if alive and generator.random() < 0.02:
            gone = alive.pop(generator.randrange(len(alive)))
            gone.finish_reason = FinishReason.ABORT
            target.remove(gone)
        plan = target.schedule()
        assert bool(plan) == target.has_work
        if not plan:
            continue
        assert sum(entry.num_tokens for entry in plan) <= 9
        assert len(target.running) <= 5
        for entry in plan:
            last = entry.sequence.num_computed + entry.num_tokens
            assert len(entry.sequence.pages) * 4 >= last
        build_batch(plan, target.tables, 4)
        advance(target, plan, generator.randrange(2))
        for done in [s for s in alive if s.num_output >= wanted[s.request.request_id]]:
            done.finish_reason = FinishReason.LENGTH
            target.remove(done)
            alive.remove(done)
            num_done += 1
    for _ in range(2000):
        plan = target.schedule()
        if not plan:
            break
        advance(target, plan, 1)
        for done in [s for s in alive if s.num_output >= wanted[s.request.request_id]]:
            done.finish_reason = FinishReason.LENGTH
            target.remove(done)
            alive.remove(done)
    assert not alive
    assert target.num_preemptions > 0
    assert target.pool.num_available == 12
    assert (target.tables.pages == 0).all()
