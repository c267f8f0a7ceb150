"""Data order as state: what a rank draws next is a small value that can be saved and gone back to."""

from resilient_sdk.training.data.feed import EndOfData, Feed
from resilient_sdk.training.data.opening import open_feed

__all__ = ["EndOfData", "Feed", "open_feed"]
