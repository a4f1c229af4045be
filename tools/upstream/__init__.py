"""How check_upstream.py builds, trains and runs the models of each repository."""
