"""What a session writes about itself into a carry."""

from __future__ import annotations

from splitctl.carry.fingerprint import rope_settings
from tests.ctl.model_facts import model_facts


def test_rope_settings_are_names_and_texts_in_order() -> None:
    """Scalars go in under their short names, sorted; arrays are left to the header's checksum."""
    facts = model_facts(
        rope=(
            ("llama.rope.scaling.type", "yarn"),
            ("llama.rope.freq_base", 100000.0),
            ("llama.rope.dimension_sections", (16, 24, 24, 0)),
            ("llama.rope.dimension_count", 64),
        )
    )
    assert rope_settings(facts) == (("dimension_count", "64"), ("freq_base", "100000.0"), ("scaling.type", "yarn"))


def test_a_model_without_rope_has_no_settings() -> None:
    """Nothing is invented for a header that says nothing."""
    assert rope_settings(model_facts()) == ()
