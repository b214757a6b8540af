import random

import pytest

from w4a4.configs.errors import ResourceError
from w4a4.serve.pages import ROOT_DIGEST, PagePool, chain_digest, plan_pool


def digests(tokens: list[int], page_size: int = 4) -> list[bytes]:
    chain, names = ROOT_DIGEST, []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        chain = chain_digest(chain, tokens[start : start + page_size])
        names.append(chain)
    return names


def test_digests_name_the_whole_prefix() -> None:
    assert digests([1, 2, 3, 4, 5, 6, 7, 8])[1] != digests([1, 2, 3, 0, 5, 6, 7, 8])[1]
    assert digests([1, 2, 3, 4, 5, 6, 7, 8]) == digests([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert chain_digest(ROOT_DIGEST, [1, 2]) != chain_digest(ROOT_DIGEST, [513])


def test_a_released_prefix_is_found_again() -> None:
    pool = PagePool(4, 4)
    names = digests(list(range(8)))
    pages = [pool.allocate(is_first=True), pool.allocate()]
    for page, name in zip(pages, names, strict=True):
        pool.register(page, name)
    assert (pool.num_available, pool.num_in_use, pool.num_cached) == (2, 2, 2)
    assert pool.match(names) == pages  # shared while in use
    pool.release(pages)
    assert pool.num_in_use == 2
    pool.release(pages)
    assert (pool.num_available, pool.num_in_use, pool.num_cached) == (4, 0, 2)
    assert pool.match([names[0], digests([9, 9, 9, 9])[0]]) == pages[:1]
    assert pool.num_in_use == 1


def test_eviction_takes_free_pages_first_then_the_oldest_tail() -> None:
    pool = PagePool(4, 4)
    old, new = digests(list(range(8))), digests(list(range(100, 104)))
    pages = [pool.allocate(), pool.allocate()]
    recent = [pool.allocate()]
    for page, name in zip([*pages, *recent], [*old, *new], strict=True):
        pool.register(page, name)
    pool.release(pages)
    pool.release(recent)
    assert pool.allocate() not in [*pages, *recent]
    assert pool.allocate() == pages[1]  # the tail of the oldest
    assert pool.match(old) == pages[:1]
    assert pool.match(new) == recent


def test_a_second_page_with_known_contents_is_not_entered() -> None:
    pool = PagePool(3, 4)
    (name,) = digests([1, 2, 3, 4])
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, name)
    pool.register(second, name)
    pool.release([second])
    assert pool.num_cached == 1
    assert pool.match([name]) == [first]


def test_sink_slots_live_and_die_with_first_pages() -> None:
    pool = PagePool(6, 4, num_sink_slots=2)
    names = [digests([number] * 4)[0] for number in range(3)]
    pages = []
    for name in names[:2]:
        page = pool.allocate(is_first=True)
        pool.register(page, name)
        pages.append(page)
    assert {pool.sink_slot(page) for page in pages} == {0, 1}
    assert pool.sink_slot(pool.allocate()) == -1
    assert not pool.has_sink_slot
    slot = pool.sink_slot(pages[0])
    pool.release([pages[0]])
    assert pool.has_sink_slot
    assert pool.match([names[0]]) == [pages[0]]  # a cached prefix brings its sinks along
    assert pool.sink_slot(pages[0]) == slot
    assert not pool.has_sink_slot
    pool.release([pages[0]])
    taken = pool.allocate(is_first=True)  # free pages are there, a free slot is not: the cached first page goes
    assert pool.sink_slot(taken) == slot
    assert pool.match([names[0]]) == []


def test_clear_cache_forgets_what_is_unused() -> None:
    pool = PagePool(3, 4)
    names = digests(list(range(8)))
    pages = [pool.allocate(), pool.allocate()]
    for page, name in zip(pages, names, strict=True):
        pool.register(page, name)
    pool.release(pages[1:])
    pool.clear_cache()
    assert pool.num_cached == 1
    assert len(pool.match(names)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_random_use_never_gives_a_page_to_two_owners(seed: int) -> None:
    generator = random.Random(seed)
    pool = PagePool(12, 2, num_sink_slots=4)
    owners: list[tuple[list[int], list[int]]] = []  # tokens, pages
    contents: dict[int, tuple[int, ...]] = {}
    for _ in range(600):
        if owners and (len(owners) == 4 or generator.random() < 0.4):
            tokens, pages = owners.pop(generator.randrange(len(owners)))
            pool.release(pages)
            continue
        tokens = [generator.randrange(2) for _ in range(2 * generator.randint(1, 4))]
        names = digests(tokens, 2)
        pages = pool.match(names)
        for index, page in enumerate(pages):
            assert contents[page] == tuple(tokens[: 2 * index + 2]), "a match with other contents"
        if pool.num_available < len(names) - len(pages):
            pool.release(pages)
            continue
        while len(pages) < len(names):
            page = pool.allocate(is_first=not pages)
            assert all(page not in other for _, other in owners) and page not in pages
            contents[page] = tuple(tokens[: 2 * len(pages) + 2])
            pool.register(page, names[len(pages)])
            pages.append(page)
        owners.append((tokens, pages))
        assert pool.num_in_use == len({page for _, pages in owners for page in pages})
        for _, pages in owners:
            assert pool.sink_slot(pages[0]) >= 0
    for _, pages in owners:
        pool.release(pages)
    assert pool.num_available == 12


def test_plan_pool_splits_memory_between_pages_and_sinks() -> None:
    size = plan_pool(1000, page_bytes=10, sink_slot_bytes=20, page_size=16, max_model_len=160, max_num_seqs=4)
    assert (size.num_pages, size.num_sink_slots) == ((1000 - 8 * 20) // 10, 8)
    assert plan_pool(1000, 10, 0, 16, 160, 4).num_sink_slots == 0
    tight = plan_pool(180, page_bytes=10, sink_slot_bytes=20, page_size=16, max_model_len=160, max_num_seqs=4)
    assert (tight.num_pages, tight.num_sink_slots) == (10, 4)
    with pytest.raises(ResourceError, match=r"0 MiB .* 160 tokens"):
        plan_pool(179, page_bytes=10, sink_slot_bytes=20, page_size=16, max_model_len=160, max_num_seqs=4)
