"""What a GGUF file says of its model: header, facts, layers, slices and chat template."""

from __future__ import annotations
