"""Prompts that go on with the tokens of earlier requests: what is kept, where the rest begins, what is forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from pyllamacache.request import Prompt
from pyllamacache.text.transcripts import TextMatcher, Transcripts, transcribe
from tests.fakes.words import BOS, END, EOS, FIRST_CONTROL, PIECES, USER, WordVocab

STARTS = frozenset({END, EOS})


def token(text: str) -> int:
    return 256 + PIECES.index(text) if text in PIECES else ord(text)


def tokens(*texts: str) -> list[int]:
    return [token(text) for text in texts]


class Talk:
    """An engine's text side: prompts in, replies as the test wants them."""

    def __init__(self, vocab: WordVocab | None = None, *, parse_special: bool = True, **limits: int) -> None:
        self.vocab = vocab or WordVocab()
        self.parse_special = parse_special
        self.transcripts = Transcripts(**limits)
        self.matcher = TextMatcher(self.transcripts, self.vocab.tokenize, self.vocab.speller())

    def prompt(
        self, text: str, *, namespace: str = "", match: bool = True, parse_special: bool | None = None
    ) -> Prompt:
        parse = self.parse_special if parse_special is None else parse_special
        prompt = self.matcher.prompt(text, namespace, True, parse, match=match)
        assert prompt.text == text
        if prompt.spelling is not None:
            assert len(prompt.spelling.ends) == len(prompt.ids)
            assert prompt.spelling.data == text.encode()
        return prompt

    def reply(self, text: str, generated: list[int], *, namespace: str = "", match: bool = True) -> list[int]:
        """A request and its reply; all its ids."""
        prompt = self.prompt(text, namespace=namespace, match=match)
        transcript = transcribe(namespace, prompt, generated, self.vocab.piece, self.vocab.control_text, STARTS)
        assert transcript is not None
        self.transcripts.add(transcript)
        return [*prompt.ids.tolist(), *generated]

    def plain(self, text: str) -> list[int]:
        return list(self.vocab.tokenize(text, True, self.parse_special).tolist())


HEAD = "<|user|>abc<|end|>"
NEXT = "<|end|>\n\n<|user|>c<|end|>"


# ---- what is kept ----------------------------------------------------------------------------------------------


def test_a_reply_keeps_the_tokens_it_was_sampled_as() -> None:
    talk = Talk()
    ids = talk.reply(HEAD, tokens("a", "b", "c", ".", "\n", "\n", "b"))
    prompt = talk.prompt(HEAD + "abc.\n\nb" + NEXT)
    assert prompt.ids.tolist() == [*ids, END, *tokens("\n\n"), USER, *tokens("c"), END]
    assert prompt.retokenized_at == 3
    assert talk.plain(HEAD + "abc.\n\nb" + NEXT)[3] == token("abc")


def test_only_what_follows_the_last_control_token_is_tokenized() -> None:
    talk = Talk()
    talk.reply(HEAD * 50, tokens("a", "b"))
    talk.vocab.tokenized.clear()
    talk.prompt(HEAD * 50 + "ab" + NEXT)
    assert talk.vocab.tokenized == ["<|end|>ab" + NEXT]


def test_a_reply_of_plain_tokens_makes_no_difference() -> None:
    talk = Talk()
    talk.reply(HEAD, tokens("abc", ".\n\n"))
    prompt = talk.prompt(HEAD + "abc.\n\n" + NEXT)
    assert prompt.ids.tolist() == talk.plain(HEAD + "abc.\n\n" + NEXT)
    assert prompt.retokenized_at is None


def test_a_reply_is_kept_whole_even_where_a_plain_token_would_cross_its_end() -> None:
    talk = Talk(parse_special=False)
    ids = talk.reply("b b", tokens("c", "."))
    prompt = talk.prompt("b bc.\n\nab")
    assert prompt.ids.tolist() == [*ids, *tokens("\n\n", "ab")]
    assert talk.plain("b bc.\n\nab") == tokens("b", " ", "bc", ".\n\n", "ab")
    assert prompt.retokenized_at == 2


def test_the_end_of_a_reply_is_remembered_when_the_conversation_went_on() -> None:
    """The second prompt leaves the first behind its reply, in the middle of a plain token."""
    talk = Talk(parse_special=False)
    ids = talk.reply("b b", tokens("c", "."))
    talk.reply("b bc.\nb", tokens("b"))
    assert len(talk.transcripts) == 1
    prompt = talk.prompt("b bc.\n\nab")
    assert prompt.ids[: len(ids)].tolist() == ids


@pytest.mark.parametrize("order", [1, -1])
def test_the_end_of_a_reply_is_remembered_beside_a_longer_one(order: int) -> None:
    talk = Talk(parse_special=False)
    for generated in [tokens("c", "."), tokens("c", ".", "\n", "b")][::order]:
        talk.reply("b b", generated)
    assert len(talk.transcripts) == 1
    assert talk.prompt("b bc.\n\nab").ids.tolist() == tokens("b", " ", "b", "c", ".", "\n\n", "ab")


