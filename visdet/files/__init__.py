"""Files that users give and keep: images are opened with limits, and what is kept is written whole or not at all."""
