"""Checkpoints: what they hold, and how a run is saved and resumed."""
