"""Sharing, parking and restarting with models: what is prefilled, counted, and what a restart costs, timed.

SmolLM2 and a tiny hybrid, a header of 2,000 tokens:

    busy donor      a second agent with the same header while the first generates
    in turn         eight agents in turn on two slots, three rounds
    together        four branches of one trunk sent at once
    restart         4,000 tokens resumed from disk by a new engine, against prefilling them
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import arguments, load_model, print_table, summarize, write_json
from bench.workloads import random_ids
from pyllamacache import CacheConfig, Engine, Model

HEADER = 2000


def joined(*parts: Any) -> Any:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def tiny_hybrid(folder: Path) -> Any:
    from tests.models import HybridSpec, write_model

    write_model(HybridSpec(), folder / "hybrid.gguf")
    return Model(folder / "hybrid.gguf", progress=False)


def busy_donor(model: Any, options: dict[str, Any]) -> dict[str, int]:
    """Prefilled beyond its own tokens, the first time and the second."""
    header, own = random_ids(HEADER, model.n_vocab, 1), 60
    extra = {}
    with Engine(model, n_ctx=8192, n_slots=2, kv_tokens=16384, progress=False, **options) as engine:
        banned = {token: float("-inf") for token in model.eog_ids}
        first = engine.submit(joined(header, random_ids(50, model.n_vocab, 2)), max_tokens=6000, logit_bias=banned)
        chunks = iter(first)  # which cancels the request when it is dropped
        next(chunks)
        for i, name in enumerate(("first", "second")):
            reply = engine.complete(joined(header, random_ids(own, model.n_vocab, 3 + i)), max_tokens=1)
            assert not first.done
            extra[name] = reply.cache.prefilled_tokens - own
        first.cancel()
        first.result()
    return extra


def in_turn(model: Any, options: dict[str, Any]) -> list[int]:
    """Prefilled beyond what is new, by round, over eight agents on two slots."""
    header, new = random_ids(HEADER, model.n_vocab, 1), 30
    talks = [joined(header, random_ids(100, model.n_vocab, 50 + i)) for i in range(8)]
    rounds = []
    with Engine(model, n_ctx=4096, n_slots=2, kv_tokens=8192, progress=False, **options) as engine:
        for turn in range(3):
            beyond = 0
            for i, talk in enumerate(talks):
                reply = engine.complete(talk, max_tokens=8)
                is_new = new + 1 if turn else len(talk) - HEADER * (i > 0)  # the last sampled token is in no cell
                beyond += reply.cache.prefilled_tokens - is_new
                talks[i] = joined(talk, reply.token_ids, random_ids(new, model.n_vocab, 900 + 10 * turn + i))
            rounds.append(beyond)
    return rounds


def together(model: Any, options: dict[str, Any]) -> int:
    """Prefilled beyond trunk and branches, over four requests sent at once."""
    trunk, branch = random_ids(HEADER, model.n_vocab, 1), 40
    prompts = [joined(trunk, random_ids(branch, model.n_vocab, 20 + i)) for i in range(4)]
    with Engine(model, n_ctx=4096, n_slots=4, kv_tokens=8192, progress=False, **options) as engine:
        handles = [engine.submit(prompt, max_tokens=1) for prompt in prompts]
        prefilled = sum(handle.result().cache.prefilled_tokens for handle in handles)
    return prefilled - HEADER - 4 * branch


def restart(model: Any, repeats: int) -> dict[str, Any]:
    ids = random_ids(4000, model.n_vocab, 5)
    prompt = joined(ids, random_ids(10, model.n_vocab, 6))
    resumed, cold, prefilled = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        cache = CacheConfig(disk_dir=Path(folder) / "cache")
        with Engine(model, n_ctx=4096 + 256, n_slots=1, progress=False, cache=cache) as engine:
            cold.append(engine.complete(ids, max_tokens=1).timings.ttft_s)
        for _ in range(repeats):
            with Engine(model, n_ctx=4096 + 256, n_slots=1, progress=False, cache=cache) as engine:
                reply = engine.complete(prompt, max_tokens=1)
                assert reply.cache.source == "disk", reply.cache
                resumed.append(reply.timings.ttft_s)
                prefilled = reply.cache.prefilled_tokens
    resumed_s, cold_s = summarize(resumed), summarize(cold)
    return {
        "resumed ttft s": resumed_s,
        "cold ttft s": cold_s,
        "cold_over_resumed": cold_s.median / resumed_s.median,
        "prefilled tokens": prefilled,
    }


def main() -> None:
    args = arguments(__doc__ or "", repeats=5)
    model = load_model(args.model)
    results: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = {"dense": (model, {}), "hybrid": (tiny_hybrid(Path(folder)), {"flash_attention": "off"})}
        for name, (each, of_model) in models.items():
            options = {**of_model, "n_threads": args.threads}
            extra, rounds, beyond = busy_donor(each, options), in_turn(each, options), together(each, options)
            results[name] = {"busy donor": extra, "in turn": rounds, "together": beyond}
            rows += [
                [name, "busy donor: beyond its own tokens, first, second", f"{extra['first']}, {extra['second']}"],
                [name, "eight in turn on two slots: beyond what is new, by round", ", ".join(map(str, rounds))],
                [name, "four branches at once: beyond trunk and branches", str(beyond)],
            ]
        for each, _ in models.values():
            if each is not model:
                each.close()
    results["restart"] = restart(model, args.repeats)
    again = results["restart"]
    rows.append(["dense", "4,010 tokens after a restart: ttft, ms", f"{again['resumed ttft s'].median * 1e3:.0f}"])
    rows.append(["dense", "4,000 tokens prefilled: ttft, ms", f"{again['cold ttft s'].median * 1e3:.0f}"])
    rows.append(["dense", "prefilled / resumed", f"{again['cold_over_resumed']:.1f}"])
    print_table(f"tokens prefilled, header of {HEADER:,}", ["model", "case", "measured"], rows)
    if args.json:
        write_json("sharing", model, results)


if __name__ == "__main__":
    main()
