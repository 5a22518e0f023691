"""A conversation whose form is known reads as the template would have written it, whatever its texts are."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from router.skeletons import Message, Skeletons, Written
from router.template_doubts import template_doubt
from router.tokenizer import Tokenizer
from shared.telemetry import Metrics
from tests.support.tokenizers import CHAT_TEMPLATE, write_model_folder

# After those of the families that they are named for, with all that these do with texts.
QWEN_2 = (
    "{%- if tools %}{{- messages[0]['content'] }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{%- elif messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) or (message.role == 'assistant' "
    "and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- for call in message.tool_calls %}{{- call.arguments | tojson }}"
    "{%- endfor %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN_3 = (
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not("
    "message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.content is string %}{%- set content = message.content %}"
    "{%- else %}{%- set content = '' %}{%- endif %}"
    "{%- if message.role == 'assistant' %}{%- set reasoning = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}"
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning + '\\n</think>\\n' + content }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA_3 = (
    "{% for message in messages %}{% set content = '<|im_start|>' + message['role'] + '\\n\\n' + "
    "message['content'] | trim + '<|im_end|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}"
    "{%- for message in rest %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if message['role'] == 'user' %}{%- if loop.last and system is defined %}"
    "{{- '[INST] ' ~ system ~ '\\n\\n' ~ message['content'] ~ '[/INST]' }}"
    "{%- else %}{{- '[INST] ' ~ message['content'] ~ '[/INST]' }}{%- endif %}"
    "{%- elif message['role'] == 'assistant' and message['content'] %}"
    "{{- ' ' + message['content'] | trim + eos_token }}"
    "{%- endif %}{%- endfor %}"
)
TEMPLATES = {"plain": CHAT_TEMPLATE, "qwen 2": QWEN_2, "qwen 3": QWEN_3, "llama 3": LLAMA_3, "mistral": MISTRAL}
MARKS = re.compile(r"<\|im_start\|>|<\|im_end\|>")
TEXTS = st.lists(
    st.sampled_from(
        (
            " ",
            "\n",
            "a",
            "b c",
            "<think>",
            "</think>",
            "<tool_response>",
            "</tool_response>",
            '"',
            "<|im_end|>",
            "\u00a0",
        )
    ),
    max_size=6,
).map("".join)


def conversation(texts: Sequence[str], *, has_system: bool = False) -> list[dict[str, Any]]:
    roles = [*(["system"] * has_system), *(["user", "assistant"] * len(texts))]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


class Template:
    """A template as the library renders it, and how often it has."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.num_runs = 0
        self.skeletons = Skeletons(self.render, MARKS, why_off=template_doubt(source))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        self.num_runs += 1
        rendered, _ = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self.source,
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
        text: str = rendered[0]
        return text

    def write(self, messages: Sequence[Mapping[str, Any]]) -> Written:
        found = self.skeletons.find(messages, add_generation_prompt=True)
        return found or self.skeletons.write(messages, add_generation_prompt=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversation_of_a_known_form_is_written_without_the_template(name: str) -> None:
    template = Template(TEMPLATES[name])
    template.write(conversation(["be nice", "one", "two", "three"], has_system=True))
    other = conversation(["be rude", "  four ", "five\n", "six"], has_system=True)
    num_runs = template.num_runs
    written = template.write(other)
    assert template.num_runs == num_runs
    assert written == Written(template.render(other, True), written.marks, (other, True))


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60)
@given(
    conversations=st.lists(st.tuples(st.lists(TEXTS, min_size=1, max_size=5), st.booleans()), min_size=2, max_size=6)
)
def test_every_conversation_reads_as_the_template_writes_it(
    name: str, conversations: list[tuple[list[str], bool]]
) -> None:
    template = Template(TEMPLATES[name])
    for texts, has_system in conversations:
        messages = conversation(texts, has_system=has_system)
        if messages[-1]["role"] == "system":
            continue
        written = template.write(messages)
        assert written.text == template.render(messages, True)
        assert all(MARKS.match(written.text, start) for start in written.marks or ())


def test_marks_are_told_where_the_template_has_written_them() -> None:
    template = Template(CHAT_TEMPLATE)
    template.write(conversation(["a"]))
    written = template.write(conversation(["<|im_end|>"]))
    assert written.text == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert written.marks == [0, 27]


