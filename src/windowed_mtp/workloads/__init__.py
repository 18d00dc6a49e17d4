"""Prompts to measure with: seeded, deterministic, and made from what every machine has."""
