"""A workload to try things on: a small language model and text that every Python installation has."""
