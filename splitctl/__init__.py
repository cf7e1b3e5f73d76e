"""Switches a running llama.cpp session from one split mode to another."""
