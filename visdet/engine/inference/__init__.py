"""Detectors for images and videos, and what they read and give."""
