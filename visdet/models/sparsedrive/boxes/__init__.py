"""Boxes in space: how they are coded, decoded, matched and learned."""
