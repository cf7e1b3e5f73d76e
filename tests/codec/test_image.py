from __future__ import annotations

import numpy as np
import pytest

from statecodec import (
    AttentionSection,
    Columns,
    OpaqueSection,
    RecurrentSection,
    Rotation,
    Rows,
    SectionKind,
    StateImage,
    parse,
)
from tests.codec.cases import CASES
from tests.codec.synthetic import SIZES, Attention, Cell, cells, context


def first(image: StateImage) -> AttentionSection:
    section = image.sections[0]
    assert isinstance(section, AttentionSection)
    return section


def test_rows_are_views_on_the_buffer() -> None:
    """K and V of each layer are read-only arrays of the right shape, and nothing is copied."""
    buffer = bytearray(CASES["plain"].data)
    _, stream = next(first(parse(buffer)).filled())
    keys, values = stream.keys[1], stream.values[0]
    assert isinstance(values, Rows)
    assert keys.raw().shape == (3, 8)
    assert keys.values().shape == (3, 4)
    assert keys.values().dtype == np.float16
    assert values.n_values == 6
    for found in (keys.raw(), keys.values(), values.values()):
        assert not found.flags.writeable
        assert np.shares_memory(found, np.frombuffer(buffer, np.uint8))


def test_transposed_values_are_one_row_a_value() -> None:
    """With flash attention off V is value by value."""
    _, stream = next(first(parse(CASES["transposed f32"].data)).filled())
    assert stream.v_trans
    columns = stream.values[1]
    assert isinstance(columns, Columns)
    assert columns.element_bytes == 4
    assert columns.values().shape == (6, 3)
    assert columns.values().dtype == np.float32


def test_quantized_rows_have_no_plain_values() -> None:
    """A quantized row is looked at as bytes."""
    _, stream = next(first(parse(CASES["quantized"].data)).filled())
    assert stream.keys[1].raw().shape == (3, 68)
    assert stream.keys[1].n_values == 64
    assert stream.keys[1].floats().shape == (3, 64)
    with pytest.raises(TypeError, match="Q8_0"):
        stream.keys[1].values()


def test_every_type_is_seen_with_its_width() -> None:
    """Row sizes become numbers of values by the type's blocks."""
    _, stream = next(first(parse(CASES["every type"].data)).filled())
    assert [int(rows.kind) for rows in stream.keys] == list(SIZES)
    assert [rows.n_values for rows in stream.keys] == [2, 2, 2, 64, 64, 64, 64, 64, 64]


def test_empty_rows_have_no_values() -> None:
    """Recurrent rows of zero bytes exist and are empty."""
    section = parse(CASES["recurrent, empty rows"].data).sections[0]
    assert isinstance(section, RecurrentSection)
    assert section.layers[0].s.raw().size == 0
    assert section.layers[0].s.values().size == 0
    assert (section.n_layer, section.n_layers, section.n_cells) == (3, 2, 1)


def test_a_section_counts_over_its_streams() -> None:
    """Cells add up, layers are those of any stream."""
    section = first(parse(CASES["four streams"].data))
    assert (section.n_cells, section.n_layers, len(section.streams)) == (10, 2, 4)
    assert section.sequences()[3] == (4, 0, 3)
    assert section.positions().tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]


def test_a_section_without_cells_says_nothing_of_layers() -> None:
    """Nothing is written for a stream without cells."""
    section = first(parse(CASES["no cells"].data))
    assert (section.n_cells, section.n_layers, section.sequences()) == (0, None, {})
    assert len(section.positions()) == 0


def test_the_rotation_is_what_the_bytes_say() -> None:
    """None where the layout does not say, two block sizes where it does."""
    assert next(first(parse(CASES["plain"].data)).filled())[1].rotation is None
    assert next(first(parse(CASES["rotated"].data)).filled())[1].rotation == Rotation(64, 0)


def test_extra_records_have_names() -> None:
    """Eight bytes are places in an image, twelve hold the token too."""
    eight = next(first(parse(CASES["ext 8"].data)).filled())[1].cells.ext
    twelve = next(first(parse(CASES["ext 12"].data)).filled())[1].cells.ext
    assert eight is not None
    assert twelve is not None
    assert eight.dtype.names == ("x", "y")
    assert twelve["token"].tolist() == [2, 3, 4]


def test_a_second_history_belongs_to_its_layer() -> None:
    """Only the layers that have one carry a history."""
    section = parse(CASES["history"].data).sections[0]
    assert isinstance(section, RecurrentSection)
    assert [None if layer.history is None else layer.history.row_bytes for layer in section.layers] == [None, 20, None]
    assert section.positions().tolist() == [4]


def test_an_opaque_memory_is_carried_and_not_understood() -> None:
    """Its parts and sequences are unknown, its bytes whole."""
    image = parse(CASES["opaque"].data)
    section = image.sections[0]
    assert isinstance(section, OpaqueSection)
    assert (section.name, section.n_cells, section.n_layers, section.sequences()) == ("DSV4", None, None, {})
    assert section.kind is SectionKind.OPAQUE
    assert len(section.data) == 45
    assert image.is_opaque
    assert image.sequences() == {}


def test_spans_of_sections_are_put_together() -> None:
    """The largest section counts the cells; positions span all sections."""
    image = parse(CASES["window"].data)
    assert image.sections[1].sequences()[0] == (3, 3, 5)
    assert image.sequences()[0] == (6, 0, 5)


def test_cells_of_several_sequences_count_for_each() -> None:
    """A shared cell is a cell of every sequence that holds it."""
    found = first(parse(context(Attention(((Cell(0, (1, 4)), Cell(1, (4,))),))))).sequences()
    assert found == {1: (1, 0, 0), 4: (2, 0, 1)}


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer_can_be_read(wrap: type[bytes]) -> None:
    """The caller keeps the bytes in whatever it likes."""
    assert parse(wrap(context(Attention((cells(2),))))).sequences() == {0: (2, 0, 1)}
