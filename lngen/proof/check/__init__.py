"""Checks: oracles, tolerances, and bits."""
