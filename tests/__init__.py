"""The tests. This file lets `python -m tests.fuzz` find the folder, whatever other packages are installed."""