def test_the_first_difference_stays_where_it_was_over_turns() -> None:
    talk = Talk()
    text = HEAD
    for _ in range(4):
        ids = talk.reply(text, [*tokens("a", "b"), END])
        text += "ab" + NEXT
        prompt = talk.prompt(text)
        assert prompt.ids[: len(ids)].tolist() == ids
        assert prompt.retokenized_at == 3
        assert np.flatnonzero(prompt.ids[:4] != talk.plain(text)[:4])[0] == 3


def test_the_same_prompt_again_is_the_same_ids() -> None:
    talk = Talk()
    ids = talk.reply(HEAD, tokens("a", "b"))
    assert talk.prompt(HEAD).ids.tolist() == ids[:-2]
    longer = talk.reply(HEAD + "ab<|end|>", tokens("a", "b", "c"))
    again = talk.prompt(HEAD + "ab<|end|>")
    assert (again.ids.tolist(), again.retokenized_at) == (longer[:-3], 3)


def test_what_the_model_adds_before_a_text_is_kept_and_not_counted() -> None:
    talk = Talk(WordVocab(start=(BOS,)))
    ids = talk.reply(HEAD, tokens("a", "b"))
    prompt = talk.prompt(HEAD + "ab" + NEXT)
    assert ids[0] == BOS
    assert prompt.ids[: len(ids)].tolist() == ids
    assert prompt.retokenized_at == 4


# ---- where it ends ---------------------------------------------------------------------------------------------


def test_an_edited_reply_is_left_where_plain_tokens_end_too() -> None:
    talk = Talk()
    ids = talk.reply(HEAD, tokens("a", "b", ".", "a", "b", "b"))
    prompt = talk.prompt(HEAD + "ab.abc")
    assert prompt.ids.tolist() == [*ids[:-3], token("abc")]
    assert prompt.retokenized_at == 3


def test_an_edited_prompt_without_such_a_reply_is_plain() -> None:
    talk = Talk()
    talk.reply("<|user|>abc.ab", tokens("a"))
    for text in ("<|user|>abc.abc", "<|user|>abc", "<|user|>", "abc", "<|end|>"):
        prompt = talk.prompt(text)
        assert (prompt.ids.tolist(), prompt.retokenized_at) == (talk.plain(text), None)


def test_no_character_is_cut() -> None:
    """The reply spells a character byte by byte; the prompt has another one with the same first bytes."""
    talk = Talk()
    talk.reply(HEAD, [*tokens("a", "b"), *"🙂".encode()])
    whole = talk.prompt(HEAD + "ab🙂" + NEXT)
    assert whole.ids[3:9].tolist() == [*tokens("a", "b"), *"🙂".encode()]
    other = talk.prompt(HEAD + "ab🙃" + NEXT)
    assert other.ids[3:9].tolist() == [*tokens("a", "b"), *"🙃".encode()]
    assert other.spelling is not None
    assert other.spelling.ends[3:5].tolist() == [len(HEAD) + 1, len(HEAD) + 2]


def test_a_reply_that_ended_inside_a_character_is_left_before_it() -> None:
    talk = Talk()
    talk.reply(HEAD, [*tokens("a", "b"), *"🙂".encode()[:2]])
    for end in ("\ufffd", "🙂"):
        prompt = talk.prompt(HEAD + "ab" + end + NEXT)
        assert prompt.ids.tolist() == [
            *talk.plain(HEAD),
            *tokens("a", "b"),
            *talk.vocab.tokenize(end + NEXT, False, True).tolist(),
        ]


# ---- control tokens --------------------------------------------------------------------------------------------


def test_text_that_spells_a_control_token_stays_text() -> None:
    """A transcript with the control token at the same place; the prompt is not parsed for such."""
    talk = Talk()
    talk.reply(HEAD, tokens("a", "b"))
    for _ in range(2):
        prompt = talk.prompt((HEAD + "ab") * 100, parse_special=False)
        assert prompt.ids.max() < FIRST_CONTROL
        transcript = transcribe("", prompt, tokens("c"), talk.vocab.piece, talk.vocab.control_text, STARTS)
        assert transcript is not None
        talk.transcripts.add(transcript)
    template = talk.prompt(HEAD + "ab" + NEXT)
    assert template.ids[[0, 2]].tolist() == [USER, END]


def test_a_control_token_of_the_template_is_one_where_a_reply_spelled_it_as_text() -> None:
    talk = Talk()
    talk.reply(HEAD, tokens("a", "b", "<|", "end", "|>", "\n\n"))
    prompt = talk.prompt(HEAD + "ab" + NEXT)
    assert prompt.ids.tolist() == [*talk.plain(HEAD), *tokens("a", "b"), *talk.plain(NEXT)]


def test_text_of_a_reply_does_not_become_half_of_a_control_token() -> None:
    talk = Talk()
    talk.reply(HEAD, tokens("a", "b", "<|", "end"))
    prompt = talk.prompt(HEAD + "ab<|end|>b")
    assert prompt.ids.tolist() == [*talk.plain(HEAD), *tokens("a", "b"), END, token("b")]


