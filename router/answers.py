"""From a checked request to the text of its answers: prompts become token ids, and tokens become text again.

Each answer is one sequence for the router; several to one prompt share its blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, cast

from router.openai import ParsedRequest, Usage
from router.requests import Generated, GenerateRequest, RequestTrace, RichGenerated, ServiceClass
from router.tokenizer import Detokenizer, Tokenizer
from router.told import Message, Piece, TokenText, Whole
from shared.errors import EngineError
from shared.hashing import TOKEN_SIZE_BYTES
from shared.types import FinishReason, RequestId, WorkerId


class Generate(Protocol):
    """Whatever computes answers: `Router.generate`."""

    def __call__(self, request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        """The request's tokens; the last item has `finish`. Fills in `trace`. Closing it early cancels the request."""
        ...


@dataclass(slots=True)
class Answer:
    """One answer under way. It is read once, by `pieces` or as a `whole`."""

    index: int
    request: GenerateRequest
    new_detokenizer: Callable[[], Detokenizer]
    token_text: Callable[[int], str]
    """Text of one token, for those that are told apart."""
    has_stop_strings: bool
    trace: RequestTrace = field(default_factory=RequestTrace)
    num_tokens: int = 0
    """Tokens of the answer, once it is whole."""

    def again(self, request: RequestId) -> Answer:
        """The same, to be read once more under another name."""
        renamed = replace(self.request, request=request)
        return Answer(self.index, renamed, self.new_detokenizer, self.token_text, self.has_stop_strings)

    def pieces(self, generate: Generate) -> AsyncGenerator[Piece, None]:
        """Text as it becomes certain; the last piece has `finish`. Closing it early cancels the request."""
        is_rich = self.request.sampling.tells_more
        return self._rich_pieces(generate) if is_rich else self._plain_pieces(generate)

    async def _plain_pieces(self, generate: Generate) -> AsyncGenerator[Piece, None]:
        detokenizer = self.new_detokenizer()
        is_over = False
        stream = cast("AsyncGenerator[Generated, None]", generate(self.request, self.trace))
        async with aclosing(stream):
            # Read to its end, since to close it before cancels what it does then.
            async for generated in stream:
                finish = generated.finish
                text = detokenizer.push(generated.token_ids, finish)
                if detokenizer.is_stopped:
                    finish = FinishReason.STOP
                if finish is FinishReason.ABORT:
                    break
                if finish is not None:
                    is_over = True
                    self.num_tokens = detokenizer.num_tokens
                    yield Piece(text, finish)
                    if detokenizer.is_stopped:
                        return
                elif text:
                    yield Piece(text, None)
        if not is_over:
            raise EngineError("the engine gave the request up")

    async def _rich_pieces(self, generate: Generate) -> AsyncGenerator[Piece, None]:
        """The same of an answer of which more is told than text, or whose text a worker reads."""
        sampling = self.request.sampling
        detokenizer = self.new_detokenizer() if sampling.reading is None else None
        is_over = is_stopped = False
        offset_chars = 0
        stream = cast("AsyncGenerator[Generated, None]", generate(self.request, self.trace))
        async with aclosing(stream):
            async for generated in stream:
                finish, text, num_before = generated.finish, "", self.num_tokens
                more = generated if isinstance(generated, RichGenerated) else RichGenerated(generated.token_ids)
                if detokenizer is None:
                    self.num_tokens += len(generated.token_ids)
                else:
                    text = detokenizer.push(generated.token_ids, finish)
                    self.num_tokens = detokenizer.num_tokens
                    is_stopped = detokenizer.is_stopped
                    finish = FinishReason.STOP if is_stopped else finish
                if finish is FinishReason.ABORT:
                    break
                logprobs = None
                if sampling.logprobs is not None:
                    logprobs = self._token_texts(more, self.num_tokens - num_before, offset_chars)
                    offset_chars += sum(len(token.text) for token in logprobs)
                *early, last = more.parts or (None,)
                for part in early:
                    yield Piece("", None, part=part)
                is_over = finish is not None
                if is_over or text or logprobs or last is not None:
                    yield Piece(text, finish, logprobs, last)
                if is_stopped:
                    return
        if not is_over:
            raise EngineError("the engine gave the request up")

    def _token_texts(self, generated: RichGenerated, num_tokens: int, offset_chars: int) -> list[TokenText]:
        """The first of the tokens, which are not behind a stop string, with their texts."""
        found: list[TokenText] = []
        for token_id, told in zip(generated.token_ids[:num_tokens], generated.logprobs, strict=False):
            texts = map(self.token_text, told.top_token_ids)
            top = tuple(zip(texts, told.top_logprobs, strict=True))
            found.append(TokenText(self.token_text(token_id), told.logprob, top, offset_chars))
            offset_chars += len(found[-1].text)
        return found

    async def whole(self, generate: Generate) -> Whole:
        """All of the text, and why it ended. Cancelling cancels the request."""
        sampling = self.request.sampling
        if self.has_stop_strings or sampling.tells_more:
            async with aclosing(self.pieces(generate)) as pieces:
                found = [piece async for piece in pieces]
            text, finish = "".join([piece.text for piece in found]), cast(FinishReason, found[-1].finish)
            logprobs = message = None
            if sampling.logprobs is not None:
                logprobs = [token for piece in found for token in piece.logprobs or ()]
            if sampling.reading is not None:
                message = Message.of([piece.part for piece in found if piece.part is not None])
                text = message.content
            return Whole(text, finish, logprobs, message)
        # Nobody looks at the text before its end, so that it is made in one go.
        token_ids: list[int] = []
        finish_so_far: FinishReason | None = None
        stream = cast("AsyncGenerator[Generated, None]", generate(self.request, self.trace))
        async with aclosing(stream):
            async for generated in stream:
                token_ids += generated.token_ids
                finish_so_far = generated.finish
        if finish_so_far is None or finish_so_far is FinishReason.ABORT:
            raise EngineError("the engine gave the request up")
        detokenizer = self.new_detokenizer()
        text = detokenizer.push(token_ids, finish_so_far)
        self.num_tokens = detokenizer.num_tokens
        return Whole(text, finish_so_far)


