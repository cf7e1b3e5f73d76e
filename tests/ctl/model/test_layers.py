"""What each layer keeps, from the metadata alone."""

from __future__ import annotations

import pytest

from splitctl.model.facts import Recurrence
from splitctl.model.layers import layers_of
from tests.ctl.model_facts import model_facts

_WINDOW = ("attention.sliding_window", 32)
_DENSE_THIRD = ("feed_forward_length", (0, 0, 64, 0))


@pytest.mark.parametrize(
    ("architecture", "metadata", "n_window", "windows"),
    [
        ("llama", (_WINDOW,), 0, "...."),
        ("gemma2", (_WINDOW,), 32, "w.w."),
        ("gemma2", (), 4096, "w.w."),
        ("gemma3", (), 0, "...."),
        ("gemma3", (_WINDOW, ("attention.sliding_window_pattern", 4)), 32, "www."),
        ("gemma3", (_WINDOW, ("attention.sliding_window_pattern", (False, True, True, False))), 32, ".ww."),
        ("gpt-oss", (_WINDOW,), 32, "w.w."),
        ("smallthinker", (_WINDOW,), 4096, ".www"),
        ("cohere2moe", (_WINDOW,), 32, ".www"),
        ("llama4", (), 8192, "www."),
        ("llama4", (("attention.sliding_window", 0),), 0, "...."),
        ("exaone4", (_WINDOW,), 0, "...."),
        ("phi3", (_WINDOW,), 0, "...."),
        ("mimo2", (_WINDOW,), 0, "...."),
        ("deepseek4", (_WINDOW, ("attention.sliding_window_pattern", 2)), 32, "wwww"),
    ],
)
def test_which_layers_look_back_a_window(
    architecture: str, metadata: tuple[tuple[str, object], ...], n_window: int, windows: str
) -> None:
    """The rule of the architecture, and what the metadata says about it."""
    found = layers_of(model_facts(architecture=architecture, metadata=metadata, n_swa=32))
    assert found.n_window == n_window
    assert "".join("w" if layer.is_window else "." for layer in found.each) == windows


def test_lfm2_has_a_window_in_all_its_attention_layers() -> None:
    """Its other layers are recurrent."""
    heads = (0, 2, 0, 2)
    facts = model_facts(architecture="lfm2", n_head_kv=heads, metadata=(_WINDOW,), recurrence=Recurrence(2, 8, 0))
    found = layers_of(facts).each
    assert [layer.is_window for layer in found] == [False, True, False, True]
    assert [layer.is_recurrent for layer in found] == [True, False, True, False]
    assert [layer.has_cache for layer in found] == [False, True, False, True]


@pytest.mark.parametrize(
    ("changes", "cached", "recurrent"),
    [
        ({}, "cccc", "...."),
        ({"architecture": "mamba"}, "....", "rrrr"),
        ({"architecture": "falcon-h1"}, "cccc", "rrrr"),
        ({"architecture": "jamba", "n_head_kv": (0, 0, 2, 0)}, "..c.", "rr.r"),
        ({"architecture": "qwen35", "metadata": (("full_attention_interval", 2),)}, ".c.c", "r.r."),
        (
            {"architecture": "nemotron_h", "n_head_kv": (0, 2, 0, 0), "metadata": (_DENSE_THIRD,)},
            ".c..",
            "r..r",
        ),
        ({"architecture": "bert"}, "....", "...."),
        ({"architecture": "dream"}, "....", "...."),
        ({"architecture": "gemma4", "metadata": (("attention.shared_kv_layers", 2),)}, "cc..", "...."),
        ({"architecture": "glm4moe", "metadata": (("nextn_predict_layers", 1),)}, "ccc.", "...."),
    ],
)  # fmt: skip
def test_which_layers_keep_rows_and_states(changes: dict[str, object], cached: str, recurrent: str) -> None:
    """Rows of keys and values, recurrent states, both or none."""
    found = layers_of(model_facts(**changes)).each
    assert "".join("c" if layer.has_cache else "." for layer in found) == cached
    assert "".join("r" if layer.is_recurrent else "." for layer in found) == recurrent


def test_a_window_may_have_heads_of_its_own() -> None:
    """Keys and values of window layers may be narrower."""
    facts = model_facts(
        architecture="gemma2",
        metadata=(_WINDOW, ("attention.key_length_swa", 32), ("attention.value_length_swa", 16)),
    )
    first, second = layers_of(facts).each[:2]
    assert (first.k_width, first.v_width) == (64, 32)
    assert (second.k_width, second.v_width) == (128, 128)


def test_latent_attention_keeps_keys_alone() -> None:
    """No values; and one architecture that names the widths does not use them."""
    widths = (("attention.key_length_mla", 192), ("attention.value_length_mla", 128))
    found = layers_of(model_facts(architecture="deepseek2", is_mla=True, metadata=widths)).each[0]
    assert (found.k_width, found.v_width) == (128, 0)
    assert layers_of(model_facts(architecture="plm", metadata=widths)).each[0].v_width == 128


def test_a_model_that_loops_has_a_layer_for_each_pass() -> None:
    """Its cache is as deep as it computes."""
    found = layers_of(model_facts(architecture="nanbeige", metadata=(("num_loops", 3),))).each
    assert [layer.index for layer in found] == list(range(12))
