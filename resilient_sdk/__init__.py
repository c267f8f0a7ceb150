"""DeepSpeed training that survives crashed ranks, hangs and lost processes, bit for bit."""

__version__ = "0.1.0"