async def tokenise(parsed: ParsedRequest, tokenizer: Tokenizer, salt: str) -> list[bytes]:
    """Packed token ids of each prompt. Raises `InvalidRequest` for one that cannot be tokenised."""
    if parsed.messages is not None:
        return [await tokenizer.tokens_of(messages=parsed.messages, tools=parsed.tools, salt=salt)]
    return [await tokenizer.tokens_of(prompt=prompt, salt=salt) for prompt in parsed.prompts]


async def answers_to(
    parsed: ParsedRequest,
    tokenizer: Tokenizer,
    *,
    name: str,
    max_model_len_tokens: int,
    salt: str,
    tenant: str = "",
    service_class: ServiceClass = ServiceClass.INTERACTIVE,
    has_reasoning: bool = False,
    packed_prompt: bytes | None = None,
    worker: WorkerId | None = None,
    since_s: float | None = None,
) -> list[Answer]:
    """The answers that a request asks for, in the order of its prompts; requests are named after `name`.

    `has_reasoning`: whether workers tell a chat's reasoning from its content. `packed_prompt` are the tokens of its
    only prompt, where they are known. Its deadline counts from `since_s` on the loop's clock, or from now.

    Raises:
        InvalidRequest: a prompt cannot be tokenised.
        ContextTooLong: a prompt and its answer do not fit.
    """
    answers: list[Answer] = []
    deadline_at_s: float | None = None
    if parsed.deadline_s is not None:
        deadline_at_s = (asyncio.get_running_loop().time() if since_s is None else since_s) + parsed.deadline_s
    for packed in await tokenise(parsed, tokenizer, salt) if packed_prompt is None else [packed_prompt]:
        sampling = parsed.sampling(len(packed) // TOKEN_SIZE_BYTES, max_model_len_tokens, has_reasoning=has_reasoning)
        new_detokenizer = partial(
            tokenizer.detokenizer, packed, stop=parsed.stop, stop_token_ids=sampling.stop_token_ids
        )
        for number in range(parsed.num_choices):
            index = len(answers)
            request = GenerateRequest(
                RequestId(f"{name}-{index}" if index else name),
                packed,
                # As vLLM derives them, so that the first answer is that of a request with n = 1.
                sampling if sampling.seed is None or not number else replace(sampling, seed=sampling.seed + number),
                salt=salt,
                priority=parsed.priority,
                tenant=tenant,
                service_class=service_class,
                deadline_at_s=deadline_at_s,
                worker=worker,
            )
            answers.append(Answer(index, request, new_detokenizer, tokenizer.token_text, bool(parsed.stop)))
    return answers


def usage_of(answers: Sequence[Answer], num_choices: int) -> Usage:
    """Token counts of all answers together; a prompt counts once, whatever the number of answers to it."""
    prompts = answers[::num_choices]
    told = [answer.trace.cached_tokens for answer in prompts]
    return Usage(
        prompt_tokens=sum(answer.request.num_prompt_tokens for answer in prompts),
        completion_tokens=sum(answer.num_tokens for answer in answers),
        cached_tokens=None if None in told else sum(count for count in told if count is not None),
    )


async def all_wholes(answers: Sequence[Answer], generate: Generate) -> list[Whole]:
    """Every answer's text and end. The first error ends all of them and is raised."""
    if len(answers) == 1:
        return [await answers[0].whole(generate)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer.whole(generate)) for answer in answers]
    except ExceptionGroup as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


async def merged(answers: Sequence[Answer], generate: Generate) -> AsyncGenerator[list[tuple[Answer, Piece]], None]:
    """Pieces of all answers as they come, those that are there at the same time together.

    The first error ends all of them and is raised, after what came before it. Closing it early cancels all of them.
    """
    news: list[tuple[Answer, Piece]] = []
    arrived = asyncio.Event()

    async def read(answer: Answer) -> None:
        async with aclosing(answer.pieces(generate)) as pieces:
            async for piece in pieces:
                news.append((answer, piece))
                arrived.set()

    readers = [asyncio.create_task(read(answer)) for answer in answers]
    for reader in readers:
        reader.add_done_callback(lambda _: arrived.set())
    try:
        while True:
            failed = next((reader for reader in readers if reader.done() and reader.exception()), None)
            is_over = failed is not None or all(reader.done() for reader in readers)
            if news:
                batch, news[:] = list(news), []
                yield batch
            elif is_over:
                if failed is not None:
                    failed.result()
                return
            else:
                arrived.clear()
                await arrived.wait()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
