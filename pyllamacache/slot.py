"""`Slot`: one of an engine's sequences, to look at, save, restore and erase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .errors import ClosedError
from .observe import display, lines
from .text.validate import check_path

if TYPE_CHECKING:
    import os

    from .engine import Engine
    from .request import SlotId
    from .scheduler.slots import SlotInfo


class Slot:
    """A view of a slot; asking it asks the scheduler, between two steps. Any thread."""

    def __init__(self, engine: Engine, slot_id: SlotId) -> None:
        self._engine = engine
        self._id = slot_id

    def _info(self) -> SlotInfo:
        return self._engine._slot_info(self._id)

    @property
    def id(self) -> SlotId:
        return self._id

    @property
    def state(self) -> Literal["idle", "busy"]:
        return "busy" if self._info().is_busy else "idle"

    @property
    def n_tokens(self) -> int:
        return len(self._info().ids)

    @property
    def token_ids(self) -> list[int]:
        """What is in the KV cache, from position 0. A sampled token gets there when the next one is computed."""
        return list(self._info().ids.tolist())

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Ascending positions at which it has a checkpoint: where a prompt that leaves its content can resume."""
        return self._info().checkpoints

    @property
    def namespace(self) -> str:
        """The namespace its content belongs to; "" for an empty slot."""
        return self._info().namespace

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the slot to a file; returns its size in bytes.

        The file appears whole or not at all, readable by its owner only (0600): it holds what a transcript holds.
        Only taking the state is done on the scheduler's thread; other requests go on while the file is written.

        Raises:
            SlotBusyError: a request runs in it.
            CacheFileError: the operating system refused, or the target is a folder or a symbolic link.
        """
        return self._engine._save_slot(self._id, check_path(path))

    def restore(self, path: str | os.PathLike[str]) -> int:
        """Replace the slot's content by that of a file; returns the number of tokens restored.

        Any slot, another process and another number of slots will do; model, layout and exact mode must be the same.
        On any error the slot keeps what it held.

        Raises:
            SlotBusyError: a request runs in it.
            CacheFileError, CacheCorruptError, CacheMismatchError: the file cannot be used; the message says why.
            CellsExhaustedError: running requests leave too few KV cells.
        """
        return self._engine._restore_slot(self._id, check_path(path))

    def erase(self) -> None:
        """Forget the slot's content. Raises SlotBusyError."""
        self._engine._erase_slot(self._id)

    def _picture(self) -> display.SlotPicture:
        info = self._info()
        return display.SlotPicture(self._id, info.is_busy, info.namespace, len(info.ids), info.checkpoints)

    def __str__(self) -> str:
        return str(Slots([self]))

    def _repr_html_(self) -> str | None:
        return Slots([self])._repr_html_()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and (self._engine, self._id) == (other._engine, other._id)

    def __hash__(self) -> int:
        return hash((id(self._engine), self._id))

    def __repr__(self) -> str:
        return f"<Slot {self._id}>"


class Slots(tuple[Slot, ...]):
    """The slots of an engine: a tuple that draws itself, in a notebook or printed."""

    __slots__ = ()

    def __str__(self) -> str:
        try:
            return lines.slots([each._picture() for each in self], self[0]._engine.n_ctx) if self else "()"
        except ClosedError:
            return repr(self)

    def _repr_html_(self) -> str | None:
        """None, and so `repr`, once the engine is closed."""
        try:
            return display.slots([each._picture() for each in self], self[0]._engine.n_ctx) if self else None
        except ClosedError:
            return None
