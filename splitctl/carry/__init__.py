"""What travels in a switch or to disk: state, tokens, logits and samplers, sealed with checksums."""

from __future__ import annotations
