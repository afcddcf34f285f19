"""Optimizer rules: what one update of a slice of parameters does, on the CPU (numba) and as plain torch."""
