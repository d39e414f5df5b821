"""`from eval.growth import measure, table`: see `eval.scoring.growth`."""

from eval.scoring.growth import measure, table

__all__ = ["measure", "table"]
