"""The `resilient` command."""

from resilient_sdk.cli.app import app, main

__all__ = ["app", "main"]
