"""Whether the figures of `bench.peers` reach what they were to reach. Pure: from the results to lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OURS, SERVER, TUNED, BINDING, FLOOR = (
    "pyllamacache",
    "llama-server",
    "llama-server, tuned",
    "llama-cpp-python",
    "llama_decode",
)
RECORDED = "recorded sessions"
STRICTLY_FEWER = (
    "edit a question in the middle",
    "edit a reply in the middle",
    "return to the old branch",
    "same header, its holder busy",
    "eight agents in turn",
    "restart and resume",
)
SAME_WORK_RATIO = 1.05
HYBRID_SESSIONS_RATIO = 0.7
ONE_AGENT = "1 agent"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim about one case."""

    subject: str
    workload: str
    case: str
    claim: str
    ours: float
    theirs: float
    limit: float
    """Of `ours / theirs`."""
    is_strict: bool
    """Equal is not enough."""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.theirs else float("inf")

    @property
    def is_met(self) -> bool:
        return self.ratio < self.limit if self.is_strict else self.ratio <= self.limit


def _median(summary: Any) -> float:
    return float(summary["median"] if isinstance(summary, dict) else summary.median)


def verdicts(results: dict[str, Any]) -> Iterator[Verdict]:
    """For every subject, workload and case in which both took part."""
    for subject, workloads in results.items():
        for workload, cases in workloads.items():
            for case, engines in cases.items():
                if OURS in engines and SERVER in engines:
                    yield from _of_case(subject, workload, case, engines)
            if workload == RECORDED:
                yield from _of_sessions(subject, cases)


def _of_sessions(subject: str, cases: dict[str, Any]) -> Iterator[Verdict]:
    """Those in which a prefix cache of one conversation is not enough, together."""
    several = [each for case, each in cases.items() if ONE_AGENT not in case and OURS in each and SERVER in each]
    if several:
        ours, theirs = (sum(_median(each[engine]["ttft_s"]) for each in several) for engine in (OURS, SERVER))
        limit = HYBRID_SESSIONS_RATIO if "hybrid" in subject else 1.0
        claim = "summed time to first token"
        yield Verdict(
            subject, RECORDED, "several agents and branches, together", claim, ours, theirs, limit, is_strict=False
        )


def _of_case(subject: str, workload: str, case: str, engines: dict[str, Any]) -> Iterator[Verdict]:
    ours = engines[OURS]
    where = (subject, workload, case)
    for peer in (SERVER, TUNED):
        if peer in engines:
            theirs = engines[peer]["prefilled_tokens"]
            yield Verdict(*where, f"tokens prefilled, {peer}", ours["prefilled_tokens"], theirs, 1.0, is_strict=False)
    server = engines[SERVER]
    prefilled = ours["prefilled_tokens"], server["prefilled_tokens"]
    if case in STRICTLY_FEWER:
        yield Verdict(*where, "fewer tokens prefilled", *prefilled, 1.0, is_strict=True)
    ttft = _median(ours["ttft_s"]), _median(server["ttft_s"])
    if workload == RECORDED:
        yield Verdict(*where, "summed time to first token", *ttft, SAME_WORK_RATIO, is_strict=False)
    elif prefilled[0] == prefilled[1]:
        yield Verdict(*where, "time to first token, same work", *ttft, SAME_WORK_RATIO, is_strict=False)
    else:
        yield Verdict(*where, "time to first token, less work", *ttft, 1.0, is_strict=True)


def lines(results: dict[str, Any]) -> Iterator[str]:
    """Missed ones first, each with its numbers; then how many were met."""
    found = list(verdicts(results))
    for each in found:
        if not each.is_met:
            sign = "<" if each.is_strict else "at most"
            yield (
                f"missed: {each.subject}, {each.workload}, {each.case}: {each.claim}: {each.ours:,.4g} against "
                f"{each.theirs:,.4g}, {each.ratio:.2f} of it, wanted {sign} {each.limit:.2f}"
            )
    n_met = sum(each.is_met for each in found)
    yield f"{n_met} of {len(found)} claims hold"
