"""The numbers and the newest tokens of vLLM's running requests, in arrays: a decode step changes all of them at once.

In a decode step each request gets a token or several, and vLLM changes three numbers and four lists of each. Here
requests are rows of arrays. A request itself is settled, that is brought up to date, only before vLLM's code reads it:
when it ends, before all that is no decode step, with a prefix cache where it has filled a block, and after `KEPT`
tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
LEAST = 64  # rows
KEPT = 256  # tokens of a request that are recorded here alone, at most


class Records(NamedTuple):
    """Where the tokens of a request go."""

    longest: int  # tokens at which it ends
    ends: frozenset[int]  # tokens that end it
    extend: Sequence[Callable[[list[int]], None]]  # of vLLM's lists of its tokens
    extend_log_probs: Callable[[list[float]], None] | None


class RunningTable:
    """Rows of vLLM's requests from the first step in which they decode; each array has a number of each row.

    A row is stale from the moment at which vLLM's code may change its request: the request has the numbers then, and
    the row reads them again before its next use.
    """

    def __init__(self, hashed: int):
        """``hashed``: tokens of a hash of the prefix cache, 0 without one."""
        self._hashed = hashed
        self.serial, self.prompt, self.limit = _zeros(), _zeros(), _zeros()  # `limit`: vLLM schedules no more tokens
        # Tokens that a step has computed or is computing. For some of them the sampled token is not recorded yet: vLLM
        # counts these twice, as placeholders of tokens and as tokens in flight.
        self.computed, self.ahead, self.in_flight = _zeros(), _zeros(), _zeros()
        self.tokens, self._settled = _zeros(), _zeros()  # that are recorded here, and in the request
        self.longest, self.which_ends = _zeros(), _zeros()
        # Whether it is known where the tokens go; whether vLLM's code handles them; whether it handles the steps.
        self.is_known, self.is_left, self.is_special = _zeros(), _zeros(), _zeros()
        self._arrays = [name for name, value in vars(self).items() if isinstance(value, np.ndarray)]
        self._newest, self._log_probs = np.zeros((0, KEPT), np.int64), np.zeros((0, KEPT), np.float64)  # in a ring
        self.requests: list[Any] = []  # None in a row that is free
        self._records: list[Records | None] = []
        self._rows: dict[str, int] = {}  # by request
        self._free: list[int] = []
        self._stale: set[int] = set()
        self._serials = 0
        self.ends: list[Rows] = [_zeros()]  # tokens that end a request
        self._known_ends: dict[frozenset[int], int] = {frozenset(): 0}
        self._running: list[Any] = []  # of the newest call of `rows_of`, and their rows
        self._rows_of_running: Rows = _zeros()

    def rows_of(self, running: list[Any]) -> Rows:
        """Return the rows of these requests, which can be stale."""
        if running != self._running:
            rows = self._rows
            for request in running:
                if request.request_id not in rows:
                    self._add(request)
            self._rows_of_running = np.array([rows[request.request_id] for request in running], np.int64)
            self._running = running.copy()
        return self._rows_of_running

    def refresh(self, rows: Rows) -> None:
        """Read the requests of those of ``rows`` that are stale."""
        if self._stale and (stale := self._stale.intersection(rows.tolist())):
            self._read([*stale])

    def _add(self, request) -> None:
        if not self._free:
            self._grow()
        row = self._rows[request.request_id] = self._free.pop()
        self._serials += 1
        self.requests[row], self._records[row] = request, None
        self.serial[row], self.prompt[row] = self._serials, request.num_prompt_tokens
        self.limit[row] = request.num_prompt_tokens + request.max_tokens
        self.longest[row] = self.which_ends[row] = self.is_known[row] = self.is_left[row] = 0
        self.is_special[row] = bool(request.mm_features) or request.structured_output_request is not None
        self._stale.add(row)

    def _grow(self) -> None:
        number = len(self.requests)
        more = max(LEAST, number)
        for name in (*self._arrays, "_newest", "_log_probs"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]))
        self.requests += [None] * more
        self._records += [None] * more
        self._free = list(range(number + more - 1, number - 1, -1))

    def _read(self, rows: list[int]) -> None:
        """Take the numbers of the requests in these rows."""
        requests = [self.requests[row] for row in rows]
        self.computed[rows] = [request.num_computed_tokens for request in requests]
        self.ahead[rows] = [request.num_output_placeholders for request in requests]
        self.in_flight[rows] = [request.num_in_flight_tokens for request in requests]
        self.tokens[rows] = self._settled[rows] = [len(request._all_token_ids) for request in requests]
        self._stale.difference_update(rows)

    def know(self, row: int, records: Records | None) -> None:
        """Note where the tokens of a request go; None: vLLM's code handles them."""
        self._records[row], self.is_known[row], self.is_left[row] = records, True, records is None
        if records is not None:
            self.longest[row] = records.longest
            if records.ends not in self._known_ends:
                self._known_ends[records.ends] = len(self.ends)
                self.ends.append(np.array(sorted(records.ends), np.int64))
            self.which_ends[row] = self._known_ends[records.ends]

    def append(self, rows: Rows, tokens: Rows, log_probs: npt.NDArray[np.floating] | None) -> None:
        """Append ``tokens`` ``[n, k]`` to the requests in ``rows`` ``[n]``, with ``log_probs`` ``[n, k]``."""
        number, each = self.tokens[rows], tokens.shape[1]
        if (full := number + each - self._settled[rows] > KEPT).any():
            self.settle(rows[full].tolist())
        at = rows[:, None], (number[:, None] + np.arange(each)) % KEPT
        self._newest[at] = tokens
        if log_probs is not None:
            self._log_probs[at] = log_probs
        self.tokens[rows] = number + each

    def settle(self, rows: Iterable[int]) -> None:
        """Bring the requests of these rows up to date."""
        which = np.array([row for row in rows if row not in self._stale] if self._stale else list(rows), np.int64)
        numbers = zip(
            which.tolist(), self.computed[which].tolist(), self.ahead[which].tolist(), self.in_flight[which].tolist(),
            self._settled[which].tolist(), self.tokens[which].tolist(), strict=True,
        )  # fmt: skip
        hashed = self._hashed
        for row, computed, ahead, in_flight, settled, tokens in numbers:
            request = self.requests[row]
            request.num_computed_tokens, request.num_output_placeholders = computed, ahead
            request.num_in_flight_tokens = in_flight
            if tokens == settled:
                continue
            records, newest = self._records[row], _of_ring(self._newest[row], settled, tokens)
            assert records is not None and len(newest) == tokens - settled
            for extend in records.extend:
                extend(newest)
            if records.extend_log_probs is not None:
                records.extend_log_probs(_of_ring(self._log_probs[row], settled, tokens))
            if hashed and tokens // hashed > settled // hashed:
                request.update_block_hashes()
        self._settled[which] = self.tokens[which]

    def settle_all(self) -> None:
        """Bring all requests up to date."""
        self.settle(self._rows.values())

    def hand_over(self, ids: Iterable[str] | None = None) -> None:
        """Bring requests (None: all) up to date for code that may change them."""
        rows = [*self._rows.values()] if ids is None else [self._rows[name] for name in ids if name in self._rows]
        self.settle(rows)
        self._stale.update(rows)

    def release(self, name: str) -> None:
        """Forget a request."""
        row = self._rows.pop(name, None)
        if row is not None:
            self.serial[row] = 0
            self.requests[row] = self._records[row] = None
            self._stale.discard(row)
            self._free.append(row)
            self._running, self._rows_of_running = [], _zeros()  # else its tokens would stay until the next rollout


def _of_ring(ring: npt.NDArray[Any], first: int, last: int) -> list[Any]:
    """Return the numbers from the ``first`` one on, before the ``last`` one."""
    begin, end = first % KEPT, (last - 1) % KEPT + 1
    return ring[begin:end].tolist() if begin < end else [*ring[begin:].tolist(), *ring[:end].tolist()]


def _zeros() -> Rows:
    return np.zeros(0, np.int64)
