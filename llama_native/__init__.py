"""Talks to a libllama through cffi; knows its calls, not what state bytes mean."""
