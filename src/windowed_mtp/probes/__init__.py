"""Measurements on an engine: each probe is one file with one result type."""
