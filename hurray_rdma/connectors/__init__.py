"""Connectors: the engine in the hands of inference engines, each in a package of its own that imports its engine.

Knows the blocking engine and pools; nothing below knows of it.
"""
