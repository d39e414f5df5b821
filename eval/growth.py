"""One process of `python -m eval.stream --growth`: see `eval.scoring.growth`."""

import tyro

from eval.scoring import growth
from eval.scoring.growth import measure, table

__all__ = ["measure", "table"]

if __name__ == "__main__":
    growth.main(tyro.cli(growth.Options, description=growth.__doc__))
