"""Knows the bytes of a llama.cpp state: bytes in, views or bytes out."""