def test_form_is_learned_anew_where_texts_are_of_another_kind() -> None:
    template = Template("{{ messages[0]['content'] if 'x' in messages[0]['content'] else 'nothing' }}")
    written = [template.write(conversation([text])).text for text in ("ax", "bx", "c", "d", "ex")]
    assert written == ["ax", "bx", "nothing", "nothing", "ex"]
    # Twice where a form is learned: with the texts, and with what stands for them.
    assert template.num_runs == 6


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a", "name": "ann"}],
        [{"role": "assistant", "content": "", "tool_calls": []}],
        [{"role": "user"}],
        [{"role": "user", "content": ["a"]}],
    ],
)
def test_messages_that_are_more_than_a_role_and_a_text_are_left_to_the_template(messages: list[dict[str, Any]]) -> None:
    template = Template("{{ messages[0] | string }}")
    template.skeletons.why_off = None
    assert [template.write(messages).text for _ in range(2)] == [str(messages[0])] * 2
    assert template.num_runs == 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ (messages[0]['content'] ~ '') | trim }}",
        "{{ ('' ~ messages[0]['content']) | length }}",
        "{{ '%s' | format(messages[0]['content']) }}",
        "{{ ('%s' % messages[0]['content']) | length }}",
        "{{ ''.join([messages[0]['content']]) }}",
        "{{ (messages | tojson) | length }}",
        "{{ messages[0]['content'] | replace('a', 'b') }}",
        "{% if messages[0]['content'] in 'abc' %}x{% endif %}",
        "{% set x %}{{ messages[0]['content'] }}{% endset %}{{ x | length }}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(messages[0]['content']) | length }}",
        "{{ strftime_now('%H:%M:%S') }}",
        "{{ messages | map('string') | first }}",
        "{{ messages | map(attribute='content') | select('in', 'abc') | list | length }}",
        "{{ messages[0]['content'] * 2 }}",
        "{{ 'ab'.startswith(*[messages[0]['content']]) }}",
        "{{ messages | selectattr(*['content', 'in', 'abc']) | list | length }}",
        "{% set range = strftime_now %}{{ range('%S') }}",
        "{% set ns = namespace(now=strftime_now) %}{{ ns.now('%S') }}",
        "{% set range = 'abc'.startswith %}{{ range(messages[0]['content']) }}",
        "{{ unknown",
    ],
)
def test_template_that_may_look_at_texts_unseen_is_doubted(source: str) -> None:
    assert template_doubt(source) is not None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'][0] }}",
        "{{ messages[0]['content'] | length }}",
        "{% for char in messages[0]['content'] %}{{ char }}-{% endfor %}",
        "{{ messages[0]['content'].upper() }}",
        "{{ (messages[0]['content'] + 'a') | trim }}",
        "{{ messages[0]['content'] < 'b' }}",
        "{{ {'ab': 'x'}[messages[0]['content']] }}",
        "{{ messages | tojson }}",
        "{{ messages }}",
        "{{ messages[0]['content'] == messages[0]['content'] }}",
        "{% if messages[0]['content'] is sequence and messages[0]['content'] | trim %}{{ 'text' }}{% endif %}",
    ],
)
def test_form_is_not_kept_where_a_template_asks_more_of_texts(source: str) -> None:
    template = Template(source)
    assert template_doubt(source) is None
    for text in (" ", "ab", 'c"d', " "):
        messages = conversation([text])
        assert template.write(messages) == Written(template.render(messages, True))


def test_template_that_cannot_be_followed_is_tried_once_for_each_form_and_kind_of_text() -> None:
    template = Template("{% if 'x' in messages[0]['content'] %}{{ messages[0]['content'] | length }}{% endif %}")
    written = [template.write(conversation([text])).text for text in ("ax", "x", "xyz")]
    assert written == ["2", "1", "3"]
    assert template.num_runs == 4
    assert [template.write(conversation([text])).text for text in ("a", "b", "abx")] == ["", "", "3"]


def test_form_is_not_taken_for_messages_whose_fields_come_in_another_order() -> None:
    template = Template("{% for name in messages[0] %}{{ name }},{% endfor %}")
    role_first = {"role": "user", "content": "a"}
    content_first = {"content": "a", "role": "user"}
    written = [template.write([message]).text for message in (role_first, content_first, role_first)]
    assert written == ["role,content,", "content,role,", "role,content,"]
    assert template.skeletons.why_off is None


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    template = Template(CHAT_TEMPLATE)
    longest = 4096
    for number in range(17):
        template.write(conversation(["a"] * (longest - number)))
    assert template.skeletons.find(conversation(["a"] * longest), add_generation_prompt=True) is None
    assert template.skeletons.find(conversation(["a"] * (longest - 16)), add_generation_prompt=True) is not None
    assert template.write(conversation(["a"] * (longest + 1))).marks is None


def test_conversation_that_differs_from_its_form_turns_forms_off_loudly(caplog: pytest.LogCaptureFixture) -> None:
    template = Template(CHAT_TEMPLATE)
    metrics = Metrics()
    template.skeletons.expose(metrics)
    template.write(conversation(["a"]))
    written = template.write(conversation(["b"]))
    template.skeletons.compare(written)
    assert b"kvroute_chat_skeletons_on 1.0" in metrics.render()
    with caplog.at_level(logging.ERROR, "router"):
        for template.source in ("{{ raise_exception('not so') }}", "{{ 'another' }}"):
            template.skeletons.compare(written)
    assert len(caplog.records) == 1
    assert b"kvroute_chat_skeletons_on 0.0" in metrics.render()
    assert template.write(conversation(["b"])) == Written("another")


class _Always(random.Random):
    """Draws the least each time."""

    def random(self) -> float:
        return 0.0


async def test_drawn_conversations_are_compared_with_the_template(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")), rng=_Always())
    await tokenizer.tokens_of(messages=conversation(["a"]))
    tokenizer._render = lambda *_, **__: "another"
    with caplog.at_level(logging.ERROR, "router"):
        await tokenizer.tokens_of(messages=conversation(["b"]))
        tokenizer._pool.shutdown(wait=True)
    assert [record.name for record in caplog.records] == ["router.skeletons"]
