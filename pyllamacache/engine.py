"""`Engine`: slots over one model, and every way to send them a request. Safe to use from any thread."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast, overload

from .cache import Cache
from .chat.render import Renderer
from .chat.reply import TokenTexts
from .chat.service import ChatService
from .config import CacheConfig, EngineSettings, Layout, resolve_flash_attention
from .errors import (
    CacheCorruptError,
    ClosedError,
    ConfigError,
    ForkedError,
    ModelUnsupportedError,
    UnknownOptionError,
)
from .model import Model
from .native.chat import NativeTemplates
from .native.context import NativeContext
from .native.library import devices
from .native.library import info as library_info
from .observe.metrics import Metrics
from .observe.progress import is_wanted
from .request import RequestId, SlotId
from .scheduler.admit import forecast
from .scheduler.disk import DiskTier
from .scheduler.handle import ChunkStream, Handle
from .scheduler.inbox import Outbox, Submission
from .scheduler.loop import Scheduler
from .scheduler.slot_files import idle_slot, kind_of, put_checkpoints, put_state
from .scheduler.state import SchedulerState
from .slot import Slot, Slots
from .store import slotfile
from .store.disk import DiskStore
from .store.host import HostPool
from .store.machine import memory_bytes
from .text.options import PromptOptions, RequestOptions, build_request
from .text.spelling import Speller
from .text.transcripts import TextMatcher
from .text.validate import check_ids

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from .chat.options import ChatOptions, TemplateChoices
    from .chat.shapes import ChatChunk, ChatCompletion
    from .observe.metrics import Statistics
    from .prefix.index import Checkpoint
    from .request import Chunk, Completion, Ids, RenderedChat, Request, ReusePlan, Usage
    from .scheduler.slots import SlotInfo
    from .store.host import Block
    from .store.slotfile import Bytes
    from .text.options import PromptInput

STATE_FORMAT = 1
"""Raised when the bytes of a sequence's state change meaning; files of an equal number stay readable."""


def _shut_down(scheduler: Scheduler, pid: int) -> None:
    """The finalizer: at `close`, when the engine is collected, or at exit; never in a forked child."""
    if os.getpid() == pid:
        scheduler.stop()


