"""The latest requests, for explanations: what a prompt can be compared with when it was prefilled again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..observe.evidence import Evidence, Lost, Recent
from ..request import Reason

if TYPE_CHECKING:
    from ..prefix.index import PrefixIndex
    from ..prefix.plan import Plan
    from ..prefix.stored import StoredPrefix
    from ..request import Ids, Request, RequestId, Spelling
    from .state import SchedulerState

MAX_RECENT = 16
MAX_BYTES = 32 << 20
"""What they keep alive beyond the requests themselves; some 16 bytes a token of text prompts."""


class Recents:
    """Count and bytes are limits at every instant. Scheduler thread only.

    Nothing of a request that is not to be stored. What one is given to hold is never changed, so an explanation may
    keep it.
    """

    def __init__(self, max_recent: int = MAX_RECENT, max_bytes: int = MAX_BYTES) -> None:
        self._max_recent = max_recent
        self._max_bytes = max_bytes
        self._all: OrderedDict[RequestId, Recent] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def of(self, namespace: str) -> tuple[Recent, ...]:
        """Those that ended, or began, longest ago first."""
        return tuple(each for each in self._all.values() if each.namespace == namespace)

    def begin(self, request: Request, at_s: float) -> None:
        """It was admitted."""
        prompt = request.prompt
        if request.store:
            n_prompt = len(prompt)
            self._put(request, Recent(request.namespace, prompt.ids, prompt.spelling, prompt.outline, n_prompt, at_s))

    def end(self, request: Request, reply: list[int], spelled: tuple[Ids, Spelling] | None) -> None:
        """It has ended. `spelled`: prompt and reply, where they spell a text."""
        known = self._all.get(request.request_id)
        if known is None or not reply:
            return
        if spelled is not None:
            ids, spelling = spelled
            self._put(request, replace(known, ids=ids, spelling=spelling))
        else:
            self._put(request, replace(known, ids=np.concatenate([known.ids, np.array(reply, dtype=np.int32)])))

    def _put(self, request: Request, recent: Recent) -> None:
        self._drop(request.request_id)
        n_bytes = recent.size_bytes
        while self._all and (len(self._all) >= self._max_recent or self.size_bytes + n_bytes > self._max_bytes):
            self._drop(next(iter(self._all)))
        if n_bytes <= self._max_bytes:
            self._all[request.request_id] = recent
            self.size_bytes += n_bytes

    def _drop(self, request_id: RequestId) -> None:
        gone = self._all.pop(request_id, None)
        if gone is not None:
            self.size_bytes -= gone.size_bytes

    def clear(self, namespace: str | None = None) -> None:
        """Forget those of a namespace, or (None) all."""
        for request_id in [key for key, each in self._all.items() if namespace in (None, each.namespace)]:
            self._drop(request_id)


def evidence_of(state: SchedulerState, request: Request, chosen: Plan, stored: StoredPrefix) -> Evidence:
    """What is known of a request that is about to be admitted. Effects: none."""
    now_s, ids = state.clock(), request.prompt.ids
    usable = [position for position in stored.checkpoints() if position <= chosen.matched_tokens]
    checkpoints = state.checkpoints
    return Evidence(
        prompt=request.prompt,
        recent=state.recents.of(request.namespace),
        at_s=now_s,
        has_state=state.rules.has_state,
        checkpoint=max(usable, default=None),
        n_checkpoints=checkpoints.budget.max_checkpoints if checkpoints.is_on else 0,
        min_gap_tokens=checkpoints.min_gap_tokens,
        lost=_lost(state.index, request.namespace, ids, chosen, now_s),
    )


def _lost(index: PrefixIndex, namespace: str, ids: Ids, chosen: Plan, now_s: float) -> Lost | None:
    """The checkpoint that would have been used, if there was one; looked for where there is none now."""
    if chosen.reason is Reason.EVICTED:
        position = chosen.position
    elif chosen.reason is Reason.NO_CHECKPOINT:
        position = index.evicted.deepest(namespace, ids, chosen.resume_tokens, chosen.position, is_missed=False)
    else:
        return None
    evicted = index.evicted.what_became_of(namespace, ids[:position]) if position else None
    return None if evicted is None else Lost(position, evicted.reason, now_s - evicted.at_s)
