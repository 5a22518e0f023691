"""What a chat template writes around the texts of a conversation, kept, so that conversations of one form are rendered
once.

A template is a program. Here it runs with stand-ins for the texts, which can be joined and trimmed, and which note each
question about them: what it then writes holds for all texts of which it would have learned the same. Where a template
could do more with texts than stand-ins can see nothing is kept, and so is nothing of messages that are more than a role
and a text.
"""

from __future__ import annotations

import logging
import operator
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

from shared.telemetry import Readings

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Conversation = tuple[Sequence[Message], bool]
"""Messages, and whether the beginning of an answer comes behind them."""
Render = Callable[[Sequence[Message], bool], str]
"""The model's template."""
_Form = tuple[bool, tuple[str, ...]]
"""Whether an answer begins, and the roles of the messages before it."""

_MAX_MESSAGES = 1 << 16
"""Of all forms that are kept, at some 250 bytes each."""
_LARGEST_SHARE = 16
_NAME = "kvroute-text"
_STAND_IN = ' \n"<\\' + _NAME + '%d%s>&" \n'
"""Full of what filters change, so that what was made of it otherwise than by trimming is told from it."""
_WRITTEN_STAND_IN = re.compile(re.escape(_STAND_IN).replace("%d%s", "([0-9]+)([a-z])"))


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation in the model's template."""

    text: str
    marks: Sequence[int] | None = None
    """Where special tokens begin that the template has written; `None` where that is not known."""
    conversation: Conversation | None = None
    """What it was written of, where no template has run for it."""


