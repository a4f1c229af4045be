"""Polylines of the map: how they are matched, decoded and learned."""
