"""A text for `verify`: prose with names, numbers and quotes, of the length that a comparison wants."""

from __future__ import annotations

PASSAGE = """\
A river does not run straight for long. Where the current is a little faster it takes sand from the bank, and
where it is slower it lets the sand fall again, so that every small bend grows into a larger one. After some
hundred years the bend is so wide that the water finds a shorter way across its neck, and what is left behind
is a lake in the shape of a horseshoe. Farmers who live there know the old course by the colour of the soil.

In 1852 an engineer called Marchetti measured 37 such bends between two towns that are only 11 kilometres
apart. He wrote to his brother: "I have walked 94 kilometres along the water and have met the same mill three
times." The miller, a patient woman, gave him bread on each occasion and asked whether he had lost something.
He answered that he was looking for the rule by which the river moves; she said that it moves because nobody
holds it.

There is a rule, however. The length of a bend is about ten times the width of the stream, whether it is a
brook in a meadow, the meltwater on a glacier or the Mississippi. Three things decide it: the speed of the
water, the slope of the valley and the size of the grains that it carries. If one of them changes, the river
slowly looks for another shape, and it may take longer than a human life until it has found one.
"""
