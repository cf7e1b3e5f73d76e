"""Moves a running session from one placement to another, or leaves it where it was and says why.

switcher.run -> machine.step -> command -> effects.perform -> event -> machine.step
"""

from __future__ import annotations
