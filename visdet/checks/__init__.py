"""Checks of what files, configs and models hold."""
