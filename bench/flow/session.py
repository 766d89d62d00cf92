"""A conversation of 12 turns on a 2,000-token header, with reuse and without: tokens prefilled and time per turn."""

from __future__ import annotations

from bench.harness import arguments, load_model, print_table, summarize, write_json
from bench.workloads import growing_conversation
from pyllamacache import Engine

HEADER = 2000
TURNS = 12
PER_TURN = 120


def main() -> None:
    args = arguments(__doc__ or "", repeats=3)
    model = load_model(args.model)
    rows = []
    totals: dict[str, list[float]] = {"reuse": [], "none": []}
    tokens = {"reuse": 0, "none": 0}
    with Engine(model, n_ctx=8192, n_slots=2, n_threads=args.threads, progress=False) as engine:
        for round_ in range(args.repeats):
            prompts = growing_conversation(model.n_vocab, header=HEADER, turns=TURNS, per_turn=PER_TURN, seed=round_)
            spent = {"reuse": 0.0, "none": 0.0}
            for turn, ids in enumerate(prompts):
                reused = engine.complete(ids, max_tokens=1, namespace=f"round {round_}")
                plain = engine.complete(ids, max_tokens=1, namespace="plain", cache_prompt=False, store=False)
                for name, reply in (("reuse", reused), ("none", plain)):
                    spent[name] += reply.timings.prefill_s + reply.timings.restore_s
                    tokens[name] += reply.cache.prefilled_tokens
                if round_ == 0:
                    rows.append(
                        [
                            str(turn),
                            str(len(ids)),
                            str(reused.usage.cached_tokens),
                            f"{reused.timings.ttft_s * 1e3:.1f}",
                            f"{plain.timings.ttft_s * 1e3:.1f}",
                        ]
                    )
            for name, value in spent.items():
                totals[name].append(value)
    print_table(f"growing conversation: {model.name}", ["turn", "prompt", "cached", "ttft ms", "without ms"], rows)
    reuse, none = summarize(totals["reuse"]), summarize(totals["none"])
    results = {
        "prefill_s with reuse": reuse,
        "prefill_s without": none,
        "prefilled_tokens with reuse": tokens["reuse"] // args.repeats,
        "prefilled_tokens without": tokens["none"] // args.repeats,
        "without_over_with": none.median / reuse.median,
    }
    print(f"prefill of the session: {none.median:.2f} s without, {reuse.median:.2f} s with reuse")
    if args.json:
        write_json("session", model, results)


if __name__ == "__main__":
    main()
