"""Every figure and table of the paper on the embedded world: `iwopd reproduce`."""

from iwopd.analysis.reproduce.items import ITEMS, Item
from iwopd.analysis.reproduce.runs import Runs

__all__ = ["ITEMS", "Item", "Runs"]
