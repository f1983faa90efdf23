"""Displays of runs and evaluations: live progress on the terminal, and reports."""
