"""What draws itself: well-formed, escaped, without scripts, without text of prompts, with the right numbers in it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from pyllamacache import CacheConfig
from pyllamacache.chat.shapes import ChatCompletion, ChatMessage, ChatUsage, Choice, CompletionTokensDetails
from pyllamacache.observe import display, lines, markup
from pyllamacache.observe.metrics import Metrics
from pyllamacache.request import CacheReport, Completion, Reason, SlotId, Source, Timings, Usage
from tests.fakes.engine import until

NewEngine = Callable[..., Any]
EVIL = "<script>alert('x')</script>\"&\x1b[31m"
SECRET = "Ottilie keeps seven lighthouses near the harbour"


def parse(html: str) -> ET.Element:
    """Of what XML and HTML have in common; raises where a tag is left open or text is not escaped."""
    root = ET.fromstring(f"<div>{html.replace('&nbsp;', ' ')}</div>")
    assert not root.findall(".//script")
    assert not [each for node in root.iter() for each in node.attrib if each.startswith("on")]
    return root


def words(html: str) -> str:
    return re.sub(r"\s+", " ", " ".join(parse(html).itertext()))


def rects(html: str) -> list[tuple[float, float]]:
    """Start and width of each stretch of the first bar, in percent."""
    svg = next(parse(html).iter("svg"))
    return [(float(each.attrib["x"][:-1]), float(each.attrib["width"][:-1])) for each in list(svg.iter("rect"))[1:]]


def answer(reason: Reason = Reason.DIVERGED, source: Source = Source.SLOT, **options: Any) -> Completion:
    defaults: dict[str, Any] = {"prompt": 1000, "cached": 600, "matched": 700, "position": 700, "text": SECRET}
    chosen = {**defaults, **options}
    return Completion(
        text=chosen["text"],
        token_ids=(1, 2),
        finish_reason="stop",
        usage=Usage(chosen["prompt"], chosen["cached"], 2, 0),
        cache=CacheReport(
            matched_tokens=chosen["matched"],
            resumed_tokens=chosen["cached"],
            prefilled_tokens=chosen["prompt"] - chosen["cached"],
            source=source,
            reason=reason,
            position=chosen["position"],
            retokenized_at=chosen.get("retokenized_at"),
        ),
        timings=Timings(0.001, 0.02, 0.5, chosen.get("ttft_s", 0.521), 0.1),
        slot_id=chosen.get("slot_id", SlotId(2)),
        prompt_token_ids=np.zeros(chosen["prompt"], dtype=np.int32),
    )


@pytest.fixture
def engine(new_engine: NewEngine, tmp_path: Any) -> Any:
    """Slots, parked prefixes, host memory, disk and checkpoints, in two namespaces."""
    config = CacheConfig(max_checkpoints=16, host_bytes="32MiB", disk_dir=tmp_path, disk_bytes="1GiB")
    engine = new_engine("hybrid", n_slots=2, cache=config)
    ids = np.random.default_rng(3).integers(0, 200, 900, dtype=np.int32)
    engine.complete(ids[:300], max_tokens=2, boundaries=[200])
    engine.complete(np.append(ids[:200], ids[300:400]), max_tokens=2)
    engine.complete(np.append(ids[:100], ids[400:600]), max_tokens=2)
    engine.complete(SECRET, max_tokens=2, namespace=EVIL)
    engine.cache.pin(ids[:100])
    return engine


# ---- results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", list(Reason))
@pytest.mark.parametrize("source", list(Source))
def test_every_result_can_be_drawn_and_says_why(reason: Reason, source: Source) -> None:
    drawn = answer(reason, source)
    assert reason.value in words(drawn._repr_html_())
    assert display.REASONS[reason] in words(drawn._repr_html_())
    assert reason.value in str(drawn)
    assert "\n" not in str(drawn)


def test_the_bar_is_the_prompt() -> None:
    assert rects(display.completion(answer())) == [(0.0, 60.0), (60.0, 10.0), (70.0, 30.0)]
    assert rects(display.completion(answer(cached=0, matched=0))) == [(0.0, 100.0)]
    assert rects(display.completion(answer(cached=999, matched=1000, reason=Reason.HIT))) == [(0.0, 99.9), (99.9, 0.15)]


def test_the_numbers_are_those_of_the_result() -> None:
    found = words(display.completion(answer()))
    assert "1,000 tokens sent, 600 reused (60%), 400 computed; 2 tokens generated" in found
    assert "at 700" in found
    assert "first token 521 ms" in found
    assert "slot 2" in found


def test_a_request_that_never_ran_can_be_drawn() -> None:
    nothing = answer(
        Reason.NOT_RUN, Source.NONE, prompt=0, cached=0, matched=0, position=0, ttft_s=math.nan, slot_id=None
    )
    assert "0 tokens sent" in words(nothing._repr_html_())
    assert "first token after -" in str(nothing)


def test_a_note_is_shown() -> None:
    assert "same text, other tokens" in words(display.completion(answer(retokenized_at=5)))


def test_the_text_of_a_reply_is_shown_only_where_it_is_asked_for() -> None:
    assert SECRET not in display.completion(answer())
    assert SECRET not in str(answer())
    assert SECRET in words(display.completion(answer(), with_text=True))


def test_the_text_of_a_reply_is_escaped() -> None:
    html = display.completion(answer(text="<script>alert(1)</script>"), with_text=True, title="<i>")
    parse(html)
    assert "<script>alert(1)</script>" in words(html)


def test_a_chat_completion_draws_its_completion() -> None:
    message = ChatMessage(SECRET)
    chat = ChatCompletion(
        id="chatcmpl-1",
        created=0,
        model=EVIL,
        choices=(Choice(message, "stop"),),
        usage=ChatUsage(answer().usage, CompletionTokensDetails(0)),
        completion=answer(),
    )
    assert chat._repr_html_() == answer()._repr_html_()
    assert SECRET not in chat._repr_html_()


# ---- an engine -------------------------------------------------------------------------------------------------


def until_at_rest(engine: Any) -> None:
    """Nothing is on its way to host memory or disk: what is looked at twice is the same."""
    looks: list[str] = []

    def is_same() -> bool:
        tiers = engine.statistics().tiers
        looks.append(f"{engine.cache.tree()}{tiers.spans}{tiers.disk_entries}{tiers.disk_waiting}")
        return not tiers.disk_waiting and len(looks) > 20 and len(set(looks[-20:])) == 1

    until(is_same)


def test_slots_draw_themselves(engine: Any) -> None:
    slots = engine.slots
    assert slots == tuple(slots)
    found = words(slots._repr_html_())
    assert "2 slots" in found
    for slot in slots:
        assert f"{slot.n_tokens:,}" in found
        assert f"slot {slot.id}" in str(slot)
        assert f"{slot.n_tokens:,} of 1,024 tokens" in str(slot)
        assert "Slot" in words(slot._repr_html_())
    assert len(str(slots).splitlines()) == 2


def test_the_tree_accounts_for_everything_that_is_held(engine: Any) -> None:
    until_at_rest(engine)
    tree = engine.cache.tree()
    nodes = list(tree.nodes())
    assert {name for name, _ in tree.namespaces} == {"", EVIL}
    by_slot = {slot.id: sum(node.n_tokens for node in nodes if slot.id in node.slots) for slot in engine.slots}
    assert by_slot == {slot.id: slot.n_tokens for slot in engine.slots}
    entries = {(each.namespace, each.position) for each in engine.cache.entries()}
    in_memory = [
        (name, each.position)
        for name, roots in tree.namespaces
        for root in roots
        for _, node in root.walk()
        for each in node.checkpoints
        if each.in_memory
    ]
    assert set(in_memory) == entries
    assert len(in_memory) == len(engine.cache)
    tiers = engine.statistics().tiers
    assert sum(node.host_bytes for node in nodes) == tiers.span_bytes > 0
    on_disk = sum(each.n_bytes for node in nodes for each in node.checkpoints if each.on_disk)
    assert sum(node.disk_bytes for node in nodes) + on_disk == tiers.disk_bytes > 0
    assert any(node.n_parked for node in nodes)
    assert any(node.is_pinned for node in nodes)


def test_the_cache_draws_its_tree_and_its_budgets(engine: Any) -> None:
    found = words(engine.cache._repr_html_())
    for there in ("held by", "slot 0", "parked", "pinned", "checkpoints", "host memory", "KV cells", "disk"):
        assert there in found
    assert "<script>" in found  # as text: `parse` has seen that no such tag is there
    assert "namespace (default)" in str(engine.cache)
    until_at_rest(engine)
    assert str(engine.cache) == str(engine.cache.tree())


def test_a_terminal_is_not_told_to_do_anything(engine: Any) -> None:
    for each in (engine.cache, engine.slots, engine.statistics()):
        assert "\x1b" not in str(each)


def test_statistics_draw_themselves(engine: Any) -> None:
    now = engine.statistics()
    found = words(now._repr_html_())
    assert f"{now.n_requests} requests answered" in found
    assert f"{now.prompt_tokens:,} tokens sent" in found
    for there in ("prefill", "restore", "capture", "stall", "host memory"):
        assert there in found
        assert there in str(now)
    assert f"({now.hit_rate:.0%})" in str(now)


def test_statistics_of_nothing_can_be_drawn() -> None:
    now = Metrics(0).snapshot()
    assert "0 requests answered" in words(now._repr_html_())
    assert "0 tokens: 0 reused (0%), 0 computed" in str(now)


def test_no_text_of_a_prompt_is_drawn_unless_it_is_asked_for(engine: Any) -> None:
    shown = [engine.cache, engine.cache.tree(), engine.slots, engine.slots[0], engine.statistics()]
    for each in shown:
        assert not any(word in each._repr_html_() + str(each) for word in ("Ottilie", "lighthouses", "harbour"))
    with_text = engine.cache.tree(text=True)
    assert SECRET[:10] in words(with_text._repr_html_())
    assert SECRET[:10] in str(with_text)


def test_an_engine_that_did_nothing_can_be_drawn(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    for each in (engine.slots, engine.cache, engine.cache.tree(), engine.statistics()):
        parse(each._repr_html_())
        assert str(each)
    assert "nothing is held" in str(engine.cache)


def test_after_the_end_of_the_engine_only_the_name_is_left(engine: Any) -> None:
    slots, cache = engine.slots, engine.cache
    engine.close()
    assert slots._repr_html_() is None
    assert slots[0]._repr_html_() is None
    assert cache._repr_html_() is None
    assert str(slots) == "(<Slot 0>, <Slot 1>)"
    assert str(cache) == repr(cache)


def test_a_large_tree_is_cut_and_says_so(new_engine: NewEngine) -> None:
    engine = new_engine("full", n_slots=1)
    root = engine.cache
    ids = np.random.default_rng(5).integers(0, 200, 20, dtype=np.int32)
    engine.complete(ids, max_tokens=1)
    ((name, (node,)),) = root.tree().namespaces
    many = tuple(replace(node, start=n, end=n + 1) for n in range(display.MAX_ROWS + 7))
    html = display.tree([(name, many)])
    assert "and 7 more" in words(html)
    assert len(list(parse(html).iter("svg"))) == display.MAX_ROWS


# ---- numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0"), (0.000021, "21 µs"), (0.0123, "12.3 ms"), (0.0999, "99.9 ms"), (0.521, "521 ms"),
        (1.234, "1.23 s"), (46.04, "46.0 s"), (4000.0, "4,000.0 s"), (math.nan, "-"),
    ],
)  # fmt: skip
def test_durations_as_people_read_them(seconds: float, expected: str) -> None:
    assert markup.duration(seconds) == expected


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0 B"), (1023, "1,023 B"), (5.6 * 2**20, "5.6 MiB"), (149.62 * 2**20, "150 MiB"),
        (2**40, "1,024 GiB"), (1536, "1.5 KiB"),
    ],
)  # fmt: skip
def test_sizes_as_people_read_them(n_bytes: float, expected: str) -> None:
    assert markup.size(n_bytes) == expected


def test_every_source_and_reason_is_explained() -> None:
    assert set(display.SOURCES) == set(Source)
    assert set(display.REASONS) == set(Reason)


def test_a_bar_stays_within_its_track() -> None:
    html = markup.bar([markup.Part(-5, 5, "red", "a"), markup.Part(5, 50, "red", "b")], 10)
    assert rects(html) == [(0.0, 50.0), (50.0, 50.0)]


def test_control_characters_are_spelled_out() -> None:
    assert markup.text("a\x1b[31m<\n") == "a\\x1b[31m&lt;\n"
    picture = display.SlotPicture(SlotId(0), True, "a\x1b\nb", 5, ())
    assert lines.slots([picture], 10).endswith("namespace a\\x1b\\nb")
