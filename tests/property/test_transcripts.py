"""Whatever was said before and however it was split: kept ids and the rest spell the prompt, and the numbers hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pyllamacache.text.transcripts import TextMatcher, Transcripts, transcribe
from tests.fakes.words import BOS, CONTROLS, END, EOS, FIRST_CONTROL, WordVocab

TEXTS = st.lists(
    st.sampled_from(["ab", "c", " a", "b", ".", "\n", "\n\n", "🙂", "🙃", "é", "<|", "end", "|>", *CONTROLS]),
    max_size=8,
).map("".join)
VOCABS = st.sampled_from([WordVocab(), WordVocab(start=(BOS,))])


@st.composite
def replies(draw: st.DrawFn, vocab: WordVocab) -> list[int]:
    """Tokens of a random text in a random segmentation, perhaps with a control token, perhaps cut short."""
    data, at, ids = draw(TEXTS).encode(), 0, []
    while at < len(data):
        ids.append(draw(st.sampled_from(vocab.fitting(data, at))))
        at += len(vocab.piece(ids[-1]))
    if draw(st.booleans()):
        ids.insert(draw(st.integers(0, len(ids))), draw(st.sampled_from([END, EOS])))
    return ids[: draw(st.integers(0, len(ids)))]


def text_of(vocab: WordVocab, ids: list[int]) -> str:
    """What a caller sees of a reply."""
    return b"".join(map(vocab.piece, ids)).decode(errors="replace")


def controls(vocab: WordVocab, ids: list[int]) -> list[tuple[int, int]]:
    """Where in the text the control tokens stand that it spells."""
    found, offset = [], 0
    for token in ids[len(vocab.start) :]:
        piece = vocab.piece(token)
        if not piece:
            found.append((offset, token))
        offset += len(piece or vocab.control_text(token))
    return found


@given(st.data(), VOCABS, st.booleans())
def test_ids_spell_the_prompt_and_say_where_they_are_others(data: st.DataObject, vocab: WordVocab, parse: bool) -> None:
    transcripts = Transcripts(max_transcripts=data.draw(st.integers(1, 6)))
    matcher = TextMatcher(transcripts, vocab.tokenize, vocab.speller())
    known = ["ab"]
    for _ in range(data.draw(st.integers(1, 6))):
        before = data.draw(st.sampled_from(known))
        text = before[: data.draw(st.integers(0, len(before)))] if data.draw(st.booleans()) else before
        text += data.draw(TEXTS)
        prompt = matcher.prompt(text, "", True, parse, match=True)
        ids, plain = prompt.ids.tolist(), vocab.tokenize(text, True, parse).tolist()
        assert vocab.spelled(prompt.ids) == text.encode()
        differs = [at for at, pair in enumerate(zip(ids, plain, strict=False)) if pair[0] != pair[1]]
        assert prompt.retokenized_at == (differs[0] if differs else None)
        assert (ids == plain) == (not differs)
        assert controls(vocab, ids) == controls(vocab, plain)
        assert parse or max(ids[len(vocab.start) :], default=0) < FIRST_CONTROL
        assert prompt.spelling is not None
        assert prompt.spelling.ends.tolist() == [
            len(vocab.spelled(prompt.ids[:n])) if n >= len(vocab.start) else 0 for n in range(1, len(ids) + 1)
        ]
        assert [(ids[at]) for at in prompt.spelling.controls] == [token for _, token in controls(vocab, ids)]
        generated = data.draw(replies(vocab))
        transcript = transcribe("", prompt, generated, vocab.piece, vocab.control_text, frozenset({EOS}))
        assert transcript is not None
        assert transcript.spelling.ends[-1:].tolist() in ([], [len(transcript.spelling.data)])
        transcripts.add(transcript)
        known += [text, text + text_of(vocab, generated)]


@given(st.data(), VOCABS, TEXTS, TEXTS)
def test_a_reply_that_is_continued_keeps_all_its_ids(
    data: st.DataObject, vocab: WordVocab, text: str, more: str
) -> None:
    transcripts = Transcripts()
    matcher = TextMatcher(transcripts, vocab.tokenize, vocab.speller())
    prompt = matcher.prompt(text, "", True, False, match=True)
    generated = data.draw(replies(vocab))
    transcript = transcribe("", prompt, generated, vocab.piece, vocab.control_text, frozenset({EOS}))
    assert transcript is not None
    transcripts.add(transcript)
    n_reply = len(transcript.ids) - len(prompt.ids)
    reply = b"".join(map(vocab.piece, generated[:n_reply]))
    if not n_reply or "\ufffd" in reply.decode(errors="replace"):
        return
    again = matcher.prompt(text + reply.decode() + more, "", True, False, match=True)
    assert again.ids[: len(transcript.ids)].tolist() == transcript.ids.tolist()
