"""The vocabulary of the tiny models: byte-level BPE over all 256 bytes, 48 merges and 16 special tokens.

Any text tokenizes and comes back byte for byte. The merges give most English text more than one spelling in tokens, so
appending to a text can change the tokens before the seam, as with a real tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

# fmt: off
MERGES = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c", "i t", "i s",
    "a n", "o r", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p", "o u", "Ġa n", "a l", "a r", "Ġt o", "Ġ m", "Ġo f",
    "Ġ in", "Ġ d", "Ġ h", "Ġan d", "i c", "Ġ i", "a s", "l e", "Ġ l", "Ġ is", "u s", "Ċ Ċ", "Ġ Ġ", "l l", "u n",
    "t i", "ti on",
)
# fmt: on

BOS, EOS, IM_START, IM_END, PAD = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
CONTROL = (BOS, EOS, IM_START, IM_END, PAD, *(f"<|reserved_{i}|>" for i in range(7)))
TEXT_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

NORMAL_TYPE, CONTROL_TYPE, USER_DEFINED_TYPE = 1, 3, 4

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def _byte_symbols() -> tuple[str, ...]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free code point from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


BYTE_SYMBOLS = _byte_symbols()


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Texts and types by token id, as they stand in the file."""

    texts: tuple[str, ...]
    types: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def id_of(self, text: str) -> int:
        return self.texts.index(text)

    @property
    def control_ids(self) -> tuple[int, ...]:
        return tuple(i for i, type_ in enumerate(self.types) if type_ == CONTROL_TYPE)

    @property
    def unreadable_ids(self) -> tuple[int, ...]:
        """Byte tokens that are not printable ASCII, space or newline: half of generated text if left alone."""
        readable = {*range(0x20, 0x7F), 0x0A}
        return tuple(byte for byte in range(256) if byte not in readable)


def _token_table() -> TokenTable:
    merged = tuple(merge.replace(" ", "") for merge in MERGES)
    texts = BYTE_SYMBOLS + merged + CONTROL + TEXT_TAGS
    normal = len(BYTE_SYMBOLS) + len(merged)
    types = (NORMAL_TYPE,) * normal + (CONTROL_TYPE,) * len(CONTROL) + (USER_DEFINED_TYPE,) * len(TEXT_TAGS)
    return TokenTable(texts, types)


TOKENS = _token_table()
"""Ids 0 to 255 are the bytes themselves, then merges, control tokens and tags: 320 in all."""


def bytes_of(token_ids: list[int]) -> bytes:
    """What the ids spell, control tokens left out: an oracle for detokenizing."""
    byte_of_symbol = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}
    spelled = bytearray()
    for token_id in token_ids:
        match TOKENS.types[token_id]:
            case 1:
                spelled += bytes(byte_of_symbol[symbol] for symbol in TOKENS.texts[token_id])
            case 4:
                spelled += TOKENS.texts[token_id].encode()
    return bytes(spelled)
