"""What the index itself costs: looking up and publishing a prompt of 100,000 tokens, and how that grows.

Publishing is what happens when such a conversation has ended: every span that is missing is added, and the sequence is
parked. Looking up is what admission does: match, chain of spans, plan. Both over an index that holds other
conversations with the same header. No model, no bytes.
"""

from __future__ import annotations

import time

import numpy as np

from bench.harness import arguments, interleave, print_table, summarize, write_json
from bench.workloads import Ids, random_ids
from pyllamacache.prefix.index import PrefixIndex
from pyllamacache.prefix.plan import Plan, Rules, SlotView, plan
from pyllamacache.prefix.stored import StoredPrefix
from pyllamacache.request import CheckpointKind, SlotId

N_TOKENS = 100_000
HEADER = 20_000
RULES = Rules(can_share=True, has_state=True, can_park=True)


def filled(n_others: int, n_tokens: int) -> PrefixIndex:
    """Conversations that share a header, each with its spans, a checkpoint at its end, and parked."""
    index = PrefixIndex()
    header = random_ids(HEADER, 50_000, 1)
    for i in range(n_others):
        ids = np.concatenate([header, random_ids(n_tokens - HEADER, 50_000, 100 + i)])
        publish(index, ids, SlotId(i))
    return index


def publish(index: PrefixIndex, ids: Ids, seq_id: SlotId) -> None:
    index.add_spans("", ids, 1000)
    index.add_checkpoint("", ids, CheckpointKind.END, 1000).is_ready = True
    index.park("", ids, seq_id)


def withdraw(index: PrefixIndex, ids: Ids, seq_id: SlotId, after: int = HEADER) -> None:
    """Take out what only `publish` has put there: the spans behind `after`."""
    match = index.match("", ids)
    for start in sorted(match.spans, reverse=True):
        if start >= after:
            index.remove(match.spans[start])
    index.remove(match.checkpoints[-1])
    index.remove(index.parked_by(seq_id))


def look_up(index: PrefixIndex, ids: Ids) -> int:
    match = index.match("", ids)
    stored = StoredPrefix((match,))
    slots = [SlotView(SlotId(i), False, ids[:0], "", 0, 0, i) for i in range(4)]
    if match.parked is not None:
        held = match.parked.ids()
        slots.append(SlotView(match.parked.seq_id, False, held, "", 1, len(held), 5, is_parked=True))
    chosen = plan(ids, slots, rules=RULES, namespace="", checkpoints=sorted(stored.checkpoints()), stored=stored)
    assert isinstance(chosen, Plan)
    return chosen.resume_tokens


def main() -> None:
    args = arguments(__doc__ or "", repeats=15)
    indexes = {n: filled(n, 30_000) for n in (8, 32, 96)}
    header = random_ids(HEADER, 50_000, 1)
    prompt = np.concatenate([header, random_ids(N_TOKENS - HEADER, 50_000, 2)])
    longer = np.concatenate([prompt, random_ids(40, 50_000, 3)])
    seq_id = SlotId(200)

    def published(n: int) -> float:
        started_s = time.perf_counter()
        publish(indexes[n], prompt, seq_id)
        elapsed_s = time.perf_counter() - started_s
        withdraw(indexes[n], prompt, seq_id)
        return elapsed_s

    def looked_up(n: int) -> float:
        publish(indexes[n], prompt, seq_id)
        started_s = time.perf_counter()
        resumed = look_up(indexes[n], longer)
        elapsed_s = time.perf_counter() - started_s
        assert resumed == N_TOKENS
        withdraw(indexes[n], prompt, seq_id)
        return elapsed_s

    cases = {f"publish beside {n}": lambda n=n: published(n) for n in indexes}
    cases |= {f"look up beside {n}": lambda n=n: looked_up(n) for n in indexes}
    summaries = {name: summarize(values) for name, values in interleave(cases, repeats=args.repeats).items()}
    print_table(
        f"a prompt of {N_TOKENS:,} tokens; others of 30,000 with a common header",
        ["case", "median ms", "p95 ms", "n"],
        [[n, f"{s.median * 1e3:.3f}", f"{s.p95 * 1e3:.3f}", str(s.n)] for n, s in summaries.items()],
    )
    if args.json:
        results = {f"{name} s": summary for name, summary in summaries.items()}
        most = max(indexes)
        results["together s"] = summaries[f"publish beside {most}"].median + summaries[f"look up beside {most}"].median
        write_json("index_cost", None, results)


if __name__ == "__main__":
    main()
