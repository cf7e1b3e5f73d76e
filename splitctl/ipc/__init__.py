"""What the supervisor and a worker say to each other, and starting and ending a worker."""

from __future__ import annotations