class Engine:
    """A model's context with `n_slots` sequences, run by one thread of its own.

    Args:
        model: stays loaded while the engine lives.
        n_ctx: tokens one request may hold, prompt and reply; None: the trained length, at most 32768.
        n_slots: requests that run at once; each slot keeps what its last request left.
        kv_tokens: KV cells all slots share; None: `n_ctx`. In exact mode each slot has `n_ctx` of its own.
        n_batch: tokens of prompts computed per step while nothing is being generated, in whole `n_ubatch`. Cancelling
            and timeouts act between steps. None: 2048 on a device; on the CPU one `n_ubatch`, since more gains nothing.
        n_ubatch: tokens computed at once; while anything is being generated, a step prefills at most this many.
        n_threads: CPU threads; None: one for each physical core this process may use.
        type_k, type_v: types of the KV cache: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl.
        flash_attention: "auto", "on" or "off". "auto" is llama.cpp's choice, and off in exact mode on the CPU unless V
            is quantised or the context is very long. Off, every token pays for all KV cells in use, parked ones too;
            but on the CPU appends of less than 64 tokens to a long history are faster.
        adapters: LoRA files, as paths or (path, scale) pairs; part of what state is keyed by.
        exact: answer with reuse bit for bit as without; see the README for what that costs.
        offload_kqv: keep the KV cache on the device.
        rope_scaling: None, "none", "linear", "yarn" or "longrope"; needed to go beyond the trained length.
        chat_template: Jinja source in place of the model's own template; without either, ChatML.
        cache: what is kept beside the context; None: `CacheConfig()`.
        progress: a progress bar for prefills longer than two seconds; None: on a terminal or in a notebook.
    Raises:
        ConfigError, ContextTooLargeError, ModelUnsupportedError, ClosedError.
        CacheFileError, CacheMismatchError: the folder of the disk cache cannot be used.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int | None = None,
        n_slots: int = 4,
        kv_tokens: int | None = None,
        n_batch: int | None = None,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attention: str = "auto",
        adapters: Sequence[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]] = (),
        exact: bool = False,
        offload_kqv: bool = True,
        rope_scaling: str | None = None,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        chat_template: str | None = None,
        cache: CacheConfig | None = None,
        progress: bool | None = None,
    ) -> None:
        if not isinstance(model, Model):
            raise ConfigError("model", model, "a pyllamacache.Model")
        if not (cache is None or isinstance(cache, CacheConfig)):
            raise ConfigError("cache", cache, "a pyllamacache.CacheConfig")
        if not (chat_template is None or isinstance(chat_template, str)):
            raise ConfigError("chat_template", type(chat_template).__name__, "the source of a Jinja template, or None")
        on_cpu = model._n_gpu_layers == 0 or not any(device.is_gpu for device in devices())
        self._settings = EngineSettings.check(
            on_cpu=on_cpu,
            n_ctx_train=model.n_ctx_train,
            n_ctx=n_ctx,
            n_slots=n_slots,
            kv_tokens=kv_tokens,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            type_k=type_k,
            type_v=type_v,
            flash_attention=flash_attention,
            adapters=adapters,
            exact=exact,
            offload_kqv=offload_kqv,
            rope_scaling=rope_scaling,
            rope_freq_base=rope_freq_base,
            rope_freq_scale=rope_freq_scale,
        )
        self._settings = replace(
            self._settings,
            flash_attention=resolve_flash_attention(
                flash_attention,
                on_cpu=on_cpu,
                exact=exact,
                type_v=type_v,
                n_head=model._native.n_head,
                n_ubatch=self._settings.n_ubatch,
                kv_tokens=self._settings.kv_tokens,
            ),
        )
        self._model = model
        self._chat_template = chat_template
        self._chat_service: ChatService | None = None
        self._chat_renderer: Renderer | None = None
        self._native = model._native
        self._what = f"engine of {model.path.name}"
        self._pid = os.getpid()
        self._shows_progress = is_wanted(progress)
        self._request_ids = itertools.count(1)
        self._layout: Layout | None = None
        context = NativeContext(self._native, self._settings)
        self._traits = context.traits
        self._metrics = Metrics(self._traits.kv_tokens if self._traits.memory.has_cells else 0)
        budget = (cache or CacheConfig()).resolve(memory_bytes())
        self._pool = HostPool(budget.host_bytes)
        native = self._native
        self._state = SchedulerState(
            context, self._metrics, time.monotonic, native.piece, self._pool, budget, native.control_text
        )
        speller = Speller(self._native.tokenize, self._native.piece, self._native.control_text)
        self._texts = TextMatcher(self._state.transcripts, self._native.tokenize, speller)
        self._scheduler = Scheduler(self._state, self._what)
        if self._settings.adapters:
            self._layout = self._read_layout()  # now: the files may be replaced later
        self._store: DiskStore | None = None
        self._disk_dir: str | None = None
        if cache is not None and cache.disk_dir is not None:
            self._open_disk(cache)
        self._scheduler.start()
        self._finalizer = weakref.finalize(self, _shut_down, self._scheduler, self._pid)
        model._engines.add(self)

    def _open_disk(self, cache: CacheConfig) -> None:
        """Before the scheduler starts: what is stored is there for the first request."""
        layout = self.layout.to_dict()
        facts = {"fingerprint": self._model.fingerprint, **{name: str(value) for name, value in layout.items()}}
        scope = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        assert cache.disk_dir is not None
        store = self._store = DiskStore(cache.disk_dir, limit_bytes=cache.resolve_disk(), scope=scope, facts=facts)
        self._disk_dir = os.fspath(cache.disk_dir)
        tier = DiskTier(
            store, kind_of=kind_of, wall_clock=time.time, clock=time.monotonic, wake=self._scheduler.inbox.wake
        )
        tier.refresh()
        self._state.attach_disk(tier)

    # -- requests --

    def submit(self, prompt: PromptInput, **options: Unpack[RequestOptions]) -> Handle:
        """Send a request and return at once. `prompt` is text or token ids; options: `RequestOptions`.

        Raises:
            InvalidRequestError, UnknownOptionError, RequestTooLongError: nothing was sent.
            ClosedError, ForkedError.
        """
        return self._submit(prompt, options, keeps_chunks=True)

    def complete(self, prompt: PromptInput, **options: Unpack[RequestOptions]) -> Completion:
        """Send a request and wait for its answer. Ctrl-C cancels it. Raises what `submit` and `Handle.result` do."""
        return self._submit(prompt, options, keeps_chunks=False).result()

    def stream(self, prompt: PromptInput, **options: Unpack[RequestOptions]) -> Iterator[Chunk]:
        """Send a request and iterate over its reply. Leaving the loop early cancels it."""
        return ChunkStream(self._submit(prompt, options, keeps_chunks=True))

    async def acomplete(self, prompt: PromptInput, **options: Unpack[RequestOptions]) -> Completion:
        """`complete` for asyncio. A cancelled task cancels the request."""
        return await self._submit(prompt, options, keeps_chunks=False).wait()

    def astream(self, prompt: PromptInput, **options: Unpack[RequestOptions]) -> AsyncIterator[Chunk]:
        """`stream` for asyncio: `async for chunk in engine.astream(...)`. The request is sent at once."""
        return aiter(self._submit(prompt, options, keeps_chunks=True))

    def warm(self, prompt: PromptInput, **options: Unpack[RequestOptions]) -> Usage:
        """Prefill and keep, generate nothing. Takes the options that concern reuse, tokenizing and time.

        Memory that cannot be rewound is left one token short, so that the same prompt can be resumed (exact mode: at
        the last multiple of `n_ubatch`).
        """
        return self._submit(prompt, options, keeps_chunks=False, generate=False).result().usage

    def plan(self, prompt: PromptInput, **options: Unpack[RequestOptions]) -> ReusePlan:
        """What a request would reuse now, at what cost, from the code that would decide. Changes nothing.

        Raises what `submit` does.
        """
        request = self._request(prompt, options)
        return self._scheduler.inbox.call(lambda: forecast(self._state, request))

    # -- chat --

    @overload
    def chat(
        self, messages: Sequence[Any], *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletion: ...
    @overload
    def chat(
        self, messages: Sequence[Any], *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Iterator[ChatChunk]: ...
    def chat(
        self, messages: Sequence[Any], *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletion | Iterator[ChatChunk]:
        """Answer messages in OpenAI's shape; options: `ChatOptions`. With `stream`, an iterator of chunks.

        Checkpoints are taken where later prompts leave this one: after tools and system messages, before the last
        question and tool result, before what the template adds for the reply, and at `cache_control` marks. What
        messages say is never read as control tokens.

        Raises:
            InvalidRequestError, UnknownOptionError, RequestTooLongError: nothing was sent.
            ChatTemplateError: the template refuses the messages.
            What `Handle.result` does.
        """
        service = self._chat()
        if stream:
            return service.stream(self._send, messages, options)
        return service.complete(self._send, messages, options)

    async def achat(self, messages: Sequence[Any], **options: Unpack[ChatOptions]) -> ChatCompletion:
        """`chat` for asyncio. A cancelled task cancels the request."""
        return await self._chat().acomplete(self._send, messages, options)

    def achat_stream(self, messages: Sequence[Any], **options: Unpack[ChatOptions]) -> AsyncIterator[ChatChunk]:
        """`chat(stream=True)` for asyncio: `async for chunk in engine.achat_stream(...)`."""
        return self._chat().astream(self._send, messages, options)

    def render(
        self, messages: Sequence[Any], *, namespace: str = "", **choices: Unpack[TemplateChoices]
    ) -> RenderedChat:
        """Messages and tools as `chat` sends them: a prompt for `warm`, `plan`, `complete`, `cache.pin` and the others.

        `namespace` is the one whose replies it knows; the prompt can be sent to any.

        Raises InvalidRequestError, UnknownOptionError, ChatTemplateError.
        """
        return self._chat().render(messages, choices, namespace=namespace)

    def _send(self, prompt: RenderedChat, options: dict[str, Any]) -> Handle:
        return self.submit(prompt, **options)

    def _chat(self) -> ChatService:
        """Made when first asked for: reading a template takes a few milliseconds."""
        self._check_process()
        if self._chat_service is None:
            if not self._native.has_vocab:
                raise ModelUnsupportedError("chat", "the model has no vocabulary; send token ids, and read token ids")
            renderer = Renderer(NativeTemplates(self._native, self._chat_template))
            self._chat_renderer = renderer
            self._chat_service = ChatService(
                renderer,
                TokenTexts(self._native.piece, self._native.control_text),
                model=self._model.name,
                matches_texts=not self._traits.exact,
            )
        return self._chat_service

    def _prefix(self, prompt: PromptInput, options: PromptOptions) -> tuple[str, Ids]:
        """Namespace and ids. Raises InvalidRequestError, UnknownOptionError."""
        for name in options:
            if name not in PromptOptions.__annotations__:
                raise UnknownOptionError(name, PromptOptions.__annotations__)
        request = self._request(prompt, cast("RequestOptions", {**options, "max_tokens": 0}))
        return request.namespace, request.prompt.ids

    def _submit(
        self,
        prompt: PromptInput,
        options: RequestOptions,
        *,
        keeps_chunks: bool,
        generate: bool = True,
    ) -> Handle:
        submitted_s = time.monotonic()
        request = self._request(prompt, options, generate=generate)
        outbox = Outbox(keeps_chunks=keeps_chunks)
        self._scheduler.inbox.submit(Submission(request, outbox, submitted_s))
        return Handle(request, outbox, self, shows_progress=self._shows_progress)

    def _request(self, prompt: PromptInput, options: RequestOptions, *, generate: bool = True) -> Request:
        """Check and tokenize, on the caller's thread."""
        self._check_process()
        return build_request(
            prompt,
            options,
            request_id=RequestId(next(self._request_ids)),
            tokenize=self._native.tokenize,
            has_vocab=self._native.has_vocab,
            n_vocab=self._traits.n_vocab,
            n_slots=self._traits.n_slots,
            n_ctx=self._traits.n_ctx,
            generate=generate,
            texts=self._texts,
            matches_texts=not self._traits.exact,
        )

    # -- slots --

    @property
    def slots(self) -> Slots:
        """Views that keep the engine alive. Made anew each time, or the engine would be alive for its own sake."""
        return Slots(Slot(self, SlotId(i)) for i in range(self._traits.n_slots))

    @property
    def cache(self) -> Cache:
        """What is kept beside the slots. A view that keeps the engine alive."""
        return Cache(self)

    def _slot_info(self, slot_id: SlotId) -> SlotInfo:
        self._check_process()
        return self._scheduler.inbox.call(lambda: self._state.slot_info(slot_id))

    def _erase_slot(self, slot_id: SlotId) -> None:
        def erase() -> None:
            self._state.erase(idle_slot(self._state, slot_id, "erase"))

        self._check_process()
        self._scheduler.inbox.call(erase)

    def _save_slot(self, slot_id: SlotId, path: str | os.PathLike[str]) -> int:
        def take() -> slotfile.SlotRecord:
            slot = idle_slot(self._state, slot_id, "save")
            checkpoints = self._state.checkpoints
            state = self._state.backend.save_state(slot_id) if len(slot) else b""
            held.extend(checkpoints.held_by(slot))
            for node in held:
                checkpoints.hold(node)  # their bytes are written from where they lie
            checkpoints.held_for_files.update(held)
            stored = [
                slotfile.StoredCheckpoint(node.position, node.kind.value, checkpoints.data(node).data) for node in held
            ]
            return slotfile.SlotRecord(
                ids=slot.tokens.ids.copy(),
                state=state,
                exact_tokens=slot.exact_tokens,
                namespace=slot.namespace,
                fingerprint=fingerprint,
                layout=self.layout,
                n_ctx=self._traits.n_ctx,
                extras=slotfile.checkpoint_extras(stored, n_tokens=len(slot)),
            )

        def leave() -> None:
            for node in held:
                self._state.checkpoints.let_go(node)
            self._state.checkpoints.held_for_files.subtract(held)

        self._check_process()
        fingerprint = self._model.fingerprint
        held: list[Checkpoint] = []
        record = self._scheduler.inbox.call(take)
        try:
            return slotfile.write(path, record)
        finally:
            with suppress(ClosedError):
                self._scheduler.inbox.call(leave)

    def _restore_slot(self, slot_id: SlotId, path: str | os.PathLike[str]) -> int:
        blocks: dict[int, tuple[str, Block]] = {}
        is_intact = False

        def put() -> None:
            put_state(
                self._state,
                slot_id,
                ids=record.ids,
                data=record.state,
                exact_tokens=record.exact_tokens,
                namespace=record.namespace,
            )
            put_checkpoints(self._state, slot_id, blocks)

        def room_for(place: slotfile.CheckpointPlace) -> Bytes | None:
            nonlocal is_intact
            if not is_intact and not call(lambda: checkpoints.has_room_for(place.size_bytes)):
                self._require_intact(path)  # before anything is given up for it
                is_intact = True
            block = call(lambda: checkpoints.room_for(place.size_bytes, kind_of(place.kind)))
            if block is None:
                return None
            blocks[place.position] = (place.kind, block)
            return block.data

        def leave() -> None:
            for _, block in blocks.values():
                checkpoints.abandon(block)

        self._check_process()
        call, checkpoints = self._scheduler.inbox.call, self._state.checkpoints
        where, fingerprint = os.fspath(path), self._model.fingerprint
        n_ctx, layout = self._traits.n_ctx, self.layout
        call(lambda: idle_slot(self._state, slot_id, "restore"))
        try:
            record = slotfile.read(path, max_tokens=n_ctx, room_for=room_for)
            slotfile.check_fits(record, path=where, fingerprint=fingerprint, layout=layout, n_ctx=n_ctx)
            if record.n_tokens:
                check_ids(record.ids, self._traits.n_vocab, field="token_ids")
            call(put)
        finally:
            with suppress(ClosedError):
                call(leave)
        return record.n_tokens

    def _require_intact(self, path: str | os.PathLike[str]) -> None:
        """Raises what `slotfile.read` would, and reads the whole file for it."""
        header = slotfile.read_header(path, verify=True)
        slotfile.check_fits(
            header,
            path=path,
            fingerprint=self._model.fingerprint,
            layout=self.layout,
            n_ctx=self._traits.n_ctx,
        )
        if not header.intact:
            raise CacheCorruptError(os.fspath(path), "a checksum does not hold")

    # -- facts --

    @property
    def model(self) -> Model:
        return self._model

    @property
    def n_ctx(self) -> int:
        return self._traits.n_ctx

    @property
    def n_slots(self) -> int:
        return self._traits.n_slots

    @property
    def kv_tokens(self) -> int:
        """KV cells over all slots."""
        return self._traits.kv_tokens

    @property
    def n_batch(self) -> int:
        """As in use: llama.cpp and this library may have lowered what was asked for."""
        return self._traits.n_batch

    @property
    def n_ubatch(self) -> int:
        """As in use."""
        return self._traits.n_ubatch

    @property
    def n_threads(self) -> int:
        return self._settings.n_threads

    @property
    def exact(self) -> bool:
        return self._traits.exact

    @property
    def layout(self) -> Layout:
        """What stored state depends on besides the model."""
        if self._layout is None:
            self._layout = self._read_layout()
        return self._layout

    def _read_layout(self) -> Layout:
        settings, exact = self._settings, self._traits.exact
        compiled = library_info()
        quantised = settings.type_k not in ("f32", "f16", "bf16")
        # a LongRoPE model takes other factors when the context is longer than it was first trained with
        cells = -(-(self._traits.n_ctx if exact else settings.kv_tokens) // 256) * 256
        factors = "long" if cells > self._model._n_ctx_original else "short"
        rope = f"{settings.rope_scaling or 'model'},{settings.rope_freq_base!r},{settings.rope_freq_scale!r},{factors}"
        names = [device.name for device in devices()]
        return Layout(
            memory=self._traits.memory.value,
            exact=exact,
            type_k=settings.type_k,
            type_v=settings.type_v,
            v_transposed=settings.flash_attention == "off",
            n_ubatch=self._traits.n_ubatch if exact else 0,
            rope=rope,
            rotation=quantised and os.environ.get("LLAMA_ATTN_ROT_DISABLE", "0") in ("", "0"),
            adapters=self._model._adapters_digest(settings.adapters),
            backend=",".join(names) + (f":{self._model._n_gpu_layers}" if exact and len(names) > 1 else ""),
            n_threads=settings.n_threads if exact else 0,
            cpu=compiled.system_info if exact else "",
            source=compiled.source_digest if exact else "",
            state_format=STATE_FORMAT,
        )

    def statistics(self) -> Statistics:
        """Counts since the engine was made. Any thread; never waits for a step."""
        self._check_process()
        return self._metrics.snapshot()

    # -- end --

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(self._what)

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """End running requests with ClosedError, free the context, join the thread. Repeatable; any thread."""
        self._finalizer()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine cannot be copied or pickled: it owns a thread and native memory")

    def __enter__(self) -> Self:
        self._check_process()
        if self.is_closed:
            raise ClosedError(self._what)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.is_closed else ""
        return f"<Engine {self._model.name!r} n_ctx={self._traits.n_ctx} n_slots={self._traits.n_slots}{state}>"
