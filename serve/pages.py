"""The bookkeeping of the paged KV pool: which page holds what, who uses it, and what may be reused.

Pages are numbers here; the tensors belong to the runner. A page is in one of three states: free; in use (reference
count >= 1); or cached, that is unused, but with contents that are known and kept until the space is needed, least
recently used first. Contents are known by a chain of digests, so equal digests mean equal whole prefixes, not only
equal tokens of one page. Only full pages whose K and V have been computed are ever entered.

Sinks: where the first positions of a sequence are kept in 16 bit, they stand in a slot beside the pages. The slot
belongs to the sequence's first page and lives and dies with it: a prefix found in the cache brings its sinks along.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from w4a4.configs.errors import ResourceError

ROOT_DIGEST = b""


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a full page: digest of its predecessor's name and its tokens. 16 bytes, so that nobody finds a
    collision.
    """
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_pages: int
    num_sink_slots: int


def plan_pool(
    available_bytes: int,
    page_bytes: int,
    sink_slot_bytes: int,
    page_size: int,
    max_model_len: int,
    max_num_seqs: int,
) -> PoolSize:
    """How many pages and sink slots fit in `available_bytes`.

    Sink slots (`sink_slot_bytes` 0 = none): one per running sequence and, if there is room, as many again for cached
    prefixes. One request of the full length must fit. Raises ResourceError with need and have.
    """
    need_pages = -(-max_model_len // page_size)
    need = need_pages * page_bytes + max_num_seqs * sink_slot_bytes
    if available_bytes < need:
        raise ResourceError(
            f"{max(available_bytes, 0) / 2**20:.0f} MiB are left for the KV cache; one request of {max_model_len} "
            f"tokens needs {need / 2**20:.0f} MiB",
            hint="lower --max-model-len or --max-num-seqs, or raise --gpu-memory-utilization",
        )
    spare = available_bytes - need_pages * page_bytes
    num_slots = min(2 * max_num_seqs, spare // sink_slot_bytes) if sink_slot_bytes else 0
    return PoolSize((available_bytes - num_slots * sink_slot_bytes) // page_bytes, num_slots)


class PagePool:
    """Allocates pages and sink slots, shares full prefixes and evicts the least recently used.

    Callers check `num_available` (and `has_sink_slot` for a first page) before they allocate: running out is the
    scheduler's decision, not an exception.
    """

    def __init__(self, num_pages: int, page_size: int, num_sink_slots: int = 0, *, is_caching: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_sink_slots = num_sink_slots
        self.is_caching = is_caching
        self._references = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._unused_cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._page_of_digest: dict[bytes, int] = {}
        self._free_slots = list(range(num_sink_slots - 1, -1, -1))
        self._slot_of_page: dict[int, int] = {}
        self._unused_first_pages: OrderedDict[int, None] = OrderedDict()  # of the unused cached, those that own a slot

    @property
    def num_available(self) -> int:
        """Pages that an allocation can get: free ones and cached ones that nobody uses."""
        return len(self._free_pages) + len(self._unused_cached)

    @property
    def num_in_use(self) -> int:
        return self.num_pages - self.num_available

    @property
    def num_cached(self) -> int:
        """Pages whose contents are known, in use or not."""
        return len(self._page_of_digest)

    @property
    def has_sink_slot(self) -> bool:
        return not self.num_sink_slots or bool(self._free_slots) or bool(self._unused_first_pages)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest known prefix, each taken into use; the caller gives them back with `release`."""
        pages: list[int] = []
        for digest in digests:
            page = self._page_of_digest.get(digest)
            if page is None:
                break
            if self._references[page] == 0:
                del self._unused_cached[page]
                self._unused_first_pages.pop(page, None)
            self._references[page] += 1
            pages.append(page)
        return pages

    def allocate(self, *, is_first: bool = False) -> int:
        """A page for the caller alone, with a sink slot if it `is_first` of its sequence. Contents are undefined."""
        if is_first and self.num_sink_slots and not self._free_slots:
            self._evict(next(iter(self._unused_first_pages)))
        if not self._free_pages:
            self._evict(next(iter(self._unused_cached)))
        page = self._free_pages.pop()
        self._references[page] = 1
        if is_first and self.num_sink_slots:
            self._slot_of_page[page] = self._free_slots.pop()
        return page

    def sink_slot(self, page: int) -> int:
        """The sink slot of a sequence's first page; -1 where there are none."""
        return self._slot_of_page.get(page, -1)

    def register(self, page: int, digest: bytes) -> None:
        """Make a full, computed page known. If its contents are known from another page already, that one stays."""
        if self.is_caching and self._digests[page] is None and digest not in self._page_of_digest:
            self._digests[page] = digest
            self._page_of_digest[digest] = page

    def release(self, pages: Sequence[int]) -> None:
        """Give back one use of each page, in a sequence's order. Its tail is evicted before its head."""
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} released more often than it was taken"
            if self._references[page]:
                continue
            if self._digests[page] is None:
                self._return(page)
            else:
                self._unused_cached[page] = None
                if page in self._slot_of_page:
                    self._unused_first_pages[page] = None

    def clear_cache(self) -> None:
        """Forget every cached page that nobody uses."""
        for page in list(self._unused_cached):
            self._evict(page)

    def _evict(self, page: int) -> None:
        del self._unused_cached[page]
        self._unused_first_pages.pop(page, None)
        digest = self._digests[page]
        assert digest is not None
        del self._page_of_digest[digest]
        self._digests[page] = None
        self._return(page)

    def _return(self, page: int) -> None:
        slot = self._slot_of_page.pop(page, None)
        if slot is not None:
            self._free_slots.append(slot)
        self._free_pages.append(page)
