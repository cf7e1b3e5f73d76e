from __future__ import annotations

import datetime as dt
import json

import pytest

from splitctl.model.chat import MAX_TEMPLATE_CHARS, render, without_bos
from splitctl.model.chat_messages import ChatTemplateFailed, messages_from

# ChatML as SmolLM2's file has it.
_CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_question_is_written_as_the_model_was_trained() -> None:
    """The template's default system message comes first, and the assistant's turn is opened."""
    text = render(_CHATML, messages_from("Hi <b> 'é'"))
    assert text == (
        "<|im_start|>system\nYou are SmolLM<|im_end|>\n<|im_start|>user\nHi <b> 'é'<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_message_replaces_the_default() -> None:
    """A system message is passed through, and the generation prompt can be left out."""
    text = render(
        _CHATML, messages_from("Hi", system="Be brief"), chat_template_kwargs={"add_generation_prompt": False}
    )
    assert text == "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{%- if tools %}tools{% endif %}{{ documents is none }}", "True"),
        ("{% for one in tools %}{{ one }}{% endfor %}{{ tools is defined }}{{ tools is not none }}", "FalseFalse"),
        ("{% if tools != none %}tools{% endif %}{{ tools | default('absent') }}", "absent"),
        ("{{ messages[0].content | tojson }}", "\"<a href='x'>é\""),
        ("{{ {'b': 1, 'a': [1, 2]} | tojson(indent=1) }}", json.dumps({"b": 1, "a": [1, 2]}, indent=1)),
        ("{% generation %}inside{% endgeneration %}", "inside"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2026"),
    ],
)
def test_the_conventions_of_templates_hold(template: str, expected: str) -> None:
    """What templates expect of their host is there: tokens, tojson, generation, loop controls, trimming, the date."""
    text = render(
        template,
        messages_from("<a href='x'>é"),
        **_ENDS,
        now=lambda: dt.datetime(2026, 7, 26, tzinfo=dt.UTC),
    )
    assert text == expected


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "it has none"),
        (" \n", "it has none"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "over the limit"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ raise_exception('\\ud800') }}", "?"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{{ cycler() }}", "RuntimeError"),
        ("{% for %}", "line 1"),
        ("{{ messages[5].content.x }}", "no element 5"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10 ** 9) | list }}", "too big"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 'x'.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_a_bad_template_is_one_known_error(template: str | None, why: str) -> None:
    """A missing, broken, refusing or hostile template raises ChatTemplateFailed, which says why and what to do."""
    with pytest.raises(ChatTemplateFailed) as caught:
        render(template, messages_from("Hi"))
    assert why.encode() in str(caught.value).encode()
    assert "--chat" in str(caught.value)


def test_a_first_token_is_not_doubled() -> None:
    """A leading BOS is taken off once, and only where it stands."""
    assert without_bos("<s><s>x", "<s>") == ("<s>x", True)
    assert without_bos("x<s>", "<s>") == ("x<s>", False)
    assert without_bos("x", "") == ("x", False)
