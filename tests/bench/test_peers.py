"""The side-by-side benchmark, small: what is prefilled beside a real llama-server. Times are left to `bench.peers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import cases, peers
from bench.peer import build
from bench.peer.llama_server import LlamaServer
from bench.peer.peer import Peer, Setup
from bench.peer.python_peers import pyllamacache
from bench.verdicts import OURS, SERVER, STRICTLY_FEWER, TUNED
from tests.models import FullSpec, HybridSpec, TinySpec, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the first one builds llama-server

N_CTX = 16_384
HEADER_TOKENS = 2000
"""Most of every conversation: of a shorter one llama-server would keep less than half, and so save it for the next."""
SPECS: dict[str, TinySpec] = {
    "dense": FullSpec(n_ctx_train=N_CTX, is_readable=True),
    "hybrid": HybridSpec(n_ctx_train=N_CTX, is_readable=True),
}
AS_FEW_AS_POSSIBLE = {
    ("dense", "edit a question in the middle"),
    ("dense", "edit a reply in the middle"),
    ("hybrid", "edit a question in the middle"),
}
"""On dense memory both compute what follows the edit, and nobody can do with less. On hybrid memory both go back to
where the question begins."""


@pytest.fixture(scope="module")
def program() -> Path:
    """llama-server of the pinned sources, from the folder that `bench.peers` builds it in."""
    return build.tools_folder(None) / "llama-server"


@pytest.mark.parametrize("kind", SPECS)
def test_no_case_prefills_more_than_llama_server_and_some_prefill_less(
    kind: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyllamacache import Model

    monkeypatch.setattr(cases, "BUSY_TOKENS", 3000)  # a tiny model says 192 before the second agent has asked
    path = tmp_path / "model.gguf"
    write_model(SPECS[kind], path)
    engines: list[Peer] = [
        pyllamacache(OURS),
        LlamaServer(SERVER, program),
        LlamaServer(TUNED, program, saves_slots=True),
    ]
    setup = Setup(path, 4, N_CTX, 2 * N_CTX, 1, tmp_path)
    with Model(path, progress=False) as model:

        def writer() -> cases.Writer:
            return cases.Writer(lambda text: len(model.tokenize(text, add_special=False)), 3)

        scripts: list[tuple[Setup, Callable[[], Any]]] = [
            (setup, lambda: cases.conversation(writer(), HEADER_TOKENS)),
            (replace(setup, n_slots=2), lambda: cases.agents_in_turn(writer(), HEADER_TOKENS)),
        ]
        for of_script, script in scripts:
            found = peers.drive(engines, of_script, script)
            assert all(found.values()), {name: len(each) for name, each in found.items()}
            for case in dict.fromkeys(each.case for each in found[OURS]):
                _check(kind, case, {name: [m for m in each if m.case == case] for name, each in found.items()})


def _check(kind: str, case: str, found: dict[str, list[peers.Measurement]]) -> None:
    ours, theirs = (sum(each.prefilled_tokens for each in found[name]) for name in (OURS, SERVER))
    context = f"{kind}, {case}: {ours} and {theirs}"
    assert ours <= theirs, context
    if case in STRICTLY_FEWER and (kind, case) not in AS_FEW_AS_POSSIBLE:
        assert ours < theirs, context
    for each in found[OURS]:
        assert each.prefilled_tokens >= each.prompt_tokens - each.depth, context  # no more than can be known
    if case == "restart and resume":
        saved = sum(each.prefilled_tokens for each in found[TUNED])
        assert saved < theirs, f"{kind}: llama-server did not take its own slot file back"
