"""From a step's plan to the tensors of a `Batch`.

Block tables are kept up to date row by row as pages are taken, so a step only gathers rows: rebuilding them would
cost more than everything else the scheduler does.
"""

from __future__ import annotations

from collections.abc import Sequence as Pages
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from w4a4.serve.runner import Batch

if TYPE_CHECKING:
    from w4a4.serve.scheduler import Scheduled


class BlockTables:
    """One row of page numbers per running sequence, int32 [num_rows, width]; what lies beyond a sequence's pages is
    0.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self.pages = np.zeros((num_rows, width), dtype=np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def take_row(self) -> int:
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        self.pages[row] = 0
        self._free_rows.append(row)

    def write(self, row: int, start: int, pages: Pages[int]) -> None:
        self.pages[row, start : start + len(pages)] = pages


def build_batch(plan: Pages[Scheduled], tables: BlockTables, page_size: int) -> tuple[Batch, list[int]]:
    """The tensors for a plan, and how many logit rows each of its sequences gets.

    A sequence gets its last row if a token will be sampled, and the rows before it whose prompt log-probabilities are
    asked for and not known yet. A token that only the device knows is 0: see `Batch.device_ids`.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    context_lens: list[int] = []
    lengths: list[int] = []
    rows: list[int] = []
    sink_slots: list[int] = []
    logit_rows: list[int] = []
    num_logit_rows: list[int] = []
    for entry in plan:
        sequence = entry.sequence
        start = sequence.num_computed
        num_tokens = entry.num_tokens
        end = start + num_tokens
        first_row = len(input_ids)
        if num_tokens == 1:  # decoding: most of the time
            input_ids.append(0 if sequence.num_ahead else sequence.tokens[start])
            positions.append(start)
            page, offset = divmod(start, page_size)
            slots.append(sequence.pages[page] * page_size + offset)
        else:
            input_ids += sequence.tokens[start:end]
            positions += range(start, end)
            for index in range(start // page_size, (end - 1) // page_size + 1):
                base = sequence.pages[index] * page_size
                low = max(start - index * page_size, 0)
                high = min(end - index * page_size, page_size)
                slots += range(base + low, base + high)
        context_lens.append(end)
        lengths.append(num_tokens)
        rows.append(sequence.row)
        sink_slots.append(sequence.sink_slot)
        num_before = len(logit_rows)
        if sequence.request.params.prompt_logprobs is not None:
            # Row p tells about token p + 1; one per prompt token but the first.
            known = len(sequence.prompt_logprobs)
            wanted = range(max(start, known), min(end, sequence.num_prompt - 1))
            logit_rows += [first_row + position - start for position in wanted]
        if end == len(sequence.tokens) + sequence.num_ahead:
            logit_rows.append(first_row + num_tokens - 1)
        num_logit_rows.append(len(logit_rows) - num_before)
    width = -(-max(context_lens) // page_size)
    batch = Batch(
        input_ids=_tensor(input_ids, np.int64),
        positions=_tensor(positions, np.int64),
        slot_mapping=_tensor(slots, np.int64),
        query_start=_tensor([0, *accumulate(lengths)], np.int32),
        context_lens=_tensor(context_lens, np.int32),
        block_tables=torch.from_numpy(tables.pages[rows, :width]),
        sink_slots=_tensor(sink_slots, np.int32),
        logit_rows=_tensor(logit_rows, np.int64),
    )
    return batch, num_logit_rows


def _tensor(values: list[int], dtype: type[np.signedinteger[Any]]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))  # a quarter of the time of torch.tensor(values)
