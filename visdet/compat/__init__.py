"""Bridges to other packages; nothing here is imported by the rest of visdet unless asked for."""