class Skeletons:
    """Keeps what is written around texts by the roles that speak, the oldest out first.

    Safe to use from several threads at once.
    """

    def __init__(self, render: Render, marks: re.Pattern[str] | None, *, why_off: str | None) -> None:
        """`marks` are the special tokens at which a text may be cut wherever they stand; `why_off` says what is wrong
        with the template."""
        self._render = render
        self._marks = marks
        self._form_to_skeleton: dict[_Form, _Skeleton] = {}
        self._num_messages = 0
        self._lock = threading.Lock()
        self.why_off = why_off
        """Why nothing is kept; `None` while something is."""
        if why_off is not None:
            logger.debug("the chat template is run for each conversation: %s", why_off)

    def find(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Written | None:
        """The conversation as the template writes it, where its form is known."""
        form = self._form_of(messages, add_generation_prompt)
        skeleton = None if form is None else self._form_to_skeleton.get(form)
        if skeleton is None or not skeleton.is_followed:
            return None
        texts = [message["content"] for message in messages]
        return skeleton.filled(texts, (messages, add_generation_prompt)) if skeleton.fits(texts) else None

    def write(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Written:
        """Have the template write a conversation whose form is not known, and keep that. Modifies.

        Raises what rendering raises.
        """
        whole = self._render(messages, add_generation_prompt)
        form = self._form_of(messages, add_generation_prompt)
        if form is not None and not self._is_known(form, messages):
            self._learn(form, (messages, add_generation_prompt), whole)
        return Written(whole)

    def compare(self, written: Written) -> None:
        """Have the template write a text, too, and keep nothing any more, loudly, where it is another one. Modifies."""
        if written.conversation is None:
            return
        try:
            is_same = self._render(*written.conversation) == written.text
        except Exception:
            # It takes less than its forms tell.
            is_same = False
        if not is_same:
            self._turn_off()

    def expose(self, readings: Readings) -> None:
        """Have it told as a metric whether anything is kept."""
        readings.add_gauge(
            "kvroute_chat_skeletons_on",
            "1 while conversations of a known form are written without running the chat template; 0 where the template "
            "forbids it or a comparison failed.",
            lambda: self.why_off is None,
        )

    def _turn_off(self) -> None:
        if self.why_off is None:
            logger.error(
                "a conversation was rendered by its form to something else than by the chat template: all are rendered "
                "by the template, at full cost, from now on"
            )
        with self._lock:
            self.why_off = "a conversation was rendered to something else by its form"
            self._form_to_skeleton.clear()
            self._num_messages = 0

    def _form_of(self, messages: Sequence[Message], add_generation_prompt: bool) -> _Form | None:
        """What a skeleton is found by; `None` for a conversation of another kind."""
        if self.why_off is not None or len(messages) > _MAX_MESSAGES // _LARGEST_SHARE:
            return None
        try:
            # A template may write a message's fields in their order: stand-ins have them in this one.
            roles = [
                message["role"]
                for message in messages
                if type(message["content"]) is str and len(message) == 2 and next(iter(message)) == "role"
            ]
        except KeyError:
            return None
        return (add_generation_prompt, tuple(roles)) if len(roles) == len(messages) else None

    def _is_known(self, form: _Form, messages: Sequence[Message]) -> bool:
        """Whether a template would ask of stand-ins for these texts what it has asked already."""
        skeleton = self._form_to_skeleton.get(form)
        return skeleton is not None and skeleton.fits([message["content"] for message in messages])

    def _learn(self, form: _Form, conversation: Conversation, whole: str) -> None:
        """Keep the skeleton of a conversation that was written as `whole`. Modifies."""
        messages, add_generation_prompt = conversation
        texts = [message["content"] for message in messages]
        answers: list[_Answer] = []
        stand_ins = [
            {"role": message["role"], "content": _StandIn.of(number, message["content"], answers)}
            for number, message in enumerate(messages)
        ]
        try:
            skeleton = _skeleton_in(self._render(stand_ins, add_generation_prompt), answers, self._marks)
        except (_Untold, Exception):
            # The latter: whatever a template makes of what stands in.
            logger.debug("what the chat template writes depends on texts in ways that are not followed", exc_info=True)
            skeleton = None
        if skeleton is None:
            skeleton = _Skeleton((), (), (), tuple(answers), is_followed=False)
        elif skeleton.filled(texts, conversation).text != whole:
            self._turn_off()
            return
        with self._lock:
            if self.why_off is not None:
                return
            self._num_messages += len(messages) if form not in self._form_to_skeleton else 0
            self._form_to_skeleton[form] = skeleton
            while self._num_messages > _MAX_MESSAGES:
                oldest = next(iter(self._form_to_skeleton))
                self._num_messages -= len(oldest[1])
                del self._form_to_skeleton[oldest]


class _Untold(BaseException):
    """A template asks what a stand-in cannot tell.

    No `Exception`, since some of Jinja's tests take each of those for a "no", and the template would go on.
    """


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a template has learned of one text."""

    number: int
    is_trimmed: bool
    question: Callable[..., Any]
    arguments: tuple[Any, ...]
    answer: Any

    def holds(self, texts: Sequence[str]) -> bool:
        text = texts[self.number]
        found: bool = self.question(text.strip() if self.is_trimmed else text, *self.arguments) == self.answer
        return found


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """What is written around texts, and what of them it depends on."""

    parts: tuple[str, ...]
    """All that is written, with empty places for the texts."""
    places: tuple[tuple[int, int, bool], ...]
    """Where among the parts each text comes, its number, and whether it is trimmed."""
    marked: tuple[int, ...]
    """The parts that begin with a mark."""
    answers: tuple[_Answer, ...]
    is_followed: bool = True
    """Else the template has asked what stand-ins cannot tell, and so it would again after the same answers."""

    def fits(self, texts: Sequence[str]) -> bool:
        """Whether the template would have learned the same of these texts."""
        return all(answer.holds(texts) for answer in self.answers)

    def filled(self, texts: Sequence[str], conversation: Conversation) -> Written:
        parts = list(self.parts)
        for at, number, is_trimmed in self.places:
            parts[at] = texts[number].strip() if is_trimmed else texts[number]
        starts = list(accumulate(map(len, parts), initial=0))
        return Written("".join(parts), [starts[at] for at in self.marked], conversation)


def _skeleton_in(written: str, answers: Sequence[_Answer], marks: re.Pattern[str] | None) -> _Skeleton | None:
    """What stands around the stand-ins in a text; `None` where one of them is there in another form."""
    parts: list[str] = []
    places: list[tuple[int, int, bool]] = []
    marked: list[int] = []
    # What stands between stand-ins, and of each of those its number and kind.
    found = _WRITTEN_STAND_IN.split(written)
    for index in range(0, len(found), 3):
        around = found[index]
        if _NAME in around.casefold():
            return None
        mark = None if marks is None else marks.search(around)
        if mark is not None:
            parts.append(around[: mark.start()])
            marked.append(len(parts))
        parts.append(around if mark is None else around[mark.start() :])
        if index + 1 < len(found):
            places.append((len(parts), int(found[index + 1]), found[index + 2] == "t"))
            parts.append("")
    return _Skeleton(tuple(parts), tuple(places), tuple(marked), tuple(answers))


class _StandIn(str):
    """Stands for a text, or for something that it has been joined to, of which nothing can be told."""

    _number: int | None
    _is_trimmed: bool
    _text: str
    _answers: list[_Answer]

    @classmethod
    def of(cls, number: int, text: str, answers: list[_Answer], *, is_trimmed: bool = False) -> _StandIn:
        """What is learned of the text goes to `answers`."""
        made = cls(_STAND_IN % (number, "t" if is_trimmed else "w"))
        made._number, made._text, made._answers, made._is_trimmed = number, text, answers, is_trimmed
        return made

    @classmethod
    def _joined(cls, one: str, other: str) -> _StandIn:
        made = cls("".join((one, other)))
        made._number = None
        return made

    def __add__(self, other: str) -> _StandIn:
        return self._joined(self, other)

    def __radd__(self, other: str) -> _StandIn:
        return self._joined(other, self)

    def __str__(self) -> str:
        return self

    def strip(self, chars: str | None = None) -> _StandIn:
        if self._number is None or chars is not None:
            raise _Untold
        return self.of(self._number, self._text.strip(), self._answers, is_trimmed=True)

    def startswith(self, *arguments: Any) -> bool:
        return self._told(str.startswith, *arguments)

    def endswith(self, *arguments: Any) -> bool:
        return self._told(str.endswith, *arguments)

    def __contains__(self, other: object) -> bool:
        return self._told(operator.contains, other)

    def __eq__(self, other: object) -> bool:
        return self._told(operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self._told(bool)

    def __getattribute__(self, name: str) -> Any:
        if name in _UNTOLD_METHODS:
            raise _Untold
        return super().__getattribute__(name)

    def _told(self, question: Callable[..., Any], *arguments: Any) -> bool:
        if self._number is None or any(isinstance(argument, _StandIn) for argument in arguments):
            raise _Untold
        answer = bool(question(self._text, *arguments))
        self._answers.append(_Answer(self._number, self._is_trimmed, question, arguments, answer))
        return answer

    def _untold(self, *arguments: Any) -> NoReturn:
        raise _Untold

    __hash__ = __len__ = __iter__ = __getitem__ = __repr__ = __format__ = _untold
    __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _untold


_UNTOLD_METHODS = frozenset(
    name for name in dir(str) if not name.startswith("__") and name not in ("strip", "startswith", "endswith")
)
