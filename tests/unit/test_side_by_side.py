"""The parts of the side-by-side benchmark that need no peer: its scripts, its words, its verdicts and its tables."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import cases, growth, peers_report, report
from bench.peer.peer import Message
from bench.peer.worker import Worker
from bench.verdicts import BINDING, OURS, RECORDED, SERVER, TUNED, lines, verdicts

ECHO = """
import sys
sys.path.insert(0, {folder!r})
from worker import serve

def handle(command, say):
    if command["op"] == "fail":
        raise ValueError("as asked")
    say({{"first": 1}})
    print("not for the parent")
    return command["op"]

serve(handle, at_end=lambda: None, threads=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    script = tmp_path / "echo.py"
    script.write_text(ECHO.format(folder=str(Path(cases.__file__).parent / "peer")))
    made = Worker([sys.executable, script], log=tmp_path / "log.txt")
    yield made
    made.close()


def test_a_worker_answers_by_number_and_its_errors_come_back(worker: Worker) -> None:
    assert [worker.call({"op": word}, 30)["done"] for word in ("one", "two")] == ["one", "two"]
    with pytest.raises(RuntimeError, match="ValueError: as asked"):
        worker.call({"op": "fail"}, 30)
    assert worker.call({"op": "three"}, 30)["done"] == "three"


def test_a_worker_that_ends_says_so(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text("import sys; sys.stdin.readline(); sys.exit('gone')")
    worker = Worker([sys.executable, script], log=tmp_path / "log.txt")
    with pytest.raises(RuntimeError, match="the process ended\ngone"):
        worker.call({"op": "any"}, 30)
    worker.close()


def test_texts_have_the_tokens_they_were_asked_to_have() -> None:
    writer = cases.Writer(lambda text: len(text.split()), seed=4)
    for n_tokens in (1, 60, 2000):
        assert len(writer.text(n_tokens).split()) == n_tokens
    assert cases.Writer(len, 4).text(50) == cases.Writer(len, 4).text(50)


def played(script: cases.Script) -> list[cases.Step]:
    steps, reply = [], None
    try:
        while True:
            steps.append(script.send(reply) if reply is not None else next(script))
            reply = f"reply {len(steps)}"
    except StopIteration:
        return steps


def test_a_conversation_has_every_case_and_its_own_replies() -> None:
    steps = played(cases.conversation(cases.Writer(lambda text: len(text.split()), 1), 50))
    named = [step.case for step in steps if step.case]
    assert list(dict.fromkeys(named)) == [
        "cold", "append", "repeat", "edit the last message", "branch in the middle", "return to the old branch",
        "edit a question in the middle", "edit a reply in the middle",
        "drop the previous reply", "after an unrelated request", "restart and resume",
        "same header, its holder busy",
    ]  # fmt: skip
    by_case = {step.case: list(step.request.messages) for step in steps}

    def prompt_of(case: str) -> list[Message]:
        return by_case[case]

    assert list(steps[1].request.messages)[2] == {"role": "assistant", "content": "reply 1"}
    assert [message["role"] for message in prompt_of("drop the previous reply")][-2:] == ["user", "user"]
    assert sum(step.restarts for step in steps) == 1
    assert steps[-1].beside is not None
    assert steps[-1].beside.messages[0] == steps[-1].request.messages[0] == steps[0].request.messages[0]


def test_agents_take_turns_on_one_header() -> None:
    steps = played(cases.agents_in_turn(cases.Writer(lambda text: len(text.split()), 1), 50))
    assert len(steps) == cases.N_AGENTS * cases.N_ROUNDS
    assert [step.case for step in steps[:2]] == [None, "eight agents in turn"]
    assert len({str(step.request.messages[0]) for step in steps}) == 1
    assert [len(step.request.messages) for step in steps[:: cases.N_AGENTS]] == [2, 4, 6]


def test_without_recordings_agents_are_made_up_and_one_goes_back() -> None:
    recording = cases.synthetic(3, 6)
    steps = played(recording.script())
    assert {step.case for step in steps} == {"synthetic, 3 agents"}
    lengths = [len(requests) for requests in recording.requests]
    assert lengths[0] < lengths[1] == 6


def engine(prefilled: float, ttft_s: float) -> dict[str, Any]:
    summary = {"median": ttft_s, "minimum": ttft_s, "maximum": ttft_s}
    return {
        "requests": 1, "prompt_tokens": 100, "prefilled_tokens": prefilled, "peak_bytes": 1 << 20,
        "ttft_s": summary, "total_s": summary,
    }  # fmt: skip


def results(
    ours: tuple[float, float], theirs: tuple[float, float], *, case: str, workload: str = "w"
) -> dict[str, Any]:
    return {"tiny hybrid": {workload: {case: {OURS: engine(*ours), SERVER: engine(*theirs), TUNED: engine(*theirs)}}}}


@pytest.mark.parametrize(
    ("ours", "theirs", "case", "workload", "missed"),
    [
        ((10, 1.05), (10, 1.0), "append", "w", []),
        ((10, 1.06), (10, 1.0), "append", "w", ["time to first token, same work"]),
        (
            (11, 0.5),
            (10, 1.0),
            "append",
            "w",
            ["tokens prefilled, llama-server", "tokens prefilled, llama-server, tuned"],
        ),
        ((9, 1.0), (10, 1.0), "append", "w", ["time to first token, less work"]),
        ((10, 1.0), (10, 1.0), "eight agents in turn", "w", ["fewer tokens prefilled"]),
        ((9, 0.9), (10, 1.0), "eight agents in turn", "w", []),
        ((9, 0.71), (10, 1.0), "several", RECORDED, ["summed time to first token"]),
        ((9, 0.7), (10, 1.0), "several", RECORDED, []),
        ((9, 1.06), (10, 1.0), "x, 1 agent", RECORDED, ["summed time to first token"]),
        ((9, 0.9), (10, 1.0), "x, 1 agent", RECORDED, []),
    ],
)
def test_a_claim_is_missed_where_it_is(
    ours: tuple[float, float], theirs: tuple[float, float], case: str, workload: str, missed: list[str]
) -> None:
    found = results(ours, theirs, case=case, workload=workload)
    assert [each.claim for each in verdicts(found) if not each.is_met] == missed
    said = list(lines(found))
    assert len(said) == len(missed) + 1
    assert said[-1].endswith("claims hold")


def test_tables_show_every_engine_and_where_one_did_not_take_part() -> None:
    found = results((1, 0.25), (2, 1.5), case="append", workload=peers_report.LONGEST_HEADER)
    found["tiny hybrid"][peers_report.LONGEST_HEADER]["append"][BINDING] = {**engine(1, 0.1), "requests": 0}
    table = "\n".join(peers_report.short(found))
    assert "| append | 1 | 2 | 2 | - | 250 ms | 1.5 s | 1.5 s | - | - |" in table


def test_a_fit_finds_a_line_and_a_power() -> None:
    xs = [1, 2, 4, 8]
    line = growth.fit(xs, [3 + 2 * x for x in xs])
    assert (round(line["at_zero"], 9), round(line["slope"], 9), round(line["r_squared"], 9)) == (3, 2, 1)
    assert math.isclose(growth.fit(xs, [5 * x**0.5 for x in xs])["exponent"], 0.5)


def test_readme_and_results_agree() -> None:
    for path, text in report.wanted().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m bench.report"
