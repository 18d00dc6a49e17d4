"""Engines that decode with a windowed draft head."""
