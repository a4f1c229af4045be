"""Polylines of the map: how they are matched, learned and decoded."""
