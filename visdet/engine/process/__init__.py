"""The process of a run: its group, its terminal, its folders, its signals."""
