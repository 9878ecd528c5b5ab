"""Page bookkeeping: a free list and reference counts. Pure, synchronous, and sure of itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PagePool:
    """Hands out page numbers. Which bytes they stand for is somebody else's business."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` free pages, each with one reference."""
        assert self.can_allocate(count)
        pages = tuple(self._free.popleft() for _ in range(count))
        for page in pages:
            assert self._references[page] == 0
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to each of `pages`, which must be in use."""
        for page in pages:
            assert self._references[page] > 0
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """One reference less to each of `pages`; those that have none left are free again, and returned."""
        freed = []
        for page in pages:
            assert self._references[page] > 0
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
                freed.append(page)
        return freed

    def references(self, page: int) -> int:
        return self._references[page]

    def check_integrity(self) -> bool:
        """Used + free = total, no page twice on the free list, none both free and referenced.

        Raises:
            AssertionError: naming what does not add up.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        used = sum(count > 0 for count in self._references)
        assert used + len(free) == self.num_pages, f"{used} used + {len(free)} free != {self.num_pages} pages"
        assert all(self._references[page] == 0 for page in free), "a free page has references"
        return True
