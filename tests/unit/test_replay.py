"""The replay of traces, on traces small enough to count by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench import replay as bench_replay
from bench.replay import BLOCK_TOKENS, STATE_TOKENS, UNLIMITED, EndsAndLru, Ours, Trace, Turn, replay, synthetic_agents

if TYPE_CHECKING:
    from pathlib import Path


def turn(*blocks: int, rest: int = 10) -> Turn:
    """A prompt of whole blocks and a few tokens more."""
    return Turn(np.array(blocks, dtype=np.int32), len(blocks) * BLOCK_TOKENS + rest)


def hits(*turns: Turn, policy: type[Ours | EndsAndLru] = Ours, budget: float = UNLIMITED) -> list[int]:
    """Blocks, by request."""
    server = policy(Trace("by hand", turns, BLOCK_TOKENS), budget)
    return [server.serve(each) // BLOCK_TOKENS for each in turns]


def test_hits_without_a_limit() -> None:
    grows = turn(1, 2, 3), turn(1, 2, 3, 4, 5)
    fork = turn(1, 2, 3, 9, 8)
    assert hits(*grows, grows[1], fork) == [0, 3, 5, 3]
    assert hits(*grows, grows[1], fork, policy=EndsAndLru) == [0, 3, 5, 3]
    # a state one `n_ubatch` before the end is there for a prompt that parts in the last block
    other_end = turn(1, 2, 7)
    assert hits(grows[0], other_end) == [0, 2]
    assert hits(grows[0], other_end, policy=EndsAndLru) == [0, 0]


def test_the_last_token_is_always_computed() -> None:
    assert hits(turn(1, 2, 3, rest=0), turn(1, 2, 3, rest=0)) == [0, 2]


def test_a_branch_is_found_when_a_prompt_leaves_it_and_used_by_the_next() -> None:
    trunk = tuple(range(1, 8))
    turns = turn(*trunk, 20, 21, 22), turn(*trunk, 30, 31, 32), turn(*trunk, 40)
    room = BLOCK_TOKENS * 24 + STATE_TOKENS * 6
    assert hits(*turns, budget=room)[2] == 7


def test_a_budget_for_one_conversation_holds_one() -> None:
    a, b = turn(1, 2, 3), turn(11, 12, 13)
    one = 3 * BLOCK_TOKENS + 2 * STATE_TOKENS
    assert hits(a, b, a, b, budget=one) == [0, 0, 0, 0]
    assert hits(a, a, b, b, budget=one) == [0, 3, 0, 3]
    assert hits(a, b, a, b, budget=2 * one) == [0, 0, 3, 3]


@pytest.mark.parametrize("budget_blocks", [1, 20, 60, 150])
def test_the_budget_holds_and_every_lease_ends(budget_blocks: int) -> None:
    trace = synthetic_agents(n_agents=3, n_turns=8)
    server = Ours(trace, budget_blocks * BLOCK_TOKENS, max_states=9)
    for each in trace.turns:
        server.serve(each)
        checkpoints, spans = list(server.index.checkpoints), list(server.index.spans)
        used = sum(mark.n_bytes for mark in checkpoints) + sum(mark.n_bytes for mark in spans)
        assert server.used == used <= server.budget
        assert len(checkpoints) <= 9
        assert not any(mark.n_users for mark in checkpoints)
        assert not any(mark.n_users for mark in spans)
    server.index.audit()


def test_a_replay_says_the_same_twice_and_more_room_helps() -> None:
    trace = synthetic_agents(n_agents=4, n_turns=10)
    found = [replay(trace, Ours(trace, blocks * BLOCK_TOKENS)).hit_tokens for blocks in (20, 20, 80, 1 << 20)]
    assert found[0] == found[1] <= found[2] <= found[3]
    ends = replay(trace, EndsAndLru(trace, 80 * BLOCK_TOKENS)).hit_tokens
    assert ends <= found[2]


def test_it_runs_without_traces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_replay, "TRACES", tmp_path / "none")
    monkeypatch.setattr(bench_replay, "SYNTHETIC", {"agents": lambda: synthetic_agents(n_agents=2, n_turns=4)})
    assert bench_replay.main(["--set", "agents"]) == 0
    output = capsys.readouterr()
    assert "synthetic workloads only" in output.err
    assert "unlimited" in output.out
    assert "ours" in output.out