@pytest.mark.parametrize("control", [END, EOS, USER])
def test_a_sampled_control_token_ends_what_is_kept(control: int) -> None:
    talk = Talk()
    talk.reply(HEAD, [*tokens("a", "b"), control, *tokens("a", "b")])
    prompt = talk.prompt(HEAD + "ababc")
    assert prompt.ids.tolist() == [*talk.plain(HEAD), *tokens("a", "b", "abc")]


# ---- vocabularies ----------------------------------------------------------------------------------------------


def test_a_model_that_adds_something_after_a_text_is_left_alone() -> None:
    talk = Talk(WordVocab(start=(BOS,), end=(EOS,)))
    prompt = talk.prompt(HEAD)
    assert prompt.spelling is None
    assert transcribe("", prompt, tokens("a"), talk.vocab.piece, talk.vocab.control_text, STARTS) is None


def test_a_space_that_the_vocabulary_adds_is_no_part_of_the_text() -> None:
    talk = Talk(WordVocab(start=(BOS,), adds_space=True))
    ids = talk.reply(HEAD, tokens(" a", "b", "c"))
    assert ids == [BOS, USER, *tokens(" ab", "c"), END, *tokens(" a", "b", "c")]
    prompt = talk.prompt(HEAD + " abc" + NEXT)
    assert prompt.ids[: len(ids)].tolist() == ids
    assert prompt.retokenized_at == 5


def test_a_token_that_is_only_the_added_space_belongs_to_what_follows() -> None:
    talk = Talk(WordVocab(adds_space=True))
    assert talk.reply(HEAD + "\n\n", tokens("b"))[4:] == tokens(" ", "\n\n", "b")
    assert talk.prompt(HEAD + "abc").ids.tolist() == talk.plain(HEAD + "abc")


def test_no_space_comes_into_a_text_that_goes_on_behind_a_reply() -> None:
    """The rest cannot be tokenized by itself there, so the plain tokens are taken from an earlier place on."""
    talk = Talk(WordVocab(adds_space=True), parse_special=False)
    talk.reply("b b", tokens("c", "."))
    prompt = talk.prompt("b bc.\n\nab")
    assert prompt.ids.tolist() == tokens(" ", "b", " ", "b", "c", ".\n\n", "ab")
    assert talk.plain("b bc.\n\nab") == tokens(" ", "b", " ", "bc", ".\n\n", "ab")
    assert prompt.retokenized_at == 3


# ---- the store -------------------------------------------------------------------------------------------------


def test_namespaces_and_ways_to_tokenize_keep_apart() -> None:
    talk = Talk()
    talk.reply(HEAD, tokens("a", "b"), namespace="one")
    text = HEAD + "ab" + NEXT
    assert talk.prompt(text, namespace="one").retokenized_at == 3
    assert talk.prompt(text, namespace="two").ids.tolist() == talk.plain(text)
    assert talk.prompt(text, namespace="one", match=False).ids.tolist() == talk.plain(text)
    assert talk.prompt(text, namespace="one", parse_special=False).retokenized_at is None


def test_a_namespace_can_be_cleared() -> None:
    talk = Talk()
    for namespace in ("one", "two", "three"):
        talk.reply(HEAD, tokens("a", "b"), namespace=namespace)
    talk.transcripts.clear("one")
    found = [talk.transcripts.match(HEAD.encode(), name, True, True) is not None for name in ("one", "two", "three")]
    assert found == [False, True, True]
    talk.transcripts.clear()
    assert len(talk.transcripts) == talk.transcripts.size_bytes == 0


def test_a_conversation_is_held_once() -> None:
    talk = Talk()
    text = HEAD
    for _ in range(5):
        talk.reply(text, tokens("a", "b"))
        text += "ab" + NEXT
    talk.reply(HEAD, [])
    assert len(talk.transcripts) == 1


def test_the_newest_of_equal_texts_is_used() -> None:
    talk = Talk()
    talk.reply(HEAD, tokens("a", "bc"))
    talk.reply(HEAD, tokens("ab", "c"))
    assert talk.prompt(HEAD + "abc" + NEXT).ids[3:5].tolist() == tokens("ab", "c")


def test_count_and_bytes_are_limits_and_the_oldest_goes_first() -> None:
    talk = Talk(max_transcripts=3)
    for letter in "abcde":
        talk.reply(letter * 9, tokens("b"))
    assert len(talk.transcripts) == 3
    assert talk.transcripts.match(b"b" * 9, "", True, True) is None
    assert talk.transcripts.match(b"c" * 9, "", True, True) is not None
    one = talk.transcripts.size_bytes // 3
    small = Talk(max_bytes=2 * one + 1)
    for letter in "abcde":
        small.reply(letter * 9, tokens("b"))
        assert small.transcripts.size_bytes <= 2 * one + 1
    assert len(small.transcripts) == 2
    small.reply("a" * 1000, tokens("b"))
    assert len(small.transcripts) == 2
